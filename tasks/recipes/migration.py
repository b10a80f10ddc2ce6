"""Another trainer's configuration as a recipe, and a recipe as a launch of another trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_core.config.loading import overridden, read_tree
from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError
from interop.account import Account, account_of
from interop.errors import ForeignConfigError
from interop.export import by_name
from interop.read import Reading, read_files, rows_of
from interop.recipe import Recipe, recipe_of, tiny_of, written
from interop.render.rows import write_rows
from interop.render.trainers import render
from interop.render.verl import Launch, Places
from interop.theirs import Setting
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE

ROWS = "num_train_rows"
ENOUGH_ROWS = 1_000_000  # for any batch: --tiny has steps of its own
MEASURED_ON = "math500"


def default_keys() -> dict[str, Any]:
    """Our defaults by name."""
    required = {"data": {"train": "arithmetic", "eval": "arithmetic"}, "model": {"source": "recipe"}}
    return by_name(ChainConfig.model_validate(required).model_dump(mode="json"))


def account_of_files(
    files: Sequence[Path], given: dict[str, str], version: str | None, is_tiny: bool
) -> tuple[Reading, Account]:
    """What the files say, and the account of it. `run.sh#2` names the second training of a script.

    Raises ConfigError for files that cannot be read, and for what has to be given first.
    """
    rows = given.pop(ROWS, None)
    chosen = re.fullmatch(r"(.+)#(\d+)", str(files[0]))
    paths = [Path(chosen[1]), *files[1:]] if chosen and not files[0].exists() else list(files)
    try:
        reading = read_files(paths, given, int(chosen[2]) if chosen and paths != list(files) else None)
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
        raise ConfigError(f"--set-env {ROWS}={rows}: the rows of the training files are a number, such as 17917")
    return int(rows)


def num_rows_of(settings: Sequence[Setting]) -> int | None:
    """The rows of the training files, where they are Parquet files on this machine; None where one is not."""
    import pyarrow.parquet

    paths = [Path(path).expanduser() for path in rows_of(settings)]
    if not paths or not all(path.is_file() and path.suffix == ".parquet" for path in paths):
        return None
    try:
        return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{paths[0]} is no Parquet file: {error}; name the rows with --set-env num_train_rows=N"
        ) from None


def recipe_from(account: Account, backend: str, env: Mapping[str, str], is_tiny: bool) -> Recipe:
    """The keys of an account for the trainer that will train; tiny ones train with our core.

    Raises ConfigError where that is neither our core nor the trainer of the keys.
    """
    if backend not in ("own", account.trainer):
        raise ConfigError(
            f"--backend {backend}: the keys are {account.trainer}'s, and {backend} reads others: "
            f"--backend {account.trainer} has it train, no --backend our core"
        )
    defaults = default_keys()
    if is_tiny:
        return tiny_of(recipe_of(account, defaults))
    recipe = recipe_of(account, defaults, backend, env)
    if account.trainer != "verl" and "data.eval" not in recipe.values:
        recipe.values["data.eval"] = MEASURED_ON
        recipe.comments["data.eval"] = "MindSpeed measures on nothing: this import's choice, change it"
    return recipe


def write_recipe(recipe: Recipe, path: Path, header: Sequence[str]) -> None:
    """Write the recipe as commented YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(recipe, header), encoding="utf-8")


DEVICES_OF_NODE, DEVICES_OF_A3 = 8, 16


def launch_of(
    trainer: str, config: ChainConfig, folder: Path, version: str | None, model: Path | None, nodes: int | None
) -> Launch:
    """The start of a trainer with its files in `folder`. Raises ConfigError for what it cannot do."""
    tree = config.model_dump(mode="json")
    tree["external"] = {**tree.get("external", {}), "num_nodes": nodes or _nodes(config)}
    named = model or config.model.path or config.model.id
    if named is None:
        raise ConfigError(
            f"model.source={config.model.source} has no folder yet; name the output of "
            "dapo fetch-model with --model"
        )
    places = Places(folder, Path(named), folder / TRAIN_FILE, folder / EVAL_FILE, folder / "checkpoints")
    try:
        launch = render(trainer, tree, places, version)
    except ForeignConfigError as error:
        raise ConfigError(str(error)) from error
    own = {name: str(value) for name, value in config.external.env.items()}
    return replace(launch, env={**launch.env, **own})


def unsaid_keys(path: Path, changes: Sequence[str], launch: Launch) -> list[str]:
    """The keys of training that a recipe's file or its changes (`key=value`) set and a launch does not say."""
    sections = TrainingConfig.model_fields.keys() - {"run"}
    leaves = [
        name
        for name, value in by_name(overridden(read_tree(path), changes)).items()
        if not isinstance(value, Mapping)
    ]
    of_plan = {"train.device_model"}  # which only our memory plan reads
    return [name for name in leaves if name.partition(".")[0] in sections and name not in launch.said | of_plan]


def write_launch(launch: Launch, folder: Path, texts: Mapping[str, str], data: Path | None) -> None:
    """Write the launch's files, the texts, and the rows of a prepare-data output.

    Raises ConfigError, before anything is written, for a file that is there with another content: somebody's edit.
    """
    files = {folder / name: text for name, text in {**launch.files, **texts}.items()}
    edited = [path.name for path, text in files.items() if path.exists() and path.read_text("utf-8") != text]
    if edited:
        raise ConfigError(
            f"{folder} has {', '.join(edited)} with another content; name another --output, or remove the folder"
        )
    rows = {} if data is None else {name: data / name for name in (TRAIN_FILE, EVAL_FILE)}
    if missing := [name for name, path in rows.items() if not path.is_file()]:
        raise ConfigError(f"--data {data} has no {missing[0]}; name an output of dapo prepare-data")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    for name, path in rows.items():
        write_rows(path, folder / name)


def _nodes(config: ChainConfig) -> int:
    """Nodes that the devices of a recipe fill, each with as many."""
    is_a3 = (config.train.device_model or "").upper().endswith("A3")
    devices, per_node = config.num_devices, DEVICES_OF_A3 if is_a3 else DEVICES_OF_NODE
    nodes = -(-devices // per_node)
    return next(number for number in range(nodes, devices + 1) if devices % number == 0)
