"""The section `external`: settings for training with another trainer (train.backend)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from dapo_core.config.fields import JsonObject, Section, key, volatile
from redaction import is_secret

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class ExternalConfig(Section):
    """The trainer that train.backend names, if it is not this project's own."""

    version: str | None = volatile(
        None, "Version that external.python must have, such as 0.6.1; unset: any.", min_length=1
    )
    python: str | None = volatile(
        None, "Python interpreter of the environment with the trainer.", min_length=1
    )
    source: str | None = volatile(
        None, "Checkout to start the trainer in; its commit is part of the key.", min_length=1
    )
    strategy: Literal["fsdp2", "megatron"] = key("fsdp2", "How verl shards the policy.")
    overrides: tuple[str, ...] = key(
        (),
        "The trainer's own overrides, NAME=VALUE, applied last; they must not set what a recipe "
        "key sets.",
    )
    env: JsonObject = volatile(
        {}, "Environment variables of the trainer; $NAME copies the variable NAME of this process."
    )
    converter: str | None = key(
        None,
        "Command that converts Megatron weights to Hugging Face, with {checkpoint}, {model} and "
        "{output}; unset: verl's own merger.",
        min_length=1,
    )
    train_rows: str | None = volatile(
        None,
        "Parquet in verl's own schema, for example with images, to use instead of the prepared "
        "training rows; its digest is part of the key.",
        min_length=1,
    )
    held_out_rows: str | None = volatile(
        None,
        "As train_rows, for verl's validation instead of data.eval; its digest is in the key.",
        min_length=1,
    )
    num_nodes: int = volatile(
        1, "Nodes across which the train.num_ranks devices are spread.", ge=1, le=8192
    )
    job_server: str | None = volatile(
        None,
        "Ray job server that runs the trainer, http://HOST:8265; unset: RAY_ADDRESS if it is one, "
        "else this machine.",
        pattern=r"^https?://[^/\s]",
    )

    @field_validator("env")
    @classmethod
    def _env_has_words_and_no_secrets(cls, env: dict[str, object]) -> dict[str, object]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"external.env: {name!r} is not a valid environment variable name")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(
                    f"external.env.{name} is {value!r}; use text or a number; quote it if in doubt"
                )
            if is_secret(name, str(value)) and not str(value).startswith("$"):
                raise ValueError(
                    f"external.env.{name} is a secret, and configurations are written to logs and "
                    f"manifests; set the variable before the run, and external.env.{name}=${name}"
                )
        return env
