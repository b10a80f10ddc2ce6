"""The entries of `evaluate.baselines`: further models that are asked the same items."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from dapo_core.config.fields import Entry, key, volatile
from eval.problems.registry import POOLED

_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_TAKEN = re.compile(rf"before|after|{POOLED}|step[_-]?\d+")
# The places that read a key.
_READ_WITH = {
    "source": ("id",),
    "revision": ("id",),
    "chat_template": ("path", "id"),
    "trust_remote_code": ("path", "id"),
    "model": ("base_url",),
    "api_key_variable": ("base_url",),
}


class BaselineConfig(Entry):
    """One further model: a folder (`path`), a model of a hub (`id`), or one served elsewhere (`base_url`)."""

    what = "a baseline of evaluate.baselines"

    name: str = Field(description="Its column in the report and its name in gates.")
    path: str | None = key(None, "Hugging Face model folder.")
    id: str | None = key(None, "ORG/NAME of a model of a hub.", pattern=r"^[\w.-]+/[\w.-]+$")
    source: Literal["huggingface", "modelscope"] = key("huggingface", "The hub of `id`.")
    revision: str | None = key(None, "Branch, tag or commit of `id`.")
    chat_template: str | None = key(None, "As model.chat_template.")
    trust_remote_code: bool = key(False, "As model.trust_remote_code.")
    base_url: str | None = key(None, "URL of an OpenAI-compatible server.", pattern=r"^https?://[^/\s]")
    model: str | None = key(None, "Name of the model that base_url serves.", min_length=1)
    api_key_variable: str | None = volatile(
        None, "Environment variable that holds the key of base_url.", pattern=r"^[A-Za-z_]\w*$"
    )

    @model_validator(mode="after")
    def _one_place(self) -> BaselineConfig:
        if not _NAME.fullmatch(self.name) or _TAKEN.fullmatch(self.name):
            raise ValueError(
                f"evaluate.baselines: {self.name!r} names a column beside before, after, {POOLED} and steps; it "
                "begins with a letter and has letters, digits, _ and -"
            )
        said = [name for name in ("path", "id", "base_url") if getattr(self, name) is not None]
        if len(said) != 1:
            what = " and ".join(said) or "none"
            raise ValueError(f"evaluate.baselines: {self.name} has {what} of path, id and base_url; name one")
        for name in self.model_fields_set & _READ_WITH.keys():
            if said[0] not in _READ_WITH[name]:
                raise ValueError(
                    f"evaluate.baselines: {name} of {self.name} would be ignored by {said[0]}; remove it, or name "
                    f"{' or '.join(_READ_WITH[name])} instead"
                )
        if self.base_url is not None and "@" in urlsplit(self.base_url).netloc:
            raise ValueError(
                f"evaluate.baselines: base_url of {self.name} holds a user or password, which runs would keep in "
                "clear text; put the key into an environment variable and name it in api_key_variable"
            )
        if self.base_url is not None and self.model is None:
            raise ValueError(f"evaluate.baselines: {self.name} has base_url; set `model` to the name it serves")
        return self
