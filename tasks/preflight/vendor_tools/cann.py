"""Versions of CANN and of the driver, from the files that their installers leave."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/usr/local/Ascend")
_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


def cann_version(environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """The toolkit that the environment names, else the one at its usual place; None without one."""
    for folder in _toolkits(environment, root):
        file = folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
        if file.is_file():
            return parse(file.read_text(encoding="utf-8", errors="replace"))
    return None


def driver_version(root: Path = ROOT) -> str | None:
    """The driver's version; None without its file."""
    file = root / "driver" / "version.info"
    return parse(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None


def parse(text: str) -> str | None:
    """The value of `version=`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def _toolkits(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        if named := environment.get(name):
            yield Path(named)
    yield root / "cann"
    yield root / "ascend-toolkit" / "latest"
