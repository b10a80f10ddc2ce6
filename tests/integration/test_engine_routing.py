"""The routing that engines record: the experts of each token when it was computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo_core.engines.base import Engine, GenerationRequest, Response
from dapo_core.engines.factory import build_engine
from dapo_core.engines.vllm_routing import RecordedRouting
from dapo_core.model.folder import SINGLE_FILE
from dapo_core.model.inputs import ModelInput
from dapo_core.model.routers import UNKNOWN_EXPERT, Experts, routers_of
from tests.tiny_models import build_tiny, tiny_engine_settings

SETTINGS = replace(tiny_engine_settings(), max_response_tokens=24, records_routing=True)
SHARED = [5 + 7 * number % 200 for number in range(40)]  # more than vLLM's block of 32 tokens
PROMPTS = [ModelInput((*SHARED, *range(20, 22 + number))) for number in range(3)]
SIBLINGS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("moe")
    return [
        build_tiny(folder / str(seed), "qwen3_moe", seed=seed, num_experts=8) for seed in (3, 4)
    ]


@pytest.fixture(params=["hf", "vllm"])
def engine(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[Engine]:
    engine = build_engine(request.param, models[0], SETTINGS, seed=0)
    yield engine
    engine.close()


def _requests() -> list[GenerationRequest]:
    """Siblings, whose names are like those of a training; one group id is negative."""
    return [
        GenerationRequest(f"{number - 1}/{sample}", prompt, seed=10 * number + sample)
        for number, prompt in enumerate(PROMPTS)
        for sample in range(SIBLINGS)
    ]


def _finish(engine: Engine) -> dict[str, Response]:
    found: dict[str, Response] = {}
    while engine.num_unfinished():
        found |= {response.request_id: response for response in engine.step()}
    return found


def _expected(path: Path, token_ids: Sequence[int]) -> Experts:
    """The sorted experts of the tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path)
    chosen: list[torch.Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[2]))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return np.sort(torch.stack(chosen, dim=1).numpy().astype(np.uint8), axis=-1)


def _require_routing(
    responses: Mapping[str, Response], path: Path, first: Mapping[str, int] | None = None
) -> None:
    """From token `first` on (0), every token has its experts; only the last was not computed."""
    for request in _requests():
        response = responses[request.request_id]
        if not len(response.response_ids):  # aborted before it began
            assert response.routing.size == 0
            continue
        expected = _expected(path, [*request.prompt.token_ids, *response.response_ids.tolist()])
        assert response.routing.shape == expected.shape
        assert (response.routing[-1] == UNKNOWN_EXPERT).all()
        start = first[request.request_id] if first else 0
        found = np.sort(response.routing[start:-1], axis=-1)
        assert np.array_equal(found, expected[start:-1])


def test_siblings_share_the_routing_of_a_prompt_in_the_prefix_cache(
    engine: Engine, models: list[Path]
) -> None:
    """Also of the part that a probe or another prompt computed first."""
    engine.log_probs([(PROMPTS[0], [5, 6])])
    engine.submit(_requests())
    _require_routing(_finish(engine), models[0])
    recorder: Any = getattr(engine, "_routing", None)
    if isinstance(recorder, RecordedRouting):  # vLLM computes no cached block again
        recorder.forget_prefixes()
        engine.submit(_requests()[:1])
        (response,) = _finish(engine).values()
        assert (response.routing[:32] == UNKNOWN_EXPERT).all()
        assert (response.routing[32:-1] < 8).all()


def test_a_resumed_response_keeps_the_routing_of_the_weights_that_sampled_its_tokens(
    engine: Engine, models: list[Path]
) -> None:
    engine.submit(_requests())
    while engine.num_unfinished_tokens() < 10 * SIBLINGS:
        assert engine.step() == []
    names = [request.request_id for request in _requests()]
    parts = {response.request_id: response for response in engine.abort(names)}
    weights = load_file(models[1] / SINGLE_FILE)
    engine.load_weights(weights.items(), policy_version=1)
    resumed = [
        replace(
            request,
            response_ids=parts[request.request_id].response_ids,
            rollout_log_probs=parts[request.request_id].rollout_log_probs,
            routing=parts[request.request_id].routing,
        )
        for request in _requests()
    ]
    engine.submit(resumed)
    responses = _finish(engine)
    _require_routing(parts, models[0])
    ends = {name: max(len(part.routing) - 1, 0) for name, part in parts.items()}
    for name, part in parts.items():
        kept = responses[name].routing[: ends[name]]
        assert kept.tobytes() == part.routing[:-1].tobytes()
    _require_routing(responses, models[1], ends)


def test_nothing_is_recorded_unless_it_is_replayed(models: list[Path]) -> None:
    engine = build_engine("hf", models[0], replace(SETTINGS, records_routing=False), seed=0)
    engine.submit(_requests()[:1])
    (response,) = _finish(engine).values()
    assert response.routing.size == 0
    engine.close()
