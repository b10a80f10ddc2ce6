"""Reads the scores that other programs recorded, for a paired comparison of two of their logs.

A log is lm-eval's samples, inspect_ai's .eval or .json, evalscope's or AISBench's output folder,
NeMo Evaluator's run folder, or a table (csv, tsv, jsonl, json, parquet) with the columns item and
score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eval import InputError
from eval.answers.choice import are_options
from eval.answers.grading import GRADERS
from eval.logs.foreign import first_text, read_log, requests_of
from eval.logs.inspect_archive import read_archive
from eval.paired import Result, compare
from eval.problems.formats import FORMATS, rows_in
from eval.requests.recorder import regrade_row
from eval.requests.replies import read_content
from eval.results.rows import SETTINGS_FILE, describe_differences
from eval.results.scores import COLUMNS, Response, ScoresError, read_responses, score_in, text_of
from eval.results.suite import SUITE_FILE

LM_EVAL, INSPECT, EVALSCOPE = "lm-eval", "inspect_ai", "evalscope"
AISBENCH, NEMO, TABLE = "AISBench", "NeMo Evaluator", "table"
# Where a program's files lie in its output folder. The first pattern with files counts.
_PLACES = {
    LM_EVAL: ("samples_*.jsonl", "*/samples_*.jsonl"),
    EVALSCOPE: ("reviews/*/*.jsonl", "*/reviews/*/*.jsonl"),
    INSPECT: ("*.eval", "*.json"),
    NEMO: ("eval-*.json", "*/eval-*.json"),
    AISBENCH: ("predictions/*/*.json*", "*/predictions/*/*.json*"),
}
_INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_QUESTIONS = ("problem", "question", "query", "prompt", "input", "text", "goal")
_FAILED = "_failed"
LOWER = ":lower"  # after the name of a score of which lower is better


@dataclass(frozen=True)
class Part:
    """One benchmark of a log."""

    benchmark: str
    responses: list[Response]
    scores: Sequence[str]  # names of the scores it holds, the one that was read first
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # beside the model, as recorded
    is_lower_better: bool = False


def program_of(path: Path) -> str | None:
    """Return which program's log is at `path`; None if it is no evaluation log."""
    if path.is_dir():
        return next((program for program in _PLACES if _files(path, program)), None)
    kind = path.suffix.lower()
    if not path.is_file() or kind not in (*FORMATS, ".eval"):
        return None
    if kind not in (".json", ".jsonl"):
        return INSPECT if kind == ".eval" else TABLE
    keys = _keys(path) if kind == ".json" else ()
    if "eval" in keys:
        return INSPECT
    if "benchmark" in keys:
        return NEMO
    row = next(iter(rows_in(path)), {})
    if "step" in row and not row.keys() & {*COLUMNS["item"]}:  # metrics of a training
        return None
    for columns, program in _ROWS:
        if columns <= row.keys():
            return program
    return TABLE


def compare_logs(before: str | Path, after: str | Path, score: str | None = None) -> Result:
    """Compare two logs of the same program. `score` names the score to read, by default the first.

    Higher is better, unless lm-eval's results file says otherwise, or `score` ends in ":lower".
    Raises ScoresError if the programs differ or a log is unreadable.
    """
    is_lower, name = str(score).endswith(LOWER), (score or "").removesuffix(LOWER) or None
    paths = Path(before), Path(after)
    program = program_of(paths[0])
    kinds = [_kind(paths[0], program), _kind(paths[1], program_of(paths[1]))]
    if kinds[0] != kinds[1]:
        raise ScoresError(
            f"{paths[0]} is {kinds[0]} and {paths[1]} is {kinds[1]}: programs prompt and score "
            "differently, so a difference would not be due to the models. Evaluate both with the "
            "same program, or grade the responses of both by one rule (dapo grade LOG --output "
            "FOLDER) and make tables of item and score"
        )
    sides = [read_parts(path, str(program), name) for path in paths]
    _require_same_scores(*sides)
    low = [{part.benchmark for part in side if part.is_lower_better} for side in sides]
    scores = [[one for part in side for one in part.responses] for side in sides]
    result = compare(scores[0], scores[1], lower_is_better=is_lower or low[0] & low[1])
    about = {"program": str(program), **_about(sides, paths)}
    return result.described(about, list(_settings_notes(*sides)))


