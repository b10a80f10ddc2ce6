"""Turn an account into a recipe: our keys with their origins as commented YAML, and a tiny variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from interop.account import Account, Entry
from interop.foreign_config import nested
from interop.render.launch import override
from interop.table import BLOCKING, NOT_SET, load

# A training that runs anywhere: our core on a CPU, a freshly built model, generated arithmetic.
TINY: dict[str, Any] = {
    "data.train": "arithmetic",
    "data.eval": "arithmetic",
    "data.max_prompt_tokens": 64,
    "data.arithmetic.num_train": 2000,
    "data.arithmetic.num_eval": 40,
    "data.arithmetic.max_level": 1,
    "model.source": "recipe",
    "model.recipe.hidden_size": 64,
    "model.recipe.num_steps": 60,
    "sampler.gen_prompts": 4,
    "sampler.on_exhausted": "skip_step",
    "rollout.engine": "hf",
    "rollout.threads_per_worker": 1,
    "rollout.max_response_tokens": 24,
    "train.num_ranks": 1,
    "train.total_steps": 2,
    "train.train_prompts": 2,
    "train.warmup_steps": 0,
    "train.micro_batch_tokens": 2048,
    "train.gradient_checkpointing": False,
    "validation.every": 0,
    "checkpoint.save_every": 1,
    "serve.dtype": "float32",
    "serve.max_model_len": 128,
    "serve.max_num_seqs": 16,
    "serve.memory_gigabytes": 0.5,
    "serve.eager": True,
    "evaluate.max_response_tokens": 24,
}
# Sizes, places and devices, replaced by TINY; everything else is the algorithm and is kept.
REPLACED_BY_TINY = (
    "data",
    "model",
    "serve",
    "evaluate",
    "store",
    "external",
    "validation",
    "checkpoint",
    "rollout",
    "train.num_ranks",
    "train.placement",
    "train.device",
    "train.device_model",
    "train.fsdp_size",
    *(
        "train.sequence_parallel",
        "train.offload_parameters",
        "train.offload_optimizer",
        "train.offload_activations",
    ),
    "train.ray_address",
    "train.trackers",
    "train.tracker_project",
    "train.backend",
    "train.warmup_steps",
    "train.reshard_after_forward",
    "train.compile",
    "train.mini_prompts",
)
KEPT_OF_ROLLOUT = ("rollout.temperature", "rollout.top_p", "rollout.top_k")


@dataclass
class Recipe:
    """Our keys by name, a comment for each, and the settings that have no key of ours."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left: list[Entry] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        """Return the keys as nested sections."""
        return nested(self.values)


def recipe_of(
    account: Account,
    defaults: Mapping[str, Any],
    backend: str = "own",
    env: Mapping[str, str] | None = None,
) -> Recipe:
    """Return the keys that an account sets; with another backend, also settings that only it
    understands.

    `defaults` holds our defaults by name; trainer defaults that equal them are left out.
    """
    recipe = Recipe()
    for entry in (*account.implied, *account.entries):
        is_implied = entry.setting.origin.startswith("default of ")
        for name, value in entry.ours.items():
            if entry.fate == "taken" and not (
                is_implied and name in defaults and defaults[name] == value
            ):
                recipe.values[name] = value
                recipe.comments[name] = _comment(entry)
        if not (is_implied or entry.fate == "taken"):
            recipe.left.append(entry)
    if backend != "own":
        _add_backend(recipe, account, backend, env or {})
    order = list(defaults)
    named = sorted(
        recipe.values, key=lambda name: order.index(name) if name in order else len(order)
    )
    recipe.values = {name: recipe.values[name] for name in named}
    return recipe


def _comment(entry: Entry) -> str:
    note = f"; {entry.note}" if entry.note else ""
    return f"{entry.setting.origin} {entry.setting.key}={_short(entry.setting.value)}{note}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _add_backend(recipe: Recipe, account: Account, backend: str, env: Mapping[str, str]) -> None:
    recipe.values["train.backend"] = backend
    recipe.comments["train.backend"] = "--backend"
    values = {entry.name: entry.setting.value for entry in account.entries}
    if "megatron" in (values.get("actor_rollout_ref.actor.strategy"), values.get("model_engine")):
        recipe.values["external.strategy"] = "megatron"
    if "trainer.nnodes" in values and int(values["trainer.nnodes"]) > 1:
        recipe.values["external.num_nodes"] = int(values["trainer.nnodes"])
    if env:
        recipe.values["external.env"] = dict(env)
    strategies = (
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.ref.strategy",
        "model_engine",
    )
    recipe.left = [
        entry
        for entry in recipe.left
        if not (entry.name in strategies and entry.setting.value == "megatron")
    ]
    table = load(account.trainer)
    taken = []
    for entry in recipe.left:
        row = table.find(entry.setting.key)
        is_of_trainer = entry.fate == "meaningless" and row is not None and not row.ours
        if (entry.fate == "unsupported" or is_of_trainer) and not entry.name.startswith("critic."):
            taken.append(entry)
    recipe.left = [entry for entry in recipe.left if entry not in taken]
    if taken:
        lines = {
            entry.setting.key: override(entry.setting.key, entry.setting.value, is_added=True)
            for entry in taken
        }
        recipe.values["external.overrides"] = list(lines.values())
        recipe.comments["external.overrides"] = f"{len(lines)} keys without an equivalent here"


def tiny_of(recipe: Recipe) -> Recipe:
    """Return the same algorithm for a CPU: two prompts, two steps, a freshly built model."""
    kept = {
        name: value
        for name, value in recipe.values.items()
        if name in KEPT_OF_ROLLOUT
        or not any(name == part or name.startswith(f"{part}.") for part in REPLACED_BY_TINY)
    }
    values = {**kept, **TINY}
    updates = max(
        int(recipe.values.get("train.train_prompts", 2))
        // int(recipe.values.get("train.mini_prompts", 1)),
        1,
    )
    values["train.mini_prompts"] = 1 if updates > 1 else 2
    values["rollout.group_size"] = min(max(int(recipe.values.get("rollout.group_size", 4)), 2), 4)
    if "reward.overlong.buffer_tokens" in values:
        values["reward.overlong.buffer_tokens"] = 8
    path = values.get("custom_reward.path")
    if path is not None and not Path(path).expanduser().is_file():
        values = {
            name: value for name, value in values.items() if not name.startswith("custom_reward.")
        }
    same = [
        name for name in values if name in recipe.values and values[name] == recipe.values[name]
    ]
    comments = {name: recipe.comments.get(name, "") for name in same}
    return Recipe(values, {**dict.fromkeys(values, "--tiny"), **comments}, recipe.left)


def written(recipe: Recipe, header: Sequence[str]) -> str:
    """Return the recipe as YAML with a comment per key, followed by the settings that have no key
    of ours.
    """
    lines = [f"# {line}" for line in header]
    lines += _section(recipe.tree, recipe.comments, "")
    if recipe.left:
        lines += ["# Not in this recipe:"]
        lines += [f"# {_comment_of_left(entry)}" for entry in recipe.left]
    return "\n".join(lines) + "\n"


def _comment_of_left(entry: Entry) -> str:
    setting = entry.setting
    return f"{setting.origin} {setting.key}={_short(setting.value)}: {entry.fate}; {entry.note}".replace(
        "\n", " "
    )


def _section(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        comment = f" # {comments[key]}".replace("\n", " ") if comments.get(key) else ""
        if isinstance(value, Mapping) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _section(value, comments, f"{key}.")
        elif isinstance(value, list) and len(value) > 1:
            yield f"{indent}{name}:{comment}"
            yield from (f"{indent}- {_scalar(item)}" for item in value)
        else:
            yield f"{indent}{name}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...").rstrip()


def changing(implied: Iterable[Entry], defaults: Mapping[str, Any]) -> list[Entry]:
    """Return the trainer's defaults that stop an import or differ from ours."""
    return [
        entry
        for entry in implied
        if entry.fate in BLOCKING
        or any(defaults.get(name, NOT_SET) != ours for name, ours in entry.ours.items())
    ]


def counts_of(account: Account) -> dict[str, int]:
    """Count the settings by fate; the counts add up to all settings."""
    return dict(Counter(entry.fate for entry in account.entries))


def blocking_first(entries: Iterable[Entry]) -> list[Entry]:
    """Sort the entries: blocking, taken, then the rest, each in file order."""
    order = (*BLOCKING, "taken", "ignored-by-trainer", "other-stage", "default", "meaningless")
    return sorted(entries, key=lambda entry: order.index(entry.fate))
