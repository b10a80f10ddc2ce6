"""What a training takes over from a checkpoint, which one it refuses, and how it ends: no rank, no engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_core import trainer as trainer_module
from dapo_core.checkpoint import TrainerState, latest_checkpoint, require_same_training, state_files
from dapo_core.data import Prompt, PromptStream
from dapo_core.errors import CheckpointError, ConfigError, NotEnoughSignal, WorkerDied
from dapo_core.identity import training_identity
from dapo_core.metrics import METRICS_FILE, MetricsLog, read_metrics
from dapo_core.trainer import Trainer
from tests.checkpoints import FileShards, make_state
from tests.configs import make_config
from tests.sources import MIXED, Clock, SlowSource
from tests.tiny_models import build_tiny_qwen3

PROMPTS = [Prompt(index, (index + 5,), "arithmetic", "1") for index in range(7)]


class AskedShards(FileShards):
    """Raises the error when asked whether an asynchronous save has ended."""

    error: BaseException | None = None

    def is_saved(self) -> bool:
        if self.error is not None:
            raise self.error
        return super().is_saved()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"))


def _trainer(
    model_path: Path, output: Path, shards: FileShards | None = None, **sections: dict[str, Any]
) -> Trainer:
    """Of ranks that have nothing to load and no weights to hand out."""
    config = make_config(model_path, **sections)
    policy: Any = shards or FileShards()
    policy.device_name, policy.load, policy.weight_sizes = lambda: "cpu", lambda folder: None, dict
    rollouts = SimpleNamespace(load_weights=lambda buckets, version: [version])
    cluster: Any = SimpleNamespace(policy=policy, rollouts=rollouts)
    stream = PromptStream(PROMPTS, config.run.seed, config.data.shuffle)
    identity = training_identity(config, stream, model_path)
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Trainer(config, cluster, stream, model_path, output, identity)


def _checkpoint(folder: Path, state: TrainerState) -> Path:
    checkpoint = folder / f"step_{state.step:06d}"
    checkpoint.mkdir(parents=True)
    for name, text in state_files(state).items():
        (checkpoint / name).write_text(text, encoding="utf-8")
    return checkpoint


def test_all_of_a_state_is_taken_over(model_path: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_path, tmp_path)
    state = replace(make_state(20), identity=trainer.identity, kl_coefficient=0.25)
    trainer.resume(_checkpoint(tmp_path / "checkpoints", state))
    assert (trainer.step, trainer.policy_version, trainer.stream.position) == (20, 320, 123)
    assert (trainer.sampler.surplus, trainer.sampler.unfinished) == (state.surplus, state.unfinished)
    assert trainer.kl_controller.coefficient == 0.25


@pytest.mark.parametrize(
    ("sections", "coefficient"),
    [
        ({"rollout": {"group_size": 8}}, 0.25),  # the groups that wait are of 16
        ({"algorithm": {"kl": {"target": 0.5}}}, 0.25),  # adapted so far, and from here on to another target
        ({"algorithm": {"kl": {"coefficient": 0.5}}}, 0.5),  # what a person set counts
    ],
)
def test_a_training_changed_on_its_way_drops_groups_and_takes_a_new_kl_coefficient(
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, dict[str, Any]],
    coefficient: float,
) -> None:
    identity = _trainer(model_path, tmp_path / "old").identity
    state = replace(make_state(20), identity=identity, kl_coefficient=0.25)
    trainer = _trainer(model_path, tmp_path / "new", **sections)
    trainer.resume(_checkpoint(tmp_path / "old" / "checkpoints", state))
    assert (trainer.sampler.surplus, trainer.sampler.unfinished) == ([], [])
    assert "4 groups sampled before the change are dropped" in caplog.text
    assert trainer.kl_controller.coefficient == coefficient


def test_lines_of_another_training_are_no_part_of_one_begun_from_a_path(model_path: Path, tmp_path: Path) -> None:
    """Of one that was begun here and killed before its first checkpoint; the own lines stay."""
    trainer = _trainer(model_path, tmp_path / "new")
    state = replace(make_state(3), identity=trainer.identity)
    log = MetricsLog(tmp_path / "new", 0)
    for step in (1, 2, 3, 4):
        log.append(step, step, {"of": 1.0})
    trainer.resume(_checkpoint(tmp_path / "old" / "checkpoints", state))
    (line,) = read_metrics(tmp_path / "new" / METRICS_FILE)
    assert (line["step"], line["policy_version"], line["critic/score/mean"]) == (3, 48, -1 / 3)
    trainer.resume(_checkpoint(tmp_path / "new" / "checkpoints", replace(state, step=4)))
    assert [line["step"] for line in read_metrics(tmp_path / "new" / METRICS_FILE)] == [3, 4]


@pytest.mark.parametrize(("step", "is_own", "is_refused"), [(4, True, False), (5, True, True), (4, False, True)])
def test_a_checkpoint_without_a_step_to_follow_is_refused(
    model_path: Path, tmp_path: Path, step: int, is_own: bool, is_refused: bool
) -> None:
    """Where 4 steps are asked for; a finished training started again has nothing to do, which is no error."""
    trainer = _trainer(model_path, tmp_path, train={"total_steps": 4})
    folder = tmp_path / ("checkpoints" if is_own else "other")
    start = _checkpoint(folder, replace(make_state(step), identity=trainer.identity))
    told = []
    try:
        require_same_training(trainer.config, start, tmp_path / "checkpoints", trainer.identity)
    except ConfigError as error:
        told.append(str(error))
    assert bool(told) == is_refused
    if is_refused:
        assert told[0].startswith(
            f"{start} is of training step {step}, so that train.total_steps=4 leaves no step"
        )
        assert f"raise it above {step}" in told[0]


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), NotEnoughSignal("few groups")])
@pytest.mark.parametrize("failure", [None, WorkerDied("rank 1"), CheckpointError("disk full")])
def test_what_ends_a_training_is_told_whatever_becomes_of_the_checkpoint_in_flight(
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reason: BaseException,
    failure: BaseException | None,
) -> None:
    """Above all, an interrupted training whose ranks are gone as well must not be started again."""
    shards = AskedShards()
    trainer = _trainer(model_path, tmp_path, shards)

    def run_step() -> dict[str, float]:
        trainer.checkpoints.begin(make_state(5))
        shards.error = failure
        raise reason

    monkeypatch.setattr(trainer, "run_step", run_step)
    with pytest.raises(type(reason)) as caught:
        trainer.run()
    assert caught.value is reason
    assert (latest_checkpoint(tmp_path / "checkpoints") is None) == (failure is not None)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == (failure is not None)
    assert all(str(failure) in error for error in errors)


def test_a_checkpoint_is_published_while_groups_are_waited_for(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's draw may take half an hour: a kill in it must not cost a checkpoint whose shards are all there."""
    monkeypatch.setattr(trainer_module, "POLL_SECONDS", 0.0)
    trainer = _trainer(model_path, tmp_path, train={"train_prompts": 1, "mini_prompts": 1})
    trainer.checkpoints.begin(make_state(5))
    named: list[Path | None] = []

    class Source(SlowSource):
        def finished(self) -> list[Any]:
            named.append(latest_checkpoint(tmp_path / "checkpoints"))
            return super().finished()

    trainer.sampler.source = Source([MIXED], Clock(), seconds=1.0, pause=4)
    trainer.sampler.draw(1)
    assert named == [None, None, *[tmp_path / "checkpoints" / "step_000005"] * 2]  # written at the second question
    assert trainer._polled_seconds > 0
