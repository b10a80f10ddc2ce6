"""The environment of another trainer: interpreter, installed version and checkout."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dapo_core.errors import ConfigError
from tasks.config import ChainConfig
from tasks.config.external import ExternalConfig

QUERY_SECONDS = 60.0  # allows for a first start from a network disk
PACKAGES = {"verl": "verl", "mindspeed-rl": "mindspeed_rl", "mindspeed-mm": "mindspeed_mm"}
_QUERY = """
import importlib.metadata, sys
try:
    print("version", importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    print("missing")
"""


class TrainerMissing(ConfigError):
    """The trainer is not installed, or has the wrong version."""


def trainer_versions(config: ChainConfig) -> dict[str, str]:
    """The version and checkout commit that identify the trainer in a cache key; {} for our own
    trainer.

    Raises TrainerMissing with the command that installs it.
    """
    if config.train.backend == "own":
        return {}
    external, name = config.external, PACKAGES[config.train.backend]
    found = {}
    if config.train.backend == "verl":
        found["verl"] = installed_version(config)
    if external.source is not None:
        found[f"{name} commit"] = _commit(Path(external.source))
    if not found:
        raise TrainerMissing(
            f"train.backend={config.train.backend} runs from its checkout: set external.source to "
            "a clone "
            "of its repository, on the branch for your CANN version"
        )
    return found


def installed_version(config: ChainConfig) -> str:
    """The installed version of the trainer; raises TrainerMissing if external.version is set and
    differs.
    """
    external, name = config.external, PACKAGES[config.train.backend]
    python = interpreter(external)
    version = _query_version(python, name, tuple(sorted(trainer_env(external).items())))
    required = external.version
    command = (
        f"{shlex.quote(python)} -m pip install "
        f"{shlex.quote(f'{name}=={required}' if required else name)}"
    )
    if version is None:
        raise TrainerMissing(f"external.python={python} does not have {name}: {command}")
    if required is not None and version != required:
        raise TrainerMissing(
            f"external.python={python} has {name} {version}, but external.version={required}: "
            f"{command}, or set "
            f"external.version={version}"
        )
    return version


def interpreter(external: ExternalConfig) -> str:
    """The absolute path of external.python; raises TrainerMissing if it is not a program."""
    if external.python is None:
        raise TrainerMissing(
            "external.python is not set: name the interpreter of the environment that has the "
            "trainer, such as "
            "verl-env/bin/python"
        )
    if (found := shutil.which(external.python)) is None:
        raise TrainerMissing(
            f"external.python={external.python} is not a program here: create the environment with "
            "python -m venv, install the trainer there, and name its bin/python"
        )
    return os.path.abspath(found)  # keep links, which identify the environment


def trainer_env(external: ExternalConfig) -> dict[str, str]:
    """external.env with $NAME replaced; raises ConfigError for unset variables."""
    env = {name: str(value) for name, value in external.env.items()}
    for name, value in env.items():
        if value.startswith("$"):
            if value[1:] not in os.environ:
                raise ConfigError(
                    f"external.env.{name}={value}: {value[1:]} is not set here; export it before "
                    "the run"
                )
            env[name] = os.environ[value[1:]]
    return env


@functools.cache
def _query_version(python: str, name: str, env: tuple[tuple[str, str], ...]) -> str | None:
    """The version of a package in an interpreter; None if not installed."""
    try:
        done = subprocess.run(
            [python, "-c", _QUERY, name],
            env={**os.environ, **dict(env)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainerMissing(
            f"external.python={python} cannot be queried for {name}: {error}"
        ) from None
    words = done.stdout.split()
    if done.returncode or words[:1] not in (["version"], ["missing"]):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TrainerMissing(f"external.python={python} does not start: {reason}")
    return words[1] if words[0] == "version" else None


def _commit(source: Path) -> str:
    """The commit of a checkout, with + if files were changed."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(source), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS
        ).stdout.strip()

    try:
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise TrainerMissing(
            f"external.source={source} is not a checkout with a readable commit "
            f"({reason.strip()}); clone the "
            "trainer's repository there"
        ) from None


def describe(versions: Mapping[str, str]) -> str:
    """The versions as text."""
    return ", ".join(f"{name} {version[:40]}" for name, version in versions.items())
