"""Checkpoints trained elsewhere take the place of training; those of other models are refused."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.errors import CheckpointError, ConfigError, DapoError, ModelError
from durable import read_json_lines
from flows.config import Config, resolve_config
from tasks import chain
from tasks.adopted import SETTINGS, adopt_checkpoint, adopted_files
from tasks.artifacts.artifact import Artifact, StoreError
from tasks.preflight.run import examine
from tasks.runs.history import find_training_log
from tasks.runs.plan import plan_chain
from tasks.runs.report import Columns, report_run
from tasks.runs.run import Run
from tests.integration.arithmetic_server import ArithmeticServer, serving_the_chain
from tests.tiny_models import build_tiny
from tests.verl_folders import load_weights

pytestmark = pytest.mark.timeout(600)  # on two busy cores
LOG = "step:{0} - critic/score/mean:0.{0} - actor/grad_norm:{1} - perf/throughput:100.0\n"
NEWEST, WEIGHTS = "latest_checkpointed_iteration.txt", "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("before") / "model", "qwen3", positions=512)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArithmeticServer]:
    with serving_the_chain(monkeypatch) as server:
        yield server


def trained(model: Path, folder: Path, factor: float = 1.5) -> Path:
    """A copy of the model with other weights."""
    shutil.copytree(model, folder)
    weights = {name: factor * weight for name, weight in load_file(model / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def trained_by_verl(model: Path, output: Path) -> Path:
    """verl's output after step 20: one rank's shard, with another chat template in its copy."""
    actor = output / "global_step_20/actor"
    shutil.copytree(model, actor / "huggingface")
    (actor / "huggingface" / WEIGHTS).unlink()
    (actor / "huggingface/chat_template.jinja").write_text("{{ messages }}")
    weights = {name: 1.5 * weight for name, weight in load_file(model / WEIGHTS).items()}
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    torch.save({"state": 1}, actor / "optim_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    (output / NEWEST).write_text("20")
    return output


def config_of(model: Path, store: Path, **adopt: object) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "adopted"},
        "store": {"path": str(store)},
        "data": {
            "train": "arithmetic",
            "eval": "arithmetic",
            "max_prompt_tokens": 96,
            "arithmetic": {"num_train": 64, "num_eval": 8},
        },
        "model": {"path": str(model)},
        "reward": {"overlong": {"buffer_tokens": 8}},
        "rollout": {"max_response_tokens": 32, "group_size": 4},
        "train": {"micro_batch_tokens": 512, "device": "npu", "num_ranks": 64},  # none is here
        "serve": {"max_model_len": 256},
        "evaluate": {"max_response_tokens": 32},
        "adopt": {name: str(path) for name, path in adopt.items()},
    }
    return resolve_config(sections)


def output(state: Any) -> Artifact:
    artifact: Artifact = state.result()
    return artifact


def run_chain(config: Config) -> tuple[Run, dict[str, Any]]:
    """The stages of dapo-full in this process, without Prefect, and the report."""
    with Run.start(config) as run:
        data = output(chain.prepare_data.fn(run))
        model = output(chain.fetch_model.fn(run, None))
        before = output(chain.evaluate_model.fn(run, data, model, "evaluate_before"))
        training = output(chain.train_policy.fn(run, data, model))
        merged = output(chain.merge_checkpoint.fn(run, training))
        after = output(chain.evaluate_model.fn(run, data, merged, "evaluate_after"))
        report = report_run(run, before, after, training, Columns())
    return run, report


def test_what_verl_trained_is_merged_evaluated_and_reported(
    model: Path, tmp_path: Path, server: ArithmeticServer, caplog: pytest.LogCaptureFixture
) -> None:
    output = trained_by_verl(model, tmp_path / "verl")
    log, script = tmp_path / "verl.log", tmp_path / "run.sh"
    log.write_text("".join(LOG.format(step, "nan" if step == 2 else 0.5) for step in (1, 2, 3)))
    script.write_text("python -m verl.trainer.main_ppo\n")
    config = config_of(model, tmp_path / "store", folder=output, log=log, config=script)
    run, report = run_chain(config)
    assert f"adopt.log={log} ends at step 3, but the checkpoint is of step 20" in caplog.text

    training = Path(run.stages["train_policy"].artifact)
    manifest = json.loads((training / "manifest.json").read_text())
    place = output / "global_step_20/actor"
    assert (
        manifest["metrics"].items()
        >= {"trained": "elsewhere", "source": str(place), "step": 20, "format": "verl"}.items()
    )
    assert not any("optim" in row["path"] for row in manifest["files"])
    steps = read_json_lines(training / "metrics.jsonl")
    assert [(row["step"], row["critic/score/mean"]) for row in steps] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]
    assert [row["actor/grad_norm"] for row in steps] == [0.5, None, 0.5]
    assert (training / SETTINGS / "run.sh").read_text() == script.read_text()

    merged = Path(run.stages["merge_checkpoint"].artifact)
    before, after = load_weights(model), load_weights(merged)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], 1.5 * before[name]) for name in before)
    for name in ("tokenizer_config.json", "chat_template.jinja"):  # only the weights differ
        assert (merged / name).read_text() == (model / name).read_text()

    assert report["train"]["steps"] == 3
    origin = report["provenance"]["training"]
    digest, kept = run.stages["train_policy"].digest, training / SETTINGS / "run.sh"
    assert origin == f"trained elsewhere: {place}, step 20, digest {digest}, settings {kept}"
    assert origin in (run.folder / "report/report.html").read_text()
    assert "model, trained elsewhere" in (run.folder / "report/report.md").read_text()

    again, _ = run_chain(config)  # the next night: nothing has changed
    assert all(stage.cached for stage in again.stages.values())
    assert len(server.requests) == 2 * 8
    log.write_text(LOG.format(1, 0.5))
    states = {stage.label: stage for stage in plan_chain(config)}
    assert states["train_policy"].changes == ("input adopted log changed",)
    assert states["evaluate_before"].state == "cached"


def test_a_model_folder_is_adopted_without_a_log_and_a_new_one_the_next_night(
    model: Path, tmp_path: Path, server: ArithmeticServer
) -> None:
    folder = trained(model, tmp_path / "trl/checkpoint-40")
    (folder / "trainer_state.json").write_text("{}")
    config = config_of(model, tmp_path / "store", folder=tmp_path / "trl")
    run, report = run_chain(config)
    training = Path(run.stages["train_policy"].artifact)
    assert json.loads((training / "manifest.json").read_text())["metrics"]["step"] == 40
    assert report["train"]["steps"] == 0
    with pytest.raises(StoreError, match=r"without the log of its training.* --log FILE"):
        find_training_log(tmp_path / "store", run.folder.name)
    assert "trained elsewhere" in (run.folder / "report/report.html").read_text()
    newer = trained(model, tmp_path / "trl/checkpoint-80", factor=2.0)
    (newer / "trainer_state.json").write_text("{}")
    again, _ = run_chain(config)
    merged = load_weights(Path(again.stages["merge_checkpoint"].artifact))
    assert all(torch.equal(merged[name], 2.0 * each) for name, each in load_weights(model).items())
    assert again.stages["evaluate_before"].cached
    assert not again.stages["evaluate_after"].cached


def _changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def _with_tokens_swapped(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _as_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def _as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


NORM, HEAD = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed(lambda weights: weights.pop(HEAD)), rf"Qwen3ForCausalLM of .*missing 1 \({HEAD}"),
        (_changed(lambda weights: weights.update(extra=torch.ones(2))), "unexpected 1"),
        (
            _changed(lambda weights: weights.update({NORM: torch.ones(3)})),
            r"has shape \(3,\), but Qwen3ForCausalLM of \S+ needs \(64,\) .* \(model\.path or",
        ),
        (_with_tokens_swapped, r"another tokenizer than .*: 2 of its \d+ tokens have another id"),
        (
            lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 100),
            "is not a complete",
        ),
        (_as_adapter, r"LoRA adapter: merge it into its base model.*set adopt\.folder to"),
        (_as_pickle, r"its weights are pickled.*set adopt\.folder to a complete"),
        (lambda folder: shutil.rmtree(folder), r"does not exist.*set adopt\.folder"),
        (
            lambda folder: [path.unlink() for path in folder.iterdir()],
            r"lacks config\.json and weights .* set adopt\.folder",
        ),
        (
            lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
            r"lacks a tokenizer .*set adopt\.folder",
        ),
    ],
    ids=(
        *("missing tensor", "unknown tensor", "shape", "tokenizer", "damaged", "adapter"),
        *("pickle", "no folder", "empty", "no tokenizer"),
    ),
)
def test_what_cannot_be_adopted_is_named_before_a_run(
    model: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = trained(model, tmp_path / "folder")
    damage(folder)
    config = config_of(model, tmp_path / "store", folder=folder)
    with pytest.raises((ModelError, CheckpointError), match=message):
        adopt_checkpoint(config, model, tmp_path / "output")
    failed = {finding.check: finding for finding in examine(config).failed}
    assert failed.keys() == {"adopted"}


def test_another_architecture_is_refused(model: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "llama", "llama", positions=512)
    with pytest.raises(CheckpointError, match="not match the architecture Qwen3ForCausalLM of "):
        adopt_checkpoint(config_of(model, tmp_path, folder=other), model, tmp_path / "output")


def test_no_device_is_needed_to_adopt(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "store", folder=trained(model, tmp_path / "folder"))
    findings = examine(config)
    assert findings.failed == []
    [finding] = [finding for finding in findings if finding.check == "adopted"]
    assert finding.found.endswith(f"has the tensors and tokens of {model}")


def test_log_and_settings_are_checked(model: Path, tmp_path: Path) -> None:
    folder, log = trained(model, tmp_path / "folder"), tmp_path / "train.log"
    log.write_text("nothing\n")
    config = config_of(model, tmp_path / "store", folder=folder, log=log)
    with pytest.raises(ConfigError, match=r"adopt\.log=\S+ has no training steps"):
        adopt_checkpoint(config, model, tmp_path / "output")
    log.unlink()
    with pytest.raises(ConfigError, match=r"adopt\.log=\S+ cannot be read: No such file"):
        adopted_files(config)
    for tree, message in (
        ({"log": "x"}, r"adopt\.log=x would be ignored without adopt\.folder"),
        ({"folder": "x", "merge": "best"}, r"adopt\.folder is one checkpoint, but merge\.checkpoi"),
    ):
        merge = {"merge": {"checkpoint": tree.pop("merge", "latest")}}
        base = config_of(model, tmp_path).model_dump()
        with pytest.raises(DapoError, match=message):
            resolve_config({**base, **merge, "adopt": tree})
