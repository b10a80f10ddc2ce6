"""The webhook of the configuration: told by HTTP when a report is finished and when a run did not end well.

`tell_report` belongs at the end of a flow; `tell_failure` is a Prefect hook for on_failure, on_crashed and
on_cancellation. Prefect runs these in the flow's process, or in the worker when that process is gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prefect import runtime
from prefect.settings import get_current_settings
from prefect.utilities.urls import url_for

from dapo_core.errors import ConfigError
from eval.client import LOOPBACK
from eval.pages import points
from eval.report import REPORT_PAGE
from flows.config import WebhookConfig, is_http_address, load_config
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.run import Run

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its line for each request holds the whole URL

PROJECT = Path(__file__).resolve().parents[1]  # where a worker that runs elsewhere finds recipes
DEFAULT_CONFIG = "configs/arith_cpu.yaml"  # of a run whose parameters name none
MOST_REASON_CHARS = 1000
FIGURES = ("before", "after", "difference", "ci95", "p", "n")


def tell_report(run: Run, report: Mapping[str, Any], webhook: WebhookConfig) -> None:
    """Have the webhook told of a finished report, if there is one; a webhook that fails is a warning."""
    figures = {name: report[name] for name in FIGURES if name in report}
    figures |= {side: report[side]["accuracy"] for side in ("before", "after")}
    recipe, difference = run.config.run.name, points(report["difference"])
    payload = {
        "event": "report",
        "text": f"{recipe}: {report['verdict']} ({difference} points)",
        "recipe": recipe,
        "run": run.folder.name,
        "verdict": report["verdict"],
        **figures,
        "report": str(run.folder / REPORT_FOLDER / REPORT_PAGE),
        "flow_run": _flow_run(runtime.flow_run.name, runtime.flow_run.id),
    }
    send(webhook, payload)


def tell_failure(flow: Any, flow_run: Any, state: Any) -> None:
    """Have the webhook of the run's recipe told that the run failed, crashed or was cancelled, and why."""
    parameters = flow_run.parameters
    recipe = Path(parameters.get("config", DEFAULT_CONFIG))
    try:
        config = load_config(recipe if recipe.exists() else PROJECT / recipe, parameters.get("overrides") or ())
    except ConfigError as error:
        logger.warning("nobody is told that %s ended as %s: %s", flow_run.name, state.name, error)
        return
    event = {"CANCELLING": "cancelled"}.get(state.type.value, state.type.value.lower())
    reason = (state.message or "")[:MOST_REASON_CHARS]
    payload = {
        "event": event,
        "text": f"{config.run.name}: {flow.name} {event}: {reason}",
        "recipe": config.run.name,
        "state": state.name,
        "reason": reason,
        "flow": flow.name,
        "flow_run": _flow_run(flow_run.name, flow_run.id),
    }
    send(config.flow.webhook, payload)


def send(webhook: WebhookConfig, payload: Mapping[str, Any]) -> bool:
    """Post the payload as JSON to the webhook, once; returns whether it was taken, a log line says why not.

    The log names the host only: the path or the query of such an address is often the secret itself.
    """
    if webhook.url is None:
        return False
    url = webhook.url
    if url.startswith("$"):
        url = os.environ.get(url[1:], "").strip()
        if not url:
            logger.warning(
                "flow.webhook.url=%s is not set in this process: nobody is told of this %s",
                webhook.url,
                payload["event"],
            )
            return False
        if not is_http_address(url):
            logger.warning("%s is no http or https address: nobody is told", webhook.url)
            return False
    host = urlsplit(url).hostname
    try:
        # A proxy from the environment must not stand between us and this machine.
        with (
            httpx.Client(timeout=webhook.timeout_seconds, trust_env=host not in LOOPBACK) as client,
            client.stream("POST", url, json=payload) as answer,
        ):
            status = answer.status_code
    except (httpx.TransportError, httpx.InvalidURL) as error:
        logger.warning("the webhook at %s did not answer (%s): nobody is told", host, type(error).__name__)
        return False
    if not 200 <= status < 300:
        logger.warning("the webhook at %s answered HTTP %d: nobody may be told", host, status)
        return False
    logger.info("told the webhook at %s of this %s", host, payload["event"])
    return True


def _flow_run(name: str | None, identity: Any) -> dict[str, str | None]:
    """What a person needs to find the run on Prefect's page; runtime.flow_run.ui_url names no page of 3.7."""
    has_page = get_current_settings().server.ui.enabled
    return {"name": name, "url": url_for("flow-run", identity) if identity and has_page else None}
