"""Model of the demo recipes: a small Qwen3, -MoE or -VL that solves some generated problems.

Writes a normal Hugging Face model folder: tokenizer with a chat template, float32 safetensors,
generation_config. The supervised warm start is deliberately short, to leave room for reinforcement
learning.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from dapo_core.config.warm_start import WarmStartConfig
from dapo_core.demo.arithmetic import Row, quick_solution, worked_solution
from dapo_core.demo.generated import is_generated
from dapo_core.demo.recipe_model import MERGE, PATCH, ROPE_SECTIONS, VOCAB_SIZE, recipe_config
from dapo_core.draw.encoding import PromptEncoder
from dapo_core.errors import ModelError
from dapo_core.model.inputs import ImageReference, rope_positions
from dapo_core.policy.attention import Packing, set_packed_attention
from eval.problems.prompts import IMAGE
from eval.problems.rows import read_chat

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

OnStep = Callable[[int, int, float], None]  # step, number of steps, loss

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CONTENT = "{{ message['content'] }}"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + CONTENT + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (  # content of a model that reads pictures
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
)
MIN_PIXELS, MAX_PIXELS = 16 * 16, 128 * 128  # of a picture
NUM_REPORTS = 10
NUM_JUDGED = 512  # of the last solutions, whose share of right ones may end the warm start
WARM_UP_SHARE = 0.05  # of the steps, for learning rate warm-up
MAX_POSITIONS = 1024
INITIALIZER_RANGE = 0.06
ROPE_THETA = 300.0
# At first, all solutions are step by step. In the last SLANTED_SHARE of the steps, only
# STEPWISE_WORD_SHARE of the word problems are; the others are solved in one step, which a small
# model gets wrong. So the model can work step by step but rarely does for word problems:
# reinforcement learning has something to teach.
SLANTED_SHARE = 0.2
STEPWISE_WORD_SHARE = 0.2


def build_model(
    train_rows: list[Row],
    output_dir: Path,
    recipe: WarmStartConfig,
    seed: int,
    data_folder: Path = Path(),
    num_threads: int = 2,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Write the warm-started model folder; returns steps, first_loss, final_loss, parameters and
    seconds.

    The rows' pictures are files in `data_folder`. Deterministic on the same machine; restores the
    caller's random state and number of threads. Rows that are not generated problems are skipped,
    because their solutions are unknown; raises ModelError if no other row is left.
    """
    started = time.monotonic()
    num_rows, train_rows = (
        len(train_rows),
        [row for row in train_rows if is_generated(row.get("extra_info") or {})],
    )
    if not train_rows:
        raise ModelError(
            f"none of {num_rows} training rows is a generated problem, but a warm start only knows "
            "the solutions of these: set data.train to arithmetic or shapes, or model.source=path "
            "with a model"
        )
    tokenizer = train_tokenizer(train_rows, reads_pictures=recipe.vision_size > 0)
    output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output_dir)
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = create_model(tokenizer, recipe)
            _save_processor(model.config, output_dir)
            encoder = PromptEncoder(tokenizer, output_dir, data_folder)
            losses = warm_start(model, encoder, train_rows, recipe, on_step)
    finally:
        torch.set_num_threads(num_threads_before)
    model.save_pretrained(output_dir)
    num_last = max(1, len(losses) // NUM_REPORTS)
    return {
        "steps": len(losses),
        "first_loss": losses[0],
        "final_loss": sum(losses[-num_last:]) / num_last,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.monotonic() - started,
    }


def train_tokenizer(train_rows: list[Row], reads_pictures: bool) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on prompts and solutions: one token per digit, any text
    round-trips.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            *(PAD_TOKEN, "<|im_start|>", EOS_TOKEN),
            *(IMAGE_TOKENS if reads_pictures else ()),
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_corpus_text(row) for row in train_rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE.replace(CONTENT, PARTS) if reads_pictures else CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def create_model(tokenizer: PreTrainedTokenizerFast, recipe: WarmStartConfig) -> PreTrainedModel:
    """Create the float32 model with random weights from torch's current random state."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        GenerationConfig,
    )

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    others = {
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes = recipe_config(recipe)
    if recipe.vision_size:
        rope |= {"mrope_section": ROPE_SECTIONS, "mrope_interleaved": True}
        sizes["text_config"] |= others
        sizes["vision_config"]["initializer_range"] = INITIALIZER_RANGE
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        ids = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
        others = dict(zip(names, ids, strict=True))
    config = AutoConfig.for_model(**sizes, **others, dtype="float32")
    kind = AutoModelForImageTextToText if recipe.vision_size else AutoModelForCausalLM
    model = kind.from_config(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _save_processor(config: PretrainedConfig, folder: Path) -> None:
    """Write what encodes pictures: the configuration, and the image processor if there is one."""
    from transformers import Qwen2VLImageProcessorPil

    config.save_pretrained(folder)
    if hasattr(config, "vision_config"):
        size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
        processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size)
        processor.save_pretrained(folder)


class _Example(NamedTuple):
    prompt_ids: list[int]
    images: tuple[ImageReference, ...]
    response_ids: list[int]


def warm_start(
    model: PreTrainedModel,
    encoder: PromptEncoder,
    train_rows: list[Row],
    recipe: WarmStartConfig,
    on_step: OnStep | None = None,
) -> list[float]:
    """Train the model on worked solutions; returns each step's loss in nats per response token."""
    prompts = _prompts(encoder, train_rows)
    solutions = [_solution(row) for row in train_rows]
    first_slanted_step = recipe.num_steps - round(recipe.num_steps * SLANTED_SHARE) + 1
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_share(step, recipe)
    )
    report_every = max(1, recipe.num_steps // NUM_REPORTS)
    order: list[int] = []
    losses: list[float] = []
    are_right: deque[bool] = deque(maxlen=NUM_JUDGED)
    set_packed_attention(model)
    model.train()
    for step in range(1, recipe.num_steps + 1):
        if step == first_slanted_step:
            solutions = _slanted_solutions(train_rows)
        while len(order) < recipe.batch_size:
            order += torch.randperm(len(train_rows)).tolist()
        batch, order = order[: recipe.batch_size], order[recipe.batch_size :]
        examples = [
            _Example(*prompts[index], encoder.tokenizer.encode(solutions[index] + EOS_TOKEN))
            for index in batch
        ]
        loss, of_batch = _loss_and_right(model, examples, encoder)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        are_right += of_batch
        if on_step is not None and step % report_every == 0:
            on_step(step, recipe.num_steps, losses[-1])
        if len(are_right) == NUM_JUDGED and fmean(are_right) >= recipe.stop_accuracy:
            break
    return losses


def _learning_rate_share(step: int, recipe: WarmStartConfig) -> float:
    num_warmup = max(1, int(recipe.num_steps * WARM_UP_SHARE))
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / recipe.num_steps))


