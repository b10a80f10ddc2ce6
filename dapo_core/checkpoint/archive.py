"""The zip archives of torch.save: where their records lie in a file, found without taking memory for them."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from dapo_core.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a record: skips to the lengths of its name and of its extra field
VALUES = "data/"  # begins the names of records with values of tensors


@dataclass(frozen=True)
class Record:
    """A record of an archive."""

    offset: int  # of its first byte in the file
    num_bytes: int
    crc32: int


def read_records(
    file: BinaryIO, label: str, start: int = 0, num_bytes: int | None = None, has_crc32s: bool = True
) -> dict[str, Record]:
    """The archive's records by name, without its top folder, as `data/0`; the archive may be a part of the file.

    CRC32s are checked if the archive has them, but for those of values. Raises CheckpointError, which begins with
    `label`, for a torn archive, one of another byte order, and one with compressed records or more bytes in them
    than it has.
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
                        f"{label} was written on a machine of another byte order; merge it there"
                    )
    except (BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error) as error:
        raise CheckpointError(
            f"{label} is no whole archive of torch.save ({error}); copy it again from the node that wrote it"
        ) from error
    return records


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
