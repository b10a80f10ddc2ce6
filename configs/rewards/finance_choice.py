"""Reward function of dapo_qwen3_8b_choice: is the set of options in the response exactly right?

Your own file works the same way: one function with this signature, selected by custom_reward.path
and custom_reward.name. It receives complete texts and returns a number, or a dict with `score`;
dynamic sampling reads its `acc`.
"""

from __future__ import annotations

from typing import Any

from eval.answers.choice import find_options, option_letters


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Return +1 if the response names exactly the options of `ground_truth` ("D", "ABD", "A,B,D"),
    else -1.

    Options are read as in the evaluation, from the text after the thinking.
    """
    chosen = find_options(solution_str)
    is_right = bool(chosen) and chosen == option_letters(ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": chosen}
