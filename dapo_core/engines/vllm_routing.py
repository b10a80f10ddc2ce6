"""The experts that vLLM's routers choose: returned by vLLM, or recorded in this process.

vLLM returns them if its model runner is the second one, which needs Triton. Without Triton, as on a
CPU, there is no public way. test_private_parts.py guards the names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dapo_core.model.routers import Experts, RoutingRecord, first_open

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
RETURNED = "enable_return_routed_experts"  # of EngineArgs


def returns_routing(device: str) -> bool:
    """True if vLLM returns routed experts on the device; on a CPU it needs a Triton for CPUs."""
    return device != "cpu" or os.environ.get(SECOND_RUNNER) == "1"


class ReturnedRouting:
    """The routing that vLLM returns with a finished request, also of tokens in its prefix cache."""

    def __init__(self, engine: Any) -> None:
        self._processor = engine.output_processor
        self._layers: list[int] = engine.apply_model(routed_layers)[0]
        self._records: dict[str, tuple[RoutingRecord, int]] = {}

    def begin(self, request_id: str, _: Sequence[int], earlier: Experts) -> RoutingRecord:
        """Return the record of a new request; vLLM returns rows from its first open token on."""
        record, first = RoutingRecord(earlier), first_open(earlier)
        self._records[request_id] = record, first
        return record

    def parameters(self, earlier: Experts) -> dict[str, int]:
        """Return what SamplingParams need for these rows."""
        return {"routed_experts_prompt_start": first_open(earlier)}

    def finish(self, request_id: str, returned: NDArray[Any] | None) -> None:
        """Record the rows [n, all layers, K] of a finished request."""
        record, first = self._records.pop(request_id, (None, 0))
        if record is not None and returned is not None:
            record.put(first, returned[:, self._layers].astype(np.uint8))

    def end(self, request_ids: Collection[str]) -> None:
        """Record the rows of requests so far, which are about to be aborted.

        vLLM returns none of a request that it aborts, so this reads its parts.
        """
        for request_id in request_ids:
            for internal_id in self._processor.external_req_ids.get(request_id, ()):
                parts = self._processor.request_states[internal_id].routed_experts_chunks
                self.finish(request_id, np.concatenate(parts) if parts else None)
            self._records.pop(request_id, None)

    def forget_prefixes(self) -> None:
        """Nothing is kept here: vLLM forgets the routing of prompt blocks with the blocks."""


def leave_to_first_part(engine: Any) -> None:
    """Let a further part of an engine expect no routing: vLLM 0.32 returns it to the first alone.

    Without this, its scheduler fails. There is no public way.
    """
    engine.engine_core.engine_core.scheduler.aux_output_connector = None


def routed_layers(model: Any) -> list[int]:
    """Return the layers with experts, which vLLM 0.32 numbers in a MoERunner, 0.23 in FusedMoE."""
    experts = (module for module in model.modules() if hasattr(module, "moe_config"))
    return sorted({module.layer_id for module in experts if hasattr(module, "layer_id")})


@dataclass(frozen=True)
class _Request:
    token_ids: Sequence[int]  # its input
    record: RoutingRecord
    computed: RoutingRecord  # of the input under the current weights, even if the record is older


class RecordedRouting:
    """The routing of unfinished requests, and of prompt blocks in vLLM's prefix cache.

    vLLM does not compute tokens in its prefix cache again; their routing is that of the request
    which computed them.
    """

    def __init__(self, engine: Any) -> None:
        self._block_tokens = int(engine.vllm_config.cache_config.block_size)
        self._requests: dict[str, _Request] = {}
        self._blocks: dict[bytes, Experts] = {}  # by a digest of all tokens up to the block's end
        self._layers: dict[int, torch.Tensor] = {}  # of the current step: [n, K]
        engine.collective_rpc(self._install)

    def begin(self, request_id: str, token_ids: Sequence[int], earlier: Experts) -> RoutingRecord:
        """Return the record of a new request with these input tokens."""
        record = RoutingRecord(earlier)
        self._requests[request_id] = _Request(token_ids, record, RoutingRecord())
        return record

    def parameters(self, _: Experts) -> dict[str, int]:
        """Return what SamplingParams need: nothing."""
        return {}

    def finish(self, request_id: str, _: NDArray[Any] | None) -> None:
        """Stop recording the request."""
        self._requests.pop(request_id, None)

    def end(self, request_ids: Collection[str]) -> None:
        """Stop recording these requests."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def forget_prefixes(self) -> None:
        """Forget the prompt blocks; called when vLLM clears its prefix cache."""
        self._blocks.clear()

    def _install(self, worker: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        runner = worker.model_runner
        modules = runner.get_model().modules()
        layers = [module for module in modules if isinstance(module, MoERunner)]
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._capture, number))
        execute_model = runner.execute_model

        def execute_and_record(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._layers.clear()
            result = execute_model(scheduled, *args, **kwargs)
            if self._layers and scheduled.total_num_scheduled_tokens:
                self._record(runner.input_batch, scheduled.num_scheduled_tokens)
            return result

        runner.execute_model = execute_and_record

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._layers[layer] = experts.to(torch.uint8)

    def _record(self, batch: Any, num_scheduled: dict[str, int]) -> None:
        """Split the step's rows, which follow each other in the order of the batch's requests."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        rows = torch.stack(layers, dim=1).cpu().numpy()  # [n, layers, K]
        end = 0
        for internal_id in batch.req_ids:
            start, end = end, end + num_scheduled[internal_id]
            first = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[internal_id]])
            # vLLM appends "-" and a random suffix to a request's id
            request = self._requests.get(internal_id.rpartition("-")[0])
            if request is not None:
                self._put(request, first, rows[start:end])

    def _put(self, request: _Request, first: int, rows: Experts) -> None:
        request.record.put(first, rows)
        if first >= len(request.token_ids):  # decoding
            return
        size, keys = self._block_tokens, list(self._keys(request.token_ids))
        for number in range(len(request.computed) // size, first // size):
            if (block := self._blocks.get(keys[number])) is not None:
                request.computed.put(number * size, block)
                request.record.put(number * size, block)
        request.computed.put(first, rows)
        for number, key in enumerate(keys):
            if first < (number + 1) * size <= len(request.computed):
                block = request.computed.read((number + 1) * size)[number * size :]
                self._blocks.setdefault(key, block)

    def _keys(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Yield the key of each whole block."""
        digest, tokens = hashlib.sha256(), np.array(token_ids, np.int32)
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            digest.update(tokens[start : start + self._block_tokens].tobytes())
            yield digest.digest()
