"""Identifies the weights behind a served name, so that an evaluation measures one model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval import InputError

# Models continue this in many ways, and it occurs in no chat template or training task.
_PROBE = "In a small village by the river there lived"
_PROBE_TOKENS = 8
_TOP_TOKENS = 5
# Mean difference in nats allowed for the same weights: bfloat16 has a resolution of 1/8 from 16 on.
_TOLERANCE = 0.15

HAS_FILES = "has_local_files"  # in the stored form
NO_LOGPROBS = "the server returns no log-probs"

# of the likeliest tokens at each position of a greedy continuation
LogProbs = tuple[dict[str, float], ...]


class ModelChangedError(InputError):
    """A server serves other weights than those that produced the answers so far."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late  # noticed only at the end: any answer may come from the other model


@dataclass(frozen=True)
class Weights:
    """The served model's folder and the log-probs of a fixed prompt; None if unknown."""

    root: str | None
    logprobs: LogProbs | None
    engine: str | None = None  # self-reported version and settings; no part of the identity

    @staticmethod
    def of(stored: Mapping[str, Any] | None) -> Weights | None:
        """Parse the form stored in settings.json, if any."""
        if not isinstance(stored, Mapping) or not stored:
            return None
        logprobs = stored.get("logprobs")
        return Weights(
            stored.get("root"), None if logprobs is None else tuple(logprobs), stored.get("engine")
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to the form stored in settings.json."""
        return asdict(self)

    @property
    def has_local_files(self) -> bool:
        """True if the model's folder is on this machine, so that the digest covers its files."""
        return (
            self.root is not None and next(Path(self.root).glob("*.safetensors"), None) is not None
        )

    def difference(self, other: Weights) -> str | None:
        """Describe how the other weights provably differ from these, or return None."""
        if self.root != other.root and None not in (self.root, other.root):
            return f"its model folder is {other.root}, not {self.root}"
        if self.logprobs is None:
            return None
        if other.logprobs is None:
            return "it returned log-probs of a fixed prompt before, but returns none now"
        distances = list(_distances(self.logprobs, other.logprobs))
        mean = sum(distances) / len(distances)
        if mean <= _TOLERANCE:
            return None
        return f"its log-probs of a fixed prompt differ by {mean:.2g} nats"


def describe_weights(stored: Mapping[str, Any] | None) -> str:
    """Describe what identifies the weights of an evaluation."""
    weights = Weights.of(stored)
    if weights is None:
        return "unknown"
    folder = f"folder {weights.root}" if weights.root else "no folder named"
    proof = "log-probs of a fixed prompt" if weights.logprobs else NO_LOGPROBS
    return f"{folder}, {proof}"


def show_same_weights(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    """True if the stored forms of two evaluations of one name or digest prove equal weights.

    The name alone proves nothing: a server may load other weights under it.
    """
    one, other = Weights.of(before), Weights.of(after)
    if before is None or after is None or one is None or other is None:
        return False
    if one.logprobs and other.logprobs:
        return one.difference(other) is None
    return bool(before.get(HAS_FILES) and after.get(HAS_FILES))


def probe_requests(model: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return (path, body) of the requests that may return log-probs, to be tried in turn."""
    common = {"model": model, "max_tokens": _PROBE_TOKENS, "temperature": 0.0}
    chat = {
        "messages": [{"role": "user", "content": _PROBE}],
        "logprobs": True,
        "top_logprobs": _TOP_TOKENS,
    }
    return (
        ("completions", {**common, "prompt": _PROBE, "logprobs": _TOP_TOKENS}),
        ("chat/completions", {**common, **chat}),
    )


def read_root(payload: Any, model: str) -> str | None:
    """Read the model's folder from a server's model list, if given."""
    try:
        entry = next(entry for entry in payload["data"] if entry["id"] == model)
        return encodable(str(entry["root"])) if entry.get("root") else None
    except (StopIteration, TypeError, KeyError, AttributeError):
        return None


def read_engine(payload: Any) -> str | None:
    """Read the `system_fingerprint` of a reply, such as "vllm-0.32.0-1a2b3c4d"."""
    engine = payload.get("system_fingerprint") if isinstance(payload, dict) else None
    return encodable(engine) if isinstance(engine, str) else None


def read_logprobs(payload: Any) -> LogProbs | None:
    """Read the log-probs from a reply to one of `probe_requests`, if any."""
    try:
        found = payload["choices"][0]["logprobs"]
        if "content" in found:  # chat
            places = [place.get("top_logprobs") or [place] for place in found["content"]]
            listed = [{top["token"]: top["logprob"] for top in place} for place in places]
        elif found.get("top_logprobs"):
            listed = found["top_logprobs"]
        else:  # chosen tokens only
            chosen = zip(found["tokens"], found["token_logprobs"], strict=True)
            listed = [{token: logprob} for token, logprob in chosen]
        positions = tuple(
            {encodable(token): round(float(logprob), 4) for token, logprob in position.items()}
            for position in listed
        )
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError):
        return None
    values = [value for position in positions for value in position.values()]
    return positions if positions and all(positions) and all(map(math.isfinite, values)) else None


def _distances(before: LogProbs, after: LogProbs) -> Iterator[float]:
    """Yield the difference in nats per token listed by either side, while continuations agree.

    A token that one side does not list has at most the lowest log-prob listed there. Sides that
    share less than half of their tokens have different weights, even if all tokens are about
    equally likely, as in an untrained model.
    """
    for one, other in zip(before, after, strict=False):
        shared = one.keys() & other.keys()
        least = 0.0 if 2 * len(shared) >= min(len(one), len(other)) else 2 * _TOLERANCE
        for token in one.keys() | other.keys():
            if token in shared:
                yield abs(one[token] - other[token])
            else:
                listed, rest = (one, other) if token in one else (other, one)
                yield max(least, listed[token] - min(rest.values()))
        if max(one, key=one.__getitem__) != max(other, key=other.__getitem__):
            return


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )
