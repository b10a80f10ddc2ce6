"""Compares the tensors in a model folder's files with those of its model class, from headers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import ModelError, counted
from dapo_core.model.folder import (
    INDEX_FILE,
    SINGLE_FILE,
    read_config,
    read_index,
    require_model_folder,
    weight_paths,
)
from dapo_core.model.lora import ADAPTER_CONFIG
from dapo_core.model.names import COMPUTED_BUFFERS, match_files, sample_of, tied_names

if TYPE_CHECKING:
    from torch import nn

OTHER_MODEL = (
    "set model.path to a complete folder of an architecture such as Qwen2, Qwen3, Qwen3-MoE or "
    "Llama"
)
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_CONFIG_DTYPES = ("bfloat16", "float16", "float32", "float64")
_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_INTEGER_BUFFER = re.compile(r"\.(bias|masked_bias|position_ids)$")  # in old files
_OTHER_MEDIA = re.compile(r"(^|\.)(visual|vision_\w+|audio_\w+|multi_modal_projector)\.")
_ORIGINAL = "set model.path to the original model with weights in BF16, F16 or F32"


@dataclass(frozen=True)
class TensorHeader:
    """File, dtype (safetensors' name, such as BF16) and shape of a stored tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_headers(model_path: str | Path) -> dict[str, TensorHeader]:
    """Return the header of each tensor; raises ModelError if a weight file or the index is damaged.

    Reads no values.
    """
    from safetensors import SafetensorError, safe_open

    folder, headers = Path(model_path), {}
    for path in weight_paths(folder):
        try:
            with safe_open(path, framework="numpy") as file:  # compares the size with the header
                for name in list(file.keys()):
                    part = file.get_slice(name)
                    headers[name] = TensorHeader(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} is not a complete safetensors file ({error}; {path.stat().st_size} "
                "bytes); fetch the model again, or name a complete folder"
            ) from None
    if not headers:
        raise ModelError(f"the weights in {folder} contain no tensors; fetch the model again")
    if (folder / INDEX_FILE).is_file():
        index = read_index(folder)
        if lost := [name for name in index if name not in headers]:
            raise ModelError(
                f"{INDEX_FILE} in {folder} lists {counted(len(lost), 'tensor')} that its files "
                f"lack, such as {lost[0]}; fetch the model again"
            )
        return {name: headers[name] for name in index}
    return headers


def weight_files(model_path: str | Path) -> dict[str, Path]:
    """Return the safetensors file that holds each tensor; raises ModelError like read_headers."""
    return {name: header.path for name, header in read_headers(model_path).items()}


def weight_names(model_path: str | Path) -> set[str]:
    """Return the names of the tensors in the folder's safetensors files."""
    return set(weight_files(model_path))


def num_elements(headers: Mapping[str, TensorHeader]) -> int:
    """Return the elements of all tensors."""
    return sum(prod(header.shape) for header in headers.values())


def require_generative(folder: Path) -> None:
    """Raise ModelError for an adapter, and for a config.json that vLLM cannot generate with."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} contains {ADAPTER_CONFIG}, so transformers loads an adapter and its base "
            "model; merge the adapter into the model and set model.path to the result, or move the "
            "adapter's files elsewhere if that is done"
        )
    config = read_config(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in (None, *_CONFIG_DTYPES):
        raise ModelError(
            f"config.json in {folder} has dtype={dtype!r}; write the dtype of the weights: "
            f"{', '.join(_CONFIG_DTYPES)}"
        )
    names = config.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise ModelError(
            f"config.json in {folder} has architectures={names!r}, but vLLM needs a list with the "
            'model class, such as ["Qwen3ForCausalLM"]'
        )
    if not any(name.endswith(_GENERATIVE) for name in names):
        raise ModelError(
            f"{folder} is a {', '.join(names)} (architectures in config.json), which does not "
            "generate text, such as a reward, classification or embedding model; set model.path to "
            "a causal language model"
        )


def require_original_weights(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of a generative model's weights.

    Raises ModelError for an incomplete folder, and for weights that training cannot continue from:
    quantized, adapters, and file names that transformers does not load.
    """
    require_model_folder(folder)
    require_generative(folder)
    config = read_config(folder)
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if found := isinstance(part, dict) and part.get(key):
                method = found.get("quant_method") if isinstance(found, dict) else found
                raise ModelError(
                    f"{folder} is quantized ({key} in config.json: {method}), which cannot be "
                    f"trained; {_ORIGINAL}"
                )
    headers = read_headers(folder)
    _require_floats(folder, headers)
    _require_standard_names(folder)
    return headers


def _require_floats(folder: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Raise ModelError for matrices of another dtype."""
    found = [
        name
        for name, header in headers.items()
        if header.dtype not in _FLOATS
        and len(header.shape) > 1
        and not _INTEGER_BUFFER.search(name)
    ]
    if found:
        kinds = ", ".join(sorted({headers[name].dtype for name in found}))
        raise ModelError(
            f"{folder} is quantized, which cannot be trained: {len(found)} of its "
            f"{counted(len(headers), 'tensor')}, such as {found[0]}, are {kinds}; {_ORIGINAL}"
        )


def _require_standard_names(folder: Path) -> None:
    names = [path.name for path in weight_paths(folder)]
    if (folder / INDEX_FILE).is_file() or names == [SINGLE_FILE]:
        return
    if len(names) == 1:
        raise ModelError(
            f"the weights in {folder} are in {names[0]}, but transformers loads {SINGLE_FILE}; "
            "rename the file"
        )
    raise ModelError(
        f"the weights in {folder} are in {len(names)} files without {INDEX_FILE}, which "
        f"transformers needs; fetch it too, or write a complete folder with dapo merge {folder} NEW"
    )


def require_same_tensors(
    model_path: str | Path, model: nn.Module, headers: Mapping[str, TensorHeader]
) -> None:
    """Raise ModelError unless the files contain every parameter in its shape, and nothing else."""
    shapes, missing, others = match_files(dict(model.named_parameters()), headers)
    tied = tied_names(model)
    # transformers lists the tensors that a model skips only in this private name;
    # test_private_parts.py guards it.
    skipped = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in others
        if name not in tied
        and not any(re.search(pattern, name) for pattern in (*skipped, COMPUTED_BUFFERS))
    ]
    if missing or unexpected:
        lists = f"not in the files: {sample_of(missing)}, not in the model: {sample_of(unexpected)}"
        raise ModelError(
            f"the files in {model_path} and {type(model).__name__} do not have the same tensors "
            f"({lists}); {_advice(missing, unexpected)}"
        )
    wrong = [name for name, shape in shapes.items() if headers[name].shape != tuple(shape)]
    if wrong:
        name = wrong[0]
        raise ModelError(
            f"{name} in {headers[name].path} has shape {list(headers[name].shape)}, but the model "
            f"needs {list(shapes[name])} ({counted(len(wrong), 'such tensor')}): config.json and "
            "weights belong to different models; set model.path to an unmodified folder"
        )


def _advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return why the names differ, as far as they show it, and what to do."""
    if [*missing] == ["lm_head.weight"]:
        return (
            "if the output head is the embedding, set tie_word_embeddings=true in config.json, "
            "else fetch the model again"
        )
    if any(map(_OTHER_MEDIA.search, unexpected)):
        return "the weights are of a multimodal model, but config.json describes a text model"
    return (
        "either the folder is incomplete, or its weights are of another kind of model or were "
        "saved in a wrapper, or config.json belongs to another model, or engines and ranks name "
        f"this architecture's weights differently; {OTHER_MODEL}"
    )
