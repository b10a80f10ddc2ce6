"""Imports lm-eval's samples, inspect_ai's logs and AISBench's predictions as results folders."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.answers.choice import are_options
from eval.answers.grading import GRADERS
from eval.endpoint import Endpoint, Sampling
from eval.logs.inspect_archive import read_archive
from eval.problems import ProblemsError
from eval.problems.columns import final_answer
from eval.problems.formats import rows_in
from eval.problems.items import Item
from eval.problems.options import LETTERS
from eval.problems.prompts import Prompt
from eval.problems.values import Unusable, text_in
from eval.requests.identity import encodable
from eval.requests.recorder import regrade_row
from eval.requests.replies import read_content, read_count
from eval.results.rows import (
    SETTINGS_FILE,
    Evaluation,
    ResultsError,
    Row,
    exclusive,
    make_folder,
    make_settings,
    write_json,
    write_rows,
)
from eval.results.scores import ScoresError
from eval.results.summary import Summary, write_summary

logger = logging.getLogger(__name__)

_DIRECTIONS = (
    "name lm-eval's samples_*.jsonl, inspect_ai's log (.eval or .json), or AISBench's predictions "
    "folder or file"
)
_WORD = re.compile(r"[A-Za-z]{2,}|[\u4e00-\u9fff]{2}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_MAX_ANSWER_WORDS = 20
_ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}  # AISBench -> OpenAI


@dataclass(frozen=True)
class Log:
    """The ungraded rows of another program's log, with samples numbered in order."""

    program: str
    benchmark: str
    model: str
    rows: list[Row]
    # None: not recorded
    sampling: Sampling = field(default_factory=lambda: Sampling(None, None, None, seed=None))


def import_log(path: str | Path, output: str | Path) -> Summary:
    """Grade another program's responses into a results folder; return the summary.

    Gold answers come from the log, those of solutions as in MATH and GSM8K. If all are letters A to
    J, options are graded. Raises ResultsError if the log is unreadable, if a gold answer is a whole
    text, or if items have different numbers of samples.
    """
    log = read_log(Path(path))
    golds = {row.gold for row in log.rows}
    options = {row.id: tuple((row.details or {}).get("options", ())) for row in log.rows}
    is_choice = are_options(golds)
    kind = GRADERS[
        "loglikelihood" if any(options.values()) else "choice" if is_choice else "mathematics"
    ]
    if kind is GRADERS["mathematics"]:
        _require_answers(log)
    folder = make_folder(output)
    if (folder / SETTINGS_FILE).exists():
        raise ResultsError(f"{folder} holds an evaluation; choose another --output")
    with exclusive(folder), kind() as grader:
        rows = [row if row.failure else regrade_row(row, grader) for row in log.rows]
        first = {
            row.id: Item(row.id, row.prompt, row.gold, row.subject, row.level, options[row.id])
            for row in reversed(rows)
        }
        num_samples = max(row.sample for row in rows) + 1
        sampling = replace(log.sampling, num_samples=num_samples)
        settings = make_settings(
            list(first.values()),
            Endpoint("", log.model),
            sampling,
            None,
            benchmark=log.benchmark,
            grader=kind.rule,
        )
        settings["imported_from"] = log.program
        evaluation = Evaluation.of(settings, rows)
        write_rows(folder, rows)
        write_json(folder / SETTINGS_FILE, settings)
        return write_summary(folder, evaluation, grader.grade)


