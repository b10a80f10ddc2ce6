"""Which weights a server serves, as far as it shows: an evaluation is of one model, whatever its name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eval import InputError

# A beginning that models continue in many ways, and that no chat template or training task has in it.
_PROBE = "In a small village by the river there lived"
_PROBE_TOKENS = 8
_TOP_TOKENS = 5
# Nats by which log-probs of the same weights may differ on average: bfloat16 has multiples of 1/8 from 16 on.
_TOLERANCE = 0.15

NO_LOGPROBS = "the server gives no log-probs"

LogProbs = tuple[dict[str, float], ...]  # of the likeliest tokens at each position of a greedy continuation


class ModelChangedError(InputError):
    """A server serves other weights than those that gave the answers so far."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late  # noticed only at the end: any answer since the start may be the other model's


@dataclass(frozen=True)
class Weights:
    """The served model's folder and the log-probs of a fixed prompt; None for what the server does not say."""

    root: str | None
    logprobs: LogProbs | None
    engine: str | None = None  # its version and settings in its own words; another one may serve the same weights

    @staticmethod
    def of(stored: Mapping[str, Any] | None) -> Weights | None:
        """From settings.json; None where it has none."""
        if not isinstance(stored, Mapping) or not stored:
            return None
        logprobs = stored.get("logprobs")
        return Weights(stored.get("root"), None if logprobs is None else tuple(logprobs), stored.get("engine"))

    def to_json(self) -> dict[str, Any]:
        """As settings.json holds it."""
        return asdict(self)

    def difference(self, other: Weights) -> str | None:
        """How the other weights show that they are not these; None when they do not."""
        if self.root != other.root:
            return f"its model folder is {other.root}, not {self.root}"
        if self.logprobs is None:
            return None
        if other.logprobs is None:
            return "it gave log-probs of a fixed prompt before, and gives none now"
        distances = list(_distances(self.logprobs, other.logprobs))
        mean = sum(distances) / len(distances)
        if mean <= _TOLERANCE:
            return None
        return f"its log-probs of a fixed prompt differ by {mean:.2g} nats"


def describe_weights(stored: Mapping[str, Any] | None) -> str:
    """What identifies the weights of an evaluation, for a reader of settings.json."""
    weights = Weights.of(stored)
    if weights is None:
        return "unknown: measured by an earlier version"
    folder = f"folder {weights.root}" if weights.root else "no folder named"
    proof = "log-probs of a fixed prompt" if weights.logprobs else NO_LOGPROBS
    return f"{folder}, {proof}"


def probe_requests(model: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """(path, body) of the requests that may give log-probs, to be tried in turn."""
    common = {"model": model, "max_tokens": _PROBE_TOKENS, "temperature": 0.0}
    chat = {"messages": [{"role": "user", "content": _PROBE}], "logprobs": True, "top_logprobs": _TOP_TOKENS}
    return (
        ("completions", {**common, "prompt": _PROBE, "logprobs": _TOP_TOKENS}),
        ("chat/completions", {**common, **chat}),
    )


def read_root(payload: Any, model: str) -> str | None:
    """The folder of the model in a server's list; None where it names none."""
    try:
        entry = next(entry for entry in payload["data"] if entry["id"] == model)
        return _text(str(entry["root"])) if entry.get("root") else None
    except (StopIteration, TypeError, KeyError, AttributeError):
        return None


def read_engine(payload: Any) -> str | None:
    """The `system_fingerprint` of an answer, such as "vllm-0.32.0-1a2b3c4d"."""
    engine = payload.get("system_fingerprint") if isinstance(payload, dict) else None
    return _text(engine) if isinstance(engine, str) else None


def read_logprobs(payload: Any) -> LogProbs | None:
    """The log-probs in an answer to one of `probe_requests`; None when it has none."""
    try:
        found = payload["choices"][0]["logprobs"]
        if "content" in found:  # of a chat
            places = [place.get("top_logprobs") or [place] for place in found["content"]]
            listed = [{top["token"]: top["logprob"] for top in place} for place in places]
        elif found.get("top_logprobs"):
            listed = found["top_logprobs"]
        else:  # of the chosen tokens alone
            chosen = zip(found["tokens"], found["token_logprobs"], strict=True)
            listed = [{token: logprob} for token, logprob in chosen]
        positions = tuple(
            {_text(token): round(float(logprob), 4) for token, logprob in position.items()} for position in listed
        )
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        return None
    values = [value for position in positions for value in position.values()]
    return positions if positions and all(positions) and all(map(math.isfinite, values)) else None


def _distances(before: LogProbs, after: LogProbs) -> Iterator[float]:
    """Nats between the two sides, for each token that either lists, up to where their continuations part.

    A token that one side does not list has at most the log-prob of that side's last. Lists that share less than
    half of their tokens are of different weights, even if all tokens are about as likely, as before any training.
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


def _text(value: str) -> str:
    """Without lone surrogates, which UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode()
