"""What becomes of runs whose artifact is built again by force, or removed, while others look at it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dapo_core.errors import StoreError
from flows.config import Config
from tasks.artifacts import ArtifactStore, StageKey
from tasks.runs.history import read_runs
from tasks.runs.run import Run
from tests.recorded_runs import small_config


def probe(config: Config, content: str, forced: tuple[str, ...] = ()) -> Run:
    """A run of one stage whose output is `content`."""

    def build(folder: Path) -> dict[str, str]:
        (folder / "content").write_text(content)
        return {}

    with Run.start(config, "probe", forced) as run:
        run.produce("probe", StageKey("probe", {}, {}, "code", {}), build)
    return run


def test_a_forced_stage_leaves_old_runs_what_they_had(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    first = probe(config, "one")
    second = probe(config, "two", ("probe",))
    third = probe(config, "never built")
    assert [(run.folder / "probe" / "content").read_text() for run in (first, second, third)] == [
        "one",
        "two",
        "two",
    ]
    records = {run.id: run.stages["probe"] for run in read_runs(first.store.root)}
    old, new = records[first.folder.name], records[second.folder.name]
    assert Path(old.path).name == f"{old.key[:16]}.{old.digest[:16]}"
    assert (Path(new.path).name, new.is_cached) == (new.key[:16], False)
    assert records[third.folder.name].is_cached
    probe(config, "one", ("probe",))  # back again: the copy that is aside already serves both
    fifth = probe(config, "three", ("probe",))
    assert (first.folder / "probe" / "content").read_text() == "one"
    assert (second.folder / "probe" / "content").read_text() == "two"
    assert len(list((fifth.store.root / "probe").iterdir())) == 3
    assert not list((fifth.store.root / ".removed").iterdir())


def test_what_a_run_uses_that_goes_on_is_not_replaced(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    with Run.start(config, "long") as user:
        key = StageKey("probe", {}, {}, "code", {})
        user.produce("probe", key, lambda folder: {"n": (folder / "content").write_text("used")})
        with pytest.raises(
            StoreError, match=rf"the run {user.folder.name} of arith_cpu \(long, pid {os.getpid()} on"
        ):
            probe(config, "other", ("probe",))
        assert (user.folder / "probe" / "content").read_text() == "used"
    assert (probe(config, "other", ("probe",)).folder / "probe" / "content").read_text() == "other"
    assert (user.folder / "probe" / "content").read_text() == "used"


def test_a_run_that_begins_to_use_it_while_it_is_built_keeps_it(tmp_path: Path) -> None:
    """The forced build is complete, yet must not take the place of what another run reads by then."""
    config = small_config(tmp_path / "store")
    probe(config, "used")
    key = StageKey("probe", {}, {}, "code", {})
    users: list[Run] = []

    def build(folder: Path) -> dict[str, str]:
        users.append(Run.start(config, "other"))
        users[0].produce("probe", key, lambda folder: {})
        (folder / "content").write_text("new")
        return {}

    with pytest.raises(StoreError, match="goes on and uses"), Run.start(config, "probe", ("probe",)) as run:
        run.produce("probe", key, build)
    assert (users[0].folder / "probe" / "content").read_text() == "used"
    assert ArtifactStore(config.store.path).lookup("probe", key.key) is not None
    users[0].__exit__(None, None, None)


def test_an_artifact_that_goes_as_it_is_recorded_is_made_again(tmp_path: Path) -> None:
    """Whoever removes artifacts looks at the records after the move: one that came too late must notice."""
    config = small_config(tmp_path / "store")
    probe(config, "one")
    with Run.start(config) as run:
        recorded = run.record

        def remove_then_record(**outcome: object) -> None:
            found = store.lookup("probe", key.key)
            if found is not None and "probe" in run.stages and len(removed) == 0:
                removed.append(store.remove(found, lambda artifact: False))
            recorded(**outcome)

        store, key, removed = run.store, StageKey("probe", {}, {}, "code", {}), list[bool]()
        run.record = remove_then_record  # type: ignore[method-assign]
        made = run.produce("probe", key, lambda folder: {"n": (folder / "content").write_text("again")})
    assert removed == [True]
    assert (Path(made.path) / "content").read_text() == "again"
    assert not run.stages["probe"].cached
