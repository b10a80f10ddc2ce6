"""The webhook: its payload, and that it cannot fail a run or leak its URL."""

import inspect
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import temporary_settings
from prefect.states import Cancelling, Crashed, Failed

from dapo_core.errors import ConfigError, DataError
from flows.config import WebhookConfig, load_config
from flows.dapo_full import dapo_full
from flows.notify import report_failure, report_result, send, suite_figures
from tasks.runs.run import Run
from tests.webhooks import Receiver, started_receiver

CONFIG = "configs/arith_cpu.yaml"
NIGHT = {"difference": -0.02, "ci95": [-0.1, 0.06], "p": 0.6, "n": 40}
REPORT = {
    "verdict": "It got better",
    "before": {"accuracy": 0.25},
    "after": {"accuracy": 0.5},
    "difference": 0.25,
    "ci95": [0.1, 0.4],
    "p": 0.004,
    "n": 40,
    "flips": {"gained": []},
    "baselines": [
        {"name": "last-night", "after": {"pooled": NIGHT}},
        {"name": "other", "missing": {"math500": "it was not evaluated"}},
    ],
    "absent": {"theirs": "ServerUnreachable: away"},
    "gates": [
        {"gate": "pooled > 50", "is_passed": False},
        {"gate": "pooled > 1", "is_passed": True},
    ],
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with started_receiver() as server:
        yield server


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_every_benchmark_of_a_suite_is_sent() -> None:
    figures = {"name": "a", "before": 0.1, "after": 0.2, "difference": 0.1, "ci95": [0, 0.2]}
    figures |= {"p": 0.2, "n": 9}
    row = {**figures, "p_holm": 0.4, "direction": "", "weight": 1.0}
    suite = suite_figures(
        {"headline": "a", "benchmarks": [row], "pooled": {**figures, "mid_p": 0.1}}
    )
    assert suite["benchmarks"] == [{name: value for name, value in row.items() if name != "weight"}]
    assert suite["headline"] == "a"
    assert suite["pooled"] == {name: value for name, value in figures.items() if name != "name"}


def test_a_finished_report_is_sent_with_its_figures(receiver: Receiver, tmp_path: Path) -> None:
    config = load_config(CONFIG, (f"store.path={tmp_path}", f"flow.webhook.url={receiver.url()}"))
    run = Run.start(config)
    report_result(run, REPORT, config.flow.webhook)
    assert receiver.received == [
        (
            "/hook",
            {
                **{key: REPORT[key] for key in ("verdict", "difference", "ci95", "p", "n")},
                "event": "report",
                "text": "arith_cpu: It got better (+25.0 points)",
                "recipe": "arith_cpu",
                "run": run.folder.name,
                "before": 0.25,
                "after": 0.5,
                "baselines": {"last-night": NIGHT},
                "absent": {"theirs": "ServerUnreachable: away"},
                "failed_gates": [{"gate": "pooled > 50", "is_passed": False}],
                "report": str(run.folder / "report" / "report.html"),
                "flow_run": {"name": None, "url": None},
            },
        )
    ]


def fail(state: Any, *overrides: str, config: str = CONFIG) -> None:
    """Call the hook for a flow run that ended in this state."""
    parameters = {"config": config, "overrides": overrides}
    flow_run = SimpleNamespace(id="7bfb7b22", name="sly-fox", parameters=parameters)
    report_failure(dapo_full, flow_run, state)


@pytest.mark.parametrize(
    ("state", "event", "reason"),
    [
        (Failed(message="ServeError: refused"), "failed", "ServeError: refused"),
        (Crashed(message="exit status 137"), "crashed", "exit status 137"),
        (Cancelling(), "cancelled", ""),
        (Failed(name="TimedOut", message="x" * 5000), "failed", "x" * 1000),
    ],
)
def test_a_failed_run_is_sent_with_its_reason(
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    state: Any,
    event: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # a worker may run in another folder
    monkeypatch.setattr(
        "flows.notify.url_for", lambda kind, identity: f"http://prefect/{kind}/{identity}"
    )
    fail(state, f"flow.webhook.url={receiver.url()}", "run.name=mine")
    [(_, payload)] = receiver.received
    assert payload == {
        "event": event,
        "text": f"mine: dapo-full {event}: {reason}",
        "recipe": "mine",
        "state": state.name,
        "reason": reason,
        "flow": "dapo-full",
        "flow_run": {"name": "sly-fox", "url": "http://prefect/flow-run/7bfb7b22"},
    }


def test_secrets_are_neither_sent_nor_recorded(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-very-secret")
    url = receiver.url("/services/0123456789abcdefXYZ")
    words = f"401 for sk-very-secret, and {url} answered 404"
    overrides = [f"flow.webhook.url={url}", f"store.path={tmp_path}"]
    fail(Failed(message=words), *overrides)
    [(path, payload)] = receiver.received
    clean = words.replace("sk-very-secret", "[redacted]").replace(
        "0123456789abcdefXYZ", "[redacted]"
    )
    assert (path, payload["reason"]) == ("/services/0123456789abcdefXYZ", clean)
    with pytest.raises(DataError), Run.start(load_config(CONFIG, overrides)) as run:
        raise DataError(words)
    assert json.loads((run.folder / "run.json").read_text())["error"] == f"DataError: {clean}"


def test_a_server_without_ui_sends_no_url(receiver: Receiver) -> None:
    """The private server of `dapo run` exits with the run."""
    with temporary_settings({"server.ui.enabled": False}):
        fail(Failed(), f"flow.webhook.url={receiver.url()}")
    [(_, payload)] = receiver.received
    assert payload["flow_run"] == {"name": "sly-fox", "url": None}


def test_every_failure_calls_the_hook_which_never_fails_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for hooks in (
        dapo_full.on_failure_hooks,
        dapo_full.on_crashed_hooks,
        dapo_full.on_cancellation_hooks,
    ):
        assert report_failure in hooks
        for hook in hooks:  # a flow calls its hooks by position, a worker that cancels by keyword
            inspect.signature(hook).bind(flow=dapo_full, flow_run=None, state=None)
    fail(Failed(), config="no/such.yaml")
    assert "no webhook is called for sly-fox, which ended in state Failed" in caplog.text


def test_the_url_is_read_from_the_environment_when_sending(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    webhook = WebhookConfig(url="$DAPO_TEST_HOOK")
    monkeypatch.delenv("DAPO_TEST_HOOK", raising=False)
    assert not send(webhook, {"event": "report"})
    assert "flow.webhook.url=$DAPO_TEST_HOOK is not set in this process" in caplog.text
    monkeypatch.setenv("DAPO_TEST_HOOK", receiver.url("/secret?token=hidden"))
    assert send(webhook, {"event": "report"})
    assert receiver.received == [("/secret?token=hidden", {"event": "report"})]
    assert "the webhook at 127.0.0.1 accepted this report" in caplog.text
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("status", "delay_seconds", "words"),
    [
        (500, 0.0, "the webhook at 127.0.0.1 returned HTTP 500"),
        (204, 100.0, "did not respond (ReadTimeout)"),
        (None, 0.0, "the webhook at 127.0.0.1 did not respond (ConnectError)"),
    ],
)
def test_a_failing_slow_or_missing_webhook_is_a_timely_warning(
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    status: int | None,
    delay_seconds: float,
    words: str,
) -> None:
    receiver.status, receiver.delay_seconds = status or 0, delay_seconds
    started = time.monotonic()
    with socket.socket() as probe:  # bound and not listening: refused
        probe.bind(("127.0.0.1", 0))
        url = (
            receiver.url("/secret")
            if status
            else f"http://127.0.0.1:{probe.getsockname()[1]}/secret"
        )
        timeout_seconds = 0.3 if delay_seconds else 50.0
        assert not send(
            WebhookConfig(url=url, timeout_seconds=timeout_seconds), {"event": "report"}
        )
    assert time.monotonic() - started < 50.0
    assert words in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("address", ["hooks.example/secret", "ftp://h/secret", "http://[secret/"])
def test_an_invalid_url_in_the_environment_is_a_warning(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DAPO_TEST_HOOK", address)
    assert not send(WebhookConfig(url="$DAPO_TEST_HOOK"), {"event": "report"})
    assert "flow.webhook.url=$DAPO_TEST_HOOK is not an http or https URL" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("url", ["hooks.example/x", "http://", "$A B"])
def test_a_webhook_must_be_a_url_or_a_variable(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"flow\.webhook\.url must be an http or https URL, or \$NAME"
    ):
        load_config(CONFIG, (f"flow.webhook.url='{url}'",))
    assert (
        load_config(CONFIG, ("flow.webhook.url=$DAPO_TEST_HOOK",)).flow.webhook.url
        == "$DAPO_TEST_HOOK"
    )
