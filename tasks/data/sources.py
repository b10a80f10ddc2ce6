"""The sets that a recipe names: how their rows are read and asked, and what identifies them."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from dapo_core.errors import ConfigError
from downloads import OnProgress, Snapshot, Unreachable, is_remote
from eval.problems import ProblemsError
from eval.problems.files import columns_of, files_of, find_schema
from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet, Split
from eval.problems.prompts import DEFAULT
from eval.problems.registry import OWN, SETS, find_set
from eval.problems.rows import Row, Schema, Unusable, chat_of, needed, problem_of, text_of
from eval.problems.sources import fetch, rows_of
from tasks.artifacts.artifact import canonical_json, sha256_of
from tasks.artifacts.references import log_earlier, resolve_once
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.config.data import ColumnsConfig, SetConfig
from tasks.data.asking import Asking, find_asking

ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Source:
    """One set of data.train, data.eval or evaluate.benchmarks."""

    key: str  # the configuration's name of it
    name: str  # in metrics, reports and the data card
    split: Split
    known: ProblemSet  # how its rows are read, scored and graded
    reference: str | None  # where it is fetched; None for local files and generated problems
    path: Path | None
    weight: float
    asking: Asking
    is_one_of_several: bool
    benchmark: str | None = None  # its name in evaluate.benchmarks, where it has a file of its own

    @property
    def is_generated(self) -> bool:
        """True for problems made by code."""
        return self.known.name == ARITHMETIC and self.path is None

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The forms its rows may have, with the columns that the prompt names."""
        return tuple(
            dataclasses.replace(schema, others=(*schema.others, *self.asking.columns))
            for schema in self.known.schemas
        )

    @property
    def data_source(self) -> str:
        """What chooses the scorer of rows that name none themselves."""
        return self.known.name if self.known.name in SETS else self.known.scorer

    def settings(self) -> str:
        """A digest of everything but its content that decides its prepared rows."""
        known = {"scorer": self.known.scorer, "schemas": [schema.columns for schema in self.known.schemas]}
        facts = {
            "name": self.name,
            "weight": self.weight,
            "known": known,
            "asking": dataclasses.asdict(self.asking),
        }
        return hashlib.sha256(
            canonical_json({**facts, "reference": self.reference, "several": self.is_one_of_several})
        ).hexdigest()

    def content(self) -> str:
        """A digest of its files, or "" if generated. Raises ConfigError, ProblemsError and DownloadError."""
        if self.path is not None:
            return files_digest(self.key, self.path)
        return "" if self.reference is None else str(self.snapshot().commit)

    def snapshot(self) -> Snapshot:
        """The files of a remote set, asked for once a run. Raises ProblemsError and DownloadError."""
        return rows_of(str(self.reference), self.split, resolve_once)

    def check_columns(self) -> None:
        """Raise ProblemsError for a local file that is missing, cannot be read or lacks columns."""
        if self.path is not None:
            find_schema(self.path, columns_of(self.path), self.schemas)

    def origin(self) -> str:
        """Where its rows are from, with the commit of a hub."""
        if self.reference is not None:
            return f"{self.reference}, commit {self.snapshot().commit}"
        return "generated" if self.path is None else str(self.path)

    def files(self) -> dict[str, str]:
        """sha256 of its files by name, as far as their hub says it; none of generated problems."""
        if self.reference is not None:
            return {file.path: file.sha256 or "unknown" for file in self.snapshot().files}
        if self.path is None:
            return {}
        root = self.path if self.path.is_dir() else self.path.parent
        return {str(file.relative_to(root)): sha256_of(file) for file in files_of(self.path)}

    def local(self, cache: Path, on_progress: OnProgress | None = None) -> Path:
        """Its file or folder, fetched into `cache` if it is remote. Raises ProblemsError and DownloadError."""
        return self.path or fetch(str(self.reference), cache, self.split, on_progress)


def train_sources(config: ChainConfig) -> list[Source]:
    """The sets of data.train. Raises ProblemsError for a name or a prompt that is none."""
    return [_source(config, one, f"data.train.{number}", "train") for number, one in enumerate(config.data.train)]


def eval_sources(config: ChainConfig) -> list[Source]:
    """The sets of data.eval, which share a grader. Raises ProblemsError as `train_sources`."""
    sources = [_source(config, one, f"data.eval.{number}", "test") for number, one in enumerate(config.data.eval)]
    if len({source.known.grader for source in sources}) > 1:
        graders = ", ".join(f"{source.name}: {source.known.grader}" for source in sources)
        raise ProblemsError(f"data.eval names sets of several graders ({graders}); an evaluation has one")
    return sources


def benchmark_sources(config: ChainConfig) -> dict[str, Source]:
    """The sets of evaluate.benchmarks by the benchmarks' names. Raises ProblemsError as `train_sources`.

    Keys of `data` hold as for data.eval, but data.columns only for rows of the user's own, and
    data.prompt_template only where no `prompt` says how the benchmark is asked.
    """
    found = {}
    for one in config.evaluate.benchmarks:
        columns = one.columns or (ColumnsConfig() if one.set in SETS else config.data.columns)
        is_asked_otherwise = config.evaluate.of(one).prompt != DEFAULT
        template = DEFAULT if is_asked_otherwise else config.data.prompt_template
        given = SetConfig(set=one.set, path=one.path, columns=columns, prompt_template=template)
        found[one.label] = _source(config, given, f"evaluate.benchmarks.{one.label}", "test", one.label)
    return found


