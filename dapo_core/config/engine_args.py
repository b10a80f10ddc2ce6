"""Checks of rollout.engine_args: arguments with a key of their own, unknown ones, and limits."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError

MEDIA_LIMITS = "limit_mm_per_prompt"
STEP_TOKENS = "max_num_batched_tokens"
# Arguments that the project sets itself, and what to do instead.
RESERVED = {
    "model": "use model.path",
    "dtype": "use rollout.dtype",
    "max_model_len": "use data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "use rollout.max_num_seqs",
    "seed": "use run.seed",
    "trust_remote_code": "use model.trust_remote_code",
    "tensor_parallel_size": "use rollout.tensor_parallel",
    "pipeline_parallel_size": "use rollout.pipeline_parallel",
    "enable_expert_parallel": "use rollout.expert_parallel",
    "gpu_memory_utilization": "use rollout.memory_utilization",
    "kv_cache_memory_bytes": "use rollout.memory_gigabytes",
    "data_parallel_size": "use rollout.num_workers for more engines",
    "speculative_config": "use rollout.speculation",
    "enable_lora": "use train.lora.rank",
    "max_lora_rank": "use train.lora.rank",
    "lora_target_modules": "use train.lora.targets",
    "max_loras": "an engine has one adapter, the policy's",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "enable_sleep_mode": "use train.placement=colocated, which enables it",
    "distributed_executor_backend": "rollout.{tensor,pipeline}_parallel start the processes",
    "weight_transfer_config": "weights always come from the policy ranks",
    "disable_log_stats": "training has its own metrics",
}


def require_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that a configuration key sets, or an unusable value."""
    if not isinstance(tokens := arguments.get(STEP_TOKENS, 1), int) or tokens < 1:
        raise ValueError(f"rollout.engine_args.{STEP_TOKENS}={tokens} is not a number of tokens")
    if not isinstance(limits := arguments.get(MEDIA_LIMITS, {}), Mapping):
        raise ValueError(
            f"rollout.engine_args.{MEDIA_LIMITS}={limits} is not a mapping such as {{image: 2}}"
        )
    for name in arguments:
        if (reason := RESERVED.get(name.replace("-", "_"))) is not None:
            raise ValueError(f"rollout.engine_args.{name} is set by the project: {reason}")


def require_known(names: Collection[str]) -> None:
    """Raise ConfigError for an argument unknown to the installed vLLM; without vLLM, accept all.

    Parses vLLM's source, because importing it takes seconds.
    """
    spec = importlib.util.find_spec("vllm") if names else None
    if spec is None or not spec.submodule_search_locations:
        return
    source = Path(spec.submodule_search_locations[0]) / "engine/arg_utils.py"
    known = [
        field.target.id
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see EngineArgs in {source}"
            raise ConfigError(
                f"the installed vLLM has no engine argument {name} (rollout.engine_args); {hint}"
            )


def media_limits(given: Mapping[str, Any], num_pictures: int, key: str) -> dict[str, Any]:
    """Return vLLM's limits of media per prompt: as many pictures as a problem has, and no videos.

    `given` are limits from the configuration key, which stay; raises ConfigError if they allow
    fewer pictures.
    """
    image = given.get("image", {})
    options = dict(image) if isinstance(image, Mapping) else {"count": image}
    count = int(options.get("count", max(num_pictures, 1)))
    if count < num_pictures:
        raise ConfigError(
            f"a problem has {num_pictures} pictures, but {key} allows {count} per prompt: raise "
            f"its limit of images to {num_pictures}, or leave it out"
        )
    return {"video": 0, **given, "image": {**options, "count": count}}
