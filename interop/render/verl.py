"""Render verl's command line, environment and reward file for a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interop import ForeignConfigError
from interop.foreign_config import Setting, by_name
from interop.render.inverse import settings_for
from interop.render.launch import Launch, Places, override
from interop.table import Table, load

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
REWARD_FILE = "reward_for_verl.py"
DYNAMIC_SINCE = "0.9.0"  # main_ppo filters groups since this version
OLDER = "0.7.0"  # the one version of the table before it
DAPO_RECIPE = "recipe.dapo.main_dapo"  # in verl's repository, not in its wheels
DAPO_RECIPE_FOLDER = "recipe/dapo"
MIN_BUCKET_MEGABYTES = 2048

# verl's Megatron configuration: names that replace FSDP keys, and keys that it does not have.
_MEGATRON_NAMES = {
    f"{role}.{ours}": f"{role}.{foreign}"
    for role in (ACTOR, REF)
    for ours, foreign in {
        "fsdp_config.param_offload": "megatron.param_offload",
        "fsdp_config.optimizer_offload": "megatron.optimizer_offload",
        "ulysses_sequence_parallel_size": "megatron.context_parallel_size",
        "optim.override_optimizer_config.eps": "optim.override_optimizer_config.adam_eps",
    }.items()
}
_NOT_IN_MEGATRON = re.compile(
    r".*\.fsdp_config\..*|.*\.actor\.(grad_clip|entropy_checkpointing)"
    r"|.*\.optim\.(min_lr_ratio|num_cycles|lr_scheduler_type|warmup_style|"
    r"optimizer_impl|zero_indexed_step)"
    r"|.*\.model\.enable_(gradient_checkpointing|activation_offload)"
)
# Table settings that are rendered here instead; those that main_ppo ignores or interprets
# differently.
_REPLACED = ("reward_model.overlong_buffer.", "reward.reward_kwargs.", f"{ACTOR}.optim.eps")
_RECIPE_ONLY = ("data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches")
_FREE = re.compile(
    r"\.(reward_kwargs|overlong_buffer|override_\w+_config)\."
)  # sections that are in no wheel's configuration
_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_UNLIMITED_DRAWS = 1000  # per training step, when counting epochs without a limit
_RENDERED_ELSEWHERE = frozenset(
    {"train.ray_address", "train.device", "algorithm.compat"}
)  # env, reward file
# Environment variables in verl's scripts for Ascend NPUs.
_NPU_ENV = {"HCCL_CONNECT_TIMEOUT": "5400", "VLLM_ASCEND_ENABLE_NZ": "0", "TASK_QUEUE_ENABLE": "1"}


def render(tree: Mapping[str, Any], places: Places, version: str | None = None) -> Launch:
    """Render the start of verl for a resolved recipe; `tree` has every key, defaults included.

    Raises ForeignConfigError for an unknown version and for keys that the version does not support.
    """
    table = load("verl")
    version = table.newest if version is None else table.require_version(version)
    ours = by_name(tree)
    if ours["train.device"] == "cpu":
        raise ForeignConfigError(
            "train.device=cpu: verl trains on cuda and npu only; set train.device to one of them"
        )
    if ours["rollout.pipeline_parallel"] > 1:
        raise ForeignConfigError(
            f"rollout.pipeline_parallel={ours['rollout.pipeline_parallel']}: verl's engines have "
            "no pipeline "
            "stages; set rollout.pipeline_parallel=1 and raise rollout.tensor_parallel"
        )
    entry = _entry(ours, version)
    settings = [
        *_table_settings(tree, version, entry),
        *_environment_settings(ours, places),
        *_overlong(ours, version, entry),
    ]
    if ours["sampler.dynamic"] and entry != DAPO_RECIPE:
        settings.append(_metric(ours["sampler.metric"]))
    overrides = tuple(written(tree, table, version, settings))
    megatron = ("--config-name=ppo_megatron_trainer",) if _is_megatron(tree) else ()
    if entry == DAPO_RECIPE and megatron:
        megatron = ("--config-name=dapo_megatron_trainer",)
    covered = {
        name for setting in settings for name in setting.origin.split(", ")
    } | _RENDERED_ELSEWHERE
    if ours["sampler.max_num_gen_batches"] == 0:  # main_ppo never limits draws
        covered |= {"sampler.max_num_gen_batches"}
    return Launch(
        argv=("-m", entry, *megatron, *overrides),
        env=environment(tree),
        files=_files(tree),
        overrides=overrides,
        covered=frozenset(covered),
    )


def written(
    tree: Mapping[str, Any], table: Table, version: str, settings: Iterable[Setting]
) -> list[str]:
    """Return the settings as Hydra overrides, each key once, followed by external.overrides."""
    own = _section(tree, "external").get("overrides", ())
    overridden = {re.split(r"=", each.lstrip("+~"), maxsplit=1)[0] for each in own}
    values: dict[str, Any] = {}
    for key, value, _ in settings:
        values[_in_version(table, key, version)] = value
    if _is_megatron(tree):
        values = _for_megatron(tree, values)
    lines = [
        override(key, value, is_added=_is_added(table, key, version))
        for key, value in values.items()
        if key not in overridden
    ]
    return [*lines, *own]


def _environment_settings(ours: Mapping[str, Any], places: Places) -> list[Setting]:
    """Return settings for paths, nodes and the reward file, which the table cannot express."""
    custom = ours["custom_reward.path"]
    nodes, devices = nodes_of(ours)
    reward = "reward.custom_reward_function"
    scorer = Path(custom).absolute() if custom else places.folder / REWARD_FILE
    devices_said = "train.num_ranks, train.placement, rollout.num_workers, external.num_nodes"
    return [
        Setting("data.prompt_key", "prompt", "data.train"),
        Setting("data.train_files", str(places.train_rows), "data.train"),
        Setting("data.val_files", str(places.held_out_rows), "data.eval"),
        Setting(
            "actor_rollout_ref.model.path", str(places.model), "model.path, model.id, model.source"
        ),
        Setting("actor_rollout_ref.model.use_remove_padding", True, ""),
        Setting("trainer.default_local_dir", str(places.checkpoints), "store.path"),
        Setting("trainer.project_name", ours["train.tracker_project"], "train.tracker_project"),
        Setting(
            "trainer.experiment_name",
            ours["train.tracker_run"] or ours["run.name"],
            "train.tracker_run, run.name",
        ),
        Setting("trainer.n_gpus_per_node", devices // nodes, devices_said),
        Setting("trainer.nnodes", nodes, devices_said),
        Setting("trainer.total_epochs", _most_epochs(ours), "train.total_steps"),
        Setting(
            f"{reward}.path",
            str(scorer),
            "custom_reward.path, reward.scorers, reward.timeout_seconds",
        ),
        Setting(f"{reward}.name", ours["custom_reward.name"], "custom_reward.name"),
    ]


def nodes_of(ours: Mapping[str, Any]) -> tuple[int, int]:
    """Return (nodes, total devices); verl's ranks and engines share every device.

    Raises ForeignConfigError if the nodes do not divide the devices.
    """
    devices = ours["train.num_ranks"]
    if ours["train.placement"] == "separate":
        parts = ours["rollout.tensor_parallel"] * ours["rollout.pipeline_parallel"]
        devices += ours["rollout.num_workers"] * parts
    nodes = ours.get("external.num_nodes", 1)
    if devices % nodes:
        raise ForeignConfigError(
            f"external.num_nodes={nodes} does not divide the {devices} devices of train.num_ranks="
            f"{ours['train.num_ranks']} (placement {ours['train.placement']}); change either"
        )
    return nodes, devices


def _most_epochs(ours: Mapping[str, Any]) -> int:
    """Return an epoch count that training never reaches, since verl stops at total_epochs too."""
    most = ours["sampler.max_num_gen_batches"] or _UNLIMITED_DRAWS
    return int(ours["train.total_steps"] * (most if ours["sampler.dynamic"] else 1))


def _entry(ours: Mapping[str, Any], version: str) -> str:
    """Return the module to run.

    Since 0.9.0, main_ppo filters groups, without a limit on draws. Before, main_ppo ignores
    algorithm.filter_groups; only the DAPO recipe in verl's repository reads it.
    """
    if not ours["sampler.dynamic"] or version != OLDER:
        return "verl.trainer.main_ppo"
    source = ours.get("external.source")
    if source is None or not (Path(source) / DAPO_RECIPE_FOLDER).is_dir():
        raise ForeignConfigError(
            f"sampler.dynamic=true with verl {version}: main_ppo ignores algorithm.filter_groups "
            "before "
            f"{DYNAMIC_SINCE}; set external.source to a checkout of verl {version} that has "
            f"{DAPO_RECIPE_FOLDER} "
            f"(it is {source}), use verl {DYNAMIC_SINCE} or newer (external.version), or set "
            "sampler.dynamic=false"
        )
    return DAPO_RECIPE


def _table_settings(tree: Mapping[str, Any], version: str, entry: str) -> Iterator[Setting]:
    """Yield the table's settings, except for those rendered here."""
    replaced = _REPLACED if entry == DAPO_RECIPE else (*_REPLACED, *_RECIPE_ONLY)
    for setting in settings_for(tree, "verl", version):
        key, value, origin = setting
        if key.endswith(
            "update_weights_bucket_megabytes"
        ):  # verl's default; fits a large model's embedding
            yield Setting(key, max(value, MIN_BUCKET_MEGABYTES), origin)
        elif ".megatron." in key:  # rendered under Megatron's names below
            continue
        elif not key.startswith(replaced) and not (
            key.endswith(".rollout.dtype") and value == "auto"
        ):
            yield setting


