"""The start of any trainer that a recipe can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interop.render import mindspeed, verl


def render(trainer: str, tree: Mapping[str, Any], places: verl.Places, version: str | None = None) -> verl.Launch:
    """How a trainer is started for a resolved recipe. Raises ForeignConfigError for what it cannot do."""
    if trainer == "verl":
        return verl.render(tree, places, version)
    return mindspeed.render(tree, places, version, trainer)


def environment(trainer: str, tree: Mapping[str, Any]) -> dict[str, str]:
    """What a trainer's process gets beside external.env, for a resolved recipe."""
    return verl.environment(tree) if trainer == "verl" else mindspeed.environment(tree, trainer)


def own_overrides(
    trainer: str, tree: Mapping[str, Any], places: verl.Places, version: str | None = None
) -> tuple[str, ...]:
    """What the recipe's own keys say to a trainer, without external.overrides."""
    if trainer == "verl":
        external = {**tree["external"], "overrides": []}
        own = verl.render({**tree, "external": external}, places, version).overrides
        return tuple(each for each in own if "recompute_" not in each)  # how much of it is the user's to say
    return mindspeed.render(tree, places, version, trainer).overrides
