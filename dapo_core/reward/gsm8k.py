"""verl's `gsm8k` rule, strict: the number behind `####`."""

from __future__ import annotations

import re

from dapo_core.reward.score import Score

WINDOW_CHARACTERS = 300
_FINAL_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def score_gsm8k(response: str, ground_truth: str) -> Score:
    """1 when the last `#### number` of the last 300 characters is the ground truth, else 0.

    As in verl (`reward_score/gsm8k.py`, method strict, format score 0) a number counts only behind `#### `,
    commas are dropped, and the rest is compared as a string: `18.0` is not `18`.
    """
    numbers = _FINAL_NUMBER.findall(response[-WINDOW_CHARACTERS:])
    if not numbers:
        return Score(0.0, "no_answer")
    answer = numbers[-1].replace(",", "")
    is_right = answer == ground_truth
    return Score(float(is_right), "right" if is_right else "wrong", answer, float(is_right))
