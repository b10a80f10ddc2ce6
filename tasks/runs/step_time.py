"""Estimates the time of a step and of a run, calibrated by the newest run of the same name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dapo_core.config.training import TrainingConfig
from dapo_core.draw.encoding import PromptEncoder
from dapo_core.errors import ConfigError
from dapo_core.memory.devices import DEVICES, cpu_rates, find_device
from dapo_core.memory.shape import shape_of
from dapo_core.memory.step_time import (
    GENERATE,
    Machine,
    StepTime,
    assumed_lengths,
    calibrate,
    step_time,
)
from dapo_core.metrics.log import METRICS_FILE
from durable import read_json_lines
from tasks.artifacts.artifact import StoreError
from tasks.config import ChainConfig
from tasks.preflight.finding import Findings
from tasks.preflight.inputs import Inputs, inputs_here
from tasks.preflight.memory import device_limit, model_config
from tasks.preflight.model import check_model
from tasks.preflight.prompts import NUM_MEASURED
from tasks.runs.history import RecordedRun, artifact_of, read_config, read_runs
from tasks.stages import TRAIN_POLICY

logger = logging.getLogger(__name__)

NUM_STEPS = 50  # newest steps of a run to use


@dataclass(frozen=True)
class RunTime:
    """The estimated time of all steps and evaluations, without starts and downloads."""

    step: StepTime
    num_steps: int
    num_evaluations: int
    num_responses: int | None  # of one evaluation; None before its problems are fetched

    @property
    def seconds(self) -> float:
        """Evaluations are assumed to generate as fast as training, and responses as long."""
        tokens = self.num_evaluations * (self.num_responses or 0) * self.step.lengths.response
        per_token = self.step.seconds[GENERATE] / self.step.generated_tokens
        return self.num_steps * self.step.step_seconds + tokens * per_token


def run_time(config: ChainConfig, gigabytes: float | None = None) -> RunTime:
    """Estimate a run from its local problems; raises what `time_of` raises."""
    findings = Findings()
    with inputs_here(config, findings) as inputs:
        step = time_of(config, gigabytes, _mean_prompt(config, inputs, findings))
        evaluated = inputs.evaluated(config)
    sizes = [
        len(found.items) * (config.evaluate if one is None else config.evaluate.of(one)).num_samples
        for one, found in evaluated
    ]
    models = 2 + len(config.evaluate.baselines) + len(config.checkpoint_steps)
    return RunTime(step, config.train.total_steps, models, sum(sizes) or None)


def _mean_prompt(config: ChainConfig, inputs: Inputs, findings: Findings) -> float | None:
    """The mean tokens of a sample of the local training prompts; None without model or prompts."""
    if inputs.model is None or not inputs.problems:
        return None
    facts = check_model(inputs.model, config, findings)
    if facts.tokenizer is None:
        return None
    texts = [problem for problem in inputs.problems if not problem.images]
    sample = [*texts[:: -(-len(texts) // NUM_MEASURED) or 1], *inputs.pictured]
    arguments = config.rollout.chat_template_kwargs
    encoder = PromptEncoder(facts.tokenizer, inputs.model, inputs.folder, arguments)
    return float(encoder.encode(sample, encoder.render(sample)).lengths.mean()) if sample else None


def time_of(
    config: ChainConfig, gigabytes: float | None = None, mean_prompt: float | None = None
) -> StepTime:
    """Estimate the step time, with lengths and corrections of an earlier training of run.name.

    Without one, prompts are as long as `mean_prompt`, if measured. The factors compare that run
    with the estimate for its own configuration. `gigabytes` overrides the device memory in GiB.
    Raises ConfigError for an accelerator without train.device_model, and whatever `model_config`
    and `shape_of` raise.
    """
    shape, machine = shape_of(model_config(config.model)), _machine(config, gigabytes)
    if (training := _last_training(config)) is not None:
        ran_with, steps = training
        if found := calibrate(ran_with, shape, _machine(ran_with), steps):
            return step_time(config, shape, machine, *found)
    lengths = assumed_lengths(config)
    if mean_prompt is not None:
        lengths = replace(lengths, prompt=mean_prompt, source="prompts measured, others assumed")
    return step_time(config, shape, machine, lengths)


def _last_training(config: ChainConfig) -> tuple[ChainConfig, list[Mapping[str, float]]] | None:
    """Configuration and newest steps of the name's newest run with this model and devices."""
    for run in read_runs(Path(config.store.path)):
        if run.name != config.run.name or TRAIN_POLICY.name not in run.stages:
            continue
        training, ran_with = artifact_of(run, TRAIN_POLICY.name), _config_of(run)
        if training is None or ran_with is None or _hardware(ran_with) != _hardware(config):
            continue
        if ran_with.is_adopted:
            continue
        return ran_with, read_json_lines(Path(training.path) / METRICS_FILE)[-NUM_STEPS:]
    return None


def _config_of(run: RecordedRun) -> ChainConfig | None:
    """The configuration of a recorded run; None if it is missing or invalid for this version."""
    try:
        tree = read_config(run)
        return ChainConfig.model_validate({name: tree[name] for name in tree if name != "flow"})
    except (StoreError, ValidationError) as error:
        logger.warning("the run %s cannot calibrate the estimate: %s", run.id, error)
        return None


def _hardware(config: ChainConfig) -> tuple[Any, ...]:
    """The settings that calibration factors are specific to."""
    train = config.train
    return config.model, train.device, train.device_model, config.rollout.engine


def _machine(config: TrainingConfig, gigabytes: float | None = None) -> Machine:
    train = config.train
    if train.device == "cpu":
        ranks, engines = cpu_rates(config.threads_per_rank), cpu_rates(config.threads_per_worker)
        return Machine(ranks, engines, None)
    if train.device_model is None:
        raise ConfigError(
            f"the time of a step on train.device={train.device} depends on the device: set "
            f"train.device_model to one of {', '.join(DEVICES)}"
        )
    rates = find_device(train.device_model).rates
    return Machine(rates, rates, device_limit(config, gigabytes).num_bytes)
