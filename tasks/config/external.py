"""The section `external`: what another trainer needs that no other key says (train.backend)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from dapo_core.config.fields import JsonObject, Section, key, volatile
from redaction import is_secret

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class ExternalConfig(Section):
    """The trainer that train.backend names, where it is not our own."""

    version: str | None = volatile(
        None, "Version that external.python must have, such as 0.6.1; unset: any.", min_length=1
    )
    python: str | None = volatile(None, "Interpreter of the environment that has the trainer.", min_length=1)
    source: str | None = volatile(
        None,
        "Checkout in which the trainer is started; its commit is in the key.",
        min_length=1,
    )
    strategy: Literal["fsdp2", "megatron"] = key("fsdp2", "How verl shards the policy.")
    overrides: tuple[str, ...] = key(
        (), "The trainer's own overrides, NAME=VALUE, applied last; none of what a key of ours says."
    )
    env: JsonObject = volatile(
        {}, "Environment variables of the trainer; $NAME takes the value of this one's variable NAME."
    )
    converter: str | None = key(
        None,
        "Command that turns Megatron's weights into Hugging Face's, with {checkpoint}, {model} and {output}; "
        "unset: verl's own merger.",
        min_length=1,
    )
    train_rows: str | None = volatile(
        None,
        "Parquet in verl's own schema, such as one with images, that verl reads in place of the prepared training "
        "rows; its digest is in the key.",
        min_length=1,
    )
    held_out_rows: str | None = volatile(
        None, "The same for verl's validation, in place of data.eval; its digest is in the key.", min_length=1
    )
    num_nodes: int = volatile(1, "Nodes that train.num_ranks devices are spread over.", ge=1, le=8192)
    job_server: str | None = volatile(
        None,
        "Job server of a Ray cluster, http://HOST:8265, to run the trainer; unset: RAY_ADDRESS where it is one, "
        "else the trainer runs here.",
        pattern=r"^https?://[^/\s]",
    )

    @field_validator("env")
    @classmethod
    def _env_has_words_and_no_secrets(cls, env: dict[str, object]) -> dict[str, object]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"external.env: {name!r} is no name of an environment variable")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(
                    f"external.env.{name} is {value!r}; give text or a number, in quotes where in doubt"
                )
            if is_secret(name, str(value)) and not str(value).startswith("$"):
                raise ValueError(
                    f"external.env.{name} is a secret, and configurations are written to logs and manifests; "
                    f"set the variable before the run, and external.env.{name}=${name}"
                )
        return env
