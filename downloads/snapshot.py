"""What a reference stands for: a commit of a repository, or named files, with their sizes and digests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from downloads.errors import BadReference

Kind = Literal["model", "dataset"]
HubName = Literal["hf", "modelscope", "url"]

PARTS = ".parts"  # in the folder of a download, what of it is not complete yet

_HUB = re.compile(
    r"(?P<hub>hf|modelscope):(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/#\s]+))?(?:/(?P<file>[^#]+?))?/?"
    r"(?:#sha256=(?P<sha256>.*))?"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMOTE = re.compile(r"(hf|modelscope|https?):")


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch. At least one of the digests is known, but for files of hubs that give none."""

    path: str  # relative, with forward slashes
    size: int | None = None  # bytes; None: known when the download begins
    sha256: str | None = None
    git_oid: str | None = None  # sha1 of git's blob, which hubs give for files outside of LFS


@dataclass(frozen=True)
class Snapshot:
    """A reference, resolved. Equal commits mean equal files."""

    hub: HubName
    repo: str  # ORG/NAME; of URLs their addresses
    commit: str
    files: tuple[RemoteFile, ...]
    kind: Kind = "model"
    revision: str | None = None  # as it was asked for; None: the hub's default

    @property
    def num_bytes(self) -> int | None:
        """Size of all files; None when one of them is not known yet."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


@dataclass(frozen=True)
class Reference:
    """A hub reference in its parts: `HUB:ORG/NAME[@REVISION][/FILE][#sha256=DIGEST]`."""

    hub: HubName
    repo: str
    revision: str | None
    file: str | None  # or a folder
    sha256: str | None


@dataclass(frozen=True)
class Progress:
    """How far a download is."""

    num_done: int  # files
    num_files: int
    bytes_done: int
    total_bytes: int  # of files whose size is known


OnProgress = Callable[[Progress], None]


def is_remote(text: str) -> bool:
    """True for a reference to a hub or a URL, False for a local path or a name."""
    return _REMOTE.match(text) is not None


def parse_reference(text: str) -> Reference:
    """The parts of a hub reference; a slash within a revision is written %2F. Raises BadReference."""
    match = _HUB.fullmatch(text)
    if match is None:
        raise BadReference(
            f"{text} is not of the form hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME@REVISION/FILE "
            "(modelscope: likewise)"
        )
    revision = unquote(match["revision"]) if match["revision"] else None
    digest = require_digest(text, match["sha256"]) if match["sha256"] is not None else None
    if digest and not match["file"]:
        raise BadReference(f"{text} has a sha256 but names no file that it could be of; add /FILE before the #")
    return Reference(match["hub"], match["repo"], revision, match["file"], digest)  # type: ignore[arg-type]


def require_digest(text: str, digest: str) -> str:
    """The digest in lower case; raises BadReference unless it is 64 hexadecimal digits."""
    if not _DIGEST.fullmatch(digest.lower()):
        raise BadReference(
            f"{text} is not pinned: end it in #sha256= and the 64 digits of the file's digest, so that it cannot "
            "change unnoticed (sha256sum FILE prints it)"
        )
    return digest.lower()
