"""Reward of dapo_qwen3_8b_choice: are exactly the right options of an exam question boxed?

A file of your own works the same way: one function with this signature, named by the keys custom_reward.path and
custom_reward.name. It gets whole texts and returns a number, or a dict with `score`; `acc` in it is what dynamic
sampling looks at.
"""

from __future__ import annotations

import re
from typing import Any

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_OPTIONS = re.compile(r"(?<![A-Za-z])[A-G]+(?![A-Za-z])")
_ANSWER_CHARACTERS = 300  # boxes further from the end belong to the reasoning


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """+1 when the set of boxed options is the set in `ground_truth` ("D", "ABD", "A,B,D"), else -1.

    Boxes count after the thinking only; a response still thinking at its end has no answer.
    """
    _, end_of_thinking, answer = solution_str.rpartition("</think>")
    is_thinking = not end_of_thinking and "<think>" in answer
    boxes = [] if is_thinking else _BOX.findall(answer[-_ANSWER_CHARACTERS:])
    chosen = _options("; ".join(boxes))
    is_right = bool(chosen) and chosen == _options(ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": "".join(sorted(chosen))}


def _options(text: str) -> set[str]:
    """The letters of words made of A to G only: {A, B, D} of "ABD" as of "A, B and D"."""
    return set("".join(_OPTIONS.findall(text)))
