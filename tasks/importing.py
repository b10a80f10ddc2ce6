"""Another trainer's configuration as a recipe file, for the command `import-config`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from interop.account import Account, account_of
from interop.export import by_name
from interop.foreign_config import Setting
from interop.read import Reading, read_files, rows_of
from interop.recipe import Recipe, recipe_of, tiny_of, written
from tasks.config import ChainConfig

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
