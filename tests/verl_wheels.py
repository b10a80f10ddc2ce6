"""Published packages to compare with, such as verl, installed once a machine."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def verl_folder(version: str) -> Path:
    """A folder with verl as published; skips the test without a package index."""
    return folder_with(f"verl-{version}", f"verl=={version}")


def folder_with(name: str, *requirements: str) -> Path:
    """A folder with these packages only; skips the test without a package index.

    Their code is run, so the folder is this user's own.
    """
    own = Path(tempfile.gettempdir()) / f"dapo-tests-packages-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    assert own.stat().st_uid == os.getuid(), f"{own} is another user's: its code would run"
    folder = own / name
    with (own / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = folder / ".installed"
        if not installed.exists() or installed.read_text().split() != list(requirements):
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
            options += ["--no-build-isolation", "--target", str(folder)]
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", *options, *requirements],
                capture_output=True,
                text=True,
                timeout=300,
            )
            if done.returncode:
                why = done.stderr.strip()[-300:]
                pytest.skip(f"pip cannot install {', '.join(requirements)} here: {why}")
            installed.write_text(" ".join(requirements))
    return folder
