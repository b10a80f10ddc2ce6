"""Converts configurations of other trainers to recipes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from interop.account import Account, account_of
from interop.foreign_config import Setting, by_name
from interop.read import Reading, read_files, rows_of
from interop.recipe import Recipe, recipe_of, tiny_of, written
from tasks.config import ChainConfig
from tasks.recipes.first_recipe import Machine

ROWS = "num_train_rows"
ENOUGH_ROWS = 1_000_000  # enough for any batch; --tiny sets its own steps
MEASURED_ON = "math500"
TRUNCATING = ("rollout.top_p", "rollout.top_k")


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
    """Read the files and account for each setting. `run.sh#2` is the second training in a script.

    Raises ConfigError for unreadable files and missing information.
    """
    rows = given.pop(ROWS, None)
    chosen = re.fullmatch(r"(.+)#(\d+)", str(files[0]))
    paths = [Path(chosen[1]), *files[1:]] if chosen and not files[0].exists() else list(files)
    try:
        place = int(chosen[2]) if chosen and paths != list(files) else None
        reading = read_files(paths, given, place, Machine.this().kind == "npu")
        num_rows = num_rows_of(reading.settings) if rows is None else _positive(rows)
        num_rows = num_rows or (ENOUGH_ROWS if is_tiny else None)
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


def recipe_from(account: Account, is_tiny: bool) -> Recipe:
    """The recipe for an account, or a tiny one that trains in minutes on a CPU."""
    defaults = default_keys()
    recipe = recipe_of(account, defaults)
    cut = [key for key in TRUNCATING if recipe.values.get(key, defaults[key]) != defaults[key]]
    if cut:
        recipe.values["sampler.max_staleness"] = 0
        recipe.comments["sampler.max_staleness"] = (
            f"{account.trainer} samples nothing ahead; required here with {' and '.join(cut)}"
        )
    if is_tiny:
        return tiny_of(recipe)
    recipe.sort(defaults)
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
