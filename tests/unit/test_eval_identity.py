"""Two models under one name are told apart, and numerical noise is no other model."""

import json
import random

import pytest

from eval.requests.identity import LogProbs, Weights, describe_weights, read_logprobs, read_root

TRAINED: LogProbs = (
    {" a": -1.0, " an": -1.2, " the": -2.4, " two": -3.3, " many": -4.0},
    {" young": -0.9, " man": -1.5, " little": -2.0, " boy": -2.9, " poor": -3.4},
)


def noisy(logprobs: LogProbs, nats: float) -> LogProbs:
    rng = random.Random(0)
    return tuple(
        {token: value + rng.uniform(-nats, nats) for token, value in place.items()}
        for place in logprobs
    )


def test_bfloat16_noise_is_not_another_model() -> None:
    weights = Weights("models/a", TRAINED)
    assert weights.difference(Weights("models/a", noisy(TRAINED, 0.25))) is None
    # The greedy continuations diverge after one token; the rest is not compared.
    close = ({**TRAINED[0], " a": -1.15, " an": -1.1}, {" old": -0.1})
    assert weights.difference(Weights("models/a", close)) is None
    assert Weights("models/a", None).difference(weights) is None
    assert Weights(None, TRAINED).difference(weights) is None  # the list of models failed


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Weights("models/b", TRAINED), "its model folder is models/b, not models/a"),
        (Weights("models/a", noisy(TRAINED, 1.2)), "its log-probs of a fixed prompt differ by 0"),
        (Weights("models/a", None), "it returned log-probs of a fixed prompt before"),
    ],
)
def test_other_weights_are_noticed(other: Weights, difference: str) -> None:
    assert str(Weights("models/a", TRAINED).difference(other)).startswith(difference)


def test_untrained_models_with_equally_likely_tokens_are_told_apart() -> None:
    one, other = ({f"{name}{n}": -6.9 for n in range(5)} for name in "ab")
    assert "differ" in str(Weights(None, (one,)).difference(Weights(None, (other,))))


def test_weights_are_stored_and_described() -> None:
    weights = Weights("models/a", TRAINED)
    assert Weights.of(json.loads(json.dumps(weights.to_json()))) == weights
    assert describe_weights(weights.to_json()) == "folder models/a, log-probs of a fixed prompt"
    assert (
        describe_weights({"root": None, "logprobs": None})
        == "no folder named, the server returns no log-probs"
    )
    assert describe_weights(None) == "unknown"


def test_log_probs_of_chosen_tokens_only_are_read() -> None:
    chosen = ({" a": -0.5}, {" b": -1.0})
    places = [
        {"token": token, "logprob": value} for place in chosen for token, value in place.items()
    ]
    text = {"tokens": [" a", " b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": None}
    for logprobs in ({"content": places}, text):
        assert read_logprobs({"choices": [{"logprobs": logprobs}]}) == chosen


@pytest.mark.parametrize(
    "payload", [None, {}, {"choices": []}, {"choices": [{"logprobs": None}]}, [1], "text"]
)
def test_a_reply_without_log_probs_is_none(payload: object) -> None:
    assert read_logprobs(payload) is None
    assert read_root(payload, "m") is None
    for value in (float("nan"), float("-inf"), "x"):
        assert read_logprobs({"choices": [{"logprobs": {"top_logprobs": [{" a": value}]}}]}) is None
