"""Accounts of verl configurations: every setting has one fate, units are converted, nothing is
dropped.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given as given_any
from hypothesis import settings as tried
from hypothesis import strategies as st

import interop
from interop import conversions, conversions_mindspeed
from interop.account import Account, account_of
from interop.foreign_config import Setting
from interop.table import TRAINERS, Fate, load
from tests.guides import tree_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# The batches and devices of a script for 32 billion parameters.
LARGE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 20480,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ROLLOUT}.tensor_model_parallel_size": 4,
    "trainer.n_gpus_per_node": 16,
    "trainer.nnodes": 4,
    "trainer.total_training_steps": 100,
}


def account(version: str | None = None, **facts: int) -> Any:
    def of(settings: dict[str, Any]) -> Account:
        given = [
            Setting(key, value, f"run.sh:{line}")
            for line, (key, value) in enumerate(settings.items(), 1)
        ]
        return account_of(given, "verl", version, facts)

    return of


def ours(settings: dict[str, Any], **facts: int) -> dict[str, Any]:
    return {
        name: value
        for entry in account(**facts)(LARGE | settings).entries
        for name, value in entry.ours.items()
    }


def test_units_change() -> None:
    assert ours({})["train.num_ranks"] == 64  # 16 devices x 4 nodes
    assert ours({})["rollout.num_workers"] == 16  # 64 devices / 4 per engine
    # 10 training steps of 64 / 32 = 2 optimizer steps
    assert ours({f"{ACTOR}.optim.lr_warmup_steps": 10})["train.warmup_steps"] == 20
    # 2 responses x (2,048 + 20,480) tokens, over 4 ranks that share a sequence
    micro = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{ACTOR}.ulysses_sequence_parallel_size": 4,
    }
    assert ours(micro)["train.micro_batch_tokens"] == 11264
    assert ours({"trainer.test_freq": -100})["validation.every"] == 0


def test_a_folder_for_rollouts_saves_all_of_them() -> None:
    saved = ours({"trainer.rollout_data_dir": "outputs/rollouts"})
    assert (saved["train.save_rollouts_every"], saved["train.num_saved_prompts"]) == (1, None)
    assert "train.save_rollouts_every" not in ours({"trainer.rollout_data_dir": None})


def test_adapters_have_verls_scale_and_modules() -> None:
    model = "actor_rollout_ref.model"
    adapters = ours({f"{model}.lora_rank": 64, f"{model}.lora_alpha": 16})
    assert (adapters["train.lora.rank"], adapters["train.lora.alpha"]) == (64, 16)
    assert "train.lora.targets" not in adapters  # all linear modules in both
    named = {f"{model}.lora_rank": 8, f"{model}.target_modules": ["q_proj", "v_proj"]}
    assert ours(named)["train.lora.targets"] == ["q_proj", "v_proj"]
    assert "train.lora.alpha" not in ours({f"{model}.lora_alpha": 64})  # without a rank
    (entry,) = account()(LARGE | named | {f"{model}.target_modules": ".*proj"}).blocking()
    assert "list the modules' names" in entry.note


def test_a_frozen_vision_tower_stays_frozen_where_verl_reads_the_key() -> None:
    frozen = {"actor_rollout_ref.actor.freeze_vision_tower": True}
    assert tree_of(account("0.7.0")(LARGE | frozen))["train"]["freeze"] == ["vision"]
    assert "train.freeze" not in ours(frozen)  # 0.9 trains the tower in spite of it


def test_epochs_become_steps_if_the_row_count_is_known() -> None:
    settings = {key: value for key, value in LARGE.items() if key != "trainer.total_training_steps"}
    settings["trainer.total_epochs"] = 10
    [entry] = account()(settings).blocking()
    assert entry.setting.key == "trainer.total_epochs"
    assert entry.fate == "unsupported"
    known = account(num_train_rows=17398)(settings)
    # 17,398 // 64 = 271 whole batches, 10 times
    assert tree_of(known)["train"]["total_steps"] == 2710
    assert not known.blocking()


def test_old_names_are_imported() -> None:
    old = {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 4096}
    entries = account("0.9.1")({"reward_model.reward_manager": "dapo"} | old).entries
    assert entries[2].name == "reward.reward_kwargs.overlong_buffer_cfg.len"
    assert entries[2].ours == {"reward.overlong.buffer_tokens": 4096}
    assert entries[2].note.startswith(
        "exists in 0.7.0, not in 0.9.1, which calls it reward.reward_kwargs.overlong_buffer_cfg.len"
    )


@pytest.mark.parametrize("name", ["custom_reward_function", "reward.custom_reward_function"])
def test_arguments_of_a_reward_function_are_taken_over_by_any_name(name: str) -> None:
    given = {f"{name}.path": "r.py", f"{name}.reward_kwargs": {"judge": {"url": "http://judge"}}}
    found = {key: value for key, value in ours(given).items() if key.startswith("custom_reward.")}
    url = {"custom_reward.arguments.judge.url": "http://judge"}
    assert found == {"custom_reward.path": "r.py", **url}


def test_misspelt_and_unsupported_settings_block() -> None:
    found = account()(
        LARGE
        | {
            "alogorithm.filter_groups.enable": True,
            "tainer.device": "npu",
            f"{ACTOR}.use_kl_loss": True,
            "algorithm.use_kl_in_reward": True,
        }
    )
    fates = {entry.setting.key: (entry.fate, entry.note) for entry in found.blocking()}
    assert fates["alogorithm.filter_groups.enable"] == (
        "misspelt",
        "did you mean algorithm.filter_groups.enable?",
    )
    assert fates["tainer.device"] == ("misspelt", "did you mean trainer.device?")
    both = ("unsupported", "algorithm.kl.place is either loss or reward; both are on")
    assert fates[f"{ACTOR}.use_kl_loss"] == fates["algorithm.use_kl_in_reward"] == both
    assert len(fates) == 4


@pytest.mark.parametrize(
    ("key", "value", "group"),
    [
        ("actor@actor_rollout_ref.actor", "megatron_actor", "actor"),
        ("hydra/launcher", "joblib", "hydra/launcher"),
        ("algorithm", "dapo", "algorithm"),
    ],
)
def test_selecting_a_hydra_config_file_is_reported(key: str, value: str, group: str) -> None:
    (entry,) = account()({key: value}).entries
    assert entry.fate == "unsupported"
    assert entry.note.startswith(
        f"selects a file from Hydra's group {group}, which is not available"
    )


def test_a_path_to_resume_from_must_be_set() -> None:
    (entry,) = account()(LARGE | {"trainer.resume_mode": "resume_path"}).blocking()
    assert "needs trainer.resume_from_path" in entry.note


def test_two_values_for_a_key_of_ours_are_reported() -> None:
    settings = {"data.max_response_length": 20480, f"{ROLLOUT}.response_length": 4096}
    entries = account()(LARGE | settings).entries
    found = [entry for entry in entries if entry.fate == "contradicting"]
    assert {entry.setting.key for entry in found} == settings.keys()
    assert "would be 4096, but data.max_response_length makes it 20480" in found[-1].note


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.ref.sync_ref_model",
        f"{ACTOR}.optim.lr_warmup_step",
        f"{ACTOR}.fsdp_config.parm_offload",
        "reward_model.overlong_bufer.len",
        f"{ACTOR}.policy_loss.mode",
    ],
)
def test_a_family_of_keys_does_not_hide_a_misspelt_one(key: str) -> None:
    assert [entry.fate for entry in account()({key: 1}).entries] == ["misspelt"]


def test_a_hub_id_is_told_from_a_folder() -> None:
    assert ours({"actor_rollout_ref.model.path": "Qwen/Qwen3-8B"})["model.id"] == "Qwen/Qwen3-8B"
    assert (
        ours({"actor_rollout_ref.model.path": "/models/Qwen3-8B"})["model.path"]
        == "/models/Qwen3-8B"
    )


def test_rejection_bounds_are_inverted() -> None:
    rejection = {
        "algorithm.rollout_correction.rollout_rs": "token_k1,seq_max_k2",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.5_4,0.1",
    }
    found = ours(rejection)
    assert found["algorithm.rollout_correction.mask"] == "token"
    # engine over policy 4 is policy over engine 1/4
    assert found["algorithm.rollout_correction.mask_low"] == 0.25
    assert found["algorithm.rollout_correction.mask_high"] == 2
    assert found["algorithm.rollout_correction.divergence"] == "max-k2"
    assert found["algorithm.rollout_correction.divergence_max"] == 0.1


def test_the_last_value_of_a_key_wins() -> None:
    first, last = (
        Setting("trainer.save_freq", 5, "run.sh:1"),
        Setting("trainer.save_freq", 20, "run.sh:9"),
    )
    found = account_of([first, last], "verl")
    assert [entry.fate for entry in found.entries] == ["meaningless", "taken"]
    assert tree_of(found)["checkpoint"]["save_every"] == 20


def test_a_section_is_split_into_keys() -> None:
    found = account_of(
        [Setting("algorithm.kl_ctrl", {"type": "fixed", "kl_coef": 0.1}, "+algorithm")], "verl"
    )
    assert [entry.setting.key for entry in found.entries] == [
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.kl_coef",
    ]


KEYS = [name for row in load("verl").rows for name in row.names() if "*" not in name]
VALUES = st.sampled_from([True, False, None, 0, 1, -1, 2, 0.5, "auto", "x", ["console"], {}])


@tried(deadline=None)
@given_any(
    st.lists(st.tuples(st.sampled_from([*KEYS, "x", "trainer.y", "a.b.c"]), VALUES), max_size=12)
)
def test_every_setting_is_accounted_for(settings: list[tuple[str, Any]]) -> None:
    given = [Setting(key, value, str(place)) for place, (key, value) in enumerate(settings)]
    found = account_of(given, "verl")
    assert [entry.setting for entry in found.entries] == given
    assert {entry.fate for entry in (*found.entries, *found.implied)} <= set(get_args(Fate))


def test_settings_that_verl_ignores_are_not_imported() -> None:
    correction = "algorithm.rollout_correction"
    bypass = {f"{correction}.rollout_is": "token", f"{correction}.bypass_mode": True}
    entries = account()(LARGE | bypass | {f"{correction}.rollout_is_threshold": 3.0}).entries
    fates = {entry.setting.key: entry.fate for entry in entries}
    assert (
        fates[f"{correction}.rollout_is"]
        == fates[f"{correction}.rollout_is_threshold"]
        == "ignored-by-trainer"
    )
    assert ours(bypass)["algorithm.old_log_probs"] == "engine"
    draws = {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.max_num_gen_batches": -1,
    }
    assert ours(draws)["sampler.max_num_gen_batches"] == 0
    no_steps = {f"{ACTOR}.optim.lr_warmup_steps": 0, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}
    for version, warmup in (("0.7.0", 0), ("0.9.1", 20)):  # a tenth of 100 steps of 2 updates
        taken = account(version)(LARGE | no_steps).entries
        assert {entry.ours.get("train.warmup_steps", warmup) for entry in taken} == {warmup}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_row_has_a_key_of_ours_or_a_fate_with_a_reason(trainer: str) -> None:
    file = Path(interop.__file__).parent / "keys" / f"{trainer.replace('-', '_')}.yaml"
    fields = {"key", "in", "addition", "old", "fate", "only", "ignored", "when", "ours", "values"}
    fields |= {"convert", "default", "change", "reason", "without", "unset"}
    for section in yaml.safe_load(file.read_text(encoding="utf-8"))["sections"]:
        for row in section["rows"]:
            assert row.keys() <= fields, row
    functions = vars(conversions if trainer == "verl" else conversions_mindspeed)
    for row in load(trainer).rows:
        assert row.fate in get_args(Fate)
        assert (row.fate == "taken") == bool(row.ours)
        assert row.ours or row.reason
        assert row.convert is None or callable(functions[row.convert])
        for switch in {row.when} if isinstance(row.when, str) else row.when or ():
            assert load(trainer).find(switch)
