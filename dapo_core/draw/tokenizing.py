"""Tokenizes problems once, on all cores, into a file that training maps into memory."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core.draw.encoding import NO_ARGUMENTS, PromptEncoder, Tokens
from dapo_core.draw.prompts import (
    ABOUT_FILE,
    ROWS_FILE,
    SMALLER,
    Prompt,
    TokenizedPrompts,
    TooLong,
    treat_too_long,
)
from dapo_core.errors import ConfigError
from dapo_core.machine.digests import file_digest
from dapo_core.model.folder import model_files
from dapo_core.model.inputs import ModelInput
from durable import publish, write_atomically
from eval.problems.files import files_of, iterate_problems, refuse_faults
from eval.problems.rows import CHAT, Unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import PromptsConfig
    from eval.problems.items import Problem

logger = logging.getLogger(__name__)

PROMPTS_FOLDER = ".prompts"  # in the training output; removed when training ends
LENGTHS_FILE = "prompt_lengths.json"
FORMAT = 4  # of the file; increment it to tokenize again
BATCH_ROWS = 1000
NUM_BINS = 20  # of the histogram; the last bin has at most the longest 1 %
QUANTILES = (5, 25, 50, 75, 95, 99)


def tokenize_prompts(
    problems: Sequence[Problem], encoder: PromptEncoder, max_prompt_tokens: int
) -> list[Prompt]:
    """Tokenize held-out problems with the chat template and its generation prompt.

    Raises DataError if any prompt is longer than `max_prompt_tokens`.
    """
    if not problems:
        return []
    datasets = {problem.dataset for problem in problems}
    ids, lengths, images = encoder.encode(problems, encoder.render(problems))
    advice = SMALLER if any(images) else ""
    treat_too_long(lengths, max_prompt_tokens, "error", "data.eval", advice)
    prompt_ids = np.split(ids, np.cumsum(lengths)[:-1])
    return [
        Prompt(
            index=index,
            input=ModelInput(tuple(prompt_ids[index].tolist()), images[index]),
            data_source=str(problem.data_source),
            ground_truth=problem.gold,
            extra_info=json.loads(json.dumps(problem.extra_info)),
            dataset=problem.dataset if len(datasets) > 1 else "",
        )
        for index, problem in enumerate(problems)
    ]


def tokenized_prompts(
    path: Path,
    model_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    data: PromptsConfig,
    template_kwargs: Mapping[str, Any] = NO_ARGUMENTS,
) -> TokenizedPrompts:
    """Return the tokenized prompts of a training file, reusing those of an earlier attempt.

    Needs memory for a few batches and one number per row. Also writes prompt_lengths.json to
    `output_dir`. Raises ProblemsError for a file that cannot be read or has unusable rows,
    DataError for prompts that are too long, ConfigError for a chat template argument that the
    template does not read.
    """
    require_template_reads(tokenizer, template_kwargs)
    folder = output_dir / PROMPTS_FOLDER / _key(path, model_path, template_kwargs)[:16]
    if not folder.exists():
        remove_prompts(output_dir)
        encoder = PromptEncoder(tokenizer, model_path, path.parent, template_kwargs)
        _tokenize_file(path, encoder, folder)
    prompts = TokenizedPrompts(folder, path.parent, data.max_prompt_tokens, data.too_long)
    lengths = describe_lengths(prompts.lengths, data.max_prompt_tokens, data.too_long)
    if counts := prompts.image_lengths:
        lengths |= {"num_pictures": len(counts), "max_picture": max(counts)}
        lengths["mean_picture"] = statistics.fmean(counts)
    write_atomically(output_dir / LENGTHS_FILE, json.dumps(lengths, indent=2) + "\n")
    return prompts


def remove_prompts(output_dir: Path) -> None:
    """Delete a training's tokenized prompts; processes that have them mapped can keep reading."""
    shutil.rmtree(output_dir / PROMPTS_FOLDER, ignore_errors=True)


