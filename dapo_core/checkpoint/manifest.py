"""Checkpoint manifests: training id, step, and the digests taken while the files were written."""

from __future__ import annotations

import json
import logging
import secrets
import time
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

logger = logging.getLogger(__name__)

SHARDS_FILE = "shards.json"  # the files that ranks wrote, until the manifest includes them


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    training: str  # id shared by all checkpoints of one training
    step: int
    files: dict[str, list[Part]]  # a shard has one part per tensor


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
    files = read_manifest(checkpoint).files
    return {name: digest_of(parts) for name, parts in files.items() if name.endswith(".distcp")}


def verify_checkpoint(checkpoint: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file is unchanged and safe to load."""
    began = time.monotonic()
    manifest = require_files(checkpoint, with_shards=True)
    metadata = read_metadata(checkpoint)
    by_shard: dict[str, list[tuple[int, int]]] = {}
    for place in metadata.storage_data.values():
        by_shard.setdefault(place.relative_path, []).append((place.offset, place.length))
    needed = {METADATA_FILE, STATE_FILE, GROUPS_FILE, TOKENS_FILE, *by_shard}
    if unlisted := needed - manifest.files.keys():
        raise CheckpointError(f"{checkpoint / min(unlisted)} is not in {MANIFEST_FILE}")
    for name, places in sorted(by_shard.items()):
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, one of {len(by_shard)} shards")
        with path.open("rb") as file:
            for offset, length in places:
                read_records(file, str(path), offset, length, has_crc32s=False)
    # the digests cover the carried groups, which only the trainer needs to parse
    read_state_without_groups(checkpoint)
    seconds = time.monotonic() - began
    logger.info("checkpoint %s is intact: verified in %.1f s", checkpoint.name, seconds)


def require_files(checkpoint: Path, with_shards: bool) -> Manifest:
    """Check the files' sizes and digests and return the manifest; raises CheckpointError.

    Shards are checked only if `with_shards` is set. Links are refused, since they may point
    outside.
    """
    refuse_links(checkpoint)
    manifest = read_manifest(checkpoint)
    if named_step(checkpoint) not in (None, manifest.step):
        raise CheckpointError(
            f"{checkpoint / MANIFEST_FILE} is for step {manifest.step}, not {checkpoint.name}"
        )
    for name, parts in manifest.files.items():
        if with_shards or not name.endswith(".distcp"):
            _require_parts(checkpoint / name, parts)
    return manifest


def _require_parts(path: Path, parts: Sequence[Part]) -> None:
    size = sum(part_size for part_size, _ in parts)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}")
    found = file_parts(path, [part_size for part_size, _ in parts])
    num_wrong = sum(part != expected for part, expected in zip(found, parts, strict=True))
    if num_wrong:
        raise CheckpointError(
            f"{path} is damaged or from another checkpoint: {num_wrong} of its {len(parts)} parts "
            "differ from the manifest"
        )
