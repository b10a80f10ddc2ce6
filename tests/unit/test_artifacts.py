"""Keys change with what changes the result; damaged artifacts are never hits; forced builds replace
none.
"""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dapo_core.machine.digests import content_part, digest_of
from tasks.artifacts import artifact as artifact_module
from tasks.artifacts.artifact import Artifact, Output, StoreError
from tasks.artifacts.stage_key import StageKey, package_versions
from tasks.artifacts.store import ArtifactStore

PARTS = StageKey(
    stage="train",
    config={"steps": 3, "loss": {"clip_low": 0.2, "clip_high": 0.28}},
    inputs={"model": "a" * 64, "data": "b" * 64},
    code_digest="c" * 64,
    versions={"torch": "2.13.0"},
)


class Builder:
    """A real build that counts its runs."""

    def __init__(
        self, files: Mapping[str, bytes] | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.files = files or {"weights.bin": b"0123456789", "sub/tokens.txt": b"a b c"}
        self.metrics = metrics or {"loss": 0.5}
        self.num_runs = 0

    def __call__(self, work: Path) -> Mapping[str, Any]:
        self.num_runs += 1
        for name, content in self.files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        return self.metrics


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def names(store: ArtifactStore) -> list[str]:
    """The entries in the folder of the key."""
    return sorted(path.name for path in store.key_folder("train", PARTS.key).iterdir())


def test_the_key_is_the_sha256_of_its_canonical_json() -> None:
    text = (
        '{"code_digest":"'
        + "c" * 64
        + '","config":{"loss":{"clip_high":0.28,"clip_low":0.2},"steps":3},'
        '"inputs":{"data":"' + "b" * 64 + '","model":"' + "a" * 64 + '"},'
        '"stage":"train","versions":{"torch":"2.13.0"}}'
    )
    assert PARTS.key == hashlib.sha256(text.encode()).hexdigest()
    reordered = replace(PARTS, config={"loss": {"clip_high": 0.28, "clip_low": 0.2}, "steps": 3})
    assert reordered.key == PARTS.key


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), float("nan")])
def test_values_without_canonical_json_are_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        _ = replace(PARTS, config={"key": value}).key


def test_missing_packages_are_recorded_as_absent() -> None:
    versions = package_versions(["numpy", "no-such-package"])
    assert versions == {"numpy": np.__version__, "no-such-package": "absent"}


def test_a_second_build_of_the_same_key_is_a_cache_hit(store: ArtifactStore) -> None:
    build = Builder()
    made, was_cached = store.produce(PARTS, build)
    assert not was_cached
    found, was_cached = store.produce(PARTS, build)
    assert was_cached
    assert build.num_runs == 1
    assert found == made == pickle.loads(pickle.dumps(made))
    assert made.path == str(store.root / "train" / PARTS.key[:16] / "1")
    assert (Path(made.path) / "sub/tokens.txt").read_bytes() == b"a b c"
    assert names(store) == ["1"]


def test_the_manifest_records_files_key_parts_times_and_metrics(store: ArtifactStore) -> None:
    made, _ = store.produce(PARTS, Builder(metrics={"loss": np.float32(0.5), "steps": np.int64(3)}))
    manifest = made.manifest()
    assert manifest["files"] == [
        {"path": "sub/tokens.txt", "size": 5, "sha256": hashlib.sha256(b"a b c").hexdigest()},
        {"path": "weights.bin", "size": 10, "sha256": hashlib.sha256(b"0123456789").hexdigest()},
    ]
    assert (manifest["stage"], manifest["key"], manifest["digest"]) == (
        "train",
        PARTS.key,
        made.digest,
    )
    assert (manifest["config"], manifest["inputs"]) == (PARTS.config, PARTS.inputs)
    assert (manifest["code_digest"], manifest["versions"]) == (PARTS.code_digest, PARTS.versions)
    assert manifest["metrics"] == {"loss": 0.5, "steps": 3}
    assert manifest["started_at"] <= manifest["ended_at"]
    assert manifest["host"] == os.uname().nodename


