"""What an engine holds on each of its devices, in bytes, and how many sequences its cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.device import device_for

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

GIB = 1024**3
STEP_TOKENS = 2048  # engines.vllm_engine.PREFILL_TOKENS, unless rollout.engine_args sets max_num_batched_tokens
CPU_STEP_TOKENS = 8192  # engines.vllm_engine.CPU_PREFILL_TOKENS, hf_engine.PREFILL_TOKENS
LOGIT_BYTES = 12  # float32 logits of each sequence that is decoded, their log-softmax, and one temporary
GRAPH_BYTES = GIB  # assumed for captured graphs


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine on one of its devices."""

    weights: int
    activations: int  # of one step
    graphs: int
    token_bytes: int  # keys and values of one token
    sequence_bytes: int  # of a longest sequence
    cache: int | None  # keys and values; None while the device's size is unknown
    most_sequences: int  # that are decoded at once: rollout.max_num_seqs

    @property
    def fixed(self) -> int:
        """Everything but keys and values."""
        return self.weights + self.activations + self.graphs

    @property
    def num_sequences(self) -> int | None:
        """Sequences of full length that the cache holds at once."""
        return None if self.cache is None else max(self.cache, 0) // self.sequence_bytes


def engine_memory(config: TrainingConfig, shape: ModelShape, device_bytes: int | None) -> EngineMemory:
    """The memory of one engine; `device_bytes` is the size of an accelerator, None if it is unknown."""
    rollout, device = config.rollout, device_for(config.train.device)
    dtype = device.low_precision if rollout.dtype == "auto" else rollout.dtype
    item, parts = 4 if dtype == "float32" else 2, rollout.tensor_parallel
    is_cpu, is_vllm = device.kind == "cpu", rollout.engine == "vllm"
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    cache_item = 1 if str(rollout.engine_args.get("kv_cache_dtype", "")).startswith("fp8") else item
    stages = rollout.pipeline_parallel
    token_bytes = shape.token_elements(parts, stages) * cache_item
    step = CPU_STEP_TOKENS if is_cpu or not is_vllm else STEP_TOKENS
    step_rows = rollout.max_num_seqs * (1 if is_cpu else 2)
    step_tokens = int(str(rollout.engine_args.get("max_num_batched_tokens", max(step, step_rows))))
    width = shape.experts_per_token * shape.expert_intermediate if shape.num_experts else shape.intermediate
    activations = step_tokens * item * (4 * shape.hidden + 3 * width // parts)
    activations += rollout.max_num_seqs * shape.vocabulary * LOGIT_BYTES
    has_graphs = is_vllm and not is_cpu and not rollout.engine_args.get("enforce_eager")
    weights = shape.engine_parameters(parts, stages) * item
    graphs = GRAPH_BYTES if has_graphs else 0
    if not is_vllm:
        waiting = -(-config.sampler.gen_prompts * rollout.group_size // rollout.num_workers)
        cache: int | None = min(rollout.max_num_seqs, waiting) * longest * token_bytes
    elif is_cpu:
        cache = int(rollout.memory_gigabytes * GIB)
    elif device_bytes is None:
        cache = None
    else:
        cache = int(rollout.memory_utilization * device_bytes) - weights - activations - graphs
    return EngineMemory(
        weights, activations, graphs, token_bytes, longest * token_bytes, cache, rollout.max_num_seqs
    )
