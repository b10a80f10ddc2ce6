"""The memory plan: model tensors, hand-computed bytes and devices."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_core.demo.recipe_model import recipe_config
from dapo_core.engines import vllm_engine
from dapo_core.errors import ConfigError, ModelError
from dapo_core.memory.devices import DEVICES, GIB, Limit, find_device
from dapo_core.memory.engine import STEP_TOKENS, engine_memory
from dapo_core.memory.plan import OTHERS, PHASES, MemoryPlan, plan_memory
from dapo_core.memory.published import PUBLISHED, published_config
from dapo_core.memory.rank import RankMemory, rank_memory
from dapo_core.memory.shape import MODEL_TYPES, shape_of
from dapo_core.memory.tower import LANGUAGE_MODELS
from flows.cli import app
from flows.config import Config, load_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.preflight.memory import device_limit, plan_of
from tests.configs import make_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}


def recipe(name: str, *overrides: str) -> Config:
    return load_config(PROJECT_ROOT / "configs" / f"{name}.yaml", overrides)


def planned(config: Config, model: str, gigabytes: float | None = None) -> MemoryPlan:
    limit = Limit("test", None if gigabytes is None else int(gigabytes * GIB))
    return plan_memory(config, shape_of(PUBLISHED[model]), limit)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_tensor_shapes_match_transformers(kind: str, is_tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = EXPERTS if kind == "qwen3_moe" else {}
    config = AutoConfig.for_model(kind, **SIZES, **experts, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(config.to_json_string(use_diff=False)))
    layers = [
        [tuple(parameter.shape) for parameter in layer.parameters()] for layer in model.model.layers
    ]
    assert [sorted(layer) for layer in shape.layers] == [sorted(layer) for layer in layers]
    parameters = list(model.parameters())
    assert shape.num_parameters == sum(parameter.numel() for parameter in parameters)
    # FSDP2 gives each of 5 ranks a chunk of the rows; the first chunk is the largest.
    assert sum(shape.shards(5)) == sum(
        torch.chunk(parameter, 5)[0].numel() for parameter in parameters
    )


VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
OF_QWEN3_VL = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}


def vision_config(kind: str, is_tied: bool = False) -> dict[str, Any]:
    text = {**SIZES, **(EXPERTS if kind == "qwen3_vl_moe" else {}), "mlp_only_layers": []}
    vision = VISION if kind == "qwen2_5_vl" else VISION | OF_QWEN3_VL
    parts = {"text_config": text, "vision_config": vision}
    return {"model_type": kind, **parts, "tie_word_embeddings": is_tied}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_tensor_shapes_of_a_tower_match_transformers(kind: str, is_tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = vision_config(kind, is_tied)
    values["text_config"] = values["text_config"] | {"tie_word_embeddings": is_tied}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    shape = shape_of(config.to_dict())
    assert shape.tower is not None
    tower = [tuple(each.shape) for each in model.model.visual.parameters()]
    assert sorted(shape.tower.shapes) == sorted(tower)
    assert shape.num_parameters == model.num_parameters()


def test_a_frozen_tower_has_no_gradients_no_moments_and_keeps_no_activations() -> None:
    settings = {"num_ranks": 2, "micro_batch_tokens": 128, "mini_prompts": 4, "dtype": "float32"}
    lengths: dict[str, Any] = {"data": {"max_prompt_tokens": 64}}
    lengths["rollout"] = {"max_response_tokens": 64}
    lengths["reward"] = {"overlong": {"enabled": False}}
    shape = shape_of(vision_config("qwen3_vl"))
    memory = {}
    for freeze in ((), ("vision",)):
        config = make_config(**lengths, train={**settings, "train_prompts": 4, "freeze": freeze})
        memory[freeze] = rank_memory(config, shape)
    trained, frozen = memory.values()
    assert frozen.weights == trained.weights
    num_elements = sum(shape.tower_shards(2))
    assert trained.gradients - frozen.gradients == 4 * num_elements
    assert trained.optimizer - frozen.optimizer == 8 * num_elements
    # one sequence, whose 64 prompt tokens show 4 patches each; inputs of 2 blocks in float32
    kept = 64 * 4 * 2 * 48 * 4
    assert trained.update_activations - frozen.update_activations == kept


def test_a_step_of_many_prompt_tokens_scores_no_longer_probe() -> None:
    """The guide's script of Qwen3-32B has max_num_batched_tokens=22528, which took 25.5 GiB."""
    config = recipe("dapo_qwen3_32b_math", "rollout.engine_args={max_num_batched_tokens: 22528}")
    plan = plan_of(config)
    assert plan.engine.probe == 2049 * 151_936 * 8
    assert plan.shortages == []


