"""The interface of inference engines, and the checks that they share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dapo_core.errors import ModelError, RolloutError
from dapo_core.turns import KV_CACHE, NOTHING, OF_ENGINES, WEIGHTS

if TYPE_CHECKING:
    import torch

    from dapo_core.weight_transfer.inbox import Inbox

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """Which tokens a response is sampled among; at temperature 0 the likeliest each time, whatever the others."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1  # -1: all

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling(0.0)


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample. `seed` alone decides its randomness, not what else is in the engine's batch.

    An aborted response continues from the tokens it has. Requests of different sampling may share a batch.
    """

    request_id: str
    prompt_ids: Sequence[int]
    seed: int
    response_ids: Sequence[int] = ()  # already sampled, possibly under older weights
    rollout_log_probs: Sequence[float] = ()  # of response_ids, from the weights that sampled them
    sampling: Sampling | None = None  # None: the engine's settings


@dataclass(frozen=True)
class Response:
    """One sampled response, complete or cut short by an abort.

    `response_ids` starts with those of the request and includes the end-of-sequence token if the model emitted it.
    `rollout_log_probs[t]` is the log-probability of `response_ids[t]` under the distribution that was sampled from
    (after temperature), or, for a greedy response, under the model's own (temperature 1, all tokens).
    """

    request_id: str
    response_ids: list[int]  # [R]
    rollout_log_probs: list[float]  # [R]
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineSettings:
    """How an engine loads the model and samples from it."""

    dtype: str  # "float32", "bfloat16", ...
    max_model_tokens: int  # prompt + response
    max_response_tokens: int
    max_num_seqs: int  # sequences decoded at once
    temperature: float  # this and the next two: of requests without a sampling of their own
    top_p: float
    top_k: int  # -1: all
    memory_bytes: int  # for the KV cache on a CPU
    memory_utilization: float  # share of the device's memory on an accelerator
    threads: int  # CPU threads
    trust_remote_code: bool = False  # run Python files of the model folder
    tensor_parallel: int = 1  # processes, with a device each, that share each layer
    pipeline_parallel: int = 1  # times as many processes, each such group with some of the layers
    expert_parallel: bool = False  # processes hold whole experts, not rows of each
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's EngineArgs
    sleep_level: int | None = None  # of vLLM's sleep mode; None: `sleep` frees nothing

    @property
    def num_parts(self) -> int:
        """Processes of an engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class EnginePart:
    """The place of a process in an engine; all parts meet at the address, which is on the last one's node."""

    rank: int  # 0 is the owner's
    address: str  # file:///PATH or tcp://HOST:PORT; on a CPU the shared memory has the end of it as its name


@dataclass
class Row:
    """A response that an engine is still sampling."""

    request: GenerationRequest
    response_ids: list[int]  # those of the request, then the sampled ones
    rollout_log_probs: list[float]

    def response(self, reason: FinishReason) -> Response:
        """The response so far."""
        return Response(self.request.request_id, self.response_ids, self.rollout_log_probs, reason)


