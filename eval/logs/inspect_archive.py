"""Reads inspect_ai's .eval: a zip of JSON files, compressed with zstandard or deflate."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from eval.results.scores import ScoresError

_STORED, _DEFLATED, _ZSTANDARD = 0, 8, 93  # compression methods of zip
_LOCAL_HEADER = struct.Struct("<26xHH")  # ends in the lengths of the name and of the extra field


def read_archive(file: Path) -> dict[str, Any]:
    """Return the log as inspect_ai's .json has it: eval, plan and samples. Raises ScoresError."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
            entries = {one.filename: one for one in archive.infolist()}
            if "header.json" not in entries:
                raise ScoresError(f"{file} has no header.json: the evaluation did not finish")
            content: dict[str, Any] = json.loads(_content(raw, entries["header.json"]))
            samples = [one for name, one in entries.items() if name.startswith("samples/")]
            content["samples"] = [json.loads(_content(raw, one)) for one in samples]
    except (zipfile.BadZipFile, zlib.error, struct.error, OSError, ValueError) as error:
        raise ScoresError(f"{file} is damaged: {error}") from None
    return content


def _content(raw: IO[bytes], entry: zipfile.ZipInfo) -> bytes:
    """Decompress an entry; zipfile of Python 3.11 does not know zstandard."""
    import pyarrow as pa

    raw.seek(entry.header_offset)
    raw.seek(sum(_LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))), 1)
    content = raw.read(entry.compress_size)
    if entry.compress_type == _ZSTANDARD:
        content = pa.CompressedInputStream(pa.BufferReader(content), "zstd").read()
    elif entry.compress_type == _DEFLATED:
        content = zlib.decompress(content, -zlib.MAX_WBITS)
    elif entry.compress_type != _STORED:
        raise ValueError(f"{entry.filename} has the unknown compression {entry.compress_type}")
    if zlib.crc32(content) != entry.CRC:
        raise ValueError(f"{entry.filename} differs from its checksum")
    return content
