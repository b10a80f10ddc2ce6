"""Recognises which columns of a file hold which part of a problem, and reads its rows so."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from eval.answers.extraction import extract_boxed
from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.options import (
    MEANINGS,
    AnswerAs,
    Options,
    is_several,
    listed_in,
    options_in,
    readings,
    with_options,
)
from eval.problems.prompts import Message
from eval.problems.rows import (
    IDS,
    LEVELS,
    QUESTION,
    SUBJECTS,
    Row,
    Schema,
    needed,
    problem_of,
    with_images,
)
from eval.problems.values import (
    MEDIA,
    Unusable,
    chat_of,
    images_in,
    images_in_chat,
    is_missing,
    text_in,
)

# Usual names of columns, in lower case without spaces and signs, the likeliest first.
_PROBLEMS = (
    "problem question query prompt instruction questiontext questionstem problemtext originaltext "
    "stem ctx goal sentence "
    "messages conversations conversation dialogue chat input inputs text body q 问题 题目 题干"
).split()
_CONTEXTS = (
    "context passage body article paragraph story background support premise scenario document "
    "material input 背景 材料 资料"
).split()
_OPTIONS = "choices options option endings candidates answerchoices alternatives 选项".split()
_ANSWERS = (
    "answer finalanswer answerkey gold golden goldanswer goldlabel answernumber groundtruth "
    "correctanswer correctoption correct expected expectedanswer referenceanswer answeridx "
    "answerindex target label cop answers labels targets ans finalans a 答案 正确答案 solution "
    "result rewardmodel output response completion"
).split()
_IMAGES = (
    "images image imgs img pictures picture imagepaths imagepath imgpath imagefiles imagefile "
    "imageurls imageurl"
).split()
_MEDIA = "videos video audios audio".split()
_FURTHER_PARTS = (
    "table code schema hypothesis evidence facts system systemprompt pretext posttext paragraphs"
).split()
_PARTS = {*_PROBLEMS, *_CONTEXTS, *_OPTIONS, *_IMAGES, *_MEDIA, *_FURTHER_PARTS}
_AFTER = "input"  # follows an instruction; other contexts precede the question
_WRONG = re.compile("distractor|incorrect|wrong")
_ONE_OPTION = re.compile(
    r"(|options?|choices?|candidate|ending|answer|opt?|sol|选项)[\s_.-]*([A-J]|\d)[).]?",
    re.IGNORECASE,
)
_DETAILS = {"id": IDS, "subject": SUBJECTS, "level": LEVELS, "data_source": ("data_source",)}
_RUNS = ("ABCDEFGHIJ", "0123456789", "123456789")


@dataclass(frozen=True)
class Layout:
    """The columns of a file by what they hold. A name may be a path, such as `question.stem`."""

    problem: tuple[str, ...] = ()  # texts, joined by blank lines
    messages: str | None = None  # or a chat that ends with the problem
    options: tuple[str, ...] | None = None  # one column, or one for each; None: by name
    answer: str | None = None  # None: the last message of the chat
    answer_as: AnswerAs | None = None  # what answers are of the options
    id: str | None = None
    subject: str | None = None
    level: str | None = None
    data_source: str | None = None
    system: str | None = None
    elsewhere: tuple[str, ...] = ()  # columns that the prompt template uses

    @property
    def names_columns(self) -> bool:
        """True if any column is named, besides those of the template."""
        return replace(self, elsewhere=()) != Layout()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are used."""
        named = [getattr(self, one.name) for one in fields(self) if one.name != "answer_as"]
        listed = [value if isinstance(value, tuple) else (value,) for value in named if value]
        return tuple(name for names in listed for name in names)

    @property
    def main(self) -> str:
        """The column that every row needs; further parts of the problem may be blank."""
        words = {_word(name): name for name in self.problem}
        likely = [words[word] for word in _PROBLEMS if word in words and word not in _CONTEXTS]
        return self.messages or (*likely, self.problem[-1])[0]

    def describe(self) -> str:
        """Return what each column is taken for."""
        options = f", its options in {', '.join(self.options)}" if self.options else ""
        meaning = f" ({MEANINGS[self.answer_as]})" if self.answer_as else ""
        return (
            f"the problem is in {' and '.join(self.problem) or self.messages}{options} and the "
            f"answer in {self.answer or 'its last message'}{meaning}"
        )


