"""Layouts of verl shards: placements, meshes pickled by several torch versions, fused experts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from dapo_core.errors import CheckpointError
from dapo_core.merge.run import merge_checkpoint
from dapo_core.merge.verl import VerlSource, find_shards
from dapo_core.model.names import file_name
from dapo_core.policy.requirements import trainable_model
from tests.ranks import run_ranks
from tests.tiny_vision import FAMILIES, Family, build_tiny_vision
from tests.verl_folders import load_weights


def _save_placements(rank: int, folder: Path) -> None:
    """Save layouts beyond verl's models: a buffer, a replica, a scalar, split columns."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    whole = torch.arange(15.0).reshape(5, 3)
    state = {
        "rows": torch.distributed.tensor.distribute_tensor(whole, mesh, [Shard(0)]),
        "single": torch.distributed.tensor.distribute_tensor(whole[:1], mesh, [Shard(0)]),
        "same": torch.distributed.tensor.distribute_tensor(whole, mesh, [Replicate()]),
        "buffer": whole + 1,
        "count": torch.tensor(7),
    }
    columns = torch.distributed.tensor.distribute_tensor(whole, mesh, [Shard(1)])
    partial = DTensor.from_local(whole, mesh, [Partial()])
    kinds = {"good": {}, "columns": {"bad": columns}, "partial": {"bad": partial}}
    for name, further in kinds.items():
        (folder / name / "huggingface").mkdir(parents=True, exist_ok=True)
        (folder / name / "huggingface" / "config.json").write_text("{}")
        torch.save({**state, **further}, folder / name / f"model_world_size_2_rank_{rank}.pt")
    tensor_parallel = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    (folder / "tp" / "huggingface").mkdir(parents=True, exist_ok=True)
    (folder / "tp" / "huggingface" / "config.json").write_text("{}")
    split = torch.distributed.tensor.distribute_tensor(whole, tensor_parallel, [Shard(0)])
    torch.save({"rows": split}, folder / "tp" / f"model_world_size_2_rank_{rank}.pt")
    _like_torch_2_7()
    (folder / "old" / "huggingface").mkdir(parents=True, exist_ok=True)
    (folder / "old" / "huggingface" / "config.json").write_text("{}")
    torch.save({"rows": state["rows"]}, folder / "old" / f"model_world_size_2_rank_{rank}.pt")


def _like_torch_2_7() -> None:
    """Make this process pickle meshes with the attributes used before torch 2.9."""

    def state(mesh: DeviceMesh) -> dict[str, Any]:
        return {
            "device_type": mesh.device_type,
            "mesh": mesh.mesh,
            "mesh_dim_names": mesh.mesh_dim_names,
            "_flatten_mesh_list": tuple(mesh.mesh.flatten().tolist()),
            "_thread_id": None,
            "_coordinate_on_dim": mesh.get_coordinate(),
            "_dim_group_infos": [("", [0, 1], "mesh_fsdp")],
        }

    DeviceMesh.__getstate__ = state  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    run_ranks(2, _save_placements, folder)
    return folder


def test_every_placement_is_read_exactly_once(placed: Path) -> None:
    source = VerlSource(find_shards([placed / "good"]))
    whole = torch.arange(15.0).reshape(5, 3)
    assert {
        name: [block.num_bytes for block in source.blocks(name)] for name in source.tensors
    } == {
        "rows": [36, 24],  # ceil(5 / 2) = 3 rows of 3 x 4 bytes, and 2
        "single": [12],  # the second rank has none
        "same": [60],
        "buffer": [60],
        "count": [8],
    }
    assert torch.equal(_values(source, "rows"), whole.flatten())
    assert torch.equal(_values(source, "same"), whole.flatten())
    assert torch.equal(_values(source, "buffer"), whole.flatten() + 1)
    assert _values(source, "count").tolist() == [7]


def _values(source: VerlSource, name: str) -> torch.Tensor:
    content = b"".join(bytes(part) for block in source.blocks(name) for part in block.read())
    return torch.frombuffer(bytearray(content), dtype=source.tensors[name].dtype)


def test_meshes_pickled_by_older_torch_are_supported(placed: Path) -> None:
    source = VerlSource(find_shards([placed / "old"]))
    assert torch.equal(_values(source, "rows"), torch.arange(15.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("columns", r"a tensor \(5, 3\) has placements \(Shard\(dim=1\),\), but verl's FSDP"),
        ("partial", r"a tensor \(5, 3\) has placements \(Partial\(sum\),\), but verl's"),
        ("tp", r"written on a mesh \('tp',\) of 2 ranks; only \('fsdp',\) and \('ddp', 'fsdp'\)"),
    ],
)
def test_layouts_that_fsdp_never_writes_are_refused(placed: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        VerlSource(find_shards([placed / name]))


def _vision_moe() -> Any:
    """A tiny Qwen3-VL-MoE, whose published files have fused experts."""
    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        dtype="float32",
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def _write_rows(actor: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the state as two verl ranks would, without starting them."""
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
        shards = {}
        for name, tensor in state.items():
            parts = [*tensor.chunk(2), tensor[:0]]
            shards[name] = DTensor.from_local(
                parts[rank].clone(),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        torch.save(shards, actor / f"model_world_size_2_rank_{rank}.pt")
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("transformers_version", [4, 5])
def test_fused_experts_keep_names_and_layout_of_published_files(
    tmp_path: Path, transformers_version: int
) -> None:
    """transformers 4 keeps the files' layout, [E, H, 2I] and [E, I, H]; version 5 turns it."""
    model = _vision_moe()
    model.config.save_pretrained(tmp_path / "actor" / "huggingface")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    published = {
        name: tensor.transpose(1, 2).contiguous()
        if name.endswith(("gate_up_proj", "down_proj"))
        else tensor
        for name, tensor in state.items()
    }
    _write_rows(tmp_path / "actor", state if transformers_version == 5 else published)
    merge_checkpoint([tmp_path], tmp_path / "merged", verify_logits=True)
    merged = load_weights(tmp_path / "merged")
    assert merged["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 32, 48)
    assert merged.keys() == published.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in published.items())
    model.save_pretrained(tmp_path / "transformers")
    assert load_weights(tmp_path / "transformers").keys() == merged.keys()
    loaded = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_reads_pictures_keeps_its_processor_and_can_be_trained(
    family: Family, tmp_path: Path
) -> None:
    folder = build_tiny_vision(tmp_path / "model", family, is_tied=family == "qwen3_vl")
    parts = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder, tmp_path / "actor" / "huggingface", ignore=parts)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    _write_rows(tmp_path / "actor", dict(model.state_dict()))
    merge_checkpoint([tmp_path / "actor"], tmp_path / "merged", verify_logits=True)
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    trainable_model(tmp_path / "merged", 1, 1)
    before, after = (load_weights(tmp_path / name) for name in ("model", "merged"))
    assert len(before) == len(after)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[file_name(name, before)]), name