def describe_lengths(
    lengths: np.ndarray, max_prompt_tokens: int, too_long: TooLong
) -> dict[str, Any]:
    """Return statistics of prompt lengths for the data card.

    `counts[i]` prompts have `edges[i]` to `edges[i + 1]` - 1 tokens.
    """
    quantiles = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    width = quantiles[-1] // (NUM_BINS - 1) + 1
    counts = np.bincount(np.minimum(lengths // width, NUM_BINS - 1))
    last_edge = max(width * len(counts), int(lengths.max()) + 1)
    return {
        "num_prompts": len(lengths),
        "mean": float(lengths.mean()),
        "quantiles": dict(zip(map(str, QUANTILES), quantiles, strict=True)),
        "max": int(lengths.max()),
        "max_prompt_tokens": max_prompt_tokens,
        "too_long": too_long,
        "num_too_long": int((lengths > max_prompt_tokens).sum()),
        "edges": [*range(0, width * len(counts), width), last_edge],
        "counts": counts.tolist(),
    }


def require_template_reads(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    key: str = "rollout.chat_template_kwargs",
) -> None:
    """Raise ConfigError for an argument that the model's chat template does not read."""
    if not template_kwargs:
        return
    words = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.get_chat_template())))
    for name in sorted(template_kwargs.keys() - words):
        near = difflib.get_close_matches(name, words, n=1)
        raise ConfigError(
            f"{key}.{name} has no effect: the model's chat template does not read it"
            + (f" (did you mean {near[0]}?)" if near else "; remove it")
        )


def _key(path: Path, model_path: Path, template_kwargs: Mapping[str, Any]) -> str:
    """Return a digest of what the tokens depend on: rows and the model's other files."""
    parts: list[Any] = [FORMAT, *map(metadata.version, ("transformers", "tokenizers"))]
    parts.append(dict(template_kwargs))
    parts += map(file_digest, files_of(path))
    parts += [(str(f.relative_to(model_path)), file_digest(f)) for f in model_files(model_path)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tokenize_file(path: Path, encoder: PromptEncoder, folder: Path) -> None:
    """Write the folder that TokenizedPrompts reads, with BATCH_ROWS rows per batch."""
    import pyarrow as pa

    started = time.monotonic()
    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True)
    digest, data_sources, num_rows = hashlib.sha256(), set[str](), 0
    sets: dict[tuple[str, float], int] = {}  # name and weight -> number
    with pa.OSFile(str(partial / ROWS_FILE), "wb") as sink, contextlib.ExitStack() as stack:
        writer = None
        batches = _batches(_problems(path))
        for problems, (ids, lengths, images) in _encoded(batches, encoder):
            names = [(problem.dataset, problem.weight) for problem in problems]
            columns: dict[str, list[Any]] = {
                "data_source": [str(problem.data_source) for problem in problems],
                "ground_truth": [problem.gold for problem in problems],
                "extra_info": [json.dumps(problem.extra_info) for problem in problems],
                "set": [sets.setdefault(name, len(sets)) for name in names],
            }
            digest.update(ids.tobytes() + lengths.tobytes() + json.dumps(columns).encode())
            columns["images"] = [
                json.dumps([(name, one.grid_thw, one.first, one.num_tokens) for name, one in pairs])
                for pairs in map(zip, (problem.images for problem in problems), images)
            ]
            if any(images):
                digest.update(json.dumps(columns["images"]).encode())
            prompt_ids = pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), ids)
            batch = pa.RecordBatch.from_pydict({"prompt_ids": prompt_ids, **columns})
            writer = writer or stack.enter_context(pa.ipc.new_file(sink, batch.schema))
            writer.write_batch(batch)
            data_sources |= set(columns["data_source"])
            num_rows += len(problems)
    digest.update(json.dumps(list(sets)).encode())
    about = {"digest": digest.hexdigest(), "data_sources": sorted(data_sources), "sets": list(sets)}
    (partial / ABOUT_FILE).write_text(json.dumps(about), encoding="utf-8")
    publish(partial, folder)
    logger.info("%d prompts tokenized in %.1f s", num_rows, time.monotonic() - started)


def _problems(path: Path) -> Iterator[Problem]:
    """Yield the problems of a file. Raises ProblemsError at the end if rows were unusable."""
    faults: dict[str, list[int]] = {}
    number = 0
    for number, _, problem in iterate_problems(path, (CHAT,)):
        if isinstance(problem, Unusable):
            faults.setdefault(str(problem), []).append(number)
        else:
            yield problem
    refuse_faults(path, faults, number + 1)


def _batches(problems: Iterator[Problem]) -> Iterator[list[Problem]]:
    while batch := list(itertools.islice(problems, BATCH_ROWS)):
        yield batch


def _encoded(
    batches: Iterator[list[Problem]], encoder: PromptEncoder
) -> Iterator[tuple[list[Problem], Tokens]]:
    """Yield each batch with its tokens, in order.

    A fast tokenizer uses all cores outside of Python; meanwhile the next batch is read and
    rendered.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as thread:
        previous: tuple[list[Problem], Future[Tokens]] | None = None
        for problems in batches:
            texts = encoder.render(problems)
            encoding = thread.submit(encoder.encode, problems, texts)
            if previous is not None:
                yield previous[0], previous[1].result()
            previous = problems, encoding
        if previous is not None:
            yield previous[0], previous[1].result()
