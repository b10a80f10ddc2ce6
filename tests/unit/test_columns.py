"""Links added to a chain by baselines and checkpoints: their keys, and missing columns."""

from dataclasses import replace
from pathlib import Path

import pytest

from dapo_core.checkpoint.folder import step_folder, tidy
from dapo_core.errors import CheckpointError
from flows.config import Config
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.references import forget_resolved
from tasks.chain import keep_options
from tasks.evaluation import served_model as served_models
from tasks.evaluation.served_model import served_model
from tasks.fetched_model import link_model_folder
from tasks.links import chain_of, label_of, link_of, side_of, step_checkpoint
from tasks.runs.history import read_run
from tasks.runs.plan import plan_chain
from tasks.runs.report import take_columns
from tasks.runs.run import Run
from tasks.serve_model.failure import ServeError, ServerUnreachable
from tests.integration.arithmetic_server import ArithmeticServer, Handler
from tests.recorded_runs import LABELS, Outcome, produce, small_config
from tests.tiny_models import build_tiny_qwen3

STEPS = "evaluate.checkpoints=[20, 40]"


def with_server(store: Path, server: ArithmeticServer, name: str = "m") -> Config:
    forget_resolved()
    entry = (
        f"{{name: theirs, base_url: '{server.url}', model: {name}, api_key_variable: THEIR_KEY}}"
    )
    return small_config(store, f"evaluate.baselines=[{entry}]")


def test_baselines_and_checkpoints_add_their_links_to_the_chain(tmp_path: Path) -> None:
    entries = "{name: base-4B, id: org/base}, {name: theirs, base_url: 'http://h', model: m}"
    config = small_config(
        tmp_path, f"evaluate.baselines=[{entries}]", "evaluate.checkpoints=every 20"
    )
    baselines = ("fetch_baseline_base-4B", "evaluate_baseline_base-4B", "evaluate_baseline_theirs")
    steps = ("merge_step_20", "evaluate_step_20", "merge_step_40", "evaluate_step_40")
    labels = [link.label for link in chain_of(config)]
    assert labels == [*LABELS[:3], *baselines, *LABELS[3:], *steps]  # step 60 is evaluate_after
    for link in chain_of(config):
        assert all(labels.index(need) < labels.index(link.label) for need in link.needs)
        assert label_of(config, link.stage.name, side_of(link.label)) == link.label
    assert (
        link_of(config, "merge_step_20").command
        == "dapo stage merge-checkpoint CONFIG --side step_20"
    )
    assert link_of(config, baselines[2]).command == "dapo stage evaluate-model CONFIG --side theirs"


def test_columns_do_not_change_the_keys_of_other_stages(tmp_path: Path) -> None:
    plain, wide = (
        small_config(tmp_path),
        small_config(tmp_path, "evaluate.baselines=[{name: b, path: x}]", STEPS),
    )
    model, data = (Artifact("stage", "k", str(tmp_path), digest) for digest in ("m", "d"))
    training = replace(model, digest="t")
    for step in (20, 40):
        step_folder(tmp_path / "checkpoints", step).mkdir(parents=True)
    for label in ("evaluate_before", "train_policy", "merge_checkpoint"):
        stage = link_of(plain, label).stage
        assert stage.key(plain, {}).key == stage.key(wide, {}).key
    merges = [link_of(wide, f"merge_step_{step}").key(training).key for step in (20, 40)]
    other = small_config(tmp_path, "evaluate.checkpoints=[20, 60]", "merge.checkpoint=latest")
    assert link_of(other, "merge_step_20").key(training).key == merges[0] != merges[1]
    assert link_of(other, "merge_step_20").key(data).key != merges[0]


def test_training_keeps_the_steps_to_evaluate(tmp_path: Path) -> None:
    config = small_config(tmp_path, STEPS, "checkpoint.keep_steps=[60]")
    assert keep_options(config) == ["--set", "checkpoint.keep_steps=[20, 40, 60]"]
    assert keep_options(small_config(tmp_path)) == []
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40, 50, 60):
        step_folder(folder, step).mkdir(parents=True)
    tidy(folder, 1, 0, (20, 40))
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000020",
        "step_000040",
        "step_000060",
    ]
    training = Artifact("train_policy", "k", str(tmp_path), "d")
    assert step_checkpoint(training, 20) == step_folder(folder, 20)
    with pytest.raises(
        CheckpointError, match=r"kept checkpoints of steps 20, 40, 60, but .* names 30; .*--force"
    ):
        step_checkpoint(training, 30)


