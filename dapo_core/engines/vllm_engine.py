"""vLLM inside this process: continuous batching, and weights replaced in place."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from dapo_core.engines.base import (
    EngineSettings,
    FinishReason,
    GenerationRequest,
    Response,
    check_requests,
    check_weights,
    read_eos_ids,
)
from dapo_core.errors import ModelError, RolloutError

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

# Multiples of 32 run fast on a CPU; a smaller block lets siblings share more of a short prompt.
CPU_BLOCK_TOKENS = 32
# Tokens of one prefill step on a CPU, where a prompt is never split.
CPU_PREFILL_TOKENS = 8192


class VllmEngine:
    """One vLLM engine in this process; a process holds one at a time."""

    def __init__(self, model_path: str | Path, settings: EngineSettings, seed: int) -> None:
        self.settings = settings
        self.policy_version = 0
        self._stop_ids = read_eos_ids(model_path)
        self._shapes = read_shapes(model_path)
        self._optional = {"lm_head.weight"} if _is_tied(model_path) else set()
        if self._optional:
            self._shapes.setdefault("lm_head.weight", self._shapes.get("model.embed_tokens.weight", ()))
        self._running: dict[str, tuple[str, GenerationRequest]] = {}  # request id -> vLLM's own id, request
        self._is_torn = False
        self._max_tokens = settings.max_model_tokens
        if settings.max_model_tokens != _max_positions(model_path):
            self._max_tokens += 1  # vLLM samples one token even when only a full sequence's log-probs are wanted
        self._engine = _start(model_path, settings, seed, self._max_tokens)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._require_whole_weights()
        settings = self.settings
        check_requests(requests, self._running, settings)
        sampled = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        for request in requests:
            parameters = self._parameters(
                **({"temperature": 0.0} if request.is_greedy else sampled),
                seed=_seed(request),
                max_tokens=settings.max_response_tokens - len(request.response_ids),
                stop_token_ids=self._stop_ids,
                logprobs=0,
            )
            token_ids = [*request.prompt_ids, *request.response_ids]
            internal_id = self._add(request.request_id, token_ids, parameters)
            self._running[request.request_id] = (internal_id, request)

    def step(self) -> list[Response]:
        if not self._running:
            return []
        responses = []
        for output in self._engine.step():
            if output.finished:
                _, request = self._running.pop(output.request_id)
                sample = output.outputs[0]
                reason: FinishReason = "length" if sample.finish_reason == "length" else "stop"
                responses.append(_response(request, sample.token_ids, sample.logprobs, reason))
        return responses

    def num_unfinished(self) -> int:
        return len(self._running)

    def num_unfinished_tokens(self) -> int:
        states = self._engine.output_processor.request_states
        return sum(
            len(request.response_ids) + states[internal_id].detokenizer.num_output_tokens()
            for internal_id, request in self._running.values()
        )

    def abort(self, request_ids: Sequence[str]) -> list[Response]:
        stopped = [self._running.pop(request_id) for request_id in request_ids if request_id in self._running]
        partial = []
        for internal_id, request in stopped:
            state = self._engine.output_processor.request_states[internal_id]
            sampled, log_probs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            partial.append(_response(request, sampled, log_probs, "abort"))
        self._engine.abort_request([internal_id for internal_id, _ in stopped], internal=True)
        return partial

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self._require_idle("load weights")
        self._is_torn = True
        checked = check_weights(weights, self._shapes, self._optional)
        # Plain model.load_weights fails on CPU, where weights are packed for the kernels.
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": checked})
        if self._optional:
            self._engine.apply_model(_repack_head)
        self._engine.apply_model(_pack_experts)
        if not self._engine.reset_prefix_cache():
            raise RolloutError("vLLM kept its prefix cache after new weights; restart the rollout worker")
        self._is_torn = False
        self.policy_version = policy_version

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        self._require_whole_weights()
        self._require_idle("compute log-probs")
        for number, (prompt_ids, response_ids) in enumerate(sequences):
            num_tokens = len(prompt_ids) + len(response_ids)
            if num_tokens >= self._max_tokens:
                raise RolloutError(
                    f"sequence {number} has {num_tokens} tokens; with this configuration vLLM gives log-probs of "
                    f"at most {self._max_tokens - 1}; lower rollout.max_response_tokens or data.max_prompt_tokens"
                )
            parameters = self._parameters(temperature=1.0, max_tokens=1, prompt_logprobs=0)
            self._add(str(number), [*prompt_ids, *response_ids], parameters)
        finished: dict[int, Any] = {}
        while len(finished) < len(sequences):
            finished.update({int(output.request_id): output for output in self._engine.step() if output.finished})
        return [
            _prompt_log_probs(finished[number], len(prompt_ids))
            for number, (prompt_ids, _) in enumerate(sequences)
        ]

    def close(self) -> None:
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None
        self._running.clear()
        from vllm.distributed import cleanup_dist_env_and_memory

        with contextlib.suppress(AssertionError):  # vLLM asserts that its groups still exist
            cleanup_dist_env_and_memory()
        gc.collect()

    def _parameters(self, **chosen: Any) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            ignore_eos=True,  # the ids that stop are named in stop_token_ids, the same for every engine
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **chosen,
        )

    def _add(self, request_id: str, token_ids: Sequence[int], parameters: SamplingParams) -> str:
        try:
            return self._engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, parameters)
        except ValueError as error:
            raise RolloutError(f"vLLM refuses request {request_id}: {error}") from error

    def _require_idle(self, what: str) -> None:
        if self._running:
            raise RolloutError(
                f"cannot {what} while {self.num_unfinished()} requests are unfinished; finish or abort them first"
            )

    def _require_whole_weights(self) -> None:
        if self._is_torn:
            raise RolloutError("the last load_weights failed half-way; load a whole set of weights first")


def read_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the folder's safetensors files, by name; raises ModelError when there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    if not shapes:
        raise ModelError(f"{model_path} has no *.safetensors; set model.path to a folder with safetensors weights")
    return shapes


def _start(model_path: str | Path, settings: EngineSettings, seed: int, max_tokens: int) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: weights are handed over, not sent
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.platforms import current_platform

    platform_options: dict[str, Any] = {"gpu_memory_utilization": settings.memory_utilization}
    if current_platform.is_cpu():
        torch._dynamo.config.disable = True  # before vLLM decorates its samplers: no C++ compiler, no seconds lost
        torch.set_num_threads(settings.threads)
        platform_options = {
            "kv_cache_memory_bytes": settings.memory_bytes,
            "block_size": CPU_BLOCK_TOKENS,
            "enforce_eager": True,  # compiling takes 25 s and wins nothing on a small model
            # vLLM 0.32 fails on a split prompt with a seed: "CPU Generator does not use offset"
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_tokens, CPU_PREFILL_TOKENS, settings.max_num_seqs),
        }
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model_path),
            dtype=settings.dtype,  # type: ignore[arg-type]
            max_model_len=max_tokens,
            max_num_seqs=settings.max_num_seqs,
            seed=seed,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **platform_options,
        )
    )
    # It warns at each load of modules that own no weights; check_weights has already said what is missing.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    return engine


def _repack_head(model: torch.nn.Module) -> None:
    """Pack a tied output head again on a CPU: reload_weights leaves the head's packed copy as it is."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _pack_experts(model: torch.nn.Module) -> None:
    """Pack experts on a CPU: vLLM 0.32 does so at the first load and leaves it out at later ones."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _seed(request: GenerationRequest) -> int:
    """The request's seed, and another one to continue: vLLM would begin the same randomness anew."""
    if not request.response_ids:
        return request.seed
    digest = hashlib.sha256(f"{request.seed}/{len(request.response_ids)}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def _response(
    request: GenerationRequest, sampled: Sequence[int], positions: Any, reason: FinishReason
) -> Response:
    """The tokens that the request came with, then the sampled ones with their log-probs."""
    log_probs = [position[token].logprob for position, token in zip(positions, sampled, strict=True)]
    return Response(
        request.request_id,
        [*request.response_ids, *sampled],
        [*request.rollout_log_probs, *log_probs],
        reason,
    )


def _prompt_log_probs(output: RequestOutput, first: int) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    positions = zip(output.prompt_logprobs[first:], output.prompt_token_ids[first:], strict=True)
    return [position[token].logprob for position, token in positions if position is not None]


def _read_config(model_path: str | Path) -> dict[str, Any]:
    return json.loads((Path(model_path) / "config.json").read_text())


def _is_tied(model_path: str | Path) -> bool:
    return bool(_read_config(model_path).get("tie_word_embeddings", False))


def _max_positions(model_path: str | Path) -> int | None:
    config = _read_config(model_path)
    return config.get("text_config", config).get("max_position_embeddings")
