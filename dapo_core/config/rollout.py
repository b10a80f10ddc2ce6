"""The section `rollout`: the engines that sample responses, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from dapo_core.config.engine_args import require_no_own_key
from dapo_core.config.fields import JsonObject, Section, key, volatile
from dapo_core.config.validation import SamplingSource, require_model_alone

# Arguments of apply_chat_template that decide what it returns.
TEMPLATE_CALL = ("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["vllm", "hf"] = key("vllm", "Inference engine of the rollout workers.")
    num_workers: int = volatile(1, "Rollout workers, one engine each.", ge=1, le=4096)
    tensor_parallel: int = volatile(1, "Devices of one node that share each layer of an engine.", ge=1, le=64)
    pipeline_parallel: int = volatile(
        1, "Stages of an engine, each with some of its layers on its own devices; also over nodes.", ge=1, le=64
    )
    expert_parallel: bool = volatile(
        False, "An engine's devices share out the experts of a mixture, not the rows of each."
    )
    threads_per_worker: int = volatile(2, "CPU threads of an engine, on each of its devices.", ge=1, le=1024)
    group_size: int = key(16, "Responses per prompt (G).", ge=2, le=1024)
    chat_template_kwargs: JsonObject = key(
        {}, "Arguments of the chat template, such as {enable_thinking: false}; also of validation prompts."
    )
    sampling: SamplingSource = key(
        "settings",
        "settings: temperature, top_p and top_k below; model: those of the model's generation_config.json.",
    )
    temperature: float = key(1.0, "Sampling temperature.", gt=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling mass.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1 means all.", ge=-1)
    max_response_tokens: int = key(20480, "Length limit of a response.", ge=1)
    max_num_seqs: int = key(
        256, "Sequences an engine decodes at once; decides which groups finish first.", ge=1, le=65_536
    )
    memory_utilization: float = volatile(0.8, "Share of the device's memory that an engine takes.", gt=0, le=1)
    memory_gigabytes: float = volatile(1.0, "KV cache of an engine on a CPU.", gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "Precision of the engine's weights.")
    engine_args: JsonObject = key({}, "Further arguments of vLLM's EngineArgs, such as enforce_eager.")

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self.num_workers * self.tensor_parallel * self.pipeline_parallel

    @property
    def samples_among_all(self) -> bool:
        """Whether any token can be sampled, so that the engine's log-probs are over the whole vocabulary."""
        return self.top_p >= 1 and self.top_k <= 0

    @model_validator(mode="after")
    def _engine_takes_them(self) -> RolloutConfig:
        require_no_own_key(self.engine_args)
        num_parts = self.tensor_parallel * self.pipeline_parallel
        if self.engine == "hf" and (num_parts > 1 or self.engine_args):
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel}, rollout.pipeline_parallel="
                f"{self.pipeline_parallel} and rollout.engine_args={[*self.engine_args]} are for "
                "rollout.engine=vllm; the Hugging Face engine takes one device and no arguments"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "rollout.expert_parallel=true with rollout.tensor_parallel=1 leaves all experts of a layer on one "
                "device; set rollout.tensor_parallel to the devices that share them out, or expert_parallel=false"
            )
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_has_its_own(cls, arguments: JsonObject) -> JsonObject:
        for name in arguments:
            if name in TEMPLATE_CALL:
                raise ValueError(
                    f"rollout.chat_template_kwargs.{name} is the project's own to set; name what the model's chat "
                    "template reads, such as enable_thinking"
                )
        return arguments

    @model_validator(mode="after")
    def _sampled_one_way(self) -> RolloutConfig:
        require_model_alone("rollout", self)
        return self
