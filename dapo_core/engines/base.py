"""What the trainer asks of an inference engine, whichever one runs underneath."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample. `seed` alone decides its randomness, not what else is in the engine's batch."""

    request_id: str
    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """One sampled response.

    `response_ids` includes the end-of-sequence token when the model emitted it. `rollout_log_probs[t]` is the
    log-probability of `response_ids[t]` under the distribution that was sampled from (after temperature).
    """

    request_id: str
    response_ids: list[int]  # [R]
    rollout_log_probs: list[float]  # [R]
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineSettings:
    """How an engine loads the model and samples."""

    dtype: str  # "float32", "bfloat16", ...
    max_model_tokens: int  # prompt + response
    max_response_tokens: int
    max_num_seqs: int  # sequences decoded at once
    temperature: float
    top_p: float
    top_k: int  # -1: off
    memory_bytes: int  # for the KV cache on a CPU
    memory_utilization: float  # share of the device's memory on an accelerator
    threads: int  # CPU threads


class Engine(Protocol):
    """Continuous-batching text generation with replaceable weights.

    The owner calls `submit`, then `step` until what it waits for came back. Not thread-safe.
    """

    policy_version: int

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed until `step`."""

    def step(self) -> list[Response]:
        """Decode one token for the running sequences (or prefill) and return the responses that finished."""

    def num_unfinished(self) -> int:
        """Requests submitted and neither returned nor aborted."""

    def abort(self, request_ids: Sequence[str]) -> int:
        """Drop unfinished requests; returns the number of response tokens they had already produced."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace all weights (Hugging Face names, full tensors) and drop every cached prefix.

        Raises RolloutError when requests are unfinished or a tensor does not fit.
        """

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of given (prompt_ids, response_ids) pairs at temperature 1, one list [R] each.

        The probe that proves that the engine holds the policy's weights; refused while requests are unfinished.
        """

    def close(self) -> None:
        """Free the model and everything the engine started."""