def _loss_and_right(
    model: PreTrainedModel, examples: list[_Example], encoder: PromptEncoder
) -> tuple[torch.Tensor, list[bool]]:
    """Return the loss, and which solutions' tokens are all the most probable ones."""
    sequences = [[*one.prompt_ids, *one.response_ids] for one in examples]
    lengths = [len(sequence) for sequence in sequences]
    counts = [len(one.response_ids) for one in examples]
    ends = itertools.accumulate(lengths)
    targets = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    )
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    output = model.model(
        input_ids=ids.unsqueeze(0),
        packing=Packing(lengths, ids.device),
        use_cache=False,
        **_positions_and_pictures(examples, lengths, encoder),
    )
    logits, wanted = model.lm_head(output.last_hidden_state[0, targets - 1]), ids[targets]
    are_right = [bool(tokens.all()) for tokens in (logits.argmax(dim=-1) == wanted).split(counts)]
    return F.cross_entropy(logits, wanted), are_right


def _positions_and_pictures(
    examples: list[_Example], lengths: list[int], encoder: PromptEncoder
) -> dict[str, torch.Tensor]:
    """Return the model's inputs that place the tokens of the examples and show their pictures."""
    images = [image for one in examples for image in one.images]
    if not images:
        return {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    pixels, grids = encoder.processor.pixels(images)
    positions = [
        torch.from_numpy(rope_positions(length, one.images))
        for length, one in zip(lengths, examples, strict=True)
    ]
    return {
        "position_ids": torch.cat(positions, dim=-1)[:, None],
        "pixel_values": pixels,
        "image_grid_thw": grids,
    }


def _slanted_solutions(train_rows: list[Row]) -> list[str]:
    """Return a solution per row: plain problems step by step, word problems mostly in one step."""
    is_quick = (torch.rand(len(train_rows)) >= STEPWISE_WORD_SHARE).tolist()
    return [
        _solution(
            row,
            quick_solution
            if row["extra_info"].get("form") == "word" and quick
            else worked_solution,
        )
        for row, quick in zip(train_rows, is_quick, strict=True)
    ]


def _solution(row: Row, solve: Callable[[str, Sequence[int]], str] = worked_solution) -> str:
    if not row["extra_info"].get("operands"):
        return str(row["reward_model"]["ground_truth"])
    return solve(row["extra_info"]["subject"], row["extra_info"]["operands"])


def _prompts(
    encoder: PromptEncoder, rows: list[Row]
) -> list[tuple[list[int], tuple[ImageReference, ...]]]:
    """Return the tokens and the pictures of each prompt."""
    problems = list(map(read_chat, rows))
    ids, lengths, images = encoder.encode(problems, encoder.render(problems))
    prompts = np.split(ids, np.cumsum(lengths)[:-1])
    return [(prompt.tolist(), shown) for prompt, shown in zip(prompts, images, strict=True)]


def _corpus_text(row: Row) -> str:
    prompt = "\n".join(message["content"].replace(IMAGE, "") for message in row["prompt"])
    return f"user\n{prompt}\nassistant\n{_solution(row)}"
