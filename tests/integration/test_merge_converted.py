"""Converted weights of other trainers are found, merged completely and refused if wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.checkpoint.others import NEWEST_FILE, newest_other, other_checkpoints
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.merge.run import merge_checkpoint
from dapo_core.model.folder import MERGE_MANIFEST, copy_model_files
from flows.config import Config
from tasks.external.conversion import converted
from tests.configs import make_config
from tests.stand_in_trainer import install
from tests.tiny_models import build_tiny
from tests.verl_folders import load_weights

pytestmark = pytest.mark.timeout(600)  # on two busy cores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("converted") / "model", "qwen3_moe", tie_word_embeddings=False
    )


def training(folder: Path, model: Path, *parts: str) -> Path:
    """A training output with the model's weights in the folder `parts`; step 3 is the newest."""
    shutil.copytree(model, folder.joinpath("checkpoints", *parts))
    copy_model_files(model, folder / "trainer" / "model")
    (folder / "checkpoints" / NEWEST_FILE).write_text("3")
    return folder


def config_of(backend: str = "verl", **external: object) -> Config:
    return make_config(
        train={"backend": backend, "device": "cuda"},
        external={"python": sys.executable, **external},
    )


def assert_merged(target: Path, model: Path) -> None:
    weights = load_weights(model)
    assert load_weights(target).keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in load_weights(target).items())
    assert json.loads((target / MERGE_MANIFEST).read_text())["source"]["format"] == "huggingface"
    assert {path.name for path in model.iterdir()} <= {path.name for path in target.iterdir()}


@pytest.mark.parametrize(
    "parts", [("actor", "huggingface"), ("actor", "model", "huggingface")], ids="/".join
)
def test_a_model_saved_by_the_trainer_is_merged(
    model: Path, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    output = training(tmp_path / "t", model, "global_step_3", *parts)
    merge_checkpoint([output], tmp_path / "merged", verify_logits=True)
    assert_merged(tmp_path / "merged", model)


def test_verls_merger_converts_distributed_weights(model: Path, tmp_path: Path) -> None:
    config = config_of(env=install(tmp_path / "site"))
    output = training(tmp_path / "t", model, "global_step_3", "actor", "dist_ckpt")
    with pytest.raises(CheckpointError, match="actor contains distributed Megatron"):
        merge_checkpoint([output], tmp_path / "merged")
    lines: list[str] = []
    with converted(config, [output], tmp_path / "merged", lines.append) as sources:
        merge_checkpoint(sources, tmp_path / "merged")
    assert_merged(tmp_path / "merged", model)
    assert lines == [f"merging {output}/checkpoints/global_step_3/actor/dist_ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "site", "t"]


def test_external_converter_converts_mindspeed_weights(model: Path, tmp_path: Path) -> None:
    output = training(tmp_path / "t", model, "iter_0000003", "mp_rank_00")
    with (
        pytest.raises(ConfigError, match=r"set external\.converter to its command"),
        converted(config_of(), [output], tmp_path / "merged"),
    ):
        pass
    # Like MindSpeed-RL's converter, it writes to a subfolder of the model folder.
    script = (
        "set -e; cp -r {checkpoint}/iter_*/mp_rank_00 {model}/mg2hg; rm {model}/mg2hg/*token* "
        "{model}/mg2hg/conf*"
    )
    config = config_of(converter=f"sh -c '{script}'")
    with converted(config, [output], tmp_path / "merged") as sources:
        merge_checkpoint(sources, tmp_path / "merged")
    assert_merged(tmp_path / "merged", model)


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


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    assert newest_other(tmp_path) is None  # none is complete
    (tmp_path / NEWEST_FILE).write_text("10\n")
    assert [other.step for other in other_checkpoints(tmp_path)] == [2, 4, 10]
    with pytest.raises(CheckpointError, match="global_step_10/actor has no weights in a known"):
        _ = other_checkpoints(tmp_path)[-1].form
    (tmp_path / NEWEST_FILE).write_text("")
    with pytest.raises(CheckpointError, match=r"txt contains '' instead of a step"):
        newest_other(tmp_path)
