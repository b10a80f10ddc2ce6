"""All engines on a tiny model: sampling, log-probs, weight updates, abort and sleep."""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_core.engines.base import Engine, GenerationRequest, LogProbs, Response
from dapo_core.engines.factory import build_engine
from dapo_core.errors import RolloutError
from dapo_core.model.inputs import ModelInput
from dapo_core.model.sampling import GREEDY, Sampling
from tests.tiny_models import tiny_engine_settings
from tests.two_processes import engine_of_two_processes

MAX_RESPONSE_TOKENS = 24
MAX_MODEL_TOKENS = 96
SETTINGS = replace(
    tiny_engine_settings(),
    max_model_tokens=MAX_MODEL_TOKENS,
    max_response_tokens=MAX_RESPONSE_TOKENS,
    max_num_seqs=16,
    memory_bytes=64 * 1024**2,
)
END = 1  # `<|end|>` of the tiny tokenizer
NUM_REQUESTS = 40
PARTS = {
    "vllm of two processes": {"tensor_parallel": 2},
    "vllm of two stages": {"pipeline_parallel": 2},
}
SPECULATING: dict[str, Any] = {"vllm with drafts": {"speculation": "ngram"}}
# How tokens are drawn does not depend on the number of an engine's processes.
in_one_process = pytest.mark.parametrize(
    "shared_engine", ["hf", "vllm", *SPECULATING], indirect=True
)


