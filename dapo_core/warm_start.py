"""The model of the default recipe: a small Qwen3, made here, that answers arithmetic problems part of the time.

The folder it writes is an ordinary Hugging Face model folder: tokenizer with a chat template, float32
safetensors, generation_config. The supervised start is short on purpose: reinforcement learning does the rest.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dapo_core.arithmetic import Row, quick_solution, worked_solution
from dapo_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED_LABEL = -100
NUM_PROGRESS_LINES = 10
TRAINING_SHARE_WARMING_UP = 0.05


@dataclass(frozen=True)
class WarmStartRecipe:
    """Size of the model, and length and slant of its supervised start.

    First every problem is shown worked out step by step. In the last `slanted_share` of the steps word problems
    are mostly shown done in one go, which a small model gets wrong, and step by step in only
    `stepwise_word_share` of the cases. So the model can do the steps, rarely thinks of them where words hide
    the sum, and reward alone can tell it to.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    initializer_range: float = 0.06
    rope_theta: float = 300.0
    num_steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    slanted_share: float = 0.2
    stepwise_word_share: float = 0.2
    num_threads: int = 2

    @property
    def intermediate_size(self) -> int:
        return 3 * self.hidden_size

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // 2 if self.num_heads % 2 == 0 else self.num_heads


def build_model(train_rows: list[Row], output_dir: Path, recipe: WarmStartRecipe, seed: int) -> dict[str, Any]:
    """Writes the warm-started model folder; returns steps, first_loss, final_loss, parameters and seconds.

    The same rows, recipe and seed give the same bytes on the same machine. The random state and the number of
    threads of the calling process are left as they were.
    """
    started = time.monotonic()
    _check(train_rows, recipe)
    tokenizer = train_tokenizer(train_rows, recipe)
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(recipe.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = create_model(tokenizer, recipe)
            losses = warm_start(model, tokenizer, train_rows, recipe)
    finally:
        torch.set_num_threads(num_threads_before)
    output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    num_last = max(1, len(losses) // NUM_PROGRESS_LINES)
    return {
        "steps": len(losses),
        "first_loss": losses[0],
        "final_loss": sum(losses[-num_last:]) / num_last,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.monotonic() - started,
    }


def _check(train_rows: list[Row], recipe: WarmStartRecipe) -> None:
    if recipe.num_steps < 1:
        raise ModelError(f"model.recipe.num_steps is {recipe.num_steps}: a warm start takes at least 1 step")
    num_foreign = sum("operands" not in row.get("extra_info", {}) for row in train_rows)
    if num_foreign or not train_rows:
        raise ModelError(
            f"{num_foreign} of {len(train_rows)} training rows are not generated arithmetic problems, "
            "the only ones whose solutions a warm start knows: set data.source=arithmetic, or "
            "model.source=path with a model"
        )


def train_tokenizer(train_rows: list[Row], recipe: WarmStartRecipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over prompts and solutions: every digit is a token, any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[PAD_TOKEN, "<|im_start|>", EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_corpus_text(row) for row in train_rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=recipe.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def create_model(tokenizer: PreTrainedTokenizerFast, recipe: WarmStartRecipe) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights from torch's current random state, in float32."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        initializer_range=recipe.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, train_rows: list[Row], recipe: WarmStartRecipe
) -> list[float]:
    """Trains the model on the rows' worked solutions; the loss of each step, in nats per response token."""
    solutions = [_step_by_step(row) for row in train_rows]
    first_slanted_step = recipe.num_steps - round(recipe.num_steps * recipe.slanted_share) + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_share(step, recipe))
    report_every = max(1, recipe.num_steps // NUM_PROGRESS_LINES)
    order: list[int] = []
    losses: list[float] = []
    model.train()
    for step in range(1, recipe.num_steps + 1):
        if step == first_slanted_step:
            solutions = _slanted_solutions(train_rows, recipe)
        while len(order) < recipe.batch_size:
            order += torch.randperm(len(train_rows)).tolist()
        batch, order = order[: recipe.batch_size], order[recipe.batch_size :]
        examples = [_encode(tokenizer, train_rows[index], solutions[index]) for index in batch]
        loss = _response_loss(model, examples, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % report_every == 0:
            logger.info("warm start step %d of %d: loss %.3f", step, recipe.num_steps, losses[-1])
    return losses


def _learning_rate_share(step: int, recipe: WarmStartRecipe) -> float:
    num_warmup = max(1, int(recipe.num_steps * TRAINING_SHARE_WARMING_UP))
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / recipe.num_steps))


def _response_loss(
    model: Qwen3ForCausalLM, examples: list[tuple[list[int], list[int]]], pad_token_id: int
) -> torch.Tensor:
    # Right padding needs no attention mask: attention is causal, so no real token sees a pad.
    max_tokens = max(len(prompt_ids) + len(response_ids) for prompt_ids, response_ids in examples)
    input_ids = torch.full((len(examples), max_tokens), pad_token_id)
    labels = torch.full((len(examples), max_tokens), IGNORED_LABEL)
    for row, (prompt_ids, response_ids) in enumerate(examples):
        num_prompt, num_tokens = len(prompt_ids), len(prompt_ids) + len(response_ids)
        input_ids[row, :num_tokens] = torch.tensor(prompt_ids + response_ids)
        labels[row, num_prompt:num_tokens] = torch.tensor(response_ids)
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    is_response = labels[:, 1:] != IGNORED_LABEL
    return F.cross_entropy(model.lm_head(hidden[is_response]), labels[:, 1:][is_response])


def _slanted_solutions(train_rows: list[Row], recipe: WarmStartRecipe) -> list[str]:
    """One solution per row: plain sums step by step, word problems mostly in one go."""
    is_quick = (torch.rand(len(train_rows)) >= recipe.stepwise_word_share).tolist()
    return [
        _in_one_go(row) if row["extra_info"]["form"] == "word" and quick else _step_by_step(row)
        for row, quick in zip(train_rows, is_quick, strict=True)
    ]


def _step_by_step(row: Row) -> str:
    return worked_solution(row["extra_info"]["subject"], row["extra_info"]["operands"])


def _in_one_go(row: Row) -> str:
    return quick_solution(row["extra_info"]["subject"], row["extra_info"]["operands"])


def _encode(tokenizer: PreTrainedTokenizerFast, row: Row, solution: str) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the solution's, the latter with the end token."""
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt), tokenizer.encode(solution + EOS_TOKEN)


def _corpus_text(row: Row) -> str:
    prompt = "\n".join(message["content"] for message in row["prompt"])
    return f"user\n{prompt}\nassistant\n{_step_by_step(row)}"
