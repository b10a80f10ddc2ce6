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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core.draw.prompts import (
    ABOUT_FILE,
    ROWS_FILE,
    Prompt,
    TokenizedPrompts,
    TooLong,
    treat_too_long,
)
from dapo_core.errors import ConfigError, DataError
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
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})  # for a chat template
FORMAT = 3  # of the file; increment it to tokenize again
BATCH_ROWS = 1000
NUM_BINS = 20  # of the histogram; the last bin has at most the longest 1 %
QUANTILES = (5, 25, 50, 75, 95, 99)

# concatenated token ids of several prompts, and the length of each
Tokens = tuple[np.ndarray, np.ndarray]


def tokenize_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    template_kwargs: Mapping[str, Any] = NO_ARGUMENTS,
) -> list[Prompt]:
    """Tokenize held-out problems with the chat template and its generation prompt.

    Raises DataError if any prompt is longer than `max_prompt_tokens`.
    """
    if not problems:
        return []
    datasets = {problem.dataset for problem in problems}
    ids, lengths = _encode(tokenizer, _render(tokenizer, problems, template_kwargs))
    treat_too_long(lengths, max_prompt_tokens, "error", "data.eval")
    prompt_ids = np.split(ids, np.cumsum(lengths)[:-1])
    return [
        Prompt(
            index=index,
            input=ModelInput(tuple(prompt_ids[index].tolist())),
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
        _tokenize_file(path, tokenizer, folder, template_kwargs)
    prompts = TokenizedPrompts(folder, data.max_prompt_tokens, data.too_long)
    lengths = describe_lengths(prompts.lengths, data.max_prompt_tokens, data.too_long)
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


def _tokenize_file(
    path: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, template_kwargs: Mapping[str, Any]
) -> None:
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
        for problems, (ids, lengths) in _encoded(batches, tokenizer, template_kwargs):
            names = [(problem.dataset, problem.weight) for problem in problems]
            columns: dict[str, list[Any]] = {
                "data_source": [str(problem.data_source) for problem in problems],
                "ground_truth": [problem.gold for problem in problems],
                "extra_info": [json.dumps(problem.extra_info) for problem in problems],
                "set": [sets.setdefault(name, len(sets)) for name in names],
            }
            digest.update(ids.tobytes() + lengths.tobytes() + json.dumps(columns).encode())
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
    batches: Iterator[list[Problem]],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
) -> Iterator[tuple[list[Problem], Tokens]]:
    """Yield each batch with its tokens, in order.

    A fast tokenizer uses all cores outside of Python; meanwhile the next batch is read and
    rendered.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as thread:
        previous: tuple[list[Problem], Future[Tokens]] | None = None
        for problems in batches:
            texts = _render(tokenizer, problems, template_kwargs)
            encoding = thread.submit(_encode, tokenizer, texts)
            if previous is not None:
                yield previous[0], previous[1].result()
            previous = problems, encoding
        if previous is not None:
            yield previous[0], previous[1].result()


def _render(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    template_kwargs: Mapping[str, Any],
) -> list[str]:
    """Render prompts as text. Raises DataError if the chat template rejects one."""
    from jinja2 import TemplateError

    chats = [[dict(message) for message in problem.messages or ()] for problem in problems]
    try:
        render: Any = tokenizer.apply_chat_template
        return render(chats, add_generation_prompt=True, tokenize=False, **template_kwargs)
    except TemplateError as error:
        roles = sorted({" ".join(message["role"] for message in chat) for chat in chats})
        raise DataError(
            f"the model's chat template rejects messages with these roles ({'; '.join(roles)}): "
            f"{error}. Change the prompts or data.system_prompt, or set model.chat_template to a "
            "template that accepts them"
        ) from None


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Tokens:
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids
    lengths = np.array([len(row) for row in ids], np.int32)
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32), lengths
