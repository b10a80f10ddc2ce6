"""Exports a run to one folder: merged model, report, manifests, configuration and model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from markupsafe import escape

from dapo_core.config.loading import dump_config, read_tree, resolve
from durable import publish
from eval.problems.prompts import DEFAULT, TEMPLATES
from eval.problems.registry import SETS
from eval.report.pages import render
from eval.report.report import REPORT_JSON
from redaction import redact
from tasks.artifacts.artifact import Artifact, DamagedArtifact, StoreError, hash_file
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.data.sources import (
    GENERATED,
    all_sources,
    benchmark_sources,
    eval_sources,
    train_sources,
)
from tasks.runs.history import (
    CONFIG_FILE,
    REPORT_FOLDER,
    RecordedRun,
    artifact_of,
    read_report,
    require_artifact,
)

MODEL_LABEL = "merge_checkpoint"
CARD_FILE = "README.md"
BASE_CARD_FILE = "BASE_MODEL_README.md"  # the card of the base model
MANIFESTS_FOLDER = "manifests"
TAGS = ("dapo", "reinforcement-learning", "grpo", "dapo-pipeline")
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

BLOCK_BYTES = 1024 * 1024

OnProgress = Callable[[int, int], None]  # (bytes done, total bytes)


def export_run(run: RecordedRun, destination: Path, on_progress: OnProgress) -> int:
    """Export a run's model, report, manifests and card; returns the model's size in bytes.

    Files are copied, so that edits do not affect artifacts. In text files ${STORE} and ${HOME}
    replace local paths. The folder appears atomically. Raises StoreError if `destination` exists,
    if the run has no model or report, if its model was removed from the store, or if a file does
    not match its manifest.
    """
    with ArtifactStore(run.store).in_use():
        model = require_artifact(run, MODEL_LABEL)
        report = read_report(run)
        if report is None:
            raise StoreError(
                f"the run {run.id} ({run.flow}, {run.state}) has no report; export a completed "
                "dapo run"
            )
        if destination.exists() or destination.is_symlink():
            raise StoreError(f"{destination} already exists; name a new folder")
        # Operating settings are specific to this machine, and may contain a URL with a secret.
        config = resolve(
            ChainConfig, read_tree(run.folder / CONFIG_FILE) | {"flow": {}, "store": {}}
        )
        with _published(destination) as folder:
            num_bytes = _copy_model(model, folder, on_progress)
            _write_documents(folder, run, config, report)
    return num_bytes


def _write_documents(
    folder: Path, run: RecordedRun, config: ChainConfig, report: Mapping[str, Any]
) -> None:
    """Write the report, configuration, manifests and card next to the model."""
    portable = _portable_text(run)
    found = {label: artifact_of(run, label) for label in run.stages}
    manifests = {
        label: artifact.manifest() for label, artifact in found.items() if artifact is not None
    }
    for name in (REPORT_FOLDER, MANIFESTS_FOLDER):
        (folder / name).mkdir()
    report_folder = run.folder / REPORT_FOLDER
    # each benchmark's too
    for path in (*report_folder.rglob("report.*"), *report_folder.glob("data_card.*")):
        copied = folder / REPORT_FOLDER / path.relative_to(report_folder)
        copied.parent.mkdir(exist_ok=True)
        copied.write_text(portable(_read_report(run, path)), "utf-8")
    for label, manifest in manifests.items():
        shown = {name: value for name, value in manifest.items() if name != "host"}
        text = portable(json.dumps(shown, indent=2)) + "\n"
        (folder / MANIFESTS_FOLDER / f"{label}.json").write_text(text, "utf-8")
    recipe = ChainConfig.model_validate_json(portable(config.model_dump_json()))
    (folder / CONFIG_FILE).write_text(dump_config(recipe), "utf-8")
    if (folder / CARD_FILE).exists():
        (folder / CARD_FILE).rename(folder / BASE_CARD_FILE)
    try:
        card = model_card(run, config, report, manifests)
    except (KeyError, TypeError, ValueError, AttributeError, UndefinedError) as error:
        path = run.folder / REPORT_FOLDER / REPORT_JSON
        raise StoreError(
            f"{path} is incomplete ({error!r}); dapo stage compare {run.folder / CONFIG_FILE} "
            "writes it again"
        ) from error
    (folder / CARD_FILE).write_text(portable(card), "utf-8")


def _read_report(run: RecordedRun, path: Path) -> str:
    """The text of a report file. Raises StoreError for a link or if it is not text."""
    try:
        if not path.is_symlink():
            return path.read_text("utf-8")
        problem = "is a link"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
    raise StoreError(
        f"{path} {problem}; dapo stage compare {run.folder / CONFIG_FILE} writes the report again"
    )


def model_card(
    run: RecordedRun,
    config: ChainConfig,
    report: Mapping[str, Any],
    manifests: Mapping[str, Mapping[str, Any]],
) -> str:
    """README.md for the Hugging Face Hub: data, recipe, scores with intervals, versions."""
    versions = {name: one for each in manifests.values() for name, one in each["versions"].items()}
    base_model, benchmark = base_model_of(config), _benchmark(config, report)
    return render(
        "model_card.md.j2",
        header=_header(run, config, report, base_model),
        benchmark=benchmark,
        run=run,
        config=config,
        report=report,
        manifests=manifests,
        base_model=base_model,
        own_paths=_user_paths(config),
        data_rows=_data_rows(manifests),
        trained_on=[source.name for source in train_sources(config)],
        evaluated_with=[*benchmark_sources(config)]
        or [source.name for source in eval_sources(config)],
        versions={name: one for name, one in sorted(versions.items()) if one != "absent"},
    )


def _data_rows(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Row counts of the prepared data files."""
    if "prepare_data" not in manifests:
        return {}
    metrics = manifests["prepare_data"]["metrics"]
    benchmarks = {
        benchmark_file(name): rows for name, rows in metrics.get("benchmark_rows", {}).items()
    }
    return {TRAIN_FILE: metrics["train_rows"], EVAL_FILE: metrics["eval_rows"], **benchmarks}


