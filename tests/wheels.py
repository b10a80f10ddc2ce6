"""Wheels to read in tests; fetched once a machine by pip, never installed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def wheel(distribution: str, version: str) -> Path:
    """The wheel as published for this interpreter; skips the test when it cannot be fetched."""
    own = Path(tempfile.gettempdir()) / f"dapo-tests-wheels-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    assert own.stat().st_uid == os.getuid(), f"{own} is another user's"
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(own.glob(pattern)):
        with tempfile.TemporaryDirectory(dir=own) as partial:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            command += ["--dest", partial, f"{distribution}=={version}"]
            try:
                fetched = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except subprocess.TimeoutExpired:
                pytest.skip(
                    f"{distribution} {version} cannot be fetched: the registry took more than 120 s"
                )
            if fetched.returncode:
                reason = (fetched.stderr.strip().splitlines() or ["pip said nothing"])[-1]
                pytest.skip(f"{distribution} {version} cannot be fetched: {reason}")
            (found,) = Path(partial).glob("*.whl")
            found.replace(own / found.name)
    return next(own.glob(pattern))
