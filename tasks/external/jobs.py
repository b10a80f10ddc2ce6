"""Runs a trainer's command as a job of a Ray cluster, through `ray job submit`."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo_core.errors import ConfigError
from tasks.config.external import ExternalConfig
from tasks.external.environment import interpreter
from tasks.external.launch import Start, job_server

logger = logging.getLogger(__name__)

STOP_SECONDS = 60.0
JOB_FILE = "job.json"  # beside the command: its current job


@contextmanager
def as_job(
    external: ExternalConfig, start: Start, command_file: Path
) -> Iterator[tuple[Sequence[str], Mapping[str, str]]]:
    """Yield the local command and its extra environment: the trainer itself, or the client of a Ray
    job.

    Stops a job left by an earlier attempt first; an error in the block stops the new job. The
    client exits with 1 if the job fails. Every node must see the training output.
    """
    if (address := job_server(external)) is None:
        yield start.argv, start.env
        return
    client, server = _client(external), ["--address", address]
    record = command_file.with_name(JOB_FILE)
    if record.is_file():
        _stop([*client, "stop", *server, json.loads(record.read_text(encoding="utf-8"))["id"]])
    job = f"dapo-{secrets.token_hex(6)}"
    record.write_text(json.dumps({"id": job, "server": address}), encoding="utf-8")
    entrypoint = ["bash", str(command_file)]
    if external.source is not None:
        entrypoint = ["env", f"--chdir={Path(external.source).absolute()}", *entrypoint]
    with tempfile.TemporaryDirectory(prefix="dapo-job-") as folder:
        runtime = (
            Path(folder) / "runtime_env.json"
        )  # a private file, since everybody can read command lines
        runtime.write_text(json.dumps({"env_vars": dict(start.env)}), encoding="utf-8")
        submit = [
            *client,
            "submit",
            *server,
            "--submission-id",
            job,
            "--runtime-env",
            str(runtime),
            "--",
            *entrypoint,
        ]
        try:
            yield submit, {}
        except BaseException:
            _stop([*client, "stop", *server, job])
            raise
    record.unlink()


def _client(external: ExternalConfig) -> list[str]:
    """`ray job` from the trainer's environment, which has the cluster's Ray version."""
    ray = Path(interpreter(external)).with_name("ray")
    if not ray.is_file() or not os.access(ray, os.X_OK):
        found = shutil.which("ray")
        if found is None:
            raise ConfigError(
                f"a Ray job needs the command ray, but neither {ray} nor the PATH has "
                'it: pip install "ray[default]" there, in the version of the cluster'
            )
        ray = Path(found)
    return [str(ray), "job"]


def _stop(command: Sequence[str]) -> None:
    """Stop a job; errors for a job that has already ended are only logged."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STOP_SECONDS
    )
    output = (done.stdout + done.stderr).strip().splitlines()
    logger.info(
        "%s: %s", " ".join(command[-4:]), output[-1] if output else f"exit code {done.returncode}"
    )
