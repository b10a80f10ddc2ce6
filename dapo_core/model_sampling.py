"""The sampling that a model's generation_config.json recommends, in place of a configuration's."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from dapo_core.config.loading import resolve
from dapo_core.config.training import TrainingConfig
from dapo_core.engines.base import GREEDY, Sampling
from dapo_core.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_PENALTIES = {"repetition_penalty": 1.0, "min_p": 0.0}  # and the values at which they do nothing

Root = TypeVar("Root", bound=TrainingConfig)


def read_sampling(model_path: Path) -> Sampling:
    """The sampling that generation_config.json recommends; raises ModelError where it says nothing.

    As in vLLM, a value that it leaves out changes nothing. Penalties are left out, with a warning.
    """
    file = model_path / GENERATION_CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}; fetch the model again") from None
    found = {name: values[name] for name in ("temperature", "top_p", "top_k") if values.get(name) is not None}
    if not found and values.get("do_sample") is False:
        return GREEDY
    if not found:
        raise ModelError(
            f"{file} recommends no temperature, top_p or top_k, which sampling=model would take; set "
            "rollout.sampling and validation.sampling to settings, with values of your own"
        )
    penalties = {name: values[name] for name in _PENALTIES if values.get(name) not in (None, _PENALTIES[name])}
    if penalties:
        logger.warning("%s recommends %s, which training does not apply", file, penalties)
    top_k = int(found.get("top_k", -1))
    return Sampling(
        float(found.get("temperature", 1.0)), float(found.get("top_p", 1.0)), top_k if top_k > 0 else -1
    )


def with_model_sampling(config: Root, model_path: Path) -> Root:
    """The configuration with the model's own sampling in numbers where `sampling: model` asks for it.

    Raises ModelError for a folder that recommends none, and ConfigError where greedy sampling, or the recommended
    one, contradicts other keys.
    """
    sections = {name: getattr(config, name) for name in ("rollout", "validation")}
    asking = [name for name, section in sections.items() if section.sampling == "model"]
    if not asking:
        return config
    sampling = read_sampling(model_path)
    if sampling.is_greedy and "rollout" in asking:
        raise ConfigError(
            f"{GENERATION_CONFIG} of {model_path} is greedy, which gives {config.rollout.group_size} times the "
            "same response; set rollout.sampling=settings, with a rollout.temperature"
        )
    logger.info("%s of the model: %s", GENERATION_CONFIG, sampling)
    values = {} if sampling.is_greedy else asdict(sampling)
    own = {name: {**sections[name].model_dump(), **values, "sampling": "settings"} for name in asking}
    return resolve(type(config), {**config.model_dump(), **own})
