"""The Hugging Face engine: resumed responses, memory limit and end token."""

from dataclasses import replace
from pathlib import Path

import pytest

from dapo_core.engines.factory import build_engine
from dapo_core.errors import ModelError, RolloutError
from dapo_core.model.sampling import read_eos_ids
from tests.integration.test_engines import SETTINGS, finish, make_requests, run


def test_hf_resumed_responses_equal_uninterrupted_ones(model_path: Path) -> None:
    engine = build_engine("hf", model_path, replace(SETTINGS, max_num_seqs=3), seed=0)
    requests = make_requests(6)
    uninterrupted = run(engine, requests)
    # before the first token, after it, midway, and in the second wave
    for num_steps in (0, 1, 7, 30):
        engine.submit(requests)
        responses = {
            response.request_id: response for _ in range(num_steps) for response in engine.step()
        }
        for partial in engine.abort([request.request_id for request in requests]):
            request = requests[int(partial.request_id)]
            so_far = (partial.response_ids, partial.rollout_log_probs)
            engine.submit([replace(request, response_ids=so_far[0], rollout_log_probs=so_far[1])])
        responses |= finish(engine)
        assert {name: responses[name].response_ids.tolist() for name in uninterrupted} == {
            name: response.response_ids.tolist() for name, response in uninterrupted.items()
        }
    engine.close()


def test_hf_refuses_memory_below_one_sequence(model_path: Path) -> None:
    # 2 (keys, values) x 2 layers x 1 head x 32 x 4 bytes x 96 tokens = 49152 bytes
    with pytest.raises(
        RolloutError, match=r"96 tokens needs 49152 bytes of cache, but only 49151 are free"
    ):
        build_engine("hf", model_path, replace(SETTINGS, memory_bytes=49151), seed=0)


def test_a_model_folder_without_eos_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    with pytest.raises(ModelError, match="has eos_token_id"):
        read_eos_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert read_eos_ids(tmp_path) == [5, 7]
