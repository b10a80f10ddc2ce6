"""Model folders for tests: random weights, a real tokenizer, built in well under a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dapo_core.engines.base import EngineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CORPUS = [
    "What is 12 + 7? Let us add 12 and 7 step by step.",
    "Answer: 19",
    "<|user|>\n<|assistant|>\n",
    "the sum of the numbers is",
]
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
MAX_VOCABULARY = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


Architecture = Literal["qwen2", "qwen3", "qwen3_moe", "llama"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_SIZES: dict[str, dict[str, int]] = {  # beside what all four have in common
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        # what vLLM pads to on a CPU; padded experts cannot be reloaded
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    "llama": {},
}


def tiny_engine_settings() -> EngineSettings:
    """Settings of an engine that serves a tiny model beside a test."""
    return EngineSettings(
        dtype="float32",
        max_model_tokens=96,
        max_response_tokens=16,
        max_num_seqs=8,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        memory_bytes=32 * 1024**2,
        memory_utilization=0.5,
        threads=1,
    )


def build_tiny(
    path: str | Path,
    architecture: Architecture,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    positions: int = 512,
    **sizes: int,
) -> Path:
    """The folder `path`, filled with a random two-layer float32 model that transformers and vLLM
    load.

    `sizes` are further fields of its config.json. Its byte-level tokenizer gives any text back
    unchanged. `<|end|>` ends a response. Experts have the names of published files: one tensor for
    each matrix of each expert.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(path)
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        architecture,
        max_position_embeddings=positions,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.1,  # far enough from uniform that a wrong weight shows in the log-probs
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **{"vocab_size": len(tokenizer), **_COMMON, **_SIZES[architecture], **sizes},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_tiny_qwen3(path: str | Path, seed: int = 0, tie_word_embeddings: bool = True) -> Path:
    """The folder `path`, filled with a random Qwen3 model; see build_tiny."""
    return build_tiny(path, "qwen3", seed, tie_word_embeddings)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template: 256 bytes, the special tokens and a few
    merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_adapter(path: Path, base: Path, *targets: str) -> Path:
    """The folder `path` with a random LoRA adapter of rank 2, as peft writes it."""
    import torch

    from dapo_core.config.train import LoraConfig
    from dapo_core.model.folder import model_fingerprint
    from dapo_core.model.lora import adapter_name, adapter_shapes, write_adapter
    from dapo_core.model.tensors import read_headers

    lora, draw = LoraConfig(rank=2, targets=targets), torch.Generator().manual_seed(0)
    sizes = {name: header.shape for name, header in read_headers(base).items()}
    tensors = {
        adapter_name(name): torch.randn(shape, generator=draw) * 0.1
        for name, shape in adapter_shapes(sizes, lora).items()
    }
    write_adapter(path, tensors, lora, base, model_fingerprint(base))
    return path
