"""The key of a stage's output: everything that can change its bytes, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SHORT_KEY_LENGTH = 16


@dataclass(frozen=True)
class StageKey:
    """The parts a stage's key is made of, kept apart so that a person can see why a key changed."""

    stage: str
    config: Mapping[str, Any]  # the stage's own slice, JSON values only, volatile fields left out
    inputs: Mapping[str, str]  # input name -> content digest of its artifact
    code_digest: str
    versions: Mapping[str, str]  # package -> version, of the packages that matter to this stage

    @property
    def key(self) -> str:
        """sha256 over the canonical JSON of the parts. Raises TypeError on values JSON cannot hold."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Returns the one JSON text of a value: keys sorted, no spaces, ASCII; not-a-number is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns {distribution: version}, without importing any; "absent" for one that is not installed."""
    from importlib import metadata  # a third of this module's import time, and `dapo --help` needs no version

    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions
