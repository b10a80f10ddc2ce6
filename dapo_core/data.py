"""Prompts: parquet in the DAPO-Math-17k schema or MATH-500's jsonl, tokenised; training's in a seeded order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core.errors import DataError, ModelError
from eval.answers.extraction import extract_boxed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
# How AISBench asks MATH-500 (task math_prm800k_500_0shot_cot_gen), and the final evaluation too.
MATH_PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
MATH_DATA_SOURCE = "math_dapo"


@dataclass(frozen=True)
class Prompt:
    """One problem as tokens.

    Example: Prompt(index=7, prompt_ids=(1, 52, 9), data_source="arithmetic", ground_truth="132")
    """

    index: int  # row in its file
    prompt_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the row's, in JSON types


def require_columns(path: str | Path, key: str = "data.train_path") -> None:
    """Raise DataError unless the file is a parquet with the columns that training needs; reads its end only.

    `key` is what the configuration calls the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}; check {key}") from None
    missing = [column for column in REQUIRED_COLUMNS if column not in names]
    if missing:
        raise DataError(
            f"{path} lacks the columns {', '.join(missing)} (it has {', '.join(names)}); "
            f"DAPO-Math-17k's schema has {', '.join(REQUIRED_COLUMNS)}: correct {key} or the file"
        )


def read_rows(path: str | Path, key: str = "data.train_path") -> list[dict[str, Any]]:
    """The rows of a training or evaluation parquet, every one checked; `key` is what the configuration calls it.

    Raises DataError for an unreadable file, missing columns, no rows, and rows without a prompt or a ground
    truth or with extra_info that is no JSON object (with their count and first row numbers; nothing is dropped).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    require_columns(path, key)
    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}; check {key}") from None
    if not rows:
        raise DataError(f"{path} has no rows; check {key}")
    _refuse_rows(
        path, rows, "an empty prompt or one that is not chat messages", [not _has_prompt(row) for row in rows]
    )
    _refuse_rows(path, rows, "no reward_model.ground_truth", [not _has_ground_truth(row) for row in rows])
    _refuse_rows(
        path,
        rows,
        "an extra_info that is not a struct of what JSON knows, which checkpoints are written in",
        [not _is_json_object(row.get("extra_info")) for row in rows],
    )
    return rows


def read_held_out(path: str | Path) -> list[dict[str, Any]]:
    r"""The rows of the held-out set in the training schema: of a parquet, or of a jsonl as MATH-500 is published.

    The latter's problems are asked for a \boxed{} answer and scored as `math_dapo`. The ground truth is the last
    box of `solution`, or `answer` where it has none. Raises DataError as read_rows does, for rows without a
    problem or any of the two, and for a file of another kind.
    """
    suffix = Path(path).suffix
    if suffix == ".parquet":
        return read_rows(path, "data.eval_path")
    if suffix == ".jsonl":
        return _read_math(Path(path))
    raise DataError(f"{path} ends in {suffix!r}; set data.eval_path to a .parquet or to MATH-500's .jsonl")


def _read_math(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}; check data.eval_path") from None
    values = [_json_object(line) for line in lines if line.strip()]
    if not values:
        raise DataError(f"{path} has no rows; check data.eval_path")
    _refuse_rows(path, values, "something else than a JSON object", [value is None for value in values])
    items = [value for value in values if value is not None]
    _refuse_rows(path, items, "no problem", [not str(item.get("problem") or "").strip() for item in items])
    rows = [_math_row(item) for item in items]
    _refuse_rows(
        path, rows, "neither an answer nor a boxed solution", [not _has_ground_truth(row) for row in rows]
    )
    return rows


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _math_row(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "data_source": MATH_DATA_SOURCE,
        "prompt": [{"role": "user", "content": MATH_PROMPT.format(problem=item.get("problem"))}],
        "reward_model": {"ground_truth": extract_boxed(str(item.get("solution") or "")) or item.get("answer")},
    }


def _has_prompt(row: dict[str, Any]) -> bool:
    messages = row["prompt"]
    return bool(messages) and all(
        isinstance(message, dict) and str(message.get("content") or "").strip() for message in messages
    )


def _has_ground_truth(row: dict[str, Any]) -> bool:
    reward_model = row["reward_model"]
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    return truth is not None and str(truth).strip() != ""


def _is_json_object(extra_info: Any) -> bool:
    if extra_info is None:
        return True
    try:
        json.dumps(extra_info)
    except (TypeError, ValueError):
        return False
    return isinstance(extra_info, dict)


def _refuse_rows(path: str | Path, rows: Sequence[Any], what: str, is_bad: list[bool]) -> None:
    bad = [number for number, flag in enumerate(is_bad) if flag]
    if bad:
        first = ", ".join(str(number) for number in bad[:5])
        raise DataError(
            f"{path}: {len(bad)} of {len(rows)} rows have {what} (rows {first}{', ...' if len(bad) > 5 else ''}); "
            "remove or mend them: a row that cannot be scored would silently change the dataset"
        )


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; raises ModelError when it has no chat template or cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_path} has no readable tokenizer: {error}; check model.path") from None
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer in {model_path} has no chat template; use an instruction-tuned model")
    return tokenizer


def tokenize_prompts(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    key: str = "data.train_path",
) -> list[Prompt]:
    """The rows as prompts, through the chat template with the generation prompt added.

    Raises DataError when a prompt is longer than `max_prompt_tokens`, with the count and the longest; `key` is
    what the configuration calls their file.
    """
    prompts = []
    for index, row in enumerate(rows):
        text = str(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False))
        prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
        prompts.append(
            Prompt(
                index=index,
                prompt_ids=tuple(prompt_ids),
                data_source=str(row["data_source"]),
                ground_truth=str(row["reward_model"]["ground_truth"]),
                extra_info=json.loads(json.dumps(row.get("extra_info") or {})),
            )
        )
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    num_long = sum(length > max_prompt_tokens for length in lengths)
    if num_long:
        raise DataError(
            f"{num_long} of {len(prompts)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(longest {max(lengths)} tokens); raise data.max_prompt_tokens, or shorten them in the file of {key}"
        )
    return prompts


class PromptStream:
    """An endless, seeded order of prompts whose position is the number of prompts taken.

    Each epoch has its own permutation, derived from (seed, epoch) alone, so a stream continued at position n
    gives exactly what the uninterrupted one gives from there.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.position = position

    @property
    def digest(self) -> str:
        """sha256 over everything that is known of the prompts, in the file's order."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    @property
    def epoch(self) -> float:
        """Epochs by prompts taken."""
        return self.position / len(self.prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; crosses epoch boundaries."""
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, start = divmod(self.position, len(self.prompts))
            rows = self._order(epoch)[start : start + count - len(taken)]
            taken += [self.prompts[int(row)] for row in rows]
            self.position += len(rows)
        return taken

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
