"""Writes checkpoints like verl's FSDP workers: sharded state dicts per rank, the rest on rank 0."""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from tests.tiny_models import Architecture, build_tiny


@dataclass(frozen=True)
class Case:
    """FSDP version, mesh and model of one checkpoint."""

    fsdp: Literal[1, 2]
    mesh: tuple[int, ...]  # ranks, or replicas x shards
    architecture: Architecture
    is_tied: bool

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"fsdp{self.fsdp}-{mesh}-{self.architecture}-{'tied' if self.is_tied else 'untied'}"

    @property
    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return self.mesh[0] * (self.mesh[1] if len(self.mesh) == 2 else 1)


def write_folders(cases: list[Case], folder: Path) -> dict[Case, tuple[Path, Path]]:
    """Model folder and `global_step_3` of each case; equal rank counts share the ranks."""
    places = {
        case: (folder / str(case) / "model", folder / str(case) / "global_step_3") for case in cases
    }
    for case, (model_path, step) in places.items():
        build_tiny(model_path, case.architecture, seed=5, tie_word_embeddings=case.is_tied)
        (step / "actor").mkdir(parents=True)
    for num_ranks in sorted({case.num_ranks for case in cases}):
        alike = {case: place for case, place in places.items() if case.num_ranks == num_ranks}
        run_ranks(num_ranks, _save_all, alike, num_ranks)
    return places


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder."""
    return {
        name: weight
        for path in folder.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }


def _save_all(rank: int, places: dict[Case, tuple[Path, Path]], num_ranks: int) -> None:
    for case, (model_path, step) in places.items():
        state = _sharded_state(case, model_path)
        actor = step / "actor"
        torch.save(state, actor / f"model_world_size_{num_ranks}_rank_{rank}.pt")
        if rank == 0:
            (actor / "fsdp_config.json").write_text(
                json.dumps({"FSDP_version": case.fsdp, "world_size": num_ranks})
            )
            shutil.copytree(
                model_path, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
            )


def _sharded_state(case: Case, model_path: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    names = ("fsdp",) if len(case.mesh) == 1 else ("ddp", "fsdp")
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    return _fsdp2_state(model, mesh) if case.fsdp == 2 else _fsdp1_state(model, mesh)


def _fsdp2_state(model: Any, mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh).state_dict()


def _fsdp1_state(model: Any, mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this FSDP is deprecated
        sharded = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            sharding_strategy=ShardingStrategy.FULL_SHARD
            if mesh.ndim == 1
            else ShardingStrategy.HYBRID_SHARD,
        )
        sharded_state = FullyShardedDataParallel.state_dict_type(
            sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
        )
        with sharded_state:
            return sharded.state_dict()
