"""References to hubs and web servers, resolved once a run; offline, as in earlier artifacts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import downloads
from redaction import redacted
from tasks.artifacts.store import ArtifactStore

logger = logging.getLogger(__name__)

COMMIT, FILE = "commit", "file "  # input names in a key: the commit, and each file by path

Result = TypeVar("Result")

_results: dict[Hashable, Any] = {}
_logged: set[str] = set()


def resolve_once(reference: str | tuple[str, ...], kind: downloads.Kind) -> downloads.Snapshot:
    """The snapshot of a reference, resolved once per run. Raises DownloadError."""
    return once_per_run((reference, kind), lambda: downloads.resolve(reference, kind))


def once_per_run(query: Hashable, execute: Callable[[], Result]) -> Result:
    """The result of an external query, executed once per run."""
    if query not in _results:
        _results[query] = execute()
    return cast(Result, _results[query])


def forget_resolved() -> None:
    """Clear cached results, at the start of a run."""
    _results.clear()
    _logged.clear()


def inputs_of(snapshot: downloads.Snapshot, paths: Sequence[str]) -> dict[str, str]:
    """Key inputs of a snapshot: the commit and the digest of each of these files."""
    files = {file.path: file for file in snapshot.files}
    return {COMMIT: snapshot.commit, **{f"{FILE}{path}": digest_of(files[path]) for path in paths}}


def digest_of(file: downloads.RemoteFile) -> str:
    """The digest of the file as "ALGORITHM:HEX", or its size if the hub provides none."""
    if file.sha256:
        return f"sha256:{file.sha256}"
    return f"git:{file.git_oid}" if file.git_oid else f"size:{file.size}"


def earlier_inputs(
    store_path: str, stage: str, config: Mapping[str, Any], reason: downloads.Unreachable
) -> dict[str, str]:
    """The inputs of the newest artifact with the same configuration, for use offline; logged.

    Raises `reason` if the store has no such artifact.
    """
    for _, manifest in ArtifactStore(store_path).finished(stage):
        if manifest.get("config") == redacted(config) and COMMIT in manifest["inputs"]:
            inputs = manifest["inputs"]
            log_earlier(reason, inputs[COMMIT], manifest["ended_at"])
            return {
                name: value
                for name, value in inputs.items()
                if name == COMMIT or name.startswith(FILE)
            }
    raise reason


def log_earlier(reason: downloads.Unreachable, commit: str, ended_at: str) -> None:
    """Log once per run that an earlier artifact replaces an unreachable source."""
    message = f"{reason}. Continuing with commit {commit[:12]}, fetched on {ended_at[:10]}"
    if message not in _logged:
        _logged.add(message)
        logger.warning("%s", message)
