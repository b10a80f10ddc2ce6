"""Multiple-choice questions with options A to G, one or several of them right."""

from __future__ import annotations

import re
import unicodedata

from dapo_core.errors import DataError
from dapo_core.reward.math_dapo import unwrap
from dapo_core.reward.score import Score

_SEPARATOR = r"(?:[\s,;/&+、。]|and|和|与|及)*"
_BOX = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_BETWEEN_BOXES = re.compile(r"[\s$*]*" + _SEPARATOR + r"[\s$*]*")
_ANSWER_LINE = re.compile(r"(?:answer|答案)(?:\s*(?:is|:|为|是|选项|应选|选))+([^\n]*)", re.IGNORECASE)
# Letters at the beginning, then nothing or what cannot continue an English word or sentence.
_OPTIONS = re.compile(
    r"[\s$*(\[\"'“【]*(?:options?|choices?|选项)?[\s:(\[]*"
    rf"([A-G]+(?:{_SEPARATOR}[)\]\"'”】]?{_SEPARATOR}(?<![A-Za-z0-9])[(\[\"'“【]?[A-G]+(?![A-Za-z0-9]))*)(?!\s*[A-Za-z0-9])",
)


def score_choice(response: str, ground_truth: str) -> Score:
    raise NotImplementedError
