"""Headless Chromium controlled over the DevTools pipe: no driver, port or extra package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium must make no requests of its own: they would fill the log or leave the machine.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--mute-audio",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TIMEOUT_SECONDS = 200
ERROR_EVENTS = (
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Log.entryAdded",
    "Inspector.targetCrashed",
)


class Browser:
    """One Chromium page, as a context manager. `complaints` and `requests` collect events during
    calls.
    """

    def __init__(self) -> None:
        self.complaints: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._unread = b""
        self._session: str | None = None

    def __enter__(self) -> Browser:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            raise AssertionError(
                f"none of {', '.join(NAMES)} is installed, but this test needs a real browser: "
                f"apt-get install --no-install-recommends chromium"
            )
        self._stack = ExitStack()
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        to_browser, self._from_us = os.pipe()
        self._to_us, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3, replies on 4, and exits when 3 is closed.
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                redirect,
                "bash",
                program,
                *OPTIONS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._stack.callback(os.close, self._to_us)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._from_us)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools command. Events that arrive before it are recorded."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._from_us, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._keep(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Load a file or an address and wait until it has loaded."""
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._keep(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; awaits promises."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return once a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(
                    f"not within {TIMEOUT_SECONDS} s: {condition}; the page shows:\n{shown}"
                )
            time.sleep(0.2)

    def resize(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Emulate a screen of this width, in a `light` or `dark` scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            is_ready, _, _ = select.select([self._to_us], [], [], TIMEOUT_SECONDS)
            text = os.read(self._to_us, 1 << 16) if is_ready else b""
            if not text:
                state = (
                    f"sent nothing for {TIMEOUT_SECONDS} s"
                    if not is_ready
                    else f"exited ({self._process.poll()})"
                )
                raise AssertionError(f"Chromium {state}")
            self._unread += text
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _keep(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if event["method"] in ERROR_EVENTS:
            self.complaints.append(event)
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
