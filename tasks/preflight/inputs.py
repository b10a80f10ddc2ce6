"""What of a recipe's model and data can be looked at: files of the user's now, all else once it was fetched."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.problems.files import read_problems
from eval.problems.registry import load_set
from eval.problems.rows import CHAT
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE
from tasks.data.prepare import write_held_out
from tasks.data.reading import read_source
from tasks.data.sources import eval_sources, train_sources
from tasks.fetched_model import model_name
from tasks.preflight.finding import Findings

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
    sources = train_sources(config)
    if findings or all(source.is_generated for source in sources):  # as is the model of a recipe: made to fit
        return inputs
    for source in sources:
        if source.is_generated:
            continue
        if source.path is None or _is_large(source.path):
            later.append(f"the rows of {source.name}")
            continue
        with findings.catching("training set"):
            inputs.problems = [*inputs.problems, *read_source(config, source)]
    if held_out := [source.name for source in eval_sources(config) if not (source.path or source.is_generated)]:
        later.append(f"the rows of {', '.join(held_out)}")
    else:
        with findings.catching("evaluation set"), tempfile.TemporaryDirectory() as folder:
            write_held_out(config, Path(folder) / EVAL_FILE)
            inputs.evaluation = _evaluation_set(config, Path(folder))
    inputs.later = tuple(later)
    return inputs


def inputs_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> Inputs:
    """What the first two stages have put into the store."""
    folder = Path(data.path)
    return Inputs(Path(model.path), read_problems(folder / TRAIN_FILE, (CHAT,)), _evaluation_set(config, folder))


def _evaluation_set(config: ChainConfig, folder: Path) -> EvaluationSet:
    asked = config.evaluate
    return load_set(folder / EVAL_FILE, None, asked.prompt, asked.api, asked.system_prompt)


def _is_large(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > MAX_FILE_BYTES
