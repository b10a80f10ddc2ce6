"""Records the experts that vLLM's routers choose, in this process.

vLLM has no public way on a CPU: enable_return_routed_experts needs a model runner with Triton.
test_private_parts.py guards the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dapo_core.model.routers import Experts, RoutingRecord


@dataclass(frozen=True)
class _Request:
    token_ids: Sequence[int]  # its input
    record: RoutingRecord
    computed: RoutingRecord  # of the input under the current weights, even if the record is older


class VllmRouting:
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
