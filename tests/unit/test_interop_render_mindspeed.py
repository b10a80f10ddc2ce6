"""Rendering MindSpeed's configuration, checked against its classes and imported again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from flows.cli import app
from flows.config import load_config
from interop import ForeignConfigError
from interop.account import account_of
from interop.foreign_config import by_name
from interop.mindspeed import read_yaml
from interop.render.launch import Launch, Places
from interop.render.mindspeed import CONFIG, ROWS, START, architecture_of, render, wrong_values
from tasks.external.launch import planned_start
from tasks.preflight.memory import plan_of
from tests.tiny_models import build_tiny_qwen3
from tests.unit.test_interop_render import places

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GUIDES = CONFIGS.parent / "tests" / "data" / "guides"
LOAD = "actor_config.load=/weights/tp8"
MM = (LOAD, "model=examples/rl/model/qwen2.5vl_7b.json", "megatron_training.data_path=/data/geo3k")
NPU = ("train.device=npu", "train.device_model=Atlas 800T A3")


def launched(
    *sets: str,
    recipe: str = "dapo_qwen3_32b_math",
    own: tuple[str, ...] = (LOAD,),
    trainer: str = "mindspeed-rl",
    version: str | None = None,
    at: Places | None = None,
) -> Launch:
    backend = [f"train.backend={trainer}", f"external.overrides={json.dumps(own)}"]
    tree = load_config(CONFIGS / f"{recipe}.yaml", [*NPU, *sets, *backend]).model_dump(mode="json")
    return render(tree, at or places(), version)


def content(launch: Launch) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(launch.files[f"{CONFIG}.yaml"])
    return read


def test_a_recipe_is_rendered_in_mindspeeds_keys_and_units() -> None:
    launch = launched()
    rendered = content(launch)
    assert launch.argv == (
        f"/places/{START}",
        "cli/train_dapo.py",
        "--config-path=/places",
        f"--config-name={CONFIG}",
    )
    assert launch.env["RAY_ADDRESS"] == "auto"
    assert rendered["megatron_training"]["global_batch_size"] == 192  # prompts per draw
    assert rendered["rl_config"]["filter_groups_train_batch_size"] == 64
    assert (
        rendered["rl_config"]["mini_batch_size"] == 32
    )  # prompts; MindSpeed converts them to responses
    assert (
        rendered["rl_config"]["update_max_packing_token_size"] == 22_528
    )  # 2,816 on each of the 8 ranks of a sequence
    assert rendered["rl_config"]["actor_resource"] == {"num_npus": 64}
    assert rendered["actor_config"]["lr_warmup_fraction"] == pytest.approx(
        0.05
    )  # 20 / 2 of 200 training steps
    assert rendered["actor_config"]["load"] == "/weights/tp8"
    assert rendered["generate_config"]["max_model_len"] == 22_528
    rows = yaml.safe_load(launch.files[f"{ROWS}.yaml"])
    assert (rows["input"], rows["output_prefix"]) == ("/places/train.parquet", "/places/data")
    compile(launch.files[START], START, "exec")


def test_the_architecture_comes_from_the_model(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model")
    rendered = content(launched(at=places(tmp_path)))
    config = json.loads((model / "config.json").read_text())
    shape = rendered["model"]["policy"]
    assert (shape["num_layers"], shape["qk_layernorm"]) == (config["num_hidden_layers"], True)
    assert shape["num_query_groups"] == config["num_key_value_heads"]
    assert wrong_values({"megatron_training": shape}) == []
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    with pytest.raises(ForeignConfigError, match="model_type qwen3_moe is not one of"):
        architecture_of(model)
    own = (LOAD, "megatron_training.model=qwen3_30b_a3b")
    named = launched("external.source=/checkout", own=own, at=places(tmp_path))
    assert content(named)["defaults"] == [{"model": ["qwen3_30b_a3b"]}, "_self_"]
    assert named.argv[-1] == "hydra.searchpath=[file:///checkout/configs]"
    with pytest.raises(ForeignConfigError, match=r"external\.source is not set"):
        launched(own=own, at=places(tmp_path))


def test_grpo_has_a_reference() -> None:
    launch = launched(recipe="grpo_qwen3_8b_math")
    assert "cli/train_grpo.py" in launch.argv
    rendered = content(launch)
    assert rendered["megatron_training"]["stage"] == "ray_grpo"
    assert (
        rendered["rl_config"]["init_kl_coef"],
        rendered["rl_config"]["filter_groups_enable"],
    ) == (0.001, False)


def test_images_are_trained_without_packing() -> None:
    launch = launched(own=MM, trainer="mindspeed-mm")
    rendered = content(launch)
    assert launch.argv[0] == "posttrain_vlm_dapo.py"
    assert (rendered["model"], rendered["megatron_training"]["model"]) == (
        MM[1].partition("=")[2],
        "qwen2.5vl_7b",
    )
    assert (
        rendered["rl_config"]["is_multimodal"],
        rendered["rl_config"]["use_remove_padding"],
    ) == (True, False)
    assert launch.files.keys() == {f"{CONFIG}.yaml"}


def test_an_attempt_resumes_from_the_previous_checkpoint(tmp_path: Path) -> None:
    at = places(tmp_path)
    at.checkpoints.mkdir()
    (at.checkpoints / "latest_checkpointed_iteration.txt").write_text("50")
    rendered = content(launched(at=at))
    assert rendered["actor_config"]["load"] == str(at.checkpoints)
    assert [
        rendered["actor_config"][name] for name in ("finetune", "no_load_optim", "no_load_rng")
    ] == [False] * 3
    assert rendered["rl_config"]["integrated_mode_config"] == {
        "ref_model_load_path": "/weights/tp8"
    }


@pytest.mark.parametrize(
    ("sets", "own", "message"),
    [
        ((), (), r"Add to external\.overrides, with your own paths: actor_config\.load=/weights"),
        (
            (),
            (LOAD, "rl_config.n_sample=8"),
            r"MindSpeed's classes have no key rl_config\.n_sample",
        ),
        ((), (LOAD, "rl_config.blocking=1"), r"rl_config\.blocking=1 is not of type bool"),
        (
            (),
            (LOAD, "actor_config.tensor_model_parallel_size=3"),
            r"64 is not a multiple of the 24 devices",
        ),
        ((), (LOAD, "nonsense"), "'nonsense' is not SECTION"),
        (
            ("reward.timeout_seconds=0.5",),
            (LOAD,),
            r"rl_config\.verifier_timeout=0\.5 is not of type int",
        ),
        (
            ("train.train_prompts=32", "sampler.gen_prompts=36"),
            (LOAD,),
            "of its 16 data-parallel engines",
        ),
        (
            ("custom_reward.path=configs/rewards/finance_choice.py",),
            (LOAD,),
            r"custom_reward\.path",
        ),
        (("train.device=cuda",), (LOAD,), r"train\.device=cuda"),
    ],
)
def test_what_mindspeed_rejects_is_refused(
    sets: tuple[str, ...], own: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ForeignConfigError, match=message):
        launched(*sets, own=own)


@pytest.mark.parametrize(
    "recipe",
    ["dapo_qwen3_32b_math", "grpo_qwen3_8b_math", "dapo_qwen2_5_32b_math", "dapo_qwen3_8b_math"],
)
def test_a_recipe_survives_mindspeeds_keys(recipe: str) -> None:
    sets = (
        "train.schedule=cosine",
        "train.min_learning_rate_ratio=0.1",
        "sampler.max_num_gen_batches=0",
        "train.passes=2",
    )
    launch = launched(*sets, "train.placement=colocated", recipe=recipe)
    tree = load_config(
        CONFIGS / f"{recipe}.yaml", [*NPU, *sets, "train.placement=colocated"]
    ).model_dump(mode="json")
    settings = read_yaml(launch.files[f"{CONFIG}.yaml"], "x.yaml")
    accounted = account_of(settings, "mindspeed-rl")
    blocking = {entry.setting.key for entry in accounted.blocking()}
    assert blocking == {"megatron_training.data_path"}
    ours, back = by_name(tree), by_name(accounted.tree())
    both = {name for name in back if name in launch.covered and not isinstance(back[name], dict)}
    assert len(both) > 35
    odd = {name for name in both if back[name] != pytest.approx(ours[name])} - {
        "data.train",
        "model.path",
    }
    assert odd == set()


def test_the_train_stage_starts_mindspeed(tmp_path: Path) -> None:
    sets = [
        *NPU,
        "train.backend=mindspeed-rl",
        f"external.overrides=['{LOAD}']",
        f"external.source={tmp_path}",
    ]
    start = planned_start(load_config(CONFIGS / "dapo_qwen3_32b_math.yaml", sets))
    assert start.argv[2] == "cli/train_dapo.py"
    assert {path.name for path in start.files} == {f"{CONFIG}.yaml", f"{ROWS}.yaml", START}


@pytest.mark.parametrize(
    ("recipe", "guide"),
    [
        ("mindspeed_rl_qwen2_5_32b_math", "mindspeed_rl_32b.yaml"),
        ("mindspeed_mm_qwen2_5_vl_7b_geo3k", "mindspeed_mm_qwen25vl_7b.yaml"),
    ],
)
def test_our_mindspeed_recipes_match_the_guides(recipe: str, guide: str) -> None:
    start = planned_start(load_config(CONFIGS / f"{recipe}.yaml"))
    [text] = [text for path, text in start.files.items() if path.name == f"{CONFIG}.yaml"]
    ours = {key: value for key, value, _ in read_yaml(text, "ours.yaml")}
    theirs = {key: value for key, value, _ in read_yaml((GUIDES / guide).read_text(), guide)}
    assert len(theirs.keys() & ours.keys()) >= 15
    differing = {key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]}
    # Different spelling, paths, resuming (the guides' excerpts do), and keys that are not in the
    # guides.
    of_place, of_resume = (
        {"load", "save", "data_path"},
        {"finetune", "no_load_optim", "no_load_rng"},
    )
    others = {
        "filter_groups_metric",
        "tokenizer_name_or_path",
        "no_shuffle",
        "lr_warmup_fraction",
        "seed",
        "model",
    }
    odd = {key.rpartition(".")[2] for key in differing} - of_place - of_resume - others
    assert odd <= {"use_tensorboard", "trust_remote_code"}


@pytest.mark.slow
def test_an_imported_configuration_starts_unchanged(tmp_path: Path) -> None:
    files = [GUIDES / name for name in ("mindspeed_rl_32b.yaml", "mindspeed_rl_math_17k.yaml")]
    words = ["import-config", *map(str, files), "--backend", "mindspeed-rl"]
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "mine.yaml")])
    assert (done.exit_code, done.exception) == (0, None)
    start = planned_start(load_config(tmp_path / "mine.yaml", ["external.source=/checkout"]))
    [text] = [text for path, text in start.files.items() if path.name == f"{CONFIG}.yaml"]
    ours = {key: value for key, value, _ in read_yaml(text, "ours.yaml")}
    odd = ("defaults", "data_path", "tokenizer_name_or_path", ".save", "filter_groups_metric")
    theirs = {
        key: value for file in files for key, value, _ in read_yaml(file.read_text(), file.name)
    }
    differing = {key for key in theirs.keys() & ours.keys() if ours[key] != theirs[key]}
    assert not {key for key in differing if not key.endswith(odd)}
    assert len(theirs.keys() & ours.keys()) > 30


def test_the_memory_plan_uses_parallel_sizes() -> None:
    config = load_config(CONFIGS / "mindspeed_rl_qwen2_5_32b_math.yaml")
    own = [each for each in config.external.overrides if "tensor_model" not in each]
    [whole] = plan_of(
        load_config(
            CONFIGS / "mindspeed_rl_qwen2_5_32b_math.yaml",
            [f"external.overrides={json.dumps(own)}"],
        )
    ).loads
    [split] = plan_of(config).loads
    assert split.peak_bytes < whole.peak_bytes / 2
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=3 does not divide"):
        plan_of(
            config.model_copy(
                update={
                    "external": config.external.model_copy(
                        update={"overrides": (*own, "actor_config.tensor_model_parallel_size=3")}
                    )
                }
            )
        )
