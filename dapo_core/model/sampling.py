"""Sampling parameters, and what a model folder says of them and of the end of a sequence."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from dapo_core.config.loading import resolve
from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError, ModelError
from dapo_core.model.folder import read_config

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_PENALTIES = {"repetition_penalty": 1.0, "min_p": 0.0}  # with their neutral values

Root = TypeVar("Root", bound=TrainingConfig)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a response; temperature 0 is greedy and ignores the others."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1  # -1: all

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling(0.0)


def read_sampling(model_path: Path) -> Sampling:
    """Return the sampling that generation_config.json recommends; raises ModelError if none.

    As in vLLM, missing values are neutral. Penalties are ignored with a warning.
    """
    file = model_path / GENERATION_CONFIG
    values = read_config(model_path, GENERATION_CONFIG) if file.is_file() else {}
    names = ("temperature", "top_p", "top_k")
    found = {name: values[name] for name in names if values.get(name) is not None}
    if odd := {name: each for name, each in found.items() if not isinstance(each, int | float)}:
        raise ModelError(f"{file} has {odd}, which are not numbers; correct the file")
    if not found and values.get("do_sample") is False:
        return GREEDY
    if not found:
        raise ModelError(
            f"{file} has no temperature, top_p or top_k for sampling=model to use; set "
            "rollout.sampling and validation.sampling to settings, with your own values"
        )
    neutral = _PENALTIES.items()
    penalties = {name: values[name] for name, no in neutral if values.get(name) not in (None, no)}
    if penalties:
        logger.warning("%s recommends %s, which training does not apply", file, penalties)
    top_k = int(found.get("top_k", -1))
    temperature, top_p = (float(found.get(name, 1.0)) for name in ("temperature", "top_p"))
    return Sampling(temperature, top_p, top_k if top_k > 0 else -1)


def with_model_sampling(config: Root, model_path: Path) -> Root:
    """Return the configuration with `sampling: model` replaced by the model's values.

    Raises ModelError if the folder recommends no sampling, and ConfigError if the recommended
    sampling contradicts other keys.
    """
    sections = {name: getattr(config, name) for name in ("rollout", "validation")}
    names = [name for name, section in sections.items() if section.sampling == "model"]
    if not names:
        return config
    sampling = read_sampling(model_path)
    if sampling.is_greedy and "rollout" in names:
        raise ConfigError(
            f"{GENERATION_CONFIG} in {model_path} is greedy, which would repeat the same response "
            f"{config.rollout.group_size} times; set rollout.sampling=settings and a "
            "rollout.temperature"
        )
    logger.info("sampling from the model's %s: %s", GENERATION_CONFIG, sampling)
    values = {} if sampling.is_greedy else asdict(sampling)
    resolved = {
        name: {**sections[name].model_dump(), **values, "sampling": "settings"} for name in names
    }
    try:
        return resolve(type(config), {**config.model_dump(), **resolved})
    except ConfigError as error:
        keys = " and ".join(f"{name}.sampling=model" for name in names)
        raise ConfigError(f"{keys} uses {sampling} of {GENERATION_CONFIG}, but {error}") from None


def read_eos_ids(model_path: str | Path) -> list[int]:
    """Return the end-of-sequence ids; raises ModelError if no configuration has any."""
    folder = Path(model_path)
    for name in (GENERATION_CONFIG, "config.json"):
        eos = read_config(folder, name).get("eos_token_id") if (folder / name).is_file() else None
        if eos is None:
            continue
        ids = [eos] if isinstance(eos, int) else eos
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise ModelError(
                f"{folder / name} has eos_token_id={eos!r}; write a token id or a list of ids"
            )
        return ids
    raise ModelError(
        f"neither generation_config.json nor config.json in {model_path} has eos_token_id; without "
        "it every response runs to rollout.max_response_tokens; add the id to "
        "generation_config.json"
    )
