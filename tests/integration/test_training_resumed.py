"""Validation, best checkpoints, starting from another training's checkpoint, and stopping."""

import importlib
import json
import os
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint.folder import best_checkpoints, checkpoint_folders, latest_checkpoint
from dapo_core.checkpoint.state import read_state, read_state_without_groups
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.machine.stopping import TrainingStopped
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS, saved_steps, step_file
from dapo_core.training import train
from durable import read_json_lines
from flows.config import Config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tests.in_process import without_ray
from tests.processes import wait_until
from tests.trainings import World, config_of

FAR = 120.0
SELDOM = {"save_every": 100, "keep_best": 0}
# Any other answer has another accuracy, so that validations of other weights differ. `hold` names a
# metrics.jsonl and a step: the draw after it takes until the file is removed.
SCORER = """
import json, pathlib, time
HOLD = pathlib.Path(__file__).with_name("hold")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while HOLD.exists():
        path, step = json.loads(HOLD.read_text())
        if len(pathlib.Path(path).read_text().splitlines()) != 1 + step:  # step 0 has a line, too
            break
        HOLD.with_name("held").touch()
        time.sleep(0.02)
    return {"score": len(solution_str) % 3, "acc": sum(map(ord, solution_str)) % 101 / 100}
"""


@dataclass(frozen=True)
class Begun:
    """A training of four steps on one rank, validated before training and after each step."""

    output: Path
    scorer: Path
    validated: dict[int, float]  # step -> accuracy

    def hold(self, output: Path, step: int) -> Path:
        """Make a training wait in the draw after the step; returns a file that shows it waits."""
        held = self.scorer.with_name("held")
        held.unlink(missing_ok=True)
        text = json.dumps([str(output / METRICS_FILE), step])
        self.scorer.with_name("hold").write_text(text)
        return held

    def let_go(self) -> None:
        """Let trainings continue."""
        self.scorer.with_name("hold").unlink()

    def config(self, **changes: dict[str, Any]) -> Config:
        """Return its configuration with changed keys."""
        sections = {
            "custom_reward": {"path": str(self.scorer)},
            "reward": {"timeout_seconds": FAR},
            "validation": {
                "every": 1,
                "num_prompts": 20,
                "before_training": True,
                "num_samples": 2,
                "temperature": 0.7,
            },
            **changes,
        }
        sections["checkpoint"] = {
            "save_every": 3,
            "keep_last": 1,
            "keep_best": 1,
            **changes.get("checkpoint", {}),
        }
        train = {"total_steps": 4, "learning_rate": 2e-2, "num_ranks": 1, "save_rollouts_every": 2}
        sections["train"] = {**train, **changes.get("train", {})}
        return config_of(**sections)


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun")
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    begun = Begun(folder / "output", scorer, {})

    def record(step: int, metrics: dict[str, float]) -> None:
        begun.validated[step] = metrics["validation/accuracy"]

    with without_ray():
        train(
            begun.config(), world.data, world.model, begun.output, record, held_out_path=world.data
        )
    return begun


def test_validation_decides_which_checkpoint_is_kept(begun: Begun) -> None:
    lines = read_json_lines(begun.output / METRICS_FILE)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines:
        mean, accuracy = line["val-core/arithmetic/acc/mean@2"], line["validation/accuracy"]
        assert mean == accuracy == begun.validated[line["step"]]
        assert (
            line["val-aux/arithmetic/acc/worst@2/mean"]
            < mean
            < line["val-core/arithmetic/acc/best@2/mean"]
        )
        assert line["validation/num_prompts"] == 20
        assert 0 < line["timing_s/testing"] < line.get("timing_s/step", FAR)
        shown = read_json_lines(step_file(begun.output, GENERATIONS, line["step"]))
        assert [row["set"] for row in shown] == ["arithmetic"] * 4
        assert all(row["prompt"] and row["gold"] for row in shown)
    del begun.validated[0]  # of the model itself, which no checkpoint has
    assert len(set(begun.validated.values())) > 1, "different weights answer differently"
    best = max(begun.validated, key=lambda step: (begun.validated[step], -step))
    folder = begun.output / "checkpoints"
    assert [path.name for path in checkpoint_folders(folder)] == sorted(
        {f"step_{best:06d}", "step_000004"}
    )
    (kept,) = best_checkpoints(folder)
    assert kept == folder / f"step_{best:06d}"
    assert read_state_without_groups(kept).metrics["validation/accuracy"] == begun.validated[best]


