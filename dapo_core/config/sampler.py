"""The section `sampler`: which groups a training step learns from."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key, volatile


class SamplerConfig(Section):
    """Dynamic sampling (DAPO section 3.2)."""

    dynamic: bool = key(True, "Keep only groups in which the metric differs.")
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = key(
        "acc", "What must differ within a group."
    )
    order: Literal["stream", "finish"] = key(
        "stream",
        "Groups that fill a step: the first with signal in prompt order, whatever their length; or those that "
        "finish first, which favours short responses.",
    )
    gen_prompts: int = key(
        1536, "Prompts in flight or waiting at once; in finishing order, prompts drawn at once.", ge=1
    )
    max_num_gen_batches: int = key(
        10,
        "Draws of gen_prompts per training step before `on_exhausted` applies; 0: no bound while any group has "
        "signal, until as many groups in a row as the data has prompts have none.",
        ge=0,
        le=1000,
    )
    on_exhausted: Literal["raise", "train_partial", "skip_step"] = key(
        "raise", "What happens when too few groups have signal."
    )
    in_flight: Literal["abort", "carry_over"] | None = key(
        None,
        "Unfinished groups of a full step: dropped, or continued in the next step. Unset: carry_over in stream "
        "order, abort in finishing order.",
    )
    max_staleness: int = key(
        2,
        "Training steps that a group may wait once sampled. Stream order draws no further ahead; finishing order "
        "drops older groups.",
        ge=0,
        le=64,
    )
    max_seconds_without_kept: float = volatile(
        1800.0, "Training stops with a report after these seconds without a group with signal.", gt=0
    )

    @model_validator(mode="after")
    def _stream_order_drops_nothing(self) -> SamplerConfig:
        if self.order == "stream" and self.in_flight == "abort":
            raise ValueError(
                "sampler.in_flight=abort would drop the prompts of long responses, which sampler.order=stream "
                "trains on too; unset it, or set sampler.order=finish to train on the groups that finish first"
            )
        return self