class Engine(ABC):
    """Continuous-batching text generation with replaceable weights.

    The owner calls `submit`, then `step` until the responses are returned. Not thread-safe: see engine_thread.
    """

    keeps_weights = False  # loading keeps views of a tensor after it asks for the next

    def __init__(
        self, settings: EngineSettings, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str]
    ) -> None:
        """`shapes` are of all tensors by Hugging Face name; `optional` tensors are copies of others."""
        from dapo_core.weight_transfer.proof import Loaded  # torch

        self.settings = settings
        self.policy_version = 0
        self.loaded = Loaded(0, {})  # by receive_weights
        self.inbox: Inbox | None = None  # of the weights that policy ranks send
        self._shapes = shapes
        self._optional = optional
        self._rows: dict[str, Row] = {}  # unfinished, by request id
        self._asleep: frozenset[str] = NOTHING  # what the device does not hold, as named in `turns`

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, each with a unique id; nothing is computed until `step`."""
        self._require_awake("take requests", OF_ENGINES)
        for request in requests:
            row = Row(request, list(request.response_ids), list(request.rollout_log_probs))
            self._queue(row)
            self._rows[request.request_id] = row

    @abstractmethod
    def step(self) -> list[Response]:
        """Decode one token of each running sequence, prefill, or queue either; returns what responses finished."""

    def num_unfinished(self) -> int:
        """Requests that are neither returned nor aborted."""
        return len(self._rows)

    def num_unfinished_tokens(self) -> int:
        """Response tokens of the unfinished requests, those they came with included; on any thread."""
        return sum(len(row.response_ids) for row in list(self._rows.values()))

    def abort(self, request_ids: Sequence[str]) -> list[Response]:
        """Stop unfinished requests and return their partial responses; other ids are ignored."""
        stopped = {name: self._rows.pop(name) for name in request_ids if name in self._rows}
        self._drop(stopped)
        return [row.response("abort") for row in stopped.values()]

    def receive_weights(self, policy_version: int) -> None:
        """Load the weights that policy ranks send, and record in `loaded` what the loader took.

        Takes all buckets, even if loading fails: the ranks and other engines wait for that. Raises RolloutError as
        `load_weights` does.
        """
        from dapo_core.weight_transfer.inbox import Delivery
        from dapo_core.weight_transfer.proof import Loaded

        assert self.inbox is not None, "the engine's process is not connected to the policy ranks"
        delivery = Delivery(self.inbox, self.keeps_weights)
        try:
            self.load_weights(delivery, policy_version)
        finally:
            delivery.drain()
            self.loaded = Loaded(self.policy_version, delivery.checksums)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace all weights (Hugging Face names, full tensors) and drop every cached prefix.

        Raises RolloutError while requests are unfinished, and for missing, unknown or misshapen tensors. Then the
        weights are a mixture, and the policy version is the old one.
        """
        self._require_idle("load weights")
        self._require_awake("load weights", {WEIGHTS})
        self._replace_weights(check_weights(weights, self._shapes, self._optional))
        self.policy_version = policy_version

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given (prompt_ids, response_ids) pairs at temperature 1, one list [R] each.

        Raises RolloutError while requests are unfinished.
        """
        self._require_idle("compute log-probs")
        self._require_awake("compute log-probs", OF_ENGINES)
        return self._log_probs(sequences)

    def sleep(self) -> None:
        """Give the device's memory back, that of the weights and of keys and values.

        Raises RolloutError while requests are unfinished. What slept at level 2 comes back without its contents:
        `load_weights` follows `wake`.
        """
        self._require_idle("sleep")
        self._sleep()
        self._asleep = OF_ENGINES

    def wake(self, what: Collection[str]) -> None:
        """Take memory again for the weights or for keys and values, as named in `turns`."""
        self._wake([name for name in (WEIGHTS, KV_CACHE) if name in what])
        self._asleep -= set(what)

    @abstractmethod
    def close(self) -> None:
        """Free the model and end everything the engine started."""

    @abstractmethod
    def _queue(self, row: Row) -> None:
        """Schedule a new row."""

    @abstractmethod
    def _drop(self, request_ids: Collection[str]) -> None:
        """Stop computing these rows."""

    @abstractmethod
    def _replace_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy in weights that were checked."""

    @abstractmethod
    def _sleep(self) -> None:
        """Free the device's memory, if the kind of device allows it."""

    @abstractmethod
    def _wake(self, what: Sequence[str]) -> None:
        """Take the memory again."""

    @abstractmethod
    def _log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """`log_probs` of an idle engine."""

    def _require_idle(self, what: str) -> None:
        if self._rows:
            raise RolloutError(
                f"cannot {what} while {len(self._rows)} requests are unfinished; finish or abort them first"
            )

    def _require_awake(self, what: str, needed: AbstractSet[str]) -> None:
        if away := self._asleep & needed:
            raise RolloutError(f"cannot {what} while the engine sleeps: {', '.join(sorted(away))} are not there")


def build_engine(
    kind: Literal["vllm", "hf"], model_path: str | Path, settings: EngineSettings, seed: int, device: str = "cpu"
) -> Engine:
    """An engine with the folder's weights. `device` is for Hugging Face; vLLM finds its own."""
    if kind == "vllm":
        from dapo_core.engines.vllm_engine import VllmEngine

        return VllmEngine(model_path, settings, seed)
    from dapo_core.engines.hf_engine import HuggingFaceEngine

    return HuggingFaceEngine(model_path, settings, device)


def check_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights; raises RolloutError at the first that does not fit, and at the end if some are missing.

    `shapes` holds every name the engine knows; `optional` ones may be missing.
    """
    missing = set(shapes) - set(optional)
    for name, tensor in weights:
        if name not in shapes:
            raise RolloutError(
                f"the engine's model has no tensor {name}; trainer and engine must hold the same architecture "
                "(model.path)"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise RolloutError(
                f"{name} has shape {tuple(tensor.shape)}, the engine's model needs {shapes[name]}; trainer "
                "and engine must hold the same architecture (model.path)"
            )
        missing.discard(name)
        yield name, tensor
    if missing:
        raise RolloutError(
            f"{len(missing)} of {len(shapes)} tensors are missing: {', '.join(sorted(missing)[:5])}"
        )


def read_eos_ids(model_path: str | Path) -> list[int]:
    """The token ids that end a response, from generation_config.json, else config.json; raises ModelError."""
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    raise ModelError(
        f"neither generation_config.json nor config.json in {model_path} has eos_token_id; without it every "
        "response runs to rollout.max_response_tokens; add the id to generation_config.json"
    )
