"""Accuracy on the held-out set during training: one greedy response a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dapo_core.data import Prompt
from dapo_core.errors import RewardError, RolloutError
from dapo_core.reward.routing import require_scorers
from dapo_core.rollout import Group, GroupRequest, Rollout
from dapo_core.tokenizing import tokenize_prompts
from eval.problems.prompts import DEFAULT, find_template, make_messages
from eval.problems.registry import OWN, read_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.training import TrainingConfig


def held_out_prompts(
    path: Path, benchmark: str | None, tokenizer: PreTrainedTokenizerBase, config: TrainingConfig
) -> list[Prompt]:
    """The validation prompts: the first validation.num_prompts of the file, or all, each once, as dapo eval asks.

    Problems that name no data source are scored as their set. Raises ProblemsError for a file that dapo eval
    refuses, DataError for prompts that are too long, and what require_scorers raises.
    """
    held_out = read_held_out(path, benchmark)
    template = find_template(DEFAULT, held_out.template)
    data_source = held_out.name or OWN.scorer
    problems = [
        replace(
            problem,
            messages=make_messages(template, problem.text, problem.messages),
            data_source=problem.data_source or data_source,
        )
        for problem in held_out.problems[: config.validation.num_prompts]
    ]
    prompts = tokenize_prompts(problems, tokenizer, config.data.max_prompt_tokens)
    require_scorers({prompt.data_source for prompt in prompts}, config.reward, config.custom_reward)
    return prompts


def validate(
    source: RolloutGroup,
    prompts: Sequence[Prompt],
    step: int,
    max_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, float]:
    """Metrics of one greedy response to each prompt from the engines' weights after `step`.

    Accuracy is the mean `acc` of scored responses, without overlong penalty, over all and under verl's name for
    each set, or data source of the only set; one with no scored response is left out. Raises RolloutError when
    nothing finished for `max_seconds`, and RewardError when the scorer failed on every response.
    """
    assert source.num_in_flight == 0, "groups in flight would come back here and be lost"
    # Below 0, where no position in the stream is.
    requests = [GroupRequest(-1 - number, prompt, step, is_greedy=True) for number, prompt in enumerate(prompts)]
    source.submit(requests)
    groups: dict[int, Group] = {}
    last_finished = clock()
    while len(groups) < len(requests):
        finished = source.finished()
        if finished:
            groups |= {group.group_id: group for group in finished}
            last_finished = clock()
        elif (seconds := clock() - last_finished) > max_seconds:
            raise RolloutError(_silence(source, step, seconds, len(groups), len(requests)))
    source.take_reward_seconds()  # they must not count for the next draw
    return _metrics(prompts, [groups[request.group_id].rollouts[0] for request in requests], step)


def _metrics(prompts: Sequence[Prompt], rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """In the order of the prompts, so that sums do not depend on which response finished first."""
    accuracies: dict[str, list[float]] = {}  # by set or, of one set, by data source: of scored responses
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        if rollout.is_scored:
            accuracies.setdefault(prompt.dataset or prompt.data_source, []).append(rollout.acc)
    scored = [rollout.acc for rollout in rollouts if rollout.is_scored]
    if not scored:
        raise RewardError(
            f"the scorer raised or ran out of time on all {len(rollouts)} responses of the validation after "
            f"training step {step}; the log has its first tracebacks: correct the file of custom_reward.path, or "
            "raise reward.timeout_seconds"
        )
    return {
        **{f"val-core/{name}/acc/mean@1": float(np.mean(values)) for name, values in accuracies.items()},
        "validation/accuracy": float(np.mean(scored)),
        "validation/truncated_ratio": float(np.mean([rollout.is_truncated for rollout in rollouts])),
        "validation/no_answer_ratio": float(np.mean([rollout.verdict == "no_answer" for rollout in rollouts])),
        "validation/unscored_ratio": float(np.mean([not rollout.is_scored for rollout in rollouts])),
        "validation/response_length/mean": float(np.mean([len(rollout.response_ids) for rollout in rollouts])),
        "validation/num_prompts": float(len(prompts)),
    }


def _silence(source: RolloutGroup, step: int, seconds: float, num_finished: int, num_prompts: int) -> str:
    return (
        f"no response finished for {seconds:.0f} s of the validation after training step {step}: {num_finished} "
        f"of {num_prompts} did, {source.num_tokens_in_flight} response tokens are in flight. With few of them an "
        "engine hangs, and rollout.engine=hf shows whether it is that one; with as many as there can be, scoring "
        "does: lower reward.timeout_seconds; else raise sampler.max_seconds_without_kept, or lower "
        "rollout.max_response_tokens"
    )
