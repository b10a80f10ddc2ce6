"""Splits of verl's Megatron: which ones divide, and the memory per device for Qwen3-235B-A22B."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from dapo_core.memory.devices import Limit
from dapo_core.memory.megatron import largest_stage
from dapo_core.memory.plan import plan_memory
from dapo_core.memory.published import published_config
from dapo_core.memory.shape import shape_of
from dapo_core.memory.splits import Layers, Splits, require_divided, splits_of
from flows.config import Config, load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QWEN3_235B = Layers(layers=94, heads=64, key_heads=4, experts=128)
ACTOR = "actor_rollout_ref.actor.megatron."
OVERRIDES = (
    f"{ACTOR}tensor_model_parallel_size=4",
    f"{ACTOR}pipeline_model_parallel_size=8",
    f"{ACTOR}expert_model_parallel_size=16",
    f"{ACTOR}expert_tensor_parallel_size=1",
    f"++{ACTOR}override_transformer_config.account_for_embedding_in_pipeline_split=True",
    f"++{ACTOR}override_transformer_config.account_for_loss_in_pipeline_split=True",
)


def splits(*more: str, devices: int = 128) -> Splits:
    return splits_of([*OVERRIDES, *more], devices, context=1, recomputes=True)


def test_embedding_and_head_count_as_layers_of_the_end_stages() -> None:
    found = splits()
    assert found.stages(94) == [11, 12, 12, 12, 12, 12, 12, 11]  # (94 + 2) / 8 = 12 each
    assert (found.data, found.expert_data) == (4, 1)  # 128 / (4 x 8); 128 / (8 x 16 x 1)
    require_divided(found, QWEN3_235B, responses=512)


def test_layers_of_the_first_and_last_stage_can_be_set() -> None:
    transformer = f"+{ACTOR}override_transformer_config."
    by_number = splits_of(
        [
            f"{ACTOR}pipeline_model_parallel_size=4",
            f"{transformer}num_layers_in_first_pipeline_stage=23",
            f"{transformer}num_layers_in_last_pipeline_stage=23",
        ],
        4,
        context=1,
        recomputes=False,
    )
    assert by_number.stages(94) == [23, 24, 24, 23]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tensor_model_parallel_size=8", "=8 does not divide the model's 4 key heads; use one of"),
        ("pipeline_model_parallel_size=6", "x context_parallel_size=1 = 24 does not divide"),
        (
            "override_transformer_config.account_for_loss_in_pipeline_split=False",
            r"=8 does not divide the model's 94 layers: stages are \[10, 11, "
            r".*num_layers_in_last_pipeline_stage",
        ),
        ("expert_model_parallel_size=24", "=24 does not divide the model's 128 experts"),
        ("expert_tensor_parallel_size=4", "= 64 does not divide the 16 devices of a pipeline"),
        ("virtual_pipeline_model_parallel_size=5", "=5 needs several pipeline stages and must"),
        ("context_parallel_size=3", "= 96 does not divide train.num_ranks=128"),
    ],
)
def test_a_split_that_does_not_divide_names_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_divided(splits(f"{ACTOR}{override}"), QWEN3_235B, responses=512)


def test_responses_must_divide_over_data_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match=r"30 responses .* over 4 data-parallel ranks \(128 /"):
        require_divided(splits(), QWEN3_235B, responses=30)


def test_a_size_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=two is not a valid size"):
        splits(f"{ACTOR}tensor_model_parallel_size=two")


def recipe(*sets: str) -> Config:
    return load_config(
        CONFIGS / "dapo_qwen3_32b_math.yaml",
        (
            "train.num_ranks=128",
            "train.sequence_parallel=1",
            "train.micro_batch_tokens=22528",
            "rollout.num_workers=8",
            "rollout.tensor_parallel=16",
            *sets,
        ),
    )


def test_memory_per_device_for_qwen3_235b() -> None:
    shape = shape_of(published_config("Qwen/Qwen3-235B-A22B-Thinking-2507") or {})
    assert shape.num_parameters == 235_093_634_560
    stage = largest_stage(recipe(), shape, splits())
    # The last stage has the logits: 11 layers and the head. Per layer and device: 128 / 16 experts
    # x 3 x 4096 x 1536 = 150,994,944; attention (2 x 64 + 2 x 4) x 128 x 4096 / 4 = 17,825,792;
    # norms 2 x 4096 + 2 x 128 = 8,448; router 128 x 4096 = 524,288. The head: 151,936 x 4096 / 4 =
    # 155,582,464.
    dense = 11 * (17_825_792 + 8_448 + 524_288) + 155_582_464
    experts = 11 * 150_994_944
    assert stage.weights == 2 * (dense + experts)
    assert stage.gradients == 4 * (dense + experts)
    # Four data-parallel ranks share the dense part; each expert exists once.
    assert stage.optimizer == 12 * (dense // 4 + experts)
    assert stage.logits == 151_936 // 4 * 22_528 * 14
    half = largest_stage(
        recipe(),
        shape,
        splits(
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
            "+actor_rollout_ref.actor.optim.override_optimizer_config."
            "optimizer_offload_fraction=0.5",
        ),
    )
    assert half.host_optimizer == pytest.approx(stage.optimizer / 2, abs=1)


def test_offloading_frees_the_device_while_engines_generate() -> None:
    shape = shape_of(published_config("Qwen3-235B-A22B") or {})

    def held(config: Config) -> dict[str, int]:
        plan = plan_memory(config, shape, Limit("as given", 64 * 1024**3), splits=splits())
        return {
            use.what: use.device_bytes
            for use in plan.uses
            if (use.phase, use.role) == ("generate", "rank")
        }

    assert held(recipe()).keys() >= {"weights", "gradients", "optimizer"}
    offloaded = held(recipe("train.offload_parameters=true", "train.offload_optimizer=true"))
    assert {what: size for what, size in offloaded.items() if size} == {"process": 1024**3}
