"""Checkpoint manifests: training id, step, and the digests taken while the files were written."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dapo_core.checkpoint.archive import read_records
from dapo_core.checkpoint.folder import latest_checkpoint, named_step, refuse_links
from dapo_core.checkpoint.metadata import METADATA_FILE, read_metadata
from dapo_core.checkpoint.state import (
    GROUPS_FILE,
    STATE_FILE,
    TOKENS_FILE,
    read_state_without_groups,
)
from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import CHECKPOINT_MANIFEST as MANIFEST_FILE
from dapo_core.machine.digests import Part, digest_of, file_parts
from durable import write_atomically

SHARDS_FILE = "shards.json"  # the files that ranks wrote, until the manifest includes them


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    training: str  # id shared by all checkpoints of one training
    step: int
    files: dict[str, list[Part]]  # a shard has one part per tensor

    @property
    def shards(self) -> list[str]:
        """Names of the files that ranks wrote."""
        return sorted(name for name in self.files if name.endswith(".distcp"))


def training_id(folder: Path) -> str:
    """Return the id in the folder's latest checkpoint, or a new one."""
    latest = latest_checkpoint(folder)
    return read_manifest(latest).training if latest else secrets.token_hex(8)


def write_shards(folder: Path, parts: Mapping[str, Sequence[Part]]) -> None:
    """Record the parts of the files that ranks wrote, for `write_manifest`."""
    write_atomically(folder / SHARDS_FILE, json.dumps(parts))


def write_manifest(folder: Path, training: str, step: int, files: Mapping[str, Part]) -> None:
    """Write the manifest of a complete folder; `files` are the ones not written by ranks."""
    shards = json.loads((folder / SHARDS_FILE).read_text(encoding="utf-8"))
    own = {name: [part] for name, part in files.items()}
    manifest = Manifest(training, step, {**own, **shards})
    (folder / MANIFEST_FILE).write_text(json.dumps(asdict(manifest)), encoding="utf-8")
    (folder / SHARDS_FILE).unlink()


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest; raises CheckpointError if it cannot be read."""
    path = checkpoint / MANIFEST_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = {
            str(name): [(int(size), str(digest)) for size, digest in parts]
            for name, parts in values["files"].items()
        }
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("it names files outside the checkpoint")
        if any(size < 0 for parts in files.values() for size, _ in parts):
            raise ValueError("it has a negative size")
        return Manifest(str(values["training"]), int(values["step"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r})") from error


def shard_digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the shards by file name, equal to `digests.file_digest`."""
    manifest = read_manifest(checkpoint)
    return {name: digest_of(manifest.files[name]) for name in manifest.shards}


def require_complete(checkpoint: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file is there and unchanged.

    Of shards, only the sizes are compared with the manifest; `verify_shards` reads them.
    """
    manifest = require_files(checkpoint)
    shards = {place.relative_path for place in read_metadata(checkpoint).storage_data.values()}
    needed = {METADATA_FILE, STATE_FILE, GROUPS_FILE, TOKENS_FILE, *shards}
    if unlisted := needed - manifest.files.keys():
        raise CheckpointError(f"{checkpoint / min(unlisted)} is not in {MANIFEST_FILE}")
    for name in manifest.shards:
        _require_size(checkpoint / name, manifest.files[name])
    # the digests cover the carried groups, which only the trainer needs to parse
    read_state_without_groups(checkpoint)


def verify_shards(checkpoint: Path, number: int, num_shares: int) -> None:
    """Raise CheckpointError unless the shards of share `number` are unchanged and safe to load.

    Every `num_shares`-th shard is in a share, so that ranks read them at the same time.
    """
    manifest = read_manifest(checkpoint)
    places: dict[str, list[tuple[int, int]]] = {}
    for place in read_metadata(checkpoint).storage_data.values():
        places.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name in manifest.shards[number::num_shares]:
        path = checkpoint / name
        _require_parts(path, manifest.files[name])
        with path.open("rb") as file:
            for offset, length in places.get(name, ()):
                read_records(file, str(path), offset, length, has_crc32s=False)


def require_files(checkpoint: Path) -> Manifest:
    """Check all files but the shards and return the manifest; raises CheckpointError.

    Links are refused, since they may point outside.
    """
    refuse_links(checkpoint)
    manifest = read_manifest(checkpoint)
    if named_step(checkpoint) not in (None, manifest.step):
        raise CheckpointError(
            f"{checkpoint / MANIFEST_FILE} is for step {manifest.step}, not {checkpoint.name}"
        )
    for name, parts in manifest.files.items():
        if not name.endswith(".distcp"):
            _require_parts(checkpoint / name, parts)
    return manifest


def _require_size(path: Path, parts: Sequence[Part]) -> None:
    size = sum(part_size for part_size, _ in parts)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}")


def _require_parts(path: Path, parts: Sequence[Part]) -> None:
    _require_size(path, parts)
    found = file_parts(path, [part_size for part_size, _ in parts])
    num_wrong = sum(part != expected for part, expected in zip(found, parts, strict=True))
    if num_wrong:
        raise CheckpointError(
            f"{path} is damaged or from another checkpoint: {num_wrong} of its {len(parts)} parts "
            "differ from the manifest"
        )
