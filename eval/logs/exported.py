"""Exports evaluations as logs of inspect_ai."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from durable import write_atomically
from eval.answers.grading import is_finished
from eval.problems.pictures import IMAGES
from eval.problems.prompts import with_parts
from eval.results.pictures import data_url
from eval.results.rows import Evaluation, ResultsError, Row, load_evaluation, make_folder
from eval.results.suite import read_suite
from eval.results.summary import rate

# inspect_ai's correct and no answer; all others are incorrect
_VALUES = {"right": "C", "no_answer": "N"}


def export_inspect(evaluation: Evaluation, output: str | Path) -> None:
    """Write an inspect_ai log of version 2 with the scores of both rules.

    Its messages hold their pictures, as data URLs.
    """
    settings, rows, pictures = evaluation.settings, evaluation.rows, _pictures(evaluation)
    sampling, model = settings["sampling"], str(settings["model"])
    names = ("max_tokens", "temperature", "top_p", "seed")
    config = {name: sampling[name] for name in names if sampling.get(name) is not None}
    about = {
        "created": _moment(rows),
        "task": _benchmark(evaluation),
        "model": model,
        "model_generate_config": config,
        "dataset": {"samples": len(evaluation.items), "sample_ids": list(evaluation.items)},
        "config": {"epochs": evaluation.num_samples},
        "metadata": {"settings": settings},
    }
    shares = {"exact": rate(rows, lambda row: row.is_right)}
    if evaluation.has_aisbench:
        shares["aisbench"] = rate(rows, lambda row: row.is_right_by_aisbench)
    scores = [
        {
            "name": name,
            "scorer": name,
            "metrics": {"accuracy": {"name": "accuracy", "value": share}},
        }
        for name, share in shares.items()
    ]
    num_answered = sum(row.is_answered for row in rows)
    log = {
        "version": 2,
        "status": "success",
        "eval": about,
        "plan": {"config": config},
        "results": {
            "total_samples": len(rows),
            "completed_samples": num_answered,
            "scores": scores,
        },
        "samples": [_inspect_sample(row, model, pictures) for row in rows],
    }
    path = Path(output)
    make_folder(path.parent)
    write_atomically(path, json.dumps(log, ensure_ascii=False, indent=1))


def _inspect_sample(row: Row, model: str, pictures: Mapping[str, Path]) -> dict[str, Any]:
    messages = _inspect_messages(row, pictures)
    sample: dict[str, Any] = {
        "id": row.id,
        "epoch": row.sample + 1,
        "input": row.prompt if isinstance(row.prompt, str) else messages,
        "target": row.gold,
        "messages": messages,
        "metadata": {"subject": row.subject, "level": row.level, "verdict": row.verdict},
        "total_time": row.seconds,
    }
    if row.response is None:
        reason = row.failure or "the request failed"
        return {**sample, "error": {"message": reason, "traceback": "", "traceback_ansi": ""}}
    thinking = [{"type": "reasoning", "reasoning": row.reasoning}] if row.reasoning else []
    reply = {"role": "assistant", "content": [*thinking, {"type": "text", "text": row.response}]}
    stop = {True: "stop", False: "max_tokens", None: "unknown"}[is_finished(row.finish_reason)]
    if row.finish_reason == "content_filter":
        stop = "content_filter"
    exact = {"value": _VALUES.get(row.verdict, "I"), "answer": row.answer}
    scores = {"exact": {**exact, "explanation": row.verdict}}
    if (second := row.aisbench) is not None:
        value = "C" if second.is_right else "I"
        scores["aisbench"] = {"value": value, "answer": second.answer}
    tokens = row.response_tokens or 0
    usage = {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}
    return {
        **sample,
        "messages": [*sample["messages"], reply],
        "output": {
            "model": model,
            "choices": [{"message": reply, "stop_reason": stop}],
            **({} if row.response_tokens is None else {"usage": usage}),
        },
        "scores": scores,
    }


def _inspect_messages(row: Row, pictures: Mapping[str, Path]) -> list[dict[str, Any]]:
    if isinstance(row.prompt, str):
        return [{"role": "user", "content": row.prompt}]
    if not row.images:
        return [dict(message) for message in row.prompt]
    messages = with_parts(row.prompt)
    parts = [part for message in messages for part in message["content"]]
    shown = (part for part in parts if part["type"] == "image")
    for part, name in zip(shown, row.images, strict=True):
        part["image"] = data_url(pictures[name])
    return messages


def _pictures(evaluation: Evaluation) -> dict[str, Path]:
    """Return the files of all pictures by name. Raises ResultsError if some are missing."""
    folder = (evaluation.folder or Path()) / IMAGES
    names = {name for row in evaluation.rows for name in row.images or ()}
    files = {name: folder / name for name in sorted(names)}
    missing = [file for file in files.values() if not file.is_file()]
    if missing:
        raise ResultsError(
            f"{len(missing)} of {len(files)} pictures of the evaluation are missing (first: "
            f"{missing[0]}); restore them, or evaluate into a new folder"
        )
    return files


def _benchmark(evaluation: Evaluation) -> str:
    return str(evaluation.settings.get("benchmark") or "own")


def _moment(rows: Iterable[Row]) -> str:
    """Return the time of the last response, 1970 if not recorded."""
    last = max((row.ended_at or 0.0 for row in rows), default=0.0)
    return datetime.datetime.fromtimestamp(last, datetime.timezone.utc).isoformat(
        timespec="seconds"
    )


def export_logs(results: Path, output: Path) -> list[Path]:
    """Write the log of an evaluation to a file, or those of a suite to a folder."""
    folders = read_suite(results)
    places = {name: output if len(folders) == 1 else output / f"{name}.json" for name in folders}
    for name, folder in folders.items():
        export_inspect(load_evaluation(folder), places[name])
    return list(places.values())
