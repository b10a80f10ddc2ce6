"""The recipes in configs/: each loads, sets no key to its default, and yields the numbers computed
here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_core.config.derived import derive
from dapo_core.config.fields import known_fields
from dapo_core.errors import ConfigError
from dapo_core.machine import device
from dapo_core.memory.devices import GIB
from downloads import Unreachable
from eval.problems.registry import SETS
from flows.config import Config, load_config, resolve_config
from flows.tables import print_derived
from tasks.preflight.finding import OK, Findings
from tasks.preflight.memory import check_memory, plan_of, summary
from tasks.recipes.first_recipe import ALWAYS
from tasks.runs.plan import plan_chain
from tests.tiny_models import build_tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))


def load(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def keys_set(path: Path) -> Iterator[str]:
    """Yield the keys that a file sets, as `section.key`."""
    trees = [("", yaml.safe_load(path.read_text(encoding="utf-8")))]
    while trees:
        prefix, tree = trees.pop()
        trees += [
            (f"{prefix}{name}.", value) for name, value in tree.items() if isinstance(value, dict)
        ]
        yield from (prefix + name for name, value in tree.items() if not isinstance(value, dict))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_sets_no_key_to_its_default(path: Path) -> None:
    config = load_config(path)
    defaults = resolve_config({"data": {"train": "t", "eval": "e"}, "model": {"path": "m"}})
    equal = [key for key in keys_set(path) if value_of(config, key) == value_of(defaults, key)]
    assert [key for key in equal if path.stem != "own_cpu" or key not in ALWAYS] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_named_after_its_file_and_its_files_exist(path: Path) -> None:
    config = load_config(path)
    print_derived(derive(config))
    assert config.run.name == path.stem
    named = [one.set for one in (*config.data.train, *config.data.eval)]
    named += [config.model.path, config.custom_reward.path]
    assert not [name for name in named if name and Path(name).is_absolute()]
    if config.custom_reward.path:
        assert (CONFIGS.parent / config.custom_reward.path).is_file()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_devices_and_its_header_states_the_peak(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: True)
    is_written_by_init = path.stem == "own_cpu"
    overrides = (
        [f"model.path={build_tiny(tmp_path / 'small', 'llama')}"] if is_written_by_init else []
    )
    config = load_config(path, overrides)
    plan = plan_of(config)
    assert plan.limit.num_bytes is not None
    check_memory(config, None, findings := Findings())
    assert {finding.status for finding in findings} <= {OK}
    assert plan.shortages == []
    assert plan.engine.num_sequences
    header = " ".join(
        line.strip("# \n") for line in path.read_text().splitlines() if line.startswith("#")
    )
    peak = (
        f"the machine {plan.loads[0].peak_bytes / GIB:.1f} GiB"
        if config.train.device == "cpu"
        else summary(plan)
    )
    assert is_written_by_init or f"Memory plan: {peak}." in header


DERIVED = {  # in table order
    "arith_cpu": [
        2,  # policy: devices
        1,  # rollouts: devices
        3,  # policy and rollouts: devices
        2,  # data-parallel ranks: ranks, 2 ranks / 1 for each sequence
        1,  # copies of the trained weights: copies
        120,  # longest sequence: tokens, 64 + 56
        16,  # a training step: prompts
        128,  # a training step: responses, 16 x 8
        7_168,  # a training step, at most: response tokens, 128 x 56
        15_360,  # a training step, at most: tokens, 128 x (64 + 56)
        320,  # drawn for a step, at most: prompts, 32 x 10
        2,  # a training step: optimizer steps, 16 / 8
        120,  # the training: optimizer steps, 2 x 60
        10,  # of these, warm-up: optimizer steps
        960,  # the training: prompts, 16 x 60
        64,  # an optimizer step: responses, 8 x 8
        32,  # an optimizer step, per data-parallel rank: responses, 64 / 2
        16_384,  # a micro-batch on a device, at most: tokens
        136,  # a micro-batch of longest sequences: sequences, 16,384 / 120 = 136.5
        256,  # decoded at once by all engines, at most: responses, 1 x 256
        30_720,  # KV cache to decode them all to the end, per engine: tokens, 256 x 120
    ],
    "dapo_qwen2_5_32b_math": [
        128,  # policy: devices
        128,  # rollouts: devices, 32 engines x 4
        128,  # policy and rollouts, on the same devices, 16 nodes x 8
        16,  # data-parallel ranks: ranks, 128 / 8
        1,  # copies of the trained weights: copies
        22_528,  # longest sequence: tokens, 2,048 + 16,384 + 4,096
        512,  # a training step: prompts
        8_192,  # a training step: responses, 512 x 16
        167_772_160,  # a training step, at most: response tokens, 8,192 x 20,480
        184_549_376,  # a training step, at most: tokens, 8,192 x 22,528
        15_360,  # drawn for a step, at most: prompts, 1,536 x 10
        # a training step: optimizer steps, 512 / 32: the paper's 16 gradient updates for each
        # rollout step
        16,
        3_200,  # the training: optimizer steps, 16 x 200
        320,  # of these, warm-up: optimizer steps, the paper's 20 rollout steps x 16
        102_400,  # the training: prompts, 512 x 200
        512,  # an optimizer step: responses, 32 x 16: the paper's mini-batch
        32,  # an optimizer step, per data-parallel rank: responses, 512 / 16
        22_528,  # a micro-batch on a device, at most: tokens
        8,  # a micro-batch of longest sequences: sequences, 22,528 x 8 / 22,528
        8_192,  # decoded at once by all engines, at most: responses, 32 x 256
        5_767_168,  # KV cache to decode them all to the end, per engine: tokens, 256 x 22,528
    ],
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_numbers_are_as_computed_by_hand(name: str) -> None:
    assert [quantity.number for quantity in derive(load(name))] == DERIVED[name]


@pytest.mark.parametrize(
    ("name", "devices", "longest", "steps"),
    [
        ("dapo_qwen3_32b_math", 64, 22_528, 400),
        ("gspo_qwen3_30b_a3b_math", 16, 22_528, 400),
        ("gspo_qwen3_235b_a22b_math", 128, 22_528, 400),
        ("gspo_qwen3_235b_a22b_a3", 128, 22_528, 400),
        ("qwen3_vl_30b_geo3k", 16, 3_072, 400),
        ("qwen2_5_vl_7b_geo3k", 8, 3_072, 1000),
        ("dapo_qwen3_0_6b_gsm8k", 2, 2_560, 400),
        ("dapo_qwen3_0_6b_laptop", 1, 2_560, 400),
        ("dapo_qwen3_8b_one_gpu", 1, 10_240, 200),
        ("dapo_qwen3_8b_lora", 1, 10_240, 200),
        ("dapo_qwen3_8b_lora_24gb", 1, 3_072, 200),
        ("dapo_qwen3_8b_math", 16, 10_240, 400),
        ("dapo_qwen3_8b_choice", 16, 10_240, 400),
    ],
)
def test_a_recipe_keeps_its_devices_lengths_and_optimizer_steps(
    name: str, devices: int, longest: int, steps: int
) -> None:
    config = load(name)
    numbers = {(one.label, one.unit): one.number for one in derive(config)}
    assert config.num_devices == devices
    assert numbers["longest sequence", "tokens"] == longest
    assert numbers["the training", "optimizer steps"] == steps


def test_a_header_names_what_to_set_for_two_nodes_of_eight_dies() -> None:
    name, num_dies = "qwen3_vl_30b_geo3k", 8
    settings = re.findall(r"--set (\S*\w)", (CONFIGS / f"{name}.yaml").read_text())
    config = load(name, *settings)
    assert config.train.ray_address is not None
    assert config.store.path == "SHARED"
    assert config.num_devices == 2 * num_dies
    of_a_node = config.train.expert_parallel, config.rollout.tensor_parallel
    assert {*of_a_node, config.serve.num_devices} == {num_dies}
    assert plan_of(config).shortages == []


def test_a_header_names_what_to_set_for_half_of_the_nodes_and_their_host_memory() -> None:
    name = "gspo_qwen3_235b_a22b_a3"
    header = (CONFIGS / f"{name}.yaml").read_text().replace("\n# ", " ")
    settings = re.findall(r"--set (\S*\w)", header)
    assert f"up to {plan_of(load(name)).host_bytes / 8 / GIB:.0f} GiB of a node" in header
    half = plan_of(load(name, *settings))
    assert (half.shortages, half.loads[0].num_devices) == ([], 64)
    assert f"with {half.host_bytes / 4 / GIB:,.0f} GiB of each node" in header
    on_devices = plan_of(load(name, *settings[:2])).loads[0].peak_bytes
    assert f"Four nodes need {on_devices / GIB:.1f} GiB" in header


def test_sharding_within_nodes_replicates_weights() -> None:
    derived = {
        quantity.label: quantity.number
        for quantity in derive(load("dapo_qwen2_5_32b_math", "train.fsdp_size=8"))
    }
    assert derived["copies of the trained weights"] == 16  # 128 / 8
    # sharding does not change which rank sees which response
    assert derived["data-parallel ranks"] == 16


def test_grpo_differs_from_dapo_only_in_algorithm_and_task() -> None:
    grpo, dapo = load("grpo_qwen3_8b_math"), load("dapo_qwen3_8b_choice")
    mathematics = load("dapo_qwen3_8b_math")
    differing = {
        key for key in known_fields(Config) if value_of(mathematics, key) != value_of(dapo, key)
    }
    assert differing == {"run.name", "data.train", "data.eval", "custom_reward.path"}
    differing = {key for key in known_fields(Config) if value_of(grpo, key) != value_of(dapo, key)}
    task = {"run.name", "data.train", "data.eval", "custom_reward.path"}
    assert differing - task == {
        "algorithm.clip_ratio_high",
        "algorithm.clip_ratio_dual",
        "algorithm.loss_aggregation",
        "algorithm.kl.place",
        "reward.overlong.enabled",
        "sampler.dynamic",
        "sampler.gen_prompts",
    }
    assert grpo.algorithm.clip_ratio_high == grpo.algorithm.clip_ratio_low
    assert grpo.sampler.gen_prompts == grpo.train.train_prompts


def test_the_papers_recipe_uses_the_default_algorithm() -> None:
    sections = {key.partition(".")[0] for key in keys_set(CONFIGS / "dapo_qwen2_5_32b_math.yaml")}
    assert sections.isdisjoint({"algorithm", "reward", "sampler"})
    paper = load("dapo_qwen2_5_32b_math")
    assert (paper.train.learning_rate, paper.evaluate.temperature, paper.evaluate.top_p) == (
        1e-6,
        1.0,
        0.7,
    )
    assert paper.rollout.max_response_tokens - paper.reward.overlong.buffer_tokens == 16_384
    assert paper.algorithm.kl.place == "off"


def test_a_placeholder_in_a_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path = '<MODEL>' still holds a placeholder"):
        load("dapo_qwen3_32b_math", "model.path=<MODEL>")
    prompt = "The number ${n}$ in <ANSWER></ANSWER>"
    assert load("dapo_qwen3_32b_math", f"data.system_prompt={prompt}").data.system_prompt == prompt


def no_answer(*_: object) -> None:
    raise Unreachable("no answer")


@pytest.mark.parametrize(
    "name", ["dapo_qwen3_8b_math", "dapo_qwen3_0_6b_gsm8k", "dapo_qwen3_8b_choice"]
)
def test_a_recipe_with_published_data_plans_offline_and_lists_downloads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("downloads.modelscope.resolve", no_answer)  # its client retries for 15 s
    config = load(name, f"store.path={tmp_path}")
    data, model, *_ = plan_chain(config)
    assert model.note.startswith(
        f"would fetch hf:{config.model.id}, which cannot be resolved now: HF_HUB_OFFLINE"
    )
    for one, split in ((config.data.train[0], "train"), (config.data.eval[0], "test")):
        reference = SETS[one.set].source(split)
        assert (
            "fetches " if reference.startswith("https://") else "would fetch "
        ) + reference in data.note


def test_a_leading_tilde_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {source: path, path: ~/tiny}\ndata: {train: [~/a.csv, b~/c.csv], eval: gsm8k}\n"
    )
    # the shell does not expand it here
    config = load_config(path, ["custom_reward.path=~/reward.py"])
    assert (config.model.path, config.custom_reward.path) == (
        f"{tmp_path}/tiny",
        f"{tmp_path}/reward.py",
    )
    assert [entry.set for entry in config.data.train] == [f"{tmp_path}/a.csv", "b~/c.csv"]
