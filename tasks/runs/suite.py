"""The benchmarks of an evaluation: their keys, stored results, and what remains to be evaluated."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from durable import link_or_copy
from eval.problems.items import EvaluationSet
from eval.problems.pictures import IMAGES
from eval.requests.recorder import Benchmark
from eval.results.rows import SUMMARY_FILE, ResultsError
from eval.results.suite import Member, describe_suite, is_single, read_suite, write_suite
from tasks.artifacts.artifact import MANIFEST_NAME, DamagedArtifact, verify_directory
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.evaluation.settings import benchmark_of, set_of
from tasks.stage_inputs import evaluation_files, problems_input
from tasks.stages import EVALUATE_MODEL, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedBenchmark:
    """One benchmark of an evaluation."""

    name: str  # "" without a suite
    settings: EvaluateConfig  # for this benchmark alone
    key: StageKey  # everything its answers depend on; without a suite, the key of the stage
    stored: Path | None  # stored results with the same key
    earlier: Path | None  # results of any model on the same problems

    def folder(self, output: Path) -> Path:
        """Its results folder in the stage output."""
        return output / self.name

    def asked(self, problems: Path) -> EvaluationSet:
        """The items of its file. Raises ProblemsError."""
        return set_of(self.settings, problems)

    def benchmark(self, asked: EvaluationSet, output: Path, model_folder: Path | None) -> Benchmark:
        """The benchmark to evaluate; `model_folder` as in `sampling_of`. Raises ProblemsError."""
        folder = self.folder(output)
        found = benchmark_of(self.settings, asked, folder, self.name, model_folder)
        return replace(found, earlier=self.earlier)


def benchmarks_of(
    store: ArtifactStore,
    stage: Stage,
    config: ChainConfig,
    inputs: Mapping[str, str],
    is_forced: bool = False,
) -> list[PlannedBenchmark]:
    """The benchmarks of an evaluation in order, with their stored results.

    `inputs` are the key inputs of the evaluation; a benchmark whose problems are not among them is
    new. Stored results are reused if model, settings, problems, code and packages are the same; not
    if damaged or `is_forced`.
    """
    configs = {name: config.for_benchmark(one) for name, one in config.evaluate.named.items()}
    planned = []
    for name, own in (configs or {"": config}).items():
        problems = inputs.get(problems_input(name), "")
        digests = {"eval_data": problems, "model": inputs["model"], **evaluation_files(own)}
        planned.append(PlannedBenchmark(name, own.evaluate, stage.key(own, digests), None, None))
    found = _with_stored(store, planned)
    return [replace(one, stored=None) for one in found] if is_forced else found


def _with_stored(store: ArtifactStore, asked: Sequence[PlannedBenchmark]) -> list[PlannedBenchmark]:
    stored, earlier = dict[str, Path](), dict[str, Path]()
    keys = {one.key.key for one in asked}
    for path, manifest in store.finished(EVALUATE_MODEL.name):
        for problems, key, folder in _results_in(path, manifest):
            earlier.setdefault(problems, folder)
            if key in keys - stored.keys() and _is_intact(path, manifest):
                stored[key] = folder
    is_several = len(asked) > 1  # the order only matters in a suite
    return [
        replace(
            one,
            stored=stored.get(one.key.key),
            earlier=earlier.get(one.key.inputs["eval_data"]) if is_several else None,
        )
        for one in asked
    ]


def _results_in(path: Path, manifest: Mapping[str, Any]) -> list[tuple[str, str | None, Path]]:
    """(digest of the problems, key, folder) of each result in an artifact; [] if damaged."""
    inputs = manifest["inputs"]
    try:
        if is_single(path):
            return [(inputs["eval_data"], manifest["key"], path)]
        keys = {member.name: member.key for member in describe_suite(path).members}
        return [
            (inputs[problems_input(name)], keys[name], folder)
            for name, folder in read_suite(path).items()
        ]
    except (ResultsError, KeyError):
        return []


def _is_intact(path: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        verify_directory(path, manifest["stage"], manifest["key"])
    except DamagedArtifact as damage:
        logger.warning("%s is not reused: %s", path, damage)
        return False
    return True


def link_stored_results(
    config: ChainConfig, asked: Sequence[PlannedBenchmark], output: Path
) -> None:
    """Write suite.json and link stored results into the output, replacing unfinished ones."""
    settings = config.evaluate
    if settings.named:
        members = [Member(one.name, settings.named[one.name].weight, one.key.key) for one in asked]
        write_suite(output, members, settings.headline_name)
    for one in asked:
        if one.stored is not None:
            _link_files(one.stored, one.folder(output))
            logger.info("%s: results reused from %s", one.name or "evaluation", one.stored)


def _link_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in [*target.iterdir()]:
        if path.is_file():
            path.unlink()
    for path in [*source.iterdir(), *(source / IMAGES).glob("*")]:
        if path.is_file() and path.name != MANIFEST_NAME:
            linked = target / path.relative_to(source)
            linked.parent.mkdir(exist_ok=True)
            linked.unlink(missing_ok=True)
            link_or_copy(path, linked)


def suite_metrics(
    config: ChainConfig, asked: Sequence[PlannedBenchmark], output: Path
) -> dict[str, Any]:
    """Manifest metrics: accuracies, and the origin of reused results."""
    found = {
        one.name: json.loads((one.folder(output) / SUMMARY_FILE).read_text(encoding="utf-8"))
        for one in asked
    }
    head = found[config.evaluate.headline_name]
    metrics: dict[str, Any] = {"accuracy": head["accuracy"], "n": head["n"]}
    for one in asked:
        if one.name:
            metrics |= {
                f"{one.name}/{figure}": found[one.name][figure] for figure in ("accuracy", "n")
            }
        if one.stored is not None:
            metrics[f"{one.name or 'results'}/from"] = str(one.stored)
    return metrics


def describe_benchmarks(asked: Sequence[PlannedBenchmark], stored: str = "in the store") -> str:
    """Which benchmarks would be evaluated, and which are stored."""
    groups = {"evaluates": list[str](), stored: list[str]()}
    for one in asked:
        groups[stored if one.stored else "evaluates"].append(one.name)
    return "; ".join(f"{action} {', '.join(names)}" for action, names in groups.items() if names)
