"""Output of real trackers, read with their own readers: started, resumed after a stop, with
results.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dapo_core.config.loading import dump_config
from dapo_core.metrics.log import MetricsLog
from dapo_core.metrics.step_files import GENERATIONS, step_file
from tasks.tracking.clients import Record
from tasks.tracking.processes import Trackers
from tasks.tracking.tracker import read_record, send_training
from tests.configs import make_config

NAMES = ("tensorboard", "wandb", "swanlab", "mlflow")
MEAN, RESULT = "val-core/gsm8k/acc/mean@4", "eval/math500/after"
ROW = {
    "set": "gsm8k",
    "prompt": "1 + 1?",
    "response": "It is\n2 <b>&</b> 两",
    "answer": None,
    "gold": "2",
    "score": 1.0,
    "verdict": "right",
    "truncated": False,
}


def metrics(step: int) -> dict[str, float]:
    return {"validation/accuracy": step / 10, MEAN: step / 8, "actor/grad_norm": float("nan")}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Output of `track` with all trackers; wandb and SwanLab are offline."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TENSORBOARD_DIR", "MLFLOW_TRACKING_URI", "WANDB_DIR", "SWANLAB_LOG_DIR"):
            patch.delenv(name, raising=False)
        for name in ("WANDB_MODE", "SWANLAB_MODE"):
            patch.setenv(name, "offline")
        yield track(tmp_path_factory.mktemp("tracked"), NAMES)


def track(folder: Path, names: tuple[str, ...]) -> Path:
    """Track a training at steps 0 to 2 and, resumed, to 4, and send results; returns its folder."""
    output, recipe = folder / "training", folder / "recipe.yaml"
    keys = {"trackers": names, "tracker_project": "proj", "tracker_folder": str(folder / "local")}
    config = make_config(train=keys, run={"name": "my run"})
    output.mkdir()
    recipe.write_text(dump_config(config))
    for last_step, steps in ((None, (0, 1, 2)), (1, (2, 3, 4))):
        log = MetricsLog(output, last_step)
        for step in steps:
            step_file(output, GENERATIONS, step).parent.mkdir(parents=True, exist_ok=True)
            step_file(output, GENERATIONS, step).write_text(json.dumps(ROW) + "\n")
            log.append(step, step, metrics(step))
        with Trackers(output) as trackers:
            trackers.start(names, [str(output), "--config", str(recipe)])
            assert trackers.wait(600.0)  # a loaded machine takes a minute to load the clients
    for name in names:
        send_training(config, name, output, {RESULT: 61.5})
    return output


def record(tracked: Path, name: str) -> Record:
    found = read_record(tracked, name)
    assert found.last_step == 4
    return found


def test_tensorboard(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(record(tracked, "tensorboard").path)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars(MEAN)] == [
        (step, step / 8) for step in range(5)
    ]
    assert [(event.step, event.value) for event in events.Scalars(RESULT)] == [(4, 61.5)]
    assert "actor/grad_norm" not in events.Tags()["scalars"]
    texts = [tag for tag in events.Tags()["tensors"] if "generations" in tag]
    shown = events.Tensors(texts[0])
    assert [event.step for event in shown] == [0, 1, 2, 3, 4]
    assert "    2 <b>&</b> 两" in shown[0].tensor_proto.string_val[0].decode()
    assert len([tag for tag in events.Tags()["tensors"] if "config" in tag]) == 1


def test_wandb(tracked: Path) -> None:
    """Each attempt has a folder of the same run for `wandb sync`; a second one within a second is
    named NAME-1. None has the machine's list of packages.
    """
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader  # wandb has none in Python
    from wandb.proto.wandb_internal_pb2 import Record

    found = record(tracked, "wandb")
    history, summary, names = [], {}, set()
    runs = Path(found.path).parent
    assert not [*runs.rglob("requirements.txt")]
    for path in sorted(runs.glob(f"offline-run-*-{found.id}*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(path)
            while (content := reader.scan()) is not None:
                one = Record.FromString(content)
                if one.HasField("run"):
                    names.add((one.run.project, one.run.display_name, one.run.run_id))
                values = {
                    item.key or item.nested_key[0]: item.value_json for item in one.history.item
                }
                if MEAN in values:
                    history.append((one.history.step.num, json.loads(values[MEAN])))
                    assert "val/generations" in values
                summary |= {
                    item.key or item.nested_key[0]: item.value_json for item in one.summary.update
                }
    assert names == {("proj", "my run", found.id)}
    assert history == [(step, step / 8) for step in range(5)]
    assert json.loads(summary[RESULT]) == 61.5


def test_swanlab(tracked: Path) -> None:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = record(tracked, "swanlab")
    values, texts = [], []
    for path in sorted(Path(found.path).glob(f"run-*-{found.id}/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        while (content := reader.scan()) is not None:
            one = Record.FromString(content)
            if one.HasField("scalar") and one.scalar.key in (MEAN, RESULT):
                values.append((one.scalar.step, one.scalar.value.number))
            if one.HasField("media"):
                texts.append(one.media.step)
        reader.close()
    assert values == [*((step, step / 8) for step in range(5)), (4, 61.5)]
    assert texts == [0, 1, 2, 3, 4]


def test_swanlab_on_the_board_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that `swanlab watch` requests: each attempt is an experiment of the project."""
    monkeypatch.setenv("SWANLAB_MODE", "local")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "board"))
    found = record(track(tmp_path, ("swanlab",)), "swanlab")
    assert (found.url, found.path) == (None, str(tmp_path / "board"))
    from fastapi.testclient import TestClient
    from swanboard.app import app

    def data(path: str) -> Any:
        return TestClient(app).get(f"/api/v1/{path}").json()["data"]

    experiments = data("project")["experiments"]
    assert [one["name"] for one in experiments] == ["my run", "my run-2", "my run-3"]
    assert {one["run_id"].rpartition("-")[2] for one in experiments} == {found.id}
    shown = [
        (row["index"], row["data"])
        for one, tag in zip(experiments, (MEAN, MEAN, RESULT), strict=True)
        for row in data(f"experiment/{one['id']}/tag/{quote(tag, safe='')}")["list"]
    ]
    assert shown == [*((step, step / 8) for step in range(5)), (4, 61.5)]


def test_mlflow(tracked: Path) -> None:
    from mlflow import MlflowClient

    found = record(tracked, "mlflow")
    client = MlflowClient(f"sqlite:///{found.path}")
    run = client.get_run(found.id)
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "proj"
    assert run.data.params["train.tracker_project"] == "proj"
    history = client.get_metric_history(found.id, MEAN.replace("@", "_at_"))
    assert [(one.step, one.value) for one in history] == [(step, step / 8) for step in range(5)]
    assert run.data.metrics[RESULT] == 61.5
    files = [artifact.path for artifact in client.list_artifacts(found.id, "generations")]
    assert files == [f"generations/step_{step}.jsonl" for step in range(5)]
    assert (
        Path(found.path).parent / "mlflow-artifacts"
        in Path(run.info.artifact_uri.removeprefix("file:")).parents
    )
