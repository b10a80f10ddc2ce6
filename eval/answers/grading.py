"""Graders: the exact rule beside AISBench's rules, multiple choice, log-likelihoods, scorers."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, Self

from eval import EvaluationError, InputError
from eval.answers.aisbench import extract_aisbench, is_equal_aisbench, without_thinking
from eval.answers.choice import find_options, option_letters
from eval.answers.extraction import Found, find_answer
from eval.answers.latex import MAX_ANSWER_CHARS
from eval.answers.mathruler import extract_mathruler, is_equal_mathruler, is_same
from eval.answers.pool import CallFailed, Pool, StartFailed

logger = logging.getLogger(__name__)

Verdict = Literal["right", "wrong", "no_answer", "truncated", "request_failed"]
VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "no_answer", "truncated", "request_failed")
GraderName = Literal["mathematics", "geometry", "choice", "loglikelihood"]

_PLAIN_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3}){1,9}|\d{1,30})(\.\d{0,30})?", re.ASCII)
_VERSION = re.compile(r"/\d+")
SCORER_RULES = "scorer-"  # prefix of the rules of evaluate.scorer
# How servers say that the model ended the response itself, and that it was cut off: the letters
# alone, in lower case. Any other reason says neither.
_FINISHED = frozenset(
    "stop stopsequence stopstring stoptoken stopword stopwords eos eostoken eostokenid endid "
    "endturn endofturn endoftext complete completed finish finished normal toolcall toolcalls "
    "tooluse functioncall".split()
)
_CUT = frozenset(
    "length limit maxlength maxtokens maxnewtokens maxoutputtokens maxcompletiontokens "
    "maximumtokens modellength modelcontextwindowexceeded incomplete abort aborted cancel "
    "canceled cancelled usercancel timeout error networkerror insufficientsystemresource "
    "contentfilter contentfiltered guardrailintervened refusal safety sensitive recitation "
    "blocklist prohibitedcontent spii".split()
)
_MAX_FAILURES = 16  # of a scorer that never returned a score

Comparison = Callable[[Found, str], bool]  # (answer found, gold) -> equal
Published = Callable[[str, str], "AISBench"]  # (response without thinking, gold) -> verdict


@dataclass
class AISBench:
    """The verdict of AISBench's rule for the benchmark, which ignores how the response ended."""

    answer: str
    is_right: bool
    raises: bool  # AISBench's own code would raise


class Grade(NamedTuple):
    """The answer found in a response, the headline verdict, and what else the grader says."""

    answer: str | None
    verdict: Verdict
    aisbench: AISBench | None = None  # a second verdict, for mathematics only
    details: dict[str, Any] | None = None  # further results, such as a scorer's score


_REQUEST_FAILED = Grade(None, "request_failed")


class Gradable(Protocol):
    """The fields of an item that graders read."""

    @property
    def gold(self) -> str:
        """The gold answer."""

    @property
    def problem(self) -> str:
        """The problem as it was asked."""

    @property
    def data_source(self) -> str | None:
        """First argument of a training scorer."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """Last argument of a training scorer."""


class Grader:
    """Grades responses one at a time, from any thread. Use as a context manager."""

    rule: str  # name and version, stored with every result: rows of different rules never mix
    num_killed = 0  # rows graded wrong because they exceeded a time or memory limit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(
        self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False
    ) -> Grade:
        """Grade a response; None stands for a failed request."""
        raise NotImplementedError

    def grade_item(
        self, response: str | None, finish_reason: str | None, item: Gradable, is_chat: bool
    ) -> Grade:
        """Grade a response to an item. Override if the gold answer alone is not enough."""
        return self.grade(response, finish_reason, item.gold, is_chat)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Gradable, is_chat: bool
    ) -> Grade | None:
        """Grade a response in place, or return None if grading it needs a separate process."""
        return self.grade_item(response, finish_reason, item, is_chat)

    def close(self) -> None:
        """Stop the grader's process, if any."""


