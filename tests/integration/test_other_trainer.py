"""Another trainer as the training stage, from its start to the report: with a stand-in, since verl
needs a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_core.errors import CheckpointError, ConfigError
from flows.config import Config
from tasks.external.environment import TrainerMissing, trainer_versions
from tasks.external.launch import HELD_OUT_ROWS, TRAIN_ROWS
from tasks.external.training import LOG_FILE, train_with_other
from tasks.processes.child import ChildProcessFailed
from tasks.tracking.tracker import read_record
from tests.other_trainings import TRAIN, config_of, inputs, make_place, steps
from tests.stand_in_trainer import install, install_mindspeed

ROOT = Path(__file__).resolve().parents[2]
FAR = 240.0
pytestmark = pytest.mark.timeout(600)  # on two busy cores


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("other"))


def test_a_trainer_is_followed_and_its_last_checkpoint_returned(
    place: Path, tmp_path: Path
) -> None:
    config, files = (
        config_of(place, tmp_path, train={**TRAIN, "total_steps": 5}),
        inputs(place, tmp_path / "t"),
    )
    seen: dict[int, dict[str, float]] = {}
    lines: list[str] = []
    result = train_with_other(config, files, seen.__setitem__, lines.append)
    assert (result.step, result.path.name) == (5, "global_step_5")
    assert list(seen) == steps(files.output) == [1, 2, 3, 4, 5]
    # One right and one empty answer to the first row: 1 and -1 by the rendered reward file.
    assert (seen[1]["critic/score/mean"], seen[1]["critic/score/max"]) == (0.0, 1.0)
    assert seen[1]["response_length/mean"] == 9.0
    assert [line for line in lines if line.startswith("step:4 - ")]
    assert not any("TaskRunner" in line for line in lines)
    assert "Training Progress: 5/5" in lines
    # Only the last one: nothing needs step 2 or 4.
    assert [path.name for path in (files.output / "checkpoints").glob("global_step_*")] == [
        "global_step_5"
    ]
    assert {TRAIN_ROWS, HELD_OUT_ROWS, "command.sh", LOG_FILE, "reward_for_verl.py"} <= {
        path.name for path in files.folder.iterdir()
    }
    # A finished training starts nothing; a longer one resumes.
    before = (files.folder / LOG_FILE).read_text()
    assert train_with_other(config, files, seen.__setitem__) == result
    assert (files.folder / LOG_FILE).read_text() == before
    assert train_with_other(config_of(place, tmp_path), files).step == 6
    assert steps(files.output) == [1, 2, 3, 4, 5, 6]
    assert "Found checkpoint: global_step_5" in (files.folder / LOG_FILE).read_text()


def test_a_crash_shows_its_traceback_and_the_next_attempt_resumes(
    place: Path, tmp_path: Path
) -> None:
    config, files = config_of(place, tmp_path, "light crash:4"), inputs(place, tmp_path / "t")
    with pytest.raises(
        ChildProcessFailed, match=r"verl ended with exit code 1(?s:.*)NCCL error in step 4"
    ) as caught:
        train_with_other(config, files)
    assert "Traceback" in str(caught.value)
    assert not caught.value.is_lasting
    assert steps(files.output) == [1, 2, 3]
    assert train_with_other(config, files).step == 6
    assert steps(files.output) == [1, 2, 3, 4, 5, 6]  # 3 came twice: the checkpoint was of step 2
    assert (files.folder / LOG_FILE).read_text().count("Found checkpoint: global_step_2\n") == 1


def test_a_configuration_error_is_not_retried(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessFailed, match=r"KeyError: 'rollout\.modee'") as caught:
        train_with_other(config_of(place, tmp_path, "light typo:1"), inputs(place, tmp_path / "t"))
    assert caught.value.is_lasting


def test_a_trainer_that_ends_early_fails_the_stage(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"verl ended with exit code 0, but its last checkpoint is from step 2, b",
    ):
        train_with_other(config_of(place, tmp_path, "light quit:4"), inputs(place, tmp_path / "t"))


def test_resume_never_moves_the_earlier_training_aside(place: Path, tmp_path: Path) -> None:
    files = inputs(place, tmp_path / "t")
    train_with_other(config_of(place, tmp_path), files)
    train_with_other(
        config_of(place, tmp_path, checkpoint={"save_every": 2, "resume": "never"}), files
    )
    [aside] = files.output.glob("superseded-*")
    assert (aside / "checkpoints/global_step_6").is_dir()
    assert steps(aside) == steps(files.output) == [1, 2, 3, 4, 5, 6]
    assert (files.folder / LOG_FILE).read_text().count("Training from scratch") == 2


def test_checkpoints_of_another_training_are_not_resumed(place: Path, tmp_path: Path) -> None:
    files = inputs(place, tmp_path / "t")
    train_with_other(config_of(place, tmp_path), files)
    slower = {**TRAIN, "total_steps": 8, "learning_rate": 5e-7}
    changed = r"global_step_6 belongs to another training \(train\.learning_rate 1e-06 -> 5e-07\), "
    with pytest.raises(CheckpointError, match=changed):
        train_with_other(config_of(place, tmp_path, train=slower), files)
    overridden = config_of(place, tmp_path, external={"overrides": ["+a=b"]})
    with pytest.raises(CheckpointError, match=r"external\.overrides \[\] -> \['\+a=b'\]"):
        train_with_other(overridden, files)
    allowed = {"save_every": 2, "allow_changed": ["train.learning_rate"]}
    assert (
        train_with_other(config_of(place, tmp_path, train=slower, checkpoint=allowed), files).step
        == 8
    )
    assert train_with_other(config_of(place, tmp_path, train=slower), files).step == 8


def test_checkpoints_of_our_own_trainer_are_not_overwritten(place: Path, tmp_path: Path) -> None:
    files = inputs(place, tmp_path / "t")
    (files.output / "checkpoints/step_000004").mkdir(parents=True)
    (files.output / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(
        CheckpointError, match=r"has 1 checkpoints of our own trainer, the newest step_000004"
    ):
        train_with_other(config_of(place, tmp_path), files)
    assert (files.output / "metrics.jsonl").read_text() == "kept\n"


def test_only_steps_to_keep_are_kept(place: Path, tmp_path: Path) -> None:
    given = {"save_every": 1, "keep_last": 1, "keep_steps": [2]}
    files = inputs(place, tmp_path / "t")
    seen: list[set[str]] = []

    def look(step: int, metrics: dict[str, float]) -> None:
        seen.append({path.name for path in (files.output / "checkpoints").glob("global_step_*")})

    train_with_other(config_of(place, tmp_path, checkpoint=given), files, look)
    assert {
        path.name for path in (files.output / "checkpoints").glob("*_step_*/actor/*.pt")
    } != set()
    assert {
        path.parents[1].name for path in (files.output / "checkpoints").glob("*/actor/*.pt")
    } == {
        "global_step_2",
        "global_step_6",
    }
    assert max(map(len, seen)) <= 5  # removed as it goes, a step later


def below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def commands_below(pid: int) -> list[str]:
    commands = []
    for process in below(pid):
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # also of a zombie, which has no command any more
            commands.append(" ".join(process.cmdline()))
    return commands


def test_sigterm_stops_the_trainer_and_names_the_checkpoint(place: Path, tmp_path: Path) -> None:
    config, files = tmp_path / "recipe.yaml", inputs(place, tmp_path / "t")
    train = {**TRAIN, "trackers": ["tensorboard"], "tracker_folder": str(tmp_path)}
    settings = config_of(place, tmp_path, "light hang:5", train={**train, "total_steps": 6})
    config.write_text(settings.model_dump_json())
    words = [
        "--data",
        files.data,
        "--model",
        files.model,
        "--output",
        files.output,
        "--held-out",
        files.held_out,
    ]
    command = [sys.executable, "-m", "flows.cli", "train", str(config), *map(str, words)]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + FAR
        while steps(files.output) != [1, 2, 3, 4] and time.monotonic() < deadline:
            time.sleep(0.1)
        children = below(run.pid)
        run.send_signal(signal.SIGTERM)
        assert run.wait(FAR) == 143
    finally:
        run.kill()
        run.wait()
    said = (tmp_path / "log").read_text()
    assert children
    assert not [child for child in children if child.is_running()], said
    assert re.search(
        r"TrainingStopped: training was stopped; its newest checkpoint is \S+/global_step_4 of 6 "
        r"steps",
        said,
    )
    assert "training step 4/6: score 0.000, length 12 tokens, 0.1 s" in said
    assert not (files.output / "checkpoints/lock").exists()
    tracked = read_record(files.output, "tensorboard")
    assert tracked.last_step == 4, "its tracker sent what was there, and ended with it"
    assert f"tracked by tensorboard: {tracked.path}" in said


def test_errors_are_reported_before_the_trainer_starts(place: Path, tmp_path: Path) -> None:
    def refused(**external: Any) -> str:
        given = {"python": sys.executable, "env": {"PYTHONPATH": str(place / "site")}, **external}
        with pytest.raises(ConfigError) as caught:
            train_with_other(
                config_of(place, tmp_path, external=given), inputs(place, tmp_path / "t")
            )
        return str(caught.value)

    assert "external.python is not set: name the interpreter" in refused(python=None)
    assert "external.python=nowhere/python is not a program here" in refused(
        python="nowhere/python"
    )
    assert f"does not have verl: {sys.executable} -m pip install verl==0.9.1" in refused(
        version="0.9.1", env={}
    )
    assert "has verl 0.9.1, but external.version=0.7.0" in refused(version="0.7.0")
    assert "train.total_steps" not in refused(overrides=["++trainer.total_training_steps=9"])
    assert "external.overrides sets trainer.total_training_steps=9 (the recipe sets 6)" in refused(
        overrides=["++trainer.total_training_steps=9"]
    )
    with pytest.raises(ConfigError, match=r"external\.env\.HF_TOKEN is a secret"):
        config_of(place, tmp_path, external={"env": {"HF_TOKEN": "hf_abc"}})
    with pytest.raises(ConfigError, match=r"external\.env\.HTTPS_PROXY is a secret"):
        config_of(place, tmp_path, external={"env": {"HTTPS_PROXY": "http://me:word@example.org"}})
    with pytest.raises(ConfigError, match=r"external\.env would be ignored by train\.backend=own"):
        config_of(
            place,
            tmp_path,
            train={**TRAIN, "backend": "own", "device": "cpu"},
            external={"python": "p"},
        )


def test_an_override_with_the_same_value_is_accepted(place: Path, tmp_path: Path) -> None:
    overrides = ["trainer.total_training_steps=6", "+actor_rollout_ref.model.use_liger=True"]
    given = {
        "python": sys.executable,
        "env": {"PYTHONPATH": str(place / "site"), "STAND_IN": "light"},
    }
    config = config_of(place, tmp_path, external={**given, "overrides": overrides})
    files = inputs(place, tmp_path / "t")
    assert train_with_other(config, files).step == 6
    assert (files.folder / "command.sh").read_text().endswith(" ".join(overrides) + "\n")


def test_the_trainer_versions_are_in_the_key(place: Path, tmp_path: Path) -> None:
    install(tmp_path / "newer", "0.9.2")
    config = config_of(
        place,
        tmp_path,
        external={
            "python": sys.executable,
            "version": None,
            "env": {"PYTHONPATH": str(tmp_path / "newer")},
        },
    )
    assert trainer_versions(config) == {"verl": "0.9.2"}
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    for words in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, env=env, check=True)
    with_source = config.model_copy(
        update={"external": config.external.model_copy(update={"source": str(tmp_path)})}
    )
    assert re.fullmatch("[0-9a-f]{40}", trainer_versions(with_source)["verl commit"])
    missing = config.external.model_copy(update={"source": str(tmp_path / "nothing")})
    with pytest.raises(TrainerMissing, match=r"external\.source=\S+nothing is not a checkout"):
        trainer_versions(config.model_copy(update={"external": missing}))


# Like `ray job`: runs submitted commands and logs its arguments.
RAY = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(words[:5]) + "\\n")
if words[1] == "submit":
    env = json.load(open(words[words.index("--runtime-env") + 1]))["env_vars"]
    sys.exit(subprocess.run(words[words.index("--") + 1:], env={{**os.environ, **env}}).returncode)
"""


