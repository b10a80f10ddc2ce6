"""Webhook notifications: one POST for a report, or for a run that failed, crashed or was cancelled.

`report_failure` is a Prefect hook, which runs in the flow's process, or in the worker if that
process is gone.
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
from eval.report.pages import points
from eval.report.report import REPORT_PAGE
from flows.config import WebhookConfig, is_http_address, load_config
from redaction import redacted
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.run import Run

logger = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parents[1]  # a worker may run in another folder
MAX_REASON_CHARS = 1000
FIGURES = ("difference", "ci95", "p", "n")


def report_result(run: Run, report: Mapping[str, Any], webhook: WebhookConfig) -> None:
    """Send a finished report to the webhook, if any; a failing webhook is only logged."""
    of = f" on {report['headline']}" if "headline" in report else ""
    change = f"{points(report['difference'])} points{of}"
    payload = {
        "event": "report",
        "text": f"{run.config.run.name}: {report['verdict']} ({change})",
        "recipe": run.config.run.name,
        "run": run.folder.name,
        "verdict": report["verdict"],
        **{side: report[side]["accuracy"] for side in ("before", "after")},
        **{name: report[name] for name in FIGURES},
        "failed_gates": [gate for gate in report["gates"] if gate["is_passed"] is False],
        **suite_figures(report),
        "baselines": baseline_figures(report),
        "absent": report["absent"],
        "report": str(run.folder / REPORT_FOLDER / REPORT_PAGE),
        "flow_run": _flow_run(runtime.flow_run.name, runtime.flow_run.id),
    }
    send(webhook, payload)


def baseline_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by baseline, the (pooled) change from it to the trained model."""
    asked = {one["name"]: one["after"]["pooled"] for one in report["baselines"] if "after" in one}
    return {name: {figure: pooled[figure] for figure in FIGURES} for name, pooled in asked.items()}


def suite_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a suite's benchmarks and the pooled ones; {} for a single benchmark."""
    if "benchmarks" not in report:
        return {}
    shown = ("name", "before", "after", "difference", "ci95", "p", "p_holm", "direction", "n")
    return {
        "headline": report["headline"],
        "benchmarks": [{name: row[name] for name in shown} for row in report["benchmarks"]],
        "pooled": {name: report["pooled"][name] for name in ("before", "after", *FIGURES)},
    }


def report_failure(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect hook: tell the recipe's webhook why a run failed, crashed or was cancelled."""
    recipe = Path(flow_run.parameters["config"])
    try:
        config = load_config(
            recipe if recipe.exists() else PROJECT / recipe, flow_run.parameters["overrides"]
        )
    except ConfigError as error:
        said = "no webhook is called for %s, which ended in state %s: %s"
        logger.warning(said, flow_run.name, state.name, error)
        return
    event = "cancelled" if state.is_cancelling() else state.type.value.lower()
    reason = (state.message or "")[:MAX_REASON_CHARS]
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
    """Post the payload as JSON to the webhook once; True if accepted, else logs the reason.

    Only the host is logged, since the path or query of a webhook URL is often secret.
    """
    if webhook.url is None:
        return False
    url, event = webhook.url, payload["event"]
    if url.startswith("$"):
        url = os.environ.get(url[1:], "").strip()
        if not is_http_address(url):
            problem = "not an http or https URL" if url else "not set in this process"
            said = "flow.webhook.url=%s is %s: no webhook is called for this %s"
            logger.warning(said, webhook.url, problem, event)
            return False
    host = urlsplit(url).hostname
    try:
        with httpx.stream(
            "POST", url, json=redacted(payload), timeout=webhook.timeout_seconds
        ) as answer:
            status = answer.status_code
    except (httpx.TransportError, httpx.InvalidURL) as error:
        logger.warning(
            "the webhook at %s did not respond (%s) to this %s", host, type(error).__name__, event
        )
        return False
    if not 200 <= status < 300:
        logger.warning("the webhook at %s returned HTTP %d for this %s", host, status, event)
        return False
    logger.info("the webhook at %s accepted this %s", host, event)
    return True


def _flow_run(name: str | None, flow_run_id: Any) -> dict[str, str | None]:
    """Return name and UI URL of a flow run. Prefect 3.7's own `ui_url` is not a valid page."""
    has_page = get_current_settings().server.ui.enabled
    return {
        "name": name,
        "url": url_for("flow-run", flow_run_id) if flow_run_id and has_page else None,
    }
