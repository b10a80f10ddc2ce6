"""A training on problems with pictures: prepared, sampled by vLLM, learned from, resumed."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo_core.checkpoint.state import GROUPS_FILE
from dapo_core.config.loading import changed
from dapo_core.demo.recipe_model import recipe_config
from dapo_core.demo.warm_start import build_model
from dapo_core.errors import ConfigError
from dapo_core.memory.shape import shape_of
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import _read_prompts, train, with_media_limits
from durable import read_json_lines
from flows.config import Config, load_config, resolve_config
from tasks.data.prepare import build_dataset
from tasks.preflight.finding import Findings
from tasks.preflight.inputs import inputs_here
from tasks.preflight.smoke import NUM_SAMPLES, _sample
from tests.in_process import without_ray
from tests.tiny_vision import build_tiny_vision, write_picture

pytest.importorskip("torchvision", reason="vLLM's models that read pictures import it")

RECIPES = Path(__file__).resolve().parents[2] / "configs"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 3 - 1.0
"""
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six problems with no picture, one or two; a model; and their recipe."""
    folder = tmp_path_factory.mktemp("vision")
    rows = []
    for number in range(6):
        names = [f"pictures/{number}-{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            write_picture(folder / name, 32 + 16 * number, 48, seed=10 * number + place)
        text = "<image>" * len(names) + f"What is {number}?"
        rows.append({"images": names, "problem": text, "answer": str(number)})
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text(json.dumps({"problem": "9 + 9?", "answer": "18"}))
    (folder / "scorer.py").write_text(SCORER)
    build_tiny_vision(folder / "model")
    (folder / "data").mkdir()
    build_dataset(_config(folder), folder / "data")
    return folder


def _config(folder: Path, **checkpoint: Any) -> Config:
    return resolve_config(
        {
            "run": {"seed": 3, "deterministic": True},
            "data": {
                "train": str(folder / "mine.jsonl"),
                "eval": str(folder / "held_out.jsonl"),
                "max_prompt_tokens": 200,
            },
            "model": {"path": str(folder / "model")},
            "custom_reward": {"path": str(folder / "scorer.py")},
            "reward": {"overlong": {"enabled": False}},
            "sampler": {"gen_prompts": 5, "dynamic": False},
            "rollout": {
                "engine": "vllm",
                "group_size": 2,
                "max_response_tokens": 8,
                "max_num_seqs": 8,
                "threads_per_worker": 1,
                "memory_gigabytes": 0.1,
            },
            "train": {
                "num_ranks": 1,
                "train_prompts": 4,
                "mini_prompts": 2,
                "micro_batch_tokens": 512,
                "learning_rate": 1e-2,
                "warmup_steps": 1,
                "total_steps": STEPS,
            },
            "checkpoint": {"save_every": 1, "keep_steps": [1], **checkpoint},
            "serve": {"max_model_len": 256},
            "evaluate": {"max_response_tokens": 8},
        }
    )


def _train(folder: Path, output: str, **checkpoint: Any) -> list[dict[str, float]]:
    data = folder / "data" / "train.parquet"
    with without_ray():
        train(_config(folder, **checkpoint), data, folder / "model", folder / output)
    return read_json_lines(folder / output / METRICS_FILE)


def test_an_engine_that_reads_no_pictures_is_refused_before_it_starts(folder: Path) -> None:
    config = _config(folder)
    rollout = config.rollout.model_copy(update={"engine": "hf"})
    config = config.model_copy(update={"rollout": rollout})
    with pytest.raises(ConfigError, match=r"have pictures, which rollout\.engine=hf does not"):
        train(config, folder / "data/train.parquet", folder / "model", folder / "refused")


def test_an_engine_takes_as_many_pictures_in_a_prompt_as_a_problem_has(folder: Path) -> None:
    config, inputs = _config(folder), (folder / "data/train.parquet", folder / "model")
    *_, num_pictures = _read_prompts(config, *inputs, folder / "limits", None)
    limited = with_media_limits(config, folder / "model", num_pictures)
    expected = {"video": 0, "image": {"count": 2}}
    assert limited.rollout.engine_args == {"limit_mm_per_prompt": expected}
    given = {"limit_mm_per_prompt": {"image": 1}}
    config = changed(config, {"rollout.engine_args": given})
    message = r"2 pictures, but rollout\.engine_args\.limit_mm_per_prompt allows 1 per prompt"
    with pytest.raises(ConfigError, match=message):
        train(config, *inputs, folder / "refused")


def test_engine_and_policy_agree_on_pictures_after_every_update_and_a_resume(folder: Path) -> None:
    """Stale features of a picture, or another position or size of it, move log-probs by nats."""
    shown = pq.read_table(folder / "data" / "train.parquet")["images"].to_pylist()
    assert [len(names or ()) for names in shown] == [0, 1, 2, 0, 1, 2]
    whole = _train(folder, "whole")
    assert [line["step"] for line in whole] == [*range(1, STEPS + 1)]
    for line in whole:
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["rollout/fresh_log_probs_diff_mean"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert whole[0]["prompt_length/max"] > 50  # every token of two pictures

    checkpoint = folder / "whole" / "checkpoints" / "step_000001"
    carried = json.loads((checkpoint / GROUPS_FILE).read_text())
    prompts = [group["prompt"] for group in [*carried["surplus"], *carried["unfinished"]]]
    assert len(prompts) == 1
    assert (checkpoint / GROUPS_FILE).stat().st_size < 10_000  # references alone

    resumed = _train(folder, "resumed", resume=str(checkpoint))
    names = ("critic/score/mean", "actor/pg_loss", "response_length/mean", "prompt_length/mean")
    assert [[line[name] for name in names] for line in resumed] == [
        [line[name] for name in names] for line in whole
    ]


def test_the_smoke_test_samples_responses_to_problems_with_pictures(folder: Path) -> None:
    config, findings = _config(folder), Findings()
    with inputs_here(config, findings) as inputs:
        sampled = _sample(folder / "model", config, inputs.pictured, inputs.folder)
    assert not findings
    shown = [len(each.group.prompt.input.images) for each in sampled]
    assert sorted(shown) == [1, 1, 2, 2]
    assert {len(each.group.rollouts) for each in sampled} == {NUM_SAMPLES}


def test_the_recipe_with_pictures_builds_its_model_and_trains_it(tmp_path: Path) -> None:
    """configs/shapes_cpu_vl.yaml with less of everything."""
    config = load_config(
        RECIPES / "shapes_cpu_vl.yaml",
        [
            "data.shapes.num_train=96",
            "data.shapes.num_eval=12",
            "model.recipe.num_steps=40",
            "model.recipe.batch_size=16",
            "sampler.gen_prompts=8",
            "sampler.dynamic=false",  # it has hardly learned to answer
            "train.learning_rate=1e-3",
            "train.train_prompts=8",
            "train.mini_prompts=8",
            "train.num_ranks=1",
            "train.total_steps=2",
            "rollout.memory_gigabytes=0.1",
        ],
    )
    data, model = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    build_dataset(config, data)
    rows = pq.read_table(data / "train.parquet").to_pylist()
    built = build_model(rows, model, config.model.recipe, 0, data, num_threads=1)
    assert built["parameters"] == shape_of(recipe_config(config.model.recipe)).num_parameters
    with without_ray():
        train(
            config,
            data / "train.parquet",
            model,
            tmp_path / "t",
            held_out_path=data / "eval.parquet",
        )
    lines = read_json_lines(tmp_path / "t" / METRICS_FILE)
    assert len(lines) == 2
    for line in lines:
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["rollout/fresh_log_probs_diff_mean"] < 1e-4
    assert max(line["actor/grad_norm"] for line in lines) > 0
    assert lines[-1]["validation/num_prompts"] == 12
