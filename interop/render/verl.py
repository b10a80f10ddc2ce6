"""verl's command line, environment and reward file for a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interop import ForeignConfigError
from interop.export import by_name, settings_for
from interop.render.launch import Launch, Places, override
from interop.table import Table, load
from interop.theirs import Setting

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
REWARD_FILE = "reward_for_verl.py"
DYNAMIC_SINCE = "0.9.0"  # the version from which main_ppo itself filters groups
DAPO_RECIPE = "recipe.dapo.main_dapo"  # of verl's checkout, in no wheel
DAPO_RECIPE_FOLDER = "recipe/dapo"
LEAST_BUCKET_MEGABYTES = 2048

# In verl's Megatron configuration: what stands for keys of FSDP2, and keys that are not there.
_OF_MEGATRON = {
    f"{role}.{ours}": f"{role}.{theirs}"
    for role in (ACTOR, REF)
    for ours, theirs in {
        "fsdp_config.param_offload": "megatron.param_offload",
        "fsdp_config.optimizer_offload": "megatron.optimizer_offload",
        "ulysses_sequence_parallel_size": "megatron.context_parallel_size",
        "optim.override_optimizer_config.eps": "optim.override_optimizer_config.adam_eps",
    }.items()
}
_NOT_OF_MEGATRON = re.compile(
    r".*\.fsdp_config\..*|.*\.actor\.(grad_clip|entropy_checkpointing)"
    r"|.*\.optim\.(min_lr_ratio|num_cycles|lr_scheduler_type|warmup_style|optimizer_impl|zero_indexed_step)"
    r"|.*\.model\.enable_(gradient_checkpointing|activation_offload)"
)
# Settings of the table that are said otherwise here; those that main_ppo reads nowhere, or as something else.
_REPLACED = ("reward_model.overlong_buffer.", "reward.reward_kwargs.", f"{ACTOR}.optim.eps")
_OF_RECIPE = ("data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches")
_FREE = re.compile(
    r"\.(reward_kwargs|overlong_buffer|override_\w+_config)\."
)  # sections that no wheel's configuration has
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DRAWS_UNBOUND = 1000  # of a training step, counted for epochs where nothing bounds them
_SAID_OTHERWISE = frozenset({"train.ray_address", "train.device", "algorithm.compat"})  # by env and reward file
# Environment variables of verl's scripts for Ascend NPUs.
_OF_NPU = {"HCCL_CONNECT_TIMEOUT": "5400", "VLLM_ASCEND_ENABLE_NZ": "0", "TASK_QUEUE_ENABLE": "1"}


def render(tree: Mapping[str, Any], places: Places, version: str | None = None) -> Launch:
    """The start of verl for a resolved recipe, every key and default of which `tree` has.

    Raises ForeignConfigError for a version without a table and for what the version cannot do.
    """
    table = load("verl")
    version = table.newest if version is None else table.require_version(version)
    ours = by_name(tree)
    if ours["train.device"] == "cpu":
        raise ForeignConfigError(
            "train.device=cpu: verl trains on cuda and npu alone; set train.device to one of them"
        )
    if ours["rollout.pipeline_parallel"] > 1:
        raise ForeignConfigError(
            f"rollout.pipeline_parallel={ours['rollout.pipeline_parallel']}: verl's engines have no pipeline "
            "stages; set rollout.pipeline_parallel=1 and raise rollout.tensor_parallel"
        )
    entry = _entry(ours, table, version)
    settings = [
        *_of_table(tree, version, entry),
        *_placed(ours, places),
        *_overlong(ours, table, version, entry),
    ]
    if ours["sampler.dynamic"] and entry != DAPO_RECIPE:
        settings.append(_metric(ours["sampler.metric"]))
    overrides = tuple(written(tree, table, version, settings))
    megatron = ("--config-name=ppo_megatron_trainer",) if _is_megatron(tree) else ()
    if entry == DAPO_RECIPE and megatron:
        megatron = ("--config-name=dapo_megatron_trainer",)
    said = {name for setting in settings for name in setting.origin.split(", ")} | _SAID_OTHERWISE
    if ours["sampler.max_num_gen_batches"] == 0:  # which main_ppo does anyway
        said |= {"sampler.max_num_gen_batches"}
    return Launch(
        argv=("-m", entry, *megatron, *overrides),
        env=environment(tree),
        files=_files(tree),
        overrides=overrides,
        said=frozenset(said),
    )


def written(tree: Mapping[str, Any], table: Table, version: str, settings: Iterable[Setting]) -> list[str]:
    """The settings as Hydra overrides, each key once, and external.overrides behind them."""
    own = _section(tree, "external").get("overrides", ())
    said = {re.split(r"=", each.lstrip("+~"), maxsplit=1)[0] for each in own}
    values: dict[str, Any] = {}
    for key, value, _ in settings:
        values[_in_version(table, key, version)] = value
    if _is_megatron(tree):
        values = _for_megatron(tree, values)
    lines = [
        override(key, value, is_added=_is_added(table, key, version))
        for key, value in values.items()
        if key not in said
    ]
    return [*lines, *own]


def _placed(ours: Mapping[str, Any], places: Places) -> list[Setting]:
    """Settings that no table can say: places, nodes and the reward file, by verl's newest names."""
    custom = ours["custom_reward.path"]
    nodes, devices = nodes_of(ours)
    reward = "reward.custom_reward_function"
    scorer = Path(custom).absolute() if custom else places.folder / REWARD_FILE
    devices_said = "train.num_ranks, train.placement, rollout.num_workers, external.num_nodes"
    return [
        Setting("data.prompt_key", "prompt", "data.train"),
        Setting("data.train_files", str(places.train_rows), "data.train"),
        Setting("data.val_files", str(places.held_out_rows), "data.eval"),
        Setting("actor_rollout_ref.model.path", str(places.model), "model.path, model.id, model.source"),
        Setting("actor_rollout_ref.model.use_remove_padding", True, ""),
        Setting("trainer.default_local_dir", str(places.checkpoints), "store.path"),
        Setting("trainer.project_name", ours["train.tracker_project"], "train.tracker_project"),
        Setting(
            "trainer.experiment_name", ours["train.tracker_run"] or ours["run.name"], "train.tracker_run, run.name"
        ),
        Setting("trainer.n_gpus_per_node", devices // nodes, devices_said),
        Setting("trainer.nnodes", nodes, devices_said),
        Setting("trainer.total_epochs", _most_epochs(ours), "train.total_steps"),
        Setting(f"{reward}.path", str(scorer), "custom_reward.path, reward.scorers, reward.timeout_seconds"),
        Setting(f"{reward}.name", ours["custom_reward.name"], "custom_reward.name"),
    ]


def nodes_of(ours: Mapping[str, Any]) -> tuple[int, int]:
    """(nodes, devices of all): verl's ranks and engines take turns on every device.

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
            f"{ours['train.num_ranks']} (placement {ours['train.placement']}); change one of the two"
        )
    return nodes, devices


def _most_epochs(ours: Mapping[str, Any]) -> int:
    """Epochs that the training cannot pass: verl ends at the first of total_training_steps and total_epochs."""
    most = ours["sampler.max_num_gen_batches"] or _DRAWS_UNBOUND
    return int(ours["train.total_steps"] * (most if ours["sampler.dynamic"] else 1))


def _entry(ours: Mapping[str, Any], table: Table, version: str) -> str:
    """The module to run.

    verl filters groups in main_ppo from 0.9.0 on, without a limit of draws. Before, main_ppo reads none of
    algorithm.filter_groups, and the DAPO recipe of verl's checkout does.
    """
    if not ours["sampler.dynamic"] or not _is_before(table, version, DYNAMIC_SINCE):
        return "verl.trainer.main_ppo"
    source = ours.get("external.source")
    if source is None or not (Path(source) / DAPO_RECIPE_FOLDER).is_dir():
        raise ForeignConfigError(
            f"sampler.dynamic=true with verl {version}: its main_ppo reads none of algorithm.filter_groups before "
            f"{DYNAMIC_SINCE}; set external.source to a checkout of verl {version} that has {DAPO_RECIPE_FOLDER} "
            f"(it is {source}), take verl {DYNAMIC_SINCE} or newer (external.version), or set "
            "sampler.dynamic=false"
        )
    return DAPO_RECIPE


def _of_table(tree: Mapping[str, Any], version: str, entry: str) -> Iterator[Setting]:
    """The settings of the table, but for those that are said otherwise here."""
    replaced = _REPLACED if entry == DAPO_RECIPE else (*_REPLACED, *_OF_RECIPE)
    for setting in settings_for(tree, "verl", version):
        key, value, origin = setting
        if key.endswith(
            "update_weights_bucket_megabytes"
        ):  # verl's default, and room for a large model's embedding
            yield Setting(key, max(value, LEAST_BUCKET_MEGABYTES), origin)
        elif ".megatron." in key:  # which Megatron's own names below say
            continue
        elif not key.startswith(replaced) and not (key.endswith(".rollout.dtype") and value == "auto"):
            yield setting


def _metric(metric: str) -> Setting:
    """What must differ within a group, as main_ppo reads it: `reward`, or a field of what scores."""
    if metric == "seq_final_reward":
        raise ForeignConfigError(
            "sampler.metric=seq_final_reward: verl's main_ppo filters groups before KL is in the reward; set "
            "sampler.metric=seq_reward, or acc"
        )
    name = "reward" if metric == "seq_reward" else metric
    return Setting("algorithm.filter_groups.metric", name, "sampler.metric")


def _overlong(ours: Mapping[str, Any], table: Table, version: str, entry: str) -> list[Setting]:
    """The penalty near the length limit, by the names that the entry point reads."""
    if entry == DAPO_RECIPE and _is_before(table, version, "0.8.0"):
        prefix, limit = "reward_model.overlong_buffer", None
    else:
        kwargs = f"reward{'_model' * _is_before(table, version, '0.8.0')}.reward_kwargs"
        prefix, limit = f"{kwargs}.overlong_buffer_cfg", f"{kwargs}.max_resp_len"
    names = {"enable": "enabled", "len": "buffer_tokens", "penalty_factor": "penalty_factor"}
    settings = [
        Setting(f"{prefix}.{theirs}", ours[f"reward.overlong.{name}"], f"reward.overlong.{name}")
        for theirs, name in names.items()
    ]
    settings.append(Setting(f"{prefix}.log", False, ""))  # which the manager reads without a default
    if limit is not None:
        settings.append(Setting(limit, ours["rollout.max_response_tokens"], "rollout.max_response_tokens"))
    return settings


def _is_before(table: Table, version: str, other: str) -> bool:
    return table.versions.index(version) < table.versions.index(other)


def _in_version(table: Table, key: str, version: str) -> str:
    """The key's name in a version; itself where the table has no row for it."""
    row = table.find(key, version) or table.find(key)
    names = [] if row is None or row.is_family else row.names(version)
    return key if not names or key in names else names[0]


def _is_added(table: Table, key: str, version: str) -> bool:
    """Whether the default configuration lacks the key, as far as the table says."""
    row = table.find(key, version)
    return row is None or version in row.additions or _FREE.search(key) is not None


def _is_megatron(tree: Mapping[str, Any]) -> bool:
    return _section(tree, "external").get("strategy") == "megatron"


def _for_megatron(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as verl's Megatron configuration has them."""
    ours = by_name(tree)
    found: dict[str, Any] = {}
    for key, value in values.items():
        if (instead := _OF_MEGATRON.get(key)) is not None:
            found[instead] = value
        elif not _NOT_OF_MEGATRON.fullmatch(key):
            found[key] = value
    found |= {f"{role}.strategy": "megatron" for role in (ACTOR, REF)}
    if ours["train.gradient_checkpointing"]:
        transformer = f"{ACTOR}.megatron.override_transformer_config"
        found |= {f"{transformer}.{name}": value for name, value in _RECOMPUTED.items()}
    return found


def environment(tree: Mapping[str, Any]) -> dict[str, str]:
    """What verl's process gets beside external.env."""
    ours = by_name(tree)
    env = {"HYDRA_FULL_ERROR": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "true"}
    if ours["train.device"] == "npu":
        env |= _OF_NPU
    if ours["train.ray_address"] is not None:
        env["RAY_ADDRESS"] = str(ours["train.ray_address"])
    return env


def _files(tree: Mapping[str, Any]) -> dict[str, str]:
    """The file by which verl calls our scorers; none where the user's own file scores."""
    ours = by_name(tree)
    if ours["custom_reward.path"] is not None:
        return {}
    scorers: Sequence[str] = list(ours["reward.scorers"])
    root = Path(__file__).resolve().parents[2]
    text = f'''"""Scores verl's responses with the scorers of dapo-pipeline. Written by dapo."""

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
