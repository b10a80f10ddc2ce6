"""Merging verl FSDP checkpoints written by real ranks restores the model bit for bit."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dapo_core.errors import CheckpointError, ModelError
from dapo_core.merge.run import merge_checkpoint
from dapo_core.model.folder import INDEX_FILE, MERGE_MANIFEST
from tests.checkpoints import Harmful
from tests.verl_folders import Case, load_weights, write_folders

CASES = [
    Case(1, (1,), "qwen3", True),
    Case(2, (1,), "qwen2", False),
    Case(2, (2,), "qwen2", False),
    Case(1, (2,), "qwen3", True),
    Case(2, (3,), "llama", True),
    Case(1, (3,), "qwen3_moe", False),
    Case(2, (4,), "qwen3_moe", False),  # five experts: 2, 2, 1 and none
    Case(2, (2, 2), "qwen3", True),
    Case(1, (2, 2), "llama", False),
]
THREE, HYBRID = CASES[5], CASES[7]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Path, Path]]:
    return write_folders(CASES, tmp_path_factory.mktemp("verl"))


def assert_same_model(merged: Path, original: Path) -> None:
    """Same tensor names and values in the files and in transformers."""
    assert load_weights(merged).keys() == load_weights(original).keys()
    for name, weight in load_weights(merged).items():
        assert torch.equal(weight, load_weights(original)[name]), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    model, report = loaded
    assert not any(report.values())
    expected = AutoModelForCausalLM.from_pretrained(original).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merged_model_equals_the_original(
    folders: dict[Case, tuple[Path, Path]], case: Case, tmp_path: Path
) -> None:
    original, step = folders[case]
    target = tmp_path / "merged"
    merge_checkpoint([step], target, verify_logits=True)
    assert_same_model(target, original)
    assert {path.name for path in target.iterdir()} == {MERGE_MANIFEST} | {
        path.name for path in original.iterdir()
    }
    manifest = json.loads((target / MERGE_MANIFEST).read_text())
    assert manifest["source"] == {
        "format": "verl",
        "name": "global_step_3",
        "shards": case.mesh[-1],
        "fsdp_version": case.fsdp,
    }
    assert manifest["logits"] == {"tokens": 64, "max_difference": 0.0}


def test_shards_from_two_nodes_are_merged(
    folders: dict[Case, tuple[Path, Path]], tmp_path: Path
) -> None:
    original, step = folders[THREE]
    first, second = tmp_path / "node0", tmp_path / "node1" / "actor"
    shutil.copytree(step / "actor", first)
    second.mkdir(parents=True)
    (first / "model_world_size_3_rank_1.pt").rename(second / "model_world_size_3_rank_1.pt")
    merge_checkpoint([second.parent, first], tmp_path / "merged", max_shard_bytes=40_000)
    assert_same_model(tmp_path / "merged", original)
    # experts of a layer, 5 x 3 x 16 kB, are not kept together
    for path in (tmp_path / "merged").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
    shutil.copy2(first / "model_world_size_3_rank_0.pt", second)
    with pytest.raises(CheckpointError, match=r"rank 0 has two files, \S+rank_0\.pt and"):
        merge_checkpoint([second, first], tmp_path / "again")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no model_world_size_W_rank_R\.pt"):
        merge_checkpoint([first, tmp_path / "empty"], tmp_path / "again")


def test_one_complete_replica_is_enough(
    folders: dict[Case, tuple[Path, Path]], tmp_path: Path
) -> None:
    original, step = folders[HYBRID]
    shutil.copytree(step, tmp_path / "step")
    (tmp_path / "step" / "actor" / "model_world_size_4_rank_1.pt").unlink()
    merge_checkpoint([tmp_path / "step"], tmp_path / "merged")  # ranks 2 and 3
    assert_same_model(tmp_path / "merged", original)
    (tmp_path / "step" / "actor" / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CheckpointError, match=r"shard model_world_size_4_rank_1\.pt of 4 is"):
        merge_checkpoint([tmp_path / "step"], tmp_path / "again")


def _shard(actor: Path, rank: int = 1) -> Path:
    return actor / f"model_world_size_3_rank_{rank}.pt"


def _truncate(actor: Path) -> None:
    os.truncate(_shard(actor), _shard(actor).stat().st_size // 2)


def _other_size(actor: Path) -> None:
    shutil.copy2(_shard(actor), actor / "model_world_size_4_rank_3.pt")


def _swap(actor: Path) -> None:
    shutil.copy2(_shard(actor, 0), _shard(actor, 1))


def _change(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(actor: Path) -> None:
        state = torch.load(_shard(actor), weights_only=True)
        change(state)
        torch.save(state, _shard(actor))

    return damage


def _rename(state: dict[str, Any]) -> None:
    state["model.norm.scale"] = state.pop("model.norm.weight")


def _halve(state: dict[str, Any]) -> None:
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float16)


def _shorten(state: dict[str, Any]) -> None:
    whole = state["model.norm.weight"]
    state["model.norm.weight"] = DTensor(whole.to_local()[:-1], whole._spec, requires_grad=False)


def _poison(state: dict[str, Any]) -> None:
    state["model.norm.weight"] = Harmful()


def _rewrite(compression: int) -> Callable[[Path], None]:
    """Rewrite the archive with the same records."""

    def damage(actor: Path) -> None:
        path = _shard(actor)
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in records.items():
                archive.writestr(name, content)

    return damage


def _flip_value(actor: Path) -> None:
    """Flip a bit of a tensor, which the record's CRC32 covers."""
    with zipfile.ZipFile(_shard(actor)) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    content = bytearray(_shard(actor).read_bytes())
    content[info.header_offset + 200] ^= 1
    _shard(actor).write_bytes(content)


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def damage(actor: Path) -> None:
        content = json.loads((actor / name).read_text())
        (actor / name).write_text(json.dumps({**content, **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda actor: _shard(actor).unlink(), r"shard model_world_size_3_rank_1\.pt of 3 is"),
        (_truncate, r"rank_1\.pt is not a complete torch\.save archive \(File is not a zip file\)"),
        (_rewrite(zipfile.ZIP_DEFLATED), r"rank_1\.pt has compressed or oversized records"),
        (_flip_value, r"rank_1\.pt is damaged or from another checkpoint: bytes [\d,]+ to [\d,]+"),
        (
            lambda actor: (
                _shard(actor).rename(actor.parent / "s")
                and _shard(actor).symlink_to(actor.parent / "s")
            ),
            r"rank_1\.pt is a symbolic link, which is not followed; copy the target file",
        ),
        (_other_size, r"rank_3\.pt and \S+rank_0\.pt were written by trainings with 4 and 3 ranks"),
        (_swap, r"rank_1\.pt does not match the other shards: .*part 0, not 1; copy it again"),
        (_change(_rename), r"rank_1\.pt does not .*: 2 names differ from the first shard, such as"),
        (_change(_halve), r"rank_1\.pt .* its model\.norm\.weight is part of \(64,\)"),
        (_change(_shorten), r"rank_1\.pt .* its part of model\.norm\.weight is"),  # 22, 22, 20
        (_change(_poison), r"rank_1\.pt is refused: it contains more than tensors, and loading it"),
        (_edit("fsdp_config.json", world_size=8), r"fsdp_config\.json says 8 ranks, the shard"),
        (_edit("huggingface/config.json", vocab_size=9), r"\S+weight in \S+ has shape \(\d+, 64\)"),
        (
            _edit("huggingface/config.json", num_hidden_layers=1),
            r"missing 0, unexpected 24 \(model\.layers\.1\.",
        ),  # 4 norms, 4 projections, the router, and 3 matrices of each of 5 experts
        *(
            (
                _edit("huggingface/config.json", architectures=names),
                r"config\.json in \S+ has architectures=.* builds a Qwen3MoeForCausalLM",
            )
            for names in ([], "", ["Foo"], ["GPT2LMHeadModel"])
        ),
        (_edit("huggingface/config.json", hidden_size="x"), "a config.json that transformers"),
        (
            lambda actor: (actor / "huggingface/config.json").write_text("{"),
            r"huggingface/config\.json cannot be read",
        ),
        (lambda actor: shutil.rmtree(actor / "huggingface"), r"lacks huggingface/config\.json"),
    ],
)
def test_a_damaged_checkpoint_is_reported_before_anything_is_written(
    folders: dict[Case, tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[THREE][1] / "actor", tmp_path / "actor")
    damage(tmp_path / "actor")
    with pytest.raises((CheckpointError, ModelError), match=message):
        merge_checkpoint([tmp_path / "actor"], tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} <= {"actor", "s"}


def test_tied_tensors_that_differ_are_refused(
    folders: dict[Case, tuple[Path, Path]], tmp_path: Path
) -> None:
    shutil.copytree(folders[HYBRID][1], tmp_path / "step")
    shard = tmp_path / "step" / "actor" / "model_world_size_4_rank_1.pt"
    state = torch.load(shard, weights_only=True)
    head = state["lm_head.weight"]
    state["lm_head.weight"] = DTensor(head.to_local() + 1, head._spec, requires_grad=False)
    torch.save(state, shard)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight"):
        merge_checkpoint([tmp_path / "step"], tmp_path / "merged")


def test_shards_of_two_steps_are_refused(
    folders: dict[Case, tuple[Path, Path]], tmp_path: Path
) -> None:
    _, step = folders[THREE]
    shutil.copytree(step / "actor", tmp_path / "a" / "global_step_3" / "actor")
    other = tmp_path / "b" / "global_step_4" / "actor"
    other.mkdir(parents=True)
    (tmp_path / "a" / "global_step_3" / "actor" / "model_world_size_3_rank_1.pt").rename(
        other / "model_world_size_3_rank_1.pt"
    )
    with pytest.raises(CheckpointError, match="are from global_step_3 and global_step_4; pass the"):
        merge_checkpoint([tmp_path / "a" / "global_step_3", other], tmp_path / "merged")


def test_index_and_config_match_what_transformers_writes(
    folders: dict[Case, tuple[Path, Path]], tmp_path: Path
) -> None:
    original, step = folders[HYBRID]
    merge_checkpoint([step], tmp_path / "merged", "bfloat16", max_shard_bytes=40_000)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", max_shard_size=40_000)
    ours, theirs = (
        json.loads((tmp_path / name / INDEX_FILE).read_text()) for name in ("merged", "saved")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("merged", "saved")
    ]
    assert configs[0] == configs[1]
    for name in ("merged", "saved"):
        for path in (tmp_path / name).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
