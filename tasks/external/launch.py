"""How another trainer is launched for a recipe: command, environment and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.others import NEWEST_FILE
from dapo_core.errors import ConfigError
from interop import ForeignConfigError
from interop.render import trainers
from interop.render.launch import Places
from tasks.config import ChainConfig
from tasks.config.external import ExternalConfig
from tasks.external.environment import interpreter, trainer_env, trainer_versions

TRAINER_FOLDER = "trainer"  # in the training output: rendered files and the trainer's log
TRAIN_ROWS, HELD_OUT_ROWS = "train.parquet", "held_out.parquet"


@dataclass(frozen=True)
class Inputs:
    """Inputs and output of the training stage."""

    data: Path
    model: Path
    output: Path
    held_out: Path

    @property
    def folder(self) -> Path:
        """The folder for rendered files."""
        return self.output / TRAINER_FOLDER


@dataclass(frozen=True)
class Start:
    """A trainer's command, extra environment, and the files to write first, by path."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[Path, str]
    said: frozenset[str]  # our keys that the launch expresses

    def write_files(self, inputs: Inputs) -> None:
        """Write the files, and the rows in the trainer's format."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        inputs.folder.mkdir(parents=True, exist_ok=True)
        for source, name in ((inputs.data, TRAIN_ROWS), (inputs.held_out, HELD_OUT_ROWS)):
            trainers.write_rows(source, inputs.folder / name)


def start_of(config: ChainConfig, inputs: Inputs) -> Start:
    """Render the launch of the installed trainer.

    Raises TrainerMissing if it is not installed, and ConfigError for settings that it does not
    support.
    """
    versions, external = trainer_versions(config), config.external
    version = versions.get(config.train.backend) or external.version
    start = _rendered(config, inputs, version, interpreter(external))
    return replace(start, env={**own_ray(external), **start.env, **trainer_env(external)})


def own_ray(external: ExternalConfig) -> dict[str, str]:
    """Variables that make a trainer start its own Ray instead of joining a local one."""
    return (
        {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS") or "local"}
        if job_server(external) is None
        else {}
    )


def planned_start(config: ChainConfig) -> Start:
    """The launch with placeholders, without the trainer, data or model: for plans and checks."""
    inputs = Inputs(
        Path("DATA/train.parquet"), Path("MODEL"), Path("OUTPUT"), Path("DATA/eval.parquet")
    )
    return _rendered(config, inputs, config.external.version, config.external.python or "python")


def job_server(external: ExternalConfig) -> str | None:
    """The Ray job server: external.job_server, or RAY_ADDRESS if it is one."""
    inherited = os.environ.get("RAY_ADDRESS", "")
    return external.job_server or (
        inherited if inherited.startswith(("http://", "https://")) else None
    )


def _rendered(config: ChainConfig, inputs: Inputs, version: str | None, python: str) -> Start:
    tree = config.model_dump(mode="json")
    if config.train.backend != "verl":
        version = None  # a MindSpeed checkout has a commit, and its table has one version
    checkpoints = inputs.output / CHECKPOINTS
    if (checkpoints / NEWEST_FILE).is_file() or config.checkpoint.resume == "never":
        tree["checkpoint"]["resume"] = (
            "auto"  # its own checkpoint takes precedence; `never` moved it aside
        )
    if config.checkpoint.keep_steps or config.checkpoint_steps:
        # Keep all, since the trainer would remove these steps too; the stage removes the rest.
        tree["checkpoint"]["keep_last"] = None
    external = config.external
    places = Places(
        folder=inputs.folder,
        model=inputs.model,
        train_rows=_rows(external.train_rows, inputs.folder / TRAIN_ROWS),
        held_out_rows=_rows(external.held_out_rows, inputs.folder / HELD_OUT_ROWS),
        checkpoints=checkpoints,
    )
    try:
        launch = trainers.render(config.train.backend, tree, places, version)
        ours = trainers.own_overrides(config.train.backend, tree, places, version)
    except ForeignConfigError as error:
        raise ConfigError(f"train.backend={config.train.backend}: {error}") from error
    refuse_contradictions(config.external.overrides, ours)
    files = {inputs.folder / name: text for name, text in launch.files.items()}
    return Start((python, *launch.argv), launch.env, files, launch.covered)


def _rows(own: str | None, prepared: Path) -> Path:
    """The rows for the trainer: the recipe's own file, or the prepared ones."""
    return prepared if own is None else Path(own).absolute()


def refuse_contradictions(overrides: Sequence[str], ours: Sequence[str]) -> None:
    """Raise ConfigError for overrides that contradict `ours`, the overrides rendered from recipe
    keys.
    """
    expected = dict(map(_parsed, ours))
    wrong = [
        f"{name}={value} (the recipe sets {expected[name]})"
        for name, value in map(_parsed, overrides)
        if name in expected and _plain(value) != _plain(expected[name])
    ]
    if wrong:
        raise ConfigError(
            f"external.overrides sets {', '.join(wrong)}: change the recipe's key "
            "(docs/from-verl.md "
            "names it) and remove the override"
        )


def _parsed(override: str) -> tuple[str, str]:
    name, is_set, value = override.partition("=")
    return name.lstrip("+~"), value if is_set else "(removed)"


def _plain(value: str) -> Any:
    """The value normalized for comparison: 1e-6 is 1e-06, True is true, 'a' is a."""
    text = value.strip().strip("'\"").lower()
    try:
        return float(text)
    except ValueError:
        return text
