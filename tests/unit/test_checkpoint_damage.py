"""Damaged and malicious checkpoints are detected; training falls back to an older one."""

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dapo_core.checkpoint import state
from dapo_core.checkpoint.folder import LATEST_FILE
from dapo_core.checkpoint.manifest import MANIFEST_FILE, require_complete, require_files
from dapo_core.checkpoint.metadata import read_metadata
from dapo_core.checkpoint.resume import intact_start
from dapo_core.checkpoint.shards import _Reader, _Writer
from dapo_core.checkpoint.state import _carried, read_state
from dapo_core.config.training import CheckpointConfig
from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import file_digest
from dapo_core.merge.dcp import DcpSource
from tasks.artifacts import artifact
from tasks.artifacts.artifact import DamagedArtifact, Output
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.chain import checkpoint_digests
from tests.checkpoints import (
    Harmful,
    ShardsOf,
    end,
    files_below,
    find_start,
    flip,
    make_model_folder,
    make_state,
    make_writer,
    names_in,
    replace_file,
    verify,
)
from tests.plain import plain

SHARD = "__0_0.distcp"


def _save(folder: str) -> None:
    """Save two tensors that differ from step to step."""
    step = int(Path(folder).name.partition(".")[0].removeprefix("step_"))
    state = {"model": {"a": torch.full((70, 5), float(step)), "b": torch.arange(400_000) + step}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        dcp.save(state, storage_writer=_Writer(folder), no_dist=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 5, 10 and 15."""
    folder = tmp_path_factory.mktemp("written")
    model_path = make_model_folder(folder / "model")
    writer = make_writer(folder / "checkpoints", model_path, ShardsOf(_save), keep_last=3)  # type: ignore[arg-type]
    for step in (5, 10, 15):
        writer.begin(make_state(step))
        writer.finish()
    return folder / "checkpoints"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def _of_another_step(name: str) -> Callable[[Path], object]:
    return lambda checkpoint: shutil.copy(checkpoint.with_name("step_000010") / name, checkpoint)


def _link(checkpoint: Path) -> None:
    outside = (checkpoint / "config.yaml").rename(checkpoint.parents[1] / "config.yaml")
    (checkpoint / "config.yaml").symlink_to(outside)


def _edit_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(checkpoint: Path) -> None:
        manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
        edit(manifest["files"])
        (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest))

    return damage


DAMAGE = [
    (flip(SHARD, 3000), rf"{SHARD} is damaged or from another checkpoint: 1 of its 2 parts differ"),
    (flip(SHARD, 0), rf"{SHARD} is damaged"),
    (_of_another_step(SHARD), rf"{SHARD} is damaged or from another checkpoint: 2 of its 2 parts"),
    (_of_another_step("trainer_state.json"), r"trainer_state\.json is damaged or from another"),
    (_of_another_step(MANIFEST_FILE), r"checkpoint_manifest\.json is for step 10, not step_000015"),
    (lambda checkpoint: (checkpoint / SHARD).unlink(), rf"{SHARD} is missing"),
    (lambda checkpoint: (checkpoint / MANIFEST_FILE).unlink(), r"manifest\.json cannot be read"),
    (
        lambda checkpoint: os.truncate(checkpoint / SHARD, 4000),
        rf"{SHARD} has 4,000 bytes instead of 3,2\d\d,",
    ),
    (
        lambda checkpoint: os.truncate(checkpoint / "trainer_state.json", 30),
        r"trainer_state\.json has 30 bytes",
    ),
    (flip("carried_groups.json", 40), r"carried_groups\.json is damaged"),
    (flip("huggingface/config.json"), r"huggingface/config\.json is damaged"),
    (flip(".metadata", 100), r"\.metadata is damaged"),
    (lambda checkpoint: (checkpoint / MANIFEST_FILE).write_text("{"), r"manifest\.json cannot be"),
    (
        _edit_manifest(lambda files: files.update({"../step_000010/config.yaml": []})),
        r"it names files outside",
    ),
    (
        _edit_manifest(lambda files: files.update({"config.yaml": [[-1, ""]]})),
        r"it has a negative size",
    ),
    (_edit_manifest(lambda files: files.clear()), r"\.metadata is not in checkpoint_manifest"),
    (lambda checkpoint: os.mkfifo(checkpoint / "pipe"), "pipe is neither a file nor a folder"),
    (_link, r"config\.yaml is a symbolic link, which is not followed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_reported_and_training_continues_from_the_previous_checkpoint(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], message: str
) -> None:
    latest = folder / "step_000015"
    verify(latest)
    damage(latest)
    with pytest.raises(
        CheckpointError, match=rf"{message}.*on_damage=previous to continue.*copy the file again"
    ):
        find_start(folder, "auto", "stop")
    assert find_start(folder, "auto", "previous") == folder / "step_000010"
    assert "continuing from step_000010; set aside 1 damaged checkpoint\n" in caplog.text
    assert (folder / LATEST_FILE).read_text() == "step_000010\n"
    assert find_start(folder, "auto", "stop") == folder / "step_000010"
    (aside,) = folder.glob("step_000015.*.damaged")
    writer = make_writer(folder, folder.parent / "model", ShardsOf(_save), keep_last=2)  # type: ignore[arg-type]
    writer.begin(make_state(15))
    writer.finish()
    verify(folder / "step_000015")
    assert aside.exists()
    end(writer)
    assert names_in(folder) == ["latest", "step_000015"]


@pytest.mark.parametrize("damage", [flip(SHARD, 10_000), _of_another_step(SHARD)])
def test_a_merge_verifies_every_byte(folder: Path, damage: Callable[[Path], object]) -> None:
    checkpoint = folder / "step_000015"
    values = bytes(next(DcpSource(checkpoint).blocks("a")[0].read()))
    assert values == torch.full((350,), 15.0).numpy().tobytes()
    damage(checkpoint)
    source = DcpSource(checkpoint)
    blocks = [block for name in ("a", "b") for block in source.blocks(name)]
    with pytest.raises(
        CheckpointError, match=rf"{SHARD} is damaged or from another checkpoint: bytes \d"
    ):
        _ = [list(block.read()) for block in blocks]


@pytest.fixture(autouse=True)
def _model(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")


def test_an_explicitly_named_checkpoint_is_not_replaced_by_another(
    folder: Path, tmp_path: Path
) -> None:
    flip(SHARD)(folder / "step_000015")
    new = tmp_path / "new" / "checkpoints"
    with pytest.raises(CheckpointError, match=rf"step_000015/{SHARD} is damaged"):
        find_start(new, str(folder / "step_000015"))
    assert find_start(new, str(folder)) == folder / "step_000010"
    assert find_start(new, str(folder / "step_000005")) == folder / "step_000005"
    assert len(names_in(folder)) == 4  # of another training, so nothing is set aside


def test_damage_that_only_the_ranks_find_leads_to_the_checkpoint_before(
    folder: Path, tmp_path: Path
) -> None:
    flip(SHARD)(folder / "step_000015")
    require_complete(folder / "step_000015")
    config, new = CheckpointConfig(), tmp_path / "new"
    assert intact_start(None, folder, config, verify) is None
    other = CheckpointConfig(resume=str(folder))
    assert intact_start(folder / "step_000015", new, other, verify) == folder / "step_000010"
    assert intact_start(folder / "step_000015", folder, config, verify) == folder / "step_000010"
    assert len(names_in(folder)) == 4
    flip(SHARD)(folder / "step_000010")
    stop = CheckpointConfig(on_damage="stop")
    with pytest.raises(CheckpointError, match=rf"step_000010/{SHARD} is damaged"):
        intact_start(folder / "step_000010", folder, stop, verify)


def test_without_an_intact_checkpoint_training_does_not_start_over(folder: Path) -> None:
    for step in (5, 10, 15):
        flip(SHARD)(folder / f"step_{step:06d}")
    with pytest.raises(
        CheckpointError, match=rf"step_000015/{SHARD} is damaged.* no older checkpoint is intact"
    ):
        find_start(folder, "auto")
    assert find_start(folder, "never") is None


def test_manifests_have_the_training_id_and_list_every_file(written: Path) -> None:
    training_ids = set()
    for step in (5, 10, 15):
        checkpoint = written / f"step_{step:06d}"
        manifest = require_files(checkpoint)
        assert manifest is not None
        assert manifest.step == step
        assert {*files_below(checkpoint)} - {MANIFEST_FILE} == manifest.files.keys()
        training_ids.add(manifest.training)
    assert len(training_ids) == 1


def test_a_malicious_pickle_does_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = folder / "step_000015"
    metadata = read_metadata(checkpoint)
    # torch would unpickle these bytes
    metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
    for content, message in (
        (pickle.dumps(Harmful()), r"it references io\.open, which no checkpoint needs"),
        (pickle.dumps(metadata), r"it references torch\.\S+BytesStorageMetadata"),
        (b"\x80", r"\.metadata in \S+ cannot be read"),
    ):
        replace_file(checkpoint, ".metadata", content)
        with pytest.raises(CheckpointError, match=message):
            verify(checkpoint)
        with pytest.raises(CheckpointError, match=message):
            _Reader(str(checkpoint)).read_metadata()
    assert not (tmp_path / "harmed").exists()


def test_a_shard_outside_the_checkpoint_is_not_read(folder: Path) -> None:
    metadata = read_metadata(folder / "step_000015")
    for place in metadata.storage_data.values():
        place.relative_path = f"../step_000010/{SHARD}"
    replace_file(folder / "step_000015", ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"it names \.\./step_000010/\S+, which is outside"):
        verify(folder / "step_000015")


@pytest.mark.parametrize("is_compressed", [True, False])
def test_an_archive_that_would_exhaust_memory_is_refused_by_its_declared_size(
    folder: Path, is_compressed: bool
) -> None:
    checkpoint = folder / "step_000015"
    tensor = io.BytesIO()
    torch.save(torch.zeros(1_000_000), tensor)
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(tensor) as before,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for info in before.infolist():
            after.writestr(
                info.filename, before.read(info), None if is_compressed else zipfile.ZIP_STORED
            )
    content = bytearray(bomb.getvalue())
    if not is_compressed:  # declare 16 times the bytes in the central directory
        claimed = (4_000_000).to_bytes(4, "little")
        content = content.replace(claimed * 2, claimed + (64_000_000).to_bytes(4, "little"))
    replace_file(checkpoint, SHARD, content)
    metadata = read_metadata(checkpoint)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(content)
    replace_file(checkpoint, ".metadata", pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError,
        match=rf"{SHARD} has compressed or oversized records \(\d\S+ bytes in {len(content):,}\)",
    ):
        verify(checkpoint)


def test_the_store_reuses_the_ranks_digests_and_detects_damage_with_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = StageKey("train_policy", {}, {}, "0" * 64, {})
    store, hashed = ArtifactStore(tmp_path / "store"), list[str]()

    def build(work: Path) -> Output:
        shutil.copytree(folder, work / "checkpoints")
        return Output({}, checkpoint_digests(work))

    def take(path: Path) -> str:
        hashed.append(path.name)
        return file_digest(path)

    monkeypatch.setitem(vars(artifact)["ALGORITHMS"], "blake3", take)
    made, _ = store.produce(key, build)
    assert SHARD not in hashed
    hashed.clear()
    assert store.check("train_policy", key.key) == made
    assert hashed.count(SHARD) == 3
    flip(SHARD)(Path(made.path) / "checkpoints" / "step_000010")
    with pytest.raises(DamagedArtifact, match=rf"step_000010/{SHARD} has blake3"):
        store.check("train_policy", key.key)


def test_carried_groups_are_parsed_only_by_the_trainer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be gigabytes, and their digests are verified anyway."""
    parsed = []
    monkeypatch.setattr(state, "_carried", lambda values: parsed.append(values) or _carried(values))
    verify(folder / "step_000015")
    assert parsed == []
    assert plain(read_state(folder / "step_000015")) == plain(make_state(15))
    assert len(parsed) == 1
