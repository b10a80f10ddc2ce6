"""The small model of the default recipe, really built: it learns, reproduces, loads, generates and
stops.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from dapo_core.config.warm_start import WarmStartConfig
from dapo_core.demo import warm_start
from dapo_core.demo.arithmetic import Row, generate_problems, quick_solution, worked_solution
from dapo_core.demo.warm_start import build_model
from dapo_core.errors import ModelError

_RECIPE = WarmStartConfig(hidden_size=64, num_heads=2, num_steps=30, batch_size=16)


@pytest.fixture(scope="module")
def train_rows() -> list[Row]:
    return generate_problems(400, 1, 3, seed=0)[0]


@pytest.fixture(scope="module")
def built(
    train_rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, build_model(train_rows, folder, _RECIPE, seed=0)


def test_a_short_warm_start_lowers_the_loss(built: tuple[Path, dict[str, Any]]) -> None:
    metrics = built[1]
    assert metrics["steps"] == 30
    # Half of the first loss lies far outside the spread between batches, which is a few hundredths.
    assert metrics["final_loss"] < metrics["first_loss"] / 2


def test_a_warm_start_ends_at_its_accuracy_and_leaves_the_rest_to_be_learned(
    train_rows: list[Row], tmp_path: Path
) -> None:
    """One problem over and over is learned by heart."""
    until = _RECIPE.model_copy(update={"num_steps": 400, "batch_size": 64, "stop_accuracy": 0.25})
    metrics = build_model(train_rows[:1], tmp_path, until, seed=0)
    assert warm_start.NUM_JUDGED // 64 <= metrics["steps"] < 100


def test_a_mixture_of_experts_is_built_that_learns_and_loads(
    train_rows: list[Row], tmp_path: Path
) -> None:
    mixture = _RECIPE.model_copy(update={"num_experts": 6})
    metrics = build_model(train_rows, tmp_path, mixture, seed=0)
    assert metrics["final_loss"] < metrics["first_loss"] / 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (6, 4)
    assert sum(each.numel() for each in model.parameters()) == metrics["parameters"]


def test_word_problems_are_mostly_solved_in_one_step() -> None:
    rows = generate_problems(3000, 1, 3, seed=0)[0]
    torch.manual_seed(0)
    solutions = warm_start._slanted_solutions(rows)
    num_words = num_stepwise_words = 0
    for row, solution in zip(rows, solutions, strict=True):
        operands = (row["extra_info"]["subject"], row["extra_info"]["operands"])
        if row["extra_info"]["form"] == "plain":
            assert solution == worked_solution(*operands)
        else:
            assert solution in (worked_solution(*operands), quick_solution(*operands))
            num_words += 1
            num_stepwise_words += solution != quick_solution(*operands)
    # About 1500 words at 0.2: standard deviation of the share is sqrt(0.2 * 0.8 / 1500) = 0.0103;
    # four of them.
    assert abs(num_stepwise_words / num_words - 0.2) < 0.042


def test_the_same_seed_gives_the_same_model(
    built: tuple[Path, dict[str, Any]], train_rows: list[Row], tmp_path: Path
) -> None:
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    build_model(train_rows, tmp_path, _RECIPE, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == num_threads
    for path in built[0].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "text",
    [
        "47 + 85 = ?",
        "",
        "  two\t tabs\n\n",
        "Größe: 12½ €, 漢字 🙂",
        "<|im_end|>1<|im_start|>",
        "\x00\x7f",
    ],
)
def test_any_text_round_trips_through_the_tokenizer(
    built: tuple[Path, dict[str, Any]], text: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built[0])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_folder_has_float32_weights_digit_tokens_and_a_chat_template(
    built: tuple[Path, dict[str, Any]],
) -> None:
    tensors = load_file(built[0] / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in tensors.values()) == built[1]["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(built[0])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("123=45")) == [
        "1",
        "2",
        "3",
        "=",
        "4",
        "5",
    ]
    assert len(tokenizer) <= json.loads((built[0] / "config.json").read_text())["vocab_size"]
    messages = [{"role": "user", "content": "1 + 2 = ?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n1 + 2 = ?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_end_token_stops_generation(built: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built[0])
    model = AutoModelForCausalLM.from_pretrained(built[0])
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    # The end token outweighs every other at the first step, so nothing may follow it.
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(
            -1, torch.tensor([tokenizer.eos_token_id]), 1e4
        )
    )
    input_ids = torch.tensor([tokenizer.encode("1 + 2 = ?")])
    generated = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=20
    )
    assert generated[0, input_ids.shape[1] :].tolist() == [tokenizer.eos_token_id]


def test_rows_without_solutions_are_skipped_and_no_others_is_refused(
    train_rows: list[Row], tmp_path: Path
) -> None:
    """In a mixture that was read from parquet, every row has the columns of all."""
    foreign = {**train_rows[0], "extra_info": {"index": 0, "operands": None}}
    with pytest.raises(
        ModelError, match=r"none of 2 training rows is a generated.*set data.train to arithmetic"
    ):
        build_model([foreign, {**foreign, "extra_info": None}], tmp_path, _RECIPE, seed=0)
    short = _RECIPE.model_copy(update={"num_steps": 2})
    assert build_model([*train_rows[:2], foreign], tmp_path, short, seed=0)["steps"] == 2
