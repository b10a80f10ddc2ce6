"""The zip archives of torch.save: where their records lie in a file, found without taking memory for them."""

from __future__ import annotations

import io
import struct
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from dapo_core.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a record: skips to the lengths of its name and of its extra field
VALUES = "data/"  # begins the names of records with values of tensors


@dataclass(frozen=True)
class Record:
    """A record of an archive."""

    offset: int  # of its first byte in the file
    num_bytes: int
    crc32: int


def read_records(file: BinaryIO, label: str, start: int = 0, num_bytes: int | None = None) -> dict[str, Record]:
    """The archive's records by name, without its top folder, as `data/0`; the archive may be a part of the file.

    CRC32s are checked, but for those of values. Raises CheckpointError, which begins with `label`, for a torn
    archive, one whose records are compressed or claim more bytes than it has, and one of another byte order.
    """
    section = Section(file, start, num_bytes)
    try:
        with ZipFile(section) as archive:
            infos = archive.infolist()
            declared = sum(info.file_size for info in infos)
            if any(info.compress_type != ZIP_STORED for info in infos) or declared > section.length:
                raise CheckpointError(
                    f"{label} has compressed records, {declared:,} bytes in {section.length:,}, which torch.save "
                    "never writes; loading it could fill the memory"
                )
            # Reading a record checks its CRC32.
            texts = {_name(info): archive.read(info) for info in infos if not _name(info).startswith(VALUES)}
    except (BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{label} is no whole archive of torch.save ({error}); copy it again from the node that wrote it"
        ) from error
    if texts.get("byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
        raise CheckpointError(f"{label} was written on a machine of another byte order; merge it there")
    records = {}
    for info in infos:
        section.seek(info.header_offset)
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(section.read(_LOCAL_HEADER.size))
        offset = start + section.tell() + name_bytes + extra_bytes
        records[_name(info)] = Record(offset, info.file_size, info.CRC)
    return records


def _name(info: ZipInfo) -> str:
    """Without the archive's top folder."""
    return info.filename.partition("/")[2]


class Section(io.RawIOBase):
    """A read-only file that shows one part of an open file."""

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
        count = self._file.readinto(view[: max(self.length - self._position, 0)])  # type: ignore[attr-defined]
        self._position += count
        return count