def base_model_of(config: ChainConfig) -> str | None:
    """The base model's name on the hub, from model.id, its path or config.json; else None."""
    if config.model.source == "huggingface":
        return config.model.id
    if config.model.source != "path":
        return None
    folder = Path(str(config.model.path))
    if match := _HUB_CACHE.search(str(folder.resolve())):
        return f"{match[1]}/{match[2]}"
    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (FileNotFoundError, ValueError):  # moved since training
        return None
    return name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else None


def _portable_text(run: RecordedRun) -> Callable[[str], str]:
    """A function that redacts secrets and writes ${STORE} and ${HOME} for these folders.

    It handles paths in plain text, HTML and JSON. `dapo run` refuses configurations that contain
    these names.
    """
    homes, stores = {Path.home(), Path.home().resolve()}, {run.store, run.store.resolve()}
    # possibly under another mount
    stores |= {Path(stage.artifact).parents[2] for stage in run.stages.values()}
    named = [(path, "${HOME}") for path in homes if path != Path("/")]
    named += [(path, "${STORE}") for path in stores]
    names = {
        form: name
        for path, name in named
        for form in (str(path), str(escape(path)), json.dumps(str(path))[1:-1])
    }
    paths = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.-])(?:{paths})(?![\w-]|\.\w)")  # whole folder names only
    return lambda text: redact(pattern.sub(lambda match: names[match[0]], text))


def _user_paths(config: ChainConfig) -> list[str]:
    """The keys that name files of the user."""
    model, scorer, prompt = config.model, config.custom_reward, config.evaluate.prompt
    paths = {
        **{source.key: source.path for source in all_sources(config)},
        "model.path": model.path,
        "custom_reward.path": scorer.path,
        "algorithm.custom_loss.path": config.algorithm.custom_loss.path,
        "algorithm.kl.reference_path": config.algorithm.kl.reference_path,
        "evaluate.prompt": None if prompt in (DEFAULT, *TEMPLATES) else prompt,
        **{
            f"evaluate.benchmarks.{name}.prompt": one.prompt
            for name, one in config.evaluate.named.items()
            if one.prompt not in (None, DEFAULT, *TEMPLATES)
        },
        **{
            f"path of {one.name} in evaluate.baselines": one.path
            for one in config.evaluate.baselines
        },
    }
    return [f"`{key}`" for key, path in paths.items() if path is not None]


def _benchmark(config: ChainConfig, report: Mapping[str, Any]) -> str:
    is_generated = config.data.eval[0].set in GENERATED
    default = "generated problems" if is_generated else "a set of the user's own"
    return report.get("headline") or report["settings"]["benchmark"] or default


def _header(
    run: RecordedRun, config: ChainConfig, report: Mapping[str, Any], base_model: str | None
) -> str:
    """The front matter, with scores of named benchmarks, since a score names its dataset."""
    from huggingface_hub import EvalResult, ModelCardData

    settings = report["settings"]
    asked = settings["benchmark"]
    found = [(asked, asked, report["after"]["accuracy"], f" ({settings['grader']})")]
    if "benchmarks" in report:
        sets = {name: one.set for name, one in config.evaluate.named.items()}
        found = [
            (row["name"], sets[row["name"]], row["after"], _averaged(row["num_samples"]))
            for row in report["benchmarks"]
            if sets[row["name"]] in SETS
        ]
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_name=name,
            dataset_type=benchmark,
            metric_type="accuracy",
            metric_name=f"accuracy{words}",
            metric_value=round(accuracy, 4),
        )
        for name, benchmark, accuracy, words in found
        if benchmark is not None
    ]
    return ModelCardData(
        base_model=base_model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=run.name if scores else None,
        eval_results=scores or None,
    ).to_yaml()


def _averaged(num_samples: int) -> str:
    return f" (avg@{num_samples})" if num_samples > 1 else ""


@contextmanager
def _published(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes the destination, or is removed after an error."""
    destination = destination.absolute()
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise StoreError(
            f"{destination} cannot be created: {error.strerror}; name another folder"
        ) from None
    try:
        yield partial
        publish(partial, destination)
    except StoreError:
        raise
    except OSError as error:
        if destination.exists():
            raise StoreError(
                f"{destination} was created meanwhile, perhaps by another export; name a new folder"
            ) from None
        raise StoreError(
            f"the export to {destination} failed: {error}; free some space there, or name another "
            "folder"
        ) from None
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _copy_model(model: Artifact, folder: Path, on_progress: OnProgress) -> int:
    """Copy the artifact's files and verify the copies against its manifest; returns their size."""
    try:
        entries = model.entries()
    except DamagedArtifact as damage:
        raise StoreError(
            f"the artifact {model.path} is damaged: {damage}; dapo run builds it again"
        ) from None
    total, done = sum(entry.size for entry in entries), 0
    for entry in entries:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(Path(model.path, entry.path), "rb") as source, target.open("wb") as copy:
            while block := source.read(BLOCK_BYTES):
                copy.write(block)
                done += len(block)
                on_progress(done, total)
        if (found := hash_file(target, entry.algorithm)) != entry.digest:
            raise StoreError(
                f"{Path(model.path, entry.path)} has {found}, its manifest says {entry.digest}: "
                "the artifact is damaged; dapo run builds it again"
            )
    return done