def complete(path: Path, rows: Sequence[Row], given: Layout) -> Layout:
    """Return the layout of a file by its first rows: columns as `given`, the others by name.

    Raises ProblemsError if a given column is missing, or if no name suggests problem or answer.
    """
    found = _Named(rows)
    named = replace(given, elsewhere=()).columns
    if unknown := [name for name in named if name not in (*found.outer, *found.inner)]:
        raise ProblemsError(
            f"{path} has no column {unknown[0]}, only {', '.join(found.outer)}; correct "
            "data.columns (dapo init: --columns)"
        )
    layout = given
    if not layout.problem and layout.messages is None:
        layout = found.with_problem(layout)
    if layout.options is None:
        layout = replace(layout, options=found.options(layout.columns))
    if layout.answer is None:
        layout = found.with_answer(layout)
    if layout.answer is None and not given.problem:
        chat = next(filter(found.is_answered, found.outer), None)
        layout = layout if chat is None else replace(layout, problem=(), messages=chat)
    has_problem = bool(layout.problem or layout.messages)
    if not has_problem or (layout.answer is None and not found.is_answered(layout.messages)):
        missing = "answer" if has_problem else "problem"
        raise ProblemsError(
            f"{path} has the columns {', '.join(found.outer)}, and no name suggests that it holds "
            f"the {missing}; set data.columns.{missing}=NAME (dapo init: --columns {missing}=NAME)"
        )
    details = ["subject", "level"]
    details += [] if given.names_columns else ["id"]
    details += [] if given.names_columns or layout.options else ["data_source"]
    return found.with_details(layout, details)


