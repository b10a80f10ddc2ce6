"""The `rollout` section: inference engines and sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from dapo_core.config.engine_args import require_arguments
from dapo_core.config.fields import JsonObject, Section, key, volatile
from dapo_core.config.validation import SAMPLING_SOURCES, SamplingSource, require_model_alone

# Arguments of apply_chat_template that the project sets itself.
TEMPLATE_CALL = set(
    "conversation chat_template add_generation_prompt continue_final_message tokenize".split()
)


class RolloutConfig(Section):
    """Inference engines and sampling."""

    engine: Literal["vllm", "hf"] = key(
        "vllm", "Inference engine; hf: transformers in process, for tests and small models."
    )
    num_workers: int = volatile(1, "Rollout workers, one engine each.", ge=1, le=4096)
    tensor_parallel: int = volatile(1, "Devices per pipeline stage, all on one node.", ge=1, le=64)
    pipeline_parallel: int = volatile(1, "Pipeline stages per engine; may span nodes.", ge=1, le=64)
    expert_parallel: bool = volatile(False, "Give each of an engine's devices whole experts.")
    threads_per_worker: int | None = volatile(
        None,
        "CPU threads per engine device; unset: on a CPU all cores, divided over the engines' "
        "devices, else 2.",
        ge=1,
        le=1024,
    )
    group_size: int = key(16, "Responses per prompt (G).", ge=2, le=1024)
    chat_template_kwargs: JsonObject = key(
        {}, "Chat template arguments, such as {enable_thinking: false}; also for validation."
    )
    sampling: SamplingSource = key("settings", SAMPLING_SOURCES)
    temperature: float = key(1.0, "Sampling temperature.", gt=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling probability mass.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1: all.", ge=-1)
    max_response_tokens: int = key(20480, "Maximum response length in tokens.", ge=1)
    max_num_seqs: int = key(256, "Sequences an engine decodes at once.", ge=1, le=65_536)
    memory_utilization: float = volatile(0.8, "Share of device memory for an engine.", gt=0, le=1)
    memory_gigabytes: float = volatile(1.0, "KV cache size in GiB of an engine on a CPU.", gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "Precision of engine weights; auto: bfloat16, on a CPU as train.dtype."
    )
    speculation: Literal["off", "ngram"] = key(
        "off",
        "Draft tokens that vLLM verifies in one pass; ngram: those that followed the same tokens "
        "earlier in the sequence. The sampling distribution is the same.",
    )
    schedule: Literal["synchronous", "asynchronous"] = key(
        "synchronous",
        "What engines do while ranks update: nothing, or decode for later steps with the weights "
        "they have, within sampler.max_staleness. New weights reach responses between two tokens.",
    )
    batch_invariant: bool = key(
        False,
        "Use vLLM's batch-invariant kernels on cuda and npu: log-probs of a response are the same "
        "in every batch, at the cost of speed.",
    )
    lora: Literal["adapter", "merged"] = key(
        "adapter",
        "Under train.lora, what engines get: the adapter, or weights with the adapter merged into "
        "them, which only float32 can represent.",
    )
    engine_args: JsonObject = key({}, "More vLLM EngineArgs, such as {enforce_eager: true}.")

    @property
    def num_devices(self) -> int:
        """Number of devices of all engines."""
        return self.num_workers * self.tensor_parallel * self.pipeline_parallel

    @property
    def samples_among_all(self) -> bool:
        """Whether engine log-probs cover the whole vocabulary: no top_p, no top_k."""
        return self.top_p >= 1 and self.top_k <= 0

    @model_validator(mode="after")
    def _engine_supports_keys(self) -> RolloutConfig:
        require_model_alone("rollout", self)
        require_arguments(self.engine_args)
        num_parts = self.tensor_parallel * self.pipeline_parallel
        if self.engine == "hf" and self.batch_invariant:
            raise ValueError(
                "rollout.batch_invariant=true is a mode of vLLM, which rollout.engine=hf does not "
                "have; set batch_invariant=false, or rollout.engine=vllm"
            )
        if self.speculation != "off" and (self.engine == "hf" or self.pipeline_parallel > 1):
            raise ValueError(
                f"rollout.speculation={self.speculation} needs rollout.engine=vllm in one pipeline "
                f"stage, not rollout.engine={self.engine} with "
                f"rollout.pipeline_parallel={self.pipeline_parallel}; set speculation=off"
            )
        if self.engine == "hf" and (num_parts > 1 or self.engine_args):
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel}, "
                f"rollout.pipeline_parallel={self.pipeline_parallel} and "
                f"rollout.engine_args={[*self.engine_args]} need rollout.engine=vllm; the Hugging "
                "Face engine uses one device and takes no arguments"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "rollout.expert_parallel=true has no effect with rollout.tensor_parallel=1; set "
                "rollout.tensor_parallel to the number of devices for the experts, or "
                "expert_parallel=false"
            )
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_arguments_are_free(cls, arguments: JsonObject) -> JsonObject:
        for name in sorted(TEMPLATE_CALL & arguments.keys()):
            raise ValueError(
                f"rollout.chat_template_kwargs.{name} is set by the project; use only arguments "
                "that the model's chat template reads, such as enable_thinking"
            )
        return arguments
