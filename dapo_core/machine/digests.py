"""blake3 digests of files by parts: several cores hash at once, and a part can be verified.

The parts of a safetensors file are its header and its tensors; the parts of a checkpoint shard are
listed in the checkpoint's manifest; any other file is one part. A file's digest is blake3 over its
list of parts, one line each with size and digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

from blake3 import blake3

Part = tuple[int, str]  # size in bytes, blake3

CHECKPOINT_MANIFEST = (
    "checkpoint_manifest.json"  # beside the shards; `files` lists the parts of each
)
CHUNK_BYTES = 1024**2  # small enough to be hashed while in the CPU cache
_HEADER_LENGTH_BYTES = 8  # of a safetensors file: the length of its JSON header


def num_threads() -> int:
    """Return the number of threads that read, hash and write concurrently."""
    return min(len(os.sched_getaffinity(0)), 8)


def content_part(content: bytes) -> Part:
    """Return size and digest of bytes in memory."""
    return len(content), blake3(content).hexdigest()


def digest_of(parts: Iterable[Part]) -> str:
    """Return the digest of a file with these parts."""
    return blake3("".join(f"{size} {digest}\n" for size, digest in parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file on disk."""
    sizes = shard_sizes(path) if path.suffix == ".distcp" else safetensors_sizes(path)
    return digest_of(file_parts(path, sizes))


def file_parts(path: Path, sizes: Sequence[int]) -> list[Part]:
    """Return size and digest of the file's consecutive parts, computed on several cores.

    A part beyond the end of the file is reported with its actual size.
    """
    starts = accumulate(sizes, initial=0)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if len(sizes) == 1:
            return [_part(descriptor, 0, sizes[0])]
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="digest") as pool:
            return list(pool.map(lambda start, size: _part(descriptor, start, size), starts, sizes))
    finally:
        os.close(descriptor)


def safetensors_sizes(path: Path) -> list[int]:
    """Return the sizes of a safetensors file's header and tensors; for any other file, its size."""
    num_bytes = path.stat().st_size
    if path.suffix != ".safetensors":
        return [num_bytes]
    with path.open("rb") as file:
        header_end = (
            int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little") + _HEADER_LENGTH_BYTES
        )
        try:
            entries = (
                json.loads(file.read(header_end - _HEADER_LENGTH_BYTES))
                if header_end <= num_bytes
                else {}
            )
            ends = {
                header_end + entry["data_offsets"][1]
                for name, entry in entries.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            ends = set()
    inner = sorted(end for end in {header_end, *ends} if 0 < end < num_bytes)
    return [end - start for start, end in pairwise([0, *inner, num_bytes])]


def shard_sizes(path: Path) -> list[int]:
    """Return the sizes of a shard's parts from the manifest, or the file size if they differ."""
    num_bytes = path.stat().st_size
    try:
        files = json.loads((path.parent / CHECKPOINT_MANIFEST).read_text(encoding="utf-8"))["files"]
        sizes = [int(size) for size, _ in files[path.name]]
    except (OSError, ValueError, KeyError, TypeError):
        return [num_bytes]
    return sizes if sum(sizes) == num_bytes and min(sizes, default=0) >= 0 else [num_bytes]


def _part(descriptor: int, start: int, size: int) -> Part:
    digest, buffer = blake3(), memoryview(bytearray(min(size, CHUNK_BYTES)))
    done = 0
    while done < size and (count := os.preadv(descriptor, [buffer[: size - done]], start + done)):
        digest.update(buffer[:count])
        done += count
    return done, digest.hexdigest()