def _metric(metric: str) -> Setting:
    """Return the group filter's metric as main_ppo reads it: `reward`, or a field of the score."""
    if metric == "seq_final_reward":
        raise ForeignConfigError(
            "sampler.metric=seq_final_reward: verl's main_ppo filters groups before adding KL to "
            "the reward; set "
            "sampler.metric=seq_reward, or acc"
        )
    name = "reward" if metric == "seq_reward" else metric
    return Setting("algorithm.filter_groups.metric", name, "sampler.metric")


def _overlong(ours: Mapping[str, Any], version: str, entry: str) -> list[Setting]:
    """Return the overlong penalty's settings under the names that the entry point reads."""
    if entry == DAPO_RECIPE and version == OLDER:
        prefix, limit = "reward_model.overlong_buffer", None
    else:
        kwargs = f"reward{'_model' * (version == OLDER)}.reward_kwargs"
        prefix, limit = f"{kwargs}.overlong_buffer_cfg", f"{kwargs}.max_resp_len"
    names = {"enable": "enabled", "len": "buffer_tokens", "penalty_factor": "penalty_factor"}
    settings = [
        Setting(f"{prefix}.{foreign}", ours[f"reward.overlong.{name}"], f"reward.overlong.{name}")
        for foreign, name in names.items()
    ]
    settings.append(Setting(f"{prefix}.log", False, ""))  # the manager requires it
    if limit is not None:
        settings.append(
            Setting(limit, ours["rollout.max_response_tokens"], "rollout.max_response_tokens")
        )
    return settings


