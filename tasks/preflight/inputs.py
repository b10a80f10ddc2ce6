"""What of a recipe's model and data can be looked at: files of the user's now, all else once it was fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.problems.benchmarks import TRAINING, load_set
from eval.problems.files import read_problems
from tasks.config import ChainConfig
from tasks.fetched_model import model_name
from tasks.preflight.finding import Findings
from tasks.stages import TRAIN_FILE, eval_file

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet, Problem
    from tasks.artifacts.artifact import Artifact

MAX_FILE_BYTES = 64 * 1024**2  # reading more takes longer than a second; prepare-data reads it


@dataclass
class Inputs:
    """The model's folder and the problems, where they are here; `later` names what is not."""

    model: Path | None = None
    problems: Sequence[Problem] = ()
    evaluation: EvaluationSet | None = None
    later: tuple[str, ...] = ()


def inputs_here(config: ChainConfig, findings: Findings) -> Inputs:
    """What the recipe names as local files. Rows that cannot be used are a finding; after one, none are read."""
    inputs = Inputs()
    later = []
    if config.model.source == "path":
        inputs.model = Path(str(config.model.path))
    elif config.model.source != "recipe":
        later.append(f"the model {model_name(config.model)}")
        inputs.later = tuple(later)
    if findings or config.data.source != "path":  # generated, and so is the model of a recipe: made to fit
        return inputs
    train, held_out = Path(str(config.data.train_path)), Path(str(config.data.eval_path))
    if _is_large(train):
        later.append(f"the rows of {train}")
    else:
        with findings.catching("training set"):
            inputs.problems = read_problems(train, (TRAINING,))
    with findings.catching("evaluation set"):
        evaluate = config.evaluate
        inputs.evaluation = load_set(held_out, evaluate.benchmark, evaluate.prompt, evaluate.api)
    inputs.later = tuple(later)
    return inputs


def inputs_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> Inputs:
    """What the first two stages have put into the store."""
    evaluate = config.evaluate
    return Inputs(
        Path(model.path),
        read_problems(Path(data.path) / TRAIN_FILE, (TRAINING,)),
        load_set(eval_file(data), evaluate.benchmark, evaluate.prompt, evaluate.api),
    )


def _is_large(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > MAX_FILE_BYTES
