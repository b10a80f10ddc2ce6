"""Settings and fixtures for all tests, the `fast` marker, and the order of test files."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.testing

from flows.prefect_settings import PROJECT_SETTINGS

if TYPE_CHECKING:
    from tests.integration.arithmetic_server import ArithmeticServer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not pay off for tiny tensors
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ |= PROJECT_SETTINGS  # before Prefect is imported
os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported
# Background jobs of a shell ignore these signals, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# building it takes as long as most commands
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Files that take minutes, longest first, so that no single worker is left with one of them at the
# end.
LONGEST_FILES = (
    "test_deployment.py",
    "test_kill_matrix.py",
    "test_readme_commands.py",
    "test_own_data.py",
    "test_killed_trainings.py",
    "test_lost_node.py",
    "test_gpu_bench.py",
    "test_slow_line.py",
    "test_cluster_up.py",
    "test_training.py",
    "test_deployments.py",
    "test_cancelling.py",
    "test_serve.py",
    "test_engines.py",
    "test_services.py",
    "test_dead_workers.py",
    "test_nodes.py",
    "test_tensor_parallel.py",
    "test_policy.py",
    "test_training_resumed.py",
    "test_eval_run.py",
    "test_fetch_model.py",
    "test_training_options.py",
    "test_ray_security.py",
    "test_merge.py",
    "test_checkpoint_shards.py",
    "test_remote_code.py",
)
RANKS = {name: rank for rank, name in enumerate(LONGEST_FILES)}


@pytest.hookimpl(tryfirst=True)  # before `-m fast` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests `fast` unless they are `slow`; run the longest files first."""
    for item in items:
        if item.path.parent.name == "unit" and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
    items.sort(key=lambda item: RANKS.get(item.path.name, len(RANKS)))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 model folder, shared and never modified."""
    from tests.tiny_models import build_tiny_qwen3

    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def server() -> Iterator[ArithmeticServer]:
    from tests.integration.arithmetic_server import running

    with running() as server:
        yield server
