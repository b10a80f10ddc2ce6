"""Reads checkpoints of verl's FSDP workers, which have one file of DTensors per rank.

A folder `global_step_N/actor` contains
    model_world_size_W_rank_R.pt   state dict of rank R: DTensors, and plain tensors for buffers
                                   and, with FSDP1 on one device, for everything
    fsdp_config.json               world_size, FSDP_version (missing in old folders)
    huggingface/                   config, tokenizer, generation config
The mesh is ("fsdp",), or ("ddp", "fsdp") with replicas, of which one complete replica is read.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dapo_core.checkpoint.archive import read_records
from dapo_core.checkpoint.folder import HUGGINGFACE_FOLDER, refuse_links
from dapo_core.errors import CheckpointError
from dapo_core.merge.sources import Block, StoredTensor
from dapo_core.model.folder import read_config
from dapo_core.model.names import FilePiece, expert_pieces

if TYPE_CHECKING:
    import torch

_SHARD = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
FUSED_NAME = "experts.gate_up_proj"
_STEP = re.compile(r"global_step_\d+")
_MESHES = (("fsdp",), ("ddp", "fsdp"))
FSDP_CONFIG_FILE = "fsdp_config.json"


def find_shards(folders: Sequence[Path]) -> list[Path]:
    """Return all rank files in the folders or their `actor` folders; empty if not verl's.

    Raises CheckpointError if only some of the folders contain shards.
    """
    found: dict[Path, list[Path]] = {}
    for folder in folders:
        places = [place for place in (folder, folder / "actor") if place.is_dir()]
        found[folder] = [
            path for place in places for path in place.iterdir() if _SHARD.fullmatch(path.name)
        ]
    empty = [folder for folder, paths in found.items() if not paths]
    if empty and len(empty) < len(found):
        raise CheckpointError(
            f"{empty[0]} has no model_world_size_W_rank_R.pt, unlike the other sources; pass the "
            "folders that contain shards of one checkpoint"
        )
    return sorted(path for paths in found.values() for path in paths)


class VerlSource:
    """A verl FSDP checkpoint; implements Source."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files from find_shards.

        Raises CheckpointError, naming the shard, if one is missing, truncated, unsafe to load or
        from another checkpoint.
        """
        self._paths = _by_rank(paths)
        self.label = str(paths[0].parent)
        self._num_ranks, _ = _world_size_and_rank(paths[0])
        self._folders = sorted({path.parent for path in paths})
        for folder in self._folders:
            refuse_links(folder)
        self._step = _step(self._folders)
        self._fsdp_version = _fsdp_version(self._folders, self._num_ranks)
        self.model_files = _model_files(self._folders)
        rank, path = min(self._paths.items())
        first = _Shard(path)
        rows = first.mesh_rows(self._num_ranks)
        self._ranks = self._complete_replica(rows)
        self._shards = [
            first if other == rank else _Shard(self._paths[other]) for other in self._ranks
        ]
        self.tensors = {name: _stored(tensor) for name, tensor in self._shards[0].state.items()}
        for position, shard in enumerate(self._shards):
            if problem := self._mismatch(shard, rows, position):
                raise CheckpointError(
                    f"{self._paths[self._ranks[position]]} does not match the other shards: "
                    f"{problem}; copy it again from the node that wrote it"
                )
        has_experts = any(expert_pieces(name, it.shape) for name, it in self.tensors.items())
        self._experts = _experts_in_files(self.model_files) if has_experts else None

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensor itself, or each expert's matrices if published files have those."""
        shape = self.tensors[name].shape
        experts = expert_pieces(name, shape)
        if not experts or self._experts is None:
            return [FilePiece(name)]
        if self._experts == "single":
            return experts
        # Files have [E, H, 2I] and [E, I, H], as in transformers 4; transformers 5 transposes them
        # in memory.
        hidden_dimension = 1 if name.endswith(FUSED_NAME) else 2
        return [FilePiece(name, is_turned=shape[hidden_dimension] != self._experts)]

    def blocks(self, name: str) -> list[Block]:
        """Each rank's rows; a replicated tensor is read once."""
        shards = (
            self._shards[:1] if _placement(self._shards[0].state[name]) is None else self._shards
        )
        blocks = [shard.block(name) for shard in shards]
        return [block for block in blocks if block.num_bytes]

    def describe(self) -> dict[str, Any]:
        """Manifest entry; `name` is the folder's global_step_N."""
        return {
            "format": "verl",
            "name": self._step,
            "shards": len(self._ranks),
            "fsdp_version": self._fsdp_version,
        }

    def _complete_replica(self, rows: list[list[int]]) -> list[int]:
        """Return the ranks of the first replica whose files are all present."""
        missing = [[rank for rank in row if rank not in self._paths] for row in rows]
        for row, missing_ranks in zip(rows, missing, strict=True):
            if not missing_ranks:
                return row
        fewest = min(missing, key=len)
        names = [f"model_world_size_{self._num_ranks}_rank_{rank}.pt" for rank in fewest]
        raise CheckpointError(
            f"shard {names[0]} of {self._num_ranks} is missing in {self.label}"
            + (f", and {len(names) - 1} more" if len(names) > 1 else "")
            + "; copy it from the node that wrote it, or pass that node's folder as another source"
        )

    def _mismatch(self, shard: _Shard, rows: list[list[int]], position: int) -> str | None:
        """Return why the shard is not part `position` of its replica, or None if it is."""
        if (other_rows := shard.mesh_rows(self._num_ranks)) != rows:
            return f"its ranks are {other_rows}, those of the first shard {rows}"
        if shard.state.keys() != self.tensors.keys():
            other = sorted(shard.state.keys() ^ self.tensors.keys())
            return f"{len(other)} names differ from the first shard, such as {other[0]}"
        for name, tensor in shard.state.items():
            found, expected = _stored(tensor), self.tensors[name]
            if found != expected:
                return (
                    f"its {name} is part of {found.shape} {found.dtype}, not {expected.shape} "
                    f"{expected.dtype}"
                )
            local, local_shape = _local(tensor), _local_shape(tensor, len(self._ranks), position)
            if tuple(local.shape) != local_shape and (local.numel() or 0 not in local_shape):
                return f"its part of {name} is {tuple(local.shape)}, not {local_shape}"
            coordinate = _coordinate(tensor)
            if coordinate not in (None, position):
                return f"it was written as part {coordinate}, not {position}"
        return None


