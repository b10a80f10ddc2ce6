"""MindSpeed-RL's configurations are read, accounted for, and converted."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from interop import ForeignConfigError
from interop.account import Account, account_of
from interop.foreign_config import Setting
from interop.hydra import settings_of_yaml
from interop.mindspeed import is_mindspeed
from interop.read import config_of, read_files
from interop.table import load
from tests.guides import tree_of

CLASSES = Path(__file__).resolve().parents[1] / "data" / "mindspeed_classes.yaml"
GUIDES = Path(__file__).resolve().parents[1] / "data" / "guides"
GOLDEN = GUIDES / "mindspeed_accounts.json"
FILES = ("mindspeed_rl_32b.yaml", "mindspeed_rl_math_17k.yaml")
MEGATRON = ("megatron_training", "actor_config", "vit_config")
OF_IMAGES = "mindspeed_mm_qwen25vl_7b.yaml"


def account(*texts: str) -> Account:
    settings = [setting for text in texts for setting in config_of(text, "x.yaml")]
    return account_of(settings, "mindspeed-rl")


def only(text: str) -> Any:
    """Return the entry of the last setting."""
    return account(text).entries[-1]


def test_the_guide_is_accounted_for() -> None:
    reading = read_files([GUIDES / name for name in FILES])
    assert reading.trainer == "mindspeed-rl"
    accounted = account_of(reading.settings, reading.trainer)
    found = {entry.setting.key: [entry.fate, entry.ours] for entry in accounted.entries}
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_training_with_images_is_taken_but_not_its_prepared_rows() -> None:
    """MindSpeed-MM copies MindSpeed-RL's classes."""
    text = f"{(GUIDES / OF_IMAGES).read_text(encoding='utf-8')}\nrl_config: {{is_multimodal: true}}"
    refused = {each.setting.key for each in account(text).entries if each.fate == "unsupported"}
    assert "megatron_training.data_path" in refused
    assert "rl_config.is_multimodal" not in refused


def test_a_script_selects_and_overrides_its_configuration(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "YAML=${1:-mindspeed_rl_32b}\n"
        'if [ "$MASTER_ADDR" = "$CURRENT_IP" ]; then\n'
        "  python cli/train_dapo.py --config-name $YAML rl_config.n_samples_per_prompt=16 2>&1 | "
        "tee run.log\n"
        "fi\n"
    )
    names = (*FILES, OF_IMAGES)
    reading = read_files(
        [script, *(GUIDES / name for name in names)], {"MASTER_ADDR": "a", "CURRENT_IP": "a"}
    )
    assert reading.notes == [f"{OF_IMAGES} is ignored: the command selects another configuration"]
    accounted = account_of(reading.settings, reading.trainer)
    assert accounted.blocking() == []
    assert tree_of(accounted)["rollout"]["group_size"] == 16
    assert tree_of(accounted)["data"]["train"] == ["./dataset/dapo-math-17k.parquet"]


CONVERSIONS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "rl_config.clip_ratio: 0.2",
        "taken",
        {"algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.2},
    ),
    ("rl_config.clip_higher_enable: true; rl_config.clip_ratio: 0.2", "meaningless", {}),
    (
        "rl_config.token_level_loss: false",
        "taken",
        {"algorithm.loss_aggregation": "seq-mean-token-mean"},
    ),
    (
        "megatron_training.global_batch_size: 8",
        "taken",
        {"train.train_prompts": 8, "sampler.gen_prompts": 8},
    ),
    (
        "filter_groups_enable: true; actor_config.global_batch_size: 8",
        "taken",
        {"sampler.gen_prompts": 8},
    ),
    (
        "megatron_training.stage: ray_grpo; rl_config.init_kl_coef: 0.01",
        "taken",
        {"algorithm.kl.place": "loss", "algorithm.kl.coefficient": 0.01},
    ),
    ("megatron_training.stage: ray_dapo; rl_config.init_kl_coef: 0.01", "meaningless", {}),
    ("megatron_training.stage: ray_ppo", "unsupported", {}),
    (
        "rl_config.use_kl_in_reward: true; rl_config.kl_ctrl_type: adaptive",
        "taken",
        {"algorithm.kl.controller": "adaptive"},
    ),
    ("rl_config.kl_ctrl_type: adaptive", "unsupported", {}),
    ("rl_config.verifier_function: [strict_format]", "unsupported", {}),
    ("rl_config.filter_groups_max_batches: 5", "meaningless", {}),
    ("rl_config.overlong_buffer: 512", "meaningless", {}),
    (
        "rl_config.use_dynamic_bsz: true; rl_config.update_max_packing_token_size: 32768",
        "taken",
        {"train.micro_batch_tokens": 32768},
    ),
    (
        "actor_config.context_parallel_size: 2; use_dynamic_bsz: true; "
        "rl_config.max_packing_token_size: 4096",
        "taken",
        {"train.micro_batch_tokens": 2048},
    ),
    (
        "actor_config.lr: 2e-6; actor_config.lr_decay_style: cosine; actor_config.min_lr: 1e-6",
        "taken",
        {"train.min_learning_rate_ratio": 0.5},
    ),
    ("megatron_training.train_iters: 100; actor_config.lr_warmup_fraction: 0.1", "unsupported", {}),
    ("megatron_training.data_path: ./data", "unsupported", {}),
    ("megatron_training.data_path: d/train.parquet", "taken", {"data.train": ["d/train.parquet"]}),
    ("megatron_training.tensor_model_parallel_size: 8", "meaningless", {}),
    (
        "generate_config.infer_tensor_parallel_size: 3; rl_config.actor_resource: {num_npus: 8}",
        "unsupported",
        {},
    ),
    ("generate_config.sampling_config: {top_k: 50}", "taken", {"rollout.top_k": 50}),
    (
        "rl_config.use_wandb: true; rl_config.use_tensorboard: true",
        "taken",
        {"train.trackers": ["wandb"]},
    ),
    (
        "token_level_loss: true   <------- 默认开启",
        "taken",
        {"algorithm.loss_aggregation": "token-mean"},
    ),
]