@pytest.fixture(scope="module", params=["hf", "vllm", *SPECULATING, *PARTS])
def shared_engine(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if request.param in PARTS:
        settings = replace(SETTINGS, **PARTS[request.param])
        with engine_of_two_processes(
            model_path, settings, tmp_path_factory.mktemp("parts")
        ) as first:
            yield first
        return
    kind, _, _ = request.param.partition(" ")
    settings = replace(SETTINGS, **SPECULATING.get(request.param, {}))
    engine = build_engine(kind, model_path, settings, seed=0)
    yield engine
    engine.close()
    # of numba, which proposes drafts: vLLM's scan of modules fails on it at the next engine's start
    sys.modules.pop("llvmlite.binding.ffi", None)


@pytest.fixture
def engine(shared_engine: Engine, model_path: Path) -> Iterator[Engine]:
    """The shared engine, reset afterwards: idle, initial weights, default settings."""
    yield shared_engine
    unfinished = [f"{number}" for number in range(NUM_REQUESTS)]
    shared_engine.abort(unfinished)
    assert shared_engine.num_unfinished() == 0
    used = shared_engine.settings
    parts = {"tensor_parallel": used.tensor_parallel, "pipeline_parallel": used.pipeline_parallel}
    shared_engine.settings = replace(SETTINGS, **parts)
    shared_engine.load_weights(load_model(model_path).named_parameters(), policy_version=0)


def load_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def decode(engine: Engine, num_tokens: int) -> None:
    """Step until the responses have `num_tokens` tokens in total; fails if one finishes."""
    while engine.num_unfinished_tokens() < num_tokens:
        assert engine.step() == []
    assert engine.num_unfinished_tokens() == num_tokens


def make_requests(num_requests: int = NUM_REQUESTS) -> list[GenerationRequest]:
    """Make two requests per prompt of 1 to 60 tokens."""
    numbers = random.Random(3)
    prompts = [
        ModelInput(tuple(numbers.randrange(4, 300) for _ in range(numbers.randrange(1, 60))))
        for _ in range((num_requests + 1) // 2)
    ]
    return [
        GenerationRequest(str(number), prompts[number // 2], seed=1000 + number)
        for number in range(num_requests)
    ]


def finish(engine: Engine) -> dict[str, Response]:
    responses: dict[str, Response] = {}
    while engine.num_unfinished():
        responses.update({response.request_id: response for response in engine.step()})
    return responses


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Response]:
    engine.submit(requests)
    responses = finish(engine)
    assert set(responses) == {request.request_id for request in requests}
    return responses


def tokens_of(responses: dict[str, Response]) -> dict[str, list[int]]:
    return {name: response.response_ids.tolist() for name, response in responses.items()}


def reference_log_probs(
    model: Any, prompt: ModelInput, response_ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Compute log-probs of the response with one forward pass over the whole sequence."""
    token_ids = torch.tensor([[*prompt.token_ids, *response_ids]])
    with torch.no_grad():
        log_probs = (model(token_ids).logits[0] / temperature).log_softmax(dim=-1)
    first = len(prompt.token_ids)
    return log_probs[first - 1 : -1].gather(1, token_ids[0, first:].unsqueeze(-1)).squeeze(-1)


def largest_difference(given: Sequence[float] | LogProbs, expected: torch.Tensor) -> float:
    assert len(given) == len(expected) > 0
    return (torch.tensor(given) - expected).abs().max().item()


def require_equal(given: Sequence[float] | LogProbs, expected: torch.Tensor) -> None:
    assert largest_difference(given, expected) < 1e-4


def end_bias(model: Any) -> Any:
    """Make the end token likely, so that responses end at different lengths."""
    # Tied embeddings: scaling the row scales its logit, so about half of the contexts prefer it.
    with torch.no_grad():
        model.get_input_embeddings().weight[END] *= 3.0
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_responses_stop_correctly_and_have_the_sampling_log_probs(engine, model_path, temperature):
    """40 requests of different lengths share 16 rows; half of them are submitted later."""
    engine.settings = replace(SETTINGS, temperature=temperature)
    model = end_bias(load_model(model_path))
    engine.load_weights(model.named_parameters(), policy_version=1)
    requests = make_requests()
    engine.submit(requests[:20])
    responses = {response.request_id: response for _ in range(9) for response in engine.step()}
    engine.submit(requests[20:])
    responses |= finish(engine)
    assert len(responses) == NUM_REQUESTS
    assert {response.finish_reason for response in responses.values()} == {"stop", "length"}
    for request in requests:
        response = responses[request.request_id]
        expected = reference_log_probs(model, request.prompt, response.response_ids, temperature)
        require_equal(response.rollout_log_probs, expected)
        assert END not in response.response_ids[:-1]
        assert (response.response_ids[-1] == END) == (response.finish_reason == "stop")
        assert response.finish_reason == "stop" or len(response.response_ids) == MAX_RESPONSE_TOKENS


def test_log_probs_equal_a_plain_forward_pass(engine, model_path):
    model = load_model(model_path)
    longest = tuple(range(4, 4 + MAX_MODEL_TOKENS - 1))
    sequences = [
        (ModelInput((5, 6, 7)), [8, 9]),
        (ModelInput((200,)), [4]),
        (ModelInput(tuple(range(10, 60))), list(range(90, 110))),
        (ModelInput(longest[:70]), longest[70:]),
    ]
    for sequence, given in zip(sequences, engine.log_probs(sequences), strict=True):
        require_equal(given, reference_log_probs(model, *sequence))


def test_a_response_depends_on_its_seed_and_not_on_the_batch(engine):
    requests = make_requests()
    together = tokens_of(run(engine, requests))
    for request in requests[:6]:
        alone = tokens_of(run(engine, [request]))
        assert alone[request.request_id] == together[request.request_id]
    other_seed = tokens_of(run(engine, [replace(requests[0], seed=77)]))
    assert other_seed["0"] != together["0"]
    # siblings: same prompt, different seeds
    assert together["0"] != together["1"]


@in_one_process
def test_responses_follow_the_models_distribution(engine, model_path):
    """The ten most likely first tokens, each within 4.5 standard deviations of 1000 samples."""
    engine.settings = replace(SETTINGS, max_response_tokens=1)
    prompt = ModelInput((5, 6, 7, 8))
    with torch.no_grad():
        logits = load_model(model_path)(torch.tensor([prompt.token_ids])).logits
    probs = logits[0, -1].softmax(dim=-1)
    num_samples = 1000
    counts = [0] * len(probs)
    for response in run(
        engine, [GenerationRequest(str(i), prompt, seed=i) for i in range(num_samples)]
    ).values():
        counts[response.response_ids[0]] += 1
    for token in probs.topk(10).indices.tolist():
        p = probs[token].item()
        deviation = (num_samples * p * (1 - p)) ** 0.5
        assert abs(counts[token] - num_samples * p) < 4.5 * deviation


@pytest.mark.parametrize("shared_engine", [*SPECULATING], indirect=True)
def test_drafts_leave_the_distribution_as_it_is_and_save_passes(engine, model_path):
    """At a low temperature, at which the model repeats itself now and then."""
    temperature, model = 0.3, load_model(model_path)
    engine.settings = replace(SETTINGS, temperature=temperature)
    engine.num_decoded = engine.num_passes = 0
    prompts = [ModelInput((token, 7, token, 7)) for token in range(10, 50)]
    requests = [GenerationRequest(str(n), prompts[n % 40], seed=n) for n in range(400)]
    surplus = variance = 0.0
    for response in run(engine, requests).values():
        prompt = prompts[int(response.request_id) % 40]
        ids = torch.tensor([[*prompt.token_ids, *response.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
        log_probs = logits.log_softmax(dim=-1)
        mean = (log_probs.exp() * log_probs).sum(dim=-1)
        chosen = log_probs.gather(1, ids[0, len(prompt.token_ids) :, None]).squeeze(-1)
        require_equal(response.rollout_log_probs, chosen)
        surplus += (chosen - mean).sum().item()
        variance += ((log_probs.exp() * log_probs**2).sum(dim=-1) - mean**2).sum().item()
    assert abs(surplus) < 4.5 * variance**0.5
    assert engine.num_decoded > 1.01 * engine.num_passes
    assert torch.get_num_threads() == 1, "numba, which proposes drafts, has not changed it"


@in_one_process
def test_greedy_and_sampled_responses_can_share_a_batch(engine, model_path):
    """24 sampled and 8 greedy requests in 16 rows give the same responses alone and mixed."""
    engine.settings = replace(SETTINGS, temperature=0.7, top_k=50, top_p=0.9)
    model = end_bias(load_model(model_path))
    engine.load_weights(model.named_parameters(), policy_version=1)
    requests = make_requests(32)
    sampled = [request for number, request in enumerate(requests) if number % 4]
    greedy = [replace(request, sampling=GREEDY) for request in requests[::4]]
    alone = run(engine, sampled) | run(engine, greedy)
    mixed = run(
        engine, [greedy[i // 4] if i % 4 == 0 else request for i, request in enumerate(requests)]
    )
    assert tokens_of(mixed) == tokens_of(alone)
    for request in greedy:
        response, prompt_ids = mixed[request.request_id], torch.tensor([request.prompt.token_ids])
        expected = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=False,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            eos_token_id=END,
            pad_token_id=0,
        )
        assert response.response_ids.tolist() == expected[0, prompt_ids.shape[1] :].tolist()
        at_temperature_one = reference_log_probs(model, request.prompt, response.response_ids)
        require_equal(response.rollout_log_probs, at_temperature_one)
    assert {mixed[request.request_id].finish_reason for request in greedy} == {"stop", "length"}
    engine.settings = SETTINGS
    own = [replace(request, sampling=Sampling(0.7, 0.9, 50)) for request in sampled]
    assert tokens_of(run(engine, own + greedy)) == tokens_of(alone)  # overrides the engine's


def test_new_weights_change_log_probs_and_clear_the_prefix_cache(engine, model_path):
    requests = make_requests(2)
    # two full cache blocks
    requests = [replace(request, prompt=ModelInput(tuple(range(4, 68)))) for request in requests]
    before = run(engine, requests)
    model = load_model(model_path)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)
        model.model.embed_tokens.weight[10:].mul_(1.5)  # also the tied output head
    engine.load_weights(model.named_parameters(), policy_version=7)
    assert engine.policy_version == 7
    after = run(engine, requests)
    old_model = load_model(model_path)
    for request in requests:
        response = after[request.request_id]
        old = reference_log_probs(old_model, request.prompt, response.response_ids)
        new = reference_log_probs(model, request.prompt, response.response_ids)
        require_equal(response.rollout_log_probs, new)
        assert largest_difference(response.rollout_log_probs, old) > 0.01
    sequences = [(request.prompt, before[request.request_id].response_ids) for request in requests]
    for sequence, given in zip(sequences, engine.log_probs(sequences), strict=True):
        require_equal(given, reference_log_probs(model, *sequence))


@pytest.mark.parametrize("shared_engine", ["vllm"], indirect=True)
def test_siblings_share_cached_prompt_blocks(engine, monkeypatch):
    cached: dict[str, int] = {}
    step = engine._engine.step

    def watched():
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(engine._engine, "step", watched)
    # two blocks of 32 and a remainder
    prompt = ModelInput(tuple(5 + index % 50 for index in range(70)))
    engine.submit([GenerationRequest(str(seed), prompt, seed) for seed in range(4)])
    while engine.num_unfinished():
        engine.step()
    assert cached == {"0": 0, "1": 64, "2": 64, "3": 64}


def test_abort_returns_partial_responses_and_leaves_others_unchanged(engine):
    requests = make_requests(4)
    undisturbed = run(engine, requests)
    engine.submit(requests)
    decode(engine, 4 * 3)  # four rows of three tokens
    partial = {response.request_id: response for response in engine.abort(["0", "1", "unknown"])}
    assert set(partial) == {"0", "1"}
    for name, response in partial.items():
        assert response.finish_reason == "abort"
        assert response.response_ids.tolist() == undisturbed[name].response_ids[:3].tolist()
        assert response.rollout_log_probs == pytest.approx(
            undisturbed[name].rollout_log_probs[:3], abs=1e-4
        )
    assert engine.num_unfinished() == 2
    rest = finish(engine)
    assert tokens_of(rest) == {name: undisturbed[name].response_ids.tolist() for name in ("2", "3")}
    engine.submit(requests[:1])
    (nothing,) = engine.abort(["0"])  # before anything has been computed
    assert (len(nothing.response_ids), len(nothing.rollout_log_probs)) == (0, 0)
    assert nothing.finish_reason == "abort"
    assert engine.step() == []


def test_an_aborted_response_resumes_with_new_weights(engine, model_path):
    """Log-probs come from the weights that sampled; the length limit counts all tokens."""
    old_model, new_model = load_model(model_path), end_bias(load_model(model_path))
    requests = make_requests(16)[8:]
    engine.submit(requests)
    decode(engine, 8 * 5)
    partial = {
        response.request_id: response
        for response in engine.abort([each.request_id for each in requests])
    }
    engine.load_weights(new_model.named_parameters(), policy_version=1)
    resumed = [
        replace(
            request,
            response_ids=partial[request.request_id].response_ids,
            rollout_log_probs=partial[request.request_id].rollout_log_probs,
        )
        for request in requests
    ]
    engine.submit(resumed)
    assert engine.num_unfinished_tokens() == 8 * 5
    responses = finish(engine)
    assert {response.finish_reason for response in responses.values()} == {"stop", "length"}
    for request in requests:
        response = responses[request.request_id]
        so_far = partial[request.request_id].response_ids
        assert response.response_ids[:5].tolist() == so_far.tolist()
        old = reference_log_probs(old_model, request.prompt, response.response_ids)
        new = reference_log_probs(new_model, request.prompt, response.response_ids)
        require_equal(response.rollout_log_probs, torch.cat([old[:5], new[5:]]))
        assert len(response.response_ids) <= MAX_RESPONSE_TOKENS
        if response.finish_reason == "length":
            assert len(response.response_ids) == MAX_RESPONSE_TOKENS


@in_one_process
def test_a_resumed_response_does_not_repeat_its_random_numbers(engine, model_path):
    """Every token is equally likely at every position, so equal numbers give equal tokens."""
    model = load_model(model_path)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0
    engine.load_weights(model.named_parameters(), policy_version=1)
    requests = make_requests(8)
    whole = run(engine, requests)
    halves = {name: response.response_ids[:8] for name, response in whole.items()}
    halves = {name: half for name, half in halves.items() if len(half) == 8}  # not ended by chance
    assert len(halves) >= 4
    log_probs = np.full(8, -1, np.float32)
    resumed = [
        replace(each, response_ids=halves[each.request_id], rollout_log_probs=log_probs)
        for each in requests
        if each.request_id in halves
    ]
    first, second = run(engine, resumed), run(engine, resumed)
    assert tokens_of(first) == tokens_of(second)  # the seed decides
    for name, response_ids in tokens_of(first).items():
        assert response_ids[:8] == halves[name].tolist()
        assert response_ids[8:16] != halves[name].tolist()


def test_wrong_weights_are_reported_and_a_complete_update_recovers(engine, model_path):
    weights = dict(load_model(model_path).named_parameters())
    norm = "model.norm.weight"
    with pytest.raises(RolloutError, match=r"1 of \d+ tensors are missing: model.norm.weight"):
        engine.load_weights([(name, tensor) for name, tensor in weights.items() if name != norm], 1)
    with pytest.raises(RolloutError, match=r"no tensor model.extra.weight"):
        engine.load_weights([*weights.items(), ("model.extra.weight", torch.zeros(2))], 1)
    with pytest.raises(
        RolloutError,
        match=r"model.norm.weight has shape \(63,\), but the engine's model needs \(64,\)",
    ):
        engine.load_weights([*weights.items(), (norm, torch.zeros(63))], 1)
    assert engine.policy_version == 0
    tied_head = ("lm_head.weight", weights["model.embed_tokens.weight"])  # optional
    prompt = ModelInput((5, 6, 7))
    expected = reference_log_probs(load_model(model_path), prompt, [8, 9])
    for version, whole in ((2, weights.items()), (3, [*weights.items(), tied_head])):
        engine.load_weights(whole, version)
        require_equal(engine.log_probs([(prompt, [8, 9])])[0], expected)


def test_weights_and_log_probs_are_refused_while_requests_are_unfinished(engine):
    engine.submit(make_requests(1))
    with pytest.raises(RolloutError, match="cannot load weights while 1 requests are unfinished"):
        engine.load_weights([], 1)
    with pytest.raises(
        RolloutError, match="cannot compute log-probs while 1 requests are unfinished"
    ):
        engine.log_probs([(ModelInput((5,)), [6])])


def test_a_sleeping_engine_refuses_work_and_wakes_with_new_weights(engine, model_path):
    requests = make_requests(4)
    before = run(engine, requests)
    engine.settings = replace(engine.settings, sleep_level=2)
    engine.submit(requests[:1])
    with pytest.raises(RolloutError, match="cannot sleep while 1 requests are unfinished"):
        engine.sleep()
    finish(engine)
    engine.sleep()
    with pytest.raises(
        RolloutError, match="cannot accept requests while the engine sleeps: kv_cache, weights"
    ):
        engine.submit(requests)
    with pytest.raises(
        RolloutError, match="cannot load weights while the engine sleeps: weights not loaded"
    ):
        engine.load_weights([], 1)
    engine.wake({"weights"})
    model = load_model(model_path)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    engine.load_weights(model.named_parameters(), 1)
    with pytest.raises(
        RolloutError, match="cannot compute log-probs while the engine sleeps: kv_cache not loaded"
    ):
        engine.log_probs([(ModelInput((5,)), [6])])
    engine.wake({"kv_cache"})
    after = run(engine, requests)
    for request in requests:
        response = after[request.request_id]
        expected = reference_log_probs(model, request.prompt, response.response_ids)
        assert largest_difference(response.rollout_log_probs, expected) < 1e-4
    assert tokens_of(after) != tokens_of(before)


def test_hf_refuses_memory_below_one_sequence(model_path: Path) -> None:
    # 2 (keys, values) x 2 layers x 1 head x 32 x 4 bytes x 96 tokens = 49152 bytes
    with pytest.raises(
        RolloutError, match=r"96 tokens needs 49152 bytes of cache, but only 49151 are free"
    ):
        build_engine("hf", model_path, replace(SETTINGS, memory_bytes=49151), seed=0)
