"""Every rank's part of weights and optimizer, in files of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dapo_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn


def save_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, num_optimizer_steps: int) -> None:
    """Write this rank's part of parameters and optimizer. Collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": moments, "num_optimizer_steps": num_optimizer_steps}, checkpoint_id=folder
    )


def load_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load parameters and optimizer in place, resharded to this number of ranks; returns the optimizer steps.

    Collective. Raises CheckpointError when the shards do not fit the model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "num_optimizer_steps": 0}
    try:
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"the shards in {folder} cannot be loaded: {error}") from error
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(state["num_optimizer_steps"])
