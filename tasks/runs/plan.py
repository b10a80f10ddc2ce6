"""What a run would do: each stage's key, whether the store has its artifact, and why not. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo_core.errors import CheckpointError, ConfigError, ModelError
from downloads import Unreachable
from redaction import redacted
from tasks.artifacts.artifact import Artifact, DamagedArtifact
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.data.sources import describe_sources
from tasks.external.environment import TrainerMissing
from tasks.fetched_model import describe_fetch
from tasks.links import Link, chain_of, link_of
from tasks.runs.history import RecordedRun, artifact_of, differences_of, read_runs
from tasks.runs.run import require_outputs
from tasks.runs.suite import benchmarks_of, describe_asked
from tasks.serve_model.failure import ServeError
from tasks.stages import EVALUATE_MODEL, FETCH_MODEL, PREPARE_DATA, Stage


@dataclass(frozen=True)
class PlannedStage:
    """One stage of the chain as a run would find it.

    cached: its artifact is in the store. building: a process makes it. resumes: an unfinished attempt is
    continued. damaged: its artifact differs from its manifest. stale: the run before had one, and this one's key
    differs or an input is still to be built. runs: any other missing artifact.
    """

    label: str
    state: str  # "cached", "building", "resumes", "damaged", "stale" or "runs"
    note: str  # why it is not cached, apart from changes; empty when these say all
    changes: tuple[str, ...]  # how its key differs from that of the run before
    key: str | None  # None while an input is not built
    waits_for: str | None  # the stage whose output the key needs
    seconds: float | None  # how long the cached artifact took to build

    def why(self, num_changes: int | None = 1) -> str:
        """Note and changes on one line; only the first `num_changes`, with the number of the others."""
        shown = self.changes[:num_changes]
        more = len(self.changes) - len(shown)
        return "; ".join([*filter(None, [self.note]), *shown]) + (f" +{more} more" if more else "")


def plan_chain(config: ChainConfig) -> list[PlannedStage]:
    """The stages of dapo-full in order; the report is written in each run and has no key.

    Each is compared with the newest run of the same run.name that still has its artifact of the stage.
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
            stages.append(_plan_waiting(store, link, missing[-1], _manifest_before(runs, link.label)))
            continue
        try:
            key = link.key(*(found[label] for label in link.needs))
        except (Unreachable, ServeError, CheckpointError, TrainerMissing) as error:
            note = _fetched(link) if isinstance(error, Unreachable) else str(error)
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
            note = "; ".join(filter(None, [note, _fetched(link), _asked(store, link, key.inputs)]))
            stages.append(PlannedStage(link.label, state, note, changes, key.key, None, None))
    return stages


def is_built(config: ChainConfig) -> bool:
    """Whether the store has the output of every stage; not where a file that a key is made of cannot be read."""
    try:
        return all(stage.state == "cached" for stage in plan_chain(config))
    except (ConfigError, ModelError, CheckpointError):  # the preflight says why, with all else that it finds
        return False


def has_output(config: ChainConfig, label: str) -> bool:
    """Whether the store has a stage's undamaged output; not where its key is unknown, since the stage says why."""
    link = link_of(config, label)
    try:
        key = link.key(*require_outputs(config, link.needs).values())
        return ArtifactStore(config.store.path).check(key.stage, key.key) is not None
    except (DamagedArtifact, Unreachable, ServeError, CheckpointError, TrainerMissing, ConfigError, ModelError):
        return False


def _asked(store: ArtifactStore, link: Link, inputs: Mapping[str, str], stored: str = "in the store") -> str:
    """Which benchmarks of a suite the stage would ask, and which the store has."""
    if link.stage.name != EVALUATE_MODEL.name or not link.config.evaluate.benchmarks:
        return ""
    return describe_asked(benchmarks_of(store, link.stage, link.config, inputs), stored)


def _fetched(link: Link) -> str:
    """What the stage would fetch; "" where it fetches nothing."""
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
    # Of its inputs those that are artifacts are not known yet; all else of its key is.
    try:
        changes = _changes(before, link.stage.key(link.config, {**before["inputs"], **link.files(link.config)}))
    except TrainerMissing as error:
        return PlannedStage(link.label, "stale", f"{note}; {error}", (), None, upstream, None)
    asked = _asked(store, link, before["inputs"], "if the model changes also")
    note = "; ".join(filter(None, [note, asked]))
    return PlannedStage(link.label, "stale", note, changes, None, upstream, None)


def _attempt(
    store: ArtifactStore, stage: Stage, key: StageKey, damage: DamagedArtifact | None
) -> tuple[str, str] | None:
    """State and note of a stage that is being built, damaged or unfinished; None for any other."""
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
    """State, note and changes of a stage without an artifact."""
    if was_built:
        return "runs", "its artifact is gone", ()
    before = _manifest_before(runs, label)
    if before is not None:
        return "stale", "", _changes(before, key)
    is_new = not any(label in run.stages for run in runs)
    return "runs", "never built" if is_new else "nothing is left of earlier runs", ()


def _manifest_before(runs: list[RecordedRun], label: str) -> dict[str, Any] | None:
    """The manifest of the newest run that has one for the label."""
    artifacts = (artifact_of(run, label) for run in runs if label in run.stages)
    return next((artifact.manifest() for artifact in artifacts if artifact is not None), None)


def _changes(before: Mapping[str, Any], key: StageKey) -> tuple[str, ...]:
    """How the key differs from the one an artifact was made with: keys, then packages, code, inputs."""
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