class ChoiceGrader(Grader):
    """Right if the response names exactly the gold options, in any order, and was not cut off."""

    rule = "choice-letters/4"

    def grade(
        self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False
    ) -> Grade:
        """Grade a response; None stands for a failed request."""
        if response is None:
            return _REQUEST_FAILED
        answer = find_options(response) or None
        verdict: Verdict = (
            "right" if answer == option_letters(gold) else "wrong" if answer else "no_answer"
        )
        return Grade(answer, _unless_cut(finish_reason, verdict))


class LikelihoodGrader(Grader):
    """Right if the likeliest option is the gold one."""

    rule = "loglikelihood/1"

    def grade(
        self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False
    ) -> Grade:
        """Grade the likeliest option; None stands for a failed request."""
        if response is None:
            return _REQUEST_FAILED
        return Grade(response, "right" if response == gold else "wrong")


class ScorerGrader(Grader):
    """Grades with a training scorer: right if `acc`, by default the score, is at least 1.

    The scorer runs in killable processes and sees what it sees in training: the whole text,
    including thinking that the server left in it. Its extra_info also has the `problem`. A call
    that fails or times out is graded wrong and counted. A scorer whose first 16 calls all fail is
    not called again.
    """

    def __init__(self, pool: Pool, scorer: str | None, rule: str) -> None:
        """`pool` calls the function of dapo_core.reward.custom.load_scorer with `scorer` as its
        first argument.
        """
        self.rule = rule
        self._pool, self._scorer = pool, scorer
        self._lock = threading.Lock()
        self._has_scored = False
        self._failures: dict[str, CallFailed] = {}  # the first of each kind

    def grade(
        self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False
    ) -> Grade:
        """Apply the exact rule, which decides whether two answers are equal (maj@k)."""
        return grade(response, finish_reason, gold, is_chat)

    def grade_item(
        self, response: str | None, finish_reason: str | None, item: Gradable, is_chat: bool
    ) -> Grade:
        """Return the scorer's verdict on a response; None stands for a failed request."""
        if response is None:
            return _REQUEST_FAILED
        failed = Grade(None, _unless_cut(finish_reason, "wrong"))
        if self.num_killed >= _MAX_FAILURES and not self._has_scored:
            first = next(iter(self._failures.values()))
            error = f"was not called, because its first {self.num_killed} calls failed: {first}"
            return failed._replace(details={"error": error})
        extra_info = {"problem": item.problem, **item.extra_info}
        call = (self._scorer, item.data_source or "", response, item.gold, extra_info)
        try:
            score, verdict, answer, acc = self._pool.submit(*call).result()
        except CallFailed as error:
            with self._lock:
                self.num_killed += 1
                is_first = self._failures.setdefault(_kind_of(error), error) is error
            if is_first:
                logger.warning(
                    "scoring %r %s\n(similar failures are only counted)", response[-100:], error
                )
            return failed._replace(details={"error": str(error)})
        except StartFailed as error:
            kind = EvaluationError if error.failure is None else InputError
            raise kind(
                f"{self.rule}: a scoring process {error}; correct "
                f"evaluate.scorer\n{error.failure or ''}"
            ) from None
        self._has_scored = True
        details = {"score": score, "acc": acc}
        return Grade(answer, _unless_cut(finish_reason, verdict), details=details)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Gradable, is_chat: bool
    ) -> Grade | None:
        """Return None: every response needs a process."""
        return None

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()


def _kind_of(error: CallFailed) -> str:
    """Return the last code line of the traceback, or the whole message without one."""
    places = [line for line in str(error).splitlines() if line.startswith("  File ")]
    return places[-1] if places else str(error)


