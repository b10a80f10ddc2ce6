"""A run records the variables that it sets for its children: compared with the environment of a
real child.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import chain
from tasks.runs.history import read_run
from tasks.runs.run import Run
from tests.recorded_runs import small_config

pytestmark = pytest.mark.timeout(600)  # on two busy cores

SCORER = """
import json, os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(f"{path}/{{os.getpid()}}.json", "w") as file:
        json.dump(dict(os.environ), file)
    return float(len(solution_str) % 2)
"""


def test_the_recorded_environment_equals_that_of_a_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "OMP_WAIT_POLICY",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")  # set by the user: it is kept and not recorded
    scorer, seen = tmp_path / "scorer.py", tmp_path / "seen"
    seen.mkdir()
    scorer.write_text(SCORER.format(path=seen))
    config = small_config(
        tmp_path / "store",
        f"custom_reward.path={scorer}",
        "model.recipe.num_steps=2",
        "train.total_steps=1",
        "train.num_ranks=1",
        "rollout.num_workers=1",
        "rollout.engine=vllm",
        "rollout.group_size=2",
        "train.train_prompts=4",
        "train.mini_prompts=4",
        "sampler.gen_prompts=4",
        "sampler.dynamic=false",
        "validation.every=0",
    )
    with Run.start(config) as run:
        data = chain.prepare_data.fn(run).result()
        model = chain.fetch_model.fn(run, data).result()
        training = chain.train_policy.fn(run, data, model).result()
    rows = json.loads((run.folder / "run.json").read_text())["environment"]
    assert rows == read_run(run.folder).environment
    had = json.loads(next(seen.iterdir()).read_text())
    given = {
        row["name"]: row["value"]
        for row in rows
        if row["children"] in ("Ray's workers", "rollout workers")
    }
    assert given["GLOO_SOCKET_IFNAME"] == "lo"
    assert given["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert {name: had[name] for name in given} == given
    assert not [row for row in rows if row["name"] == "RAY_COLOR_PREFIX"]
    [token] = [row for row in rows if row["name"] == "RAY_AUTH_TOKEN"]
    assert (token["value"], token["stages"]) == ("[redacted]", ["train_policy"])
    assert training.manifest()["environment"] == [
        {name: value for name, value in row.items() if name != "stages"}
        for row in rows
        if "train_policy" in row["stages"]
    ]
    with Run.start(
        config
    ) as cached:  # it starts no children; the record of the outputs' run is kept
        chain.fetch_model.fn(cached, chain.prepare_data.fn(cached).result())
        cached.take("train_policy")
    assert cached.stages["train_policy"].cached
    assert json.loads((cached.folder / "run.json").read_text())["environment"] == rows
