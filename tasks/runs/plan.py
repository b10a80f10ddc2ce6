"""Plans a run: each stage's key, and whether or why not the store has it. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo_core.errors import CheckpointError, ConfigError, ModelError
from downloads import Unreachable
from redaction import redacted
from tasks.artifacts.artifact import Artifact, DamagedArtifact, StoreError
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.data.sources import describe_sources
from tasks.fetched_model import describe_fetch
from tasks.links import Link, chain_of, link_of
from tasks.runs.history import RecordedRun, artifact_of, differences_of, read_runs
from tasks.runs.run import require_outputs
from tasks.runs.suite import benchmarks_of, describe_benchmarks
from tasks.serve_model.failure import ServeError
from tasks.stages import EVALUATE_MODEL, FETCH_MODEL, PREPARE_DATA, Stage


@dataclass(frozen=True)
class PlannedStage:
    """The state of one stage before a run.

    cached: the store has its artifact. building: a process is building it. resumes: an unfinished
    attempt is continued. damaged: its artifact failed verification. stale: an earlier run has one,
    but the key differs or an input is missing. runs: any other missing artifact.
    """

    label: str
    state: str  # "cached", "building", "resumes", "damaged", "stale" or "runs"
    note: str  # why it is not cached, besides `changes`
    changes: tuple[str, ...]  # differences from the key of the earlier run
    key: str | None  # None while an input is missing
    waits_for: str | None  # the stage that provides the missing input
    seconds: float | None  # build time of the cached artifact

    def why(self, num_changes: int | None = 1) -> str:
        """Note and changes on one line; changes beyond `num_changes` are only counted."""
        shown = self.changes[:num_changes]
        more = len(self.changes) - len(shown)
        return _joined(self.note, *shown) + (f" +{more} more" if more else "")


# The key of a stage cannot be computed before a run.
_KEYLESS = (Unreachable, ServeError, CheckpointError)


def plan_chain(config: ChainConfig) -> list[PlannedStage]:
    """The stages of dapo-full in order, without the report, which every run writes.

    Each is compared with the newest run of the same run.name that still has its artifact.
    """
    store = ArtifactStore(config.store.path)
    recorded = list(read_runs(store.root))
    runs = [run for run in recorded if run.name == config.run.name]
    built = {stage.key for run in recorded for stage in run.stages.values()}
    found: dict[str, Artifact] = {}
    stages = []
    for link in chain_of(config):
        missing = [label for label in link.needs if label not in found]
        if missing:
            before = _manifest_before(runs, link.label)
            stages.append(_plan_waiting(store, link, missing[-1], before))
            continue
        try:
            key = link.key(*(found[label] for label in link.needs))
        except _KEYLESS as error:
            note = _describe_fetch(link) if isinstance(error, Unreachable) else str(error)
            stages.append(PlannedStage(link.label, "runs", note, (), None, None, None))
            continue
        try:
            artifact = store.check(key.stage, key.key)
            damage = None
        except DamagedArtifact as error:
            artifact, damage = None, error
        if artifact is not None:
            found[link.label] = artifact
            seconds = artifact.manifest()["seconds"]
            stages.append(PlannedStage(link.label, "cached", "", (), key.key, None, seconds))
        else:
            state, note, changes = _explain(link.label, key, runs, key.key in built)
            state, note = _attempt(store, link.stage, key, damage) or (state, note)
            asked = _describe_benchmarks(store, link, key.inputs)
            note = _joined(note, _describe_fetch(link), asked)
            stages.append(PlannedStage(link.label, state, note, changes, key.key, None, None))
    return stages


def is_built(config: ChainConfig) -> bool:
    """True if the store has every stage's output; False if a file for a key is unreadable."""
    try:
        return all(stage.state == "cached" for stage in plan_chain(config))
    except (ConfigError, ModelError, CheckpointError):  # the preflight reports the reason
        return False