class _Named:
    """The columns in the first rows of a file, and those of objects in them, by their names."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        pairs = [(name, value) for row in rows for name, value in row.items()]
        objects = [(name, value) for name, value in pairs if isinstance(value, Mapping)]
        self.outer = list(rows[0])
        self.inner = list(dict.fromkeys(f"{name}.{key}" for name, one in objects for key in one))

    def first(self, name: str) -> Any:
        """Return the first value of a column that is not missing, else None."""
        values = (value_at(row, name) for row in self.rows)
        return next((value for value in values if not is_missing(value)), None)

    def chat(self, name: str) -> tuple[Message, ...] | None:
        """Return the first value of a column as a chat, () if it has pictures."""
        try:
            return chat_of(self.first(name))
        except Unusable:
            return ()

    def holds_text(self, name: str) -> bool:
        """True if the first value of a column is a text or a chat, and no other object."""
        try:
            return self.chat(name) is not None or text_in(self.first(name)) is not None
        except Unusable:
            return False

    def likely(self, words: Sequence[str], taken: Sequence[str] = ()) -> Iterator[str]:
        """Yield the free columns with one of these names, the likeliest first, then inner ones.

        Those without a value come last.
        """
        for names in (self.outer, self.inner):
            by_word: dict[str, str] = {}
            for name in names:
                is_free = name not in taken and name.partition(".")[0] not in taken
                if is_free and (names is self.outer or len(_word(name)) > 1):
                    by_word.setdefault(_word(name), name)
            found = (by_word[word] for word in words if word in by_word)
            yield from sorted(found, key=lambda name: self.first(name) is None)

    def with_problem(self, layout: Layout) -> Layout:
        """Add the likeliest problem, with the columns that belong to it."""
        likely = self.likely(_PROBLEMS, layout.columns)
        main = next((name for name in likely if self.holds_text(name)), None)
        if main is None:
            return layout
        if self.chat(main) is not None:
            return replace(layout, messages=main)
        likely = self.likely(_CONTEXTS, (*layout.columns, main))
        contexts = {name for name in likely if name in self.outer and self.first(name) is not None}
        after = [name for name in self.outer if name in contexts and _word(name) == _AFTER]
        before = [name for name in self.outer if name in contexts and name not in after]
        return replace(layout, problem=(*before, main, *after))

    def options(self, taken: Sequence[str]) -> tuple[str, ...]:
        """Return the column of options, or the columns of one option each, if any."""
        for name in self.likely((*_OPTIONS, "answers"), taken):
            is_named = _word(name) in _OPTIONS or self.is_answered_by_others((name,))
            if is_several(self.first(name)) and is_named:
                return (name,)
        runs: dict[str, list[str]] = {}
        for name in self.outer:
            if (match := _ONE_OPTION.fullmatch(name)) and name not in taken:
                runs.setdefault(match[1].casefold(), []).append(name)
        for prefix, names in runs.items():
            labels = "".join(map(_label, names))
            is_run = len(names) > 1 and any(one.startswith(labels) for one in _RUNS)
            if not is_run or (prefix == "" and not labels.isalpha()):
                continue
            # a and b may be numbers, answer1 and answer2 both right
            is_certain = bool(prefix) or names[0].isupper()
            is_certain &= prefix != "answer" or labels.isalpha()
            if is_certain or self.is_answered_by_others(names):
                return tuple(names)
        return ()

    def is_answered_by_others(self, options: Sequence[str]) -> bool:
        """True if a column of answers names one of the options."""
        answers = self.likely(_ANSWERS, options)
        return any(self.has_answers(tuple(options), name) for name in answers)

    def with_answer(self, layout: Layout) -> Layout:
        """Add the likeliest answer; with options, the likeliest that names one of them."""
        likely, options = list(self.likely(_ANSWERS, layout.columns)), layout.options
        if options:
            likely.sort(key=lambda name: not self.has_answers(options, name))
        return replace(layout, answer=next(iter(likely), None))

    def with_details(self, layout: Layout, details: Iterable[str]) -> Layout:
        """Add the columns of these details that have usual names."""
        taken = replace(layout, elsewhere=()).columns
        found: dict[str, Any] = {}
        for detail in details:
            likely = self.likely(tuple(map(_word, _DETAILS[detail])), taken)
            usual = (name for name in likely if name in self.outer and self.holds_text(name))
            found[detail] = getattr(layout, detail) or next(usual, None)
        return replace(layout, **found)

    def has_answers(self, options: tuple[str, ...], answer: str) -> bool:
        """True if most values of the answer name one of the options."""
        pairs = list(answered(self.rows, Layout(options=options, answer=answer)))
        return sum(bool(readings(*pair)) for pair in pairs) > len(pairs) / 2

    def is_answered(self, messages: str | None) -> bool:
        """True if the chats end with a message of an assistant."""
        chat = self.chat(messages) if messages else None
        return chat is not None and (not chat or chat[-1]["role"] == "assistant")


def schema_of(layout: Layout, columns: Sequence[str]) -> Schema:
    """Return the schema of rows with this layout; `columns` are all that the file has."""
    images = image_columns(columns)
    media = [name for name in columns if _word(name) in _MEDIA]

    def read(row: Row) -> Problem:
        if any(not is_missing(row.get(name)) for name in media):
            raise Unusable(MEDIA)
        problem, held = read_text(row), images_in(row, images)
        if not held and layout.messages:
            held = images_in_chat(value_at(row, layout.messages))
        return with_images(problem, held)

    def read_text(row: Row) -> Problem:
        text, messages, answer = _asked(row, layout)
        answer = value_at(row, layout.answer) if layout.answer else answer
        named = {name: getattr(layout, name) for name in _DETAILS}
        details = {name: value_at(row, column) for name, column in named.items() if column}
        if not layout.options:
            gold = text_in(answer, layout.answer or "answer")
            gold = final_answer(needed(gold, f"no {layout.answer or 'answer of an assistant'}"))
            return problem_of(details, text, gold, messages=messages)
        options = _options_of(row, layout.options, text)
        meaning = layout.answer_as or "letter"
        gold = "" if is_missing(answer) else readings(options, answer).get(meaning, "")
        needed(gold, f"no {layout.answer} that is {MEANINGS[meaning]}")
        listed = with_options(text, options)
        if messages:
            messages = (*messages[:-1], {**messages[-1], "content": listed})
        info = {"choices": list(options.texts), QUESTION: text}
        return problem_of(details, listed, gold, messages=messages, extra_info=info)

    def outer(name: str) -> str:
        return name if name in columns else name.partition(".")[0]

    needs = [outer(name) for name in (layout.main, layout.answer) if name]
    return Schema(tuple(needs), read, (*map(outer, layout.columns), *images, *media))


def image_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns whose names say that they hold pictures."""
    return [name for name in columns if _word(name) in _IMAGES]


