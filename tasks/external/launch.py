"""How another trainer is started for a recipe: its command, its environment, and the files it reads."""

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
from tasks.external.environment import interpreter, trainer_env, trainer_versions
from tasks.external_config import ExternalConfig

TRAINER_FOLDER = "trainer"  # in the training's output: what was rendered, and the trainer's own log
TRAIN_ROWS, HELD_OUT_ROWS = "train.parquet", "held_out.parquet"


@dataclass(frozen=True)
class Inputs:
    """The files that the training stage is given, and its output."""

    data: Path
    model: Path
    output: Path
    held_out: Path

    @property
    def folder(self) -> Path:
        """Where what is rendered goes."""
        return self.output / TRAINER_FOLDER


@dataclass(frozen=True)
class Start:
    """A trainer's command, what its environment gets, and the files to write before, by their paths."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[Path, str]
    said: frozenset[str]  # our keys that all of it says

    def write_files(self, inputs: Inputs) -> None:
        """Write the files, and the rows in the form that the trainer reads."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        inputs.folder.mkdir(parents=True, exist_ok=True)
        for source, name in ((inputs.data, TRAIN_ROWS), (inputs.held_out, HELD_OUT_ROWS)):
            trainers.write_rows(source, inputs.folder / name)


def start_of(config: ChainConfig, inputs: Inputs) -> Start:
    """What starts the trainer that is installed.

    Raises TrainerMissing where external.python or external.source lack it, and ConfigError for what it cannot do.
    """
    versions, external = trainer_versions(config), config.external
    version = versions.get(config.train.backend) or external.version
    start = _rendered(config, inputs, version, interpreter(external))
    return replace(start, env={**own_ray(external), **start.env, **trainer_env(external)})


def own_ray(external: ExternalConfig) -> dict[str, str]:
    """Variables for a trainer without a Ray address: it starts its own Ray, and joins none that runs here."""
    return {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS") or "local"} if job_server(external) is None else {}


def planned_start(config: ChainConfig) -> Start:
    """The same without the trainer at hand, before data and model are there: for plans and checks."""
    inputs = Inputs(Path("DATA/train.parquet"), Path("MODEL"), Path("OUTPUT"), Path("DATA/eval.parquet"))
    return _rendered(config, inputs, config.external.version, config.external.python or "python")


def job_server(external: ExternalConfig) -> str | None:
    """The job server that runs the trainer: external.job_server, or a RAY_ADDRESS that is one."""
    inherited = os.environ.get("RAY_ADDRESS", "")
    return external.job_server or (inherited if inherited.startswith(("http://", "https://")) else None)


def _rendered(config: ChainConfig, inputs: Inputs, version: str | None, python: str) -> Start:
    tree = config.model_dump(mode="json")
    checkpoints = inputs.output / CHECKPOINTS
    if (checkpoints / NEWEST_FILE).is_file() or config.checkpoint.resume == "never":
        tree["checkpoint"]["resume"] = "auto"  # its own checkpoint comes first; `never` has moved it aside
    if config.checkpoint.keep_steps or config.checkpoint_steps:
        tree["checkpoint"]["keep_last"] = None  # all: it would remove those too; the stage removes the others
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
        alone = trainers.own_overrides(config.train.backend, tree, places, version)
    except ForeignConfigError as error:
        raise ConfigError(f"train.backend={config.train.backend}: {error}") from error
    refuse_contradictions(config.external.overrides, alone)
    files = {inputs.folder / name: text for name, text in launch.files.items()}
    return Start((python, *launch.argv), launch.env, files, launch.covered)


def _rows(own: str | None, prepared: Path) -> Path:
    """The rows that the trainer reads: the recipe's own in its schema, or the prepared ones."""
    return prepared if own is None else Path(own).absolute()


def refuse_contradictions(overrides: Sequence[str], ours: Sequence[str]) -> None:
    """Raise ConfigError for overrides of what our keys say, with both values; `ours` are those of our keys."""
    said = dict(map(_parsed, ours))
    wrong = [
        f"{name}={value} (the recipe's own keys say {said[name]})"
        for name, value in map(_parsed, overrides)
        if name in said and _plain(value) != _plain(said[name])
    ]
    if wrong:
        raise ConfigError(
            f"external.overrides sets {', '.join(wrong)}: change the recipe's key, which docs/from-verl.md "
            "names, and remove the override"
        )


def _parsed(override: str) -> tuple[str, str]:
    name, is_set, value = override.partition("=")
    return name.lstrip("+~"), value if is_set else "(removed)"


def _plain(value: str) -> Any:
    """The value as numbers and words compare: 1e-6 is 1e-06, True is true, 'a' is a."""
    text = value.strip().strip("'\"").lower()
    try:
        return float(text)
    except ValueError:
        return text
