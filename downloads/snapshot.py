"""References and what they resolve to: a commit or named files, with sizes and digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from downloads.errors import DownloadError

Kind = Literal["model", "dataset"]
HubName = Literal["hf", "modelscope", "url"]

_HUB = re.compile(
    r"(?P<hub>hf|modelscope):(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/#\s]+))?"
    r"(?:/(?P<file>[^#]+?))?/?(?:#sha256=(?P<sha256>.*))?"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMOTE = re.compile(r"(hf|modelscope|https?):")


@dataclass(frozen=True)
class RemoteFile:
    """A file to download. At least one digest is known, unless the hub provides none."""

    path: str  # relative, with forward slashes
    size: int | None = None  # bytes; None until the download begins
    sha256: str | None = None
    git_oid: str | None = None  # git blob sha1, for files outside LFS

    def is_at(self, path: Path) -> bool:
        """True if the file at `path` exists and has this size and digest."""
        size = size_of(path)
        if not path.is_file() or self.size not in (None, size):
            return False
        with path.open("rb") as content:
            if self.sha256 is not None:
                return hashlib.file_digest(content, "sha256").hexdigest() == self.sha256
            if self.git_oid is not None:
                blob = b"blob %d\0" % size + content.read()
                return hashlib.sha1(blob).hexdigest() == self.git_oid
        return True


@dataclass(frozen=True)
class Snapshot:
    """A resolved reference. Equal commits mean equal files."""

    hub: HubName
    repo: str  # ORG/NAME, or the URLs
    commit: str
    files: tuple[RemoteFile, ...]
    kind: Kind = "model"
    revision: str | None = None  # as requested; None for the hub's default

    @property
    def num_bytes(self) -> int | None:
        """Total size; None if a size is unknown."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


@dataclass(frozen=True)
class Reference:
    """A parsed hub reference: `HUB:ORG/NAME[@REVISION][/FILE][#sha256=DIGEST]`."""

    hub: HubName
    repo: str
    revision: str | None
    file: str | None  # or a folder
    sha256: str | None


@dataclass(frozen=True)
class Progress:
    """Progress of a download."""

    num_done: int  # completed files
    num_files: int
    bytes_done: int
    total_bytes: int  # over files of known size


OnProgress = Callable[[Progress], None]
Report = Callable[[str, int, int], None]  # under a name: bytes and complete files so far


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def is_remote(text: str) -> bool:
    """True for a hub reference or URL, False for a local path or a name."""
    return _REMOTE.match(text) is not None


def parse_reference(text: str) -> Reference:
    """Parse a hub reference; a slash in a revision is written %2F. Raises DownloadError."""
    match = _HUB.fullmatch(text)
    if match is None:
        raise DownloadError(
            f"{text} is not of the form hf:ORG/NAME, hf:ORG/NAME@REVISION or "
            "hf:ORG/NAME@REVISION/FILE (likewise for modelscope:)"
        )
    revision = unquote(match["revision"]) if match["revision"] else None
    digest = require_digest(text, match["sha256"]) if match["sha256"] is not None else None
    if digest and not match["file"]:
        raise DownloadError(f"{text} has a sha256 but names no file; add /FILE before the #")
    hub: Any = match["hub"]
    return Reference(hub, match["repo"], revision, match["file"], digest)


def require_digest(text: str, digest: str) -> str:
    """The digest in lower case. Raises DownloadError unless it has 64 hexadecimal digits."""
    if not _DIGEST.fullmatch(digest.lower()):
        raise DownloadError(
            f"{text} is not pinned: append #sha256= and the file's 64-digit digest (sha256sum FILE "
            "prints it), so that a changed file is detected"
        )
    return digest.lower()
