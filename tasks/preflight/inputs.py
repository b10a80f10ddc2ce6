"""Read a recipe's inputs for its checks: local files before a run, the others once fetched."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import DataError, counted
from dapo_core.model.lora import full_model
from eval.problems.files import read_problems
from eval.problems.items import Problem
from eval.problems.pictures import PictureStore, is_remote
from eval.problems.rows import CHAT
from tasks.config import ChainConfig
from tasks.config.evaluate import BenchmarkConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.data.prepare import held_out_files, read_prepared, write_held_out
from tasks.data.reading import read_source
from tasks.data.sources import Source, benchmark_sources, eval_sources, train_sources
from tasks.evaluation.settings import set_of
from tasks.fetched_model import model_name
from tasks.preflight.finding import Findings

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet
    from tasks.artifacts.artifact import Artifact

MAX_BYTES = 64 * 1024**2  # larger sets take more than a second to read; prepare-data reads them
NUM_FIRST = 1000  # problems of a larger set that are checked
NUM_PICTURED = 64  # problems of a set whose pictures are decoded before prepare-data decodes all


@dataclass
class Inputs:
    """The local model folder and problems; `later` names the inputs that are not local yet."""

    model: Path | None = None
    problems: Sequence[Problem] = ()
    evaluation: EvaluationSet | None = None  # data.eval
    benchmarks: Mapping[str, EvaluationSet] = field(default_factory=dict)  # by name
    later: tuple[str, ...] = ()
    held_out: Mapping[str, Sequence[Problem]] = field(default_factory=dict)  # by set
    pictured: Sequence[Problem] = ()  # training problems with pictures, before a run some of them
    folder: Path = Path()  # to which the names of their pictures are relative

    def evaluated(self, config: ChainConfig) -> list[tuple[BenchmarkConfig | None, EvaluationSet]]:
        """Return the local sets that will be evaluated: the benchmarks, else data.eval."""
        named = config.evaluate.named
        if not named:
            return [(None, self.evaluation)] if self.evaluation is not None else []
        return [(named[name], found) for name, found in self.benchmarks.items()]


@contextmanager
def inputs_here(config: ChainConfig, findings: Findings) -> Iterator[Inputs]:
    """Read the recipe's local files unless there are findings; unusable rows become findings.

    Pictures are in a folder that is deleted at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(later=inputs_later(config), folder=Path(folder))
        _read_local(inputs, config, findings)
        yield inputs


def _read_local(inputs: Inputs, config: ChainConfig, findings: Findings) -> None:
    if config.model.source == "path":
        with findings.catching("model"):
            inputs.model = full_model(str(config.model.path))
    sources = train_sources(config)
    if findings.failed or all(
        source.is_generated for source in sources
    ):  # those fit by construction
        return
    pictures = PictureStore(inputs.folder, config.data.image_max_pixels)
    for source in sources:
        if not source.is_generated and source.path is not None:
            most = NUM_FIRST if _is_read_later(source) else None
            with findings.catching("training set"):
                problems = read_source(config, source, most)
                inputs.problems = [*inputs.problems, *problems]
                inputs.pictured = [*inputs.pictured, *_pictured(problems, source, pictures)]
    with findings.catching("evaluation set"):
        written = []
        for name, held_out in held_out_files(config).items():
            if all(source.path or source.is_generated for source in held_out):
                written.append(inputs.folder / name)
                write_held_out(config, held_out, written[-1], pictures)
        _read_evaluated(inputs, config, inputs.folder)
        inputs.held_out = read_prepared(written)


def _pictured(problems: Sequence[Problem], source: Source, pictures: PictureStore) -> list[Problem]:
    """Return some of the problems with pictures, spread over the set, as prepare-data stores them.

    Pictures of web servers are left to prepare-data. Raises DataError if none of these problems is
    usable.
    """
    local = [one for one in problems if one.images and not any(map(is_remote, one.images))]
    tried = local[:: -(-len(local) // NUM_PICTURED) or 1]
    stored = [pictures.stored(problem, source.path) for problem in tried]
    usable = [one for one in stored if isinstance(one, Problem)]
    if tried and not usable:
        raise DataError(
            f"{source.name}: none of {counted(len(tried), 'problem')} with pictures can be used "
            f"(first: {stored[0]}); correct the rows or restore the files"
        )
    return usable


def inputs_later(config: ChainConfig) -> tuple[str, ...]:
    """Describe the model and the sets that cannot be read until the first two stages have run."""
    is_fetched = config.model.source not in ("path", "recipe")
    later = [f"the model {model_name(config.model)}"] if is_fetched else []
    for source in filter(_is_read_later, train_sources(config)):
        part = f" after the first {NUM_FIRST:,}" if source.path else ""
        later.append(f"the rows of {source.name}{part}")
    evaluated = [*eval_sources(config), *benchmark_sources(config).values()]
    remote = [source.name for source in evaluated if not (source.path or source.is_generated)]
    if remote:
        later.append(f"the rows of {', '.join(dict.fromkeys(remote))}")
    return tuple(later)


def inputs_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> Inputs:
    """Read the outputs of the first two stages."""
    folder = Path(data.path)
    problems = read_problems(folder / TRAIN_FILE, (CHAT,))
    pictured = [problem for problem in problems if problem.images]
    inputs = Inputs(Path(model.path), problems, pictured=pictured, folder=folder)
    _read_evaluated(inputs, config, folder)
    return inputs


def _read_evaluated(inputs: Inputs, config: ChainConfig, folder: Path) -> None:
    """Read the folder's prepared files for evaluation and validation."""
    if (folder / EVAL_FILE).is_file():
        inputs.evaluation = set_of(config.evaluate, folder / EVAL_FILE)
    inputs.benchmarks = {
        name: set_of(config.evaluate.of(one), folder / benchmark_file(name))
        for name, one in config.evaluate.named.items()
        if (folder / benchmark_file(name)).is_file()
    }


def _is_read_later(source: Source) -> bool:
    """True if only the first stages read all of the source: remote, or larger than MAX_BYTES."""
    if source.is_generated or source.path is None:
        return not source.is_generated
    files = source.path.rglob("*") if source.path.is_dir() else [source.path]
    return sum(file.stat().st_size for file in files if file.is_file()) > MAX_BYTES
