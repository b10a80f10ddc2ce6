"""`dapo import-config`: the guides' scripts, what stops an import, and the written recipe."""

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dapo_core.errors import ConfigError
from flows.cli import app
from flows.config import load_config
from interop.account import account_of
from interop.read import read_files
from interop.shell.walk import read_script
from tests.guides import FOLDER, SCRIPTS, account_at, text_of

MAIN = "python3 -m verl.trainer.main_ppo"
GUIDE = Path(os.environ.get("DAPO_TEST_DATA", "missing")).parent / "guides"
STARTS = {
    "qwen3_32b": ("#!/usr/bin/env bash\nset -xeuo", "- MODEL_PATH:"),
    "qwen3_8b": ("set -x\nexport VLLM", "- BASE_MODEL:"),
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["import-config", *map(str, arguments)])


def refused(match: str, *arguments: object) -> None:
    with pytest.raises(ConfigError, match=match):
        CliRunner().invoke(app, ["import-config", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_accounts_of_the_guides_do_not_change(name: str) -> None:
    """`python -m tests.guides` writes the golden accounts."""
    account = account_at([FOLDER / f"{name}.sh"])
    assert text_of(account) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.skipif(not GUIDE.is_dir(), reason="the guides are not beside $DAPO_TEST_DATA")
@pytest.mark.parametrize("name", STARTS)
def test_the_guides_original_text_has_the_same_account(name: str, tmp_path: Path) -> None:
    start, end = STARTS[name]
    text = next(
        text for path in GUIDE.glob("*.txt") if start in (text := path.read_text(encoding="utf-8"))
    )
    begin = text.index(start)
    script = tmp_path / "guide.sh"
    script.write_text(text[begin : text.index(end, begin)], encoding="utf-8")
    ours, theirs = (account_at([path]) for path in (FOLDER / f"{name}.sh", script))
    assert sorted(map(str, (each.setting[:2] for each in ours.entries))) == sorted(
        map(str, (each.setting[:2] for each in theirs.entries))
    )
    plain = [
        re.sub(r"(guide|qwen3_\w+)\.sh:\d+", "", text_of(account)) for account in (ours, theirs)
    ]
    assert plain[0] == plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_32b", "qwen3_8b", "qwen3_8b_grpo", "vl_30b"])
def test_the_written_recipe_loads(name: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / f"{name}.yaml"
    result = invoke(FOLDER / f"{name}.sh", "--set-env", "num_train_rows=17917", "--output", output)
    assert result.exit_code == 0, result.output
    settings = load_config(output)
    # the 8B scripts sample with top_p=0.95
    assert settings.sampler.max_staleness == (0 if settings.rollout.top_p < 1 else 3)
    account = account_at([FOLDER / f"{name}.sh"])
    for entry in account.entries:
        for key, value in entry.ours.items():
            found = settings.model_dump(mode="json")
            for part in key.split("."):
                found = found[part]
            assert found == value or [found] == value or "~" in str(value), key
    is_cluster = name == "qwen3_32b"  # four nodes
    assert settings.train.ray_address == ("auto" if is_cluster else None)
    assert settings.serve.tensor_parallel == settings.rollout.tensor_parallel
    counts = re.search(r"(\d+) keys: (.*)", result.output)
    assert counts is not None
    assert int(counts[1]) == len(account.entries) == sum(map(int, re.findall(r"(\d+) ", counts[2])))
    text = output.read_text(encoding="utf-8")
    for entry in account.entries:  # each setting stands in the file, with its line
        assert f"{entry.setting.origin} {entry.setting.key}" in text or entry.ours, entry
    refused("exists; name another file", "x.sh", "--output", output)


@pytest.mark.slow
def test_a_megatron_script_becomes_a_recipe_of_our_own_core(tmp_path: Path) -> None:
    script, output = FOLDER / "qwen3_235b.sh", tmp_path / "235b.yaml"
    rollout = "actor_rollout_ref.rollout"  # verl refuses these two as well
    allow = f"--allow {rollout}.dp_model_parallel_size --allow {rollout}.rollout_world_size"
    assert f"to import without them: {allow}\n" in invoke(script, "--output", output).output
    assert not output.exists()
    result = invoke(script, *allow.split(), "--output", output)
    assert result.exit_code == 0, result.output
    train = load_config(output).train
    assert (train.num_ranks, train.sequence_parallel, train.expert_parallel) == (256, 8, 8)
    assert train.gradient_checkpointing


def test_what_stops_an_import_is_reported_with_a_fix(tmp_path: Path) -> None:
    script, output = tmp_path / "run.sh", tmp_path / "mine.yaml"
    script.write_text(
        f"{MAIN} alogorithm.filter_groups.enable=True data.train_batch_size=8 "
        "data.train_files=gsm8k \\\n"
        "  data.val_files=gsm8k actor_rollout_ref.actor.use_kl_loss=True "
        "algorithm.use_kl_in_reward=True \\\n"
        "  trainer.total_training_steps=3 actor_rollout_ref.actor.ppo_mini_batch_size=8 \\\n"
        "  actor_rollout_ref.rollout.n=4 \\\n"
        "  algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m "
        "actor_rollout_ref.rollout.name=vllm\n"
    )
    result = invoke(script, "--output", output, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert set(data["blocking"]) == {
        "alogorithm.filter_groups.enable",
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.use_kl_in_reward",
    }
    assert data["counts"]["keys"] == len(data["entries"]) == 12
    assert next(each for each in data["entries"] if each["fate"] == "misspelt")["note"].startswith(
        "did you mean"
    )
    assert not output.exists()
    allowed = [word for key in data["blocking"] for word in ("--allow", key)]
    assert invoke(script, "--output", output, *allowed).exit_code == 0
    assert (
        "run.sh:1 alogorithm.filter_groups.enable=True: misspelt; did you mean"
        in output.read_text()
    )


WHOLE = (
    f"{MAIN} algorithm.adv_estimator=grpo data.train_files=gsm8k data.val_files=gsm8k "
    "data.train_batch_size=8 \\\n"
    "  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.model.path=/m \\\n"
    "  `# --- Rollout (vLLM) ---` \\\n"
    "  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 hydra.run.dir=out"
)


def test_the_table_omits_defaults_equal_to_ours(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{WHOLE} trainer.total_training_steps=2\n")
    output = invoke(script).output
    assert "train.weight_decay = 0.01" in output  # ours differs
    assert "train.adam_beta1" not in output
    assert re.search(r"\n\d+ unset keys have the same default here; --json lists them", output)


def test_invalid_values_are_refused_with_their_origin(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"{WHOLE} trainer.total_training_steps=2 algorithm.filter_groups.enable=Ture\n"
    )
    refused(r"sampler.dynamic: run.sh:4 algorithm.filter_groups.enable=Ture", script)


@pytest.mark.parametrize(
    ("rows", "data"),
    [
        ("7", "make no training step"),
        ("0", "the number of rows in the training files, such as 17917"),
        ("many", "the number of rows in"),
    ],
)
def test_too_few_rows_are_refused(rows: str, data: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{WHOLE} trainer.total_epochs=2\n")
    result = invoke(script, "--set-env", f"num_train_rows={rows}")
    assert result.exit_code == 1
    assert data in result.output or data in str(result.exception)


def test_epochs_limit_the_steps(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{WHOLE} trainer.total_epochs=2 trainer.total_training_steps=50\n")
    steps = {}
    for rows in ("80", "800"):  # 8 prompts a step
        data = json.loads(invoke(script, "--json", "--set-env", f"num_train_rows={rows}").stdout)
        steps[rows] = data["recipe"]["train"]["total_steps"]
    assert steps == {"80": 20, "800": 50}
    script.write_text(f"{WHOLE} trainer.total_epochs=2\n")
    assert invoke(script, "--tiny").exit_code == 0


def test_sft_and_evaluation_commands_are_not_imported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    sft = (
        "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=/d trainer.nnodes=1 "
        "trainer.total_epochs=2\n"
    )
    script.write_text(sft)
    refused("no training found", script)
    script.write_text(
        f"{sft}{WHOLE} trainer.total_training_steps=2\npython -m verl.trainer.main_eval "
        "data.path=x\n"
    )
    assert invoke(script).exit_code == 0


def test_a_command_needs_the_file_that_it_names(tmp_path: Path) -> None:
    script, starts = FOLDER / "mindspeed_rl_32b.yaml", tmp_path / "run.sh"
    starts.write_text("python cli/train_dapo.py --config-name dapo_32b\n")
    refused(r"the command sets no training keys.*\n.*dapo_32b is not among the given files", starts)
    assert "--allow megatron_training.data_path" in invoke(script).output


def test_tiny_keeps_the_algorithm(tmp_path: Path) -> None:
    trees = []
    for tiny in ((), ("--tiny",)):
        output = tmp_path / f"{len(tiny)}.yaml"
        assert (
            invoke(
                FOLDER / "qwen3_8b.sh",
                "--set-env",
                "num_train_rows=1000",
                "--output",
                output,
                *tiny,
            ).exit_code
            == 0
        )
        trees.append(load_config(output))
    theirs, ours = trees
    assert ours.algorithm == theirs.algorithm
    assert (ours.sampler.dynamic, ours.sampler.metric) == (
        theirs.sampler.dynamic,
        theirs.sampler.metric,
    )
    assert (ours.train.learning_rate, ours.rollout.temperature) == (
        theirs.train.learning_rate,
        theirs.rollout.temperature,
    )
    assert (ours.train.device, ours.train.total_steps, ours.train.train_prompts) == ("cpu", 2, 2)
    assert ours.custom_reward.path is None  # the script's file does not exist here


def test_no_command_of_a_script_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = (
        f"touch {mark}\nX=$(touch {mark})\nif touch {mark}; then :; fi\n{MAIN} data.seed=1 "
        "trainer.nnodes=1"
    )
    text += f" | tee {mark}\n"
    script = tmp_path / "run.sh"
    script.write_text(text)
    read_files([script])
    read_script(text, "run.sh", {})
    assert not mark.exists()
    assert account_of(read_files([script]).settings, "verl").entries
