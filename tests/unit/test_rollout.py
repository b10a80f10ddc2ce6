"""A real rollout worker: the Hugging Face engine on a tiny model, and its scoring processes."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from dapo_core.cluster.rollout_group import owned
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.prompts import Prompt
from dapo_core.draw.rollout import NOT_BEGUN, RolloutWorker, sample_seed
from dapo_core.engines.base import GenerationRequest, Response
from dapo_core.engines.factory import build_engine
from dapo_core.model.inputs import ModelInput
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.model.sampling import GREEDY
from tests.configs import make_config
from tests.plain import plain
from tests.processes import wait_until
from tests.tiny_models import tiny_engine_settings

GROUP_SIZE, MAX_RESPONSE_TOKENS, NUM_GROUPS = 2, 24, 20
SETTINGS = replace(
    tiny_engine_settings(),
    max_response_tokens=MAX_RESPONSE_TOKENS,
    max_num_seqs=4,  # two groups at once
)
SCORER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info.get("broken"):
        raise KeyError("broken")
    time.sleep(extra_info.get("seconds", 0))
    return {"score": len(solution_str) + float(ground_truth), "acc": len(solution_str) % 2}
"""
PROMPTS = [
    Prompt(index, ModelInput((5 + index, 9, 12)), "anything", str(index))
    for index in range(NUM_GROUPS)
]
STEP = 6
FAR = 240.0
REQUESTS = [GroupRequest(100 + prompt.index, prompt, STEP) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def shared_worker(model_path: Path) -> Iterator[RolloutWorker]:
    scorer = model_path.parent / "scorer.py"
    scorer.write_text(SCORER, encoding="utf-8")
    config = make_config(
        run={"seed": 3},
        rollout={
            "group_size": GROUP_SIZE,
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "engine": "hf",
        },
        reward={"num_processes": 1, "overlong": {"buffer_tokens": 8, "penalty_factor": 0.5}},
        custom_reward={"path": str(scorer)},
    )
    tokenizer = load_tokenizer(model_path)
    worker = RolloutWorker(
        lambda: build_engine("hf", model_path, SETTINGS, seed=0), tokenizer, config
    )
    yield worker
    worker.close()


@pytest.fixture
def worker(shared_worker: RolloutWorker, model_path: Path) -> Iterator[RolloutWorker]:
    """The shared worker; afterwards, nothing is in flight and the version is 0 again."""
    yield shared_worker
    shared_worker.suspend()
    _publish(shared_worker, model_path, 0)


@pytest.fixture(scope="module")
def whole(shared_worker: RolloutWorker) -> dict[int, Group]:
    """All groups, sampled without interruption."""
    shared_worker.submit(REQUESTS)
    return _finish(shared_worker, NUM_GROUPS)


def _publish(worker: RolloutWorker, model_path: Path, policy_version: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    worker.engine.run(lambda engine: engine.load_weights(model.named_parameters(), policy_version))


def _finish(worker: RolloutWorker, count: int) -> dict[int, Group]:
    groups: dict[int, Group] = {}
    deadline = time.monotonic() + FAR
    while len(groups) < count:
        assert time.monotonic() < deadline
        groups |= {group.group_id: group for group in worker.poll(1.0).groups}
    return groups


@contextmanager
def _steps(worker: RolloutWorker, count: int) -> Iterator[None]:
    """Let the engine run `count` steps on the requests submitted inside; none may finish."""
    engine, left, done = worker.engine.run(lambda engine: engine), count, threading.Event()
    step = engine.step

    def limited() -> list[Response]:
        nonlocal left
        if not left:
            done.set()
            time.sleep(0.001)
            return []
        left -= 1
        responses = step()
        assert responses == []
        return responses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", limited)
        yield
        assert done.wait(FAR)


def _generate(worker: RolloutWorker, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """Return the response ids of requests sent directly to the engine."""
    worker.engine.submit(requests)
    responses: dict[str, list[int]] = {}
    deadline = time.monotonic() + FAR
    while len(responses) < len(requests):
        assert time.monotonic() < deadline
        responses |= {
            response.request_id: response.response_ids.tolist() for response in worker.engine.take()
        }
        time.sleep(0.001)  # the engine decodes on a thread of this process
    return responses


def _tokens(groups: Sequence[Group]) -> list[list[list[int]]]:
    return [[rollout.response_ids.tolist() for rollout in group.rollouts] for group in groups]


def test_groups_contain_sampled_tokens_and_their_scores(
    whole: dict[int, Group], worker: RolloutWorker, model_path: Path
) -> None:
    assert sorted(whole) == [request.group_id for request in REQUESTS]
    tokenizer = load_tokenizer(model_path)
    for group_id, group in whole.items():
        assert group.prompt == PROMPTS[group_id - 100]
        assert group.group_id == group_id
        for rollout in group.rollouts:
            assert rollout.versions == [(0, len(rollout.response_ids))]
            text = tokenizer.decode(rollout.response_ids.tolist(), skip_special_tokens=True)
            assert rollout.score == len(text) + group.prompt.index
            assert rollout.acc == len(text) % 2
            # from 16 tokens on, an eighth of 0.5 for each token
            assert rollout.overlong_penalty == -0.5 * max(len(rollout.response_ids) - 16, 0) / 8
            assert rollout.reward == rollout.score + rollout.overlong_penalty
            assert rollout.is_truncated == (rollout.finish_reason == "length")
            assert len(rollout.rollout_log_probs) == len(rollout.response_ids)
            tokens = rollout.response_ids, rollout.rollout_log_probs  # 8 bytes a token
            assert [each.dtype for each in tokens] == [np.int32, np.float32]
    seeds = [sample_seed(3, STEP, 107, sample) for sample in range(GROUP_SIZE)]
    alone = _generate(
        worker,
        [
            GenerationRequest(str(sample), PROMPTS[7].input, seed)
            for sample, seed in enumerate(seeds)
        ],
    )
    assert [alone[str(sample)] for sample in range(GROUP_SIZE)] == _tokens([whole[107]])[0]


def test_groups_that_wait_do_not_fill_rays_object_store(whole: dict[int, Group]) -> None:
    routing = np.zeros((9, 3, 2), np.uint8)
    sent = [replace(rollout, routing=routing) for rollout in whole[100].rollouts]
    for own, view in zip(owned(sent), sent, strict=True):
        assert plain(own) == plain(view)
        for name in ("response_ids", "rollout_log_probs", "routing"):
            assert not np.shares_memory(getattr(own, name), getattr(view, name))


def test_scoring_does_not_stop_the_engine(
    whole: dict[int, Group], worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_end = worker.engine.run(lambda engine: engine), threading.Event()
    step, held = engine.step, []

    def hold_back() -> list[Response]:
        """Run a step, but hold back the second group's responses."""
        responses = [*held, *step()]
        held[:] = [
            one for one in responses if one.request_id.startswith("101/") and not may_end.is_set()
        ]
        return [response for response in responses if response not in held]

    num_unfinished = engine.num_unfinished
    monkeypatch.setattr(engine, "step", hold_back)
    monkeypatch.setattr(engine, "num_unfinished", lambda: num_unfinished() + len(held))
    worker.submit(REQUESTS[:2])
    progress = worker.poll(FAR)
    assert plain(progress.groups) == plain([whole[100]])
    assert worker.engine.num_unfinished() > 0
    assert progress.reward_seconds == 0.0
    may_end.set()
    assert plain(_finish(worker, 1)) == {101: plain(whole[101])}


def test_the_engine_decodes_between_polls(whole: dict[int, Group], worker: RolloutWorker) -> None:
    worker.submit(REQUESTS[:2])
    wait_until(lambda: worker.engine.num_unfinished() == 0, "the responses")
    worker.submit(REQUESTS[2:3])  # beside finished ones that are not yet collected
    groups = _finish(worker, 3)
    assert all(
        _tokens([groups[group_id]]) == _tokens([whole[group_id]]) for group_id in (100, 101, 102)
    )


def test_requests_are_added_and_aborted_between_decoding_steps(
    whole: dict[int, Group], worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = worker.engine.run(lambda engine: engine)
    sizes: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: sizes.append(engine.num_unfinished()) or step())
    worker.submit(REQUESTS[:4])
    worker.submit(REQUESTS[4:8])
    suspended = worker.suspend()
    assert sizes[0] == 4 * GROUP_SIZE  # all of a call at once
    assert worker.engine.num_unfinished() == 0
    worker.submit(suspended)
    groups = _finish(worker, 8)
    assert all(
        _tokens([groups[group_id]]) == _tokens([whole[group_id]]) for group_id in range(100, 108)
    )


def _fail() -> NoReturn:
    raise ZeroDivisionError


def test_engine_errors_reach_every_later_call(
    model_path: Path, shared_worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine("hf", model_path, SETTINGS, seed=0)
    broken = RolloutWorker(lambda: engine, load_tokenizer(model_path), shared_worker.config)
    monkeypatch.setattr(engine, "step", lambda: [][0])
    broken.submit(REQUESTS[:1])
    with pytest.raises(IndexError):
        broken.poll(FAR)
    for call in (
        lambda: broken.submit(REQUESTS[1:2]),
        broken.suspend,
        lambda: broken.log_probs([]),
    ):
        with pytest.raises(IndexError):
            call()
    broken.close()
    tokenizer = load_tokenizer(model_path)
    with pytest.raises(ZeroDivisionError):
        RolloutWorker(_fail, tokenizer, shared_worker.config)


@pytest.mark.parametrize("num_steps", [1, 9])
def test_suspended_groups_resume_to_the_same_result(
    whole: dict[int, Group], worker: RolloutWorker, model_path: Path, num_steps: int
) -> None:
    with _steps(worker, num_steps):
        worker.submit(REQUESTS[:4])
    suspended = worker.suspend()
    assert worker.engine.num_unfinished() == 0
    # the engine runs two groups at once: two have begun, two have nothing yet
    assert [request.num_response_tokens for request in suspended] == [
        2 * num_steps,
        2 * num_steps,
        0,
        0,
    ]
    begun = [(0, num_steps)]
    assert [request.versions for request in suspended] == [[begun, begun], [begun, begun], [], []]
    assert plain(suspended[2:]) == plain(REQUESTS[2:4])
    _publish(worker, model_path, 5)  # the same weights, called by another version
    worker.submit(suspended)
    groups = _finish(worker, 4)
    assert _tokens([groups[100 + index] for index in range(4)]) == _tokens(
        [whole[100 + index] for index in range(4)]
    )
    for index in range(4):
        for rollout in groups[100 + index].rollouts:
            assert rollout.versions == [
                *begun * (index < 2),
                (5, len(rollout.response_ids) - num_steps * (index < 2)),
            ]
    for group_id, group in groups.items():
        assert [rollout.score for rollout in group.rollouts] == [
            rollout.score for rollout in whole[group_id].rollouts
        ]


def test_a_response_that_had_not_begun_is_as_old_as_its_first_token(
    worker: RolloutWorker, model_path: Path
) -> None:
    """Four of five responses begin; the fifth has no age until weights 5 sample it."""
    three = replace(REQUESTS[0], num_samples=3)
    with _steps(worker, 6):
        worker.submit([three, REQUESTS[1]])
    suspended = worker.suspend()
    begun = [(0, 6)]
    assert [request.versions for request in suspended] == [[begun] * 3, [begun, []]]
    _publish(worker, model_path, 5)
    worker.submit(suspended)
    groups = _finish(worker, 2)
    rollouts = [*groups[100].rollouts, *groups[101].rollouts]
    for rollout in rollouts[:4]:
        assert rollout.versions == [*begun, (5, len(rollout.response_ids) - 6)]
    assert rollouts[4].versions == [(5, len(rollouts[4].response_ids))]


def test_finished_siblings_are_kept_across_a_suspend(
    whole: dict[int, Group], worker: RolloutWorker
) -> None:
    first, second = whole[103].rollouts
    begun = [
        Response("103/0", first.response_ids, first.rollout_log_probs, first.finish_reason),
        Response("103/1", second.response_ids[:7], second.rollout_log_probs[:7], "abort"),
    ]
    versions = [[(4, len(first.response_ids))], [(3, 2), (4, 5)]]
    with _steps(worker, 0):
        worker.submit([GroupRequest(103, PROMPTS[3], STEP, begun, versions)])
    assert worker.engine.num_unfinished() == 1
    group = _finish(worker, 1)[103]
    assert _tokens([group]) == _tokens([whole[103]])
    assert [rollout.versions for rollout in group.rollouts] == [
        versions[0],
        [*versions[1], (0, len(second.response_ids) - 7)],
    ]


def test_greedy_validation_does_not_change_sampled_groups(
    whole: dict[int, Group], worker: RolloutWorker
) -> None:
    greedy = [
        GroupRequest(-1 - index, PROMPTS[index], STEP, sampling=GREEDY, num_samples=1)
        for index in range(3)
    ]
    worker.submit([greedy[0], REQUESTS[0], greedy[1], REQUESTS[1], greedy[2]])
    groups = _finish(worker, 5)
    assert _tokens([groups[100], groups[101]]) == _tokens([whole[100], whole[101]])
    alone = []
    for index in range(3):
        group = groups[-1 - index]
        assert (len(group.rollouts), group.prompt) == (1, PROMPTS[index])
        request = GenerationRequest("x", PROMPTS[index].input, seed=index, sampling=GREEDY)
        alone.append(_generate(worker, [request])["x"])
    assert _tokens([groups[-1 - index] for index in range(3)]) == [
        [response_ids] for response_ids in alone
    ]
    with _steps(worker, 5):
        worker.submit(greedy[1:])
    suspended = worker.suspend()
    assert [
        (request.num_response_tokens, request.sampling, request.step) for request in suspended
    ] == [(5, GREEDY, STEP)] * 2
    worker.submit(suspended)
    again = _finish(worker, 2)
    assert _tokens([again[-2], again[-3]]) == _tokens([groups[-2], groups[-3]])


def test_a_sample_seed_depends_on_run_step_group_and_sample() -> None:
    keys = list(itertools.product((1, 11, 111), repeat=4))  # also where digits would run together
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.slow
def test_time_spent_only_on_scoring_is_reported(worker: RolloutWorker) -> None:
    slow = Prompt(0, ModelInput((5, 9)), "anything", "0", {"seconds": 0.3})
    worker.submit([GroupRequest(104, slow, STEP)])
    wait_until(lambda: worker.engine.num_unfinished() == 0, "the responses")
    started = time.monotonic()
    progress = worker.poll(FAR)
    assert [group.group_id for group in progress.groups] == [104]
    assert 0.3 <= progress.reward_seconds <= time.monotonic() - started
    assert progress.num_open_tokens == 0


def test_scores_of_suspended_responses_are_ignored(
    whole: dict[int, Group], worker: RolloutWorker
) -> None:
    rollout = whole[105].rollouts[0]
    finished = Response(
        "105/0", rollout.response_ids, rollout.rollout_log_probs, rollout.finish_reason
    )
    responses = [finished, replace(NOT_BEGUN, request_id="105/1")]
    request = GroupRequest(105, PROMPTS[5], STEP, responses, [rollout.versions, []])
    with _steps(worker, 0):
        worker.submit([request])
    assert plain(worker.suspend()) == plain([request])
    worker.submit(REQUESTS[6:7])
    assert list(_finish(worker, 1)) == [106]
    assert worker.poll(0.01).groups == []


def test_a_failing_scorer_gives_an_error_verdict(worker: RolloutWorker) -> None:
    broken = Prompt(0, ModelInput((5, 9)), "anything", "0", {"broken": True})
    worker.submit([GroupRequest(200, broken, STEP), GroupRequest(201, PROMPTS[1], STEP)])
    groups = _finish(worker, 2)
    assert [(rollout.verdict, rollout.score, rollout.acc) for rollout in groups[200].rollouts] == [
        ("error", 0.0, 0.0)
    ] * GROUP_SIZE
    assert all(rollout.verdict in {"right", "wrong"} for rollout in groups[201].rollouts)
