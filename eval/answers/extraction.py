"""Extracts the final answer from a response in linear time."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARS = 200_000  # at the end of a response; the rest is not read
MAX_BARE_CHARS = 100  # in a response that consists of its answer
MAX_BOXES = 50  # that form one list


class Found(NamedTuple):
    """The final answer of a response."""

    answers: tuple[str, ...]  # possible readings, most likely first
    run: tuple[str, ...]  # adjacent boxes that were joined into the answer
    boxes: tuple[str, ...]  # all boxes after the thinking; together they may be a list of answers
    looks_cut: bool  # the text seems to break off


class Box(NamedTuple):
    start: int  # index of the macro
    end: int  # index after the closing brace
    content: str


_BRACES = re.compile(r"\\{1,4}(boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_MACRO = re.compile(r"\\(?:boxed|fbox|framebox)")
_BARE_BOX = re.compile(r"\\boxed\s*([+-]?[\w.,/]+)")
_CUE = re.compile(
    r"""(?ix)(?: (?P<tag><answer>) | ^\W{0,8}(?:\#{1,4}|\*\*)\W{0,4}(?:final\ )?answer\b\W{0,4}$
    | (?<!\S)\#{4}\s
    | \b(?:final\s+)?answer(?:\s+to\s+(?:the|this)\s+(?:problem|question))?
      (?: \W{0,4}?\s*[:：]\s*(?:is\b)?[\s*]{0,4}
      | \s+is\b(?:\s*[:：])?\s*(?:(?:simply|therefore|thus)\s+)?(?:\*\*)?(?=\S) )
    | (?:最终)?答案(?:\s*[是为:：]+\s*|\W{0,4}[:：]\s*) | 故选\s*[:：]?
    | (?:因此|所以|故)答?选\s*[:：]? )""",
    re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"(?<![\d\\])[.!](?=\s)|(?<=\d)\.(?=\s+[A-Z]|\s*$)|。|</answer>|\s(?:I hope it is correct)"
)
_MATHS = re.compile(r"(?<!\\)\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(
    r"""(?ix)[\s$,;.&*\\()\[\]、，。]*(?:\\(?:quad|qquad|text|mbox|,|;|\ )[\s{]*)*
    (?:and|or|或|和|以及|及)?[\s$,;.&*\\()\[\]{}]*(?:\\q?quad\b)?[\s$\\(]*
    (?:[a-z](?:_\{?\w\}?)?\s*=\s*)?[\s$,;.&*\\()\[\]]*"""
)
_SHORT = re.compile(r"\(?[A-J]\)?|(?i:yes|no|true|false)|[是否对错]|正确|错误")
_COMMANDS = re.compile(
    r"\\(?:text|mbox|textbf|mathrm|begin|end|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|[{}]"
)
_STATES = re.compile(
    r"""(?ix)(?:\b(?:is|are|be|equals?|gives?|gets?|takes?|becomes?|needs?|has|have)\b
    |(?<=[\u4e00-\u9fff$])[是为有]|(?<=[A-Za-z])[是为](?=[\s\d$\\]))
    (?:\s+(?:therefore|thus|then|simply|exactly|precisely|only|just|indeed|us|equal\ to|
        given\ by)\b)*
    (?:\s*:)?"""
)
_REASON = re.compile(
    r"(?i)^\s*(?:since|because|as|if|when)\b[^,]*,|,?\s+(?:because|since|where)\b.*$", re.DOTALL
)
_CLAUSE = re.compile(r"(?i)\s*,\s*(?=(?:and\s+)?(?:so|thus|therefore|hence|which)\b)")
_JOINS = re.compile(r"(?i)\b(?:and|or|but|while|if)\b")
_VALUE = re.compile(r"[$*\s]*(?:[-+±−\d.(\[{$\\√π∅]|[a-zA-Z](?:_\w)?\s*=)")
_PLACEHOLDER = re.compile(r"[.…\s]*|\\[lc]?dots|(?i:your )?answer")
_TURN_START = re.compile(r"\A(?:\s*(?:<s>|</s>|<\|im_start\|>\w*))+")
_STRUCK = re.compile(r"<s>[^<\n]*</s>")  # HTML strikethrough
_TURN_END = re.compile(
    r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end▁of▁sentence)\|>|"
    r"<｜end▁of▁sentence｜>|</s>"
)
_MAX_BETWEEN = 40
_FINISHED = re.compile(r"""(?:[.!?。！？:;…)\]}>*"'`|$]|\\[\])])\s*$""")
_MAX_TAIL = 40


def find_answer(response: str) -> Found:
    """Find the final answer after the thinking.

    It is the last \\boxed{} with matching braces, else the last \\fbox{}, joined with adjacent ones
    (`\\boxed{1} or \\boxed{2}`); else the text after the last cue such as `Answer:`, `the answer
    is`, `####`, `答案是`; else the whole response if it is a bare formula. If the last box or the
    thinking does not close, there is no answer.
    """
    text, is_thinking = after_thinking(response)
    text = text[-MAX_CHARS:]
    if is_thinking:
        return Found((), (), (), True)
    boxes, is_open = find_boxes(text)
    if is_open:
        return Found((), (), (), True)
    if boxes:
        last = boxes[-1]
        run = tuple(dict.fromkeys(box.content for box in boxes_side_by_side(boxes, text)))
        contents = tuple(dict.fromkeys(box.content for box in boxes[-MAX_BOXES:]))
        return Found((", ".join(run),), run, contents, _looks_cut(text, last.end))
    return _cued(text)


def extract_boxed(text: str) -> str | None:
    """Return the content of the last closed \\boxed{}, else of the last \\fbox{}, or None."""
    boxes, _ = find_boxes(text)
    return boxes[-1].content if boxes else None


def after_thinking(text: str) -> tuple[str, bool]:
    """Return (text after the last </think>, False), or (text, True) if thinking begins but does not
    end.

    Text after an end-of-turn token is dropped.
    """
    if "<" not in text:
        return text, False
    text = _STRUCK.sub("", _TURN_START.sub("", text))
    turn = _TURN_END.search(text)
    text = text[: turn.start()] if turn else text
    _, end, after = text.rpartition("</think>")
    return (after, "<think>" in after) if end else (text, "<think>" in text)


def split_thinking(text: str) -> tuple[str | None, str]:
    """Split a text into (thinking with its tags, rest); (None, text) without thinking.

    The rest is "" if the thinking does not end.
    """
    if "think>" not in text:
        return None, text
    _, is_thinking = after_thinking(text)
    if is_thinking:
        return text, ""
    end = text.rfind("</think>") + len("</think>")
    return (text[:end], text[end:]) if "</think>" in text else (None, text)


def find_boxes(text: str) -> tuple[list[Box], bool]:
    """Return (non-empty boxes in order of their start, whether the last one never closes)."""
    first = _MACRO.search(text)
    if first is None:
        return [], False
    open_braces: list[tuple[str, int, int]] = []  # (macro or "", its index, index after the brace)
    closed: dict[str, list[Box]] = {"boxed": [], "fbox": [], "framebox": []}
    for match in _BRACES.finditer(text, first.start()):
        token = match.group()
        if token == "}" and open_braces:
            macro, start, inner = open_braces.pop()
            content = text[inner : match.start()].strip() if macro else ""
            if not _PLACEHOLDER.fullmatch(content) and not _inside(closed[macro], start):
                closed[macro].append(Box(start, match.end(), content))
        elif token == "{" or match.group(1):
            open_braces.append((match.group(1) or "", match.start(), match.end()))
    boxes = closed["boxed"] or closed["fbox"] or closed["framebox"]
    last_open = max((start for macro, start, _ in open_braces if macro), default=-1)
    if last_open > (boxes[-1].start if boxes else -1):
        return [], True
    if not closed["boxed"]:
        bare = [Box(m.start(), m.end(), m.group(1).rstrip(".,")) for m in _BARE_BOX.finditer(text)]
        boxes = [box for box in bare if box.content] or boxes
    return boxes, False


def _inside(boxes: list[Box], start: int) -> bool:
    """True if a box that starts here contains a closed one, which then is the answer."""
    return bool(boxes) and boxes[-1].start > start


def boxes_side_by_side(
    boxes: list[Box], text: str, between: re.Pattern[str] = _BETWEEN
) -> list[Box]:
    """Return the last box and those before it that only a comma, "or" or the like separates."""
    run = [boxes[-1]]
    for box in reversed(boxes[-MAX_BOXES:-1]):
        gap = text[box.end : run[0].start]
        if len(gap) > _MAX_BETWEEN or not between.fullmatch(gap) or "\n\n" in gap:
            break
        run.insert(0, box)
    return run


def _looks_cut(text: str, end: int) -> bool:
    """True if long text follows the answer and does not end like a sentence."""
    tail = text[end:].strip()
    return len(tail) > _MAX_TAIL and not _FINISHED.search(tail[-20:])


def _cued(text: str) -> Found:
    """Find the answer after the last cue, on the same line or the next non-empty one."""
    cues = list(_CUE.finditer(text))
    if not cues:
        whole = _unwrap(text) or ""
        return Found((whole,) if _is_bare_answer(whole) else (), (), (), False)
    cue = cues[-1]
    rest = text[cue.end() : cue.end() + 2000].lstrip()
    line = rest.split("\n", 1)[0]
    if re.fullmatch(r"\s*(\\\[|\$\$)\s*", line):
        line = rest.split("\n\n", 1)[0]
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    answers = [reading for reading in _readings(sentence) if reading]
    if re.fullmatch(r"\W*[A-J]", sentence):
        answers.append(line.strip())  # "C. 12"
    return Found(tuple(dict.fromkeys(answers)), (), (), _looks_cut(text, cue.end() + len(line)))


def _is_bare_answer(text: str) -> bool:
    """True for a short formula, possibly with a unit, the letter of an option, yes or no."""
    if (
        not text
        or len(text) > MAX_BARE_CHARS
        or "\n" in text
        or re.search(r"\\(?:boxed|fbox)", text)
    ):
        return False
    words = re.findall(r"[^\W\d_]{2,}", _COMMANDS.sub(" ", text))
    has_formula = any(character.isdigit() or character == "\\" for character in text)
    is_formula = not words or (len(words) <= 2 and (" " not in text or not text[0].isalpha()))
    return (has_formula and is_formula) or _SHORT.fullmatch(text) is not None


def _unwrap(line: str) -> str | None:
    """Strip Markdown emphasis, surrounding dollar signs and a closing full stop."""
    bare = line.strip().strip("*`").strip().rstrip(".").strip().strip("*`").strip()
    bare += "." if bare.endswith("\\right") else ""
    if bare.count("{") < bare.count("}"):  # of a \text{
        bare = re.sub(r"(?:\\\]|\$\$)$", "", bare.removeprefix("}")).strip()
    if bare.count("{") < bare.count("}"):
        bare = bare.removesuffix("}")
    if len(bare) > 1 and bare.startswith("$") and bare.endswith("$") and bare.count("$") in (2, 4):
        bare = bare.strip("$").strip()
    return bare or None


def _readings(sentence: str) -> list[str | None]:
    """Return the possible answers in a sentence ("The largest $n$ is 34."), likeliest first."""
    sentence = _REASON.sub("", sentence) or sentence
    stated = _stated(sentence)
    if stated and _VALUE.match(stated):
        return [_unwrap(stated), _only_maths(stated), _unwrap(sentence)]
    formula = _only_maths(sentence)
    is_name = bool(
        stated and formula and re.fullmatch("[A-Za-z]", formula)
    )  # the $n$ of "$n$ is at least 34"
    return [None if is_name else formula, _unwrap(stated or ""), _unwrap(sentence)]


def _stated(sentence: str) -> str | None:
    """Return the value stated by the last clause that states one, else the last statement.

    None if a clause makes two statements.
    """
    found = None
    for clause in reversed(_CLAUSE.split(sentence)):
        verbs = list(_STATES.finditer(clause))
        if verbs and _JOINS.search(clause, verbs[0].end(), verbs[-1].start()):
            return None
        concluded = "" if verbs or clause.startswith("which") else _only_maths(clause) or ""
        stated = clause[verbs[-1].end() :] if verbs else concluded
        if _VALUE.match(stated):
            return stated
        found = found or stated
    return found


def _only_maths(sentence: str) -> str | None:
    """Return the formula of a sentence if it has exactly one."""
    found = _MATHS.findall(sentence)
    return "".join(found[0]).strip() or None if len(found) == 1 else None
