"""Reward of dapo_qwen3_8b_choice: are exactly the right options of an exam question named?

A file of your own works the same way: one function with this signature, named by the keys custom_reward.path and
custom_reward.name. It gets whole texts and returns a number, or a dict with `score`; `acc` in it is what dynamic
sampling looks at.
"""

from __future__ import annotations

from typing import Any

from eval.answers.choice import find_options, option_letters


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """+1 when the response names exactly the options of `ground_truth` ("D", "ABD", "A,B,D"), else -1.

    Options are read as the evaluation reads them, behind the thinking only.
    """
    chosen = find_options(solution_str)
    is_right = bool(chosen) and chosen == option_letters(ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": chosen}
