"""Render MindSpeed's YAML, checked against its classes, and its command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from interop import ForeignConfigError
from interop.foreign_config import Setting, by_name, nested
from interop.mindspeed import PREPROCESS
from interop.render.inverse import settings_for
from interop.render.launch import Launch, Places, override
from interop.table import Table, load

CONFIG, ROWS, START = "mindspeed", "rows", "start_mindspeed.py"  # the first two are YAML files
_FILE_KEYS = ("preprocess.", "megatron_training.data_path")  # set by _environment_settings
POLICY = "policy"  # the name of the architecture in the configuration
CHECKPOINT_NUMBER = (
    "latest_checkpointed_iteration.txt"  # Megatron writes it next to its checkpoints
)
_LOAD = "actor_config.load"
_REQUIRED = {  # with an example value
    "mindspeed-rl": {_LOAD: "/weights/qwen2.5-32b-tp8"},
    "mindspeed-mm": {
        _LOAD: "/weights/qwen2.5-vl-7b-mm",
        "model": "examples/rl/model/qwen2.5vl_7b.json",
        "megatron_training.data_path": "/data/geo3k",
    },
}
_NAMES = (
    "defaults",
    "model",
    "megatron_training.model",
    "actor_config.model",
    "vit_config.model",
)  # of architectures
_DENSE = ("qwen2", "qwen3")
_ENTRIES = {
    ("mindspeed-rl", "ray_dapo"): "cli/train_dapo.py",
    ("mindspeed-rl", "ray_grpo"): "cli/train_grpo.py",
    ("mindspeed-mm", "ray_dapo"): "posttrain_vlm_dapo.py",
    ("mindspeed-mm", "ray_grpo"): "posttrain_vlm_grpo.py",
}
# Set in all of MindSpeed's own configurations for Megatron on NPUs.
_MEGATRON = {
    "use_mcore_models": True,
    "use_flash_attn": True,
    "no_masked_softmax_fusion": True,
    "attention_softmax_in_fp32": True,
    "no_gradient_accumulation_fusion": True,
    "use_distributed_optimizer": True,
    "tokenizer_type": "PretrainedFromHF",
    "distributed_backend": "nccl",
    "no_shared_storage": True,
}
_MEGATRON_TEXT = {
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "use_fused_rotary_pos_emb": True,
    "variable_seq_lengths": True,
    "reset_position_ids": True,
    "dataset_additional_keys": ["labels"],
}
_MEGATRON_IMAGES = {
    "dataset_additional_keys": ["input_ids", "input_ids_length", "attention_mask", "position_ids"]
}
_ENV = {
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_DEDUP_LOGS": "0",
    "TASK_QUEUE_ENABLE": "2",
    "HCCL_IF_BASE_PORT": "24703",
}
_ENV_IMAGES = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "CPU_AFFINITY_CONF": "2"}
_START = '''"""Prepare the rows in MindSpeed's format if they are not, then start its training."""

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
    prepare = [sys.executable, "cli/preprocess_data.py", "{name}", f"--config-path={{FOLDER}}"]
    subprocess.run(prepare, check=True)
    done.write_text(digest)
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
'''


def render(tree: Mapping[str, Any], places: Places, version: str | None = None) -> Launch:
    """Render the start of train.backend in its checkout for a resolved recipe.

    external.overrides (`section.key=value`) become part of its YAML. Raises ForeignConfigError for
    an unknown version, for unsupported keys, and for names and values that its classes reject.
    """
    trainer = str(tree["train"]["backend"])
    ours = by_name(tree)
    if ours["train.device"] != "npu":
        raise ForeignConfigError(
            f"train.device={ours['train.device']}: MindSpeed trains on npu only; set it to npu"
        )
    settings = [
        each for each in settings_for(tree, trainer, version) if not each.key.startswith(_FILE_KEYS)
    ]
    settings = [_typed(each) for each in (*settings, *_environment_settings(ours, trainer, places))]
    values = {setting.key: setting.value for setting in settings}
    values |= dict(_overrides(ours, load("mindspeed-rl")))
    _require(trainer, values)
    values |= _resumed(values, places, ours["checkpoint.resume"])
    content = nested(values)
    architecture = content["megatron_training"].setdefault("model", _architecture_name(values))
    content["actor_config"].setdefault("model", architecture)
    if architecture == POLICY:
        content["model"] = {POLICY: architecture_of(places.model)}
    elif trainer == "mindspeed-rl":
        content = {"defaults": [{"model": [architecture]}, "_self_"], **content}
    if wrong := [*wrong_values(content), *_impossible(values)]:
        raise ForeignConfigError(f"{trainer} rejects this configuration: {'; '.join(wrong)}")
    prepared = {**_preparation(places, content), **content.pop(PREPROCESS, {})}
    command = [
        _ENTRIES[trainer, values["megatron_training.stage"]],
        f"--config-path={places.folder}",
    ]
    command += [f"--config-name={CONFIG}"]
    if "defaults" in content:
        command.append(_searchpath(ours))
    files = {f"{CONFIG}.yaml": _text(content)}
    if content["megatron_training"]["data_path"] == str(
        places.folder / "data"
    ):  # it prepares these rows first
        files[f"{ROWS}.yaml"] = _text(prepared)
        files[START] = _START.format(
            folder=str(places.folder), rows=str(prepared["input"]), name=ROWS
        )
        command = [str(places.folder / START), *command]
    return Launch(
        argv=tuple(command),
        env=environment(tree, trainer),
        files=files,
        overrides=tuple(
            override(setting.key, setting.value) for setting in settings if setting.origin
        ),
        covered=frozenset(name for setting in settings for name in setting.origin.split(", "))
        | {"train.ray_address"},
    )


def _require(trainer: str, values: Mapping[str, Any]) -> None:
    """Raise ForeignConfigError for settings that have no key here and are not set."""
    missing = [
        f"{key}={example}" for key, example in _REQUIRED[trainer].items() if key not in values
    ]
    if missing:
        raise ForeignConfigError(
            f"{trainer} needs settings that have no key here (see its guide). Add to "
            f"external.overrides, with your own paths: {', '.join(missing)}"
        )


def _architecture_name(values: Mapping[str, Any]) -> str:
    """Return the name of MindSpeed-MM's JSON file for the model, else POLICY."""
    return Path(values["model"]).stem if "model" in values else POLICY


def _searchpath(ours: Mapping[str, Any]) -> str:
    """Return the override that lets Hydra find configs/model/NAME.yaml."""
    source = ours.get("external.source")
    if source is None:
        raise ForeignConfigError(
            "external.source is not set, but megatron_training.model names a file in its "
            "configs/model"
        )
    return f"hydra.searchpath=[file://{Path(source).absolute()}/configs]"


def environment(tree: Mapping[str, Any], trainer: str) -> dict[str, str]:
    """Return the environment of the trainer's process, without external.env."""
    address = tree["train"]["ray_address"]
    ray = {} if address is None else {"RAY_ADDRESS": str(address)}
    return {**_ENV, **(_ENV_IMAGES if trainer == "mindspeed-mm" else {}), **ray}


def _environment_settings(
    ours: Mapping[str, Any], trainer: str, places: Places
) -> Iterator[Setting]:
    """Yield settings that depend on paths or never change, which the table cannot express."""
    is_text = trainer == "mindspeed-rl"
    for name, value in {**_MEGATRON, **(_MEGATRON_TEXT if is_text else _MEGATRON_IMAGES)}.items():
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
            "custom_reward.path: MindSpeed scores with its own rl_config.verifier_function; unset "
            "it, or train "
            "with another train.backend"
        )


def _typed(setting: Setting) -> Setting:
    """Convert a number to the type that MindSpeed's classes declare, if its value stays."""
    kind, _ = key_list().get(setting.key, ("", None))
    value = setting.value
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return setting._replace(value=int(value))
    return (
        setting._replace(value=float(value)) if kind == "float" and type(value) is int else setting
    )


def _overrides(ours: Mapping[str, Any], table: Table) -> Iterator[tuple[str, Any]]:
    """Yield external.overrides as keys, by their newest names, and YAML values."""
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


def _resumed(values: Mapping[str, Any], places: Places, resume: str) -> dict[str, Any]:
    """Return the settings that resume from an earlier attempt's checkpoint or from
    checkpoint.resume.
    """
    named = None if resume in ("auto", "never") else resume
    newest = (
        str(places.checkpoints) if (places.checkpoints / CHECKPOINT_NUMBER).is_file() else named
    )
    if newest is None:
        return {}
    return {
        _LOAD: newest,
        **{f"actor_config.{name}": False for name in ("finetune", "no_load_optim", "no_load_rng")},
        "rl_config.integrated_mode_config": {"ref_model_load_path": values[_LOAD]},
    }


def architecture_of(model: Path) -> dict[str, Any]:
    """Return Megatron's architecture keys for a model folder's config.json, {} if it does not exist
    yet.

    Raises ForeignConfigError for an architecture other than dense Qwen2 and Qwen3.
    """
    file = model / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in _DENSE:
        raise ForeignConfigError(
            f"{file}: model_type {kind} is not one of {', '.join(_DENSE)}; set one of MindSpeed's "
            "configs/model "
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
    """Return the configs/datasets file for this project's rows."""
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


def _impossible(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what MindSpeed's own validation would reject after the start."""
    devices = values["rl_config.actor_resource.num_npus"]
    sizes = [
        values.get(f"actor_config.{kind}_parallel_size", 1)
        for kind in ("tensor_model", "pipeline_model", "context")
    ]
    layout = sizes[0] * sizes[1] * sizes[2]
    if devices % layout:
        per_replica = f"the {layout} devices per replica"
        yield f"rl_config.actor_resource.num_npus={devices} is not a multiple of {per_replica}"
        return
    if values["generate_config.max_model_len"] < values["megatron_training.seq_length"]:
        yield "generate_config.max_model_len is below megatron_training.seq_length"
    if values["generate_config.infer_pipeline_parallel_size"] > 1:
        yield "rollout.pipeline_parallel is above 1, but its engines have no pipeline stages"
    groups = {
        "ranks": devices // layout,
        "engines": devices // values["generate_config.infer_tensor_parallel_size"],
    }
    batches: dict[str, tuple[str, ...]] = {
        "megatron_training.global_batch_size": ("ranks", "engines")
    }
    if values["rl_config.filter_groups_enable"]:
        batches["rl_config.filter_groups_train_batch_size"] = ("ranks",)
    for key, kinds in batches.items():
        for kind in kinds:
            if values[key] % groups[kind]:
                number = f"{groups[kind]} data-parallel {kind}"
                yield f"{key}={values[key]} is not a multiple of its {number}"


def _text(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)


@cache
def key_list() -> dict[str, tuple[str, Any]]:
    """Return {section.key: (type, default)} of MindSpeed's classes; Megatron's keys appear in every
    section.
    """
    text = (Path(__file__).parent / "mindspeed_classes.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    keys: dict[str, tuple[str, Any]] = {}
    for entry in yaml.load(text, Loader=loader)["classes"]:
        places = (
            ("megatron_training", "actor_config", "vit_config")
            if entry["section"] == "megatron"
            else (entry["section"],)
        )
        keys |= {
            f"{place}.{name}": (field[0], field[1])
            for place in places
            for name, field in entry["keys"].items()
        }
    return keys


def wrong_values(tree: Mapping[str, Any]) -> list[str]:
    """List what MindSpeed's classes reject in a configuration: unknown names, wrong types."""
    wrong = []
    for key, value in _leaves(tree):
        known = key_list().get(key)
        if key in _NAMES or key.startswith("model."):
            continue
        if known is None:
            wrong.append(f"MindSpeed's classes have no key {key}")
        elif value is not None and type(value) not in _TYPES[known[0]]:
            wrong.append(f"{key}={value!r} is not of type {known[0]}")
    return wrong


_TYPES = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_leaf = key_list().get(key, ("", None))[0] == "dict" or not isinstance(value, Mapping)
        if is_leaf:
            yield key, value
        else:
            yield from _leaves(value, f"{key}.")
