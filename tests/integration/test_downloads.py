"""References resolved and fetched with the hubs' own clients, against a hub on this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import downloads
from downloads import Progress, fetch, resolve
from tests.hub_server import HubServer, Repo, sha256
from tests.hubs import hub_of_this_machine

WEIGHTS = random.Random(0).randbytes(700_000)
FILES = {"config.json": b'{"a": 1}\n', "model.safetensors": WEIGHTS, "sub/notes.txt": b"\xe9 notes\n"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_of_this_machine(tmp_path) as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("scheme", ["hf", "modelscope"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_reference_resolves_without_content_and_its_files_come(
    hub: HubServer, tmp_path: Path, scheme: str, kind: downloads.Kind
) -> None:
    repo = hub.repos[(f"{kind}s", "org/tiny")] = Repo()
    first = repo.commit(FILES)
    snapshot = resolve(f"{scheme}:org/tiny", kind)
    assert hub.contents() == []
    assert {file.path: file.size for file in snapshot.files} == {name: len(FILES[name]) for name in FILES}
    weights = next(file for file in snapshot.files if file.path == "model.safetensors")
    assert weights.sha256 == sha256(WEIGHTS)
    seen: list[Progress] = []
    fetch(snapshot, tmp_path / "all", on_progress=seen.append)
    assert contents(tmp_path / "all") == FILES
    total = sum(map(len, FILES.values()))
    assert seen[-1] == Progress(3, 3, total, total)
    if scheme == "hf":
        assert snapshot.commit == first
        assert {file.path: file.git_oid for file in snapshot.files}["config.json"]
    repo.commit({**FILES, "config.json": b"{}"})
    moved = resolve(f"{scheme}:org/tiny@{'main' if scheme == 'hf' else 'master'}", kind)
    assert moved.commit != snapshot.commit
    assert resolve(f"{scheme}:org/tiny@{first}", kind).files == snapshot.files
    [one] = resolve(f"{scheme}:org/tiny@{first}/sub/notes.txt", kind).files
    assert one.path == "sub/notes.txt"
    assert [file.path for file in resolve(f"{scheme}:org/tiny/sub", kind).files] == ["sub/notes.txt"]
    hub.asked.clear()
    fetch(snapshot, tmp_path / "all")  # all is there and right
    assert hub.contents() == []
    fetch(snapshot, tmp_path / "some", ["sub/notes.txt"])
    assert contents(tmp_path / "some") == {"sub/notes.txt": FILES["sub/notes.txt"]}
    if scheme == "hf":
        fetch(snapshot, tmp_path / "some", ["config.json"])
        assert (tmp_path / "some/config.json").read_bytes() == FILES["config.json"]
    else:  # which knows no commits: a branch that moved in between is seen by its digests
        with pytest.raises(downloads.WrongContent, match=r"config\.json.*may have changed"):
            fetch(snapshot, tmp_path / "some", ["config.json"])
