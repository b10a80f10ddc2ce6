"""verl's `math_dapo` rule: the answer as a normalised string."""

from __future__ import annotations

import functools
import re

from dapo_core.reward.score import Score

WINDOW_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REMOVED_WORDS = re.compile(
    r"square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees"
    r"|cm|gm|pounds|meters|meals|edges|students|tickets|multiples"
)
_REPLACED = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"))
_REMOVED = ("{,}", "\\left", "\\right", "\\!", "\\,", "\\:", "\\;", "^{\\circ}", "^\\circ", "\\%", "%")
_BETWEEN_DOLLARS = re.compile(r".*?\$(.+?)\$.*")
_BRACES = re.compile(r"\\(?:text|textbf|mathrm|overline|boxed|fbox)\{|\\[{}]|[{}]")
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def score_math(response: str, ground_truth: str) -> Score:
    r"""+1 when the response's final answer equals the ground truth, else -1 (verl's `math_dapo` rule).

    The answer is the last `Answer:` line within the last 300 characters, else the last \boxed{} there. Both
    sides are normalised as strings; nothing is computed.
    """
    tail = response[-WINDOW_CHARACTERS:]
    lines = _ANSWER.findall(tail)
    answer = lines[-1] if lines else last_boxed(tail)
    if answer is None or not answer.strip():
        return Score(-1.0, "no_answer", None)
    answer = normalize_answer(answer)
    is_right = answer == normalize_answer(ground_truth)
    return Score(1.0 if is_right else -1.0, "right" if is_right else "wrong", answer, float(is_right))


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} with matching braces, None when there is none or it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


@functools.lru_cache(maxsize=1024)  # siblings share the ground truth, and often the answer
def normalize_answer(answer: str) -> str:
    """The answer without units, spacing, LaTeX wrappers, dollar signs and thousands separators.

    Of text around a formula in dollar signs the formula remains.
    """
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = _BETWEEN_DOLLARS.sub(r"\1", answer)
    answer = unwrap(_REMOVED_WORDS.sub("", answer))
    answer = answer.replace("$", "").strip().rstrip(".")
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


def unwrap(text: str) -> str:
    r"""The text with what \text{}, \boxed{} and their like hold in place of them. O(n) whatever the braces."""
    pieces: list[str] = []
    open_braces: list[int | None] = []  # the wrapper's place in `pieces`, None for a brace that stays
    position = 0
    for match in _BRACES.finditer(text):
        token = match.group()
        pieces += [text[position : match.start()], token]
        position = match.end()
        if token == "{" or len(token) > 2:
            open_braces.append(None if token == "{" else len(pieces) - 1)
        elif token == "}" and open_braces:
            wrapper = open_braces.pop()
            if wrapper is not None:
                pieces[wrapper] = pieces[-1] = ""
    return "".join([*pieces, text[position:]])
