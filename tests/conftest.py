"""Settings for every test, the marker `fast`, and the order of the files."""

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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where more run than there are cores, spinning threads starve
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ |= PROJECT_SETTINGS  # before Prefect is imported
os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported
# A shell that starts us in the background has us ignore these, and our children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
typer.testing._get_command = functools.cache(typer.testing._get_command)  # it takes as long as most commands do

# Files that take minutes, the longest first: begun last, one of them would keep a single worker busy in the end.
LONGEST_FILES = (
    "test_deployment.py",
    "test_kill_matrix.py",
    "test_readme_commands.py",
    "test_own_data.py",
    "test_slow_line.py",
    "test_cluster_up.py",
    "test_rendered.py",
    "test_training.py",
    "test_deployments.py",
    "test_cancelling.py",
    "test_serve.py",
    "test_engines.py",
    "test_services.py",
    "test_dead_workers.py",
    "test_other_trainer_chain.py",
    "test_nodes.py",
    "test_tensor_parallel.py",
    "test_policy.py",
    "test_training_resumed.py",
    "test_other_trainer.py",
    "test_eval_run.py",
    "test_fetch_model.py",
    "test_training_options.py",
    "test_ray_security.py",
    "test_verl_config.py",
    "test_merge.py",
    "test_checkpoint_shards.py",
    "test_remote_code.py",
)
RANKS = {name: rank for rank, name in enumerate(LONGEST_FILES)}


@pytest.hookimpl(tryfirst=True)  # before `-m fast` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests `fast` unless they are marked `slow`; begin with the longest files."""
    for item in items:
        if item.path.parent.name == "unit" and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
    items.sort(key=lambda item: RANKS.get(item.path.name, len(RANKS)))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, which no test changes."""
    from tests.tiny_models import build_tiny_qwen3

    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def server() -> Iterator[ArithmeticServer]:
    from tests.integration.arithmetic_server import running

    with running() as server:
        yield server