def has_output(config: ChainConfig, label: str) -> bool:
    """True if the store has an intact output of the stage; False if its key cannot be computed."""
    link = link_of(config, label)
    try:
        key = link.key(*require_outputs(config, link.needs).values())
        return ArtifactStore(config.store.path).check(key.stage, key.key) is not None
    except (DamagedArtifact, StoreError, ConfigError, ModelError, *_KEYLESS):
        return False


def _describe_benchmarks(
    store: ArtifactStore, link: Link, inputs: Mapping[str, str], stored: str = "in the store"
) -> str:
    """Which benchmarks of a suite would be evaluated, and which are stored."""
    if link.stage.name != EVALUATE_MODEL.name or not link.config.evaluate.benchmarks:
        return ""
    return describe_benchmarks(benchmarks_of(store, link.stage, link.config, inputs), stored)


def _describe_fetch(link: Link) -> str:
    """What the stage would fetch; "" if nothing."""
    if link.stage is PREPARE_DATA:
        return describe_sources(link.config)
    is_fetched = link.stage is FETCH_MODEL and link.config.model.source != "path"
    return describe_fetch(link.config.model) if is_fetched else ""


def _plan_waiting(
    store: ArtifactStore, link: Link, upstream: str, before: Mapping[str, Any] | None
) -> PlannedStage:
    note = f"waits for {upstream}"
    if before is None:
        return PlannedStage(link.label, "runs", note, (), None, upstream, None)
    # Upstream artifacts are unknown, but the rest of the key can be compared.
    changes = _changes(before, link.key_for(before["inputs"]))
    asked = _describe_benchmarks(store, link, before["inputs"], "if the model changes also")
    return PlannedStage(link.label, "stale", _joined(note, asked), changes, None, upstream, None)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _attempt(
    store: ArtifactStore, stage: Stage, key: StageKey, damage: DamagedArtifact | None
) -> tuple[str, str] | None:
    """State and note of a stage that is being built, damaged or unfinished; otherwise None."""
    if (builder := store.builder(key.stage, key.key)) is not None:
        return "building", f"by {builder}"
    if damage is not None:
        return "damaged", str(damage)
    if stage.is_resumable and store.unfinished(key.stage, key.key) is not None:
        return "resumes", "an attempt was not finished"
    return None


def _explain(
    label: str, key: StageKey, runs: list[RecordedRun], was_built: bool
) -> tuple[str, str, tuple[str, ...]]:
    """State, note and changes of a stage whose artifact is missing."""
    if was_built:
        return "runs", "its artifact is gone", ()
    before = _manifest_before(runs, label)
    if before is not None:
        return "stale", "", _changes(before, key)
    is_new = not any(label in run.stages for run in runs)
    return "runs", "never built" if is_new else "the outputs of earlier runs are gone", ()


def _manifest_before(runs: list[RecordedRun], label: str) -> dict[str, Any] | None:
    """The manifest from the newest run that still has one for the label."""
    artifacts = (artifact_of(run, label) for run in runs if label in run.stages)
    return next((artifact.manifest() for artifact in artifacts if artifact is not None), None)


def _changes(before: Mapping[str, Any], key: StageKey) -> tuple[str, ...]:
    """Differences from the key of an earlier artifact: configuration, packages, code, inputs."""
    config = redacted(key.config)  # as a manifest holds it
    changes = [str(change) for change in differences_of(before["config"], config)]
    changes += [str(change) for change in differences_of(before["versions"], key.versions)]
    if before["code_digest"] != key.code_digest:
        changes.append("its code changed")
    for name in {**before["inputs"], **key.inputs}:
        if name not in key.inputs:
            changes.append(f"input {name} is no longer used")
        elif name not in before["inputs"]:
            changes.append(f"input {name} is new")
        elif before["inputs"][name] != key.inputs[name]:
            changes.append(f"input {name} changed")
    return tuple(changes)
