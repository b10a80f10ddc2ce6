"""verl's published wheels, to compare with its own code; fetched once by pip, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest


def verl_folder(version: str) -> Path:
    """A folder with verl as published; skips the test when the package index cannot be reached.

    It is fetched once a machine. Its code is run, so the folder is this user's own.
    """
    own = Path(tempfile.gettempdir()) / f"dapo-tests-verl-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    assert own.stat().st_uid == os.getuid(), f"{own} is another user's: its code would run"
    folder = own / version
    if not (folder / "verl").is_dir():
        with tempfile.TemporaryDirectory(dir=own) as partial:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                partial,
            ]
            fetched = subprocess.run(
                [*command, f"verl=={version}"], capture_output=True, text=True, timeout=120
            )
            if fetched.returncode:
                pytest.skip(
                    f"verl {version} cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}"
                )
            (wheel,) = Path(partial).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(Path(partial) / "sources")
            try:
                (Path(partial) / "sources").rename(folder)
            except OSError:  # another test process was faster
                assert (folder / "verl").is_dir()
    return folder
