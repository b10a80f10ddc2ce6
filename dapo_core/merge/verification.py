"""Verifies a merged model as a whole: its tensors match the architecture, its logits the source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import Part, file_parts
from dapo_core.merge.sources import Source
from dapo_core.merge.writer import OutputTensor
from dapo_core.model.folder import MERGE_MANIFEST
from dapo_core.model.names import expert_pieces, file_pieces, match_files, sample_of, tied_names
from dapo_core.model.pretrained import load_causal_lm

if TYPE_CHECKING:
    import torch
    from torch import nn

_LOGIT_ROWS, _LOGIT_TOKENS = 2, 32


def require_architecture(
    model: nn.Module, outputs: Mapping[str, OutputTensor], label: str, origin: str
) -> None:
    """Raise CheckpointError unless the outputs are the model's parameters and buffers.

    `origin` says where the architecture comes from, such as "in its config.json".
    """
    tied = tied_names(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    expected, missing, unexpected = match_files(tensors, outputs)
    if missing or unexpected:
        raise CheckpointError(
            f"{label} does not match the architecture {type(model).__name__} {origin}: "
            f"missing {sample_of(missing)}, unexpected {sample_of(unexpected)}; merge adapters "
            "into the model first, or use the transformers version that wrote these names"
        )
    wrong = [name for name, shape in expected.items() if not _fits(outputs[name], shape)]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{name} in {label} has shape {outputs[name].shape}, but {type(model).__name__} "
            f"{origin} needs {tuple(expected[name])} ({len(wrong)} such tensors): they are "
            "different models"
        )


def _fits(output: OutputTensor, shape: tuple[int, ...]) -> bool:
    """True if transformers can load the tensor as that shape; it transposes fused experts."""
    is_transposed = bool(expert_pieces(output.name, shape)) and output.shape == (
        shape[0],
        shape[2],
        shape[1],
    )
    return output.shape == shape or is_transposed


def require_equal(tied: Mapping[str, str], digests: Mapping[str, str], label: str) -> None:
    """Raise CheckpointError if tied tensors differ, since only one of them is stored.

    Tensors without a digest share their position in the source.
    """
    for name, kept in tied.items():
        if name in digests and digests[name] != digests[kept]:
            raise CheckpointError(
                f"{name} and {kept} in {label} differ, although config.json declares them tied; "
                "set tie_word_embeddings to false in the checkpoint's config.json to keep both"
            )


def require_on_disk(folder: Path, parts: Mapping[str, Sequence[Part]]) -> None:
    """Read the files back, past the page cache; raises CheckpointError if they differ."""
    for name, written in parts.items():
        path = folder / name
        with path.open("rb") as file:  # drops the pages of a synced file
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file_parts(path, [size for size, _ in written]) != list(written):
            raise CheckpointError(
                f"{name} on disk differs from what was written; check the disk for errors"
            )


def compare_logits(folder: Path, source: Source, outputs: Sequence[OutputTensor]) -> dict[str, Any]:
    """Compare the logits of the merged folder in transformers with those of the source.

    Both compute in float32 from weights in the merged dtype, so the logits must be bitwise equal.
    Returns {"tokens", "max_difference"}; raises CheckpointError if they differ.
    """
    import torch

    model = load_causal_lm(folder, torch.float32)
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = torch.randint(
        vocab_size, (_LOGIT_ROWS, _LOGIT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits = model(token_ids).logits
        _fill(model, source, {tensor.stored_name: tensor.dtype for tensor in outputs})
        difference = (model(token_ids).logits - logits).abs().max().item()
    if difference:
        raise CheckpointError(
            f"the merged model's logits differ from those of {source.label} by up to "
            f"{difference:.3g} on "
            f"{token_ids.numel()} tokens; do not use it, and report this with {MERGE_MANIFEST}"
        )
    return {"tokens": token_ids.numel(), "max_difference": difference}


def _fill(model: nn.Module, source: Source, dtypes: Mapping[str, torch.dtype]) -> None:
    """Copy the source's values, rounded to their merged dtype, into the model tensor by tensor."""
    import torch

    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        pieces = file_pieces(name, tensor.shape, source.tensors)
        assert pieces, f"the source has {name}, as all of the architecture"
        for piece in pieces:
            target, first, stored = piece.view(tensor), 0, source.tensors[piece.file_name]
            values = torch.empty(prod(stored.shape), dtype=target.dtype)
            for block in source.blocks(piece.file_name):
                for part in block.read():
                    read = torch.frombuffer(part, dtype=stored.dtype).to(dtypes[piece.file_name])
                    values[first : first + read.numel()] = read
                    first += read.numel()
            whole = values.view(stored.shape)
            target.copy_(whole if whole.shape == target.shape else whole.transpose(-1, -2))