def test_published_models_have_the_right_sizes() -> None:
    billions = {name: shape_of(config).num_parameters / 1e9 for name, config in PUBLISHED.items()}
    known = {"Qwen3-0.6B": 0.60, "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.53, "Qwen2.5-32B": 32.76}
    known |= {"Qwen3-VL-30B-A3B": 31.07, "Qwen2.5-VL-7B": 8.29}  # with their towers
    assert {name: round(billions[name], 2) for name in known} == known
    for name in ("models/Qwen3-8B-Base", "Qwen/Qwen3-8B"):
        assert published_config(name) is PUBLISHED["Qwen3-8B"]
    assert published_config("Qwen/Qwen3-8B-VL") is None


def test_an_engine_reserves_a_pass_of_its_tower_over_the_largest_picture() -> None:
    config, shape = recipe("qwen3_vl_30b_geo3k"), shape_of(PUBLISHED["Qwen3-VL-30B-A3B"])
    whole, decoder = (
        engine_memory(config, each, None).activations
        for each in (shape, replace(shape, tower=None))
    )
    # 16,384 tokens of four patches, each with 16 x 16 x 2 x 3 pixels and 8 h + 3 i values, in
    # bfloat16
    assert whole - decoder == 16_384 * 4 * (1_536 + 8 * 1_152 + 3 * 4_304) * 2


def test_state_of_qwen3_32b_over_64_ranks() -> None:
    """32,762,123,264 parameters / 64: all first dimensions divide, so a shard has 511,908,176."""
    rank = rank_memory(
        recipe("dapo_qwen3_32b_math", "train.num_ranks=64"), shape_of(PUBLISHED["Qwen3-32B"])
    )
    assert rank.weights == rank.gradients == 2_047_632_704
    assert (rank.optimizer, rank.reference) == (4_095_265_408, 0)
    with_kl = recipe("dapo_qwen3_32b_math", "train.num_ranks=64", "algorithm.kl.place=loss")
    # bfloat16
    assert rank_memory(with_kl, shape_of(PUBLISHED["Qwen3-32B"])).reference == 1_023_816_352


def test_update_memory_of_qwen3_32b() -> None:
    """n = 22,528 tokens on each of 64 ranks: the peak is the last layer's backward pass."""
    one_row = ("train.num_ranks=64", "train.sequence_parallel=1", "train.micro_batch_tokens=22528")
    rank = rank_memory(recipe("dapo_qwen3_32b_math", *one_row), shape_of(PUBLISHED["Qwen3-32B"]))
    tokens, hidden, queries, keys, width, vocabulary = 22_528, 5_120, 8_192, 1_024, 25_600, 151_936
    # 487,598,336 parameters
    layer = 2 * hidden * (queries + keys) + 3 * hidden * width + 2 * 128 + 2 * hidden
    head = vocabulary * hidden
    # bfloat16: root, current and next layer
    assert rank.update_weights == 2 * (2 * head + hidden) + 2 * 2 * layer
    # head gradient and half of the layer's in bfloat16, the layer's reduced gradient in float32
    assert rank.update_gradients == 2 * (head + layer // 2) + 4 * layer
    norms, head_norms = 2 * 8 * hidden, 6 * (queries + keys)
    # q, k, v, the output twice; logsumexp of 64 heads
    attention = 2 * (3 * queries + 2 * keys) + 4 * 64
    kept = norms + head_norms + attention + 4 * 2 * width  # 395,520 bytes per token
    inputs = 64 * 2 * hidden  # of 64 checkpointed layers
    assert rank.update_activations == tokens * (inputs + kept + 2 * 2 * width + 2 * 2 * hidden)


def test_memory_keys_have_the_planned_effect() -> None:
    base = ("rollout.num_workers=8", "train.num_ranks=8", "train.micro_batch_tokens=10240")
    shape = shape_of(PUBLISHED["Qwen3-8B"])

    def rank(*change: str) -> RankMemory:
        return rank_memory(recipe("dapo_qwen3_8b_math", *base, *change), shape)

    plain, kept = rank(), rank("train.gradient_checkpointing=false")
    # activations of 36 layers instead of 36 inputs and one layer
    assert kept.update_activations > 5 * plain.update_activations
    # 36 gathered layers and one buffer instead of one and one
    gathered = rank("train.reshard_after_forward=false").update_weights
    assert gathered - plain.update_weights == 35 * 2 * shape.largest_layer
    assert rank("train.logits_chunk_tokens=256").scoring_logits * 4 == plain.scoring_logits
    half = rank("train.micro_batch_tokens=5120")
    assert half.scoring_activations * 2 == plain.scoring_activations
    # 20,480 tokens of two sequences over two ranks, 40,960 of four over four: the same per rank
    assert rank("train.sequence_parallel=4").scoring_activations == plain.scoring_activations
    assert rank("train.dtype=float32").forward_weights == 2 * plain.forward_weights
    assert rank("train.fsdp_size=4").weights == 2 * plain.weights


def test_ranks_that_divide_the_experts_gather_only_their_own() -> None:
    """Qwen3-30B-A3B on 16 ranks: 128 experts with 3 x 2,048 x 768 parameters in a layer."""
    shape = shape_of(PUBLISHED["Qwen3-30B-A3B"])
    experts = 128 * 3 * 2048 * 768
    # queries, keys, values, output; head norms and norms; router
    others = 2 * 2048 * (4096 + 512) + 2 * (128 + 2048) + 128 * 2048
    for parts in (1, 8, 16):
        assert shape.layer_sizes(parts) == [others + experts // parts] * 48

    def rank(expert_parallel: int) -> RankMemory:
        layout = ("train.num_ranks=16", f"train.expert_parallel={expert_parallel}")
        return rank_memory(recipe("dapo_qwen3_8b_math", *layout), shape)

    whole, eight, sixteen = rank(1), rank(8), rank(16)
    # 128 experts over 16 ranks, or 16 experts over 2: a rank holds 8 of them
    assert whole.weights == eight.weights == sixteen.weights
    assert whole.forward_weights > eight.forward_weights > sixteen.forward_weights


def test_checkpoints_include_a_refreshed_reference() -> None:
    kept, fresh = (
        planned(recipe("grpo_qwen3_8b_math", f"algorithm.kl.refresh_every={every}"), "Qwen3-8B")
        for every in (0, 5)
    )
    number = shape_of(PUBLISHED["Qwen3-8B"]).num_parameters
    assert kept.disk.checkpoint == 12 * number  # weights and two moments in float32
    assert fresh.disk.checkpoint == 14 * number  # plus the reference in bfloat16
    copies = [
        sum(use.host_bytes for use in plan.uses if use.what == "copy being written")
        for plan in (kept, fresh)
    ]
    assert copies[1] - copies[0] == kept.rank.reference > 0


def test_micro_batches_are_limited_by_the_step() -> None:
    """arith_cpu: 8 x 8 / 2 = 32 responses of 120 tokens on a rank, below its 16,384 tokens."""
    shape = shape_of(recipe_config(recipe("arith_cpu").model.recipe))
    whole, half = (
        rank_memory(recipe("arith_cpu", f"train.micro_batch_tokens={tokens}"), shape)
        for tokens in (7680, 3840)
    )
    assert rank_memory(recipe("arith_cpu"), shape) == whole
    assert half.update_activations == whole.update_activations  # 3,840 tokens are trained on
    assert half.scoring_activations * 2 == whole.scoring_activations  # 7,680 are scored


def test_kv_cache_of_an_engine_over_four_dies() -> None:
    """64 layers x 8 heads x 128 x 2 x 2 B / 4 = 65,536 B a token; 32.8e9 x 2 B / 4 of weights."""
    config = recipe("dapo_qwen3_32b_math")
    engine = engine_memory(config, shape_of(PUBLISHED["Qwen3-32B"]), 64 * GIB)
    assert engine.token_bytes == 65_536
    assert engine.sequence_bytes == 65_536 * 22_528
    # norms are replicated
    assert abs(engine.weights - 2 * 32_762_123_264 / 4) < 0.002 * engine.weights
    assert engine.cache == int(0.8 * 64 * GIB) - engine.fixed
    assert engine.num_sequences == engine.cache // engine.sequence_bytes == 24
    # one step's prompt tokens, two float32 values per logit
    assert engine.probe == 2_048 * 151_936 * 8
    assert STEP_TOKENS == vllm_engine.PREFILL_TOKENS
    two_key_heads = shape_of({**PUBLISHED["Qwen2.5-0.5B"], "num_attention_heads": 16})
    # key heads are replicated
    assert two_key_heads.token_elements(4) == two_key_heads.token_elements(2)
    fp8 = recipe("dapo_qwen3_32b_math", "rollout.engine_args={kv_cache_dtype: fp8}")
    assert engine_memory(fp8, shape_of(PUBLISHED["Qwen3-32B"]), None).token_bytes == 32_768


def test_offloaded_state_is_in_host_memory() -> None:
    def parts(*overrides: str) -> dict[tuple[str, str], tuple[int, int]]:
        plan = planned(recipe("dapo_qwen3_8b_math", *overrides), "Qwen3-8B")
        return {
            (use.phase, use.what): (use.device_bytes, use.host_bytes)
            for use in plan.uses
            if use.role == "rank"
        }

    shard = 4 * sum(shape_of(PUBLISHED["Qwen3-8B"]).shards(8))
    # Pinned memory is allocated in powers of two: 36 layers of 8 + 8 + 2 + 2 + 3 x 32 MiB with
    # 4,224 B of norms, twice 512 MiB (for 296.75) with 2,048 B.
    pinned = 36 * (116 * 1024**2 + 4224) + 1024**3 + 2048
    plain, shards = parts(), parts("train.offload_shards=true")
    for phase in PHASES:
        assert plain[phase, "optimizer"] == (2 * shard, 0)
        assert shards[phase, "optimizer"] == (0, 2 * shard)
        assert shards[phase, "weights"] == shards[phase, "gradients"] == (0, pinned)
    optimizer = parts("train.offload_optimizer=true", "train.offload_parameters=true")
    assert optimizer["update", "optimizer"] == plain["update", "optimizer"]
    assert optimizer["anchor", "optimizer"] == (0, 2 * pinned)
    assert optimizer["generate", "weights"] == (0, pinned)
    assert optimizer["anchor", "weights"] == (shard, 0)
    inputs = parts("train.offload_activations=true")["update", "activations"]
    tokens = 10_240  # 36 inputs of 8,192 bytes per token are offloaded, two stay
    assert inputs == (plain["update", "activations"][0] - 34 * 8192 * tokens, 36 * 8192 * tokens)


def test_colocated_roles_take_turns_on_the_device() -> None:
    """The table says who holds what; NPUs keep engine weights on the host, CUDA discards them."""
    config, shape = recipe("dapo_qwen3_32b_math"), shape_of(PUBLISHED["Qwen3-32B"])
    plan = planned(config, "Qwen3-32B", 61.27)
    cells = {
        (use.phase, use.role, use.what): (use.device_bytes, use.host_bytes) for use in plan.uses
    }
    engine, rank = engine_memory(config, shape, plan.limit.num_bytes), rank_memory(config, shape)
    assert cells["generate", "engine", "weights"] == (engine.weights, 0)
    assert cells["generate", "rank", "weights"] == (0, rank.pinned)
    assert ("generate", "rank", "gradients") not in cells  # dropped
    assert cells["update", "rank", "optimizer"] == (rank.optimizer, 0)
    assert cells["update", "engine", "weights"] == (0, engine.weights)
    assert ("update", "engine", "keys and values") not in cells
    assert cells["publish", "engine", "weights"] == (engine.weights, 0)
    assert ("publish", "engine", "keys and values") not in cells
    (load,) = plan.loads
    both = [use.device_bytes for use in plan.uses if use.phase == load.phase]
    assert (load.num_devices, load.peak_bytes) == (64, sum(both))
    on_cuda = planned(recipe("dapo_qwen3_8b_one_gpu"), "Qwen3-8B", 79)
    assert not [use for use in on_cuda.uses if use.role == "engine" and use.host_bytes]


def test_a_pipeline_stage_holds_its_layers_and_one_vocabulary_matrix() -> None:
    shape = shape_of(PUBLISHED["Qwen3-32B"])
    staged = recipe("dapo_qwen3_32b_math", "rollout.pipeline_parallel=2", "rollout.num_workers=8")
    engine = engine_memory(staged, shape, 64 * GIB)
    assert engine.token_bytes == 32_768  # of 32 of the 64 layers
    layers, matrix = 32 * shape.largest_layer, 151_936 * 5_120
    assert engine.weights == 2 * (layers // 4 + matrix // 4 + 5_120)


def test_weights_are_sent_in_two_buckets_of_at_least_the_largest_tensor() -> None:
    def sent(*overrides: str) -> set[int]:
        plan = planned(recipe("dapo_qwen3_8b_math", *overrides), "Qwen3-8B")
        return {
            use.device_bytes
            for use in plan.uses
            if use.what in ("weights being sent", "weights being received")
        }

    # the embedding in bfloat16, 1.16 GiB, is more than 512 MiB
    assert sent() == {2 * 151_936 * 4_096 * 2}
    assert sent("train.weight_bucket_bytes=2147483648") == {2 * 2**31}
    # at most the whole model
    assert sent("train.weight_bucket_bytes=1099511627776") == {2 * 2 * 8_190_735_360}
    # a device shared by rank and engine has them once
    shared = planned(recipe("dapo_qwen3_8b_one_gpu"), "Qwen3-8B").uses
    assert [use.role for use in shared if use.what.startswith("weights being")] == ["rank"]
    machine = planned(recipe("arith_cpu"), "Qwen3-0.6B")  # ranks and engines share memory
    assert [use.role for use in machine.uses if use.what.startswith("weights being")] == [OTHERS]


def test_a_sync_keeps_the_largest_module_until_it_is_whole() -> None:
    def held(name: str, model: str, *overrides: str) -> dict[str, int]:
        uses = planned(recipe(name, *overrides), model).uses
        return {use.phase: use.device_bytes for use in uses if use.what == "module being loaded"}

    experts = 128 * 3 * 4_096 * 1_536 * 2  # of one layer, in bfloat16
    moe = held("gspo_qwen3_235b_a22b_math", "Qwen3-235B-A22B")
    assert moe == {"publish": experts + experts // 8}
    # the embedding
    assert held("dapo_qwen3_8b_math", "Qwen3-8B") == {"publish": 2 * 151_936 * 4_096 * 2}
    assert held("dapo_qwen3_8b_lora", "Qwen3-8B") == {}
    assert held("dapo_qwen3_8b_math", "Qwen3-8B", "rollout.engine=hf") == {}


def test_groups_of_npus_have_buffers() -> None:
    def groups(name: str, model: str, *overrides: str) -> dict[str, float]:
        uses = planned(recipe(name, *overrides), model).uses
        each = 2 * 200 * 1024**2
        return {use.role: use.device_bytes / each for use in uses if use.what == "groups"}

    # all ranks, sequences, and weights; parts of an engine, and weights
    assert groups("dapo_qwen3_32b_math", "Qwen3-32B") == {"rank": 3, "engine": 2}
    hybrid = groups("dapo_qwen3_32b_math", "Qwen3-32B", "train.fsdp_size=16")
    assert hybrid == {"rank": 5, "engine": 2}
    # experts of all ranks; parts of an engine, with two for experts, and weights
    assert groups("qwen3_vl_30b_geo3k", "Qwen3-VL-30B-A3B") == {"rank": 3, "engine": 4}
    assert groups("dapo_qwen3_8b_one_gpu", "Qwen3-8B") == {}


def test_replayed_experts_take_the_drivers_memory() -> None:
    def sizes(*overrides: str, name: str = "gspo_qwen3_30b_a3b_math") -> set[tuple[int, int]]:
        uses = planned(recipe(name, *overrides), "Qwen3-30B-A3B").uses
        return {(use.device_bytes, use.host_bytes) for use in uses if use.what == "routing"}

    replay = "algorithm.routing_replay=policy"
    # 64 x 16 responses of 2,048 + 20,480 tokens, each with 48 layers x 8 experts
    assert sizes(replay) == {(0, 1_024 * 22_528 * 48 * 8)}
    assert sizes() == set()
    # on a CPU beside all else: 16 x 8 responses of 120 tokens
    assert sizes(name="arith_cpu_moe") == {(128 * 120 * 48 * 8, 0)}
    recipes = [recipe("gspo_qwen3_30b_a3b_math", *words) for words in ((), (replay,))]
    off, on = (planned(each, "Qwen3-30B-A3B").host_bytes for each in recipes)
    assert on - off == 1_024 * 22_528 * 48 * 8


def test_an_unknown_device_size_is_not_guessed() -> None:
    plan = planned(recipe("dapo_qwen3_8b_math"), "Qwen3-8B")
    assert [load.fits for load in plan.loads] == [None, None]
    assert (plan.engine.num_sequences, plan.shortages) == (None, [])
    assert device_limit(recipe("dapo_qwen3_8b_math", "train.device_model=null")).num_bytes is None


def test_devices_are_found_by_common_names() -> None:
    assert find_device("NVIDIA H100") is find_device("h100") is DEVICES["H100"]
    assert find_device("4090") is find_device("NVIDIA GeForce RTX 4090") is DEVICES["RTX 4090"]
    assert 78 < DEVICES["H100"].num_bytes / GIB < 79.2  # torch sees 79.1
    with pytest.raises(ConfigError, match="did you mean A100 40GB or A100 80GB"):
        find_device("A100")
    with pytest.raises(ConfigError, match="did you mean Atlas 800T A3"):
        find_device("Atlas 800 A3")
    with pytest.raises(ConfigError, match=r"is a npu device, but train\.device=cuda"):
        device_limit(recipe("dapo_qwen3_0_6b_gsm8k", "train.device_model=Atlas 800T A3"))


def test_a_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs config\.json of hf:you/own, which is not on"):
        plan_of(recipe("dapo_qwen3_8b_math", "model.id=you/own"))
    with pytest.raises(ConfigError, match=r"needs config\.json of models/own"):
        plan_of(recipe("dapo_qwen3_32b_math", "model.path=models/own"))
    with pytest.raises(ModelError, match="cannot be estimated for model_type mamba"):
        shape_of({"model_type": "mamba"})
    with pytest.raises(ModelError, match="has no 'hidden_size'"):
        shape_of({"model_type": "llama"})
    for text, message in (("{", "cannot be read"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            plan_of(recipe("dapo_qwen3_32b_math", f"model.path={tmp_path}"))


@pytest.mark.slow
def test_the_command_shows_the_plan_and_what_saves_memory() -> None:
    recipe_path = str(PROJECT_ROOT / "configs/dapo_qwen3_8b_math.yaml")
    shown = CliRunner().invoke(app, ["plan", recipe_path, "--memory"])
    assert (shown.exit_code, "it fits" in shown.output) == (0, True)
    assert "limit 61.27 (Atlas 800T A3)" in shown.output
    small = ["plan", recipe_path, "--memory", "--device-gigabytes", "24"]
    shown = CliRunner().invoke(app, small)
    assert shown.exit_code == 2
    assert "does not fit: a rank's device" in shown.output
    assert "lower train.logits_chunk_tokens" in shown.output
    server = ["plan", recipe_path, "--memory", "--set", "serve.max_model_len=400000"]
    shown = CliRunner().invoke(app, server)
    assert (shown.exit_code, "it fits" in shown.output) == (2, True)
    assert "set serve.tensor_parallel=2" in " ".join(shown.output.split())
    allowed = CliRunner().invoke(
        app, [*small, "--set", "train.allow_oversubscription=true", "--json"]
    )
    assert allowed.exit_code == 0
    plan = json.loads(allowed.stdout)
    assert plan["shortages"]
    assert {use["phase"] for use in plan["uses"]} == set(PHASES)
    wrong = CliRunner().invoke(app, ["plan", recipe_path, "--device-gigabytes", "24"])
    assert "needs --memory" in wrong.output


def test_lora_keeps_an_8b_model_on_one_device_without_its_moments() -> None:
    config = recipe("dapo_qwen3_8b_lora")
    shape = shape_of(PUBLISHED["Qwen3-8B"])
    # per layer: q, o 4096 + 4096; k, v 4096 + 1024; gate, up, down 4096 + 12,288
    adapters = 16 * 36 * (2 * 8_192 + 2 * 5_120 + 3 * 16_384)
    assert shape.adapter_parameters(config.train.lora) == adapters == 43_646_976
    plan = planned(config, "Qwen3-8B", 79)
    assert plan.rank is not None
    assert plan.rank.weights == 2 * shape.num_parameters + 4 * adapters
    assert plan.rank.optimizer == 2 * plan.rank.gradients == 8 * adapters
    assert plan.disk.checkpoint == 12 * adapters
    assert plan.shortages == []
    offloaded = [use.host_bytes for use in plan.uses if use.phase != "checkpoint"]
    assert sum(offloaded) == 0
    small = planned(recipe("dapo_qwen3_8b_lora_24gb"), "Qwen3-8B", 23)
    assert small.shortages == []
    assert 35 * GIB < small.host_bytes < 38 * GIB  # 15.3 twice, the policy's rounded up as pinned