def test_the_digest_depends_only_on_the_content(tmp_path: Path) -> None:
    first, _ = ArtifactStore(tmp_path / "one").produce(PARTS, Builder())
    other_parts = replace(PARTS, config={"steps": 4})
    second, _ = ArtifactStore(tmp_path / "two").produce(other_parts, Builder(metrics={"loss": 9.0}))
    renamed, _ = ArtifactStore(tmp_path / "three").produce(PARTS, Builder({"w.bin": b"0123456789"}))
    rows = [
        ["sub/tokens.txt", 5, hashlib.sha256(b"a b c").hexdigest()],
        ["weights.bin", 10, hashlib.sha256(b"0123456789").hexdigest()],
    ]
    assert (
        first.digest == hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    )
    assert second.digest == first.digest
    assert renamed.digest != first.digest


def flip_one_byte(directory: Path) -> None:
    with open(directory / "weights.bin", "r+b") as file:
        file.seek(4)
        file.write(b"x")


def edit_manifest(directory: Path) -> None:
    # The file's new digest is entered, but not the digest over all files.
    flip_one_byte(directory)
    old, new = (hashlib.sha256(content).hexdigest() for content in (b"0123456789", b"0123x56789"))
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace(old, new))


def link(directory: Path) -> None:
    (directory / "sub/tokens.txt").unlink()
    (directory / "sub/tokens.txt").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            flip_one_byte,
            r"weights\.bin has sha256 \w{64}, the manifest says 84d89877f0d4041efb6bf91a16f0248f",
        ),
        (
            lambda made: os.truncate(made / "weights.bin", 9),
            r"weights\.bin has 9 bytes, the manifest says 10",
        ),
        (
            lambda made: (made / "sub/tokens.txt").unlink(),
            r"sub/tokens\.txt is missing \(1 of 2 files\)",
        ),
        (
            lambda made: (made / "stray.bin").touch(),
            r"stray\.bin is not in the manifest \(1 such files\)",
        ),
        (lambda made: (made / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda made: os.truncate(made / "manifest.json", 40), r"manifest\.json is not a manifest"),
        (edit_manifest, r"manifest\.json belongs to another artifact or was edited"),
        (link, r"tokens\.txt is neither a file nor a folder"),
    ],
)
def test_a_damaged_artifact_is_reported_kept_and_rebuilt(
    store: ArtifactStore,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    build = Builder()
    made, _ = store.produce(PARTS, build)
    damage(Path(made.path))
    assert store.lookup("train", PARTS.key) is None
    assert re.search(rf"artifact {made.path} is damaged: .*{reason}", caplog.text)
    again, was_cached = store.produce(PARTS, build)
    assert (again.digest, was_cached, build.num_runs) == (made.digest, False, 2)
    assert (Path(again.path).name, Path(made.path).exists()) == ("2", False)
    assert (Path(made.path).with_suffix(".damaged") / "weights.bin").exists()
    assert re.search(rf"renamed {made.path} to 1\.damaged: it is damaged: .*{reason}", caplog.text)
    assert store.lookup("train", PARTS.key) == again


def age(made: Artifact) -> None:
    """Waits until a new write must change the files' change time."""
    newest = max(path.stat().st_ctime_ns for path in Path(made.path).rglob("*"))
    time.sleep(max(0.0, (newest + artifact_module.RACY_NANOSECONDS - time.time_ns()) / 1e9) + 0.01)


@pytest.mark.slow
def test_verified_files_are_not_hashed_again_until_they_change(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    hash_file = artifact_module.hash_file

    def counting_hash(path: Path, algorithm: str) -> str:
        hashed.append(path.name)
        return hash_file(path, algorithm)

    monkeypatch.setattr(artifact_module, "hash_file", counting_hash)
    with monkeypatch.context() as patch:  # however slow the disk is
        patch.setattr(artifact_module, "RACY_NANOSECONDS", 10**15)
        made, _ = store.produce(PARTS, Builder())
    age(made)
    hashed.clear()
    assert store.lookup("train", PARTS.key) == made
    # too recent to be trusted when published
    assert sorted(hashed) == ["tokens.txt", "weights.bin"]
    hashed.clear()
    assert store.lookup("train", PARTS.key) == made
    assert hashed == []
    # Same size, and the modification time put back: the change time differs.
    weights = Path(made.path) / "weights.bin"
    before = weights.stat()
    flip_one_byte(Path(made.path))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    age(made)
    assert store.lookup("train", PARTS.key) is None
    assert hashed == ["weights.bin"]


def test_a_corrupt_stamp_file_is_ignored(store: ArtifactStore) -> None:
    made, _ = store.produce(PARTS, Builder())
    stamp = Path(made.path).with_suffix(".verified")
    for content in ("{", "[]"):
        stamp.write_text(content)
        assert store.lookup("train", PARTS.key) == made


def test_a_failed_build_is_not_a_hit_and_is_kept_for_inspection(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: Path) -> Mapping[str, Any]:
        (work / "half.bin").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.produce(PARTS, fail)
    assert store.lookup("train", PARTS.key) is None
    made, was_cached = store.produce(PARTS, Builder())
    assert (Path(made.path).name, was_cached) == ("2", False)
    assert not (Path(made.path) / "half.bin").exists()
    assert (store.key_folder("train", PARTS.key) / "1.damaged" / "half.bin").read_bytes() == b"half"
    assert "1.damaged: the attempt did not finish" in caplog.text


def train(stops: bool, steps: list[int]) -> Callable[[Path], Mapping[str, Any]]:
    """A resumable training that records in `steps` how many steps it found."""

    def build(work: Path) -> Mapping[str, Any]:
        checkpoint = work / "checkpoint"
        steps.append(int(checkpoint.read_text()) if checkpoint.exists() else 0)
        checkpoint.write_text(str(steps[-1] + 2))
        if stops:
            raise InterruptedError
        return {}

    return build


def test_a_resumable_build_continues_the_failed_attempt(store: ArtifactStore) -> None:
    steps: list[int] = []
    with pytest.raises(InterruptedError):
        store.produce(PARTS, train(True, steps), resumable=True)
    assert (
        store.unfinished("train", PARTS.key) == store.key_folder("train", PARTS.key) / "1.partial"
    )
    made, was_cached = store.produce(PARTS, train(False, steps), resumable=True)
    assert (was_cached, steps, names(store)) == (False, [0, 2], ["1"])
    assert (Path(made.path) / "checkpoint").read_text() == "4"
    assert store.unfinished("train", PARTS.key) is None


def test_a_forced_build_keeps_the_old_artifact(store: ArtifactStore) -> None:
    old, _ = store.produce(PARTS, Builder({"weights.bin": b"old"}))

    def build(work: Path) -> Mapping[str, Any]:
        assert store.lookup("train", PARTS.key) == old  # until the new one is complete
        return Builder({"weights.bin": b"new"})(work)

    new, was_cached = store.produce(PARTS, build, force=True)
    assert (Path(new.path).name, was_cached) == ("2", False)
    assert store.lookup("train", PARTS.key) == new
    assert (Path(old.path) / "weights.bin").read_bytes() == b"old"
    (Path(new.path) / "weights.bin").write_bytes(b"bad")
    assert store.lookup("train", PARTS.key) is None
    assert store.produce(PARTS, Builder()) == (old, True)  # the newest attempt that verifies


def test_a_failed_forced_build_keeps_the_hit_and_resumes_when_forced(store: ArtifactStore) -> None:
    steps: list[int] = []
    # as without force
    old, _ = store.produce(PARTS, train(False, steps), resumable=True, force=True)
    with pytest.raises(InterruptedError):
        store.produce(PARTS, train(True, steps), resumable=True, force=True)
    assert store.produce(PARTS, train(False, steps), resumable=True) == (old, True)
    made, was_cached = store.produce(PARTS, train(False, steps), resumable=True, force=True)
    assert (steps, was_cached, names(store)) == ([0, 0, 2], False, ["1", "2"])
    assert store.lookup("train", PARTS.key) == made


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda work: (work / "model").symlink_to("/etc"),
            r"model is neither .*only copies or hard links",
        ),
        (
            lambda work: (work / "manifest.json").touch(),
            r"stage train wrote .*a name reserved for the store",
        ),
        (
            lambda work: (work / "a\nb").touch(),
            r"a\\nb' has a line break or another control character",
        ),
    ],
)
def test_links_reserved_names_and_control_characters_are_refused(
    store: ArtifactStore, write: Callable[[Path], None], said: str
) -> None:
    with pytest.raises(StoreError, match=said):
        store.produce(PARTS, lambda work: {"wrote": write(work)})


