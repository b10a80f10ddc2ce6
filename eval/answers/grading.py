"""Graders of responses: the exact rule together with AISBench's, or multiple-choice options as a set."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, Self

from eval import EvaluationError, InputError
from eval.answers.aisbench import extract_aisbench, is_equal_aisbench, without_thinking
from eval.answers.choice import find_options
from eval.answers.extraction import Found, find_answer
from eval.answers.latex import MAX_ANSWER_CHARS
from eval.answers.pool import CallFailed, Pool, StartFailed

logger = logging.getLogger(__name__)

Verdict = Literal["right", "wrong", "no_answer", "truncated", "request_failed"]
VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "no_answer", "truncated", "request_failed")
GraderName = Literal["mathematics", "choice", "loglikelihood"]

_PLAIN_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3}){1,9}|\d{1,30})(\.\d{0,30})?", re.ASCII)
OWN_RULES = ("scorer-",)  # how the rules of graders that a recipe sets begin
# The model ended the response itself, in the words of vLLM and OpenAI, TGI and Anthropic. Anything else, such as
# length, abort, content_filter or error, cut it off.
_FINISHED = ("stop", "eos_token", "stop_sequence", "end_turn")

Comparison = Callable[[Found, str], bool]  # True when what was found is the gold answer


class Grade(NamedTuple):
    """The result of both rules for one response.

    `answer` and `verdict` are the exact rule's, the headline; `aisbench_*` are AISBench's, which only knows
    right and wrong and ignores how the response ended.
    """

    answer: str | None  # None when there is none
    verdict: Verdict
    aisbench_answer: str | None
    aisbench_right: bool
    aisbench_raises: bool  # AISBench itself would have raised here
    details: dict[str, Any] | None = None  # what else the grader says, such as a scorer's score


class Asked(Protocol):
    """What graders read of an item."""

    @property
    def gold(self) -> str:
        """The gold answer."""

    @property
    def data_source(self) -> str | None:
        """As a training's scorer gets it."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """As a training's scorer gets it."""


class Grader:
    """Grades one response at a time, from any thread. A context manager."""

    rule: str  # with its version; recorded with every result, so that rows of different rules never mix
    num_killed = 0  # rows that exceeded a limit of time or memory and count as wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False) -> Grade:
        """The verdict on a response; None stands for a failed request."""
        raise NotImplementedError

    def grade_item(self, response: str | None, finish_reason: str | None, item: Asked, is_chat: bool) -> Grade:
        """`grade`, for graders that read more of an item than its gold answer."""
        return self.grade(response, finish_reason, item.gold, is_chat)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Asked, is_chat: bool
    ) -> Grade | None:
        """`grade_item` for responses that need no process; None for those that do."""
        return self.grade_item(response, finish_reason, item, is_chat)

    def close(self) -> None:
        """Stop the grader's process, if it has one."""


class ChoiceGrader(Grader):
    """Right when the response names exactly the gold options, in any order; never if it was cut off.

    AISBench has no string rule for such sets: its columns hold the same comparison, made even for a truncated
    response.
    """

    rule = "choice-letters/3"

    def grade(self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False) -> Grade:
        """The verdict on a response; None stands for a failed request."""
        if response is None:
            return Grade(None, "request_failed", None, False, False)
        answer = find_options(response) or None
        is_equal = answer == gold
        verdict: Verdict = "right" if is_equal else "wrong" if answer else "no_answer"
        return Grade(answer, "truncated" if is_cut(finish_reason) else verdict, answer, is_equal, False)


class WeighedGrader(Grader):
    """Right when the likeliest option is the gold one. The prompt asks for no form, so nothing can be missed."""

    rule = "loglikelihood/1"

    def grade(self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False) -> Grade:
        """The verdict on an option; None stands for a failed request."""
        if response is None:
            return Grade(None, "request_failed", None, False, False)
        is_right = response == gold
        return Grade(response, "right" if is_right else "wrong", response, is_right, False)


class MathGrader(Grader):
    """The exact rule. Where strings and plain numbers do not decide, it runs in a process that can be killed.

    A row that takes longer than `timeout_seconds` or more than `memory_bytes` is graded wrong and counted. The
    process starts with the first row that needs it.
    """

    rule = "exact/5+aisbench-v2/2"

    def __init__(self, timeout_seconds: float = 1.5, memory_bytes: int = 1 << 30) -> None:
        self.memory_bytes = memory_bytes
        self._pool = Pool(
            f"{__name__}:load_exact_rule", timeout_seconds=timeout_seconds, memory_bytes=memory_bytes
        )
        self._lock = threading.Lock()

    def grade(self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False) -> Grade:
        """Same as the function `grade`, under the limits; blocks until it is done."""
        return grade(response, finish_reason, gold, is_chat, self._is_gold)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Asked, is_chat: bool
    ) -> Grade | None:
        """The verdict where strings or plain numbers decide, else None."""
        try:
            return grade(response, finish_reason, item.gold, is_chat, _undecided)
        except _Undecided:
            return None

    def close(self) -> None:
        """Stop the process; rows that other threads still wait for are graded wrong."""
        self._pool.close()

    def _is_gold(self, found: Found, gold: str) -> bool:
        if len(gold) > MAX_ANSWER_CHARS or max(map(len, found.answers)) > MAX_ANSWER_CHARS:
            return False  # equal strings are right without it
        if sum(map(len, found.boxes)) > MAX_ANSWER_CHARS:
            found = found._replace(boxes=())
        try:
            return bool(self._pool.submit(tuple(found), gold).result())
        except CallFailed as error:
            logger.info("comparing %r with %r %s", found.answers[0][:100], gold, error)
            with self._lock:
                self.num_killed += 1
            return False
        except StartFailed as error:
            raise EvaluationError(
                f"the grading process {error}; its output is in the log. A limit of {self.memory_bytes:,} bytes "
                "of memory may be too low."
            ) from None