def test_a_job_of_a_cluster_is_followed_and_stopped_with_the_stage(
    place: Path, tmp_path: Path
) -> None:
    log, files = tmp_path / "asked", inputs(place, tmp_path / "t")
    (tmp_path / "bin").mkdir()
    for name, text in {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "ray": RAY.format(python=sys.executable, log=str(log)),
    }.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def config(orders: str) -> Config:
        env = {"PYTHONPATH": str(place / "site"), "STAND_IN": orders}
        external = {
            "python": str(tmp_path / "bin/python"),
            "env": env,
            "job_server": "http://head:8265",
        }
        return config_of(place, tmp_path, external=external)

    with pytest.raises(ChildProcessFailed, match="NCCL error in step 4"):
        train_with_other(config("light crash:4"), files)
    asked = log.read_text().splitlines()
    submitted = re.fullmatch(r"job submit --address http://head:8265 --submission-id", asked[0])
    assert submitted
    assert re.fullmatch(r"job stop --address http://head:8265 dapo-\w+", asked[1])
    assert train_with_other(config("light"), files).step == 6
    assert (
        len(log.read_text().splitlines()) == 4
    )  # the job that failed is stopped again, lest it still runs
    assert not (files.folder / "job.json").exists()
    assert steps(files.output) == [1, 2, 3, 4, 5, 6]


