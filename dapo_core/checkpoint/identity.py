"""Identity of a training: the settings and data that all its attempts share."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.config.fields import result_values
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.model.folder import model_fingerprint
from durable import UNSET, differences, leaves

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

SECTIONS = ("run", "algorithm", "reward", "custom_reward", "sampler", "rollout", "train")
PROMPT_KEYS = ("max_prompt_tokens", "too_long", "shuffle")  # of the section data
TOTAL_STEPS = "train.total_steps"


def training_identity(
    config: TrainingConfig, prompts_digest: str, model_path: Path
) -> dict[str, Any]:
    """Return the values that define the training, by `section.key`, and digests of its inputs.

    Placement is left out, so a training can resume with another number of ranks.
    """
    values = leaves({section: result_values(getattr(config, section)) for section in SECTIONS})
    if config.train.schedule == "constant" or config.train.schedule_steps is not None:
        # training may be extended, unless the learning rate decays until the end
        del values[TOTAL_STEPS]
    for name in ("custom_reward.path", "algorithm.custom_loss.path"):
        if (file := values[name]) is not None:  # identified by content, not by path
            values[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if (reference := config.algorithm.kl.reference_path) is not None:
        values["algorithm.kl.reference_path"] = model_fingerprint(reference)
    values |= {f"data.{name}": getattr(config.data, name) for name in PROMPT_KEYS}
    values |= {"model.trust_remote_code": config.model.trust_remote_code}
    values |= {"prompts": prompts_digest, "model": model_fingerprint(model_path)}
    return json.loads(json.dumps(values))  # as read from a checkpoint


def refuse_other_training(
    checkpoint: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    allowed: Collection[str] = (),
) -> list[str]:
    """Return the differences between a checkpoint's identity and this one, as "key before -> now".

    Raises CheckpointError if any is not in `allowed` (checkpoint.allow_changed), and ConfigError if
    `allowed` names an unknown key.
    """
    unknown = sorted(set(allowed) - {*before, *now})
    if unknown:
        near = difflib.get_close_matches(unknown[0], {*before, *now}, n=1)
        raise ConfigError(
            f"checkpoint.allow_changed names {unknown[0]}, which is not part of a checkpoint's "
            "identity" + (f" (did you mean {near[0]}?)" if near else "; remove it")
        )
    changed = {
        name: f"{name} {' -> '.join('None' if value is UNSET else repr(value) for value in values)}"
        for name, *values in sorted(differences(before, now))
    }
    refused = [name for name in changed if name not in allowed]
    if refused:
        raise CheckpointError(
            f"{checkpoint} belongs to another training "
            f"({', '.join(changed[name] for name in refused)}), and resuming would mix the two. "
            "Use a new --output, restore these values, or, to change the training midway, --set "
            f"'checkpoint.allow_changed=[{', '.join([*sorted(allowed), *refused])}]'"
        )
    return list(changed.values())
