"""Further arguments of vLLM's engine: which of them have a key of their own, and which vLLM has at all."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterable
from pathlib import Path

from dapo_core.errors import ConfigError

# What the engine is given anyway, and the key that decides it.
KEYS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "seed": "run.seed",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.pipeline_parallel",
    "enable_expert_parallel": "rollout.expert_parallel",
    "gpu_memory_utilization": "rollout.memory_utilization",
    "kv_cache_memory_bytes": "rollout.memory_gigabytes",
    "data_parallel_size": "rollout.num_workers, whose engines share no layer",
    "logprobs_mode": "nothing: training needs the log-probs of what was sampled from",
    "enable_sleep_mode": "train.placement=colocated, which sets it",
    "distributed_executor_backend": "nothing: rollout.tensor_parallel and pipeline_parallel start the processes",
    "weight_transfer_config": "nothing: weights come from the policy's ranks",
    "disable_log_stats": "nothing: the training has its own metrics",
}


def require_no_own_key(names: Iterable[str]) -> None:
    """Raise ValueError for an argument that a key of the configuration decides."""
    for name in names:
        if name.replace("-", "_") in KEYS:
            raise ValueError(
                f"rollout.engine_args.{name} has a place of its own; use {KEYS[name.replace('-', '_')]}"
            )


def require_known(names: Collection[str]) -> None:
    """Raise ConfigError for an argument that the installed vLLM does not have; nothing is known without vLLM.

    Read from its source, since importing vLLM takes seconds.
    """
    spec = importlib.util.find_spec("vllm") if names else None
    if spec is None or not spec.submodule_search_locations:
        return
    source = Path(spec.submodule_search_locations[0]) / "engine/arg_utils.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    known = [
        field.target.id
        for field in classes["EngineArgs"].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{source} lists the fields of EngineArgs"
            raise ConfigError(f"rollout.engine_args.{name} is no argument of the installed vLLM; {hint}")