def read_log(path: Path) -> Log:
    """Read a log in any supported format. Raises ResultsError."""
    file = _file_at(path)
    try:
        log = _read_file(file)
    except (ProblemsError, ScoresError) as error:
        raise ResultsError(str(error)) from None
    except ResultsError as error:
        raise ResultsError(f"{file}: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultsError(f"{file} is not a readable log ({error!r}); {_DIRECTIONS}") from None
    if not log.rows:
        raise ResultsError(f"{file} has no responses; {_DIRECTIONS}")
    return replace(log, rows=list(_numbered(log.rows)))


def _read_file(file: Path) -> Log:
    if file.suffix == ".eval":
        return _read_inspect(read_archive(file))
    if file.suffix == ".json" and "eval" in (content := json.loads(file.read_bytes())):
        return _read_inspect(content)
    # AISBench before version 3 and OpenCompass write an object of rows by index, without ids
    lines = [{"id": number, **line} for number, line in enumerate(rows_in(file))]
    return _read_lm_eval(file, lines) if "resps" in lines[0] else _read_aisbench(file, lines)


def _numbered(rows: Sequence[Row]) -> Iterator[Row]:
    """Number the samples of each item in order."""
    counts: Counter[str] = Counter()
    for row in rows:
        yield replace(row, sample=counts[row.id])
        counts[row.id] += 1


def _file_at(path: Path) -> Path:
    """Return the file, or the only log in a folder."""
    if path.is_file():
        return path
    lm_eval, aisbench = ("samples_*.jsonl", "*/samples_*.jsonl"), ("predictions/*/*.json*",)
    for pattern in (*lm_eval, *aisbench, "*/*.json*", "*.json*", "*.eval") if path.is_dir() else ():
        if found := sorted(one for one in path.glob(pattern) if not one.stem.endswith("_failed")):
            if len(found) > 1:
                listed = ", ".join(map(str, found[:9]))
                raise ResultsError(
                    f"{path} has {len(found)} logs, and one is imported at a time: type dapo grade "
                    f"{found[0]} --output FOLDER, with a FOLDER for each. They are "
                    f"{listed}{', ...' if found[9:] else ''}"
                )
            return found[0]
    raise ResultsError(f"{path} has no log; {_DIRECTIONS}")


def _row(identity: object, prompt: Prompt, response: object, gold: object, **others: Any) -> Row:
    """Make an ungraded row. Raises ResultsError if the response or the gold answer is not text."""
    is_failed = response is None or others.get("failure") is not None
    text = None if is_failed else encodable(_text_of(response, f"row {identity}: the response"))
    fields: dict[str, Any] = {
        "finish_reason": None,
        "response_tokens": None,
        "answer": None,
        "seconds": 0.0,
        "verdict": "request_failed",
        "attempts": 1,
        "subject": None,
        "level": None,
        "failure": "no response in the log" if is_failed else None,
    }
    known = {"id": str(identity), "sample": 0, "prompt": prompt, "response": text}
    return Row(**{**fields, **known, "gold": _gold_of(gold, identity), **others})


def _gold_of(value: object, identity: object) -> str:
    """Return the gold answer of a row, read like those of problem files. Raises ResultsError."""
    try:
        gold = text_in(value, "gold answer")
    except Unusable as error:
        raise ResultsError(f"row {identity}: {error}; correct this row") from None
    if gold is None:
        raise ResultsError(f"row {identity}: no gold answer; correct this row")
    return final_answer(gold)


def _text_of(value: object, what: str) -> str:
    """Return a text or number as text, also if alone in a list. Raises ResultsError."""
    if isinstance(value, list) and len(value) == 1:
        return _text_of(value[0], what)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    kind = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
    raise ResultsError(f"{what} is not text but {kind}: {str(value)[:100]}; correct this row")


def _require_answers(log: Log) -> None:
    """Raise ResultsError if gold answers are whole texts, which no response could equal."""
    texts = [row for row in log.rows if _is_prose(row.gold)]
    if texts:
        raise ResultsError(
            f"{len(texts)} of {len(log.rows)} gold answers in this log of {log.program} are whole "
            f"texts, such as {texts[0].gold[:100]!r} of row {texts[0].id}: every response would be "
            "wrong. Solutions are read if they end in \\boxed{ANSWER} or #### ANSWER; write the "
            "final answers into the log, or evaluate the set with dapo eval"
        )


def _is_prose(gold: str) -> bool:
    """True for more lines or words than an answer has: at most 12 in the registered sets."""
    is_long = len(_WORD.findall(_COMMAND.sub(" ", gold))) > _MAX_ANSWER_WORDS
    return is_long or ("\n" in gold and "\\begin" not in gold)


def _read_lm_eval(file: Path, lines: Sequence[Mapping[str, Any]]) -> Log:
    """Read lm-eval 0.4: one line per document and filter, with a results file of the same date."""
    benchmark, _, date = file.stem.removeprefix("samples_").rpartition("_")
    beside = file.with_name(f"results_{date}.json")
    about = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    model = str(about.get("model_name") or "unknown")
    first_filter = min(str(line.get("filter")) for line in lines)
    lines = [line for line in lines if str(line.get("filter")) == first_filter]
    settings = requests_of(lines[0])[0][1]
    # a continuation: the log-likelihoods of options, without sampling
    if isinstance(settings, str):
        rows = [_options_row(line) for line in lines]
        return Log("lm-eval", benchmark or file.stem, model, rows, Sampling(1))
    until = settings.get("until") or ()
    sampling = _sampling_of(
        {"max_tokens": settings.get("max_gen_toks"), **settings},
        stop=(until,) if isinstance(until, str) else tuple(map(str, until)),
    )
    rows = [
        _row(line["doc_id"], _messages(requests_of(line)[0][0]), response, _generated_gold(line))
        for line in lines
        for response in line["resps"][0]
    ]
    return Log("lm-eval", benchmark or file.stem, model, rows, sampling)


def _generated_gold(line: Mapping[str, Any]) -> Any:
    """Return the gold answer of a generated response; a letter where the target is an index.

    The target is an index if the document has options, none of which it equals.
    """
    target, document = line["target"], line.get("doc")
    listed = document.get("choices", document.get("options")) if isinstance(document, dict) else ()
    options = listed.get("text") if isinstance(listed, dict) else listed
    if not isinstance(options, list) or str(target) in map(str, options):
        return target
    is_index = str(target).isdecimal() and int(target) < len(options) <= len(LETTERS)
    return LETTERS[int(target)] if is_index else target


def _sampling_of(settings: Mapping[str, Any], stop: tuple[str, ...] = ()) -> Sampling:
    """Return the recorded sampling; None for what is missing or no number."""
    numbers: dict[str, Any] = {
        name: value if isinstance(value := settings.get(name), int | float) else None
        for name in ("max_tokens", "temperature", "top_p", "seed")
    }
    return Sampling(**numbers, stop=stop)


def _options_row(line: Mapping[str, Any]) -> Row:
    """Read a multiple-choice line: requests (prompt, option) with [log-likelihood, is greedy].

    Skips the unconditional requests of acc_mutual_info. Raises ResultsError unless the prompt has
    several options.
    """
    requests = requests_of(line)
    prompt = requests[0][0]
    pairs = [
        (str(option).strip(), float(result[0]))
        for (context, option), result in zip(requests, line["filtered_resps"], strict=True)
        if context == prompt
    ]
    options = [option for option, _ in pairs]
    target = _gold_of(line["target"], line["doc_id"])
    gold = options[int(target)] if target.isdecimal() and int(target) < len(options) else target
    if len(set(options)) < 2 or gold not in options:
        raise ResultsError(
            f"document {line['doc_id']} has {len(set(options))} options after one prompt and the "
            f"target {target!r}; of lm-eval's log-likelihoods, only multiple choice with one right "
            "option is imported"
        )
    likeliest = max(pairs, key=lambda pair: pair[1])[0]
    details = {"options": options, "log_probs": [value for _, value in pairs]}
    return _row(line["doc_id"], _messages(prompt), likeliest, gold, details=details)


def requests_of(line: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return a document's requests: (prompt, settings or an option); version 0.4.2 lists them.

    A chat prompt is a list of one JSON text.
    """
    found = line["arguments"]
    if isinstance(found, list):
        return [(one[0], one[1]) for one in found]
    named = [found[f"gen_args_{number}"] for number in range(len(found))]
    return [(one["arg_0"], one["arg_1"]) for one in named]


def first_text(responses: Any) -> str | None:
    """Return the first text in lm-eval's nested lists of responses; None without one."""
    while isinstance(responses, list) and responses:
        responses = responses[0]
    return responses if isinstance(responses, str) else None


def _messages(prompt: Any) -> Prompt:
    return _chat_of(json.loads(prompt[0]) if isinstance(prompt, list) else prompt)


def _chat_of(prompt: Any) -> Prompt:
    """Return a prompt: text, or messages with the texts of their contents and OpenAI's roles."""
    if not isinstance(prompt, list):
        return _text_of(prompt, "a prompt")
    return tuple(
        {
            "role": _ROLES.get(one["role"], one["role"]),
            "content": read_content(one.get("prompt", one.get("content")))[0],
        }
        for one in prompt
    )


def _read_inspect(content: Mapping[str, Any]) -> Log:
    """Read inspect_ai's log, version 2."""
    about = content["eval"]
    return Log(
        "inspect_ai",
        about["task"],
        about["model"],
        list(_inspect_rows(content["samples"])),
        _sampling_of(content.get("plan", {}).get("config", {})),
    )


def _inspect_rows(samples: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for sample in sorted(samples, key=lambda one: one["epoch"]):
        output, about = sample.get("output") or {}, sample.get("metadata") or {}
        first = next(iter(output.get("choices") or ()), None)
        answer, thinking = read_content(first["message"].get("content")) if first else ("", "")
        error = (sample.get("error") or {}).get("message")
        failure = error if first else error or "no output"
        stop = first.get("stop_reason") if first else None
        level = about.get("level")
        yield _row(
            sample["id"],
            _chat_of(_asked(sample["messages"], has_answer=first is not None)),
            answer,
            sample["target"],
            finish_reason=None if stop == "unknown" else stop,
            response_tokens=read_count(output.get("usage"), "output_tokens"),
            seconds=sample.get("total_time") or 0.0,
            failure=failure,
            subject=about.get("subject"),
            level=None if level is None else str(level),
            reasoning=thinking or None,
        )


def _asked(messages: list[Any], has_answer: bool) -> list[Any]:
    """Return the messages before the answer, the last of the assistant."""
    ends = [i for i, one in enumerate(messages) if one["role"] == "assistant"] if has_answer else []
    return messages[: ends[-1]] if ends else messages


def _read_aisbench(file: Path, lines: Sequence[Mapping[str, Any]]) -> Log:
    """Read AISBench's predictions/MODEL/DATASET.jsonl, without sampling and finish reasons."""
    if file.with_name(f"{file.stem}_failed.jsonl").exists():
        logger.warning("%s: skipping failed requests, which have no gold answer there", file)
    rows = [
        _row(line["id"], _chat_of(line["origin_prompt"]), line["prediction"], line["gold"])
        for line in sorted(lines, key=lambda one: (len(str(one["id"])), str(one["id"])))
    ]
    return Log("AISBench", file.stem, file.parent.name, rows)