class _Shard:
    """One rank's file: its state dict on the meta device, and the positions of the values."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError unless the file is a complete, safe dict of tensors."""
        self.path = path
        with path.open("rb") as file:
            records = read_records(file, str(path)).values()
        self._records = {record.offset: record for record in records}
        self.state = _load(path)
        places: dict[int, set[tuple[int, int]]] = {}
        for name in self.state:
            start, *place = self._place(name)
            places.setdefault(start, set()).add((place[0], place[1]))
        # A record that holds one tensor is verified while the tensor is read.
        self._is_checked = {start: len(places.get(start, ())) != 1 for start in self._records}
        for start, record in self._records.items():
            if self._is_checked[start]:
                end = start + record.num_bytes
                for _ in Block(path, start, record.num_bytes, start, end, record.crc32).read():
                    pass

    def block(self, name: str) -> Block:
        """Return the rank's part of a tensor."""
        start, offset, num_bytes = self._place(name)
        record = self._records[start]
        checksum = None if self._is_checked[start] else record.crc32
        return Block(self.path, offset, num_bytes, start, start + record.num_bytes, checksum)

    def mesh_rows(self, num_ranks: int) -> list[list[int]]:
        """Return the ranks of each replica, in row order."""
        mesh = next(
            (
                tensor.device_mesh
                for tensor in self.state.values()
                if hasattr(tensor, "device_mesh")
            ),
            None,
        )
        if mesh is None and num_ranks == 1:
            return [[0]]  # FSDP1 on one device writes plain tensors
        if mesh is None:
            raise CheckpointError(
                f"{self.path} contains no DTensor, so the sharding of its {len(self.state)} "
                "tensors is unknown; "
                "write it again with verl 0.3 or later, which gives FSDP a device mesh"
            )
        names, ranks, num_shards = _mesh_state(mesh)
        if names not in _MESHES or len(ranks) != num_ranks:
            raise CheckpointError(
                f"{self.path} was written on a mesh {names} of {len(ranks)} ranks; only "
                f"{' and '.join(map(str, _MESHES))} with all {num_ranks} ranks are supported, no "
                "tensor parallelism"
            )
        return [
            list(ranks[first : first + num_shards]) for first in range(0, num_ranks, num_shards)
        ]

    def _place(self, name: str) -> tuple[int, int, int]:
        """Return the offsets of a tensor's record and values, and the values' bytes."""
        local = _local(self.state[name])
        # torch has no public way to ask where a tensor lies in its file.
        start = getattr(local.untyped_storage(), "_checkpoint_offset", None)
        offset = int(local.storage_offset()) * local.itemsize
        if not local.numel():
            return min(self._records), min(self._records), 0
        if start not in self._records or not local.is_contiguous():
            raise CheckpointError(
                f"{self.path}: {name} is not stored row by row; merge another checkpoint"
            )
        if offset + local.nbytes > self._records[start].num_bytes:
            raise CheckpointError(
                f"{self.path} has too few bytes for {name} {tuple(local.shape)}; copy it again"
            )
        return start, start + offset, local.nbytes


