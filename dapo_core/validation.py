"""Validation during training: samples responses to held-out prompts and scores them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dapo_core.draw.encoding import PromptEncoder
from dapo_core.draw.groups import Group, GroupRequest, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.draw.report import STALL_ADVICE
from dapo_core.draw.source import GroupSource
from dapo_core.draw.texts import decoder, text_row
from dapo_core.draw.tokenizing import tokenize_prompts
from dapo_core.errors import RewardError, RolloutError
from dapo_core.metrics.step_files import GENERATIONS, StepFiles
from dapo_core.model.sampling import Sampling
from dapo_core.reward.routing import require_scorers
from eval.problems.held_out import read_held_out
from eval.problems.prompts import DEFAULT, find_template, make_messages
from eval.problems.registry import OWN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import TrainingConfig

CORE = "acc"  # its mean, best and maj at N are verl's core metrics
VALUES = (CORE, "score", "reward")
NUM_DRAWS, DRAW_SEED = 1000, 42  # of maj@n, as in verl


def held_out_prompts(
    path: Path, model_path: Path, tokenizer: PreTrainedTokenizerBase, config: TrainingConfig
) -> list[Prompt]:
    """Return the first validation.num_prompts problems of the file, prompted as in `dapo eval`.

    Problems without a data source are scored as their set. Raises ProblemsError for a file that
    `dapo eval` rejects, DataError for prompts that are too long, and the errors of require_scorers.
    """
    held_out = read_held_out(path)
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
    arguments = config.rollout.chat_template_kwargs
    encoder = PromptEncoder(tokenizer, model_path, path.parent, arguments)
    prompts = tokenize_prompts(problems, encoder, config.data.max_prompt_tokens)
    require_scorers({prompt.data_source for prompt in prompts}, config.reward, config.custom_reward)
    return prompts


class Validation:
    """Samples and scores responses to the held-out prompts with the engines' current weights.

    Writes the first response to a fixed subset of the prompts to generations/step_N.jsonl in
    `output`.
    """

    def __init__(
        self,
        config: TrainingConfig,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        output: Path,
    ) -> None:
        settings = config.validation
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.files = StepFiles(output, GENERATIONS)
        self.max_seconds = config.sampler.max_seconds_without_kept
        self.num_samples = settings.num_samples
        self.sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
        indices = np.linspace(
            0, len(prompts), min(settings.num_logged, len(prompts)), endpoint=False
        )
        self._logged = indices.astype(
            int
        ).tolist()  # evenly spaced, because prompts are ordered by set

    def run(self, source: GroupSource, step: int) -> dict[str, float]:
        """Validate after training step `step`; returns the metrics. Raises like `validate`."""
        rollouts = validate(
            source, self.prompts, step, self.max_seconds, self.sampling, self.num_samples
        )
        metrics = validation_metrics(self.prompts, rollouts, step)
        if self._logged:
            decode = decoder(self.tokenizer)
            logged = ((self.prompts[index], rollouts[index][0]) for index in self._logged)
            self.files.write(step, (text_row(*pair, decode) for pair in logged))
        return metrics


def validate(
    source: GroupSource,
    prompts: Sequence[Prompt],
    step: int,
    max_seconds: float,
    sampling: Sampling,
    num_samples: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> list[list[Rollout]]:
    """Return `num_samples` responses to each prompt, in the order of the prompts.

    Raises RolloutError if nothing finishes for `max_seconds`.
    """
    assert source.num_in_flight == 0, "groups in flight would be returned here and lost"
    # Negative ids cannot collide with positions in the stream.
    requests = [
        GroupRequest(-1 - number, prompt, step, sampling=sampling, num_samples=num_samples)
        for number, prompt in enumerate(prompts)
    ]
    source.submit(requests)
    groups: dict[int, Group] = {}
    last_finished = clock()
    while len(groups) < len(requests):
        finished = source.finished()
        if finished:
            groups |= {group.group_id: group for group in finished}
            last_finished = clock()
        elif (seconds := clock() - last_finished) > max_seconds:
            raise RolloutError(
                f"no response finished for {seconds:.0f} s of the validation after training step "
                f"{step}: {len(groups)} of {len(requests)} prompts are done, "
                f"{source.num_tokens_in_flight} response tokens are in flight. {STALL_ADVICE}"
            )
    source.take_reward_seconds()  # must not count for the next draw
    return [groups[request.group_id].rollouts for request in requests]


def validation_metrics(
    prompts: Sequence[Prompt], rollouts: Sequence[Sequence[Rollout]], step: int
) -> dict[str, float]:
    """Return the metrics of the responses to each prompt.

    validation/accuracy is the mean over prompts of the mean `acc` of their scored responses. verl's
    metrics are per set, or per data source if there is one set. Prompts and sets without a scored
    response are left out. Raises RewardError if the scorer failed on every response.
    """
    num_samples = len(rollouts[0])
    sets: dict[str, list[list[Rollout]]] = {}
    for prompt, siblings in zip(prompts, rollouts, strict=True):
        if scored := [rollout for rollout in siblings if rollout.is_scored]:
            sets.setdefault(prompt.dataset or prompt.data_source, []).append(scored)
    every = [rollout for siblings in rollouts for rollout in siblings]
    if not sets:
        raise RewardError(
            f"the scorer raised or timed out on all {len(every)} responses of the validation "
            f"after training step {step}; its first tracebacks are in the log. Fix the file in "
            "custom_reward.path, or raise reward.timeout_seconds"
        )
    accuracies = [
        np.mean([rollout.acc for rollout in scored]) for asked in sets.values() for scored in asked
    ]
    metrics: dict[str, float] = {}
    for name, asked in sets.items():
        metrics |= sample_metrics(name, asked, num_samples)
    return {
        **metrics,
        "validation/accuracy": float(np.mean(accuracies)),
        "validation/truncated_ratio": float(np.mean([rollout.is_truncated for rollout in every])),
        "validation/no_answer_ratio": float(
            np.mean([rollout.verdict == "no_answer" for rollout in every])
        ),
        "validation/unscored_ratio": float(np.mean([not rollout.is_scored for rollout in every])),
        "validation/response_length/mean": float(
            np.mean([len(rollout.response_ids) for rollout in every])
        ),
        "validation/num_prompts": float(len(prompts)),
    }


def sample_metrics(
    name: str, prompts: Sequence[Sequence[Rollout]], num_samples: int
) -> dict[str, float]:
    """Return verl's metrics of the set `name` from the scored responses to its prompts.

    best@n, worst@n and maj@n are the mean and std over n responses drawn with replacement from a
    prompt's N, averaged over prompts, for n = 2, 4, 8 ... N. verl draws 1,000 times; here best and
    worst are exact.
    """
    votes = any(rollout.answer is not None for rollouts in prompts for rollout in rollouts)
    metrics: dict[str, float] = {}
    for value in VALUES:
        each = [_of_prompt(rollouts, value, num_samples, votes) for rollouts in prompts]
        for metric in each[0]:
            is_core = (
                value == CORE
                and metric.startswith(("mean@", "best@", "maj@"))
                and _n(metric) == num_samples
            )
            section = "val-core" if is_core else "val-aux"
            metrics[f"{section}/{name}/{value}/{metric}"] = float(
                np.mean([one[metric] for one in each])
            )
    return metrics


def _of_prompt(
    rollouts: Sequence[Rollout], value: str, num_samples: int, votes: bool
) -> dict[str, float]:
    values = np.array([getattr(rollout, value) for rollout in rollouts], dtype=float)
    metrics = {f"mean@{num_samples}": float(values.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values.std())
    for n in _sizes(num_samples):
        best, worst = _best(values, n), _best(-values, n)
        pairs = {"best": best, "worst": (-worst[0], worst[1])}
        if votes:
            drawn = values[_majorities([rollout.answer for rollout in rollouts], n)]
            pairs["maj"] = (float(drawn.mean()), float(drawn.std()))
        for name, (mean, std) in pairs.items():
            metrics |= {f"{name}@{n}/mean": mean, f"{name}@{n}/std": std}
    return metrics


def _n(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _sizes(num_samples: int) -> list[int]:
    powers = [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples]
    return [*powers, num_samples]


def _best(values: np.ndarray, n: int) -> tuple[float, float]:
    """Return mean and std of the best of n draws: P(best <= k-th of K) = (k / K)^n."""
    probabilities = np.diff((np.arange(len(values) + 1) / len(values)) ** n)
    ordered = np.sort(values)
    mean = float(probabilities @ ordered)
    return mean, float(np.sqrt(probabilities @ (ordered - mean) ** 2))


def _majorities(answers: Sequence[str | None], n: int) -> np.ndarray:
    """Return the index of the majority response in each of NUM_DRAWS draws of n.

    Ties go to the answer drawn first. "No answer" counts as an answer, as in verl.
    """
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    votes = np.array([numbers[answer] for answer in answers])
    drawn = np.random.default_rng(DRAW_SEED).integers(len(answers), size=(NUM_DRAWS, n))
    ballots = votes[drawn] + len(numbers) * np.arange(NUM_DRAWS)[:, None]  # distinct by draw
    counts = np.bincount(ballots.ravel())[ballots]
    return drawn[np.arange(NUM_DRAWS), counts.argmax(axis=1)]  # argmax takes the first maximum