def _in_version(table: Table, key: str, version: str) -> str:
    """Return the key's name in a version; the key itself if the table does not have it."""
    row = table.find(key, version) or table.find(key)
    names = [] if row is None or row.is_family else row.names(version)
    return key if not names or key in names else names[0]


def _is_added(table: Table, key: str, version: str) -> bool:
    """True if the default configuration does not have the key, as far as the table knows."""
    row = table.find(key, version)
    return row is None or version in row.additions or _FREE.search(key) is not None


def _is_megatron(tree: Mapping[str, Any]) -> bool:
    return _section(tree, "external").get("strategy") == "megatron"


def _for_megatron(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings to verl's Megatron configuration."""
    ours = by_name(tree)
    found: dict[str, Any] = {}
    for key, value in values.items():
        if (instead := _MEGATRON_NAMES.get(key)) is not None:
            found[instead] = value
        elif not _NOT_IN_MEGATRON.fullmatch(key):
            found[key] = value
    found |= {f"{role}.strategy": "megatron" for role in (ACTOR, REF)}
    if ours["train.gradient_checkpointing"]:
        transformer = f"{ACTOR}.megatron.override_transformer_config"
        found |= {f"{transformer}.{name}": value for name, value in _FULL_RECOMPUTE.items()}
    return found


def environment(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of verl's process, without external.env."""
    ours = by_name(tree)
    env = {"HYDRA_FULL_ERROR": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "true"}
    if ours["train.device"] == "npu":
        env |= _NPU_ENV
    if ours["train.ray_address"] is not None:
        env["RAY_ADDRESS"] = str(ours["train.ray_address"])
    return env


def _files(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the file through which verl calls our scorers; none if the user's own file scores."""
    ours = by_name(tree)
    if ours["custom_reward.path"] is not None:
        return {}
    scorers: Sequence[str] = list(ours["reward.scorers"])
    root = Path(__file__).resolve().parents[2]
    text = f'''"""Scores verl's responses with dapo-pipeline's scorers. Written by dapo."""

import sys

sys.path.append({str(root)!r})

from dapo_core.reward.for_verl import compute_score_for

{ours["custom_reward.name"]} = compute_score_for(
    entries={scorers!r},
    timeout_seconds={ours["reward.timeout_seconds"]!r},
    is_as_verl={ours["algorithm.compat"] == "verl"!r},
)
'''
    return {REWARD_FILE: text}


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = tree.get(name) or {}
    return section
