"""A trainer without ranks and engines: what it restores from a checkpoint, and how it ends."""

import ast
import inspect
import logging
import signal
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_core.checkpoint import writer
from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.identity import training_identity
from dapo_core.checkpoint.resume import require_same_training
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.draw.account import Draw, TokenAccount
from dapo_core.draw.backoff import Backoff
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.draw.report import NotEnoughSignal
from dapo_core.draw.sampler import Sampler
from dapo_core.errors import CheckpointError, ConfigError, WorkerDied
from dapo_core.machine.stopping import StopRequest, StopRequested
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.log import METRICS_FILE, MetricsLog
from dapo_core.metrics.step_files import (
    GENERATIONS,
    ROLLOUTS,
    StepFiles,
    read_rows,
    saved_steps,
    step_file,
)
from dapo_core.model.inputs import ModelInput
from dapo_core.trainer import Trainer, is_due
from durable import read_json_lines
from tests.batches import make_group
from tests.checkpoints import FileShards, make_state, write_state
from tests.configs import make_config
from tests.plain import plain
from tests.sources import MIXED, Clock, SlowSource

PROMPTS = [Prompt(index, ModelInput((index + 5,)), "arithmetic", "1") for index in range(7)]


class AskedShards(FileShards):
    """Raises the error when polled for an asynchronous save."""

    error: BaseException | None = None

    def is_saved(self) -> bool:
        if self.error is not None:
            raise self.error
        return super().is_saved()


def _trainer(
    model_path: Path, output: Path, shards: FileShards | None = None, **sections: dict[str, Any]
) -> Trainer:
    """A trainer whose ranks load nothing and send no weights."""
    config = make_config(model_path, **sections)
    policy: Any = shards or FileShards()
    policy.device_name, policy.load, policy.take_memory = lambda: "cpu", lambda folder: None, dict
    weights = SimpleNamespace(send=lambda version: None)
    cluster: Any = SimpleNamespace(policy=policy, rollouts=SimpleNamespace(), weights=weights)
    stream = PromptStream(PROMPTS, config.run.seed, config.data.shuffle)
    identity = training_identity(config, stream.digest, model_path)
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    tokenizer = SimpleNamespace(decode=str)
    validation: Any = SimpleNamespace(tokenizer=tokenizer, files=StepFiles(output, GENERATIONS))
    return Trainer(config, cluster, stream, model_path, output, identity, validation)


def test_a_resume_restores_the_whole_state(model_path: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_path, tmp_path, sampler={"backoff": True})
    trainer.stream.backoff = Backoff()
    state = replace(make_state(20), identity=trainer.identity, kl_coefficient=0.25)
    trainer.resume(write_state(tmp_path / "checkpoints", state))
    assert trainer.stream.backoff.visits == {7: [2, 1], 4: [0, 3]}
    assert trainer._state({}).visits == state.visits
    assert (trainer.num_steps, trainer.policy_version, trainer.stream.position) == (20, 320, 123)
    assert plain(trainer.sampler.surplus) == plain(state.surplus)
    assert plain(trainer.sampler.unfinished) == plain(state.unfinished)
    assert trainer.kl.coefficient == 0.25


def test_a_resumed_training_has_the_responses_of_each_step_once(
    model_path: Path, tmp_path: Path
) -> None:
    """It was killed in step 23, while that step's file was written."""
    trainer = _trainer(model_path, tmp_path, train={"save_rollouts_every": 1})
    for step in (1, 20, 21, 22):
        trainer._save_rollouts(step, [make_group([1.0, -1.0], step)], PhaseTimer())
    (tmp_path / ROLLOUTS / "step_23.partial").write_text("{")
    state = replace(make_state(20), identity=trainer.identity)
    trainer.resume(write_state(tmp_path / "checkpoints", state))
    assert saved_steps(tmp_path, ROLLOUTS) == [1, 20]
    assert len(list((tmp_path / ROLLOUTS).iterdir())) == 2
    trainer.resume(None)
    assert saved_steps(tmp_path, ROLLOUTS) == []


@pytest.mark.parametrize(
    ("every", "num_prompts", "steps", "numbers"),
    [(10, 1, [1, 10, 20, 25], [0, 0]), (10, None, [1, 10, 20, 25], [0, 0, 1, 1]), (0, 8, [], [])],
)
def test_responses_are_saved_at_the_first_step_at_every_nth_and_at_the_last(
    model_path: Path,
    tmp_path: Path,
    every: int,
    num_prompts: int | None,
    steps: list[int],
    numbers: list[int],
) -> None:
    keys = {"save_rollouts_every": every, "num_saved_prompts": num_prompts, "total_steps": 25}
    trainer = _trainer(model_path, tmp_path, train=keys)
    groups = [make_group([1.0, -1.0], number, num_response_tokens=[2, 3]) for number in (0, 1)]
    for step in range(1, 26):
        trainer._save_rollouts(step, groups, PhaseTimer())
    assert saved_steps(tmp_path, ROLLOUTS) == steps
    rows = [*read_rows(step_file(tmp_path, ROLLOUTS, 25))]
    assert [row["prompt_number"] for row in rows] == numbers
    assert [row["verdict"] for row in rows[:2]] == ["right", "wrong"][: len(rows)]
    assert [row["response_tokens"] for row in rows[:2]] == [2, 3][: len(rows)]


