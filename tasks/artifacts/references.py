"""References to hubs and web servers: resolved once a run; without a network, what an earlier run made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import downloads
from redaction import redacted
from tasks.artifacts.store import ArtifactStore

logger = logging.getLogger(__name__)

COMMIT, FILE = "commit", "file "  # names of a key's inputs: the commit, and each file by its path

Answer = TypeVar("Answer")

_answers: dict[Hashable, Any] = {}
_said: set[str] = set()


def resolve_once(reference: str | tuple[str, ...], kind: downloads.Kind) -> downloads.Snapshot:
    """What the reference stands for, asked once a run. Raises DownloadError."""
    return once_a_run((reference, kind), lambda: downloads.resolve(reference, kind))


def once_a_run(question: Hashable, answer: Callable[[], Answer]) -> Answer:
    """The answer to a question about something outside, which is asked once a run."""
    if question not in _answers:
        _answers[question] = answer()
    return cast(Answer, _answers[question])


def forget_resolved() -> None:
    """Have the next run ask again."""
    _answers.clear()
    _said.clear()


def inputs_of(snapshot: downloads.Snapshot, paths: Sequence[str]) -> dict[str, str]:
    """The inputs of a stage's key: the commit and the digest of each of these files."""
    files = {file.path: file for file in snapshot.files}
    return {COMMIT: snapshot.commit, **{f"{FILE}{path}": digest_of(files[path]) for path in paths}}


def digest_of(file: downloads.RemoteFile) -> str:
    """The file's digest as "ALGORITHM:HEX", its size where the hub gives none."""
    if file.sha256:
        return f"sha256:{file.sha256}"
    return f"git:{file.git_oid}" if file.git_oid else f"size:{file.size}"


def earlier_inputs(
    store_path: str, stage: str, config: Mapping[str, Any], reason: downloads.Unreachable
) -> dict[str, str]:
    """The inputs of the newest artifact that the stage made of the same configuration; logs that they are used.

    Raises `reason` when the store has none.
    """
    for _, manifest in ArtifactStore(store_path).finished(stage):
        if manifest.get("config") == redacted(config) and COMMIT in manifest["inputs"]:
            inputs = manifest["inputs"]
            log_earlier(reason, inputs[COMMIT], manifest["ended_at"])
            return {name: value for name, value in inputs.items() if name == COMMIT or name.startswith(FILE)}
    raise reason


def log_earlier(reason: downloads.Unreachable, commit: str, ended_at: str) -> None:
    """Log once a run that an earlier artifact stands for what cannot be reached."""
    words = f"{reason}. Going on with commit {commit[:12]}, fetched on {ended_at[:10]}"
    if words not in _said:
        _said.add(words)
        logger.warning("%s", words)
