"""Models that other trainers wrote are found in their outputs, merged, and refused if wrong."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.errors import CheckpointError
from dapo_core.merge.outputs import NEWEST_FILE, step_of, weights_in
from dapo_core.merge.run import merge_checkpoint
from dapo_core.model.folder import MERGE_MANIFEST
from tests.tiny_models import build_tiny
from tests.verl_folders import load_weights

pytestmark = pytest.mark.timeout(600)  # on two busy cores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("converted") / "model", "qwen3_moe", tie_word_embeddings=False
    )


def assert_merged(target: Path, model: Path) -> None:
    weights = load_weights(model)
    assert load_weights(target).keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in load_weights(target).items())
    assert json.loads((target / MERGE_MANIFEST).read_text())["source"]["format"] == "huggingface"
    assert {path.name for path in model.iterdir()} <= {path.name for path in target.iterdir()}


@pytest.mark.parametrize(
    "place", ["global_step_3/actor/huggingface", "global_step_3/actor/model/huggingface"]
)
def test_a_model_saved_by_the_trainer_is_merged(model: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(model, tmp_path / "t" / place)
    (tmp_path / "t" / NEWEST_FILE).write_text("3")
    merge_checkpoint([tmp_path / "t"], tmp_path / "merged", verify_logits=True)
    assert_merged(tmp_path / "merged", model)
    with pytest.raises(CheckpointError, match="is one checkpoint, so there is no best one"):
        merge_checkpoint([tmp_path / "t"], tmp_path / "best", checkpoint="best")


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("global_step_3/actor/dist_ckpt", r"verl\.model_merger .* --local_dir \S+/actor "),
        ("global_step_3/actor/model/dist_ckpt", r"verl\.model_merger merge --backend megatron"),
        ("iter_0000003/mp_rank_00", r"run its convert_ckpt\.py \(MindSpeed-RL\) or mm-convert"),
    ],
)
def test_megatron_weights_name_the_converter(tmp_path: Path, place: str, command: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / NEWEST_FILE).write_text("3")
    with pytest.raises(CheckpointError, match=rf"contains Megatron weights of .*{command}"):
        merge_checkpoint([tmp_path], tmp_path / "merged")


def test_only_complete_checkpoints_count(tmp_path: Path, model: Path) -> None:
    for step in (2, 10, 12):
        shutil.copytree(model, tmp_path / f"verl/global_step_{step}/actor/huggingface")
        shutil.copytree(model, tmp_path / f"trl/checkpoint-{step}")
    assert weights_in(tmp_path / "verl") == tmp_path / "verl"  # no step is known to be complete
    (tmp_path / "verl" / NEWEST_FILE).write_text("10\n")
    found = weights_in(tmp_path / "verl")
    assert found == tmp_path / "verl/global_step_10/actor/huggingface"
    assert step_of(found) == 10
    (tmp_path / "verl" / NEWEST_FILE).write_text("")
    with pytest.raises(CheckpointError, match=r"txt contains '', but \S+global_step_ does not"):
        weights_in(tmp_path / "verl")
    for step in (2, 10):  # of 12, the last file is missing
        (tmp_path / f"trl/checkpoint-{step}/trainer_state.json").write_text("{}")
    assert weights_in(tmp_path / "trl") == tmp_path / "trl/checkpoint-10"
    shutil.copytree(model, tmp_path / "trl", dirs_exist_ok=True)
    assert weights_in(tmp_path / "trl") == tmp_path / "trl"  # saved at the end


def _change(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        [path] = folder.glob("*.safetensors")
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return damage


def _cut(folder: Path) -> None:
    [path] = folder.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 100)


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _change(lambda weights: weights["model.norm.weight"].fill_(float("nan"))),
            r"norm\.weight in \S+ contains NaN",
        ),
        (
            _change(lambda weights: weights["lm_head.weight"][3].fill_(float("inf"))),
            r"lm_head\.weight in \S+ contains Na",
        ),
        (_change(lambda weights: weights.pop("lm_head.weight")), r"missing 1 \(lm_head\.weight\)"),
        (_change(lambda weights: weights.update(extra=torch.ones(2))), "missing 0, unexpected 1"),
        (
            _change(lambda weights: weights.update({"model.norm.weight": torch.ones(3)})),
            r"model\.norm\.weight in \S+ has shape \(3,\)",
        ),
        (_cut, r"is not a complete model: .*file not fully covered"),
        (_no_tokenizer, r"is not a complete model: \S* ?model folder \S+ lacks a tokenizer"),
    ],
    ids=["nan", "infinity", "missing", "extra", "shape", "cut", "tokenizer"],
)
def test_a_wrong_conversion_is_refused(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint([folder], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
