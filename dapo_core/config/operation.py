"""Keys of how a chain is operated: none changes a result."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dapo_core.config.fields import Section, volatile


def is_http_address(text: str) -> bool:
    """Whether the text is an http or https address with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


class TimeLimitsConfig(Section):
    """Hours after which an attempt at a stage is ended, the last one; what it earned is kept. Unset: no limit."""

    prepare_data_hours: float | None = volatile(2.0, "Limit of prepare-data.", gt=0)
    fetch_model_hours: float | None = volatile(12.0, "Limit of fetch-model.", gt=0)
    evaluate_model_hours: float | None = volatile(24.0, "Limit of evaluate-model, each of the two.", gt=0)
    train_policy_hours: float | None = volatile(None, "Limit of train-policy.", gt=0)
    merge_checkpoint_hours: float | None = volatile(6.0, "Limit of merge-checkpoint.", gt=0)


class WebhookConfig(Section):
    """Who is told by HTTP that a report is there, or that a run failed."""

    url: str | None = volatile(
        None, "Address that gets a POST with JSON; $NAME takes it from the environment, where secrets belong."
    )
    timeout_seconds: float = volatile(10.0, "How long it may take to answer.", gt=0, le=300)

    @field_validator("url")
    @classmethod
    def _url_can_be_posted_to(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"\$[A-Za-z_]\w*", url) and not is_http_address(url):
            raise ValueError("flow.webhook.url is no http or https address, nor $NAME of an environment variable")
        return url


class FlowConfig(Section):
    """How a run of the chain behaves beside others, and when those who watch it go away."""

    lock_path: str | None = volatile(
        None,
        "File whose kernel lock the one training of a cluster holds; unset: one in store.path. Give stores that "
        "share devices the same file.",
    )
    unwatched_minutes: float = volatile(
        30.0, "How long training goes on after the process that started it is gone; 0: it ends at once.", ge=0
    )
    stop_seconds: float = volatile(
        120.0, "How long a training that is told to stop may take to write its last checkpoint.", ge=0
    )
    log_lines_per_minute: int = volatile(
        120,
        "Most lines of a stage's output that go to Prefect's page in a minute, and as many again that warn; its "
        "log file has all.",
        ge=1,
    )
    time_limits: TimeLimitsConfig = Field(default_factory=TimeLimitsConfig)
    webhook: WebhookConfig = Field(default_factory=WebhookConfig)
