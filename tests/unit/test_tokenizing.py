"""Tokenized prompts: independent of how they are made, cached, and limited in length."""

import copy
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from dapo_core.config.training import PromptsConfig
from dapo_core.draw import tokenizing
from dapo_core.draw.encoding import NO_ARGUMENTS, PromptEncoder
from dapo_core.draw.prompts import Prompt, PromptStream, TokenizedPrompts, TooLong
from dapo_core.draw.tokenizing import (
    LENGTHS_FILE,
    describe_lengths,
    remove_prompts,
    tokenize_prompts,
    tokenized_prompts,
)
from dapo_core.errors import ConfigError, DataError
from dapo_core.model.inputs import ModelInput
from eval.problems import ProblemsError
from eval.problems.items import Problem
from tests.tiny_models import tiny_tokenizer

NUM_ROWS = 2500  # in three batches

Read = Callable[..., TokenizedPrompts]


def row_of(number: int, words: int = 1) -> dict[str, Any]:
    return {
        "data_source": ("math_dapo", "choice")[number % 2],
        "prompt": [{"role": "user", "content": "What is 1 + 1? " * words + str(number)}],
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": number, "answers": [1.5, None], "more": {"level": 3}},
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _problem(content: str = "What is 1 + 1?") -> Problem:
    return Problem(
        "7",
        content,
        "2",
        messages=({"role": "user", "content": content},),
        data_source="arithmetic",
    )


def _tokenized(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    template_kwargs: Mapping[str, Any] = NO_ARGUMENTS,
) -> list[Prompt]:
    encoder = PromptEncoder(tokenizer, Path(), Path(), template_kwargs)
    return tokenize_prompts(problems, encoder, max_prompt_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    return write_rows(path, [row_of(number, 1 + number % 7) for number in range(NUM_ROWS)])


@pytest.fixture
def prompts_of(model: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Read:
    def read(
        path: Path, max_prompt_tokens: int = 1000, too_long: TooLong = "error"
    ) -> TokenizedPrompts:
        data = PromptsConfig(max_prompt_tokens=max_prompt_tokens, too_long=too_long)
        return tokenized_prompts(path, model, tokenizer, tmp_path / "training", data)

    return read


def test_prompts_go_through_the_chat_template_with_their_extra_info(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    info = {"index": 7, "split": "train", "answers": [1.5, None], "more": {"level": 3}}
    problems = [replace(_problem(), extra_info=info), _problem()]
    prompt, without = _tokenized(problems, tokenizer, 100)
    assert (
        tokenizer.decode(list(prompt.input.token_ids))
        == "<|user|>\nWhat is 1 + 1?<|end|>\n<|assistant|>\n"
    )
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (0, "arithmetic", "2")
    assert (prompt.extra_info, without.extra_info) == (info, {})
    assert PromptStream([prompt], 0, False).digest != PromptStream([without], 0, False).digest
    assert _tokenized([], tokenizer, 100) == []


def test_too_long_held_out_prompts_are_refused_with_their_count(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    problems = [_problem("What is 1 + 1? " * count) for count in (1, 3, 9)]
    lengths = [len(prompt.input.token_ids) for prompt in _tokenized(problems, tokenizer, 10_000)]
    assert lengths == sorted(lengths)
    # the limit itself is allowed
    assert len(_tokenized(problems, tokenizer, lengths[2])) == 3
    expected = (
        rf"2 of 3 .* data\.max_prompt_tokens={lengths[0]} \(longest {lengths[2]} tok.*data\.eval$"
    )
    with pytest.raises(DataError, match=expected):
        _tokenized(problems, tokenizer, lengths[0])


@pytest.mark.slow
def test_a_file_is_tokenized_row_by_row(
    prompts_of: Read, train_file: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prompts = prompts_of(train_file)
    assert (len(prompts), prompts.data_sources) == (NUM_ROWS, ["choice", "math_dapo"])
    for number in (0, 999, 1000, 2499, -1):
        row = row_of(number % NUM_ROWS, 1 + number % NUM_ROWS % 7)
        alone = _tokenized([_problem(row["prompt"][0]["content"])], tokenizer, 1000)[0]
        assert prompts[number] == Prompt(
            number % NUM_ROWS,
            alone.input,
            row["data_source"],
            row["reward_model"]["ground_truth"],
            row["extra_info"],
        )

    assert prompts.lengths.tolist() == [len(prompt.input.token_ids) for prompt in prompts]

    remove_prompts(tmp_path / "training")
    again = prompts_of(train_file)
    assert PromptStream(again, 0, True).digest == prompts.digest == again.digest
    assert again[1321] == prompts[1321]  # which still has the removed file


@pytest.mark.slow
def test_chat_template_arguments_change_tokens_and_cache_key(
    model: Path, tokenizer: PreTrainedTokenizerBase, train_file: Path, tmp_path: Path
) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = (
        f"{tokenizer.chat_template}{{% if enable_thinking is false %}}No thinking.{{% endif %}}"
    )

    def read(**arguments: Any) -> TokenizedPrompts:
        return tokenized_prompts(
            train_file, model, thinking, tmp_path / "training", PromptsConfig(), arguments
        )

    plain, off, on = read(), read(enable_thinking=False), read(enable_thinking=True)
    said = tokenizer.encode("No thinking.", add_special_tokens=False)
    assert off[5].input.token_ids == (*plain[5].input.token_ids, *said)
    assert on[5].input.token_ids == plain[5].input.token_ids
    assert off.digest != plain.digest == on.digest
    (held_out,) = _tokenized([_problem()], thinking, 100, {"enable_thinking": False})
    assert held_out.input.token_ids[-len(said) :] == tuple(said)
    with pytest.raises(
        ConfigError,
        match=r"kwargs\.enable_thinkng has no effect.*\(did you mean enable_thinking\?\)",
    ):
        read(enable_thinkng=False)


@pytest.mark.slow
def test_rows_are_tokenized_only_once(
    prompts_of: Read, train_file: Path, model: Path, tmp_path: Path
) -> None:
    made: list[Path] = []
    tokenize = tokenizing._tokenize_file

    def counted(path: Path, *arguments: Any) -> None:
        made.append(path)
        tokenize(path, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_tokenize_file", counted)
        digest = prompts_of(train_file).digest
        assert prompts_of(train_file, 40, "drop").digest == digest  # limits change no token
        assert len(made) == 1
        (tmp_path / "training" / ".prompts" / "0123.partial").mkdir()  # of a killed attempt
        other = write_rows(tmp_path / "other.parquet", [row_of(number) for number in range(3)])
        assert len(prompts_of(other)) == 3
        assert len(made) == 2
        # of the newest rows alone
        assert len(list((tmp_path / "training" / ".prompts").iterdir())) == 1
        (model / "tokenizer_config.json").write_text(
            (model / "tokenizer_config.json").read_text(encoding="utf-8") + "\n", encoding="utf-8"
        )
        prompts_of(other)
        assert len(made) == 3
    remove_prompts(tmp_path / "training")
    assert [path.name for path in (tmp_path / "training").iterdir()] == [LENGTHS_FILE]


def test_too_long_prompts_are_dropped_truncated_or_refused(
    prompts_of: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(
        tmp_path / "train.parquet",
        [row_of(number, words) for number, words in enumerate((1, 9, 2))],
    )
    short, long, middle = (len(prompt.input.token_ids) for prompt in prompts_of(path))
    limit = f"data.max_prompt_tokens={middle} (longest {long} tokens)"
    counted = f"1 of 3 prompts are longer than {limit}"
    with pytest.raises(DataError, match=rf"{re.escape(counted)}; .*data\.too_long=drop"):
        prompts_of(path, middle)
    whole = prompts_of(path)[1]
    with caplog.at_level(logging.WARNING):
        dropped, cut = prompts_of(path, middle, "drop"), prompts_of(path, middle, "truncate_left")
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert [text.rpartition("(data")[0] for text in warnings] == [
        f"{counted} and are dropped ",
        f"{counted} and are truncated to their last tokens ",
    ]
    assert [prompt.index for prompt in dropped] == [0, 2]
    assert [prompt.index for prompt in cut] == [0, 1, 2]
    assert cut[1] == replace(whole, input=ModelInput(whole.input.token_ids[-middle:]))
    with pytest.raises(DataError, match=r"3 of 3 prompts .*raise data\.max_prompt_tokens"):
        prompts_of(path, short - 1, "drop")


def test_length_statistics_match_hand_computed_values(prompts_of: Read, tmp_path: Path) -> None:
    import numpy as np

    lengths = describe_lengths(np.array([1, 2, 2, 39]), 2, "drop")
    # 99 % are at most 39: 19 bins of 39 // 19 + 1 = 3, and the last one for the rest.
    assert (lengths["edges"], lengths["counts"]) == ([*range(0, 43, 3)], [3, *[0] * 12, 1])
    assert (lengths["mean"], lengths["max"], lengths["num_too_long"]) == (11.0, 39, 1)
    assert lengths["quantiles"] == {"5": 1, "25": 1, "50": 2, "75": 2, "95": 39, "99": 39}
    # 199 of 200 have up to 37 tokens, so 99 % do: bins of 37 // 19 + 1 = 2, the last from 38 to the
    # longest.
    lengths = describe_lengths(np.array([37] * 199 + [5000]), 100, "drop")
    assert (lengths["edges"][-2:], lengths["counts"][-2:], sum(lengths["counts"])) == (
        [38, 5001],
        [199, 1],
        200,
    )
    path = write_rows(tmp_path / "train.parquet", [row_of(1)])
    prompts = prompts_of(path)
    stored = json.loads((tmp_path / "training" / LENGTHS_FILE).read_text(encoding="utf-8"))
    assert stored == describe_lengths(prompts.lengths, 1000, "error")


def test_unusable_rows_are_counted_by_reason(prompts_of: Read, tmp_path: Path) -> None:
    rows = [row_of(number) for number in range(2500)]
    rows[7]["prompt"][0]["content"] = rows[2400]["prompt"][0]["content"] = " "
    rows[9]["reward_model"]["ground_truth"] = None
    path = write_rows(tmp_path / "train.parquet", rows)
    with pytest.raises(
        ProblemsError, match=r"of 2500 rows, 2 with .*\(rows 7, 2400\) and 1 with .*\(rows 9\)"
    ):
        prompts_of(path)


def test_messages_rejected_by_the_template_are_reported(model: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    row = row_of(0)
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    path = write_rows(tmp_path / "train.parquet", [row])
    with pytest.raises(
        DataError, match=r"roles \(system user\): no system role.*data\.system_prompt"
    ):
        tokenized_prompts(path, model, tokenizer, tmp_path / "training", PromptsConfig())
