"""Names of a model's parameters in transformers, and of the tensors in its files.

The two agree except for experts: since version 5 transformers holds all experts of a layer in one parameter, while
published mixtures of experts store each expert's matrices under a separate name. Ranks and checkpoints use the
names of transformers; engines and model folders use those of the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

COMPUTED_BUFFERS = re.compile(
    r"rotary_emb\.inv_freq$"
)  # old files store what models compute from their configuration
_FUSED_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<what>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class FilePiece:
    """The part of a parameter that one tensor of the files holds."""

    file_name: str
    expert: int | None = None  # index along the parameter's first dimension; None: the whole parameter
    first_row: int = 0  # of the expert's matrix
    num_rows: int = 0
    is_turned: bool = False  # in the files its last two dimensions are swapped

    def view(self, whole: torch.Tensor, first_expert: int = 0) -> torch.Tensor:
        """The piece's part of the parameter, or of its slice that begins with `first_expert`; shares memory."""
        if self.expert is None:
            return whole.transpose(-1, -2) if self.is_turned else whole
        return whole[self.expert - first_expert, self.first_row : self.first_row + self.num_rows]


def file_pieces(name: str, shape: Sequence[int], file_names: Collection[str]) -> list[FilePiece]:
    """The tensors that make up the parameter `name` of this shape; empty when the files lack one of them.

    Fused experts are gate_up_proj [E, 2I, H], gate before up, and down_proj [E, H, I].
    """
    if name in file_names:
        return [FilePiece(name)]
    pieces = expert_pieces(name, shape)
    return pieces if all(piece.file_name in file_names for piece in pieces) else []


def expert_pieces(name: str, shape: Sequence[int]) -> list[FilePiece]:
    """Each expert's matrices as published files name them, in the order of rows; none unless experts are fused."""
    match = _FUSED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return []
    parts = ("gate_proj", "up_proj") if match["what"] == "gate_up_proj" else ("down_proj",)
    num_rows = shape[1] // len(parts)
    return [
        FilePiece(f"{match['experts']}.{expert}.{part}.weight", expert, number * num_rows, num_rows)
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    ]


def match_files(
    tensors: Mapping[str, torch.Tensor], file_names: Collection[str]
) -> tuple[dict[str, torch.Size], list[str], list[str]]:
    """How a model's tensors and those of its files correspond.

    Returns the shape that each file tensor must have, the model's tensors that the files lack, and the files'
    tensors that are not the model's.
    """
    shapes: dict[str, torch.Size] = {}
    missing = []
    for name, tensor in tensors.items():
        pieces = file_pieces(name, tensor.shape, file_names)
        shapes |= {piece.file_name: piece.view(tensor).shape for piece in pieces}
        missing += [] if pieces else [name]
    return shapes, missing, sorted(set(file_names) - shapes.keys())


def file_views(name: str, whole: torch.Tensor, file_names: Collection[str]) -> dict[str, torch.Tensor]:
    """The whole parameter as the tensors of the files, by their names; views that share its memory.

    Raises ModelError for a parameter that the files do not hold.
    """
    pieces = file_pieces(name, whole.shape, file_names)
    if not pieces:
        raise ModelError(
            f"parameter {name} {list(whole.shape)} is not among the {len(file_names)} tensors of the model's "
            "files, nor can it be assembled from them; set model.path to an architecture such as Qwen2, Qwen3, "
            "Qwen3-MoE or Llama"
        )
    return {piece.file_name: piece.view(whole) for piece in pieces}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The second names of parameters, each with the first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def sample_of(names: Sequence[str]) -> str:
    """The number of names, and the first three, for messages."""
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "0"
