"""The inference engine interface and its shared checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dapo_core.errors import RolloutError
from dapo_core.memory.holdings import KV_CACHE, NOTHING, OF_ENGINES, WEIGHTS
from dapo_core.model.inputs import ModelInput
from dapo_core.model.names import is_of_tower
from dapo_core.model.routers import NO_ROUTING, Experts, RoutingRecord
from dapo_core.model.sampling import Sampling

if TYPE_CHECKING:
    import torch

    from dapo_core.config.train import LoraConfig
    from dapo_core.weights.inbox import Inbox

FinishReason = Literal["stop", "length", "abort"]
Sequences = Sequence[tuple[ModelInput, Sequence[int]]]  # (prompt, response_ids)
TokenIds = NDArray[np.int32]  # [R]
LogProbs = NDArray[np.float32]  # [R]
DRAFT_TOKENS, WIDE_BATCH = 3, 32  # of speculation; sequences
NO_IDS, NO_LOG_PROBS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample; with settings.seeds_responses its randomness is that of `seed`.

    An aborted response resumes from its existing tokens. Requests with different sampling may share
    a batch.
    """

    request_id: str
    prompt: ModelInput
    seed: int
    # already sampled, possibly with older weights
    response_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    # of response_ids, from the weights that sampled them
    rollout_log_probs: LogProbs = field(default_factory=lambda: NO_LOG_PROBS)
    routing: Experts = field(default_factory=lambda: NO_ROUTING)  # Response.routing so far
    sampling: Sampling | None = None  # None: the engine's settings


@dataclass(frozen=True)
class Response:
    """One sampled response, complete or aborted.

    `response_ids` starts with the request's and includes the end-of-sequence token if the model
    emitted it. `rollout_log_probs[t]` is the log-probability of `response_ids[t]` under the
    sampling distribution (after temperature, top_k and top_p), or for greedy responses under the
    model's own (temperature 1, all tokens).
    """

    request_id: str
    response_ids: TokenIds
    rollout_log_probs: LogProbs
    finish_reason: FinishReason
    # of prompt and response_ids, when each token was computed; the last one's is unknown.
    # Empty without EngineSettings.records_routing
    routing: Experts = field(default_factory=lambda: NO_ROUTING)


