"""That a collection takes nothing from those who work meanwhile, and leaves alone what is not its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dapo_core.errors import StoreError
from tasks.artifacts import ArtifactStore, held
from tasks.runs.collect_garbage import collect_garbage
from tasks.runs.run import Run
from tests.garbage import NOW, artifacts, collect, make_old, names, nights, own_of
from tests.recorded_runs import Outcome, record_run, small_config


def test_what_is_built_locked_or_young_stays_and_says_why(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    trained, merged = first.stages["train_policy"], first.stages["merge_checkpoint"]
    store = ArtifactStore(tmp_path)
    log_path = store.log_path("train_policy", trained.key)  # locked by a training that outlived its run
    log_path.parent.mkdir()
    with held(log_path), held(tmp_path / ".locks" / f"merge_checkpoint-{merged.key[:16]}.lock"):
        found = collect(tmp_path)
    assert names(found, is_left=True) == {trained.key[:16], merged.key[:16]}
    assert {item.left for item in found if item.left} == {"in use, or being built"}
    assert names(found) == own_of(first) - names(found, is_left=True)
    young = collect_garbage(tmp_path, 1)
    assert {item.left for item in young} == {"younger than 60 min"}
    assert {trained.key[:16], merged.key[:16]} <= artifacts(tmp_path)


def test_a_run_that_found_it_a_moment_before_gets_it_back(tmp_path: Path) -> None:
    [run] = nights(tmp_path, "one")
    store = ArtifactStore(tmp_path)
    trained = store.lookup("train_policy", run.stages["train_policy"].key)
    assert trained is not None
    asked: list[bool] = []

    def is_used(artifact: object) -> bool:
        asked.append(Path(trained.path).exists())
        return True

    assert not store.remove(trained, is_used)
    assert asked == [False]  # out of everybody's sight by then
    assert store.lookup("train_policy", trained.key) == trained


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("run.json is not the record of a run")])
def test_what_cannot_be_asked_about_is_put_back(tmp_path: Path, error: BaseException) -> None:
    [run] = nights(tmp_path, "one")
    store = ArtifactStore(tmp_path)
    trained = store.lookup("train_policy", run.stages["train_policy"].key)
    assert trained is not None

    def interrupt(artifact: object) -> bool:
        raise error

    with pytest.raises(type(error)):
        store.remove(trained, interrupt)
    assert store.lookup("train_policy", trained.key) == trained
    assert list((tmp_path / ".removed").iterdir()) == []


def test_another_in_its_place_is_not_removed_for_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    run = record_run(config, Outcome(weights="old"))
    store = ArtifactStore(tmp_path)
    old = store.lookup("train_policy", run.stages["train_policy"].key)
    assert old is not None
    record_run(config, Outcome(weights="new"), ("train_policy",), "train-policy", ("train_policy",))
    assert not store.remove(old, lambda artifact: False)
    assert (Path(old.path) / "weights").read_text() == "new"


@pytest.mark.parametrize("is_superseded", [False, True])
def test_a_killed_collection_loses_nothing_that_is_used(tmp_path: Path, is_superseded: bool) -> None:
    [run] = nights(tmp_path, "one")
    first = run.stages["train_policy"]
    weights = "one"
    with Run.start(run.config, "evaluate-model") as user:
        user.take("train_policy")
        aside = tmp_path / ".removed" / f"train_policy-{first.key[:16]}-20260301T020000.000000Z"
        aside.parent.mkdir()
        Path(first.artifact).rename(aside)
        if is_superseded:  # another was built under the key meanwhile
            weights = "two"
            record_run(run.config, Outcome(weights=weights), ("train_policy",), "train-policy")
        with held(tmp_path / ".locks" / f"train_policy-{first.key[:16]}.lock"):
            collect(tmp_path)
            assert aside.exists()  # its key is being built
        collect(tmp_path)
    assert not aside.exists()
    found = ArtifactStore(tmp_path).find("train_policy", first.key, first.digest)
    assert found is not None
    assert (Path(found.path) / "weights").read_text() == "one"
    assert (Path(first.artifact) / "weights").read_text() == weights


def test_what_somebody_goes_on_with_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(small_config(tmp_path), labels=("prepare_data",), flow="prepare-data")
    attempt = ArtifactStore(tmp_path).working_directory("train_policy", "0" * 64)
    attempt.mkdir()
    make_old(attempt)
    remove = ArtifactStore.remove_attempt

    def resume_and_remove(*arguments: Any) -> bool:
        (attempt / "checkpoint").touch()
        return remove(*arguments)

    monkeypatch.setattr(ArtifactStore, "remove_attempt", resume_and_remove)
    assert [item.left for item in collect(tmp_path, has_unfinished=True)] == ["in use, or being built"]
    assert (attempt / "checkpoint").exists()


def test_a_record_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    [run] = nights(tmp_path, "one")
    (run.folder / "run.json").write_text("{}")
    with pytest.raises(StoreError, match=r"run\.json is not the record of a run"):
        collect(tmp_path)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_run_that_begins_after_the_look_at_the_runs_keeps_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    first, _ = nights(tmp_path, "one", "two")
    remove = ArtifactStore.remove
    with contextlib.ExitStack() as later:

        def begin_and_remove(*arguments: Any) -> bool:
            monkeypatch.undo()
            user = later.enter_context(Run.start(first.config, "evaluate-model"))
            user.take("train_policy")
            if has_ended:
                later.close()
            return remove(*arguments)

        monkeypatch.setattr(ArtifactStore, "remove", begin_and_remove)
        found = collect(tmp_path)
    used = {first.stages["train_policy"].key[:16]}
    assert (names(found), names(found, is_left=True)) == (own_of(first) - used, used)
    assert used <= artifacts(tmp_path)


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "file", "none"):
        with pytest.raises(StoreError, match=rf"there is no store .*{name}: .* name the store with --store"):
            collect(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_odd_in_a_store_is_left_alone(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    trained = Path(first.stages["train_policy"].artifact)
    key = trained.name
    odd = [tmp_path / folder / name for folder in ("mine", "train_policy", ".removed", ".damaged", ".work", "runs",
           ".logs") for name in ("link", "broken", "folder", f"train_policy-{'f' * 16}.log")]  # fmt: skip
    for path in odd:
        path.parent.mkdir(exist_ok=True)
        if path.name == "folder":
            path.mkdir()
        else:
            path.symlink_to(trained if path.name == "link" else "nowhere")
    (tmp_path / "linked").symlink_to(trained.parent)
    shutil.copytree(trained, tmp_path / "mine" / key)  # the user's own copy
    for number, text in enumerate(("", "[]", "{}", json.dumps({"stage": 1, "key": 2, "digest": [3]}))):
        unreadable = tmp_path / "train_policy" / f"{number:016}"
        unreadable.mkdir()
        (unreadable / "manifest.json").write_text(text)
        odd.append(unreadable)
    (tmp_path / "train_policy" / ("f" * 16) / "manifest.json").mkdir(parents=True)
    assert names(collect_garbage(tmp_path, 1, margin_seconds=NOW, has_damaged=True, has_unfinished=True)) == (
        own_of(first) | {"folder"}  # of .damaged
    )
    odd.remove(tmp_path / ".damaged" / "folder")
    assert all(os.path.lexists(path) for path in [*odd, tmp_path / "mine" / key])
    assert not trained.exists()


def test_two_collections_do_not_meet(tmp_path: Path) -> None:
    nights(tmp_path, "one")
    with held(tmp_path / ".locks" / "gc.lock"), pytest.raises(StoreError, match="another dapo gc goes on"):
        collect(tmp_path)
