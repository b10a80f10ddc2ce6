"""Runs vLLM in this process, or as one part of an engine over several processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open

from dapo_core.engines.base import (
    DRAFT_TOKENS,
    WIDE_BATCH,
    Engine,
    EnginePart,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    Response,
    Row,
    Sequences,
)
from dapo_core.engines.vllm_routing import (
    RETURNED,
    RecordedRouting,
    ReturnedRouting,
    leave_to_first_part,
    returns_routing,
)
from dapo_core.engines.vllm_warnings import hide_expected_warnings
from dapo_core.errors import ModelError, RolloutError
from dapo_core.machine.device import device_for
from dapo_core.machine.environment import (
    BATCH_INVARIANT,
    VLLM_IN_PROCESS,
    VLLM_PARTS_ON_CPU,
    VLLM_QUIET,
    set_defaults,
)
from dapo_core.model.folder import IMAGE_TOKEN, read_config
from dapo_core.model.inputs import ModelInput
from dapo_core.model.lora import adapter_name, adapter_shapes, vllm_rank, write_adapter
from dapo_core.model.pictures import ImageProcessor
from dapo_core.model.routers import NO_ROUTING
from dapo_core.model.sampling import read_eos_ids

if TYPE_CHECKING:
    from PIL.Image import Image

    from dapo_core.config.train import LoraConfig

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
CACHED_PICTURES = 64  # decoded ones, for the siblings of a prompt
# multiples of 32 are fast; small blocks let siblings share more of a short prompt
CPU_BLOCK_TOKENS = 32
CPU_PREFILL_TOKENS = 8192  # per prefill step on a CPU, where prompts are not split
PREFILL_TOKENS = 2048  # per step on an accelerator; also the rows of logits for prompt log-probs
PER_BATCH = "num_speculative_tokens_per_batch_size"
# of the sampling distribution: after temperature, top_k and top_p
LOG_PROBS: Final = "processed_logprobs"
Broadcast = Callable[[str, Sequence[Any]], None]  # method name and arguments
GRAPH_ARGUMENTS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}


class VllmEngine(Engine):
    """The vLLM engine of this process; only one can exist at a time."""

    reads_pictures = True
    keeps_weights = True  # vLLM keeps tensors until a layer is complete

    def __init__(
        self,
        model_path: str | Path,
        settings: EngineSettings,
        seed: int,
        part: EnginePart | None = None,
    ) -> None:
        """`part` is this process's part of an engine over several (TensorParallelEngine)."""
        shapes, config = read_shapes(model_path), read_config(Path(model_path))
        self._has_tower = IMAGE_TOKEN in config
        self._is_head_tied = bool(config.get("tie_word_embeddings", False))
        if self._is_head_tied:
            embeddings = (shape for name, shape in shapes.items() if name.endswith(EMBEDDINGS))
            shapes.setdefault(HEAD, next(embeddings, ()))
        optional = {HEAD} if self._is_head_tied else set()
        if settings.lora is not None:
            adapters = adapter_shapes(shapes, settings.lora)
            shapes, optional = {adapter_name(name): adapters[name] for name in adapters}, set()
        super().__init__(settings, shapes, optional)
        self._model_path = model_path
        self._adapter: Any = None  # vLLM's request for it; None: the weights alone
        self._stop_ids = read_eos_ids(model_path)
        # vLLM computes prompt log-probs in the last stage only, which the first parts belong to.
        self._is_last_stage = part is None or part.rank < settings.tensor_parallel
        self._engine = _start(model_path, settings, seed, part)
        self._routing: ReturnedRouting | RecordedRouting | None = None
        if settings.records_routing:
            device = str(self._engine.vllm_config.device_config.device_type)
            kind = ReturnedRouting if returns_routing(device) else RecordedRouting
            self._routing = kind(self._engine)
            if kind is ReturnedRouting and part is not None and part.rank > 0:
                leave_to_first_part(self._engine)

    def _queue(self, row: Row) -> None:
        request, settings, options = row.request, self.settings, dict[str, int]()
        sampling = request.sampling or settings.sampling
        token_ids = [*request.prompt.token_ids, *row.response_ids]
        if self._routing is not None:
            row.routing = self._routing.begin(request.request_id, token_ids, request.routing)
            options = self._routing.parameters(request.routing)
        self._add(
            request.request_id,
            request.prompt,
            row.response_ids,
            **({"temperature": 0.0} if sampling.is_greedy else asdict(sampling)),
            seed=_seed(request) if settings.seeds_responses else None,
            max_tokens=settings.max_response_tokens - len(request.response_ids),
            stop_token_ids=self._stop_ids,
            logprobs=0,
            **options,
        )

    def step(self) -> list[Response]:
        responses = []
        for output in self._engine.step() if self._rows else []:
            row, new = self._rows[output.request_id], output.outputs[0]
            row.response_ids.extend(new.token_ids)
            row.rollout_log_probs.extend(_chosen(new.logprobs, new.token_ids))
            self.num_decoded += len(new.token_ids)
            self.num_passes += 1
            if output.finished:
                if self._routing is not None:
                    self._routing.finish(output.request_id, new.routed_experts)
                del self._rows[output.request_id]
                reason: FinishReason = "length" if new.finish_reason == "length" else "stop"
                responses.append(row.response(reason))
        return responses

    def _drop(self, request_ids: Collection[str]) -> None:
        if self._routing is not None:
            self._routing.end(request_ids)
        self._engine.abort_request(list(request_ids))

    def _replace_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        from dapo_core.weights import vllm_transfer

        if self.settings.lora is not None:
            self._replace_adapter(dict(weights), self.settings.lora)
        else:
            vllm_transfer.replace_weights(self._engine, weights)
            pack_again = functools.partial(_pack_again, is_head_tied=self._is_head_tied)
            self._engine.apply_model(pack_again)
        if self._routing is not None:
            self._routing.forget_prefixes()
        if self._has_tower:
            self._engine.reset_encoder_cache()  # else pictures keep the features of old weights
        if not self._engine.reset_prefix_cache():
            raise RolloutError(
                "vLLM did not clear its prefix cache after a weight update; restart the training"
            )

    def _replace_adapter(self, tensors: Mapping[str, torch.Tensor], lora: LoraConfig) -> None:
        """Replace the adapter by one with a new id; vLLM, which keeps one, drops the old one.

        Its public interface reads adapters only from folders; this one is deleted afterwards.
        """
        from vllm.lora.request import LoRARequest

        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        with tempfile.TemporaryDirectory(prefix="dapo-adapter-") as folder:
            write_adapter(Path(folder), tensors, lora, self._model_path)
            self._adapter = LoRARequest(f"policy-{number}", number, folder)
            self._engine.add_lora(self._adapter)

    def _sleep(self) -> None:
        if self.settings.sleep_level is not None:
            self._engine.sleep(self.settings.sleep_level)

    def _wake(self, states: Sequence[str]) -> None:
        if self.settings.sleep_level is None:
            return
        (parameters,) = self._engine.apply_model(_parameters)
        self._engine.wake_up(list(states))
        self._engine.apply_model(functools.partial(_put_back, parameters=parameters))
        self._engine.apply_model(_clear_features)

    def _log_probs(self, sequences: Sequences) -> list[list[float]]:
        for number, (prompt, response_ids) in enumerate(sequences):
            token_ids = [*prompt.token_ids, *response_ids]
            if self._routing is not None:  # its prompt may serve later requests
                self._routing.begin(str(number), token_ids, NO_ROUTING)
            self._add(
                str(number),
                prompt,
                response_ids,
                temperature=1.0,
                max_tokens=1,
                prompt_logprobs=0 if self._is_last_stage else None,
                # implied by prompt_logprobs; set so that all parts schedule alike
                skip_reading_prefix_cache=True,
            )
        found: dict[int, Any] = {}
        while len(found) < len(sequences):
            found |= {int(done.request_id): done.prompt_logprobs for done in self._engine.step()}
        if self._routing is not None:
            self._routing.end([*map(str, found)])
        if not self._is_last_stage:
            return [[] for _ in sequences]
        return [
            _chosen(found[number][len(prompt.token_ids) :], response_ids)
            for number, (prompt, response_ids) in enumerate(sequences)
        ]

    def close(self) -> None:
        if self._engine is None:
            return
        # LLMEngine has no public shutdown; without this, KV cache and worker processes outlive it.
        # test_private_parts.py guards these names.
        self._engine.engine_core.shutdown()
        self._engine = None
        self._rows.clear()
        from vllm.distributed import cleanup_dist_env_and_memory

        with contextlib.suppress(AssertionError):  # raised if its groups no longer exist
            cleanup_dist_env_and_memory()
        gc.collect()

    @functools.cached_property
    def _load_picture(self) -> Callable[[str], Image]:
        """Return the function that reads a picture in the size in which the model reads it."""
        return functools.lru_cache(CACHED_PICTURES)(ImageProcessor(self._model_path).load)

    def _media(self, prompt: ModelInput) -> dict[str, Any]:
        """Return the pictures of a prompt, of the size at which vLLM resizes no further."""
        if not prompt.images:
            return {}
        pictures = [self._load_picture(image.path) for image in prompt.images]
        digests = [image.digest for image in prompt.images]
        return {"multi_modal_data": {"image": pictures}, "multi_modal_uuids": {"image": digests}}

    def _add(
        self, request_id: str, prompt: ModelInput, response_ids: Sequence[int], **parameters: Any
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Only stop_token_ids end a response, as in all engines.
        sampling = SamplingParams(
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **parameters
        )
        token_ids = [*prompt.placeholder_ids, *response_ids]
        given = {"prompt_token_ids": token_ids, **self._media(prompt)}
        try:
            self._engine.add_request(request_id, given, sampling, lora_request=self._adapter)
        except ValueError as error:
            raise RolloutError(f"vLLM rejected request {request_id}: {error}") from error


class TensorParallelEngine(VllmEngine):
    """A part of an engine over several processes; `broadcast` repeats its calls on the others.

    With vLLM's external launcher every part has its own scheduler; equal calls in equal order keep
    them in sync.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: EngineSettings,
        seed: int,
        part: EnginePart,
        broadcast: Broadcast | None = None,
    ) -> None:
        """Block until all parts are built. `broadcast` is None in all but the first."""
        self._broadcast = broadcast or (lambda _name, _arguments: None)
        super().__init__(model_path, settings, seed, part)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._broadcast("submit", [requests])
        super().submit(requests)

    def step(self) -> list[Response]:
        if self._rows:
            self._broadcast("step", [])
        return super().step()

    def abort(self, request_ids: Sequence[str]) -> list[Response]:
        self._broadcast("abort", [request_ids])
        return super().abort(request_ids)

    def receive_weights(self, policy_version: int) -> None:
        self._broadcast("receive_weights", [policy_version])
        super().receive_weights(policy_version)

    def sleep(self) -> None:
        self._broadcast("sleep", [])
        super().sleep()

    def wake(self, states: Collection[str]) -> None:
        self._broadcast("wake", [states])
        super().wake(states)

    def close(self) -> None:
        self._broadcast("close", [])
        super().close()

    def log_probs(self, sequences: Sequences) -> list[list[float]]:
        self._broadcast("log_probs", [sequences])
        return super().log_probs(sequences)


def read_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the folder's safetensors files by name; raises ModelError if none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    if not shapes:
        raise ModelError(f"{model_path} has no *.safetensors; set model.path to a folder that has")
    return shapes


def _start(
    model_path: str | Path, settings: EngineSettings, seed: int, part: EnginePart | None
) -> Any:
    os.environ |= VLLM_IN_PROCESS | (BATCH_INVARIANT if settings.batch_invariant else {})
    set_defaults(VLLM_QUIET)
    hide_expected_warnings()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.compiler.set_stance("force_eager")  # vLLM's samplers would need a C++ compiler
        torch.set_num_threads(settings.threads)
        if part is not None:
            set_defaults(VLLM_PARTS_ON_CPU)
    from vllm import EngineArgs

    from dapo_core.weights import vllm_transfer

    replaced = vllm_transfer.settings()
    if (lora := settings.lora) is not None:
        # without targets, vLLM also wraps the head, which then fails on prompt log-probs
        replaced = {"enable_lora": True, "max_lora_rank": vllm_rank(lora)}
        replaced["lora_target_modules"] = [*lora.targets]
    arguments: Any = device_arguments(current_platform.device_type, settings)
    if IMAGE_TOKEN in read_config(Path(model_path)):
        arguments.setdefault("limit_mm_per_prompt", {"video": 0})
    parts: Any = {} if part is None else {"distributed_executor_backend": "external_launcher"}
    try:
        engine = _build(
            EngineArgs(
                model=str(model_path),
                dtype=settings.dtype,  # type: ignore[arg-type]
                max_model_len=settings.max_model_tokens,
                max_num_seqs=settings.max_num_seqs,
                seed=seed,
                logprobs_mode=LOG_PROBS,
                disable_log_stats=True,
                trust_remote_code=settings.trust_remote_code,
                tensor_parallel_size=settings.tensor_parallel,
                pipeline_parallel_size=settings.pipeline_parallel,
                enable_expert_parallel=settings.expert_parallel,
                enable_sleep_mode=settings.sleep_level is not None,
                **replaced,
                **parts,
                **arguments,
            ),
            part,
        )
    except (ValueError, NotImplementedError) as error:  # permanent: a retry would fail the same way
        raise ModelError(
            f"vLLM rejected the model {model_path} or its settings: {error}; change rollout.*, "
            "lengths or model.path, or set rollout.engine=hf"
        ) from error
    engine.collective_rpc(set_logprobs_mode)
    # Each reload warns about modules without weights; check_weights reports missing ones.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    return engine


def device_arguments(device: str, settings: EngineSettings) -> dict[str, Any]:
    """Return EngineArgs of the device and rollout.engine_args; see docs/training.md."""
    if device == "cpu":
        arguments: dict[str, Any] = {
            "kv_cache_memory_bytes": settings.memory_bytes,
            "block_size": CPU_BLOCK_TOKENS,
            # Compilation takes 25 s without gain on a small model, but stages need the buffers of
            # vLLM's warm-up.
            "enforce_eager": settings.pipeline_parallel == 1,
            # vLLM 0.32 fails on a chunked prompt with a seed: "CPU Generator does not use offset"
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(
                settings.max_model_tokens, CPU_PREFILL_TOKENS, settings.max_num_seqs
            ),
        }
    else:
        arguments = {
            "gpu_memory_utilization": settings.memory_utilization,
            "max_num_batched_tokens": max(PREFILL_TOKENS, 2 * settings.max_num_seqs),
            # vLLM 0.32 looks up the other parts' devices, of which Ray exposes none: IndexError
            "disable_custom_all_reduce": True,
        }
        if not GRAPH_ARGUMENTS & settings.engine_args.keys():
            arguments["cudagraph_capture_sizes"] = graph_sizes(settings)
            if (mode := device_for(device).graph_mode) is not None:
                # batch-invariant attention of vllm-ascend 0.23 cannot be in a graph
                mode = "PIECEWISE" if settings.batch_invariant else mode
                arguments["compilation_config"] = {"cudagraph_mode": mode}
    if settings.records_routing and returns_routing(device):
        arguments[RETURNED] = True
    if settings.speculation != "off":
        arguments["speculative_config"] = speculative_arguments(settings)
    return {**arguments, **settings.engine_args}


def graph_sizes(settings: EngineSettings) -> list[int]:
    """Return the batches to capture: vLLM's, up to the widest, which its own limit rounds down.

    A batch wider than all of them is decoded without graphs. Drafts widen one to several tokens a
    sequence.
    """
    widest = settings.max_num_seqs
    drafted = 0 if settings.speculation == "off" else min(widest, WIDE_BATCH) * (1 + DRAFT_TOKENS)
    largest = max(widest, drafted)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16))
    return sorted({widest, largest, *(size for size in steps if size < largest)})


def speculative_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's speculative_config: no drafts in a wide batch, which is busy without.

    Raises ModelError for a vLLM, such as 0.23, whose drafts do not depend on the batch.
    """
    from vllm import __version__
    from vllm.config import SpeculativeConfig

    if not hasattr(SpeculativeConfig, PER_BATCH):
        raise ModelError(
            f"rollout.speculation={settings.speculation} needs vLLM 0.32, whose drafts end where "
            f"batches are wide; vLLM {__version__} has no {PER_BATCH}: set rollout.speculation=off"
        )
    widths = [(1, WIDE_BATCH, DRAFT_TOKENS)]
    if settings.max_num_seqs > WIDE_BATCH:
        widths.append((WIDE_BATCH + 1, settings.max_num_seqs, 0))
    return {
        "method": settings.speculation,
        "num_speculative_tokens": DRAFT_TOKENS,
        PER_BATCH: widths,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def mend_speculation() -> None:
    """Replace a function of vLLM 0.32 that is wrong on a CPU: it returns uninitialized memory.

    vLLM then verifies drafts at random temperatures. There is no public way; test_private_parts.py
    guards the name.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each sequence's value for its tokens, which end at `cu_num_tokens`: [num_tokens]."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def set_logprobs_mode(worker: Any) -> None:
    """Make the worker's sampler return LOG_PROBS: vllm-ascend's ignores logprobs_mode.

    Read in the source of vllm-ascend 0.23.0, not run there; vLLM's own samplers already have the
    mode. There is no public way; test_private_parts.py guards the names.
    """
    sampler = getattr(worker.model_runner, "sampler", None)  # only the last stage has one
    parts: list[Any] = [sampler, getattr(sampler, "topk_topp_sampler", None)]
    for part in parts:
        if getattr(part, "logprobs_mode", LOG_PROBS) != LOG_PROBS:
            part.logprobs_mode = LOG_PROBS


def _build(arguments: Any, part: EnginePart | None) -> Any:
    from vllm import LLMEngine
    from vllm.platforms import current_platform

    if arguments.speculative_config is not None and current_platform.is_cpu():
        mend_speculation()
        # Else numba, which proposes drafts, lets each operation of torch use all cores.
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
    if part is None:
        return LLMEngine.from_engine_args(arguments)
    width, num_stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    executor = _executor(part.address, rank_of_part(part.rank, width, num_stages))
    return LLMEngine(arguments.create_engine_config(), executor, log_stats=False)


def rank_of_part(number: int, tensor_parallel: int, pipeline_parallel: int) -> int:
    """Return vLLM's rank of an engine's part; the first part is the first of the last stage."""
    stages_behind, place = divmod(number, tensor_parallel)
    return (pipeline_parallel - 1 - stages_behind) * tensor_parallel + place


def _executor(address: str, rank: int) -> Any:
    """Return vLLM's external launcher with an own address; env:// is shared by all engines."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Part(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:  # private; test_private_parts.py
            # Ray exposes only the worker's own accelerator, so its index is 0.
            return address, rank, rank if current_platform.is_cpu() else 0

    return Part


def _pack_again(model: torch.nn.Module, is_head_tied: bool) -> None:
    """Repack experts and a tied head for the CPU kernels, which vLLM 0.32's reload_weights skips.

    vLLM has no public API for this; test_private_parts.py guards the names.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if is_head_tied and isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _put_back(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Undo what waking replaces: vllm-ascend 0.23 transposes experts as in files.

    Neither its kernels nor vLLM's reload work with that (vllm-ascend 12226).
    """
    for name, parameter in _parameters(model).items():
        if parameter is not parameters[name]:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameters[name])


def _clear_features(model: torch.nn.Module) -> None:
    """Zero the features of pictures that Qwen3-VL adds in every step, as vLLM does after each.

    Sleep level 2 keeps parameters and buffers in mind, but not these tensors (vllm 53343). There is
    no public way; test_private_parts.py guards the name.
    """
    for features in getattr(model, "deepstack_input_embeds", ()):
        features.zero_()


def _seed(request: GenerationRequest) -> int:
    """Return the request's seed; a resumed response gets another, to not repeat its numbers."""
    if not len(request.response_ids):
        return request.seed
    digest = hashlib.sha256(f"{request.seed}/{len(request.response_ids)}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def _chosen(positions: Any, token_ids: Sequence[int]) -> list[float]:
    """Return each token's log-prob from vLLM's results at its position."""
    return [position[token].logprob for position, token in zip(positions, token_ids, strict=True)]
