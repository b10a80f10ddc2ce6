"""Exports evaluations as logs of inspect_ai (JSON) and lm-eval (samples and results)."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from durable import link_or_copy, write_atomically
from eval.answers.grading import is_finished
from eval.problems.pictures import IMAGES
from eval.problems.prompts import with_parts
from eval.results.pictures import data_url
from eval.results.rows import Evaluation, ResultsError, Row, Samples, load_evaluation, make_folder
from eval.results.suite import read_suite
from eval.results.summary import acc_norm, rate

logger = logging.getLogger(__name__)

# inspect_ai's correct and no answer; all others are incorrect
_VALUES = {"right": "C", "no_answer": "N"}


def export_inspect(evaluation: Evaluation, output: str | Path) -> list[Path]:
    """Write an inspect_ai log of version 2 with the scores of both rules; returns its path.

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
    return [_write(path, json.dumps(log, ensure_ascii=False, indent=1))]


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


def export_lm_eval(evaluation: Evaluation, output: str | Path) -> list[Path]:
    """Write lm-eval's samples (a line per item) and results; returns their paths.

    Responses are scored by exact_match (the exact rule), ranked options by acc and acc_norm.
    lm-eval has no notion of a failed request: it becomes the response "", and without ranked
    options the item is left out. Whether an option is the greedy continuation is not known; the log
    says it is not.
    """
    rows, name = evaluation.rows, _benchmark(evaluation)
    about: dict[str, Any]
    if acc_norm(rows) is not None:
        lines = _ranked_lines(rows)
        about = {"output_type": "multiple_choice"}
    else:
        sampling = evaluation.settings["sampling"]
        kwargs = {"until": sampling.get("stop", [])}
        names = {"max_tokens": "max_gen_toks", "temperature": "temperature", "top_p": "top_p"}
        kwargs |= {
            name: sampling[key] for key, name in names.items() if sampling.get(key) is not None
        }
        lines = [_generated_line(samples, kwargs) for samples in evaluation.items.values()]
        about = {"output_type": "generate_until", "generation_kwargs": kwargs}
    metrics = lines[0]["metrics"] if lines else []
    means = {
        f"{metric},none": sum(line[metric] for line in lines) / len(lines) for metric in metrics
    }
    content: Mapping[str, Any] = {
        "results": {name: {"alias": name, **means}},
        "configs": {name: {"task": name, **about}},
        "versions": {name: 1},
        "n-samples": {name: {"original": len(evaluation.items), "effective": len(lines)}},
        "higher_is_better": {name: dict.fromkeys(metrics, True)},
        "config": {"model": "dapo eval", "model_args": {"model": evaluation.settings["model"]}},
        "model_name": str(evaluation.settings["model"]),
    }
    folder, date = make_folder(output), _moment(rows).replace(":", "-").partition("+")[0]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    for picture, file in _pictures(evaluation).items():
        target = make_folder(folder / IMAGES) / picture
        if not target.exists():
            link_or_copy(file, target)
    return [
        _write(folder / f"samples_{name}_{date}.jsonl", text),
        _write(folder / f"results_{date}.json", json.dumps(content, ensure_ascii=False, indent=2)),
    ]


def _generated_line(samples: Samples, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    first = samples[0]
    prompt = (
        first.prompt
        if isinstance(first.prompt, str)
        else [json.dumps(first.prompt, ensure_ascii=False)]
    )
    return {
        **_document(first, prompt, first.gold),
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": kwargs}},
        "resps": [[row.text or "" for row in samples]],
        "filtered_resps": [row.answer or "" for row in samples],
        "metrics": ["exact_match"],
        "exact_match": sum(row.is_right for row in samples) / len(samples),
    }


def _ranked_lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    lines = []
    for row in rows:
        if row.sample > 0 or not row.details:  # samples of ranked options are alike
            continue
        prompt, options = str(row.prompt), row.details["options"]
        space = "" if prompt != prompt.rstrip() else " "
        requests = [{"arg_0": prompt, "arg_1": f"{space}{option}"} for option in options]
        results = [[str(log_prob), "False"] for log_prob in row.details["log_probs"]]
        lines.append(
            {
                **_document(row, prompt, str(options.index(row.gold))),
                "arguments": {f"gen_args_{number}": one for number, one in enumerate(requests)},
                "resps": [[result] for result in results],
                "filtered_resps": results,
                "metrics": ["acc", "acc_norm"],
                "acc": float(row.is_right),
                "acc_norm": acc_norm([row]),
            }
        )
    if num_left := len({row.id for row in rows}) - len(lines):
        logger.warning(
            "left out %d items without log-probs, because their requests failed", num_left
        )
    return lines


def _document(row: Row, prompt: str | list[str], target: str) -> dict[str, Any]:
    document = {
        "problem": row.problem,
        "answer": row.gold,
        "subject": row.subject,
        "level": row.level,
        **({"images": [f"{IMAGES}/{name}" for name in row.images]} if row.images else {}),
    }
    hashed = {"doc_hash": document, "prompt_hash": prompt, "target_hash": target}
    hashes = {
        key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in hashed.items()
    }
    return {"doc_id": row.id, "doc": document, "target": target, "filter": "none", **hashes}


def _benchmark(evaluation: Evaluation) -> str:
    return str(evaluation.settings.get("benchmark") or "own")


def _moment(rows: Iterable[Row]) -> str:
    """Return the time of the last response, 1970 if not recorded."""
    last = max((row.ended_at or 0.0 for row in rows), default=0.0)
    return datetime.datetime.fromtimestamp(last, datetime.timezone.utc).isoformat(
        timespec="seconds"
    )


def _write(path: Path, text: str) -> Path:
    write_atomically(path, text)
    return path


def export_logs(results: Path, output: Path, form: Literal["inspect", "lm-eval"]) -> list[Path]:
    """Write the logs of an evaluation or a suite to a folder, or one inspect_ai log to a file."""
    write, suffix = (export_inspect, ".json") if form == "inspect" else (export_lm_eval, "")
    folders = read_suite(results)
    written: list[Path] = []
    for name, folder in folders.items():
        place = output if len(folders) == 1 else output / f"{name}{suffix}"
        written += write(load_evaluation(folder), place)
    return written