class MathGrader(Grader):
    """The exact rule, run in a killable process unless strings or plain numbers decide.

    A row that exceeds `timeout_seconds` or `memory_bytes` is graded wrong and counted. The process
    starts when the first row needs it.
    """

    rule = "exact/8+aisbench-v2/2"

    def __init__(self, timeout_seconds: float = 1.5, memory_bytes: int = 1 << 30) -> None:
        self.memory_bytes = memory_bytes
        self._pool = Pool(
            f"{__name__}:load_comparisons",
            timeout_seconds=timeout_seconds,
            memory_bytes=memory_bytes,
        )
        self._lock = threading.Lock()

    def grade(
        self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False
    ) -> Grade:
        """Grade a response under the limits; blocks until done."""
        return self._grade(response, finish_reason, gold, is_chat, self._is_equal)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Gradable, is_chat: bool
    ) -> Grade | None:
        """Grade a response if strings or plain numbers decide, else return None."""
        try:
            return self._grade(response, finish_reason, item.gold, is_chat, _undecided)
        except _Undecided:
            return None

    def _grade(
        self,
        response: str | None,
        finish_reason: str | None,
        gold: str,
        is_chat: bool,
        is_equal: Callable[[str, Any, str], bool],
    ) -> Grade:
        """`is_equal(name, answer, gold)` compares by one of `load_comparisons`."""
        compare = functools.partial(is_equal, "exact")
        return grade(response, finish_reason, gold, is_chat, compare, by_aisbench)

    def close(self) -> None:
        """Stop the process; rows still being graded in other threads become wrong."""
        self._pool.close()

    def _is_equal(self, name: str, answer: Any, gold: str) -> bool:
        found = answer if isinstance(answer, Found) else Found((answer,), (), (), False)
        if len(gold) > MAX_ANSWER_CHARS or max(map(len, found.answers)) > MAX_ANSWER_CHARS:
            return False  # equal strings were already accepted
        if sum(map(len, found.boxes)) > MAX_ANSWER_CHARS:
            found = found._replace(boxes=())
        try:
            return bool(self._pool.submit(name, tuple(found), gold).result())
        except CallFailed as error:
            logger.info("comparing %r with %r %s", found.answers[0][:100], gold, error)
            with self._lock:
                self.num_killed += 1
            return False
        except StartFailed as error:
            raise EvaluationError(
                f"the grading process {error}; its output is in the log. The memory limit may be "
                "too low: "
                f"{self.memory_bytes:,} bytes."
            ) from None


class GeometryGrader(MathGrader):
    """The exact rule beside mathruler's, by which AISBench grades Geometry3K."""

    rule = "exact/8+mathruler/1"

    def _grade(
        self,
        response: str | None,
        finish_reason: str | None,
        gold: str,
        is_chat: bool,
        is_equal: Callable[[str, Any, str], bool],
    ) -> Grade:
        compare, by_value = (functools.partial(is_equal, name) for name in ("exact", "mathruler"))
        published = functools.partial(by_mathruler, is_same_value=by_value)
        return grade(response, finish_reason, gold, is_chat, compare, published)


class _Undecided(Exception):
    """The exact rule is needed."""


def _undecided(name: str, answer: Any, gold: str) -> bool:
    raise _Undecided


GRADERS: dict[GraderName, type[Grader]] = {
    "mathematics": MathGrader,
    "geometry": GeometryGrader,
    "choice": ChoiceGrader,
    "loglikelihood": LikelihoodGrader,
}


def grader_of(rule: str) -> GraderName:
    """Return the grader of a rule recorded in settings.json, whatever its version.

    Raises InputError for scorers, which need more than the stored rows.
    """
    if rule.startswith(SCORER_RULES):
        raise InputError(
            f"these responses were graded by {rule}, which needs their problems: repeat `dapo "
            "eval` with the same "
            "settings to regrade stored responses without asking the model"
        )
    kinds = {_VERSION.sub("", kind.rule): name for name, kind in GRADERS.items()}
    return kinds.get(_VERSION.sub("", rule), "mathematics")


def load_comparisons() -> Callable[[str, tuple[Any, ...], str], bool]:
    """Return the comparisons by name for a grading process, with mpmath already loaded."""
    is_gold_exact(Found(("\\sqrt{2}",), (), (), False), "\\sqrt{3}")

    def is_equal(name: str, answer: tuple[Any, ...], gold: str) -> bool:
        found = Found(*answer)
        return is_gold_exact(found, gold) if name == "exact" else is_same(found.answers[0], gold)

    return is_equal


