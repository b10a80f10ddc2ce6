"""Real policy ranks for tests: processes in one gloo group that run a function each."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

PRELOAD = [
    "dapo_core.policy.rank",
    "transformers.models.qwen3.modeling_qwen3",
    "flows.config",
    "pytest",
]


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returned on each of `num_ranks` gloo ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank,
            args=(num_ranks, folder, function, arguments),
            nprocs=num_ranks,
            start_method="forkserver",
        )
        return [
            torch.load(Path(folder) / f"result_{rank}", weights_only=False)
            for rank in range(num_ranks)
        ]


def _rank(
    rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
    )
    torch.save(function(rank, *arguments), Path(folder) / f"result_{rank}")
    torch.distributed.destroy_process_group()