@pytest.mark.parametrize(
    ("sections", "coefficient"),
    [
        ({"rollout": {"group_size": 8}}, 0.25),  # the waiting groups have 16 responses
        # adapted so far, from now on to another target
        ({"algorithm": {"kl": {"target": 0.5}}}, 0.25),
        ({"algorithm": {"kl": {"coefficient": 0.5}}}, 0.5),  # an explicit change wins
    ],
)
def test_a_changed_training_resamples_waiting_prompts_and_uses_the_new_kl_coefficient(
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, dict[str, Any]],
    coefficient: float,
) -> None:
    identity = _trainer(model_path, tmp_path / "old").identity
    state = replace(make_state(20), identity=identity, kl_coefficient=0.25)
    trainer = _trainer(model_path, tmp_path / "new", **sections)
    trainer.resume(write_state(tmp_path / "old" / "checkpoints", state))
    waiting = trainer.sampler.unfinished
    assert [each.group_id for each in waiting] == [4, 9, 12, 13]
    assert [each.prompt.index for each in waiting] == [4, 9, 7, 8]
    assert not any(each.responses for each in waiting)
    assert trainer.sampler.surplus == []
    assert "discarding 4 groups sampled before the change" in caplog.text
    assert trainer.kl.coefficient == coefficient


def test_metrics_of_another_training_are_not_mixed_in(model_path: Path, tmp_path: Path) -> None:
    """The folder has lines of a training that was killed before its first checkpoint."""
    trainer = _trainer(model_path, tmp_path / "new")
    state = replace(make_state(3), identity=trainer.identity)
    log = MetricsLog(tmp_path / "new", 0)
    for step in (1, 2, 3, 4):
        log.append(step, step, {"of": 1.0})
    trainer.resume(write_state(tmp_path / "old" / "checkpoints", state))
    (line,) = read_json_lines(tmp_path / "new" / METRICS_FILE)
    assert (line["step"], line["policy_version"], line["critic/score/mean"]) == (3, 48, -1 / 3)
    trainer.resume(write_state(tmp_path / "new" / "checkpoints", replace(state, step=4)))
    assert [line["step"] for line in read_json_lines(tmp_path / "new" / METRICS_FILE)] == [3, 4]


@pytest.mark.parametrize(
    ("step", "is_own", "is_refused"), [(4, True, False), (5, True, True), (4, False, True)]
)
def test_a_checkpoint_beyond_total_steps_is_refused(
    model_path: Path, tmp_path: Path, step: int, is_own: bool, is_refused: bool
) -> None:
    """With 4 steps requested; restarting a finished training is not an error."""
    trainer = _trainer(model_path, tmp_path, train={"total_steps": 4})
    folder = tmp_path / ("checkpoints" if is_own else "other")
    start = write_state(folder, replace(make_state(step), identity=trainer.identity))
    refusals = []
    try:
        require_same_training(trainer.config, start, tmp_path / "checkpoints", trainer.identity)
    except ConfigError as error:
        refusals.append(str(error))
    assert bool(refusals) == is_refused
    assert all(f"raise it above {step}" in refusal for refusal in refusals)


@pytest.mark.parametrize("reason", [StopRequested(), NotEnoughSignal("few groups")])
@pytest.mark.parametrize("failure", [None, WorkerDied("rank 1"), CheckpointError("disk full")])
def test_the_reason_for_ending_survives_a_failing_checkpoint(
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reason: BaseException,
    failure: BaseException | None,
) -> None:
    """In particular, an interrupted training whose ranks died as well must not be restarted."""
    shards = AskedShards()
    trainer = _trainer(model_path, tmp_path, shards)

    def fail(number: int) -> dict[str, float]:
        trainer.checkpoints.begin(make_state(5))
        shards.error = failure
        raise reason

    monkeypatch.setattr(trainer, "step", fail)
    with pytest.raises(type(reason)) as caught:
        trainer.run(lambda _step, _metrics: None)
    assert caught.value is reason
    assert (latest_checkpoint(tmp_path / "checkpoints") is None) == (failure is not None)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == (failure is not None)
    assert all(str(failure) in error for error in errors)


