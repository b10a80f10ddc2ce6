"""What every flow of ours has beside Prefect's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow

from dapo_core.errors import ConfigError
from flows.dapo_full import dapo_full
from flows.dapo_nightly import dapo_nightly
from flows.single_stages import STAGE_FLOWS

ROOT = Path(__file__).resolve().parents[2]
# As a flow run's process, whose lines its worker reads through a pipe.
TALKS_TO_NOBODY = """
import logging, sys
import prefect.main
import flows.recipe_flow
sys.stdin.readline()
for number in range(3):
    logging.getLogger("prefect.flow_runs").warning("line %d", number)
    logging.getLogger("tasks").warning("line %d", number)
print("goes on", file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("flow", [dapo_full, dapo_nightly, *STAGE_FLOWS.values()], ids=lambda flow: flow.name)
def test_a_wrong_value_ends_the_flow_before_it_leaves_anything(flow: Flow[..., Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    refused = r"^train\.total_steps = '-1' is refused: input should be greater than or equal to 1$"
    with pytest.raises(ConfigError, match=refused):
        flow.fn(str(ROOT / "configs/arith_cpu.yaml"), (f"store.path={store}", "train.total_steps='-1'"))
    assert not store.exists()


@pytest.mark.slow
def test_a_flow_whose_worker_is_killed_goes_on_talking(tmp_path: Path) -> None:
    script = [sys.executable, "-c", TALKS_TO_NOBODY, str(tmp_path / "said")]
    process = subprocess.Popen(
        script, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    process.wait(60)
    assert (tmp_path / "said").read_text() == "goes on\n"
