"""Locates the records of a torch.save archive in a file without loading them."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from dapo_core.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # skips to the lengths of the record's name and extra field
VALUES = "data/"  # name prefix of the records that hold tensor values


@dataclass(frozen=True)
class Record:
    """Position of an archive record in the file."""

    offset: int  # of the first byte
    num_bytes: int
    crc32: int


def read_records(
    file: BinaryIO,
    label: str,
    start: int = 0,
    num_bytes: int | None = None,
    has_crc32s: bool = True,
) -> dict[str, Record]:
    """Return the archive's records by name without the top-level folder, such as `data/0`.

    The archive is the part of the file given by `start` and `num_bytes`. CRC32s of everything but
    tensor values are verified if the archive has them. Raises CheckpointError, prefixed with
    `label`, if the archive is incomplete, has another byte order, contains compressed records or
    declares more bytes than it has.
    """
    section = Section(file, start, num_bytes)
    try:
        with ZipFile(section) as archive:
            infos = archive.infolist()
        declared = sum(info.file_size for info in infos)
        if any(info.compress_type != ZIP_STORED for info in infos) or declared > section.length:
            raise CheckpointError(
                f"{label} has compressed or oversized records ({declared:,} bytes in "
                f"{section.length:,}), which "
                "torch.save never writes; loading it could exhaust memory"
            )
        records = {}
        for info in infos:
            section.seek(info.header_offset)
            *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(section.read(_LOCAL_HEADER.size))
            offset = section.tell() + name_bytes + extra_bytes
            name = info.filename.partition("/")[2]
            records[name] = Record(start + offset, info.file_size, info.CRC)
            if not name.startswith(VALUES):
                section.seek(offset)
                text = section.read(info.file_size)
                if has_crc32s and zlib.crc32(text) != info.CRC:
                    raise BadZipFile(f"bad CRC-32 of {name}")
                if name == "byteorder" and text != sys.byteorder.encode():
                    raise CheckpointError(
                        f"{label} was written on a machine with another byte order; merge it there"
                    )
    except (BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error) as error:
        raise CheckpointError(
            f"{label} is not a complete torch.save archive ({error}); copy it again from the node "
            "that wrote it"
        ) from error
    return records


class Section(io.RawIOBase):
    """Read-only view of one section of an open file."""

    def __init__(self, file: BinaryIO, start: int, length: int | None = None) -> None:
        self.length = file.seek(0, io.SEEK_END) - start if length is None else length
        self._file, self._start, self._position = file, start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        view = memoryview(buffer).cast("B")
        view = view[: max(self.length - self._position, 0)]
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count