def _by_rank(paths: Sequence[Path]) -> dict[int, Path]:
    by_rank: dict[int, Path] = {}
    num_ranks, _ = _world_size_and_rank(paths[0])
    for path in paths:
        other, rank = _world_size_and_rank(path)
        if other != num_ranks:
            raise CheckpointError(
                f"{path} and {paths[0]} were written by trainings with {other} and {num_ranks} "
                "ranks; keep the files of one checkpoint"
            )
        if rank in by_rank:
            raise CheckpointError(
                f"rank {rank} has two files, {by_rank[rank]} and {path}; keep one of them"
            )
        by_rank[rank] = path
    return by_rank


def _world_size_and_rank(path: Path) -> tuple[int, int]:
    world_size, rank = re.findall(r"\d+", path.name)
    return int(world_size), int(rank)


def _step(folders: Sequence[Path]) -> str | None:
    """Return global_step_N from the paths; raises CheckpointError if they name several."""
    found = {
        folder: next(
            (part for part in reversed(folder.resolve().parts) if _STEP.fullmatch(part)), None
        )
        for folder in folders
    }
    steps = sorted({step for step in found.values() if step is not None})
    if len(steps) > 1:
        raise CheckpointError(
            f"{' and '.join(map(str, folders))} are from {' and '.join(steps)}; pass the folders "
            "of one step"
        )
    return steps[0] if steps else None


def _fsdp_version(folders: Sequence[Path], num_ranks: int) -> int | None:
    """Return the FSDP version; raises CheckpointError if the world size differs."""
    for path in (folder / FSDP_CONFIG_FILE for folder in folders):
        if path.is_file():
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
                version, world_size = config["FSDP_version"], config["world_size"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path} cannot be read ({error!r}); copy it from rank 0's node"
                ) from error
            if world_size != num_ranks:
                raise CheckpointError(
                    f"{path} says {world_size} ranks, the shard names say {num_ranks}; "
                    "keep the files of one checkpoint"
                )
            return version
    return None


def _model_files(folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / HUGGINGFACE_FOLDER / "config.json").is_file():
            return folder / HUGGINGFACE_FOLDER
    raise CheckpointError(
        f"{folders[0]} lacks {HUGGINGFACE_FOLDER}/config.json, which rank 0 writes; pass the "
        "folder of its node "
        f"too, or copy the model's config and tokenizer into {folders[0] / HUGGINGFACE_FOLDER}"
    )


