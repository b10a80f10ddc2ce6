"""Checks of the models of evaluate.baselines: complete folders, commits that exist, servers that answer."""

from __future__ import annotations

import os

from dapo_core.errors import DapoError
from downloads import DownloadError, Unreachable
from eval import EvaluationError
from eval.gates import LAST_NIGHT
from tasks.config import ChainConfig
from tasks.evaluation.served_model import served_model
from tasks.fetched_model import describe_fetch, fetched_inputs
from tasks.links import model_of
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.serve_model.checks import require_servable
from tasks.serve_model.failure import ServerUnreachable

ADVICE = "the run goes on without this column if it is still so then"


def check_baselines(config: ChainConfig, findings: Findings) -> None:
    """A finding for each baseline. What is only out of reach now is a warning: it may be back when it is asked."""
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
            findings.add(check, WARN, str(error), ADVICE)
        except (DapoError, EvaluationError, DownloadError) as error:
            status = WARN if baseline.name == LAST_NIGHT else FAIL  # added by the nightly flow, not by the recipe
            findings.add(check, status, str(error), f"correct or remove {baseline.name} in evaluate.baselines")
        else:
            findings.add(check, OK, found)