def test_a_checkpoint_is_published_while_waiting_for_groups(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw may take half an hour; a kill during it must not lose a written checkpoint."""
    monkeypatch.setattr(writer, "POLL_SECONDS", 0.0)
    trainer = _trainer(model_path, tmp_path, train={"train_prompts": 1, "mini_prompts": 1})
    trainer.checkpoints.begin(make_state(5))
    named: list[Path | None] = []

    class Source(SlowSource):
        def finished(self) -> list[Any]:
            named.append(latest_checkpoint(tmp_path / "checkpoints"))
            return super().finished()

    assert isinstance(trainer.sampler, Sampler)
    trainer.sampler.source = Source([MIXED], Clock(), seconds=1.0, pause=4)
    trainer.sampler.draw(1, trainer._while_waiting)
    # written after the second poll
    assert named == [None, None, *[tmp_path / "checkpoints" / "step_000005"] * 2]
    assert trainer.checkpoints.take_polled_seconds() > 0


class StoppingSource(SlowSource):
    """Returns a group immediately, and requests a stop."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__([MIXED], Clock(), seconds=1.0, pause=1)
        self.stop = stop

    def finished(self) -> list[Any]:
        self.stop.signal = signal.SIGTERM
        return super().finished()


def _stopped_in_its_draw(
    model_path: Path, output: Path, before: Callable[[Trainer, TrainerState], object]
) -> tuple[Path | None, TrainerState]:
    """Stop a training in the draw after step 3; returns its latest checkpoint and state."""
    stop = StopRequest()
    trainer = _trainer(model_path, output, train={"train_prompts": 4, "mini_prompts": 1})
    state = replace(make_state(3), identity=trainer.identity, visits=[])
    assert isinstance(trainer.sampler, Sampler)
    trainer.num_steps, trainer.policy_version = 3, state.policy_version
    trainer.stream.position = state.prompt_position
    trainer.sampler.surplus = list(state.surplus)
    trainer.sampler.unfinished = list(state.unfinished)
    trainer.kl.coefficient = state.kl_coefficient
    source = trainer.sampler.source = StoppingSource(stop)
    before(trainer, trainer._state(state.metrics))
    with pytest.raises(StopRequested):
        trainer.run(lambda _step, _metrics: None, stop)
    assert source.in_flight  # in the middle of the draw
    assert trainer.sampler.surplus == []
    return latest_checkpoint(output / "checkpoints"), state


def test_a_stop_during_a_draw_saves_the_previous_step(model_path: Path, tmp_path: Path) -> None:
    saved, state = _stopped_in_its_draw(
        model_path, tmp_path, lambda trainer, own: trainer.checkpoints.keep(own, is_due=False)
    )
    assert saved == tmp_path / "checkpoints" / "step_000003"
    assert plain(read_state(saved)) == plain(state)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_stop_does_not_write_a_step_twice(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_on_disk: bool
) -> None:
    """Whether the step's checkpoint is still being written or already on disk."""
    caplog.set_level(logging.INFO)

    def keep(trainer: Trainer, state: TrainerState) -> None:
        trainer.checkpoints.keep(state, is_due=True)
        if is_on_disk:
            trainer.checkpoints.finish()

    saved, state = _stopped_in_its_draw(model_path, tmp_path, keep)
    assert saved is not None
    assert plain(read_state(saved)) == plain(state)
    assert [text.split(":")[0] for text in caplog.messages if "bytes" in text] == [
        "checkpoint step_000003"
    ]


def test_a_stop_before_the_first_step_saves_nothing(model_path: Path, tmp_path: Path) -> None:
    assert _stopped_in_its_draw(model_path, tmp_path, lambda trainer, state: None)[0] is None


@pytest.mark.parametrize(("total_steps", "is_stopped"), [(4, True), (2, False)])
def test_a_stop_request_takes_effect_after_the_step_and_not_after_the_last(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    total_steps: int,
    is_stopped: bool,
) -> None:
    stop = StopRequest()
    trainer = _trainer(
        model_path, tmp_path, train={"total_steps": total_steps}, checkpoint={"save_every": 3}
    )
    trainer.resume(None)
    monkeypatch.setattr(trainer.sampler, "draw", lambda *_: Draw([], 1, TokenAccount()))

    def ask(step: int, metrics: dict[str, float]) -> None:
        stop.signal = signal.SIGTERM if step == 2 else None

    with pytest.raises(StopRequested) if is_stopped else nullcontext():
        trainer.run(ask, stop)
    assert trainer.num_steps == 2
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000002"
    assert [line["step"] for line in read_json_lines(tmp_path / METRICS_FILE)] == [1, 2]


@pytest.mark.parametrize(
    ("step", "every", "due"), [(4, 2, True), (3, 2, False), (7, 2, True), (7, 0, False)]
)
def test_periodic_work_is_also_due_on_the_last_step(step: int, every: int, due: bool) -> None:
    assert is_due(step, every, total_steps=7) == due


def test_the_training_step_reads_as_a_table_of_contents() -> None:
    """No arithmetic, no `try`, no branch except on whether there are groups."""
    lines = textwrap.dedent(inspect.getsource(Trainer.step))
    nodes = list(ast.walk(ast.parse(lines)))
    assert len(lines.splitlines()) <= 40
    assert not [node for node in nodes if isinstance(node, ast.Try | ast.BinOp)]
    assert {type(node.op) for node in nodes if isinstance(node, ast.AugAssign)} == {ast.BitOr}
    branches = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If)]
    assert branches == ["draw.groups"]
