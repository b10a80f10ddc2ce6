"""What MindSpeed-RL or MindSpeed-MM is started with: its YAML, checked against its classes, and its command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from interop import ForeignConfigError
from interop.export import by_name, settings_for
from interop.mindspeed import PREPROCESS, key_list, wrong_values
from interop.render.launch import Launch, Places, override
from interop.table import Table, load
from interop.theirs import Setting, nested

CONFIG, ROWS, START = "mindspeed", "rows", "start_mindspeed.py"  # the first two are YAML files
_OF_FILES = ("preprocess.", "megatron_training.data_path")  # what _placed says
POLICY = "policy"  # the architecture's name in the configuration
CHECKPOINT_NUMBER = "latest_checkpointed_iteration.txt"  # Megatron's, beside its checkpoints
_LOAD = "actor_config.load"
_NEEDED = {  # with an example of each
    "mindspeed-rl": {_LOAD: "/weights/qwen2.5-32b-tp8"},
    "mindspeed-mm": {
        _LOAD: "/weights/qwen2.5-vl-7b-mm",
        "model": "examples/rl/model/qwen2.5vl_7b.json",
        "megatron_training.data_path": "/data/geo3k",
    },
}
_DENSE = ("qwen2", "qwen3")
_ENTRIES = {
    ("mindspeed-rl", "ray_dapo"): "cli/train_dapo.py",
    ("mindspeed-rl", "ray_grpo"): "cli/train_grpo.py",
    ("mindspeed-mm", "ray_dapo"): "posttrain_vlm_dapo.py",
    ("mindspeed-mm", "ray_grpo"): "posttrain_vlm_grpo.py",
}
# What MindSpeed's own configurations set for Megatron on NPUs.
_MEGATRON = {
    "use_mcore_models": True, "use_flash_attn": True, "no_masked_softmax_fusion": True,
    "attention_softmax_in_fp32": True, "no_gradient_accumulation_fusion": True, "use_distributed_optimizer": True,
    "tokenizer_type": "PretrainedFromHF", "distributed_backend": "nccl", "no_shared_storage": True,
}  # fmt: skip
_OF_TEXT = {
    "use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_fused_rotary_pos_emb": True,
    "variable_seq_lengths": True, "reset_position_ids": True, "dataset_additional_keys": ["labels"],
}  # fmt: skip
_OF_IMAGES = {"dataset_additional_keys": ["input_ids", "input_ids_length", "attention_mask", "position_ids"]}
_ENV = {
    "HYDRA_FULL_ERROR": "1", "PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "TASK_QUEUE_ENABLE": "2",
    "HCCL_IF_BASE_PORT": "24703",
}  # fmt: skip
_ENV_OF_IMAGES = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "CPU_AFFINITY_CONF": "2"}
_START = '''"""Prepares the rows in MindSpeed's form, unless these are there, and starts its training."""