def _asked(row: Row, layout: Layout) -> tuple[str, tuple[Message, ...] | None, Any]:
    """Return the problem, its chat if it is one, and the assistant's answer at the chat's end."""
    if layout.messages is None:
        texts = {name: text_in(value_at(row, name), name) for name in layout.problem}
        needed(texts[layout.main], f"no {layout.main}")
        return "\n\n".join(filter(None, texts.values())), None, None
    messages, answer = chat_of(value_at(row, layout.messages)) or (), None
    if messages and messages[-1]["role"] == "assistant":
        messages, answer = messages[:-1], messages[-1]["content"]
    if not messages:
        raise Unusable(f"no chat messages in {layout.messages}")
    return messages[-1]["content"], messages, answer


def answered(rows: Iterable[Row], layout: Layout) -> Iterator[tuple[Options, Any]]:
    """Yield the options and the answer of each row that has both."""
    for row in rows:
        options = options_at(row, layout.options or ())
        answer = value_at(row, str(layout.answer))
        if options is not None and not is_missing(answer):
            yield options, answer


def options_at(row: Row, names: Sequence[str]) -> Options | None:
    """Return the options in these columns of a row, None if they cannot be read."""
    with contextlib.suppress(Unusable):
        return _options_of(row, names, "")
    return None


def _options_of(row: Row, names: Sequence[str], question: str) -> Options:
    """Return the options in these columns, or those that the question lists. Raises Unusable."""
    values = {_label(name): value_at(row, name) for name in names}
    listed = listed_in(question)
    if listed and all(map(is_missing, values.values())):
        return Options(listed, listed)
    return options_in(values)


def value_at(row: Row, name: str) -> Any:
    """Return the value of a column, or of a path into an object; None without one."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    value = row.get(outer)
    return value_at(value, inner) if inner and isinstance(value, Mapping) else None


def final_answer(text: str) -> str:
    """Return the final answer of a solution: after `####`, else its last box, else all of it."""
    _, sign, number = text.rpartition("####")
    if sign and number.strip():
        return number.strip().splitlines()[0].strip()
    return (extract_boxed(text) or text).strip()


def unused_besides(
    rows: Sequence[Row], used: Sequence[str], answer: str | None = None, has_options: bool = False
) -> tuple[list[str], list[str]]:
    """Return the columns that are not used, and those of them that may be parts of the problem.

    Their names suggest that, or they hold options that the answers name, unless it `has_options`.
    """
    named, outer = _Named(rows), {name.partition(".")[0] for name in used}
    free = [name for name in named.outer if name.strip() and name not in outer]
    names = [name for name in free if named.first(name) is not None]
    texts = [name for name in names if named.chat(name) is None]
    parts = {name for name in texts if _word(name) in _PARTS or _WRONG.match(_word(name))}
    options = {*named.options(tuple(outer)), *(name for name in texts if _word(name) in _OPTIONS)}
    if has_options:
        parts -= options
    else:
        parts |= options
        parts |= {name for name in texts if answer and named.has_answers((name,), answer)}
    return names, [name for name in texts if name in parts]


def _word(name: str) -> str:
    """Return a column's name, or the last part of its path, in lower case without signs."""
    return re.sub(r"[\W_]+", "", name.rpartition(".")[2]).casefold()


def _label(name: str) -> str:
    match = _ONE_OPTION.fullmatch(name)
    return match[2].upper() if match else name
