"""A checkpoint's content: a state that comes back equal, the model's files, and which folders count."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from dapo_core.checkpoint.folder import LATEST_FILE, best_checkpoints, checkpoint_folders, latest_checkpoint
from dapo_core.checkpoint.state import (
    GROUPS_FILE,
    STATE_FILE,
    TOKENS_FILE,
    read_state,
    read_step,
    read_step_metrics,
    state_files,
)
from dapo_core.errors import CheckpointError
from tests.checkpoints import make_state


def _write_state(folder: Path, step: int, accuracy: float | None = None) -> Path:
    checkpoint = folder / f"step_{step:06d}"
    checkpoint.mkdir()
    for name, content in state_files(make_state(step, accuracy)).items():
        (checkpoint / name).write_bytes(content)
    return checkpoint


def test_the_state_comes_back_equal_to_the_bit(tmp_path: Path) -> None:
    state = make_state(20, accuracy=1 / 3)
    checkpoint = _write_state(tmp_path, 20, accuracy=1 / 3)
    read = read_state(checkpoint)
    assert read == state
    assert read.surplus[0][1].prompt.prompt_ids == state.surplus[0][1].prompt.prompt_ids
    assert read.unfinished[0][1].prompt == state.unfinished[0][1].prompt


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    state = make_state(20)
    odd = [math.inf, -math.inf, math.nan]
    group = state.surplus[0][1]
    group.rollouts[0].rollout_log_probs[:] = odd
    for name, content in state_files(replace(state, metrics=dict(zip("abc", odd, strict=True)))).items():
        (tmp_path / name).write_bytes(content)
    read = read_state(tmp_path)
    for values in (read.surplus[0][1].rollouts[0].rollout_log_probs, list(read.metrics.values())):
        assert values[:2] == odd[:2]
        assert math.isnan(values[2])


def test_metrics_are_read_without_the_groups(tmp_path: Path) -> None:
    checkpoint = _write_state(tmp_path, 20, accuracy=0.5)
    (checkpoint / GROUPS_FILE).unlink()
    assert read_step(checkpoint) == 20
    assert read_step_metrics(checkpoint) == {"critic/score/mean": -1 / 3, "validation/accuracy": 0.5}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, text) for name in (STATE_FILE, GROUPS_FILE) for text in ("", '{"step": 5', "[]", '"text"')),
        *((STATE_FILE, damage) for damage in ("lacking", "unknown")),
        *((GROUPS_FILE, damage) for damage in ("surplus", "unfinished", "absent")),
    ],
)
def test_a_state_that_cannot_be_read_names_the_way_out(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint = _write_state(tmp_path, 5)
    values = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    if damage == "lacking":
        del values["policy_version"]
    elif damage == "unknown":
        values["surprise"] = 1
    elif damage == "surplus":
        values["surplus"][0][1]["rollouts"][0]["surprise"] = 1
    elif damage == "unfinished":
        del values["unfinished"][0][1]["responses"][0]["finish_reason"]
    is_parsed = damage in {"lacking", "unknown", "surplus", "unfinished"}
    (checkpoint / name).write_text(json.dumps(values) if is_parsed else damage, encoding="utf-8")
    if damage == "absent":
        (checkpoint / name).unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"{name} cannot be read .* remove the folder step_000005 to continue from the checkpoint before",
    ):
        read_state(checkpoint)


@pytest.mark.parametrize("damage", ["cut", "of a state without groups", "uneven", "absent"])
def test_tokens_that_are_not_those_of_the_groups_are_refused(tmp_path: Path, damage: str) -> None:
    path = _write_state(tmp_path, 5) / TOKENS_FILE
    contents = {
        "cut": path.read_bytes()[:-4],
        "of a state without groups": state_files(replace(make_state(5), surplus=[], unfinished=[]))[TOKENS_FILE],
        "uneven": save({**load(path.read_bytes()), "response_ids": np.zeros(1, np.int32)}),
    }
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    with pytest.raises(CheckpointError, match=r"carried_tokens\.safetensors cannot be read"):
        read_state(path.parent)


@pytest.mark.parametrize("content", ["{", "[]", '{"metrics": {}}', '{"step": 1}', '{"step": 1, "metrics": null}'])
def test_a_state_without_step_or_metrics_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json cannot be read"):
        _ = read_step(tmp_path), read_step_metrics(tmp_path)


def test_folders_are_ordered_by_step_and_others_do_not_count(tmp_path: Path) -> None:
    others = ("step_000008.partial", "step_000009.1a2b3c4d.partial", "step_9.old", "steps")
    for name in ("step_999999", "step_1000000", "step_000007", *others):
        (tmp_path / name).mkdir()
    (tmp_path / "step_2000000").write_text("a file", encoding="utf-8")
    names = [path.name for path in checkpoint_folders(tmp_path)]
    assert names == ["step_000007", "step_999999", "step_1000000"]


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        ("step_000010\n", "step_000010"),  # whoever wrote step 15 was killed before it could name it
        ("step_000015\n", "step_000015"),
        (None, "step_000015"),
        ("step_000020\n", "step_000015"),  # a person has removed it
        ("", "step_000015"),
        ("../elsewhere\n", "step_000015"),
        ("\udcff", "step_000015"),
    ],
)
def test_the_latest_is_what_the_pointer_names(tmp_path: Path, latest: str | None, expected: str) -> None:
    for step in (5, 10, 15):
        (tmp_path / f"step_{step:06d}").mkdir()
    if latest is not None:
        (tmp_path / LATEST_FILE).write_bytes(latest.encode(errors="surrogateescape"))
    assert latest_checkpoint(tmp_path) == tmp_path / expected
    assert latest_checkpoint(tmp_path / "none") is None


def test_the_best_has_the_highest_accuracy_and_of_equals_the_earliest(tmp_path: Path) -> None:
    _write_state(tmp_path, 5)
    assert best_checkpoints(tmp_path) == []
    for step, accuracy in ((10, 0.25), (15, 0.5), (20, 0.5), (25, float("nan")), (30, 0.75)):
        _write_state(tmp_path, step, accuracy)
    assert [path.name for path in best_checkpoints(tmp_path, 3)] == ["step_000030", "step_000015", "step_000020"]
    (tmp_path / LATEST_FILE).write_text("step_000025", encoding="utf-8")  # 30 does not count
    assert best_checkpoints(tmp_path) == [tmp_path / "step_000015"]


def test_a_checkpoint_whose_metrics_cannot_be_read_is_not_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = _write_state(tmp_path, 5, 0.9)
    second = _write_state(tmp_path, 10, 0.8)
    (best / STATE_FILE).write_text("{", encoding="utf-8")
    assert best_checkpoints(tmp_path) == [second]
    assert "not counted among the best" in caplog.text
    assert "remove the folder step_000005" in caplog.text
