"""Graceful stop by signals: when they raise, what is logged, and which handlers remain."""

import inspect
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from ray._private import services

from dapo_core.cluster.connection import _keep_signal_handling
from dapo_core.machine.stopping import ECHO_SECONDS, StopRequest, StopRequested
from tests.processes import wait_until
from tests.sources import Clock


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore the signal handlers after each test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the logging thread, which may take a moment."""
    wait_until(lambda: bool(caplog.messages), "the message")
    return caplog.messages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert (stop.signal, stop.is_urgent) == (number, False)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("step", "then"), [(8, "a final checkpoint after step 8, then ending"), (1, "step 1,")]
)
def test_a_stop_request_during_a_step_waits_for_its_end(
    caplog: pytest.LogCaptureFixture, step: int, then: str
) -> None:
    with StopRequest() as stop, stop.deferred():
        with stop.interruptible(step):
            stop.check()
        signal.raise_signal(signal.SIGTERM)
        entered = False
        with pytest.raises(StopRequested), stop.interruptible(step + 1):
            entered = True
    assert not entered
    (message,) = _messages(caplog)
    assert message.startswith("SIGTERM received: ")
    assert then in message


@pytest.mark.parametrize(
    ("step", "then"),
    [
        (8, "a final checkpoint after step 7, then ending"),
        (1, "without a checkpoint, because no step is complete"),
    ],
)
@pytest.mark.parametrize("looks", [True, False])
def test_a_stop_request_ends_waiting_for_groups(
    caplog: pytest.LogCaptureFixture, step: int, then: str, looks: bool
) -> None:
    """Either at the next check or, if the groups arrived meanwhile, before they are trained on."""
    with StopRequest() as stop, stop.deferred():

        def wait() -> None:
            with stop.interruptible(step):
                signal.raise_signal(signal.SIGINT)
                if looks:
                    stop.check()
                    pytest.fail("went on waiting")

        with pytest.raises(StopRequested):
            wait()
    (message,) = _messages(caplog)
    assert then in message


def test_a_second_signal_ends_at_once_unless_it_is_an_echo() -> None:
    clock = Clock()
    with StopRequest(clock) as stop, stop.deferred():
        signal.raise_signal(signal.SIGINT)
        clock.now += 0.9 * ECHO_SECONDS
        signal.raise_signal(signal.SIGTERM)
        assert (stop.signal, stop.is_urgent) == (signal.SIGINT, False)
        clock.now += 0.2 * ECHO_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert (stop.signal, stop.is_urgent) == (signal.SIGINT, True)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_do_not_install_handlers() -> None:
    """Python refuses to set a handler outside the main thread."""
    seen: list[object] = []

    def listen() -> None:
        with StopRequest() as stop, stop.deferred(), stop.interruptible(1):
            seen.extend([stop.signal, signal.getsignal(signal.SIGTERM)])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [None, before]


def test_a_signal_during_ray_start_is_not_lost() -> None:
    """Ray installs its own handler, which ends the process; a stop request must not trigger it."""
    before = signal.getsignal(signal.SIGTERM)

    def start(is_signalled: bool) -> None:
        with _keep_signal_handling():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            if is_signalled:
                signal.raise_signal(signal.SIGTERM)

    with StopRequest() as stop:
        ours = signal.getsignal(signal.SIGTERM)
        start(is_signalled=False)
        assert (stop.signal, signal.getsignal(signal.SIGTERM)) == (None, ours)
        with pytest.raises(KeyboardInterrupt):
            start(is_signalled=True)
        assert (stop.signal, signal.getsignal(signal.SIGTERM)) == (signal.SIGTERM, ours)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ray_still_uses_the_patched_start_function() -> None:
    with _keep_signal_handling() as processes:
        services.ConsolePopen(["true"]).wait()
        assert len(processes) == 1
        assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)
