"""Real processes that race for a key, die while building, or hit a full or read-only disk."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.artifacts.artifact import StoreError
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tests.processes import DEADLINE_SECONDS, wait_until

PARTS = StageKey(stage="train", config={}, inputs={}, code_digest="c", versions={})

# Builds PARTS: each build writes its pid to `builds`, waits for the file `go`, and prints the
# result of produce.
BUILDER = """
import logging, os, sys, time
from pathlib import Path
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore

root, builds, go = map(Path, sys.argv[1:4])
logging.basicConfig(level=logging.INFO, format="%(message)s")

def build(work):
    (work / "step").write_bytes(b"half")
    with open(builds, "a") as file:
        file.write(f"{os.getpid()}\\n")
    while not go.exists():
        time.sleep(0.02)
    (work / "step").write_bytes(b"whole")
    return {}

parts = StageKey(stage="train", config={}, inputs={}, code_digest="c", versions={})
artifact, was_cached = ArtifactStore(root).produce(parts, build)
print(artifact.digest, was_cached, flush=True)
"""


def start_builder(tmp_path: Path) -> subprocess.Popen[str]:
    arguments = [str(tmp_path / name) for name in ("store", "builds", "go")]
    with open(tmp_path / "log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", BUILDER, *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def builds(tmp_path: Path) -> list[int]:
    path = tmp_path / "builds"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(builder: subprocess.Popen[str]) -> list[str]:
    output, _ = builder.communicate(timeout=DEADLINE_SECONDS)
    assert builder.returncode == 0
    return output.split()


def build_one_file(work: Path) -> Mapping[str, Any]:
    (work / "file").write_bytes(b"content")
    return {}


def must_not_build(work: Path) -> Mapping[str, Any]:
    raise AssertionError(f"a build was started in {work}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of one MiB; mounting it requires root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(
            f"mounting needs root: {mounted.stderr.decode().strip()}; see test_artifacts for "
            "/dev/full"
        )
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_one_of_four_racers_builds_and_the_others_share_its_artifact(tmp_path: Path) -> None:
    racers = [start_builder(tmp_path) for _ in range(4)]
    log = tmp_path / "log"
    wait_until(lambda: log.read_text().count("waiting for pid") == 3, "three racers to wait")
    (holder,) = builds(tmp_path)
    assert log.read_text().count(f"waiting for pid {holder} on {os.uname().nodename} since ") == 3
    (tmp_path / "go").touch()
    results = [finish(racer) for racer in racers]
    assert sorted(was_cached for _, was_cached in results) == ["False", "True", "True", "True"]
    assert len({digest for digest, _ in results}) == 1
    assert builds(tmp_path) == [holder]
    assert [path.name for path in (tmp_path / "store" / "train").glob("*/*")] == ["1"]


def test_a_waiter_builds_when_the_builder_is_killed(tmp_path: Path) -> None:
    first = start_builder(tmp_path)
    wait_until(lambda: builds(tmp_path) == [first.pid], "the first to build")
    second = start_builder(tmp_path)
    wait_until(
        lambda: f"waiting for pid {first.pid}" in (tmp_path / "log").read_text(),
        "the second to wait",
    )
    first.kill()
    (tmp_path / "go").touch()
    first.communicate()
    digest, was_cached = finish(second)
    assert was_cached == "False"
    assert builds(tmp_path) == [first.pid, second.pid]
    store = ArtifactStore(tmp_path / "store")
    found = store.lookup("train", PARTS.key)
    assert found is not None
    assert found.digest == digest
    left = store.key_folder("train", PARTS.key) / "1.damaged"
    assert (left / "step").read_bytes() == b"half"  # kept, but never used


def test_a_build_killed_before_the_rename_is_not_a_hit(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
Path.rename = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
parts = StageKey(stage="train", config={}, inputs={}, code_digest="c", versions={})
build = lambda work: {"bytes": (work / "file").write_bytes(b"content")}
ArtifactStore(sys.argv[1]).produce(parts, build, resumable=True)
"""
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=False)
    assert died.returncode == -signal.SIGKILL
    store = ArtifactStore(tmp_path / "store")
    assert (store.key_folder("train", PARTS.key) / "1.partial" / "manifest.json").exists()
    assert store.lookup("train", PARTS.key) is None
    made, was_cached = store.produce(PARTS, build_one_file, resumable=True)
    assert not was_cached
    assert store.lookup("train", PARTS.key) == made


def test_a_full_disk_is_reported_and_the_next_attempt_succeeds(small_disk: Path) -> None:
    def build_too_much(work: Path) -> Mapping[str, Any]:
        (work / "big").write_bytes(bytes(2 * 1024 * 1024))
        return {}

    store = ArtifactStore(small_disk / "store")
    other_parts = StageKey(stage="data", config={}, inputs={}, code_digest="c", versions={})
    made, _ = store.produce(other_parts, build_one_file)
    with pytest.raises(
        StoreError, match=r"has no space left: .*0\.0 MiB of 1\.0 MiB are free.*set store\.path"
    ):
        store.produce(PARTS, build_too_much)
    assert store.lookup("train", PARTS.key) is None
    assert store.lookup("data", other_parts.key) == made
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))
    with pytest.raises(StoreError, match="has no space left"):  # refused before any work
        store.produce(PARTS, must_not_build)
    (small_disk / "filler").unlink()
    (store.key_folder("train", PARTS.key) / "1.partial" / "big").unlink()
    assert store.produce(PARTS, build_one_file)[1] is False


def test_a_read_only_store_serves_hits_and_refuses_builds(small_disk: Path) -> None:
    store = ArtifactStore(small_disk / "store")
    made, _ = store.produce(PARTS, build_one_file)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert store.produce(PARTS, must_not_build) == (made, True)
    other_parts = StageKey(stage="data", config={}, inputs={}, code_digest="c", versions={})
    with pytest.raises(
        StoreError, match=r"cannot be written: .*Read-only file system.*set store\.path"
    ):
        store.produce(other_parts, must_not_build)