def test_mindspeed_starts_in_its_checkout_and_resumes_from_its_weights(
    place: Path, tmp_path: Path
) -> None:
    install_mindspeed(tmp_path / "checkout")

    def config(orders: str, resume: str = "auto") -> Config:
        external = {
            "python": sys.executable,
            "source": str(tmp_path / "checkout"),
            "overrides": ["actor_config.load=/weights/mcore"],
            "env": {"STAND_IN": orders},
        }
        train = {**TRAIN, "backend": "mindspeed-rl", "device": "npu", "total_steps": 6}
        rollout = {"max_response_tokens": 32, "group_size": 4, "memory_utilization": 0.5}
        checkpoint = {"save_every": 2, "resume": resume}
        return config_of(
            place, tmp_path, train=train, external=external, rollout=rollout, checkpoint=checkpoint
        )

    files, seen = inputs(place, tmp_path / "t"), dict[int, dict[str, float]]()
    with pytest.raises(ChildProcessFailed, match="NCCL error in step 4"):
        train_with_other(config("crash:4"), files, seen.__setitem__)
    assert train_with_other(config(""), files, seen.__setitem__).path.name == "iter_0000006"
    assert steps(files.output) == sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert (seen[6]["critic/score/mean"], seen[6]["timing_s/step"]) == (0.6, 2.0)  # under our names
    assert "starting at 2" in (files.folder / LOG_FILE).read_text()
    assert list(trainer_versions(config(""))) == ["mindspeed_rl commit"]
    # From the beginning it loads the recipe's weights, not those moved aside; its rows are kept.
    assert train_with_other(config("", "never"), files).step == 6
    assert (files.folder / LOG_FILE).read_text().count("starting at 0") == 2
    assert (files.folder / LOG_FILE).read_text().count("preparing rows") == 1