def is_gold_exact(found: Found, gold: str) -> bool:
    """True if the answer found in a response equals the gold answer under the exact rule.

    Adjacent boxes are a list of answers, or one answer in several forms. If the gold answer is a
    list, all boxes of the response together may be that list.
    """
    from eval.answers.exact import is_equal_exact, is_list

    if any(is_equal_exact(answer, gold) for answer in found.answers):
        return True
    if len(found.run) > 1 and all(is_equal_exact(box, gold) for box in found.run):
        return True
    return (
        len(found.boxes) > len(found.run)
        and is_list(gold)
        and is_equal_exact(", ".join(found.boxes), gold)
    )


def by_aisbench(response: str, gold: str) -> AISBench:
    """Return the verdict of AISBench's rule for MATH."""
    answer, raises = extract_aisbench(response)
    return AISBench(answer, is_equal_aisbench(answer, gold), raises)


def by_mathruler(
    response: str, gold: str, is_same_value: Callable[[str, str], bool] = is_same
) -> AISBench:
    """Return the verdict of mathruler's rule; `is_same_value` compares two expressions."""
    answer = extract_mathruler(response)
    return AISBench(answer, is_equal_mathruler(answer, gold, is_same_value), raises=False)


def grade(
    response: str | None,
    finish_reason: str | None,
    gold: str,
    is_chat: bool = False,
    is_gold: Comparison = is_gold_exact,
    published: Published = by_aisbench,
) -> Grade:
    """Grade one response in this process, without limits; None stands for a failed request.

    The exact rule always ignores thinking; the published one does so only for responses of a chat
    API (`is_chat`).

    A response stopped by the length limit or by the server is `truncated` whatever it contains: a
    box halfway through a solution is not the answer the model would have given. Without a finish
    reason, or with an unknown one, the text decides: unclosed thinking or an unclosed box, or long
    text after the answer that breaks off.
    """
    if response is None:
        return _REQUEST_FAILED
    aisbench = published(without_thinking(response) if is_chat else response, gold)
    found = find_answer(response)
    answer = found.answers[0] if found.answers else None
    return Grade(answer, _verdict(is_gold, found, finish_reason, gold), aisbench)


def _verdict(is_gold: Comparison, found: Found, finish_reason: str | None, gold: str) -> Verdict:
    is_whole = is_finished(finish_reason)
    if is_whole is False or (is_whole is None and found.looks_cut):
        return "truncated"
    if not found.answers:
        return "no_answer"
    decided = decide_quickly(found.answers, gold)
    if decided is None:
        decided = is_gold(found, gold)
    return "right" if decided else "wrong"


@functools.lru_cache(256)
def is_finished(finish_reason: str | None) -> bool | None:
    """True if the model ended the response itself, False if it was cut off, None if unknown.

    Case, separators and the prefix of an enumeration do not matter: FinishReason.MAX_TOKENS.
    """
    name = (finish_reason or "").lower().rpartition(".")[2].removeprefix("finish_reason")
    letters = re.sub(r"[^a-z]", "", name)
    return True if letters in _FINISHED else False if letters in _CUT else None


def _unless_cut(finish_reason: str | None, verdict: Verdict) -> Verdict:
    return "truncated" if is_finished(finish_reason) is False else verdict


def decide_quickly(answers: Sequence[str], gold: str) -> bool | None:
    """Compare as strings or plain numbers; None if neither decides."""
    if gold in answers:
        return True
    if len(answers) > 1:
        return None
    numbers = parse_number(answers[0]), parse_number(gold)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1]


def parse_number(text: str) -> Fraction | None:
    """Parse an integer or decimal with optional separators and dollar signs, else None."""
    match = _PLAIN_NUMBER.fullmatch(text.strip(" $"))
    return Fraction(match.group().replace(",", "").rstrip(".")) if match else None
