"""AISBench's string rule for math_prm800k_500_0shot_cot_gen, to make accuracies comparable with
published ones.

It reproduces AISBench's results in linear time, where AISBench's own code is quadratic in hostile
text.
"""

from __future__ import annotations

import re

from eval.answers.math_dapo import MINERVA_REMOVED, MINERVA_REPLACED

_CUE = re.compile(r"final answer|answer is")
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_BRACE = re.compile(r"[{}]")
_BRACED = re.compile(r"^\{(.*)\}$")


def without_thinking(text: str) -> str:
    """Strip thinking from a chat response as AISBench's `extract_non_reasoning_content` does.

    Drops every <think>...</think>, or without any <think> everything up to the last </think>.
    Unclosed thinking stays.
    """
    if "<think>" not in text:
        return text.rpartition("</think>")[2].strip()
    end = text.rfind("</think>") + len("</think>")  # searching past it would take quadratic time
    return (_THINKING.sub("", text[:end]) + text[end:]).strip()


def extract_aisbench(text: str) -> tuple[str, bool]:
    """Return (answer, whether AISBench's own code would raise) for a response.

    The answer is the last non-empty \\boxed with matching braces, else the last \\fbox. Without a
    box it is the first sentence with a cue, else the first sentence, normalised. AISBench raises if
    anything but `{` follows the macro; here the content of the braces is the answer.
    """
    content, raises = _last_box(text)
    if content:
        return content, raises
    pieces = text.split(".")
    cued = (piece for piece in pieces if _CUE.search(piece.lower()))
    return normalise(next(cued, pieces[0])), raises


def _last_box(text: str) -> tuple[str | None, bool]:
    """Return (content of the last box, whether AISBench raises on it), or (None, False)."""
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None, False
    depth = 0
    first = -1
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            first = brace.end() if first < 0 else first
            depth += 1
            continue
        depth -= 1
        if depth == 0:
            content = text[first : brace.start()]
            if not text.startswith("\\boxed{", start):
                return content.strip(), True
            inner = _BRACED.match(content)
            return inner.group(1) if inner else content, False
    return None, False


def is_equal_aisbench(answer: str, gold: str) -> bool:
    """True if two answers are equal strings, raw or under either or both of AISBench's
    normalisations.

    There are no numbers and no algebra: `0.5` is not `\\frac12`. AISBench's false equalities (`1,2`
    is `12`, `3 \\cdot 4` is `34`) are reproduced, because published figures include them.
    """
    if answer == gold:
        return True
    stripped = strip_latex(answer), strip_latex(gold)
    is_stripped = stripped[0] is not None and stripped[1] is not None
    if is_stripped and (
        stripped[0] == stripped[1] or normalise(str(stripped[0])) == normalise(str(stripped[1]))
    ):
        return True
    return normalise(answer) == normalise(gold)


_REMOVED_FIRST = ("\\!", "\\ ")
_REMOVED_NEXT = ("^{\\circ}", "^\\circ", "\\$", "$", "\\text", "x\\in", "\\%", "%")


def strip_latex(text: str) -> str | None:
    """Strip spacing, units, degree and currency signs, and write \\frac and \\sqrt in full.

    None if AISBench's stripping raises, as on `x/2`; the comparison then skips this step.
    """
    text = _without(text.strip().replace("\n", "").rstrip("."), _REMOVED_FIRST)
    text = text.replace("\\\\", "\\").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = _without(text, ("\\left", "\\right"))
    unit = text.find(
        "\\text{"
    )  # a unit reaches from the first \text{ to a closing brace at the end
    bare = text[:unit].strip() if unit >= 0 and text.endswith("}") else text.strip()
    text = bare or text
    text = (
        _without(text, _REMOVED_NEXT)
        .replace(" .", " 0.")
        .replace("{.", "{0.")
        .replace("\\cdot", "")
    )
    text = text.replace("infinity", "\\infty")
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _without(text.replace("+\\inity", "\\infty"), ("and", "\\mathbf"))
    text = _unwrapped(text, "\\mbox{", "}", kept="")
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = re.sub(r"(?<=\d)\.0+(\D)", r"\1", text)
    text = re.sub(r"(?<=\d)\.0+$", "", text)
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", text).replace(" ", "")
    return plain_fraction(full_fractions(text))


def full_fractions(text: str) -> str:
    """Write \\frac12 and \\frac1{2} as \\frac{1}{2}; change nothing if one is cut off."""
    head, *pieces = text.split("\\frac")
    fixed = [head]
    for piece in pieces:
        if piece.startswith("{"):
            fixed.append(piece)
        elif len(piece) < 2:
            return text
        else:
            below = piece[1:] if piece[1] == "{" else f"{{{piece[1]}}}{piece[2:]}"
            fixed.append(f"{{{piece[0]}}}{below}")
    return "\\frac".join(fixed)


def plain_fraction(text: str) -> str | None:
    """Write a/b of two integers as \\frac{a}{b}; None if AISBench's conversion raises."""
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        above, below = int(sides[0]), int(sides[1])
        is_plain = text == f"{above}/{below}"
    except ValueError:
        return None
    return f"\\frac{{{above}}}{{{below}}}" if is_plain else text


_REPLACED = (*MINERVA_REPLACED, ("\\le", "<"))
_HOURS = MINERVA_REMOVED.index("hours")
_REMOVED = (*MINERVA_REMOVED[:_HOURS], "ft", *MINERVA_REMOVED[_HOURS:], "\n", "\r", "\f")


def normalise(text: str) -> str:
    """Strip unit words, text macros and spaces (Minerva, arXiv:2206.14858, appendix D.1)."""
    for before, after in _REPLACED:
        text = text.replace(before, after)
    text = _without(text, _REMOVED)
    text = _unwrapped(text, "\\text{(", ")}")
    for macro in ("\\text{", "\\textbf{", "\\overline{"):
        text = _unwrapped(text, macro, "}")
    start, end = text.find("\\boxed{"), text.rfind("}")
    if 0 <= start < end:
        text = text[:start] + text[start + len("\\boxed{") : end] + text[end + 1 :]
    text = text.partition("finalansweris")[2] if "finalansweris" in text else text
    cue = re.search(r"answer?is:?", text)
    text = text[cue.end() :] if cue else text
    text = _last_between(text, "oxed{", "}")
    text = _last_between(text, "$", "$").strip()
    if "rac" in text and "\\frac" not in text:
        text = text.replace("rac", "\\frac")
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.isdigit() else text


def _without(text: str, expressions: tuple[str, ...]) -> str:
    for expression in expressions:
        text = text.replace(expression, "")
    return text


def _unwrapped(text: str, opening: str, closing: str, kept: str = r"\1") -> str:
    """Replace each `opening ... closing` (the nearest one) by its content, or by `kept`."""
    pattern, end = _between(text, opening, closing)
    return re.sub(pattern, kept, text[:end], flags=re.DOTALL) + text[end:]


def _last_between(text: str, opening: str, closing: str) -> str:
    """Return the content of the last `opening ... closing`, or the text itself."""
    pattern, end = _between(text, opening, closing)
    found = re.findall(pattern, text[:end], re.DOTALL)
    return found[-1] if found else text


def _between(text: str, opening: str, closing: str) -> tuple[str, int]:
    """Return the pattern of `opening ... closing` and the end of the last closing.

    Searching past that end would take quadratic time.
    """
    return f"{re.escape(opening)}(.*?){re.escape(closing)}", text.rfind(closing) + len(closing)
