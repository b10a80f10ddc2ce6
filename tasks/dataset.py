"""The training and held-out files of a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.arithmetic import DATA_SOURCE, generate_problems, write_parquet
from dapo_core.reward.routing import require_scorers
from eval.problems.benchmarks import TRAINING, load_set
from eval.problems.files import read_problems
from tasks.config import ChainConfig
from tasks.stages import EVAL_STEM, TRAIN_FILE


def build_dataset(config: ChainConfig, folder: Path) -> Mapping[str, Any]:
    """Write the two files into the folder; returns their row counts.

    Raises DataError or ProblemsError for unusable rows of the user's files, and what require_scorers raises,
    before anything is written.
    """
    if config.data.source == "path":
        return _take_files(config, Path(str(config.data.train_path)), Path(str(config.data.eval_path)), folder)
    require_scorers({DATA_SOURCE}, config.reward, config.custom_reward)
    sizes = config.data.arithmetic
    seed = config.run.seed if sizes.seed is None else sizes.seed
    train_rows, eval_rows = generate_problems(sizes.num_train, sizes.num_eval, sizes.max_level, seed)
    write_parquet(train_rows, folder / TRAIN_FILE)
    write_parquet(eval_rows, folder / f"{EVAL_STEM}.parquet")
    return {"train_rows": len(train_rows), "eval_rows": len(eval_rows)}


def _take_files(config: ChainConfig, train: Path, held_out: Path, folder: Path) -> Mapping[str, Any]:
    problems = read_problems(train, (TRAINING,))
    require_scorers({str(problem.data_source) for problem in problems}, config.reward, config.custom_reward)
    counts = {"train_rows": len(problems), "eval_rows": len(load_set(held_out, config.evaluate.benchmark).items)}
    shutil.copyfile(train, folder / TRAIN_FILE)
    shutil.copyfile(held_out, (folder / EVAL_STEM).with_suffix(held_out.suffix))
    return counts
