"""Parsing another trainer's output: complete steps, and the reason of a failure."""

from __future__ import annotations

import pytest

from dapo_core.errors import ConfigError
from tasks.external.launch import refuse_contradictions
from tasks.external.training import Progress, with_reason
from tasks.processes.child import ChildProcessFailed


def feed(*lines: str) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    """Steps and lines so far; the last line may still be pending."""
    steps: list[tuple[int, dict[str, float]]] = []
    shown: list[str] = []
    progress = Progress(lambda step, metrics: steps.append((step, metrics)), shown.append)
    for line in lines:
        progress.feed(line)
    return steps, shown


def test_a_verl_step_is_reported_at_once() -> None:
    line = "\x1b[36m(TaskRunner pid=7)\x1b[0m step:3 - critic/score/mean:-0.5 - timing_s/step:2.0"
    steps, shown = feed("loading", line)
    assert steps == [(3, {"critic/score/mean": -0.5, "timing_s/step": 2.0})]
    assert shown == ["loading", "step:3 - critic/score/mean:-0.5 - timing_s/step:2.0"]


def test_a_mindspeed_step_is_reported_after_its_last_line() -> None:
    lines = [
        "[t] iteration: 1 / 4 | grad_norm : 0.5 | timing/all : 2.0",
        "| dapo/score/mean : 0.25",
        "saving",
    ]
    assert feed(lines[0])[0] == feed(*lines[:2])[0] == []
    expected = {"actor/grad_norm": 0.5, "timing_s/step": 2.0, "critic/score/mean": 0.25}
    assert feed(*lines)[0] == [(1, expected)]


@pytest.mark.parametrize(
    ("last", "has_started", "reason", "is_lasting"),
    [
        (["KeyError: 'rollout.modee'"], False, "KeyError: 'rollout.modee'", True),
        (["KeyError: 'rollout.modee'"], True, "KeyError: 'rollout.modee'", False),
        (
            ["(TaskRunner pid=3) ModuleNotFoundError: no flash_attn", "done"],
            False,
            "no flash_attn",
            True,
        ),
        (["hydra.errors.ConfigCompositionException: no key"], False, "no key", True),
        (
            ["[rank3]: torch.OutOfMemoryError: CUDA out of memory"],
            False,
            "CUDA out of memory",
            False,
        ),
        (
            ["ray.exceptions.RayTaskError(ValueError): ray::run()", "ValueError: odd"],
            False,
            "ValueError: odd",
            False,
        ),
        (["Killed"], False, None, False),
    ],
)
def test_the_last_error_is_the_reason_and_permanent_ones_are_not_retried(
    last: list[str], has_started: bool, reason: str | None, is_lasting: bool
) -> None:
    error = ChildProcessFailed(
        "verl ended with exit code 1. Its last lines:\n" + "\n".join(f"  | {x}" for x in last)
    )
    error.summary = "verl ended with exit code 1; its log is L"
    found = with_reason(error, has_started)
    assert found.is_lasting is is_lasting
    assert found.summary == error.summary
    assert (reason is None) == found.summary.endswith("is L")
    assert reason is None or found.summary.endswith(reason)


def test_overrides_are_compared_by_value() -> None:
    ours = [
        "actor.lr=1e-06",
        "trainer.logger=[console]",
        "data.shuffle=True",
        "++reward.kwargs.len=8",
    ]
    refuse_contradictions(
        ["+actor.lr=0.000001", "data.shuffle=true", "other=1", "reward.kwargs.len='8'"], ours
    )
    with pytest.raises(ConfigError, match=r"data\.shuffle=\(removed\) \(the recipe sets True\)"):
        refuse_contradictions(["~data.shuffle"], ours)
    with pytest.raises(ConfigError, match=r"actor\.lr=1e-5 \(the recipe sets 1e-06\)"):
        refuse_contradictions(["++actor.lr=1e-5"], ours)
