"""The routers of mixtures of experts, and recorded routing: the experts of each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

# Routers of transformers that return logits, scores and experts, the scores from the softmax of all
# logits. transformers has no public API for them; test_private_parts.py guards the results.
ROUTERS = (
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3VLMoeTextTopKRouter",
)
Experts = NDArray[np.uint8]  # [tokens, layers, K]: of each prompt+response token
UNKNOWN_EXPERT = 255  # for each expert of a token whose routing is not recorded
NO_ROUTING: Experts = np.empty((0, 0, 0), np.uint8)  # of a whole sequence


def routers_of(model: nn.Module) -> list[Any]:
    """Return the model's routers in layer order; empty for dense and for other models."""
    return [module for module in model.modules() if type(module).__name__ in ROUTERS]


@functools.cache
def returns_probabilities(forward: Callable[..., Any]) -> bool:
    """True if a router's forward returns probabilities as logits, as in transformers 5.5."""
    import torch

    uniform = SimpleNamespace(hidden_dim=1, weight=torch.zeros(2, 1), top_k=1, norm_topk_prob=True)
    return bool(forward(uniform, torch.zeros(1, 1))[0].any())


def unknown(num_tokens: int, shape: Sequence[int]) -> Experts:
    """Return unknown experts of tokens with `shape` [layers, K]."""
    return np.full((num_tokens, *shape), UNKNOWN_EXPERT, np.uint8)


def first_open(earlier: Experts) -> int:
    """Return the number of tokens whose experts stay; an interrupted last one was not computed."""
    return max(len(earlier) - 1, 0)


class RoutingRecord:
    """The experts of a sequence's tokens as an engine computes them, in any number of parts."""

    def __init__(self, earlier: Experts = NO_ROUTING) -> None:
        """`earlier`: recorded before an interruption. It stays, except for its last token, which
        had not been computed."""
        self._num_fixed = first_open(earlier)
        self._shape = earlier.shape[1:]
        self._bytes = bytearray(earlier[: self._num_fixed].tobytes())

    def __len__(self) -> int:
        return len(self._bytes) // self._width if self._bytes else 0

    @property
    def _width(self) -> int:
        return self._shape[0] * self._shape[1]

    def put(self, first: int, experts: Experts) -> None:
        """Record the experts of tokens from position `first` on."""
        skipped = max(self._num_fixed - first, 0)
        experts, first = experts[skipped:], first + skipped
        if not len(experts):
            return
        self._shape = experts.shape[1:]
        if (gap := first - len(self)) > 0:
            self._bytes += unknown(gap, self._shape).tobytes()
        start = first * self._width
        self._bytes[start : start + experts.size] = experts.tobytes()

    def read(self, num_tokens: int) -> Experts:
        """Return the experts of the first tokens, unknown ones where none are recorded."""
        if not self._bytes:
            return NO_ROUTING
        found = np.frombuffer(bytes(self._bytes), np.uint8).reshape(-1, *self._shape)
        missing = unknown(max(num_tokens - len(found), 0), self._shape)
        return np.concatenate([found[:num_tokens], missing])
