"""The routing that vLLM returns with its outputs becomes a response's, from vLLM's own classes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from dapo_core.engines.vllm_engine import rank_of_part
from dapo_core.engines.vllm_routing import ReturnedRouting, routed_layers
from dapo_core.model.routers import UNKNOWN_EXPERT, Experts

LAYERS, ROUTED, K = 3, [0, 2], 2  # the second layer is dense: vLLM returns zeros for it
PROMPT = [5, 6, 7]


def _rows(first: int, end: int) -> np.ndarray:
    """What vLLM returns for the tokens: experts 2 t + layer and t, for token t."""
    rows = np.zeros((end - first, LAYERS, K), np.uint8)
    for number, token in enumerate(range(first, end)):
        for layer in ROUTED:
            rows[number, layer] = 2 * token + layer, token
    return rows


def _expected(num_tokens: int) -> Experts:
    known = _rows(0, num_tokens - 1)[:, ROUTED]
    return np.concatenate([known, np.full((1, len(ROUTED), K), UNKNOWN_EXPERT, np.uint8)])


class _Engine:
    """vLLM's output processor; the test sets the outputs of its engine core."""

    def __init__(self) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.processor = OutputProcessor(None, log_stats=False)
        self.routing = ReturnedRouting(
            SimpleNamespace(output_processor=self.processor, apply_model=lambda _: [ROUTED])
        )

    def begin(self, name: str, token_ids: list[int], earlier: Experts) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest

        record = self.routing.begin(name, token_ids, earlier)
        options: dict[str, Any] = self.routing.parameters(earlier)
        sampling = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **options)
        whole = token_ids, None, sampling, None, 0.0, None, None, None
        request = EngineCoreRequest(f"{name}-x", *whole, external_req_id=name)
        self.processor.add_request(request, None)
        return record, sampling.routed_experts_prompt_start

    def step(self, name: str, token: int, rows: np.ndarray, is_last: bool) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        reason = FinishReason.LENGTH if is_last else None
        core = EngineCoreOutput(f"{name}-x", [token], finish_reason=reason, routed_experts=rows)
        outputs: Any = self.processor.process_outputs([core]).request_outputs
        for output in outputs:
            if output.finished:
                self.routing.finish(output.request_id, output.outputs[0].routed_experts)


@pytest.mark.slow
def test_a_finished_request_has_the_routing_of_all_tokens_but_the_last() -> None:
    engine = _Engine()
    record, first = engine.begin("a", PROMPT, np.empty((0, 0, 0), np.uint8))
    assert first == 0
    engine.step("a", 8, _rows(0, 3), is_last=False)  # of the prompt
    engine.step("a", 9, _rows(3, 4), is_last=True)  # of the token 8
    assert np.array_equal(record.read(5), _expected(5))


@pytest.mark.slow
def test_an_aborted_request_keeps_its_routing_and_a_resumed_one_adds_to_it() -> None:
    engine = _Engine()
    record, _ = engine.begin("a", PROMPT, np.empty((0, 0, 0), np.uint8))
    engine.step("a", 8, _rows(0, 3), is_last=False)
    engine.step("a", 9, _rows(3, 4), is_last=False)
    engine.routing.end(["a"])
    earlier = record.read(5)
    assert np.array_equal(earlier, _expected(5))
    engine.processor.abort_requests(["a"], internal=False)
    record, first = engine.begin("a", [*PROMPT, 8, 9], earlier)
    assert first == 4  # the token 9 was not computed
    engine.step("a", 10, _rows(4, 5), is_last=False)
    engine.step("a", 11, _rows(5, 6), is_last=True)
    assert np.array_equal(record.read(7), _expected(7))


def test_the_part_that_answers_is_the_one_to_which_vllm_returns_routing() -> None:
    """The first of the tensor-parallel processes of the last stage, which samples."""
    assert [rank_of_part(part, 4, 1) for part in range(4)] == [0, 1, 2, 3]
    assert [rank_of_part(part, 2, 2) for part in range(4)] == [2, 3, 0, 1]


def test_layers_with_experts_are_found_in_both_versions_of_vllm() -> None:
    def module(**values: Any) -> nn.Module:
        made = nn.Module()
        vars(made).update(values)
        return made

    with_experts = [module(layer_id=number, moe_config=None) for number in (2, 0)]
    others = [module(layer_id=1), module(moe_config=None)]  # attention, and 0.23's runner
    assert routed_layers(nn.ModuleList([*with_experts, *others])) == [0, 2]