def all_sources(config: ChainConfig) -> list[Source]:
    """The sets of a recipe: to train on, to validate with, and its benchmarks."""
    return [*train_sources(config), *eval_sources(config), *benchmark_sources(config).values()]


def source_files(config: ChainConfig) -> dict[str, str]:
    """What identifies each set of the recipe: its settings and its content; nothing is read of generated problems.

    Where a hub cannot be reached, the content is that of the newest artifact made of the same set. Raises
    ConfigError, ProblemsError and DownloadError.
    """
    inputs: dict[str, str] = {}
    for source in all_sources(config):
        inputs[source.key] = source.settings()
        try:
            inputs[f"{source.key} content"] = source.content()
        except Unreachable as error:
            inputs[f"{source.key} content"] = _earlier_content(config.store.path, inputs[source.key], error)
    return inputs


def _earlier_content(store_path: str, settings: str, reason: Unreachable) -> str:
    """The content of the newest artifact with the same set; raises `reason` when the store has none."""
    for _, manifest in ArtifactStore(store_path).finished("prepare_data"):
        inputs = manifest["inputs"]
        if (place := next((name for name, value in inputs.items() if value == settings), None)) is not None:
            log_earlier(reason, inputs[f"{place} content"], manifest["ended_at"])
            return str(inputs[f"{place} content"])
    raise reason


def describe_sources(config: ChainConfig) -> str:
    """What preparation would fetch; "" where all is here."""
    described = []
    for source in {source.reference: source for source in all_sources(config)}.values():
        if source.reference is None:
            continue
        try:
            snapshot = source.snapshot()
        except Unreachable as error:
            described.append(f"would fetch {source.reference}, which cannot be resolved now: {error}")
            continue
        size = "" if snapshot.num_bytes is None else f", {decimal(snapshot.num_bytes)}"
        described.append(f"fetches {source.reference} at {snapshot.commit[:12]}{size}")
    return "; ".join(described)


def files_digest(key: str, path: Path) -> str:
    """sha256 of a file, or of the names and contents of a folder's files."""
    try:
        files = files_of(path)
        if files == [path]:
            return sha256_of(path)
        listed = [(str(file.relative_to(path)), sha256_of(file)) for file in files]
        return hashlib.sha256(repr(listed).encode()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error.strerror}") from None
    except ProblemsError as error:
        raise ConfigError(f"{key}: {error}") from None


def _source(config: ChainConfig, given: SetConfig, key: str, split: Split, alone: str | None = None) -> Source:
    """The source of a set; `alone` is its name in evaluate.benchmarks."""
    one = config.data.of(given)
    assert one.columns is not None
    path, reference = None, None
    if one.path is not None and is_remote(one.path):
        reference = one.path
    elif one.path is not None:
        path = Path(one.path)
    if one.set in SETS:
        known, name = SETS[one.set], one.set
        if one.path is None and name != ARITHMETIC:
            reference = known.source(split, config.data.hub)
    else:
        if one.path is not None:
            raise ProblemsError(
                f"{key}.path is for registered sets; {one.set!r} is none (dapo datasets lists them)"
            )
        known = OWN
        if is_remote(one.set):
            reference, name = one.set, one.set.partition("#")[0]
        else:
            path = Path(one.set)
            if not path.suffix and not path.exists():
                find_set(one.set)  # a mistyped name
            name = path.name
    if one.columns.is_set:
        known = dataclasses.replace(known, schemas=(mapped_schema(one.columns),))
    asking = find_asking(one.prompt_template or DEFAULT, one.system_prompt, known.template, one.columns)
    several = alone is None and len(config.data.train if split == "train" else config.data.eval) > 1
    return Source(key, name, split, known, reference, path, one.weight, asking, several, alone)


def mapped_schema(columns: ColumnsConfig) -> Schema:
    """The form of rows with the user's own column names."""
    given = {name: value for name, value in dict(columns).items() if value is not None}
    asked = given.get("messages") or given["problem"]

    def read(row: Row) -> Problem:
        messages = chat_of(row[asked]) if "messages" in given else None
        if "messages" in given and messages is None:
            raise Unusable(f"no chat messages in {asked}")
        text = messages[-1]["content"] if messages else needed(text_of(row, asked), f"no {asked}")
        usual = {"id": "id", "subject": "subject", "level": "level", "data_source": "data_source"}
        details = {name: row.get(given[column]) for name, column in usual.items() if column in given}
        gold = needed(text_of(row, given["answer"]), f"no {given['answer']}").strip()
        return problem_of(details, text, gold, messages=messages)

    return Schema((asked, given["answer"]), read, tuple(given.values()))
