"""Complete an imported recipe for training with the trainer that it came from."""

from __future__ import annotations

from collections.abc import Mapping

from interop.account import Account
from interop.recipe import Recipe
from interop.render.launch import override
from interop.table import load


def add_backend(recipe: Recipe, account: Account, backend: str, env: Mapping[str, str]) -> None:
    """Add the settings that only their trainer understands, for training with it."""
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
