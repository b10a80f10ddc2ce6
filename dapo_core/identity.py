"""What must stay the same from one attempt at a training to the next."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.config.fields import result_values
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.model_folder import model_fingerprint

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.data import PromptStream

SECTIONS = ("algorithm", "reward", "custom_reward", "sampler", "rollout", "train")
FREE_KEYS = ("train.total_steps",)  # a training may become longer


def training_identity(config: TrainingConfig, stream: PromptStream, model_path: Path) -> dict[str, Any]:
    """What the training's meaning hangs on: keys as `section.key`, and digests as `prompts` and `model`.

    How the work lies on devices is not among it: a training may go on with another number of ranks.
    """
    values = {
        f"{section}.{name}": value
        for section in SECTIONS
        for name, value in result_values(getattr(config, section)).items()
    }
    for name in FREE_KEYS:
        del values[name]
    if values["custom_reward.path"] is not None:  # what the file says counts, not its place
        values["custom_reward.path"] = hashlib.sha256(Path(values["custom_reward.path"]).read_bytes()).hexdigest()
    data = {"data.shuffle": config.data.shuffle, "data.max_prompt_tokens": config.data.max_prompt_tokens}
    run = {f"run.{name}": value for name, value in result_values(config.run).items()}
    digests = {"prompts": stream.digest, "model": model_fingerprint(model_path)}
    return json.loads(json.dumps({**run, **data, **_flat(values), **digests}))  # as a checkpoint gives it back


def refuse_other_training(
    checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()
) -> list[str]:
    """What differs between a checkpoint's identity and this training's, as "key before -> now".

    Raises CheckpointError with the list unless `allowed` (checkpoint.allow_changed) names all of it, and
    ConfigError when it names what is not part of an identity.
    """
    unknown = sorted(set(allowed) - {*before, *now})
    if unknown:
        near = difflib.get_close_matches(unknown[0], {*before, *now}, n=1)
        raise ConfigError(
            f"checkpoint.allow_changed names {unknown[0]}, which no checkpoint is bound to"
            + (f" (did you mean {near[0]}?)" if near else "; remove it")
        )
    changed = {
        name: f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    }
    refused = [name for name in changed if name not in allowed]
    if refused:
        raise CheckpointError(
            f"{checkpoint} belongs to another training ({', '.join(changed[name] for name in refused)}); "
            "continuing would mix the two: name a new --output, set these back, or, to change the training on its "
            f"way, --set 'checkpoint.allow_changed=[{', '.join([*sorted(allowed), *refused])}]'"
        )
    return list(changed.values())


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections as dotted names, so that a difference names its key alone."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            flat[name] = value
    return flat