def test_manifests_contain_no_secrets(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-very-secret")
    parts = replace(PARTS, config={"serve": {"extra_args": ("--header", "Bearer sk-very-secret")}})
    made, _ = store.produce(
        parts, Builder(metrics={"commands": ["curl -H sk-very-secret"], "n": 1})
    )
    manifest = made.manifest()
    assert manifest["config"] == {"serve": {"extra_args": ["--header", "Bearer [redacted]"]}}
    assert manifest["metrics"] == {"commands": ["curl -H [redacted]"], "n": 1}
    assert (manifest["key"], store.lookup("train", parts.key)) == (parts.key, made)


WEIGHTS = "model.safetensors"


def write_with_digests(work: Path, digests: Mapping[str, str]) -> Output:
    (work / WEIGHTS).write_bytes(b"0123456789")
    (work / "config.json").write_bytes(b"{}")
    return Output({"loss": 0.5}, digests)


def test_digests_taken_while_writing_are_verified_on_the_next_use(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = ArtifactStore(store.root / "other").produce(
        PARTS, lambda work: write_with_digests(work, {}).metrics
    )
    sha256 = hashlib.sha256(b"{}").hexdigest()
    blake3 = digest_of([content_part(b"0123456789")])
    monkeypatch.setattr(
        artifact_module, "hash_file", lambda path, algorithm: pytest.fail(f"{path} was read")
    )
    digests = {WEIGHTS: f"blake3:{blake3}", "config.json": f"sha256:{sha256}"}
    made, _ = store.produce(PARTS, lambda work: write_with_digests(work, digests))
    monkeypatch.undo()
    assert made.digest == plain.digest  # as of files that the store hashed
    assert made.manifest()["metrics"] == {"loss": 0.5}
    assert made.manifest()["files"] == [
        {"path": "config.json", "size": 2, "sha256": sha256},
        {"path": WEIGHTS, "size": 10, "blake3": blake3},
    ]
    assert store.lookup("train", PARTS.key) == made
    other = replace(PARTS, config={"steps": 4})
    store.produce(other, lambda work: write_with_digests(work, {WEIGHTS: f"blake3:{'0' * 64}"}))
    assert store.lookup("train", other.key) is None
    assert f"{WEIGHTS} has blake3 {blake3}, the manifest says 0000" in caplog.text


@pytest.mark.parametrize("digests", [{"absent": "sha256:0"}, {WEIGHTS: "md5:0"}])
def test_digests_of_unwritten_files_or_unknown_algorithms_are_refused(
    store: ArtifactStore, digests: Mapping[str, str]
) -> None:
    with pytest.raises(StoreError, match="returned digests for files it did not write"):
        store.produce(PARTS, lambda work: write_with_digests(work, digests))


def test_a_full_disk_during_a_build_names_free_space_and_key(store: ArtifactStore) -> None:
    def build(work: Path) -> Mapping[str, Any]:
        with open("/dev/full", "wb") as full:  # a real ENOSPC from a real write
            full.write(b"x")
        return {}

    with pytest.raises(StoreError) as caught:
        store.produce(PARTS, build)
    assert str(caught.value).startswith(f"the artifact store {store.root} has no space left: ")
    assert re.search(r"\d\.\d [MG]iB of \d+\.\d [MG]iB are free", str(caught.value))
    assert "set store.path" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_store_path_below_a_file_is_refused_before_building(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    build = Builder()
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreError, match=r"cannot be written: .*set store\.path"):
            ArtifactStore(root).produce(PARTS, build)
    assert build.num_runs == 0


def test_a_store_that_is_mounted_without_locks_says_so(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = OSError(
        errno.ENOSYS, "Function not implemented"
    )  # of Lustre, unless mounted with flock
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=fault))
    with pytest.raises(StoreError, match=r"is mounted without locks: .*\.lock'.*Lustre: -o flock"):
        store.produce(PARTS, Builder())


def test_unrelated_errors_are_not_turned_into_store_errors(
    store: ArtifactStore, tmp_path: Path
) -> None:
    def read_missing(work: Path) -> Mapping[str, Any]:
        return {"text": (work / "missing").read_text()}

    def write_elsewhere(work: Path) -> Mapping[str, Any]:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "elsewhere" / "file"))

    with pytest.raises(FileNotFoundError):
        store.produce(PARTS, read_missing)
    with pytest.raises(OSError, match="elsewhere") as caught:
        store.produce(PARTS, write_elsewhere)
    assert not isinstance(caught.value, StoreError)
