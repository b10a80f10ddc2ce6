"""The preflight of a recipe: checks before the first stage, the rest once inputs are fetched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dapo_core.checkpoint.resume import require_resume
from dapo_core.config.engine_args import require_known
from dapo_core.config.loading import dump_config
from dapo_core.demo.generated import is_generated
from dapo_core.errors import DapoError, counted
from dapo_core.memory.devices import Limit
from dapo_core.merge.adoption import open_trained
from dapo_core.model.folder import require_reference
from dapo_core.model.lora import full_model
from dapo_core.policy.requirements import require_trainable
from dapo_core.reward.custom import require_loss
from dapo_core.reward.routing import require_scorers
from downloads import DownloadError, Unreachable
from eval import EvaluationError
from eval.problems.pictures import IMAGES
from eval.problems.prompts import find_template
from eval.report.gates import LAST_NIGHT
from heartbeat import heartbeat
from tasks.adopted import adopted_files
from tasks.artifacts.artifact import Artifact
from tasks.config import ChainConfig
from tasks.data.sources import all_sources, train_sources
from tasks.evaluation.served_model import served_model
from tasks.evaluation.settings import scorer_file
from tasks.fetched_model import describe_fetch, fetched_inputs
from tasks.links import model_of
from tasks.preflight.finding import FAIL, OK, WARN, Findings, describe
from tasks.preflight.inputs import Inputs, inputs_fetched, inputs_here, inputs_later
from tasks.preflight.machine import check_machine
from tasks.preflight.memory import check_memory
from tasks.preflight.model import ModelFacts, check_model
from tasks.preflight.prompts import (
    check_answers,
    check_columns,
    check_forms,
    check_golds,
    check_grader,
    check_lengths,
    check_overlap,
)
from tasks.preflight.smoke import check_sampling, check_server
from tasks.serve_model.checks import require_servable
from tasks.serve_model.failure import ServerUnreachable

SMOKE_NEEDS = "it needs a local model folder (model.path) and no failed check"
logger = logging.getLogger(__name__)

_passed: set[str] = set()  # configurations that passed in this process


def examine(
    config: ChainConfig,
    is_smoke: bool = False,
    on_nodes: bool = False,
    is_sampled: bool = False,
) -> Findings:
    """Run every check of the recipe that needs no stage: about a second.

    `on_nodes` also examines the nodes of the cluster at train.ray_address and the connections
    between them: about ten seconds. `is_sampled` also samples groups as the training does, and
    `is_smoke` gets a response from a server besides.
    """
    findings = Findings()
    with findings.catching("data"):
        check_columns(all_sources(config), findings)
    with inputs_here(config, findings) as inputs:
        with findings.catching("reward"):
            require_scorers((), config.reward, config.custom_reward)
        with findings.catching("loss"):
            require_loss(config.algorithm.custom_loss.path, config.algorithm.custom_loss.name)
        with findings.catching("engine"):
            require_known(config.rollout.engine_args)
        with findings.catching("resume"):
            require_resume(config.checkpoint.resume)
        with findings.catching("reference model"):
            _check_reference(config, inputs.model)
        with findings.catching("prompt"):
            for settings in (config.evaluate, *map(config.evaluate.of, config.evaluate.benchmarks)):
                find_template(settings.prompt, default="given")
                scorer_file(settings)
        facts = _examine_inputs(config, inputs, findings)
        check_baselines(config, findings)
        limit = check_machine(config, facts, inputs.model, on_nodes, findings)
        _check_policy(config, inputs.model, findings, limit)
        if (is_smoke or is_sampled) and inputs.model is not None and not findings.failed:
            if is_smoke:
                check_server(inputs.model, config, inputs.evaluation, findings)
            if not config.is_adopted:
                check_sampling(inputs, config, findings)
        elif is_smoke or is_sampled:
            findings.add("smoke", WARN, "no engine was started", SMOKE_NEEDS)
        later = [*inputs.later]
        if num_left := sum(bool(one.images) for one in inputs.problems) - len(inputs.pictured):
            later.append(f"the pictures of {counted(num_left, 'training problem')}")
        for name in later:
            findings.add("later", OK, f"checked after the first two stages: {name}")
    return findings


def examine_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> Findings:
    """Run the checks that need the outputs of the first two stages."""
    findings = Findings()
    with findings.catching("data"):
        _examine_inputs(config, inputs_fetched(config, data, model), findings)
    _check_policy(config, Path(model.path), findings)
    return findings


def require_ready(config: ChainConfig) -> None:
    """Log the warnings of `examine`; raise PreflightError with everything that would end the run.

    A configuration that passed is not examined again in the same process.
    """
    if (text := dump_config(config)) not in _passed:
        with heartbeat(lambda: "preflight"):
            _conclude(examine(config, on_nodes=True))
        _passed.add(text)


def require_fetched(config: ChainConfig, data: Artifact, model: Artifact) -> None:
    """Like `require_ready`, for the checks of `examine_fetched`, if anything was left to them:
    inputs that had to be fetched, and pictures.
    """
    if inputs_later(config) or (Path(data.path) / IMAGES).is_dir():
        _conclude(examine_fetched(config, data, model))


def _conclude(findings: Findings) -> None:
    for line in describe([finding for finding in findings if finding.status == WARN]):
        logger.warning("preflight: %s", line)
    findings.require()
    logger.info("preflight: %d checks, none failed", len(findings))


def _examine_inputs(config: ChainConfig, inputs: Inputs, findings: Findings) -> ModelFacts:
    model = inputs.model
    facts = ModelFacts() if model is None else check_model(model, config, findings)
    check_golds(inputs, findings)
    check_overlap(config, inputs, findings)
    check_lengths(config, facts, inputs, findings)
    if config.model.source == "recipe" and not inputs.later:
        _check_warm_start(config, inputs, findings)
    if inputs.problems and not any(finding.check == "reward" for finding in findings):
        check_answers(config, inputs.problems, findings)
    for benchmark, evaluation in inputs.evaluated(config):
        with findings.catching("grader"):
            settings = config.evaluate if benchmark is None else config.evaluate.of(benchmark)
            check_grader(evaluation, settings, findings)
        if not evaluation.is_loglikelihood:
            check_forms(inputs.problems, evaluation, findings)
    return facts


def _check_reference(config: ChainConfig, model: Path | None) -> None:
    path = config.algorithm.kl.reference_path
    require_reference(path, model)
    require_trainable(config, path)


def _check_warm_start(config: ChainConfig, inputs: Inputs, findings: Findings) -> None:
    has_generated = any(source.is_generated for source in train_sources(config)) or any(
        is_generated(each.extra_info) for each in inputs.problems
    )
    if inputs.problems and not has_generated:
        findings.add(
            "model",
            FAIL,
            "model.source=recipe is warmed up on generated problems, and data.train has none",
            "set data.train to arithmetic or shapes, or model.source=path with a model",
        )


def _check_policy(
    config: ChainConfig, model: Path | None, findings: Findings, limit: Limit | None = None
) -> None:
    """Check that the training fits the devices, or that adopt.folder has the model's weights."""
    if not config.is_adopted:
        check_memory(config, model, findings, limit)
        return
    with findings.catching("adopted"):
        adopted_files(config)
        place = Path(str(config.adopt.folder))
        if model is not None:
            label = open_trained(place, full_model(model), config.model.trust_remote_code).label
            findings.add("adopted", OK, f"{label} has the tensors and tokens of {model}")


def check_baselines(config: ChainConfig, findings: Findings) -> None:
    """Check evaluate.baselines: folders are complete, commits exist, servers answer.

    A model that cannot be reached is a warning: it may be back by the time it is evaluated.
    """
    for baseline in config.evaluate.baselines:
        check = f"baseline {baseline.name}"
        try:
            if baseline.base_url is not None:
                served_model(config, baseline)
                found = f"{baseline.base_url} serves {baseline.model}"
            elif baseline.path is not None:
                require_servable(baseline.path, config.serve, os.environ)
                found = f"{baseline.path} can be served"
            else:
                fetched_inputs(model_of(baseline))
                found = describe_fetch(model_of(baseline))
        except (Unreachable, ServerUnreachable) as error:
            advice = "if this persists, the run goes on without this column"
            findings.add(check, WARN, str(error), advice)
        except (DapoError, EvaluationError, DownloadError) as error:
            is_of_recipe = baseline.name != LAST_NIGHT  # the nightly flow adds that one
            advice = f"correct or remove {baseline.name} in evaluate.baselines"
            findings.add(check, FAIL if is_of_recipe else WARN, str(error), advice)
        else:
            findings.add(check, OK, found)
