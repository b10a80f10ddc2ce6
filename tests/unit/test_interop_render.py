"""Rendering verl's overrides, environment, reward file and rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo_core.reward.scorers import SCORERS
from flows.config import load_config
from interop import ForeignConfigError
from interop.render.launch import Launch, Places, override, spelt
from interop.render.trainers import write_rows
from interop.render.verl import DAPO_RECIPE, REWARD_FILE, render
from tasks.data.prepare import schema_of
from tasks.data.prepare import write_rows as write_prepared

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MATH = CONFIGS / "dapo_qwen3_32b_math.yaml"


def places(folder: Path = Path("/places")) -> Places:
    return Places(
        folder,
        folder / "model",
        folder / "train.parquet",
        folder / "eval.parquet",
        folder / "checkpoints",
    )


def launched(
    recipe: Path = MATH, *sets: str, version: str | None = None, folder: Path = Path("/places")
) -> Launch:
    return render(load_config(recipe, sets).model_dump(mode="json"), places(folder), version)


def values_of(launch: Launch) -> dict[str, str]:
    return dict(each.lstrip("+").split("=", 1) for each in launch.overrides)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "True"),
        (1e-6, "1e-06"),
        ("/a/b-c.parquet", "/a/b-c.parquet"),
        ("null", "'null'"),
        ("10", "'10'"),
        ("two words", "'two words'"),
        ("it's", r"'it\'s'"),
        ("ends in \\", r"'ends in \\'"),
        (["console", "two words"], "[console,'two words']"),
        ({"enable_thinking": False}, "{enable_thinking:False}"),
    ],
)
def test_values_are_formatted_for_hydra(value: Any, text: str) -> None:
    assert spelt(value) == text
    assert override("a.b", value, is_added=True) == f"++a.b={text}"


def test_a_recipe_is_rendered_in_verls_keys_and_units() -> None:
    launch = launched()
    keys = values_of(launch)
    assert launch.argv[:2] == ("-m", "verl.trainer.main_ppo")
    assert keys["data.train_batch_size"] == "64"
    assert (
        keys["actor_rollout_ref.actor.optim.lr_warmup_steps"] == "10"
    )  # 20 optimizer steps / 2 of a training step
    assert keys["reward.reward_kwargs.overlong_buffer_cfg.len"] == "4096"
    assert keys["reward.custom_reward_function.path"] == f"/places/{REWARD_FILE}"
    assert keys["trainer.default_local_dir"] == "/places/checkpoints"
    assert "data.gen_batch_size" not in keys  # main_ppo would train on that many
    assert (launch.env["RAY_ADDRESS"], launch.env["VLLM_ASCEND_ENABLE_NZ"]) == ("auto", "0")


def test_older_versions_filter_groups_with_the_dapo_recipe(tmp_path: Path) -> None:
    with pytest.raises(
        ForeignConfigError, match=r"external\.source .*external\.version.*sampler\.dynamic=false"
    ):
        launched(version="0.7.0")
    (tmp_path / "recipe/dapo").mkdir(parents=True)
    tree = {**load_config(MATH).model_dump(mode="json"), "external": {"source": str(tmp_path)}}
    launch = render(tree, places(), "0.7.0")
    keys = values_of(launch)
    assert launch.argv[1] == DAPO_RECIPE
    assert keys["data.gen_batch_size"] == "192"
    assert keys["reward_model.overlong_buffer.len"] == "4096"  # the DAPO recipe's name
    plain = values_of(launched(MATH, "sampler.dynamic=false", version="0.7.0"))
    assert plain["reward_model.reward_kwargs.overlong_buffer_cfg.len"] == "4096"  # main_ppo's
    assert plain["custom_reward_function.name"] == "compute_score"


def test_unsupported_keys_are_refused_for_verl() -> None:
    with pytest.raises(ForeignConfigError, match=r"train\.device=cpu"):
        launched(CONFIGS / "arith_cpu.yaml")
    with pytest.raises(ForeignConfigError, match=r"sampler\.metric=seq_final_reward"):
        launched(MATH, "sampler.metric=seq_final_reward")
    assert "sampler.max_num_gen_batches" not in launched(MATH).covered  # 10 here, no limit there
    assert "sampler.max_num_gen_batches" in launched(MATH, "sampler.max_num_gen_batches=0").covered
    assert (
        values_of(launched(MATH, "sampler.metric=seq_reward"))["algorithm.filter_groups.metric"]
        == "reward"
    )


def test_pipeline_parallel_engines_are_refused_and_experts_are_split() -> None:
    with pytest.raises(ForeignConfigError, match=r"rollout\.pipeline_parallel=2: verl's engines"):
        launched(MATH, "rollout.pipeline_parallel=2", "rollout.num_workers=8")
    keys = values_of(launched(MATH, "rollout.expert_parallel=true"))
    assert (
        keys["actor_rollout_ref.rollout.expert_parallel_size"] == "4"
    )  # the devices of an engine, as verl checks


def test_nodes_must_divide_the_devices() -> None:
    tree = load_config(MATH).model_dump(mode="json")
    keys = values_of(render({**tree, "external": {"num_nodes": 4}}, places()))
    assert (keys["trainer.nnodes"], keys["trainer.n_gpus_per_node"]) == ("4", "16")
    with pytest.raises(
        ForeignConfigError, match=r"external\.num_nodes=3 does not divide the 64 devices"
    ):
        render({**tree, "external": {"num_nodes": 3}}, places())


def test_separate_placement_becomes_shared_devices() -> None:
    keys = values_of(launched(CONFIGS / "dapo_qwen3_8b_choice.yaml"))  # 8 ranks and 8 engines
    assert keys["trainer.n_gpus_per_node"] == "16"
    assert keys["reward.custom_reward_function.path"].endswith("configs/rewards/finance_choice.py")
    assert launched(CONFIGS / "dapo_qwen3_8b_choice.yaml").files == {}


def test_overrides_of_the_recipe_come_last_and_win() -> None:
    tree = load_config(MATH).model_dump(mode="json")
    own = ["actor_rollout_ref.rollout.name=sglang", "+trainer.x=1"]
    launch = render({**tree, "external": {"overrides": own}}, places())
    assert list(launch.overrides[-2:]) == own
    assert sum("rollout.name=" in each for each in launch.overrides) == 1


def test_megatron_keys_are_renamed() -> None:
    tree = load_config(MATH, ["train.offload_parameters=true"]).model_dump(mode="json")
    launch = render({**tree, "external": {"strategy": "megatron"}}, places())
    keys = values_of(launch)
    actor = "actor_rollout_ref.actor.megatron"
    assert launch.argv[2] == "--config-name=ppo_megatron_trainer"
    assert keys[f"{actor}.param_offload"] == "True"
    assert (
        keys[f"{actor}.context_parallel_size"] == "8"
    )  # train.sequence_parallel: ranks that share a sequence
    assert keys[f"{actor}.override_transformer_config.recompute_method"] == "uniform"
    assert keys["actor_rollout_ref.ref.strategy"] == "megatron"
    assert not any("fsdp_config" in key or "ulysses" in key for key in keys)


@pytest.mark.slow
def test_the_reward_file_scores_like_our_training(tmp_path: Path) -> None:
    launch = launched(MATH, 'reward.scorers=["mine=exact"]', folder=tmp_path)
    (tmp_path / REWARD_FILE).write_text(launch.files[REWARD_FILE], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loaded_as_verl_does", tmp_path / REWARD_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for data_source, scorer in (
        ("math_dapo", "math_dapo"),
        ("mine", "exact"),
        ("openai/gsm8k", "gsm8k"),
    ):
        for response in ("so Answer: 34", r"\boxed{34}", "#### 34", "none", "Answer: 35"):
            ours = SCORERS[scorer](response, "34")
            theirs = module.compute_score(data_source, response, "34", {"index": 0})
            assert (theirs["score"], theirs["acc"]) == (ours.value, ours.acc)
            assert theirs["pred"] == (ours.answer or "")
    slow = module.compute_score(
        data_source="hiyouga/geometry3k", solution_str=r"\boxed{4/2}", ground_truth="2"
    )
    assert slow == {
        "score": 0.9,
        "acc": 1.0,
        "pred": "4/2",
        "no_answer": 0.0,
        "failed": 0.0,
    }  # in the scorer's process


def row(number: int, name: str, weight: float) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"problem {number}"}],
        "ability": None,
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": f"{name}-{number}"},
        "problem": f"problem {number}",
        "dataset": name,
        "weight": weight,
        "template": None,
        "grader": None,
    }


def test_rows_have_verls_columns_and_sets_match_their_weights(tmp_path: Path) -> None:
    rows = [row(number, "a", 1.0) for number in range(3)] + [
        row(number, "b", 2.0) for number in range(2)
    ]
    write_prepared(iter([rows]), schema_of(iter([rows])), tmp_path / "prepared.parquet")
    assert write_rows(tmp_path / "prepared.parquet", tmp_path / "train.parquet") == 9
    table = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert list(table[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    names = [one["extra_info"]["index"] for one in table]
    # 3 rows at weight 1 take 6 rows at weight 2: each of b three times
    assert names == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-0", "b-1", "b-0", "b-1"]
    assert table[0]["ability"] == ""
    assert table[0]["reward_model"] == {"ground_truth": "0", "style": "rule"}