import hashlib
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path({folder!r})
ROWS = pathlib.Path({rows!r})
content = b"".join(path.read_bytes() for path in (FOLDER / "{name}.yaml", ROWS) if path.is_file())
digest = hashlib.sha256(content).hexdigest()
done = FOLDER / "{name}.prepared"
if not done.exists() or done.read_text() != digest:
    subprocess.run([sys.executable, "cli/preprocess_data.py", "{name}", f"--config-path={{FOLDER}}"], check=True)
    done.write_text(digest)
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
'''


def render(
    tree: Mapping[str, Any], places: Places, version: str | None = None, trainer: str | None = None
) -> Launch:
    """The start of a trainer, by default train.backend's, in its checkout, for a resolved recipe.

    external.overrides (`section.key=value`) are part of its YAML. Raises ForeignConfigError for a version without
    a table, for what the trainer cannot do, and for names and values that its classes do not take.
    """
    trainer = trainer or str(tree["train"]["backend"])
    ours = by_name(tree)
    if ours["train.device"] != "npu":
        raise ForeignConfigError(
            f"train.device={ours['train.device']}: MindSpeed trains on npu alone; set it to npu"
        )
    settings = [each for each in settings_for(tree, trainer, version) if not each.key.startswith(_OF_FILES)]
    settings = [_typed(each) for each in (*settings, *_placed(ours, trainer, places))]
    said = {setting.key: setting.value for setting in settings}
    said |= dict(_own(ours, load(trainer)))
    missing = {key: example for key, example in _NEEDED[trainer].items() if key not in said}
    if missing and tree["train"]["backend"] == trainer:
        raise ForeignConfigError(
            f"{trainer} needs what no key of ours says, which its guide explains; add to external.overrides, with "
            f"places of yours: {', '.join(f'{key}={example}' for key, example in missing.items())}"
        )
    said |= {key: f"<{example}>" for key, example in missing.items()}  # for a person to fill in
    said |= _resumed(said, places, ours["checkpoint.resume"])
    content = nested(said)
    architecture = content["megatron_training"].setdefault("model", _architecture_name(said))
    content["actor_config"].setdefault("model", architecture)
    if architecture == POLICY:
        content["model"] = {POLICY: architecture_of(places.model)}
    elif trainer == "mindspeed-rl":
        content = {"defaults": [{"model": [architecture]}, "_self_"], **content}
    if wrong := [*wrong_values(content), *_impossible(said)]:
        raise ForeignConfigError(f"{trainer} does not take this configuration: {'; '.join(wrong)}")
    prepared = {**_preparation(places, content), **content.pop(PREPROCESS, {})}
    command = [_ENTRIES[trainer, said["megatron_training.stage"]], f"--config-path={places.folder}"]
    command += [f"--config-name={CONFIG}"]
    if "defaults" in content:
        command.append(_place_of_architectures(ours))
    files = {f"{CONFIG}.yaml": _text(content)}
    if content["megatron_training"]["data_path"] == str(places.folder / "data"):  # which it has to prepare
        files[f"{ROWS}.yaml"] = _text(prepared)
        files[START] = _START.format(folder=str(places.folder), rows=str(prepared["input"]), name=ROWS)
        command = [str(places.folder / START), *command]
    return Launch(
        argv=tuple(command),
        env=environment(tree, trainer),
        files=files,
        overrides=tuple(override(setting.key, setting.value) for setting in settings if setting.origin),
        said=frozenset(name for setting in settings for name in setting.origin.split(", "))
        | {"train.ray_address"},
    )


def _architecture_name(said: Mapping[str, Any]) -> str:
    """The name of MindSpeed-MM's JSON file of a model, else of the architecture that config.json becomes."""
    return Path(said["model"].strip("<>")).stem if "model" in said else POLICY


def _place_of_architectures(ours: Mapping[str, Any]) -> str:
    """Where Hydra finds configs/model/NAME.yaml, as an override."""
    source = ours.get("external.source")
    if source is None:
        raise ForeignConfigError(
            "external.source is not set: megatron_training.model names a file of its configs/model"
        )
    return f"hydra.searchpath=[file://{Path(source).absolute()}/configs]"


def environment(tree: Mapping[str, Any], trainer: str) -> dict[str, str]:
    """What the trainer's process gets beside external.env."""
    address = tree["train"]["ray_address"]
    ray = {} if address is None else {"RAY_ADDRESS": str(address)}
    return {**_ENV, **(_ENV_OF_IMAGES if trainer == "mindspeed-mm" else {}), **ray}


def _placed(ours: Mapping[str, Any], trainer: str, places: Places) -> Iterator[Setting]:
    """Settings that no table can say: places, layout and what every configuration of MindSpeed's has."""
    is_text = trainer == "mindspeed-rl"
    for name, value in {**_MEGATRON, **(_OF_TEXT if is_text else _OF_IMAGES)}.items():
        yield Setting(f"megatron_training.{name}", value, "")
    model = "model.path, model.id, model.source"
    yield Setting("megatron_training.tokenizer_name_or_path", str(places.model), model)
    if is_text:
        yield Setting("megatron_training.data_path", str(places.folder / "data"), "data.train")
    elif ours.get("external.train_rows") is not None:
        yield Setting("megatron_training.data_path", str(places.train_rows), "external.train_rows")
    elif isinstance(rows := ours["data.train"], str) and "/" in rows:
        yield Setting("megatron_training.data_path", rows, "data.train")
    yield Setting("actor_config.save", str(places.checkpoints), "store.path")
    for name in ("finetune", "no_load_optim", "no_load_rng"):
        yield Setting(f"actor_config.{name}", True, "")
    if ours["custom_reward.path"] is not None:
        raise ForeignConfigError(
            "custom_reward.path: MindSpeed scores with its own rl_config.verifier_function; unset it, or train "
            "with another train.backend"
        )


def _typed(setting: Setting) -> Setting:
    """The setting with a number of the type that MindSpeed's classes have, where that changes nothing."""
    kind, _ = key_list().get(setting.key, ("", None))
    value = setting.value
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return setting._replace(value=int(value))
    return setting._replace(value=float(value)) if kind == "float" and type(value) is int else setting


def _own(ours: Mapping[str, Any], table: Table) -> Iterator[tuple[str, Any]]:
    """external.overrides as keys, by their newest names, and values, which are YAML's."""
    for each in ours.get("external.overrides", ()):
        name, is_set, value = str(each).partition("=")
        if not is_set:
            raise ForeignConfigError(f"external.overrides: {each!r} is not SECTION.KEY=VALUE")
        key = name.lstrip("+").replace("-", "_")
        row = table.find(key)
        key = key if row is None or row.is_family else row.key
        read = yaml.safe_load(value)
        yield key, float(read) if isinstance(read, str) and _is_number(read) else read


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _resumed(said: Mapping[str, Any], places: Places, resume: str) -> dict[str, Any]:
    """What continues from a checkpoint of an attempt before, or from checkpoint.resume, as the guide has it."""
    named = None if resume in ("auto", "never") else resume
    newest = str(places.checkpoints) if (places.checkpoints / CHECKPOINT_NUMBER).is_file() else named
    if newest is None:
        return {}
    return {
        _LOAD: newest,
        **{f"actor_config.{name}": False for name in ("finetune", "no_load_optim", "no_load_rng")},
        "rl_config.integrated_mode_config": {"ref_model_load_path": said[_LOAD]},
    }


def architecture_of(model: Path) -> dict[str, Any]:
    """Megatron's keys of a model folder's config.json, {} where the folder is not there yet.

    Raises ForeignConfigError for an architecture other than dense Qwen2 and Qwen3.
    """
    file = model / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in _DENSE:
        raise ForeignConfigError(
            f"{file}: model_type {kind} is none of {', '.join(_DENSE)}; name a file of MindSpeed's configs/model "
            "in external.overrides, such as megatron_training.model=qwen3_30b_a3b"
        )
    rope = config.get("rope_parameters") or {}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "use_mcore_models": True,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "group_query_attention": groups < heads,
        "num_query_groups": groups,
        "rotary_base": int(config.get("rope_theta") or rope["rope_theta"]),
        "max_position_embeddings": config["max_position_embeddings"],
        "make_vocab_size_divisible_by": 1,
        "padded_vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "add_qkv_bias": kind == "qwen2",
        "disable_bias_linear": True,
        "qk_layernorm": kind == "qwen3",
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
    }


def _preparation(places: Places, content: Mapping[str, Any]) -> dict[str, Any]:
    """The file of configs/datasets for the rows of this project."""
    return {
        "input": str(places.train_rows),
        "tokenizer_name_or_path": content["megatron_training"]["tokenizer_name_or_path"],
        "output_prefix": str(places.folder / "data"),
        "handler_name": "Math17kAlpacaStyleInstructionHandler",
        "tokenizer_type": "HuggingFaceTokenizer",
        "workers": 8,
        "log_interval": 1000,
        "prompt_type": "empty",
        "dataset_additional_keys": ["labels"],
        "map_keys": {"prompt": "prompt", "query": "", "response": "reward_model", "system": ""},
    }


def _impossible(said: Mapping[str, Any]) -> Iterator[str]:
    """What MindSpeed's own validation refuses, of what is known before the start."""
    devices = said["rl_config.actor_resource.num_npus"]
    sizes = [
        said.get(f"actor_config.{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")
    ]
    layout = sizes[0] * sizes[1] * sizes[2]
    if devices % layout:
        yield f"rl_config.actor_resource.num_npus={devices} is no multiple of the {layout} of a copy of the model"
        return
    if said["generate_config.max_model_len"] < said["megatron_training.seq_length"]:
        yield "generate_config.max_model_len is below megatron_training.seq_length"
    if said["generate_config.infer_pipeline_parallel_size"] > 1:
        yield "rollout.pipeline_parallel is above 1, and its engines have no stages"
    groups = {"ranks": devices // layout, "engines": devices // said["generate_config.infer_tensor_parallel_size"]}
    batches: dict[str, tuple[str, ...]] = {"megatron_training.global_batch_size": ("ranks", "engines")}
    if said["rl_config.filter_groups_enable"]:
        batches["rl_config.filter_groups_train_batch_size"] = ("ranks",)
    for key, kinds in batches.items():
        for kind in kinds:
            if said[key] % groups[kind]:
                yield f"{key}={said[key]} is no multiple of its {groups[kind]} data-parallel {kind}"


def _text(content: Mapping[str, Any]) -> str:
    """The content as YAML; a place in <...> is to be filled in."""
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)
