"""The policy on a CPU renamed to `npu`: it names no other device, and results equal the CPU's."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.machine.device import device_for
from dapo_core.memory.holdings import GRADIENTS, OPTIMIZER, WEIGHTS
from dapo_core.policy.rank import Policy
from flows.config import Config
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.renamed_cpu.device import build, install
from tests.sent_weights import sent_weights
from tests.tiny_models import Architecture, build_tiny

ON_DEVICE = {"offload_optimizer": True, "gradient_checkpointing": True, "offload_activations": True}
ON_HOST = {"offload_shards": True, "dtype": "bfloat16", "sequence_parallel": 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled device."""
    if not shutil.which("g++"):
        pytest.skip("no g++ to compile the device with")
    return build(tmp_path_factory.mktemp("device"))


def _trained(
    rank: int, library: Path, folder: Path, configs: dict[str, Config], batch: Batch
) -> Any:
    """Results of two policy steps by device, the CPU first."""
    install(library)  # before any backward pass: autograd counts the devices at the first
    found = {"cpu": _steps(rank, folder, configs["cpu"], batch)}
    torch.distributed.destroy_process_group()
    backends = device_for("npu").backends(configs["npu"].train.offload_shards)
    torch.distributed.init_process_group(
        backends, init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    with pytest.raises(RuntimeError, match="CPU tensor beside"):
        torch.ones(2, device="npu").index_select(0, torch.tensor([0]))
    found["npu"] = _steps(rank, folder, configs["npu"], batch)
    kernels = {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul"}
    kernels |= {"npu_grouped_matmul"} if (folder / "qwen3_moe").exists() else set()
    assert set(sys.modules["torch_npu"].called) == kernels
    return found


def _steps(rank: int, folder: Path, config: Config, batch: Batch) -> dict[str, Any]:
    """Run two updates, with a save and an offload in between."""
    policy = Policy(config.model.path or "", config)
    place = "cpu" if config.train.offload_shards else config.train.device
    assert {parameter.device.type for parameter in policy.model.parameters()} == {place}
    shares, _ = split_batch(batch, config.train.num_data_ranks, max_tokens=40)
    share = shares[rank // config.train.sequence_parallel]
    totals = LossTotals.of(batch, config.train.num_data_ranks)
    updates = [policy.update(share, totals, with_stats=True)]
    policy.save(str(folder / config.train.device), asynchronous=False)
    policy.offload([GRADIENTS, OPTIMIZER, WEIGHTS])
    policy.onload([WEIGHTS, OPTIMIZER])
    updates.append(policy.update(share, totals))
    weights = sent_weights(policy)
    return {
        "before": updates[0].stats,
        "norms": torch.tensor([update.grad_norm for update in updates]),
        "after": policy.log_probs(share).log_probs,
        "reference": policy.ref_log_probs(share),
        "weights": weights and {name: weight.cpu() for name, weight in weights.items()},
    }


@pytest.mark.parametrize(
    ("architecture", "train"),
    [("qwen3_moe", ON_DEVICE), ("qwen3", ON_HOST)],
    ids=["on_device", "on_host"],
)
def test_the_policy_names_no_device_but_its_own(
    architecture: Architecture, train: dict[str, Any], library: Path, tmp_path: Path
) -> None:
    model, batch = build_tiny(tmp_path / architecture, architecture, seed=3), random_batch(6, 3, 1)
    batch = replace(batch, ref_log_probs=torch.full(batch.response_mask.shape, -5.5))
    both = {"dtype": "float32", "num_ranks": 2, "learning_rate": 1e-3, "warmup_steps": 0} | train
    configs = {
        kind: make_config(
            model,
            train={"device": kind} | both,
            algorithm={"kl": {"place": "loss"}},
            rollout={"dtype": "float32", "group_size": 3},
        )
        for kind in ("cpu", "npu")
    }
    tolerance = 1e-4 if both["dtype"] == "float32" else 0.02  # attention is another kernel there
    for found in run_ranks(2, _trained, library, tmp_path, configs, batch):
        torch.testing.assert_close(found["npu"], found["cpu"], rtol=tolerance, atol=tolerance)