def _load(path: Path) -> dict[str, Any]:
    """Return the rank's state dict without values."""
    import torch
    import torch.distributed.tensor  # registers the classes of a DTensor as safe to load

    # It warns about every mesh loaded without process groups, but only the mesh's shape is needed.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it contains more than tensors, and loading it could run code "
            f"({_reason(error)}); write it again with verl's FSDP workers on torch 2.6 or later"
        ) from error
    except (
        RuntimeError,
        ValueError,
        OSError,
        EOFError,
        KeyError,
        AttributeError,
        IndexError,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read ({_reason(error)}): it is damaged, or not readable by torch "
            f"{torch.__version__}; copy it again from the node that wrote it"
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise CheckpointError(
            f"{path} is not a state dict of tensors; pass a folder written by verl's FSDP workers"
        )
    if not state:
        raise CheckpointError(f"{path} contains no tensors; merge another checkpoint")
    return state


def _reason(error: BaseException) -> str:
    """Return the relevant line of torch's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "WeightsUnpickler error" in line or "Unsupported" in line]
    return (relevant or lines or [type(error).__name__])[0][:200]


def _mesh_state(mesh: Any) -> tuple[tuple[str, ...] | None, tuple[int, ...], int]:
    """Return dimension names, all ranks, and the last dimension's size of a mesh without values.

    Only its pickled state is available, whose attributes torch 2.9 renamed; test_merge_verl.py
    covers both.
    """
    state = vars(mesh)
    if "mesh_dim_names" in state:
        return tuple(state["mesh_dim_names"]), state["_flatten_mesh_list"], state["mesh"].shape[-1]
    names = mesh.mesh_dim_names
    return tuple(names) if names else None, state["_flatten_rank_map"], mesh.shape[-1]


def _placement(tensor: Any) -> Any:
    """Return how the last mesh dimension shards the tensor; None if each rank has all of it."""
    if not hasattr(tensor, "placements"):
        return None
    *replicas, placement = tensor.placements
    # excludes strided shards
    is_by_rows = type(placement).__name__ == "Shard" and placement.dim == 0
    if not (is_by_rows or placement.is_replicate()) or not all(
        other.is_replicate() for other in replicas
    ):
        raise CheckpointError(
            f"a tensor {tuple(tensor.shape)} has placements {tuple(tensor.placements)}, but verl's "
            "FSDP workers shard rows only"
        )
    return None if placement.is_replicate() else placement


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if hasattr(tensor, "placements") else tensor


def _stored(tensor: Any) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), tensor.dtype)


def _local_shape(tensor: Any, num_shards: int, position: int) -> tuple[int, ...]:
    """Return the shape of part `position`; rows are split like torch.chunk."""
    if _placement(tensor) is None:
        return tuple(tensor.shape)
    num_rows, *rest = tensor.shape
    size = -(-num_rows // num_shards)
    return (max(min(size, num_rows - position * size), 0), *rest)


def _coordinate(tensor: Any) -> int | None:
    """Return the part index that was pickled with the writing rank's mesh; None if unknown."""
    if not hasattr(tensor, "placements"):
        return None
    coordinate = vars(tensor.device_mesh).get("_coordinate_on_dim")
    return coordinate[-1] if coordinate else None


def _experts_in_files(model_files: Path) -> Literal["single"] | int | None:
    """Return how published files store experts, which transformers fuses in memory.

    "single": separate matrices per expert; the hidden size: fused and transposed; None: as in
    memory.
    """
    # transformers has no public API for this; test_merge_verl.py fails if it changes.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config = read_config(model_files)
    hidden_size = (config.get("text_config") or config).get("hidden_size")
    rules = get_checkpoint_conversion_mapping(config.get("model_type")) or ()
    fused = [
        rule
        for rule in rules
        if any(target.endswith(FUSED_NAME) for target in rule.target_patterns)
    ]
    sources = [pattern for rule in fused for pattern in rule.source_patterns]
    if all(pattern.endswith(FUSED_NAME) for pattern in sources):  # as in the files of Qwen3-VL-MoE
        is_turned = any(
            type(operation).__name__ == "Transpose"
            for rule in fused
            for operation in rule.operations
        )
        return hidden_size if is_turned else None
    if all(pattern.endswith((".gate_proj.weight", ".up_proj.weight")) for pattern in sources):
        return "single"
    raise CheckpointError(
        f"{config.get('model_type')} files name experts {' and '.join(sources)}, which is not "
        "supported; supported architectures include Qwen3-MoE and Qwen3-VL-MoE"
    )
