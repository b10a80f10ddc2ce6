"""The preflight of a recipe: all checks before any stage, and again once the first two have fetched the rest."""

from __future__ import annotations

import logging
from pathlib import Path

from dapo_core.arithmetic import is_generated
from dapo_core.checkpoint.resume import require_resume
from dapo_core.config.engine_args import require_known
from dapo_core.config.loading import dump_config
from dapo_core.model_folder import require_reference
from dapo_core.reward.routing import require_scorers
from eval.problems.prompts import find_template
from tasks.artifacts.artifact import Artifact
from tasks.config import ChainConfig
from tasks.data.sources import all_sources, train_sources
from tasks.evaluation.settings import judge_for, scorer_file
from tasks.preflight.baselines import check_baselines
from tasks.preflight.finding import FAIL, OK, WARN, Findings, describe
from tasks.preflight.inputs import Inputs, inputs_fetched, inputs_here, inputs_later
from tasks.preflight.machine import check_machine
from tasks.preflight.memory import check_memory
from tasks.preflight.model import ModelFacts, check_model
from tasks.preflight.prompts import check_answers, check_forms, check_grader, check_lengths
from tasks.preflight.smoke import check_engines
from tasks.preflight.trainer import check_trainer

SMOKE_NEEDS = "it needs a model folder that is here (model.path), and nothing in the way"
logger = logging.getLogger(__name__)


_ready: set[str] = set()  # configurations that passed in this process


def examine(config: ChainConfig, is_smoke: bool = False, on_nodes: bool = False) -> Findings:
    """Everything that files and a second can tell of the recipe before its first stage.

    With `on_nodes` also what every node of the cluster that train.ray_address names says of itself and of its
    connections: some ten seconds. With `is_smoke`, where nothing else is in the way, also one response of each
    kind of engine.
    """
    findings = Findings()
    with findings.catching("data"):
        for source in all_sources(config):
            source.check_columns()
    inputs = inputs_here(config, findings)
    with findings.catching("reward"):
        require_scorers((), config.reward, config.custom_reward)
    is_own = config.train.backend == "own"
    if is_own:
        with findings.catching("engine"):
            require_known(config.rollout.engine_args)
    else:
        check_trainer(config, findings)
    with findings.catching("resume"):
        require_resume(config.checkpoint.resume)
    with findings.catching("reference model"):
        require_reference(config.algorithm.kl.reference_path, inputs.model)
    with findings.catching("prompt"):
        for settings in (config.evaluate, *map(config.evaluate.of, config.evaluate.benchmarks)):
            find_template(settings.prompt, default="given")
            scorer_file(settings)
            judge_for(settings)
    facts = _examine_inputs(config, inputs, findings)
    check_baselines(config, findings)
    limit = check_machine(config, facts, inputs.model, on_nodes, findings)
    check_memory(config, inputs.model, findings, limit)
    if is_smoke and inputs.model is not None and not findings.failed:
        check_engines(inputs.model, config, inputs.evaluation, findings)
    elif is_smoke:
        findings.add("smoke", WARN, "no engine was started", SMOKE_NEEDS)
    for what in inputs.later:
        findings.add("later", OK, f"checked after the first two stages: {what}")
    return findings


def examine_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> Findings:
    """The checks that need the outputs of the first two stages."""
    findings = Findings()
    with findings.catching("data"):
        _examine_inputs(config, inputs_fetched(config, data, model), findings)
    check_memory(config, Path(model.path), findings)
    return findings


def require_ready(config: ChainConfig) -> None:
    """Log the warnings of `examine`; raise PreflightError with everything that would end the run.

    A configuration that passed is not examined again by the same process.
    """
    if (text := dump_config(config)) not in _ready:
        _conclude(examine(config, on_nodes=True))
        _ready.add(text)


def require_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> None:
    """The same of `examine_fetched`, where something had to be fetched first."""
    if inputs_later(config):
        _conclude(examine_fetched(config, data, model))


def _conclude(findings: Findings) -> None:
    for line in describe([finding for finding in findings if finding.status == WARN]):
        logger.warning("preflight: %s", line)
    findings.require()
    logger.info("preflight: %d checks, nothing in the way", len(findings))


def _examine_inputs(config: ChainConfig, inputs: Inputs, findings: Findings) -> ModelFacts:
    facts = check_model(inputs.model, config, findings) if inputs.model is not None else ModelFacts()
    check_lengths(config, facts, inputs, findings)
    if config.model.source == "recipe" and not inputs.later:
        _check_warm_start(config, inputs, findings)
    if inputs.problems:
        check_answers(config, inputs.problems, findings)
    for one, asked in inputs.asked(config):
        with findings.catching("grader"):
            check_grader(asked, config.evaluate if one is None else config.evaluate.of(one), findings)
        if not asked.is_loglikelihood:
            check_forms(inputs.problems, asked, findings)
    return facts


def _check_warm_start(config: ChainConfig, inputs: Inputs, findings: Findings) -> None:
    is_any = any(source.is_generated for source in train_sources(config))
    if not is_any and inputs.problems and not any(is_generated(one.extra_info) for one in inputs.problems):
        findings.add(
            "model", FAIL,
            "model.source=recipe is warmed up on generated arithmetic, and data.train has none",
            "set data.train=arithmetic, or model.source=path with a model",
        )  # fmt: skip
