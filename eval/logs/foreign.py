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

from durable import iterate_json_lines
from eval.answers.extraction import extract_boxed
from eval.answers.grading import GRADERS
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import Item
from eval.problems.prompts import Prompt
from eval.requests.recorder import regrade_row
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
from eval.results.summary import Summary, write_summary

logger = logging.getLogger(__name__)

_DIRECTIONS = (
    "name lm-eval's samples_*.jsonl, inspect_ai's log (.json), or AISBench's predictions folder or "
    "file"
)
_OPTIONS = re.compile(r"[A-J]{1,10}")
_ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}  # AISBench -> OpenAI


@dataclass(frozen=True)
class Log:
    """The ungraded rows of another program's log, with samples numbered in order."""

    program: str
    benchmark: str
    model: str
    rows: list[Row]
    # 0 and None: not recorded
    sampling: Sampling = field(default_factory=lambda: Sampling(0, None, None))


def import_log(path: str | Path, output: str | Path) -> Summary:
    """Grade another program's responses into a results folder; return the summary.

    Gold answers come from the log, gold solutions from their last box. If all are letters A to J,
    options are graded. Raises ResultsError if the log is unreadable, or if items have different
    numbers of samples.
    """
    log = read_log(Path(path))
    folder = make_folder(output)
    if (folder / SETTINGS_FILE).exists():
        raise ResultsError(f"{folder} holds an evaluation; choose another --output")
    golds = {row.gold for row in log.rows}
    options = {row.id: tuple((row.details or {}).get("options", ())) for row in log.rows}
    is_choice = all(map(_OPTIONS.fullmatch, golds))
    kind = GRADERS[
        "loglikelihood" if any(options.values()) else "choice" if is_choice else "mathematics"
    ]
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
        if file.suffix == ".json" and (content := json.loads(file.read_text(encoding="utf-8"))):
            if "eval" in content:
                log = _read_inspect(content)
            else:  # OpenCompass's object of rows by index, which AISBench wrote before version 3
                rows = [{"id": index, **row} for index, row in content.items()]
                log = _read_aisbench(file, rows)
        else:
            lines = list(iterate_json_lines(file))
            log = _read_lm_eval(file, lines) if "resps" in lines[0] else _read_aisbench(file, lines)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultsError(f"{file} is not a readable log ({error!r}); {_DIRECTIONS}") from None
    if not log.rows:
        raise ResultsError(f"{file} has no responses; {_DIRECTIONS}")
    return replace(log, rows=list(_numbered(log.rows)))


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
    for pattern in (*lm_eval, *aisbench, "*/*.json*", "*.json*") if path.is_dir() else ():
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


def _row(
    identity: object, prompt: Prompt, response: str | None, gold: object, **others: Any
) -> Row:
    """Make an ungraded row. The gold answer of a solution is its last box."""
    text = str(gold)
    fields: dict[str, Any] = {
        "finish_reason": None,
        "response_tokens": None,
        "answer": None,
        "seconds": 0.0,
        "verdict": "request_failed",
        "attempts": 1,
        "subject": None,
        "level": None,
        "failure": None,
    }
    known = {"id": str(identity), "sample": 0, "prompt": prompt, "response": response}
    return Row(**{**fields, **known, "gold": extract_boxed(text) or text, **others})


def _read_lm_eval(file: Path, lines: Sequence[Mapping[str, Any]]) -> Log:
    """Read lm-eval 0.4: one line per document and filter, with a results file of the same date."""
    benchmark, _, date = file.stem.removeprefix("samples_").rpartition("_")
    beside = file.with_name(f"results_{date}.json")
    about = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    model = str(about.get("model_name") or "unknown")
    first_filter = min(line["filter"] for line in lines)
    lines = [line for line in lines if line["filter"] == first_filter]
    settings = _arguments(lines[0])[1]
    # a continuation: the log-likelihoods of options, without sampling
    if isinstance(settings, str):
        rows = [_options_row(file, line) for line in lines]
        return Log("lm-eval", benchmark or file.stem, model, rows, Sampling(1))
    sampling = Sampling(
        max_tokens=settings.get("max_gen_toks") or settings.get("max_tokens") or 0,
        temperature=settings.get("temperature"),
        top_p=settings.get("top_p"),
        stop=tuple(settings.get("until") or ()),
    )
    rows = [
        _row(line["doc_id"], _messages(_arguments(line)[0]), response, line["target"])
        for line in lines
        for response in line["resps"][0]
    ]
    return Log("lm-eval", benchmark or file.stem, model, rows, sampling)


