"""The environment of another trainer: its interpreter, the version that is installed there, its checkout."""

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

ASK_SECONDS = 60.0  # a first start from a network disk
PACKAGES = {"verl": "verl", "mindspeed-rl": "mindspeed_rl", "mindspeed-mm": "mindspeed_mm"}
_ASK = """
import importlib.metadata, sys
try:
    print("version", importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    print("missing")
"""


class TrainerMissing(ConfigError):
    """The environment lacks the trainer, or has another version."""


def trainer_versions(config: ChainConfig) -> dict[str, str]:
    """What stands for the trainer in a cache key: its version, and the commit of its checkout; {} for our own.

    Raises TrainerMissing, with the command that installs it.
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
            f"train.backend={config.train.backend} is started from its checkout: set external.source to a clone "
            "of its repository, with the branch that fits your CANN"
        )
    return found


def installed_version(config: ChainConfig) -> str:
    """The trainer's version in external.python; raises TrainerMissing unless it is external.version, where set."""
    external, name = config.external, PACKAGES[config.train.backend]
    python = interpreter(external)
    version = _ask(python, name, tuple(sorted(trainer_env(external).items())))
    wanted = external.version
    command = f"{shlex.quote(python)} -m pip install {shlex.quote(f'{name}=={wanted}' if wanted else name)}"
    if version is None:
        raise TrainerMissing(f"external.python={python} does not have {name}: {command}")
    if wanted is not None and version != wanted:
        raise TrainerMissing(
            f"external.python={python} has {name} {version}, and external.version={wanted}: {command}, or set "
            f"external.version={version}"
        )
    return version


def interpreter(external: ExternalConfig) -> str:
    """The path of external.python; raises TrainerMissing where it is no program."""
    if external.python is None:
        raise TrainerMissing(
            "external.python is not set: name the interpreter of the environment that has the trainer, such as "
            "verl-env/bin/python"
        )
    if (found := shutil.which(external.python)) is None:
        raise TrainerMissing(
            f"external.python={external.python} is no program here: make the environment with python -m venv, "
            "install the trainer there, and name its bin/python"
        )
    return os.path.abspath(found)  # a link stays: it says which environment it is


def trainer_env(external: ExternalConfig) -> dict[str, str]:
    """external.env with $NAME replaced; raises ConfigError for a variable that is not set."""
    env = {name: str(value) for name, value in external.env.items()}
    for name, value in env.items():
        if value.startswith("$"):
            if value[1:] not in os.environ:
                raise ConfigError(
                    f"external.env.{name}={value}: {value[1:]} is not set here; export it before the run"
                )
            env[name] = os.environ[value[1:]]
    return env


@functools.cache
def _ask(python: str, name: str, env: tuple[tuple[str, str], ...]) -> str | None:
    """The version of a package in an interpreter; None where it has none."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK, name],
            env={**os.environ, **dict(env)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainerMissing(f"external.python={python} cannot be asked for {name}: {error}") from None
    words = done.stdout.split()
    if done.returncode or words[:1] not in (["version"], ["missing"]):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TrainerMissing(f"external.python={python} does not start: {said}")
    return words[1] if words[0] == "version" else None


def _commit(source: Path) -> str:
    """The commit of a checkout, with + where files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(source), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ASK_SECONDS
        ).stdout.strip()

    try:
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise TrainerMissing(
            f"external.source={source} is no checkout whose commit git can tell ({said.strip()}); clone the "
            f"trainer's "
            "repository there"
        ) from None


def describe(versions: Mapping[str, str]) -> str:
    """The versions in words."""
    return ", ".join(f"{name} {version[:40]}" for name, version in versions.items())
