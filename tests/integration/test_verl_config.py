"""verl's own configuration code reads what is rendered for it. No training."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from flows.config import load_config
from interop.account import account_of
from interop.foreign_config import Setting, by_name
from interop.render.launch import Places
from interop.render.trainers import write_rows
from interop.render.verl import render
from tasks.data.prepare import schema_of
from tasks.data.prepare import write_rows as write_prepared
from tests.tiny_models import build_tiny
from tests.unit.test_interop_render import row
from tests.verl_composed import CONFIGS, GOLDEN, NEWEST, OLDER, RECIPES, checked_by_verl, jobs_of

ALGORITHM = (
    "algorithm.",
    "sampler.dynamic",
    "reward.overlong",
    "rollout.group_size",
    "train.learning_rate",
)


CALLS = [
    {
        "data_source": "math_dapo",
        "solution_str": "so Answer: 34",
        "ground_truth": "34",
        "extra_info": {"index": "a-0"},
    },
    {
        "data_source": "openai/gsm8k",
        "solution_str": "#### 1",
        "ground_truth": "34",
        "extra_info": None,
    },
]


@pytest.fixture(scope="module", params=[NEWEST, OLDER])
def composed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    version: str = request.param
    folder = tmp_path_factory.mktemp("launch")
    jobs = jobs_of(version, tmp_path_factory.mktemp("source"))
    misspelt = [*jobs["dapo_qwen3_32b_math"]["overrides"], "actor_rollout_ref.actor.optimm.lr=1"]
    jobs["misspelt"] = {**jobs["dapo_qwen3_32b_math"], "overrides": misspelt}
    rows = [row(number, "a", 1.0) for number in range(3)]
    write_prepared(iter([rows]), schema_of(iter([rows])), folder / "prepared.parquet")
    write_rows(folder / "prepared.parquet", folder / "train.parquet")
    tree = load_config(CONFIGS / "grpo_qwen3_8b_math.yaml").model_dump(mode="json")
    launch = render(tree, Places(folder, folder, folder / "train.parquet", folder, folder), version)
    for name, text in launch.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = str(build_tiny(folder / "tiny", "qwen3"))
    asked = {
        "config_name": "ppo_trainer",
        "overrides": list(launch.overrides),
        "calls": CALLS,
        "tokenizer": tokenizer,
    }
    return {"version": version, "results": checked_by_verl(version, jobs, asked)}


def test_verl_loads_the_reward_file_and_the_rows(composed: dict[str, Any]) -> None:
    right, wrong = composed["results"].pop("scored")
    assert right == {"score": 1.0, "acc": 1.0, "pred": "34", "no_answer": 0.0, "failed": 0.0}
    assert (wrong["score"], wrong["acc"], wrong["pred"]) == (0.0, 0.0, "1")
    first = composed["results"].pop("first row")
    assert first["number"] == 3
    assert first["index"] == "a-0"
    assert first["reward_model"] == {"ground_truth": "0", "style": "rule"}


def test_what_verl_composed_is_the_recipe_again(composed: dict[str, Any]) -> None:
    for name in (
        name for name in RECIPES if not name.startswith("verl_")
    ):  # those have overrides of their own
        ours = by_name(load_config(CONFIGS / f"{name}.yaml").model_dump(mode="json"))
        changed = composed["results"][name]["changed"]
        settings = [Setting(key, value, "composed by verl") for key, value in changed.items()]
        account = account_of(settings, "verl", composed["version"])
        back = {
            key: value
            for key, value in by_name(account.tree()).items()
            if key.startswith(ALGORITHM) and not isinstance(value, dict)
        }
        assert back.keys() >= {"algorithm.clip_ratio_high", "sampler.dynamic", "rollout.group_size"}
        assert {key: value for key, value in back.items() if value != ours[key]} == {}, name


def test_every_recipe_is_composed_and_passes_verls_checks(composed: dict[str, Any]) -> None:
    errors = {
        name: result["error"] for name, result in composed["results"].items() if "error" in result
    }
    assert "optimm" in errors.pop("misspelt")  # verl's configuration has been asked
    assert errors == {}
    assert composed["results"].keys() == {"misspelt", *RECIPES}


def test_recipes_change_what_is_committed(composed: dict[str, Any]) -> None:
    for name in RECIPES if composed["version"] == NEWEST else ():
        golden = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"))
        changed = composed["results"][name]["changed"]
        assert changed == golden, f"{name}: python -m tests.verl_composed writes it again"


def test_keys_that_a_recipe_sets_arrive_in_both_versions(composed: dict[str, Any]) -> None:
    changed = composed["results"]["dapo_qwen3_32b_math"]["changed"]
    assert changed["actor_rollout_ref.actor.clip_ratio_high"] == 0.28
    assert changed["actor_rollout_ref.actor.ulysses_sequence_parallel_size"] == 8
    assert changed["algorithm.filter_groups.enable"] is True
    is_old = composed["version"] == OLDER
    prefix = (
        "reward_model.overlong_buffer" if is_old else "reward.reward_kwargs.overlong_buffer_cfg"
    )
    assert changed[f"{prefix}.len"] == 4096
    path = "custom_reward_function.path" if is_old else "reward.custom_reward_function.path"
    assert changed[path] == "/places/reward_for_verl.py"
