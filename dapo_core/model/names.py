"""Maps parameter names in transformers to tensor names in model files.

They differ for experts: transformers 5 keeps all experts of a layer in one parameter, while
published models store each expert's matrices separately, or Qwen3-VL's all transposed. The files of
Qwen2.5-VL have the prefixes of transformers before 4.52. Ranks and checkpoints use the transformers
names; engines and model folders use the file names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

# in old files; models compute them from the configuration
COMPUTED_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
_FUSED_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<what>gate_up_proj|down_proj)")
_LANGUAGE, _VISION = "model.language_model.", "model.visual."  # modules of models with a tower
_OLD_PREFIXES = {_LANGUAGE: "model.", _VISION: "visual."}


@dataclass(frozen=True)
class FilePiece:
    """The part of a parameter that one file tensor contains."""

    file_name: str
    expert: int | None = None  # index along the first dimension; None: the whole parameter
    first_row: int = 0  # in the expert's matrix
    num_rows: int = 0
    is_turned: bool = False  # transposed in the files (last two dimensions)

    def view(self, whole: torch.Tensor, first_expert: int = 0) -> torch.Tensor:
        """Return a view of this piece in the parameter, or in its slice from `first_expert` on."""
        if self.expert is None:
            return whole.transpose(-1, -2) if self.is_turned else whole
        return whole[self.expert - first_expert, self.first_row : self.first_row + self.num_rows]


def file_pieces(name: str, shape: Sequence[int], file_names: Collection[str]) -> list[FilePiece]:
    """Return the file tensors that make up the parameter `name`; empty if one is missing.

    Fused experts are gate_up_proj [E, 2I, H], gate before up, and down_proj [E, H, I].
    """
    stored = file_name(name, file_names)
    if stored in file_names:
        is_turned = name.startswith(_LANGUAGE) and _FUSED_EXPERTS.fullmatch(name) is not None
        return [FilePiece(stored, is_turned=is_turned)]
    pieces = expert_pieces(name, shape)
    return pieces if all(piece.file_name in file_names for piece in pieces) else []


def file_name(name: str, file_names: Collection[str]) -> str:
    """Return the name that a parameter has in the files, if they store it whole."""
    for prefix, old in _OLD_PREFIXES.items():
        if name not in file_names and name.startswith(prefix):
            return old + name.removeprefix(prefix)
    return name


def is_of_tower(name: str) -> bool:
    """Return whether a parameter, by any of its names, belongs to the vision tower."""
    return name.startswith((_VISION, _OLD_PREFIXES[_VISION]))


def expert_pieces(name: str, shape: Sequence[int]) -> list[FilePiece]:
    """Return each expert's matrices by published name, in row order; empty unless fused."""
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


def expert_modules(causal_lm: nn.Module) -> list[Any]:
    """Return the modules whose parameters hold all experts of a layer."""
    names = {
        name.rpartition(".")[0]
        for name, parameter in causal_lm.named_parameters()
        if expert_pieces(name, parameter.shape)
    }
    return [causal_lm.get_submodule(name) for name in sorted(names)]


def is_gated(experts: Any) -> bool:
    """True if the experts are gated MLPs without biases, the only ones that the policy computes."""
    return bool(getattr(experts, "has_gate", False) and not experts.has_bias)


def match_files(
    tensors: Mapping[str, torch.Tensor], file_names: Collection[str]
) -> tuple[dict[str, torch.Size], list[str], list[str]]:
    """Match a model's tensors with those in its files.

    Returns the required shape of each file tensor, the model tensors missing in the files, and the
    file tensors that the model does not have.
    """
    shapes: dict[str, torch.Size] = {}
    missing = []
    for name, tensor in tensors.items():
        pieces = file_pieces(name, tensor.shape, file_names)
        shapes |= {piece.file_name: piece.view(tensor).shape for piece in pieces}
        missing += [] if pieces else [name]
    return shapes, missing, sorted(set(file_names) - shapes.keys())


def file_views(
    name: str, whole: torch.Tensor, file_names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the full parameter as views under its file tensor names.

    Raises ModelError if the files do not contain the parameter.
    """
    pieces = file_pieces(name, whole.shape, file_names)
    if not pieces:
        raise ModelError(
            f"parameter {name} {list(whole.shape)} is not among the {len(file_names)} tensors in "
            "the model files, and cannot be assembled from them; set model.path to an architecture "
            "such as Qwen2, Qwen3, Qwen3-MoE or Llama"
        )
    return {piece.file_name: piece.view(whole) for piece in pieces}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the alias names of tied parameters, each with the primary name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def sample_of(names: Sequence[str]) -> str:
    """Return the number of names and the first three, for messages."""
    shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"{len(names)} ({shown})" if names else "0"
