"""Checkpoints on disk: complete or invisible, the newest last, and a state that comes back equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_core.checkpoint import (
    STATE_FILE,
    TrainerState,
    checkpoint_folders,
    copy_model_files,
    latest_checkpoint,
    read_state,
    write_checkpoint,
)
from dapo_core.data import Prompt
from dapo_core.engines import Response
from dapo_core.errors import CheckpointError
from dapo_core.identity import refuse_other_training
from dapo_core.rollout import GroupRequest
from tests.batches import make_group


def _state(step: int) -> TrainerState:
    groups = [make_group([1.0, -1.0], index, [3, 0], policy_version=index) for index in (4, 9)]
    awkward = [replace(groups[0].rollouts[0], rollout_log_probs=[-0.1, -1 / 3, -5e-324], overlong_penalty=-0.3)]
    surplus = [(step, replace(groups[0], rollouts=awkward)), (step - 1, groups[1])]
    prompt = Prompt(7, (3, 4), "arithmetic", "1", {"level": 3, "answers": [1.5, None]})
    responses = [Response("12/0", [5, 6], [-0.1, -1 / 3], "stop"), Response("12/1", [5], [-2.5], "abort")]
    unfinished = [
        (step, GroupRequest(12, prompt, step - 1, responses, policy_version=8)),
        (step, GroupRequest(13, replace(prompt, index=8), step)),
    ]
    return TrainerState(
        step=step,
        policy_version=step * 16,
        prompt_position=123,
        surplus=surplus,
        unfinished=unfinished,
        kl_coefficient=0.001,
        metrics={"critic/score/mean": -1 / 3},
        identity={"run.seed": 3, "train.learning_rate": 1e-6},
    )


def _save(text: str = "shard") -> Callable[[str], None]:
    def save(folder: str) -> None:
        (Path(folder) / "0_0.distcp").write_text(text, encoding="utf-8")

    return save


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "nested").mkdir(parents=True)
    kept = ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json")
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5", "x.gguf")
    for name in (*kept, *weights, "manifest.json"):
        (folder / name).write_text(name, encoding="utf-8")
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def test_the_state_comes_back_equal_to_the_bit(tmp_path: Path, model_path: Path) -> None:
    state = _state(20)
    target = write_checkpoint(tmp_path / "checkpoints", state, model_path, _save(), keep_last=2)
    assert target.name == "step_000020"
    read = read_state(target)
    assert read == state
    assert json.loads((target / "tensor_names.json").read_text()) == ["lm_head.weight", "model.norm.weight"]
    assert read.surplus[0][1].prompt.prompt_ids == state.surplus[0][1].prompt.prompt_ids
    assert read.unfinished[0][1].prompt == state.unfinished[0][1].prompt
    assert (target / "0_0.distcp").read_text(encoding="utf-8") == "shard"


def test_a_checkpoint_carries_the_model_files_without_weights(tmp_path: Path, model_path: Path) -> None:
    copy_model_files(model_path, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_the_newest_are_kept(tmp_path: Path, model_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15, 20):
        write_checkpoint(folder, _state(step), model_path, _save(), keep_last=2)
    assert [path.name for path in checkpoint_folders(folder)] == ["step_000015", "step_000020"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000015", "step_000020"]
    assert latest_checkpoint(folder) == folder / "step_000020"
    assert latest_checkpoint(tmp_path / "none") is None


def test_folders_are_ordered_by_step_and_only_complete_ones_count(tmp_path: Path) -> None:
    for name in ("step_999999", "step_1000000", "step_000007", "step_000008.partial", "step_9.old", "steps"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_2000000").write_text("a file", encoding="utf-8")
    names = [path.name for path in checkpoint_folders(tmp_path)]
    assert names == ["step_000007", "step_999999", "step_1000000"]


def test_a_write_that_fails_leaves_the_older_checkpoint_as_the_newest(tmp_path: Path, model_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def fail(path: str) -> None:
        _save("half")(path)
        raise OSError("no space left")

    write_checkpoint(folder, _state(5), model_path, _save(), keep_last=1)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(folder, _state(10), model_path, fail, keep_last=1)
    assert latest_checkpoint(folder) == folder / "step_000005"
    assert read_state(folder / "step_000005") == _state(5)
    write_checkpoint(folder, _state(11), model_path, _save(), keep_last=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000005", "step_000011"]


def test_a_step_written_again_replaces_the_older_one(tmp_path: Path, model_path: Path) -> None:
    write_checkpoint(tmp_path / "c", _state(5), model_path, _save("first"), keep_last=1)
    target = write_checkpoint(tmp_path / "c", _state(5), model_path, _save("second"), keep_last=1)
    assert (target / "0_0.distcp").read_text(encoding="utf-8") == "second"


@pytest.mark.parametrize(
    "damage", ["", '{"step": 5', "[]", '"text"', "lacking", "unknown", "surplus", "unfinished"]
)
def test_a_state_that_cannot_be_read_names_the_way_out(tmp_path: Path, model_path: Path, damage: str) -> None:
    target = write_checkpoint(tmp_path / "c", _state(5), model_path, _save(), keep_last=1)
    values = json.loads((target / STATE_FILE).read_text(encoding="utf-8"))
    if damage == "lacking":
        del values["policy_version"]
    elif damage == "unknown":
        values["surprise"] = 1
    elif damage == "surplus":
        values["surplus"][0][1]["rollouts"][0]["surprise"] = 1
    elif damage == "unfinished":
        del values["unfinished"][0][1]["responses"][0]["finish_reason"]
    text = json.dumps(values) if damage in {"lacking", "unknown", "surplus", "unfinished"} else damage
    (target / STATE_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"trainer_state\.json cannot be read .* remove the folder step_000005"
    ):
        read_state(target)
    (target / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="continue from the checkpoint before it"):
        read_state(target)


def test_a_checkpoint_of_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    before = {"run.seed": 3, "train.learning_rate": 1e-6, "prompts": "ab"}
    refuse_other_training(tmp_path, before, dict(before))
    with pytest.raises(CheckpointError, match=r"another training \(prompts 'ab' -> 'cd', run\.seed 3 -> 4\)"):
        refuse_other_training(tmp_path, before, {**before, "run.seed": 4, "prompts": "cd"})
