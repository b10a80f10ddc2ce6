"""Artifacts built again by force: the old one serves until then, is kept for its users, and no crash loses it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dapo_core.errors import StoreError
from tasks.artifacts import Artifact, ArtifactStore, StageKey

PARTS = StageKey(stage="train", config={}, inputs={}, code_digest="c", versions={})


def writes(text: str) -> Callable[[Path], Mapping[str, Any]]:
    def build(folder: Path) -> Mapping[str, Any]:
        (folder / "content").write_text(text)
        return {}

    return build


def content(artifact: Artifact | None) -> str:
    assert artifact is not None
    return (Path(artifact.path) / "content").read_text()


def allow(artifact: Artifact) -> None:
    """A replacement that nobody minds."""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def in_child(work: Callable[[], object]) -> int:
    """Runs in a forked child what ends it; returns the signal that did."""
    if not (pid := os.fork()):
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die(*_: object) -> Mapping[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def test_the_old_one_serves_until_the_new_one_is_complete(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, writes("old"))
    told: list[str] = []

    def build(folder: Path) -> Mapping[str, Any]:
        assert content(store.lookup("train", PARTS.key)) == "old"
        return writes("new")(folder)

    new, was_cached = store.produce(PARTS, build, replace=lambda artifact: told.append(artifact.path))
    assert (content(new), new.path, was_cached) == ("new", old.path, False)
    assert store.lookup("train", PARTS.key) == new
    kept = store.find("train", PARTS.key, old.digest)
    assert content(kept) == "old"
    assert kept is not None
    assert told == [old.path, kept.path]
    assert kept.path == f"{old.path}.{old.digest[:16]}"
    assert store.find("train", PARTS.key, "0" * 64) is None


def test_without_an_old_one_it_is_built_as_ever(store: ArtifactStore) -> None:
    made, was_cached = store.produce(PARTS, writes("first"), replace=pytest.fail)
    assert (content(made), was_cached) == ("first", False)


def test_the_same_bytes_leave_the_old_one_where_it_is(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, writes("same"))
    born = old.manifest()["ended_at"]
    new, was_cached = store.produce(PARTS, writes("same"), replace=allow)
    assert (new, was_cached) == (old, False)
    assert new.manifest()["ended_at"] == born
    assert [path.name for path in (store.root / "train").iterdir()] == [PARTS.key[:16]]
    assert list((store.root / ".work").iterdir()) == []


@pytest.mark.parametrize("refused_at", [1, 2])
def test_a_refusal_keeps_the_old_one(store: ArtifactStore, refused_at: int) -> None:
    old, _ = store.produce(PARTS, writes("old"))
    told: list[Artifact] = []

    def refuse(artifact: Artifact) -> None:
        told.append(artifact)
        if len(told) == refused_at:
            raise StoreError("in use")

    with pytest.raises(StoreError, match="in use"):
        store.produce(PARTS, writes("new"), replace=refuse)
    assert len(told) == refused_at
    assert store.lookup("train", PARTS.key) == old
    assert content(old) == "old"
    assert [path.name for path in (store.root / "train").iterdir()] == [PARTS.key[:16]]


def test_a_kill_while_it_is_built_leaves_a_hit(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, writes("old"))
    assert in_child(lambda: store.produce(PARTS, die, replace=allow)) == -signal.SIGKILL
    assert store.produce(PARTS, pytest.fail) == (old, True)


def test_a_kill_between_the_renames_is_a_miss_and_loses_nothing(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, writes("old"))

    def die_once_moved(artifact: Artifact) -> None:
        if artifact.path != old.path:
            die()

    assert in_child(lambda: store.produce(PARTS, writes("new"), replace=die_once_moved)) == -signal.SIGKILL
    assert store.lookup("train", PARTS.key) is None
    assert content(store.find("train", PARTS.key, old.digest)) == "old"
    again, was_cached = store.produce(PARTS, writes("newer"))
    assert (content(again), was_cached) == ("newer", False)
    assert content(store.find("train", PARTS.key, old.digest)) == "old"


def attempt(fails: bool) -> Callable[[Path], Mapping[str, Any]]:
    """A resumable training: each attempt adds a step to those it finds, and writes how many there are."""

    def build(folder: Path) -> Mapping[str, Any]:
        steps = folder / "content"
        steps.write_text((steps.read_text() if steps.exists() else "") + ".")
        if fails:
            raise InterruptedError
        return {}

    return build


def test_a_forced_attempt_resumes_forced_ones_alone(store: ArtifactStore) -> None:
    with pytest.raises(InterruptedError):
        store.produce(PARTS, attempt(fails=True), resumable=True)
    with pytest.raises(InterruptedError):
        store.produce(PARTS, attempt(fails=True), resumable=True, replace=allow)
    made, _ = store.produce(PARTS, attempt(fails=False), resumable=True, replace=allow)
    assert content(made) == ".."  # its own first step, and not the one of the attempt before
    # Nobody would resume that one any more.
    assert not store.working_directory("train", PARTS.key).exists()
    [aside] = (store.root / ".damaged").iterdir()
    assert (aside / "content").read_text() == "."


def test_a_forced_build_that_cannot_be_resumed_begins_anew(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, writes("old"))
    with pytest.raises(InterruptedError):
        store.produce(PARTS, attempt(fails=True), replace=allow)
    made, _ = store.produce(PARTS, attempt(fails=False), replace=allow)
    assert content(made) == "."
    assert content(store.find("train", PARTS.key, old.digest)) == "old"
