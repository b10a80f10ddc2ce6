"""The `sampler` section: which groups a training step trains on."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key, volatile


class SamplerConfig(Section):
    """Dynamic sampling (DAPO section 3.2)."""

    dynamic: bool = key(True, "Keep only groups whose responses differ in `metric`.")
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = key(
        "acc", "What must differ: accuracy, score, or score with overlong penalty (seq_*)."
    )
    gen_prompts: int = key(1536, "Maximum prompts in flight or waiting for their step.", ge=1)
    max_num_gen_batches: int = key(
        10,
        "Maximum draws of gen_prompts per training step before on_exhausted applies. 0: no limit, "
        "until a whole epoch of groups in a row has no signal.",
        ge=0,
        le=1000,
    )
    on_exhausted: Literal["raise", "train_partial", "skip_step"] = key(
        "raise", "If too few groups have signal: raise, train on those found, or skip the step."
    )
    max_staleness: int = key(
        3, "Maximum training steps between sampling a group and training on it.", ge=0, le=64
    )
    window: float = key(
        0.3,
        "A step may take any group with signal among the first (1 + window) train_prompts in line, "
        "so that it does not wait for the longest responses. 0: strict prompt order.",
        ge=0,
        le=1,
    )
    backoff: bool = key(
        False,
        "Draw prompts less often that gave no signal in n visits in a row: after 2 ** (n - 1) "
        "epochs, at most 8.",
    )
    max_seconds_without_kept: float = volatile(
        1800.0, "Seconds without a new group with signal after which training fails.", gt=0
    )

    @model_validator(mode="after")
    def _backoff_needs_signal(self) -> SamplerConfig:
        if self.backoff and not self.dynamic:
            raise ValueError(
                "sampler.backoff=true with sampler.dynamic=false would leave out prompts whose "
                "groups are trained on, whether they have signal or not; set sampler.dynamic=true, "
                "or sampler.backoff=false"
            )
        return self
