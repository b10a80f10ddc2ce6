"""The training and held-out files of a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.arithmetic import generate_problems, write_parquet
from dapo_core.config import Config
from dapo_core.data import read_rows
from eval.benchmark import load_items
from tasks.stages import EVAL_STEM, TRAIN_FILE


def build_dataset(config: Config, folder: Path) -> Mapping[str, Any]:
    """Write the two files into the folder; returns their row counts. Raises DataError for unusable rows."""
    train, held_out = folder / TRAIN_FILE, folder / f"{EVAL_STEM}.parquet"
    if config.data.source == "arithmetic":
        sizes = config.data.arithmetic
        rows = generate_problems(sizes.num_train, sizes.num_eval, sizes.max_level, config.run.seed)
        write_parquet(rows[0], train)
        write_parquet(rows[1], held_out)
    else:
        held_out = held_out.with_suffix(Path(str(config.data.eval_path)).suffix)
        shutil.copyfile(str(config.data.train_path), train)
        shutil.copyfile(str(config.data.eval_path), held_out)
    return {"train_rows": len(read_rows(train)), "eval_rows": len(load_items(held_out))}