def test_stored_columns_are_reused_and_missing_ones_explained(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model")
    entries = f"{{name: base, path: {model}}}, {{name: gone, path: {tmp_path / 'none'}}}"
    config = small_config(tmp_path / "store", f"evaluate.baselines=[{entries}]", STEPS)
    labels = [link.label for link in chain_of(config)]
    labels = [label for label in labels if "gone" not in label and "40" not in label]
    with Run.start(config) as run:
        fetched = link_of(config, "fetch_baseline_base")
        run.produce(
            "fetch_baseline_base",
            fetched.key(),
            lambda folder: {"bytes": link_model_folder(fetched.config.model, folder)},
        )
        made = produce(
            run, Outcome(), [label for label in labels if label != "fetch_baseline_base"]
        )
    assert set(read_run(run.folder).stages) == set(labels)
    with Run.start(config) as run:
        columns = take_columns(run)
    assert columns.baselines == {"base": made["evaluate_baseline_base"]}
    assert columns.checkpoints == {20: made["evaluate_step_20"]}
    assert columns.absent["gone"].startswith(
        f"ModelError: model folder {tmp_path / 'none'} does not exist"
    )
    assert "dapo stage merge-checkpoint CONFIG --side step_40" in columns.absent["step 40"]
    other = small_config(tmp_path / "store", "evaluate.checkpoints=[20, 60]")
    plan = {stage.label: stage for stage in plan_chain(other)}
    assert plan["evaluate_step_20"].state == "cached"
    assert (
        "kept checkpoints of steps 20, 40, but evaluate.checkpoints names 60"
        in plan["merge_step_60"].note
    )


@pytest.mark.slow
def test_a_served_baseline_is_evaluated_again_when_its_server_s_weights_change(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ServeError, match=r"theirs reads its API key from THEIR_KEY, which is not set"
    ):
        link_of(with_server(tmp_path, server), "evaluate_baseline_theirs").key(data(tmp_path))
    monkeypatch.setenv("THEIR_KEY", "secret-of-theirs")
    config = with_server(tmp_path, server)
    link = link_of(config, "evaluate_baseline_theirs")
    first = link.key(data(tmp_path))
    served_model(config, config.evaluate.baselines[0]).remember()
    assert "secret" not in repr(first)
    # Rounding changes nothing, other weights do, and the first weights are recognised again.
    usual = server.logprobs = {" a": -1.01, " an": -2.02, " the": -2.98}

    def key() -> str:
        again = with_server(tmp_path, server)
        return link_of(again, "evaluate_baseline_theirs").key(data(tmp_path)).key

    assert key() == first.key
    server.logprobs = {" it": -0.5, " we": -1.5, " the": -3.0}
    assert key() != first.key
    server.logprobs = usual
    assert key() == first.key
    server.root = "another-folder"
    assert key() != first.key


def data(folder: Path) -> Artifact:
    """Store the data of a run in the folder."""
    return Run.start(small_config(folder)).produce(
        "prepare_data",
        link_of(small_config(folder), "prepare_data").key(),
        lambda target: {"size": (target / "eval.parquet").write_text("rows")},
    )


def test_an_unreachable_server_or_another_model_is_reported_with_the_entry_s_name(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "secret-of-theirs")
    config = with_server(tmp_path, server, "other")
    with pytest.raises(ServeError, match=r"does not serve 'other'; it has m; set its `model`"):
        served_model(config, config.evaluate.baselines[0])
    config = with_server(tmp_path, server)
    server.server_close()
    server.shutdown()
    with pytest.raises(
        ServerUnreachable, match=r"does not answer.*check base_url of evaluate.baselines: theirs"
    ):
        served_model(config, config.evaluate.baselines[0])


@pytest.mark.parametrize("status", [500, 503])
def test_a_baseline_whose_server_fails_on_log_probs_is_known_by_name_a_busy_one_is_not(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("THEIR_KEY", "secret-of-theirs")
    monkeypatch.setattr(served_models.time, "sleep", lambda _: None)
    monkeypatch.setattr(Handler, "show_weights", lambda self, body: self.send(status, b"boom"))
    config = with_server(tmp_path, server)
    if status == 500:
        assert served_model(config, config.evaluate.baselines[0]).weights.logprobs is None
    else:
        with pytest.raises(ServerUnreachable, match="does not answer a fixed prompt: HTTP 503"):
            served_model(config, config.evaluate.baselines[0])
