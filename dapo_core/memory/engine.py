"""Memory of an engine on each of its devices, in bytes, and how many sequences its cache fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo_core.machine.device import device_for
from dapo_core.memory.devices import GIB

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

# prompt tokens per step, or twice rollout.max_num_seqs: engines.vllm_engine.PREFILL_TOKENS
STEP_TOKENS = 2048
CPU_STEP_TOKENS = 8192  # engines.vllm_engine.CPU_PREFILL_TOKENS, hf_engine.PREFILL_TOKENS
# of the largest picture that published processors allow, with which vLLM profiles an accelerator
IMAGE_TOKENS = 16_384
# Of the sequence whose log-probs verify a sync: its prompt, and its response up to this length.
PROBE_TOKENS = 2048
PROBE_BYTES = 8  # per logit for prompt log-probs: float32 logits and their log-softmax
LOGIT_BYTES = 12  # per logit when decoding: float32 logits, their log-softmax, and one temporary
GRAPH_BYTES = GIB  # assumed for captured graphs


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine on one of its devices."""

    item_bytes: int  # per element of its dtype
    weights: int
    activations: int  # of one step
    graphs: int
    reload: int  # of a sync: the largest module as it arrives, and this device's part of it
    probe: int  # logits for the log-probs that verify a sync; vLLM does not reserve memory for them
    token_bytes: int  # KV cache of one token
    sequence_bytes: int  # KV cache of a sequence of maximum length
    cache: int | None  # KV cache; None if the device size is unknown
    most_sequences: int  # decoded at once: rollout.max_num_seqs

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.activations + self.graphs

    @property
    def num_sequences(self) -> int | None:
        """Number of sequences of maximum length that fit into the cache."""
        return None if self.cache is None else max(self.cache, 0) // self.sequence_bytes


def longest_sequence(config: TrainingConfig) -> int:
    """Return the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def engine_memory(
    config: TrainingConfig, shape: ModelShape, device_bytes: int | None
) -> EngineMemory:
    """Return the memory of one engine; `device_bytes` is an accelerator's, None if unknown."""
    rollout, device = config.rollout, device_for(config.train.device)
    item, parts = device.item_bytes(rollout.dtype), rollout.tensor_parallel
    is_cpu, is_vllm = device.kind == "cpu", rollout.engine == "vllm"
    longest = longest_sequence(config)
    cache_item = 1 if str(rollout.engine_args.get("kv_cache_dtype", "")).startswith("fp8") else item
    stages = rollout.pipeline_parallel
    token_bytes = shape.token_elements(parts, stages) * cache_item
    least = max(longest, CPU_STEP_TOKENS) if is_cpu else max(STEP_TOKENS, 2 * rollout.max_num_seqs)
    given: Any = rollout.engine_args.get("max_num_batched_tokens", least)
    step_tokens: int = given if is_vllm else CPU_STEP_TOKENS
    activations = step_tokens * item * (4 * shape.hidden + 3 * shape.mlp_width // parts)
    if shape.tower is not None:
        image_tokens = max(step_tokens, 0 if is_cpu else IMAGE_TOKENS)
        activations += image_tokens * item * shape.tower.token_values
    activations += rollout.max_num_seqs * shape.vocabulary * LOGIT_BYTES
    has_graphs = is_vllm and not is_cpu and not rollout.engine_args.get("enforce_eager")
    adapters = shape.adapter_parameters(config.train.lora) if rollout.lora == "adapter" else 0
    reload = 0 if adapters or not is_vllm else shape.largest_module * (1 + parts) // parts * item
    weights = (shape.engine_parameters(parts, stages) + adapters) * item
    graphs = GRAPH_BYTES if has_graphs else 0
    probed = min(step_tokens, longest, max(PROBE_TOKENS, config.data.max_prompt_tokens + 1))
    probe = probed * shape.vocabulary * PROBE_BYTES if is_vllm else 0
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
        item_bytes=item,
        weights=weights,
        activations=activations,
        graphs=graphs,
        reload=reload,
        probe=probe,
        token_bytes=token_bytes,
        sequence_bytes=longest * token_bytes,
        cache=cache,
        most_sequences=rollout.max_num_seqs,
    )
