"""The benchmarks of an evaluation: the key of each, where the store has its answers, and what is left to ask."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from durable import link_or_copy
from eval.recorder import Benchmark
from eval.results import SUMMARY_FILE, ResultsError
from eval.suite import Member, describe_suite, is_single, read_suite, write_suite
from tasks.artifacts.artifact import MANIFEST_NAME, DamagedArtifact, verify_directory
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.evaluation.settings import benchmark_of, set_of
from tasks.stages import EVALUATE_MODEL, Stage, evaluation_files, problems_input

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A benchmark of an evaluation."""

    name: str  # "" for data.eval, asked alone
    settings: EvaluateConfig  # as they hold for it
    key: StageKey  # of everything that its answers depend on; that of the output where it is asked alone
    stored: Path | None  # results of the same key in the store
    earlier: Path | None  # results of the same problems by any model

    def folder(self, output: Path) -> Path:
        """Its results folder in the output of the stage."""
        return output / self.name

    def benchmark(self, problems: Path, output: Path, model_folder: Path | None) -> Benchmark:
        """What is asked for it. Raises ProblemsError; `model_folder` is as in `sampling_of`."""
        found = benchmark_of(
            self.settings, set_of(self.settings, problems), self.folder(output), self.name, model_folder
        )
        return replace(found, earlier=self.earlier)


def benchmarks_of(
    store: ArtifactStore, stage: Stage, config: ChainConfig, inputs: Mapping[str, str], is_forced: bool = False
) -> list[Asked]:
    """The benchmarks that a recipe's evaluation asks, in their order, and what the store has of them.

    `inputs` are those of the evaluation's key; a benchmark whose problems are not among them is new. Answers count
    as the same if model, settings, problems, code and packages are. Damaged ones do not; nor any if `is_forced`.
    """
    alone = {name: config.for_benchmark(one) for name, one in config.evaluate.named.items()} or {"": config}
    asked = []
    for name, own in alone.items():
        problems = inputs.get(problems_input(name), "")
        key = stage.key(own, {"eval_data": problems, "model": inputs["model"], **evaluation_files(own)})
        asked.append(Asked(name, own.evaluate, key, None, None))
    found = _with_stored(store, asked)
    return [replace(one, stored=None) for one in found] if is_forced else found


def _with_stored(store: ArtifactStore, asked: Sequence[Asked]) -> list[Asked]:
    stored, earlier = dict[str, Path](), dict[str, Path]()
    wanted = {one.key.key for one in asked}
    for path, manifest in store.finished(EVALUATE_MODEL.name):
        for problems, key, folder in _results_in(path, manifest):
            earlier.setdefault(problems, folder)
            if key in wanted - stored.keys() and _is_whole(path, manifest):
                stored[key] = folder
    is_several = len(asked) > 1  # alone, nothing else can be asked first
    return [
        replace(
            one,
            stored=stored.get(one.key.key),
            earlier=earlier.get(one.key.inputs["eval_data"]) if is_several else None,
        )
        for one in asked
    ]


def _results_in(path: Path, manifest: Mapping[str, Any]) -> list[tuple[str, str | None, Path]]:
    """Digest of the problems, key and folder of each result in an artifact; nothing of a damaged one."""
    inputs = manifest["inputs"]
    try:
        if is_single(path):
            return [(inputs["eval_data"], manifest["key"], path)]
        keys = {member.name: member.key for member in describe_suite(path).members}
        return [(inputs[problems_input(name)], keys[name], folder) for name, folder in read_suite(path).items()]
    except (ResultsError, KeyError):
        return []


def _is_whole(path: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        verify_directory(path, manifest["stage"], manifest["key"])
    except DamagedArtifact as damage:
        logger.warning("%s is not used again: %s", path, damage)
        return False
    return True


def take_stored(config: ChainConfig, asked: Sequence[Asked], output: Path) -> None:
    """Write suite.json, and link the results that the store has into the output, in place of unfinished ones."""
    settings = config.evaluate
    if settings.named:
        members = [Member(one.name, settings.named[one.name].weight, one.key.key) for one in asked]
        write_suite(output, members, settings.headline_name)
    for one in asked:
        if one.stored is not None:
            _link_files(one.stored, one.folder(output))
            logger.info("%s: answered before, taken from %s", one.name or "evaluation", one.stored)


def _link_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in [*target.iterdir()]:
        if path.is_file():
            path.unlink()
    for path in source.iterdir():
        if path.is_file() and path.name != MANIFEST_NAME:
            link_or_copy(path, target / path.name)


def suite_metrics(config: ChainConfig, asked: Sequence[Asked], output: Path) -> dict[str, Any]:
    """What the manifest says of the results: accuracies, and which were taken from where in the store."""
    found = {
        one.name: json.loads((one.folder(output) / SUMMARY_FILE).read_text(encoding="utf-8")) for one in asked
    }
    head = found[config.evaluate.headline_name]
    metrics: dict[str, Any] = {"accuracy": head["accuracy"], "n": head["n"]}
    for one in asked:
        if one.name:
            metrics[f"{one.name}/accuracy"], metrics[f"{one.name}/n"] = (
                found[one.name][name] for name in ("accuracy", "n")
            )
        if one.stored is not None:
            metrics[f"{one.name or 'results'}/from"] = str(one.stored)
    return metrics


def describe_asked(asked: Sequence[Asked], stored: str = "in the store") -> str:
    """Which benchmarks would be asked, and which the store has."""
    groups = {"asks": [one for one in asked if not one.stored], stored: [one for one in asked if one.stored]}
    return "; ".join(f"{what} {', '.join(one.name for one in group)}" for what, group in groups.items() if group)