@pytest.mark.parametrize(("text", "fate", "ours"), CONVERSIONS)
def test_conversions(text: str, fate: str, ours: dict[str, Any]) -> None:
    lines = text.split("; ")
    last = lines[-1].partition(":")[0]
    [entry] = [entry for entry in account("\n".join(lines)).entries if last in entry.setting.key]
    assert (entry.fate, entry.ours) == (fate, ours), entry.note


def test_a_misspelt_key_gets_a_suggestion() -> None:
    misspelt = only("rl_config: {n_sample_per_prompt: 8}")
    assert (misspelt.fate, misspelt.note) == (
        "misspelt",
        "did you mean rl_config.n_samples_per_prompt?",
    )
    assert only("megatron_training: {zzz_of_a_fork: 1}").fate == "ignored-by-trainer"


def test_the_model_file_sets_keys_that_nothing_else_sets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text(
        "small:\n  num_layers: 2\n  adam_beta2: 0.95\n  seed: 1\n"
    )
    text = "defaults:\n  - model:\n      - small\nmegatron_training:\n  model: small\n  seed: 7\n"
    settings = config_of(text, "run.yaml", tmp_path)
    assert Setting("megatron_training.adam_beta2", 0.95, "small.yaml:3") in settings
    assert [each.value for each in settings if each.key.endswith(".seed")] == [7]
    assert tree_of(account_of(settings, "mindspeed-rl"))["train"]["adam_beta2"] == 0.95


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "rl_config: [", "just text"])
def test_other_yaml_is_refused(text: str) -> None:
    with pytest.raises(ForeignConfigError, match=r"run\.yaml"):
        config_of(text, "run.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "data:\n  seed: 1\nactor_rollout_ref:\n  actor:\n    clip_ratio_low: 0.2\n    lr: 1\n",
        "trainer.nnodes: 1",
        *(path.read_text() for path in (GUIDES.parents[2] / "configs").glob("*.yaml")),
    ],
)
def test_other_configurations_are_not_taken_for_mindspeed(text: str) -> None:
    assert not is_mindspeed(settings_of_yaml(text, "x.yaml"))


def test_tabs_bom_and_anchors_are_read() -> None:
    text = (
        "\ufeffrl_config:\n\tn-samples-per-prompt: 8 # 每条\n"
        "x: &a {lr: 1e-6}\nactor_config:\n  <<: *a\n"
    )
    text = text.replace("\n", "\r\n")
    settings = {setting.key: setting for setting in config_of(text, "x.yaml")}
    assert settings["rl_config.n_samples_per_prompt"] == (
        "rl_config.n_samples_per_prompt",
        8,
        "x.yaml:2",
    )
    assert settings["actor_config.lr"].value == 1e-6


def key_list() -> dict[str, tuple[str, Any]]:
    """{section.key: (type, default)} of MindSpeed's classes; Megatron's are in three sections."""
    keys: dict[str, tuple[str, Any]] = {}
    for entry in yaml.safe_load(CLASSES.read_text(encoding="utf-8"))["classes"]:
        is_megatron = entry["section"] == "megatron"
        for place in MEGATRON if is_megatron else (entry["section"],):
            keys |= {f"{place}.{name}": tuple(field) for name, field in entry["keys"].items()}
    return keys


def test_every_key_of_the_classes_has_a_row() -> None:
    table = load("mindspeed-rl")
    for key, (kind, default) in key_list().items():
        row = table.find(key, table.newest)
        assert row is not None, key
        if table.newest in row.defaults and not row.is_family:
            assert row.defaults[table.newest] == default, key
        assert kind in ("bool", "int", "float", "str", "list", "dict")
    known = {*key_list(), "defaults", "model", "megatron_training.model", "actor_config.model"}
    odd = {
        row.key for row in table.rows if table.newest in row.versions and not row.is_family
    } - known
    assert odd == {"reward_config", "critic_config", "ref_config", "vit_config"}


def test_the_guides_original_text_has_the_same_account() -> None:
    folder = Path(os.environ.get("DAPO_TEST_DATA", "")).parent / "guides"
    if not folder.is_dir():
        pytest.skip("needs $DAPO_TEST_DATA/../guides")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    [guide] = folder.glob("004_*")
    blocks = re.findall(
        r"```yaml\n(.*?)(?:```|\n3。|\n3\.)", guide.read_text(encoding="utf-8"), re.DOTALL
    )
    entries = [each for block in blocks for each in account(block).entries]
    assert len(entries) == 18
    for entry in entries:
        assert [entry.fate, entry.ours] == golden[entry.setting.key], entry.setting.key