def test_a_finished_training_starts_no_worker(
    begun: Begun, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if killed at its end: the last step is unreported, with one checkpoint too many."""
    monkeypatch.syspath_prepend(str(PROJECT_ROOT / "bench"))
    output = tmp_path / "ended"
    shutil.copytree(begun.output, output)
    metrics, checkpoints = output / METRICS_FILE, output / "checkpoints"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    (checkpoints / "step_000003.0123.partial").mkdir()
    monkeypatch.setattr(
        "dapo_core.cluster.start.start_cluster", lambda *_: pytest.fail("it was started again")
    )
    result = train(begun.config(), world.data, world.model, output, held_out_path=world.data)
    assert (result.checkpoint, result.steps) == (checkpoints / "step_000004", 4)
    assert result.policy_version == read_state(result.checkpoint).policy_version
    assert importlib.import_module("crash").differences(begun.output, output) == []
    assert not list(checkpoints.glob("*.partial"))


def test_a_training_can_start_from_another_ones_checkpoint_with_allowed_changes(
    begun: Begun, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At another rate; other changes are refused at once."""
    changed: dict[str, Any] = {"learning_rate": 1e-2, "total_steps": 5}
    resume = {"resume": str(begun.output)}

    def go(allowed: list[str], **train_changes: Any) -> None:
        config = begun.config(
            train=changed | train_changes, checkpoint={**resume, "allow_changed": allowed}
        )
        with without_ray():
            train(config, world.data, world.model, tmp_path / "other", held_out_path=world.data)

    with pytest.raises(
        CheckpointError,
        match=r"\(train\.learning_rate 0\.02 -> 0\.01\).*allow_changed=\[train\.learn",
    ):
        go([])
    with pytest.raises(CheckpointError, match=r"\(train\.mini_prompts 2 -> 4\)"):
        go(["train.learning_rate"], mini_prompts=4)
    with pytest.raises(
        ConfigError, match=r"train\.learning_rat, .*did you mean train\.learning_rate"
    ):
        go(["train.learning_rat"])
    assert not (tmp_path / "other" / METRICS_FILE).exists()
    go(["train.learning_rate"])
    assert "continuing from step_000004 with train.learning_rate 0.02 -> 0.01" in caplog.text
    lines = read_json_lines(tmp_path / "other" / METRICS_FILE)
    assert [line["step"] for line in lines] == [4, 5]  # the step it begins with is reported, too
    assert lines[0]["actor/lr"] == pytest.approx(2e-2)
    # 10 optimizer steps are past the warm-up of 6
    assert lines[1]["actor/lr"] == pytest.approx(1e-2)
    before = read_state(begun.output / "checkpoints" / "step_000004")
    after = latest_checkpoint(tmp_path / "other" / "checkpoints")
    assert after is not None
    assert read_state(after).prompt_position > before.prompt_position
    assert read_state(after).policy_version == before.policy_version + 2
    assert read_state(after).identity["train.learning_rate"] == 1e-2


def test_validation_without_a_held_out_set_is_refused(
    begun: Begun, world: World, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"validation\.every=1 needs a held-out set; pass one with --held-out"
    ):
        train(begun.config(), world.data, world.model, tmp_path)


def stopped_by(
    number: signal.Signals, step: int, begun: Begun, world: World, output: Path
) -> TrainingStopped:
    """Return the error of a training that gets this signal in the draw after the step."""
    held = begun.hold(output, step)

    def send() -> None:
        wait_until(held.exists, "the held step")
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(TrainingStopped) as caught, without_ray():
        train(
            begun.config(checkpoint=SELDOM),
            world.data,
            world.model,
            output,
            held_out_path=world.data,
        )
    sender.join()
    return caught.value


def test_a_stopped_and_resumed_training_ends_with_the_same_bits(
    begun: Begun,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the last step is due to be saved: each stop leaves the checkpoint that the next one
    continues from.

    test_kill_matrix.py stops a training on a Ray of its own, test_stopping.py shows that signals do
    not reach Ray.
    """
    monkeypatch.syspath_prepend(str(PROJECT_ROOT / "bench"))
    output, checkpoints = tmp_path / "stopped", tmp_path / "stopped" / "checkpoints"
    for number, step in ((signal.SIGTERM, 1), (signal.SIGINT, 3)):
        handler = signal.getsignal(number)
        stopped = stopped_by(number, step, begun, world, output)
        assert str(stopped) == (
            f"training was stopped after step {step} of 4; its checkpoint is "
            f"{checkpoints / f'step_{step:06d}'}; the same command resumes it"
        )
        assert stopped.exit_code == 128 + number
        said = f"{number.name} received: writing a final checkpoint after step {step}, then ending"
        wait_until(lambda said=said: said in caplog.text, said)  # a thread logs it
        assert signal.getsignal(number) == handler
        assert latest_checkpoint(checkpoints) == checkpoints / f"step_{step:06d}"
    begun.let_go()
    with without_ray():
        train(
            begun.config(checkpoint=SELDOM),
            world.data,
            world.model,
            output,
            held_out_path=world.data,
        )
    assert importlib.import_module("crash").differences(begun.output, output) == []
    lines = read_json_lines(output / METRICS_FILE)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4], "each once"
    assert saved_steps(output, ROLLOUTS) == saved_steps(begun.output, ROLLOUTS) == [1, 2, 4]
    for step in (1, 2, 4):
        texts = [step_file(each, ROLLOUTS, step).read_text() for each in (output, begun.output)]
        assert texts[0] == texts[1] != ""
