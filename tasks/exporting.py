"""A recipe as a launch of another trainer, for the command `export-config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dapo_core.config.loading import overridden, read_tree
from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError
from interop import ForeignConfigError
from interop.export import by_name
from interop.render.launch import Launch, Places
from interop.render.trainers import render, write_rows
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE

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
    return [name for name in leaves if name.partition(".")[0] in sections and name not in launch.covered | of_plan]


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
