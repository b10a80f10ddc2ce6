"""Validation, the best checkpoint, and a training that begins from another one's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint import (
    best_checkpoint,
    checkpoint_folders,
    latest_checkpoint,
    read_state,
    read_step_metrics,
)
from dapo_core.config import Config
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.metrics import METRICS_FILE, read_metrics
from dapo_core.trainer import train
from tests.trainings import World, config_of

# Any other answer has another accuracy, so that validations of other weights differ.
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) % 3, "acc": sum(map(ord, solution_str)) % 101 / 100}
"""


@dataclass(frozen=True)
class Begun:
    """A training of four steps on two ranks, validated at every one."""

    output: Path
    scorer: Path
    validated: dict[int, float]  # step -> accuracy

    def config(self, ray_address: str, **changes: dict[str, Any]) -> Config:
        """Of it, with other keys."""
        sections = {
            "custom_reward": {"path": str(self.scorer)},
            "validation": {"every": 1, "num_prompts": 20},
            **changes,
        }
        sections["checkpoint"] = {"save_every": 3, "keep_last": 1, "keep_best": 1, **changes.get("checkpoint", {})}
        train = {"total_steps": 4, "learning_rate": 2e-2, "ray_address": ray_address}
        sections["train"] = {**train, **changes.get("train", {})}
        return config_of(**sections)


@pytest.fixture(scope="module")
def begun(world: World, ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun")
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    begun = Begun(folder / "output", scorer, {})

    def note(step: int, metrics: dict[str, float]) -> None:
        begun.validated[step] = metrics["validation/accuracy"]

    train(begun.config(ray_address), world.data, world.model, begun.output, note, held_out_path=world.data)
    return begun


def test_validation_is_told_and_decides_which_checkpoint_is_kept(begun: Begun) -> None:
    lines = read_metrics(begun.output / METRICS_FILE)
    for line in lines:
        assert (
            line["validation/accuracy"] == line["val-core/arithmetic/acc/mean@1"] == begun.validated[line["step"]]
        )
        assert line["validation/num_prompts"] == 20
        assert 0 < line["timing_s/testing"] < line["timing_s/step"]
    assert len(set(begun.validated.values())) > 1, "weights that change answer differently"
    best = max(begun.validated, key=lambda step: (begun.validated[step], -step))
    folder = begun.output / "checkpoints"
    assert [path.name for path in checkpoint_folders(folder)] == sorted({f"step_{best:06d}", "step_000004"})
    kept = best_checkpoint(folder)
    assert kept == folder / f"step_{best:06d}"
    assert read_step_metrics(kept)["validation/accuracy"] == begun.validated[best]


def test_another_begins_from_its_checkpoint_with_what_is_allowed(
    begun: Begun, world: World, ray_address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On one rank instead of two, at another rate; what is not allowed is refused before anything starts."""
    changed: dict[str, Any] = {"num_ranks": 1, "learning_rate": 1e-2, "total_steps": 5}
    resume = {"resume": str(begun.output)}

    def go(allowed: list[str], **train_changes: Any) -> None:
        config = begun.config(
            ray_address, train=changed | train_changes, checkpoint={**resume, "allow_changed": allowed}
        )
        train(config, world.data, world.model, tmp_path / "other", held_out_path=world.data)

    with pytest.raises(
        CheckpointError, match=r"\(train\.learning_rate 0\.02 -> 0\.01\).*allow_changed=\[train\.learn"
    ):
        go([])
    with pytest.raises(CheckpointError, match=r"\(train\.mini_prompts 2 -> 4\)"):
        go(["train.learning_rate"], mini_prompts=4)
    with pytest.raises(ConfigError, match=r"train\.learning_rat, .*did you mean train\.learning_rate"):
        go(["train.learning_rat"])
    assert not (tmp_path / "other" / METRICS_FILE).exists()
    go(["train.learning_rate"])
    assert "going on from step_000004 with train.learning_rate 0.02 -> 0.01" in caplog.text
    lines = read_metrics(tmp_path / "other" / METRICS_FILE)
    assert [line["step"] for line in lines] == [4, 5]  # where it begins is told, too
    assert lines[0]["actor/lr"] == pytest.approx(2e-2)
    assert lines[1]["actor/lr"] == pytest.approx(1e-2)  # 10 optimizer steps are past the warm-up of 6
    before = read_state(begun.output / "checkpoints" / "step_000004")
    after = latest_checkpoint(tmp_path / "other" / "checkpoints")
    assert after is not None
    assert read_state(after).prompt_position > before.prompt_position
    assert read_state(after).policy_version == before.policy_version + 2
    assert read_state(after).identity["train.learning_rate"] == 1e-2


def test_validation_without_a_held_out_set_is_refused(
    begun: Begun, world: World, ray_address: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"validation\.every=1 needs a held-out set; name one with --held-out"):
        train(begun.config(ray_address), world.data, world.model, tmp_path)
