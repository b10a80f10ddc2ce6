"""A PostgreSQL server from Debian's package, on a socket of its own, for the length of a test."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "dapo", "postgres-password"
STARTUP_SECONDS = 200.0


@contextmanager
def started_postgres() -> Iterator[str]:
    """URL, with a password, of a fresh database that no network reaches; afterwards nothing of it
    is left.
    """
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name)
    )
    if not versions:
        pytest.fail("no PostgreSQL in /usr/lib/postgresql: apt-get install postgresql")
    binaries = versions[-1]
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path holds 107 bytes
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    owner = server_account()
    for path in (folder, password_file) if owner else ():
        shutil.chown(path, owner["user"], owner["group"])
    create = [
        binaries / "initdb",
        "-D",
        folder / "data",
        "-U",
        USER,
        "-A",
        "scram-sha-256",
        "--no-sync",
    ]
    serve = [
        binaries / "postgres",
        "-D",
        folder / "data",
        "-k",
        folder,
        "-c",
        "listen_addresses=",
        "-F",
    ]
    try:
        made = subprocess.run(
            [*create, "--pwfile", password_file], capture_output=True, text=True, **owner
        )
        assert made.returncode == 0, made.stderr
        with open(folder / "log", "wb") as log:
            server = subprocess.Popen(serve, stdout=log, stderr=log, **owner)
        try:
            wait_until_ready(binaries / "pg_isready", folder, server)
            yield f"postgresql+asyncpg://{USER}:{PASSWORD}@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # ends connections that are left, unlike SIGTERM
            server.wait(200)
    finally:
        shutil.rmtree(folder)


def server_account() -> dict[str, Any]:
    """Under whom the server runs, as arguments of Popen: not root, whom it refuses, but the
    package's account.
    """
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam("postgres")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}


def wait_until_ready(pg_isready: Path, folder: Path, server: subprocess.Popen[bytes]) -> None:
    """Return once the server takes connections; fails the test with its log when it does not."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while subprocess.run([pg_isready, "-q", "-h", folder], check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"PostgreSQL does not start:\n{(folder / 'log').read_text()}")
        time.sleep(0.1)
