"""Converts configurations of other trainers to recipes, and recipes to launches of other trainers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_core.config.loading import overridden, read_tree
from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError
from interop import ForeignConfigError
from interop.account import Account, account_of
from interop.export import by_name
from interop.foreign_config import Setting
from interop.read import Reading, read_files, rows_of
from interop.recipe import Recipe, recipe_of, tiny_of, written
from interop.render.launch import Launch, Places
from interop.render.trainers import render, write_rows
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE

ROWS = "num_train_rows"
ENOUGH_ROWS = 1_000_000  # enough for any batch; --tiny sets its own steps
MEASURED_ON = "math500"


def default_keys() -> dict[str, Any]:
    """The default values by key."""
    required = {
        "data": {"train": "arithmetic", "eval": "arithmetic"},
        "model": {"source": "recipe"},
    }
    return by_name(ChainConfig.model_validate(required).model_dump(mode="json"))


def account_of_files(
    files: Sequence[Path], given: dict[str, str], version: str | None, is_tiny: bool
) -> tuple[Reading, Account]:
    """Read the files and account for each setting. `run.sh#2` selects the second training in a
    script.

    Raises ConfigError for unreadable files and missing information.
    """
    rows = given.pop(ROWS, None)
    chosen = re.fullmatch(r"(.+)#(\d+)", str(files[0]))
    paths = [Path(chosen[1]), *files[1:]] if chosen and not files[0].exists() else list(files)
    try:
        reading = read_files(
            paths, given, int(chosen[2]) if chosen and paths != list(files) else None
        )
        num_rows = (
            _positive(rows)
            if rows is not None
            else num_rows_of(reading.settings) or (ENOUGH_ROWS if is_tiny else None)
        )
        facts = {} if num_rows is None else {ROWS: num_rows}
        return reading, account_of(reading.settings, reading.trainer, version, facts)
    except ValueError as error:  # ForeignConfigError is one
        raise ConfigError(str(error)) from error


def _positive(rows: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", rows):
        raise ConfigError(
            f"--set-env {ROWS}={rows}: must be the number of rows in the training files, such as "
            "17917"
        )
    return int(rows)


def num_rows_of(settings: Sequence[Setting]) -> int | None:
    """The number of training rows; None unless all files are Parquet files on this machine."""
    import pyarrow.parquet

    paths = [Path(path).expanduser() for path in rows_of(settings)]
    if not paths or not all(path.is_file() and path.suffix == ".parquet" for path in paths):
        return None
    try:
        return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{paths[0]} is not a Parquet file: {error}; set the number of rows with --set-env "
            "num_train_rows=N"
        ) from None


def recipe_from(account: Account, backend: str, env: Mapping[str, str], is_tiny: bool) -> Recipe:
    """The recipe for an account, for training with `backend`; a tiny one trains with our core.

    Raises ConfigError if `backend` is neither our core nor the trainer of the settings.
    """
    if backend not in ("own", account.trainer):
        raise ConfigError(
            f"--backend {backend}: the settings are {account.trainer}'s; use "
            f"--backend {account.trainer}, or omit --backend to train with our core"
        )
    defaults = default_keys()
    if is_tiny:
        return tiny_of(recipe_of(account, defaults))
    recipe = recipe_of(account, defaults, backend, env)
    if account.trainer != "verl" and "data.eval" not in recipe.values:
        recipe.values["data.eval"] = MEASURED_ON
        recipe.comments["data.eval"] = (
            "MindSpeed has no evaluation set; chosen by the import, change as needed"
        )
    return recipe


def write_recipe(recipe: Recipe, path: Path, header: Sequence[str]) -> None:
    """Write the recipe as commented YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(recipe, header), encoding="utf-8")


DEVICES_OF_NODE, DEVICES_OF_A3 = 8, 16


def launch_of(
    trainer: str,
    config: ChainConfig,
    folder: Path,
    version: str | None,
    model: Path | None,
    nodes: int | None,
) -> Launch:
    """Render the launch of a trainer into `folder`. Raises ConfigError for unsupported settings."""
    tree = config.model_dump(mode="json")
    tree["external"] = {**tree.get("external", {}), "num_nodes": nodes or _nodes(config)}
    named = model or config.model.path or config.model.id
    if named is None:
        raise ConfigError(
            f"model.source={config.model.source} has no folder yet; pass the output of "
            "dapo fetch-model with --model"
        )
    places = Places(
        folder, Path(named), folder / TRAIN_FILE, folder / EVAL_FILE, folder / "checkpoints"
    )
    try:
        launch = render(trainer, tree, places, version)
    except ForeignConfigError as error:
        raise ConfigError(str(error)) from error
    external_env = {name: str(value) for name, value in config.external.env.items()}
    return replace(launch, env={**launch.env, **external_env})


def unsaid_keys(path: Path, changes: Sequence[str], launch: Launch) -> list[str]:
    """Training keys set by a recipe or its `changes` (`key=value`) that the launch does not
    express.
    """
    sections = TrainingConfig.model_fields.keys() - {"run"}
    leaves = [
        name
        for name, value in by_name(overridden(read_tree(path), changes)).items()
        if not isinstance(value, Mapping)
    ]
    plan_only = {"train.device_model"}  # read only by our memory plan
    return [
        name
        for name in leaves
        if name.partition(".")[0] in sections and name not in launch.covered | plan_only
    ]


def write_launch(launch: Launch, folder: Path, texts: Mapping[str, str], data: Path | None) -> None:
    """Write the launch's files, `texts`, and the rows of a prepare-data output.

    Raises ConfigError before writing if an existing file differs, since it may have been edited.
    """
    files = {folder / name: text for name, text in {**launch.files, **texts}.items()}
    edited = [
        path.name
        for path, text in files.items()
        if path.exists() and path.read_text("utf-8") != text
    ]
    if edited:
        raise ConfigError(
            f"{folder} already has {', '.join(edited)} with different content; name another "
            "--output, or remove the folder"
        )
    rows = {} if data is None else {name: data / name for name in (TRAIN_FILE, EVAL_FILE)}
    if missing := [name for name, path in rows.items() if not path.is_file()]:
        raise ConfigError(f"--data {data} has no {missing[0]}; pass an output of dapo prepare-data")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    for name, path in rows.items():
        write_rows(path, folder / name)


def _nodes(config: ChainConfig) -> int:
    """The smallest number of nodes with equal device counts for the recipe."""
    is_a3 = (config.train.device_model or "").upper().endswith("A3")
    devices, per_node = config.num_devices, DEVICES_OF_A3 if is_a3 else DEVICES_OF_NODE
    nodes = -(-devices // per_node)
    return next(number for number in range(nodes, devices + 1) if devices % number == 0)