def _options_row(file: Path, line: Mapping[str, Any]) -> Row:
    """Read a multiple-choice line: requests (prompt, option) with [log-likelihood, is greedy].

    Skips the unconditional requests of acc_mutual_info. Raises ResultsError unless the prompt has
    several options.
    """
    requests = [line["arguments"][f"gen_args_{number}"] for number in range(len(line["arguments"]))]
    prompt = requests[0]["arg_0"]
    pairs = [
        (str(one["arg_1"]).strip(), float(result[0]))
        for one, result in zip(requests, line["filtered_resps"], strict=True)
        if one["arg_0"] == prompt
    ]
    options, target = [option for option, _ in pairs], str(line["target"])
    gold = options[int(target)] if target.isdecimal() and int(target) < len(options) else target
    if len(set(options)) < 2 or gold not in options:
        raise ResultsError(
            f"{file}: document {line['doc_id']} has {len(set(options))} options after one prompt "
            f"and the target {target!r}; of lm-eval's log-likelihoods, only multiple choice with "
            "one right option is imported"
        )
    likeliest = max(pairs, key=lambda pair: pair[1])[0]
    details = {"options": options, "log_probs": [value for _, value in pairs]}
    return _row(line["doc_id"], _messages(prompt), likeliest, gold, details=details)


def _arguments(line: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return (prompt, settings) of a request. A chat prompt is a list of one JSON text."""
    arguments = line["arguments"]["gen_args_0"]
    return arguments["arg_0"], arguments["arg_1"]


def _messages(prompt: Any) -> Prompt:
    if not isinstance(prompt, list):
        return str(prompt)
    return tuple(
        {"role": one["role"], "content": str(one["content"])} for one in json.loads(prompt[0])
    )


def _read_inspect(content: Mapping[str, Any]) -> Log:
    """Read inspect_ai's JSON log, version 2; `inspect log convert --to json` makes one."""
    about = content["eval"]
    settings = content.get("plan", {}).get("config", {})
    sampling = Sampling(
        settings.get("max_tokens") or 0, settings.get("temperature"), settings.get("top_p")
    )
    return Log(
        "inspect_ai",
        about["task"],
        about["model"],
        list(_inspect_rows(content["samples"])),
        sampling,
    )


def _inspect_rows(samples: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for sample in sorted(samples, key=lambda one: one["epoch"]):
        messages = [one for one in sample["messages"] if one["role"] in ("system", "user")]
        prompt = tuple({"role": one["role"], "content": _text(one["content"])} for one in messages)
        choices = (sample.get("output") or {}).get("choices") or []
        content = choices[0]["message"]["content"] if choices else ""
        parts = content if isinstance(content, list) else []
        thinking = "".join(part.get("reasoning", "") for part in parts)
        target, about = sample["target"], sample.get("metadata") or {}
        error = (sample.get("error") or {}).get("message")
        stop = choices[0].get("stop_reason") if choices else None
        yield _row(
            sample["id"],
            prompt,
            _text(content) if choices and error is None else None,
            target if isinstance(target, str) else target[0],
            finish_reason=None if stop == "unknown" else stop,
            response_tokens=(sample["output"].get("usage") or {}).get("output_tokens")
            if choices
            else None,
            seconds=sample.get("total_time") or 0.0,
            failure=error if choices else error or "no output",
            subject=about.get("subject"),
            level=None if about.get("level") is None else str(about["level"]),
            reasoning=thinking or None,
        )


def _text(content: str | list[dict[str, Any]]) -> str:
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(part.get("text", "") for part in parts)


def _read_aisbench(file: Path, lines: Sequence[Mapping[str, Any]]) -> Log:
    """Read AISBench's predictions/MODEL/DATASET.jsonl, without sampling and finish reasons."""
    if file.with_name(f"{file.stem}_failed.jsonl").exists():
        logger.warning("%s: skipping failed requests, which have no gold answer there", file)
    rows = [
        _row(line["id"], _aisbench_prompt(line["origin_prompt"]), line["prediction"], line["gold"])
        for line in sorted(lines, key=lambda one: (len(str(one["id"])), str(one["id"])))
    ]
    return Log("AISBench", file.stem, file.parent.name, rows)


def _aisbench_prompt(prompt: Any) -> Prompt:
    if not isinstance(prompt, list):
        return str(prompt)
    return tuple(
        {
            "role": _ROLES.get(one["role"], one["role"]),
            "content": _text(one.get("prompt", one.get("content", ""))),
        }
        for one in prompt
    )
