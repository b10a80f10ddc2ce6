"""User-defined scorers: checked without executing the file; results converted to scores."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_core.config.training import CustomRewardConfig, RewardConfig
from dapo_core.errors import ConfigError
from dapo_core.reward.custom import (
    PARAMETERS,
    call_function,
    load_function,
    load_scorer,
    scorer_arguments,
    to_score,
)
from dapo_core.reward.routing import require_scorers
from dapo_core.reward.scorers import Score


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1.0, Score(1.0, "right", None, 1.0)),
        (0, Score(0.0, "wrong", None, 0.0)),
        (True, Score(1.0, "right", None, 1.0)),
        (-1, Score(-1.0, "wrong", None, -1.0)),
        (0.4, Score(0.4, "wrong", None, 0.4)),  # acc defaults to the score
        (np.float32(0.5), Score(0.5, "wrong", None, 0.5)),
        ({"score": 0.2, "acc": True}, Score(0.2, "right", None, 1.0)),
        ({"score": 1.0, "acc": 0.5}, Score(1.0, "wrong", None, 0.5)),
        ({"score": 1, "acc": None, "pred": "34", "other": [1]}, Score(1.0, "right", "34", 1.0)),
        ({"score": 1, "pred": 34}, Score(1.0, "right", "34", 1.0)),
    ],
)
def test_results_become_scores(result: Any, score: Score) -> None:
    assert to_score(result) == score


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (1e200, ValueError),
        ({"score": 1.0, "acc": float("nan")}, ValueError),
        ("1.0", TypeError),
        (None, TypeError),
        ([1.0], TypeError),
        (1j, TypeError),
        ({"acc": 1.0}, KeyError),
        ({"score": None}, TypeError),
    ],
)
def test_invalid_results_are_refused(result: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        to_score(result)


@pytest.mark.parametrize("prefix", ["def", "async def"])
def test_sync_and_async_functions_are_called_with_keyword_arguments(
    tmp_path: Path, prefix: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"{prefix} judge(solution_str, extra_info, ground_truth, data_source):\n"
        "    return {'score': extra_info['index'], 'pred': "
        "f'{data_source}|{solution_str}|{ground_truth}'}\n"
    )
    with asyncio.Runner() as runner:
        arguments = ("math_dapo", "Answer: 3", "3", {"index": 7})
        score = call_function(load_function(str(path), "judge"), runner, arguments)
    assert score == Score(7.0, "right", "math_dapo|Answer: 3|3", 7.0)


def test_arguments_of_the_recipe_reach_the_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(solution_str, *, url, scale=1, **others): return scale\n")

    def scored(**arguments: Any) -> tuple[Any, ...]:
        custom = CustomRewardConfig(path=str(path), arguments=arguments)
        require_scorers((), RewardConfig(), custom)
        return load_scorer(*scorer_arguments(custom))(None, "s", "34", "34", {})

    assert scored(url="http://judge", scale=0.25) == (0.25, "wrong", None, 0.25)
    with pytest.raises(ConfigError, match="cannot be called as"):
        scored(scale=2)
    with pytest.raises(ConfigError, match=r"arguments\.solution_str would be ignored"):
        scored(url="", solution_str="")


def test_a_file_changed_within_a_second_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for value in (1, 2):
        path.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            f"@dataclass\nclass Mark:\n    value: float = {value}\ndef judge(**_):\n    return "
            "Mark().value\n"
        )
        os.utime(path, (1e9, 1e9))
        assert load_function(str(path), "judge")() == value


def required(path: Path, source: str) -> None:
    path.write_text(source)
    require_scorers({"unheard of"}, RewardConfig(), CustomRewardConfig(path=str(path)))


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(**_): ...",
        "async def compute_score(**_): ...",
        "from rules import compute_score",
        "from rules import judge as compute_score",
        "compute_score = lambda **_: 1.0",
        "class compute_score: ...",
        "try:\n    import fast\nexcept ImportError:\n    def compute_score(**_): ...",
        "raise SystemExit  # not executed\ndef compute_score(**_): ...",
    ],
)
def test_a_function_is_found_without_executing_the_file(tmp_path: Path, source: str) -> None:
    required(tmp_path / "mine.py", source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def score(**_): ...",
            r"mine\.py defines score at top level, not compute_score; .* set "
            r"custom_reward\.name=score$",
        ),
        (
            "import re\ndef score(**_): ...",
            r"defines re, score at top level, not .* set custom_reward\.name=NAME$",
        ),
        (
            "def score():\n    def compute_score(**_): ...\n    compute_score = 1",
            "defines score at top level, not compute_score",
        ),
        ("class A:\n    def compute_score(self): ...", "defines A at top level, not compute_score"),
        ("", "mine.py does not define compute_score"),
        ("def compute_score(:", r"custom_reward\.path=.*mine\.py is not valid Python: "),
    ],
)
def test_a_missing_function_or_file_is_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        required(tmp_path / "mine.py", source)
    missing = CustomRewardConfig(path=str(tmp_path / "missing.py"))
    with pytest.raises(ConfigError, match=r"custom_reward\.path=.*missing\.py cannot be read: No"):
        require_scorers((), RewardConfig(), missing)


@pytest.mark.parametrize(
    ("parameters", "is_callable"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", True),
        ("*, extra_info, ground_truth, solution_str, data_source, weight=1.0", True),
        ("solution_str, ground_truth, **others", True),
        ("**everything", True),
        ("solution, truth", False),
        ("data_source, solution_str, ground_truth", False),  # extra_info is always passed
        ("data_source, solution_str, ground_truth, extra_info, model", False),
        ("data_source, solution_str, ground_truth, extra_info, *, model", False),
        ("data_source, /, solution_str, ground_truth, extra_info", False),
        ("*arguments", False),
    ],
)
def test_a_function_with_wrong_parameters_is_refused_up_front(
    tmp_path: Path, parameters: str, is_callable: bool
) -> None:
    path = tmp_path / "reward.py"
    source = f"def compute_score({parameters}):\n    return 1.0\n"
    if is_callable:
        required(path, source)
        load_function(str(path), "compute_score")(**dict.fromkeys(PARAMETERS))  # Python agrees
        return
    with pytest.raises(ConfigError, match=r"compute_score\(.* cannot be called as"):
        required(path, source)
    with pytest.raises(TypeError):
        load_function(str(path), "compute_score")(**dict.fromkeys(PARAMETERS))