class _Undecided(Exception):
    """Only the exact rule can tell."""


def _undecided(found: Found, gold: str) -> bool:
    raise _Undecided


GRADERS: dict[GraderName, type[Grader]] = {
    "mathematics": MathGrader,
    "choice": ChoiceGrader,
    "loglikelihood": WeighedGrader,
}


def grader_of(rule: str) -> GraderName:
    """The grader with this rule, as settings.json records it, in any version.

    Raises InputError for the rule of a grader that needs more than the stored rows.
    """
    if rule.startswith(OWN_RULES):
        raise InputError(
            f"these responses were graded by {rule}, which needs their problems: repeat `dapo eval` with the same "
            "settings, which grades stored responses again without asking the model"
        )
    kinds = {kind.rule.partition("/")[0]: name for name, kind in GRADERS.items()}
    return kinds.get(rule.partition("/")[0], "mathematics")


def load_exact_rule() -> Callable[[tuple[Any, ...], str], bool]:
    """The comparison for a grading process; loads mpmath before the first row's time limit starts."""
    is_gold_exact(Found(("\\sqrt{2}",), (), (), False), "\\sqrt{3}")
    return lambda found, gold: is_gold_exact(Found(*found), gold)


def is_gold_exact(found: Found, gold: str) -> bool:
    """True when the answer found in a response is the gold answer under the exact rule.

    Adjacent boxes are a list of answers, or one answer in several forms. If the gold answer is a list, all boxes
    of the response together may be that list.
    """
    from eval.answers.exact import is_equal_exact, is_list

    if any(is_equal_exact(answer, gold) for answer in found.answers):
        return True
    if len(found.run) > 1 and all(is_equal_exact(box, gold) for box in found.run):
        return True
    return len(found.boxes) > len(found.run) and is_list(gold) and is_equal_exact(", ".join(found.boxes), gold)


def grade(
    response: str | None,
    finish_reason: str | None,
    gold: str,
    is_chat: bool = False,
    is_gold: Comparison = is_gold_exact,
) -> Grade:
    """Verdicts on one response; `response` None means that the request failed. In place, without limits.

    `is_chat` says that a chat API gave the response: AISBench then leaves out its thinking, the exact rule always.

    A response stopped by the length limit or the server is `truncated` whatever it holds: unfinished text is
    never right, since a box halfway through a solution is not the answer the model would have given. Where the
    server gives no reason (None), the text decides: thinking or a box that does not close, or long text after
    the answer that breaks off.
    """
    if response is None:
        return Grade(None, "request_failed", None, False, False)
    aisbench_answer, raises = extract_aisbench(without_thinking(response) if is_chat else response)
    aisbench_right = is_equal_aisbench(aisbench_answer, gold)
    found = find_answer(response)
    answer = found.answers[0] if found.answers else None
    return Grade(answer, _verdict(is_gold, found, finish_reason, gold), aisbench_answer, aisbench_right, raises)


def _verdict(is_gold: Comparison, found: Found, finish_reason: str | None, gold: str) -> Verdict:
    if is_cut(finish_reason) or (finish_reason is None and found.looks_cut):
        return "truncated"
    if not found.answers:
        return "no_answer"
    decided = _decide_quickly(found.answers, gold)
    if decided is None:
        decided = is_gold(found, gold)
    return "right" if decided else "wrong"


def is_cut(finish_reason: str | None) -> bool:
    """Whether something else than the model ended the response."""
    return finish_reason is not None and finish_reason not in _FINISHED


def _decide_quickly(answers: Sequence[str], gold: str) -> bool | None:
    """True or False where strings or plain numbers decide, else None."""
    if gold in answers:
        return True
    if len(answers) > 1:
        return None
    numbers = parse_number(answers[0]), parse_number(gold)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1]


def parse_number(text: str) -> Fraction | None:
    """The value of an integer or decimal with optional thousands separators and dollar signs, else None."""
    match = _PLAIN_NUMBER.fullmatch(text.strip(" $"))
    return Fraction(match.group().replace(",", "").rstrip(".")) if match else None
