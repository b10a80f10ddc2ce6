"""What a run would do: each stage's key, and whether its artifact is there. Runs no stage."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_core.config import Config
from tasks.artifacts import Artifact, ArtifactStore
from tasks.stages import CHAIN


@dataclass(frozen=True)
class PlannedStage:
    """One stage of the chain as a run would find it."""

    label: str
    state: str  # "cached", "resumes" or "runs"
    key: str | None  # None while an input is not built
    waits_for: str | None  # the stage whose output the key needs
    seconds: float | None  # what building the cached artifact took


def plan_chain(config: Config) -> list[PlannedStage]:
    """The stages of dapo-full in order; the report is written in each run and has no key."""
    store = ArtifactStore(config.store.path)
    found: dict[str, Artifact] = {}
    stages = []
    for link in CHAIN:
        missing = [label for label in link.needs if label not in found]
        if missing:
            stages.append(PlannedStage(link.label, "runs", None, missing[-1], None))
            continue
        key = link.key(config, found)
        artifact = store.lookup(key.stage, key.key) if store.root.exists() else None
        is_begun = store.working_directory(key.stage, key.key).exists()
        state = "cached" if artifact else "resumes" if is_begun else "runs"
        seconds = artifact.manifest()["seconds"] if artifact else None
        stages.append(PlannedStage(link.label, state, key.key, None, seconds))
        if artifact:
            found[link.label] = artifact
    return stages
