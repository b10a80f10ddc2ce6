"""A trainer's state survives a round trip, damage is refused, and which folders count."""

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from dapo_core.checkpoint.folder import (
    LATEST_FILE,
    best_checkpoints,
    checkpoint_folders,
    latest_checkpoint,
)
from dapo_core.checkpoint.state import (
    GROUPS_FILE,
    STATE_FILE,
    TOKENS_FILE,
    read_state,
    read_state_without_groups,
    state_files,
)
from dapo_core.errors import CheckpointError
from tests.checkpoints import make_state, write_state
from tests.plain import plain


def test_the_state_round_trips_bit_for_bit(tmp_path: Path) -> None:
    state = make_state(20, accuracy=1 / 3)
    assert plain(read_state(write_state(tmp_path, state))) == plain(state)


def test_a_checkpoint_copies_carried_tokens_once() -> None:
    """At the guide's sizes they are gigabytes, and every copy takes that much memory and time."""
    state = make_state(20)
    rollout = state.surplus[0].rollouts[0]
    ids, log_probs = np.zeros(10**6, np.int32), np.zeros(10**6, np.float32)
    routing = np.zeros((10**6, 2, 2), np.uint8)
    state.surplus[0].rollouts[0] = replace(
        rollout, response_ids=ids, rollout_log_probs=log_probs, routing=routing
    )
    tracemalloc.start()
    content = state_files(state)[TOKENS_FILE]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 12 * 10**6 < len(content) < peak < 1.1 * len(content)


def test_non_finite_numbers_round_trip(tmp_path: Path) -> None:
    state = make_state(20)
    odd = [math.inf, -math.inf, math.nan]
    state.surplus[0].rollouts[0].rollout_log_probs[:] = odd
    state = replace(state, metrics=dict(zip("abc", odd, strict=True)))
    read = read_state(write_state(tmp_path, state))
    for values in map(list, (read.surplus[0].rollouts[0].rollout_log_probs, read.metrics.values())):
        assert values[:2] == odd[:2]
        assert math.isnan(values[2])


def test_step_and_metrics_are_read_without_the_groups(tmp_path: Path) -> None:
    checkpoint = write_state(tmp_path, make_state(20, accuracy=0.5))
    (checkpoint / GROUPS_FILE).unlink()
    state = read_state_without_groups(checkpoint)
    assert state.step == 20
    assert state.metrics == {"critic/score/mean": -1 / 3, "validation/accuracy": 0.5}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, text) for name in (STATE_FILE, GROUPS_FILE) for text in ('{"step": 5', "[]")),
        *((STATE_FILE, damage) for damage in ("lacking", "unknown")),
        *((GROUPS_FILE, damage) for damage in ("surplus", "unfinished", "absent")),
    ],
)
def test_an_unreadable_state_is_refused_with_the_fix(
    tmp_path: Path, name: str, damage: str
) -> None:
    checkpoint = write_state(tmp_path, make_state(5))
    values = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    if damage == "lacking":
        del values["policy_version"]
    elif damage == "unknown":
        values["surprise"] = 1
    elif damage == "surplus":
        values["surplus"][0]["rollouts"][0]["surprise"] = 1
    elif damage == "unfinished":
        del values["unfinished"][0]["responses"][0]["finish_reason"]
    is_parsed = damage in {"lacking", "unknown", "surplus", "unfinished"}
    (checkpoint / name).write_text(json.dumps(values) if is_parsed else damage, encoding="utf-8")
    if damage == "absent":
        (checkpoint / name).unlink()
    with pytest.raises(
        CheckpointError, match=rf"{name} cannot be read .* remove the folder step_000005"
    ):
        read_state(checkpoint)


@pytest.mark.parametrize(
    "damage", ["cut", "of a state without groups", "uneven", "routing", "absent"]
)
def test_tokens_that_do_not_match_the_groups_are_refused(tmp_path: Path, damage: str) -> None:
    path = write_state(tmp_path, make_state(5)) / TOKENS_FILE
    contents = {
        "cut": path.read_bytes()[:-4],
        "of a state without groups": state_files(replace(make_state(5), surplus=[], unfinished=[]))[
            TOKENS_FILE
        ],
        "uneven": save({**load(path.read_bytes()), "response_ids": np.zeros(1, np.int32)}),
        "routing": save({**load(path.read_bytes()), "routing": np.zeros(1, np.uint8)}),
    }
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    with pytest.raises(CheckpointError, match=r"carried_tokens\.safetensors cannot be read"):
        read_state(path.parent)


def test_folders_are_ordered_by_step_and_other_names_do_not_count(tmp_path: Path) -> None:
    others = ("step_000008.partial", "step_000009.1a2b3c4d.partial", "step_9.old", "steps")
    for name in ("step_999999", "step_1000000", "step_000007", *others):
        (tmp_path / name).mkdir()
    (tmp_path / "step_2000000").write_text("a file", encoding="utf-8")
    names = [path.name for path in checkpoint_folders(tmp_path)]
    assert names == ["step_000007", "step_999999", "step_1000000"]


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        ("step_000010\n", "step_000010"),  # the writer of step 15 was killed before it wrote this
        ("step_000015\n", "step_000015"),
        (None, "step_000015"),
        ("step_000020\n", "step_000015"),  # removed by hand
        ("", "step_000015"),
        ("../elsewhere\n", "step_000015"),
        ("\udcff", "step_000015"),
    ],
)
def test_the_latest_checkpoint_is_the_one_that_the_pointer_names(
    tmp_path: Path, latest: str | None, expected: str
) -> None:
    for step in (5, 10, 15):
        (tmp_path / f"step_{step:06d}").mkdir()
    if latest is not None:
        (tmp_path / LATEST_FILE).write_bytes(latest.encode(errors="surrogateescape"))
    assert latest_checkpoint(tmp_path) == tmp_path / expected
    assert latest_checkpoint(tmp_path / "none") is None


def test_the_best_checkpoint_has_the_highest_accuracy_and_ties_go_to_the_earliest(
    tmp_path: Path,
) -> None:
    write_state(tmp_path, make_state(5))
    assert best_checkpoints(tmp_path) == []
    for step, accuracy in ((10, 0.25), (15, 0.5), (20, 0.5), (25, float("nan")), (30, 0.75)):
        write_state(tmp_path, make_state(step, accuracy))
    assert [path.name for path in best_checkpoints(tmp_path, 3)] == [
        "step_000030",
        "step_000015",
        "step_000020",
    ]
    (tmp_path / LATEST_FILE).write_text("step_000025", encoding="utf-8")  # 30 does not count
    assert best_checkpoints(tmp_path) == [tmp_path / "step_000015"]


def test_a_checkpoint_with_unreadable_metrics_is_not_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = write_state(tmp_path, make_state(5, 0.9))
    second = write_state(tmp_path, make_state(10, 0.8))
    (best / STATE_FILE).write_text("{", encoding="utf-8")
    assert best_checkpoints(tmp_path) == [second]
    assert "ignored when choosing the best" in caplog.text
    assert "remove the folder step_000005" in caplog.text
