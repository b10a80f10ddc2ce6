"""`stop` of a rendered script ends the Ray that `start` started, and no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.processes import start_time_of

# A first process, a child in a session of its own, and one without its environment but with a log
# open.
LEADER = """
setsid sleep 600 >&2 & echo $!
env -i sleep 600 3>"$DAPO_RAY/log" >&2 & echo $!
exec sleep 600 >&-
"""
NO_RAY = """#!/bin/bash
[ "$2" != ray.scripts.scripts ] && exec {} "$@"
"""


def _run(script: Path, verb: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DAPO_STATE": str(script.parent), "RAY_AUTH_TOKEN": "secret"}
    return subprocess.run(
        ["bash", str(script), verb], env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stop", "start"])
def test_processes_that_outlive_a_killed_first_process_are_ended_and_no_others(
    verb: str, tmp_path: Path
) -> None:
    python, folder, state = tmp_path / "python", tmp_path / "ray", tmp_path / "a-6379"
    python.write_text(NO_RAY.format(sys.executable))
    python.chmod(0o755)
    host = "{name: a, address: 127.0.0.1, interface: lo}"
    (tmp_path / "i.yaml").write_text(f"hosts: [{host}]\ndevices: 1\npython: {python}\n")
    rendered = CliRunner().invoke(app, ["cluster", "render", str(tmp_path / "i.yaml"), "--scripts"])
    (tmp_path / "a.sh").write_text(rendered.stdout)
    folder.mkdir()
    state.mkdir()
    environment = {**os.environ, "DAPO_RAY": str(folder)}
    with (
        subprocess.Popen(
            ["bash", "-c", LEADER],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as leader,
        (folder / "log").open("w") as log,
        subprocess.Popen(["sleep", "600"], stdin=log) as bystander,
    ):
        assert leader.stdout is not None
        left = [int(line) for line in leader.stdout]
        (state / "process").write_text(f"{leader.pid} {start_time_of(leader.pid)} {folder}\n")
        leader.kill()
        leader.wait()
        done, again = (_run(tmp_path / "a.sh", each) for each in (verb, "stop"))
        is_left_alone = bystander.poll() is None
        bystander.kill()
    assert "a: Ray has ended\n" in done.stdout, done
    assert ("stopping its remaining processes" in done.stdout) == (verb == "start")
    assert [start_time_of(pid) for pid in left] == [None, None]
    assert not folder.exists()
    assert is_left_alone
    state = (
        "Ray has ended" if verb == "start" else "this script has no Ray running"
    )  # the new one fails
    assert again.stdout == f"a: {state}\n"
