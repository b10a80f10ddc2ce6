"""A recipe rendered for verl and imported again is the same, as far as both can express it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config.algorithm import AlgorithmConfig
from flows.config import load_config
from interop import ForeignConfigError
from interop.account import account_of
from interop.foreign_config import by_name
from interop.hydra import setting_of
from interop.render.inverse import settings_for
from interop.render.launch import Places
from interop.render.verl import nodes_of, render
from interop.table import load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(
    path.stem
    for path in CONFIGS.glob("*.yaml")
    if load_config(path).train.backend in ("own", "verl")
)
# The renderer sets nodes and devices; trainers that share devices cannot express separate
# placement.
PLACEMENT_KEYS = {"train.num_ranks", "train.placement", "rollout.num_workers"}
# Set by the renderer (paths), or interpreted differently or ignored by main_ppo.
RENDERER_KEYS = {
    "data.train",
    "data.eval",
    "data.columns.messages",
    "model.path",
    "custom_reward.path",
    "sampler.gen_prompts",
    "rollout.dtype",
    "train.weight_bucket_bytes",
    "model.source",
    "sampler.max_num_gen_batches",
}
ODDS = st.floats(0.01, 0.99)
MEASURED = settings(max_examples=60, deadline=None)


def read_back(tree: dict[str, Any], version: str) -> dict[str, tuple[Any, Any]]:
    """Return the keys that come back changed: (new value, old value)."""
    settings = settings_for(tree, "verl", version)
    account = account_of(settings, "verl", version)
    assert account.of("misspelt", "contradicting", "unsupported", "ignored-by-trainer") == []
    ours, back = by_name(tree), by_name(account.tree())
    exported = {name for setting in settings for name in setting.origin.split(", ")} & back.keys()
    for name in ("data.train", "data.eval"):
        ours[name] = [ours[name]] if isinstance(ours[name], str) else ours[name]
    values = {name: value for name, value in back.items() if name in exported - PLACEMENT_KEYS}
    return {name: (value, ours[name]) for name, value in values.items() if value != ours[name]}


@pytest.mark.parametrize("version", load("verl").versions)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_survives_verls_keys(recipe: str, version: str) -> None:
    tree = load_config(CONFIGS / f"{recipe}.yaml").model_dump(mode="json")
    assert read_back(tree, version) == {}
    assert len(settings_for(tree, "verl", version)) > 50


@pytest.mark.parametrize(
    ("algorithm", "version"),
    [
        ({"loss": "gspo", "advantage": "rloo"}, "0.7.0"),
        ({"loss": "cispo", "advantage": "dr-grpo", "clip_ratio_high": 4.0}, "0.9.1"),
        ({"loss": "sapo", "advantage": "opo", "sapo": {"tau_negative": 1.5}}, "0.7.0"),
        ({"loss": "gmpo", "advantage": "reinforce++"}, "0.9.1"),
        ({"loss": "dppo-tv", "dppo_tv": {"low": 0.1, "high": 0.2, "ratio_max": 5.0}}, "0.9.1"),
        ({"loss": "clip-cov", "clip_cov": {"ratio": 0.01, "low": 0.5, "high": 9.0}}, "0.7.0"),
        ({"loss": "kl-cov", "kl_cov": {"ratio": 0.01}}, "0.9.1"),
        ({"loss": "dro", "advantage": "reinforce++-baseline"}, "0.9.1"),
        ({"loss": "reinforce"}, "0.9.1"),
    ],
    ids=str,
)
def test_losses_and_advantages_survive_verls_keys(algorithm: dict[str, Any], version: str) -> None:
    tree = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml").model_dump(mode="json")
    tree["algorithm"] = AlgorithmConfig.model_validate(algorithm).model_dump(mode="json")
    settings = settings_for(tree, "verl", version)
    account = account_of(settings, "verl", version)
    assert account.of("misspelt", "contradicting", "unsupported", "ignored-by-trainer") == []
    back = AlgorithmConfig.model_validate(account.tree()["algorithm"]).model_dump(mode="json")
    del back["rollout_correction"], tree["algorithm"]["rollout_correction"]
    assert back == tree["algorithm"]


@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        ({"advantage": "batch-std"}, "verl"),
        ({"loss": "custom", "custom_loss": {"path": "loss.py"}}, "verl"),
        ({"loss": "gspo"}, "mindspeed-rl"),
        ({"advantage": "rloo"}, "mindspeed-rl"),
    ],
)
def test_what_a_trainer_does_not_have_is_not_rendered_as_something_else(
    algorithm: dict[str, Any], trainer: str
) -> None:
    tree = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml").model_dump(mode="json")
    tree["algorithm"] = AlgorithmConfig.model_validate(algorithm).model_dump(mode="json")
    with pytest.raises(ForeignConfigError, match=f"{trainer} does not have it; set one of "):
        settings_for(tree, trainer)


@pytest.mark.slow
@MEASURED
@given(
    low=ODDS,
    high=ODDS,
    group=st.integers(2, 64),
    updates=st.sampled_from([1, 2, 4, 8]),
    warmup=st.integers(0, 50),
    kl=st.sampled_from(["off", "loss", "reward"]),
    coefficient=ODDS,
    is_dynamic=st.booleans(),
    tokens=st.tuples(st.integers(1, 4096), st.integers(1, 32_768)),
    rate=st.floats(1e-8, 1e-2),
    too_long=st.sampled_from(["drop", "truncate_left", "error"]),
    sampling=st.tuples(st.floats(0.1, 2), st.floats(0.1, 1), st.sampled_from([-1, 20])),
    version=st.sampled_from(load("verl").versions),
)
def test_any_values_survive_verls_keys(**drawn: Any) -> None:
    tree = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml").model_dump(mode="json")
    tree["algorithm"] |= {"clip_ratio_low": drawn["low"], "clip_ratio_high": drawn["high"]}
    tree["algorithm"]["kl"] |= {"place": drawn["kl"], "coefficient": drawn["coefficient"]}
    tree["rollout"] |= {"group_size": drawn["group"], "max_response_tokens": drawn["tokens"][1]}
    tree["rollout"] |= dict(zip(("temperature", "top_p", "top_k"), drawn["sampling"], strict=True))
    tree["data"] |= {"max_prompt_tokens": drawn["tokens"][0], "too_long": drawn["too_long"]}
    tree["sampler"]["dynamic"] = drawn["is_dynamic"]
    tree["train"] |= {
        "mini_prompts": 64 // drawn["updates"],
        "warmup_steps": drawn["warmup"] * drawn["updates"],
        "learning_rate": drawn["rate"],
    }
    tree["train"]["micro_batch_tokens"] = 8192  # room for the longest sequence
    lost = read_back(tree, drawn["version"])
    if drawn["kl"] == "off":  # then the coefficient has no meaning
        lost.pop("algorithm.kl.coefficient", None)
    assert lost == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_survives_verls_command_line(recipe: str) -> None:
    is_for_cpu = load_config(CONFIGS / f"{recipe}.yaml").train.device == "cpu"
    sets = ("train.device=cuda", "rollout.engine=vllm", "algorithm.routing_replay=off")
    sets = sets if is_for_cpu else ()
    tree = load_config(CONFIGS / f"{recipe}.yaml", sets).model_dump(mode="json")
    launch = render(tree, Places(*[Path("/places")] * 5))
    account = account_of([setting_of(text, "command line") for text in launch.overrides], "verl")
    ours, back = by_name(tree), by_name(account.tree())
    assert back["train.num_ranks"] == sum(nodes_of(ours)[1:])
    assert back["train.placement"] == "colocated"
    compared = {
        key: (value, ours[key])
        for key, value in back.items()
        if not isinstance(value, dict) and key in ours and key not in PLACEMENT_KEYS | RENDERER_KEYS
    }
    assert {key: pair for key, pair in compared.items() if pair[0] != pair[1]} == {}
    assert len(compared) > 40


def test_warmup_within_a_training_step_has_no_key_in_verl() -> None:
    tree = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml").model_dump(mode="json")
    tree["train"]["warmup_steps"] = 3  # of two optimizer steps a training step
    exported = {setting.key for setting in settings_for(tree, "verl")}
    assert "actor_rollout_ref.actor.optim.lr_warmup_steps" not in exported


def test_free_engine_arguments_reach_verl() -> None:
    tree = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml").model_dump(mode="json")
    tree["rollout"]["engine_args"] = {"enforce_eager": True, "swap_space": 4}
    found = {setting.key: setting.value for setting in settings_for(tree, "verl")}
    assert found["actor_rollout_ref.rollout.enforce_eager"] is True  # has an exact key
    assert found["actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space"] == 4
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager" not in found