@dataclass(frozen=True)
class EngineSettings:
    """How an engine loads the model and samples from it."""

    dtype: str  # "float32", "bfloat16", ...
    max_model_tokens: int  # prompt + response
    max_response_tokens: int
    max_num_seqs: int  # sequences decoded at once
    # temperature, top_p and top_k are the defaults for requests without `sampling`
    temperature: float
    top_p: float
    top_k: int  # -1: all
    memory_bytes: int  # KV cache on a CPU
    memory_utilization: float  # share of an accelerator's memory
    threads: int  # CPU threads
    trust_remote_code: bool = False  # run Python files of the model folder
    tensor_parallel: int = 1  # processes, one per device, that share each layer
    pipeline_parallel: int = 1  # pipeline stages of tensor_parallel processes each
    # distribute whole experts over processes instead of splitting each
    expert_parallel: bool = False
    speculation: Literal["off", "ngram"] = "off"  # draft tokens, verified in one pass
    batch_invariant: bool = False  # a response's log-probs do not depend on its batch
    # additional arguments of vLLM's EngineArgs
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None  # receives an adapter in place of weights
    freezes_tower: bool = False  # the weights of a vision tower never change
    records_routing: bool = False  # fill Response.routing
    sleep_level: int | None = None  # of vLLM's sleep mode; None: `sleep` frees nothing
    seeds_responses: bool = True  # False: vLLM's own random numbers, in place of requests' seeds

    @property
    def num_parts(self) -> int:
        """Number of processes of the engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class EnginePart:
    """A process's part of an engine; all meet at the address, on the node of vLLM's rank 0."""

    rank: int  # 0 belongs to the owner
    # file:///PATH or tcp://HOST:PORT; on a CPU its last component names the shared memory
    address: str
    seed: int = 0  # of the engine's own random numbers: the same in all parts, new at each start


@dataclass
class Row:
    """A response being sampled."""

    request: GenerationRequest
    response_ids: array[int]  # int32: the request's, followed by the sampled ones
    rollout_log_probs: array[float]  # float32
    routing: RoutingRecord | None = None  # None if the engine does not record

    def response(self, reason: FinishReason) -> Response:
        """Return the response so far."""
        tokens = np.array(self.response_ids), np.array(self.rollout_log_probs)
        num_tokens = len(self.request.prompt.token_ids) + len(self.response_ids)
        routing = NO_ROUTING if self.routing is None else self.routing.read(num_tokens)
        return Response(self.request.request_id, *tokens, reason, routing)


class Engine(ABC):
    """Continuous-batching text generation with replaceable weights.

    The owner calls `submit`, then `step` until all responses are returned. Not thread-safe: see
    engine_thread.
    """

    reads_pictures = False
    keeps_weights = False  # the loader keeps views of a tensor after requesting the next one

    def __init__(
        self,
        settings: EngineSettings,
        shapes: Mapping[str, tuple[int, ...]],
        optional: Collection[str],
    ) -> None:
        """`shapes` has all tensors by Hugging Face name; `optional` ones are copies of others."""
        from dapo_core.weights.proof import Loaded  # imports torch

        self.settings = settings
        self.policy_version = 0
        self.loaded = Loaded(0, {})  # set by receive_weights
        self.inbox: Inbox | None = None  # receives weights from policy ranks
        self.num_decoded = self.num_passes = 0  # tokens, and passes of a sequence that decoded them
        self._shapes = shapes
        frozen = filter(is_of_tower, shapes) if settings.freezes_tower else ()
        self._optional = {*optional, *frozen}
        self._rows: dict[str, Row] = {}  # unfinished, by request id
        self._asleep: frozenset[str] = NOTHING  # states in `turns` that are not on the device

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests with unique ids; nothing is computed until `step`."""
        self._require_awake("accept requests", OF_ENGINES)
        for request in requests:
            self._require_readable(request.prompt)
            ids, log_probs = request.response_ids, request.rollout_log_probs
            row = Row(request, array("i", ids.tobytes()), array("f", log_probs.tobytes()))
            self._queue(row)
            self._rows[request.request_id] = row

    @abstractmethod
    def step(self) -> list[Response]:
        """Run one engine step, such as decoding a token; returns finished responses."""

    def num_unfinished(self) -> int:
        """Return the number of requests neither returned nor aborted."""
        return len(self._rows)

    def num_unfinished_tokens(self) -> int:
        """Return the response tokens of unfinished requests; callable from any thread."""
        return sum(len(row.response_ids) for row in list(self._rows.values()))

    def abort(self, request_ids: Sequence[str]) -> list[Response]:
        """Abort unfinished requests and return their partial responses; unknown ids are ignored."""
        aborted = {name: self._rows.pop(name) for name in request_ids if name in self._rows}
        self._drop(aborted)
        return [row.response("abort") for row in aborted.values()]

    def receive_weights(self, policy_version: int) -> None:
        """Load the weights that policy ranks send, and record their checksums in `loaded`.

        Receives all buckets even if loading fails, since the ranks and other engines wait for that.
        Raises RolloutError like `load_weights`.
        """
        from dapo_core.weights.inbox import Delivery
        from dapo_core.weights.proof import Loaded

        assert self.inbox is not None, "the engine's process is not connected to the policy ranks"
        delivery = Delivery(self.inbox, self.keeps_weights)
        try:
            self.load_weights(delivery, policy_version)
        finally:
            delivery.drain()
            self.loaded = Loaded(self.policy_version, delivery.checksums)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replace all weights (Hugging Face names, full tensors) and clear the prefix cache.

        With settings.lora, replace the adapter instead, by peft's names.
        Raises RolloutError while requests are unfinished, and for missing, unknown or misshapen
        tensors. After such an error, old and new weights are mixed and the policy version is
        unchanged.
        """
        self._require_idle("load weights")
        self._require_awake("load weights", {WEIGHTS})
        self._replace_weights(check_weights(weights, self._shapes, self._optional))
        self.policy_version = policy_version

    def log_probs(self, sequences: Sequences) -> list[list[float]]:
        """Return the log-probs [R] of (prompt, response_ids) pairs at temperature 1.

        Raises RolloutError while requests are unfinished, and for pairs of max_model_tokens, which
        leave no room for the one token that vLLM samples.
        """
        self._require_idle("compute log-probs")
        self._require_awake("compute log-probs", OF_ENGINES)
        for prompt, _ in sequences:
            self._require_readable(prompt)
        return self._log_probs(sequences)

    def sleep(self) -> None:
        """Free the device memory of weights and KV cache.

        Raises RolloutError while requests are unfinished. Sleep level 2 discards the weights: call
        `load_weights` after `wake`.
        """
        self._require_idle("sleep")
        self._sleep()
        self._asleep = OF_ENGINES

    def wake(self, states: Collection[str]) -> None:
        """Allocate device memory for weights or KV cache again, named as in `turns`."""
        self._wake([name for name in (WEIGHTS, KV_CACHE) if name in states])
        self._asleep -= set(states)

    @abstractmethod
    def close(self) -> None:
        """Free the model and end everything that the engine started."""

    @abstractmethod
    def _queue(self, row: Row) -> None:
        """Schedule a new row."""

    @abstractmethod
    def _drop(self, request_ids: Collection[str]) -> None:
        """Stop computing these rows."""

    @abstractmethod
    def _replace_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights that passed check_weights."""

    @abstractmethod
    def _sleep(self) -> None:
        """Free device memory, if the kind of device supports it."""

    @abstractmethod
    def _wake(self, states: Sequence[str]) -> None:
        """Allocate device memory again."""

    @abstractmethod
    def _log_probs(self, sequences: Sequences) -> list[list[float]]:
        """Implement `log_probs` for an idle engine."""

    def _require_readable(self, prompt: ModelInput) -> None:
        if prompt.images and not self.reads_pictures:
            raise RolloutError(
                f"a prompt has {len(prompt.images)} pictures, which this engine does not read; set "
                "rollout.engine=vllm"
            )

    def _require_idle(self, action: str) -> None:
        if self._rows:
            raise RolloutError(
                f"cannot {action} while {len(self._rows)} requests are unfinished; finish or "
                "abort them first"
            )

    def _require_awake(self, action: str, needed: AbstractSet[str]) -> None:
        if asleep := self._asleep & needed:
            raise RolloutError(
                f"cannot {action} while the engine sleeps: {', '.join(sorted(asleep))} not loaded"
            )


def check_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights; raises RolloutError at the first mismatch, and if some are missing.

    `shapes` has every tensor of the engine; `optional` ones may be missing.
    """
    missing = set(shapes) - set(optional)
    for name, tensor in weights:
        if name not in shapes:
            raise RolloutError(
                f"the engine's model has no tensor {name}; trainer and engine must use the same "
                "architecture (model.path)"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise RolloutError(
                f"{name} has shape {tuple(tensor.shape)}, but the engine's model needs "
                f"{shapes[name]}; trainer and engine must use the same architecture (model.path)"
            )
        missing.discard(name)
        yield name, tensor
    if missing:
        raise RolloutError(
            f"{len(missing)} of {len(shapes)} tensors are missing: {', '.join(sorted(missing)[:5])}"
        )