def _kind(path: Path, program: str | None) -> str:
    """What is at `path`, in words. Raises ScoresError if it is nothing that can be compared."""
    if program is not None:
        return "a table" if program == TABLE else f"a log of {program}"
    if any((path / name).is_file() for name in (SETTINGS_FILE, SUITE_FILE)):
        return "a results folder of dapo eval"
    fault = "is no evaluation log" if path.exists() else "does not exist"
    raise ScoresError(
        f"{path} {fault}: name a log of {', '.join(_PLACES)}, or a table with item and score "
        f"({', '.join(FORMATS)})"
    )


def read_parts(path: Path, program: str, score: str | None = None) -> list[Part]:
    """Read the benchmarks of a log. Raises ScoresError."""
    files = [path] if path.is_file() else _files(path, program)
    parts = []
    for file in files:
        try:
            parts += _READERS[program](file, score)
        except ScoresError:
            raise
        except InputError as error:
            raise ScoresError(str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise ScoresError(f"{file} is not a readable log of {program}: {error!r}") from None
    names = [part.benchmark for part in parts]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        listed = ", ".join(str(file) for file in files[:9])
        raise ScoresError(f"{path} has several logs of {', '.join(repeated)}; name one of {listed}")
    return parts


def _files(folder: Path, program: str) -> list[Path]:
    """Return a program's files in its output folder, [] without any."""
    for pattern in _PLACES[program]:
        found = sorted(one for one in folder.glob(pattern) if not one.stem.endswith(_FAILED))
        if program == INSPECT and pattern == "*.json":
            found = [one for one in found if "eval" in _keys(one)]
        if found:
            return found
    return []


def _keys(file: Path) -> Collection[str]:
    """Return the keys of a file that is one JSON object; none for JSON lines or damage."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return ()
    return content.keys() if isinstance(content, dict) else ()


def _json_beside(file: Path) -> dict[str, Any]:
    """Return an object that a program writes beside its scores, {} without the file."""
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ScoresError(f"{file} is damaged: {error}") from None


def _chosen(names: Sequence[str], score: str | None, place: str) -> str:
    """Return the score to read. Raises ScoresError for an unknown name, or without any."""
    if not names:
        raise ScoresError(f"{place} has no scored response")
    if score is None:
        return names[0]
    for name in names:
        if score in (name, *name.split(",")):
            return name
    raise ScoresError(f"{place} has no score {score}; it has {', '.join(names)}")


def _first(names: Sequence[str], name: str) -> list[str]:
    return [name, *(one for one in names if one != name)]


def _read_lm_eval(file: Path, score: str | None) -> list[Part]:
    """Read samples_TASK_DATE.jsonl: a line per document and filter, with its metrics by name."""
    lines = list(rows_in(file))
    benchmark, _, date = file.stem.removeprefix("samples_").rpartition("_")
    pairs = [(metric, line.get("filter") or "none") for line in lines for metric in line["metrics"]]
    names = list(dict.fromkeys(f"{metric},{kept}" for metric, kept in pairs))
    name = _chosen(names, score, str(file))
    metric, _, kept = name.partition(",")
    about = _json_beside(file.with_name(f"results_{date}.json"))
    config = about.get("configs", {}).get(benchmark, {})
    settings = {key: config.get(key) for key in ("num_fewshot", "generation_kwargs")}
    settings |= {key: about.get(key) for key in ("chat_template_sha", "system_instruction_sha")}
    settings["version"] = about.get("versions", {}).get(benchmark)
    responses = [
        Response(
            item=str(line["doc_id"]),
            score=score_in(line[metric], f"{file}, document {line['doc_id']}, {metric}"),
            benchmark=benchmark or file.stem,
            problem=_question(line["doc"]),
            gold=text_of(line["target"]),
            response=_lm_eval_response(line),
        )
        for line in lines
        if (line.get("filter") or "none") == kept
    ]
    model = str(about.get("model_name") or "")
    _require_mean(responses, about.get("results", {}).get(benchmark, {}).get(name), name, file)
    is_lower = about.get("higher_is_better", {}).get(benchmark, {}).get(metric) is False
    return [Part(benchmark or file.stem, responses, _first(names, name), model, settings, is_lower)]


def _require_mean(responses: Sequence[Response], recorded: Any, name: str, file: Path) -> None:
    """Raise ScoresError unless the recorded figure is the mean of the responses' scores."""
    scores = [one.score for one in responses if one.score is not None]
    if not scores or not isinstance(recorded, float | int):
        return
    mean = math.fsum(scores) / len(scores)
    if not math.isclose(mean, recorded, rel_tol=1e-6, abs_tol=1e-9):
        raise ScoresError(
            f"{file}: {name} is {recorded:.6g} in the results file, but its {len(scores)} samples "
            f"have the mean {mean:.6g}. Either samples are missing, or it is no mean of samples, "
            "like a perplexity; then choose another --score"
        )


def _question(document: Any) -> str:
    """Return the question of a document, or all of it."""
    if isinstance(document, dict):
        found = [document[key] for key in _QUESTIONS if isinstance(document.get(key), str)]
        return str(found[0]) if found else json.dumps(document, ensure_ascii=False)
    return str(document)


def _lm_eval_response(line: Mapping[str, Any]) -> str | None:
    """Return the first generated response, or the likeliest option."""
    requests = requests_of(line)
    if requests and isinstance(requests[0][1], str):
        values = [float(result[0]) for result in line["filtered_resps"]]
        return requests[values.index(max(values))][1].strip()
    return first_text(line["resps"])


def _read_inspect(file: Path, score: str | None) -> list[Part]:
    """Read a log of inspect_ai, format .eval or .json; epochs are samples."""
    content = read_archive(file) if file.suffix == ".eval" else json.loads(file.read_bytes())
    about = content["eval"]
    samples = content.get("samples") or []
    scored = [_inspect_scores(sample) for sample in samples]
    names = list(dict.fromkeys(name for scores in scored for name in scores))
    name = _chosen(names, score, str(file))
    config = content.get("plan", {}).get("config") or {}
    settings = {key: config.get(key) for key in ("temperature", "top_p", "max_tokens", "seed")}
    settings |= {"task_args": about.get("task_args"), "task_version": about.get("task_version")}
    settings["status"] = content.get("status")
    responses = [
        Response(
            item=str(sample["id"]),
            score=score_in(scores.get(name), f"{file}, sample {sample['id']}, {name}"),
            benchmark=str(about["task"]),
            sample=str(sample.get("epoch")),
            problem=_last_message(sample["input"]),
            gold=text_of(sample.get("target")),
            response=_last_message(
                [one["message"] for one in (sample.get("output") or {}).get("choices") or ()][:1]
            ),
        )
        for sample, scores in zip(samples, scored, strict=True)
    ]
    return [Part(str(about["task"]), responses, _first(names, name), str(about["model"]), settings)]


def _inspect_scores(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return {scorer: value} of a sample, {} after an error; parts of a value have own names."""
    found: dict[str, Any] = {}
    for name, one in ({} if sample.get("error") else sample.get("scores") or {}).items():
        value = one["value"]
        several = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in several:
            known = _INSPECT_VALUES.get(part, part) if isinstance(part, str) else part
            found[f"{name}.{key}" if key else name] = known
    return found


def _last_message(messages: Any) -> str | None:
    """Return a text, or the text of the last of several messages."""
    if isinstance(messages, list):
        return read_content(messages[-1].get("content"))[0] if messages else None
    return text_of(messages)


def _read_evalscope(file: Path, score: str | None) -> list[Part]:
    """Read reviews/MODEL/SET.jsonl: a line per response, with its scores by metric."""
    work = file.resolve().parent.parent.parent
    if file.resolve().parent.parent.name == "predictions":
        file = work / "reviews" / file.resolve().parent.name / file.name
    if not file.exists():
        raise ScoresError(f"{file} is missing: it holds evalscope's scores, and predictions do not")
    lines = list(rows_in(file))
    values = [(line["sample_score"]["score"] or {}).get("value") or {} for line in lines]
    names = list(dict.fromkeys(name for one in values for name in one))
    name = _chosen(names, score, str(file))
    responses = []
    for line, value in zip(lines, values, strict=True):
        about, messages = line["sample_score"], line.get("messages") or []
        group = about.get("group_id")
        item = str(about["sample_id"] if group is None else group)
        asked = [one for one in messages if one["role"] != "assistant"]
        responses.append(
            Response(
                item=item,
                score=score_in(value.get(name), f"{file}, sample {item}, {name}"),
                benchmark=file.stem,
                sample=str(about["sample_id"]),
                problem=_last_message(asked),
                gold=text_of(line.get("target")),
                response=_last_message([one for one in messages if one["role"] == "assistant"]),
            )
        )
    task = work / "configs/task_config.yaml"
    known = yaml.safe_load(task.read_text(encoding="utf-8")) if task.exists() else {}
    settings = {key: known.get(key) for key in ("generation_config", "repeats", "limit")}
    return [Part(file.stem, responses, _first(names, name), file.parent.name, settings)]


def _read_nemo(file: Path, score: str | None) -> list[Part]:
    """Read results.jsonl beside a bundle eval-*.json: problem_idx, repeat and reward per line."""
    bundles = sorted(file.parent.glob("eval-*.json")) if file.suffix == ".jsonl" else [file]
    bundle = _json_beside(bundles[0]) if bundles else {}
    file = file if file.suffix == ".jsonl" else file.with_name("results.jsonl")
    if not file.exists():
        raise ScoresError(f"{file} is missing: it holds NeMo Evaluator's scores by problem")
    _chosen(["reward"], score, str(file))
    config = bundle.get("config") or {}
    name = str((bundle.get("benchmark") or {}).get("name") or file.parent.name)
    responses = [
        Response(
            item=str(line["problem_idx"]),
            score=score_in(line.get("reward"), f"{file}, problem {line['problem_idx']}, reward"),
            benchmark=name,
            sample=str(line.get("repeat") or 0),
            problem=text_of(line.get("prompt")),
            gold=text_of(line.get("expected_answer")),
            response=text_of(line.get("model_response") or line.get("extracted_answer")),
        )
        for line in rows_in(file)
    ]
    settings = {key: value for key, value in config.items() if "model" not in key}
    return [Part(name, responses, ["reward"], str(config.get("model") or ""), settings)]


def _read_aisbench(file: Path, score: str | None) -> list[Part]:
    """Read predictions/MODEL/SET.jsonl with the verdicts of results/MODEL/SET.json.

    The verdicts are there after --dump-eval-details: {id: {"correct": [true]}}. Without, and for
    num_return_sequences (its list mixes the items), predictions are graded here, by AISBench's rule
    for mathematics, or as options.
    """
    model, work = file.resolve().parent.name, file.resolve().parent.parent.parent
    rows = read_log(file).rows
    recorded = _json_beside(work / "results" / model / f"{file.stem}.json").get("details")
    if isinstance(recorded, dict) and all("correct" in one for one in recorded.values()):
        name = "correct"
        verdicts = [_only(recorded[row.id]["correct"]) for row in rows]
    else:
        is_choice = are_options({row.gold for row in rows})
        name = "options, graded here" if is_choice else "AISBench's rule, graded here"
        with GRADERS["choice" if is_choice else "mathematics"]() as grader:
            graded = [regrade_row(row, grader) for row in rows]
        verdicts = [row.is_right if is_choice else row.is_right_by_aisbench for row in graded]
    _chosen([name], score, str(file))
    responses = [
        Response(
            row.id,
            score_in(value, f"{file}, row {row.id}"),
            file.stem,
            str(row.sample),
            row.problem,
            row.gold,
            row.text,
        )
        for row, value in zip(rows, verdicts, strict=True)
    ]
    return [Part(file.stem, responses, [name], model)]


def _only(value: Any) -> Any:
    """Return the only element of a list, or what is none."""
    if isinstance(value, list):
        [value] = value
    return value


def _read_table(file: Path, score: str | None) -> list[Part]:
    """Read a table with the columns of `read_responses`; its subsets are benchmarks."""
    rows = list(rows_in(file))
    if score is not None:
        texts = {name for field, names in COLUMNS.items() if field != "score" for name in names}
        _chosen([name for name in (rows or [{}])[0] if name not in texts], score, str(file))
        others = {*COLUMNS["score"]} - {score}
        rows = [
            {
                ("score" if key == score else key): value
                for key, value in row.items()
                if key not in others
            }
            for row in rows
        ]
    parts: dict[str, list[Response]] = {}
    for one in read_responses(rows, str(file)):
        parts.setdefault(one.benchmark, []).append(one)
    return [Part(name, responses, [score or "score"]) for name, responses in parts.items()]


def _require_same_scores(before: Sequence[Part], after: Sequence[Part]) -> None:
    found = {part.benchmark: part.scores[0] for part in before}
    for part in after:
        name = part.scores[0]
        if (old := found.get(part.benchmark, name)) != name:
            raise ScoresError(
                f"{part.benchmark} is scored by {old} before and {name} after; choose one that "
                "both have with --score"
            )


def _about(sides: Sequence[Sequence[Part]], paths: Sequence[Path]) -> dict[str, str]:
    """Describe what is compared: models, and scores with those that were not read."""
    found = {}
    for label, side, path in zip(("before", "after"), sides, paths, strict=True):
        models = list(dict.fromkeys(part.model for part in side if part.model))
        found[label] = f"{', '.join(models)} ({path})" if models else str(path)
    words = {
        part.scores[0]
        + (f" (--score reads {', '.join(part.scores[1:])})" if part.scores[1:] else "")
        for part in sides[1]
    }
    return {**found, "score": "; ".join(sorted(words))}


def _settings_notes(before: Sequence[Part], after: Sequence[Part]) -> Iterator[str]:
    """Name the settings beside the model that differ, by benchmark."""
    known = {part.benchmark: part.settings for part in before}
    for part in after:
        changed = describe_differences(known.get(part.benchmark, part.settings), part.settings)
        if changed:
            place = part.benchmark or "all"
            yield f"{place}: not only the model differs: {'; '.join(changed)}."


_ROWS: tuple[tuple[set[str], str], ...] = (
    ({"resps", "doc_id"}, LM_EVAL),
    ({"sample_score"}, EVALSCOPE),
    ({"model_output"}, EVALSCOPE),
    ({"problem_idx", "reward"}, NEMO),
    ({"origin_prompt", "prediction"}, AISBENCH),
)
_READERS: dict[str, Callable[[Path, str | None], list[Part]]] = {
    LM_EVAL: _read_lm_eval,
    INSPECT: _read_inspect,
    EVALSCOPE: _read_evalscope,
    NEMO: _read_nemo,
    AISBENCH: _read_aisbench,
    TABLE: _read_table,
}
