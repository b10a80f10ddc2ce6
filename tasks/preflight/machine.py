"""Check the machine that runs a recipe's stages: devices, compilers, Ray, ports, disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import ConfigError, DapoError
from dapo_core.machine.device import device_for
from dapo_core.machine.versions import UNKNOWN_SET, require_versions, stack, unknown_set
from dapo_core.memory.devices import GIB, describe_bytes
from dapo_core.memory.plan import Disk, disk_plan
from downloads import DownloadError
from eval import EvaluationError
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.links import chain_of
from tasks.preflight.cluster import check_cluster, check_devices_here
from tasks.preflight.environment import check_environment
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.serve_model.command import choose_port, vllm_device
from tasks.tracking.processes import require_trackers

if TYPE_CHECKING:
    from dapo_core.memory.devices import Limit
    from tasks.preflight.model import ModelFacts

INPUTS = ("prepare_data", "fetch_model")  # labels of the stages that training reads
# Of vLLM's CPUAttentionBackend.
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CACHE_MARGIN = 1.25  # vLLM rounds to blocks and reserves some
# Checks that may fail on a machine that only plans the run.
OF_ANOTHER_MACHINE = frozenset({"devices", "engine", "memory", "Ray"})


def check_machine(
    config: ChainConfig, facts: ModelFacts, model: Path | None, is_whole: bool, findings: Findings
) -> Limit | None:
    """Check what the stages need of the machine and, if `is_whole`, of each node of the cluster.

    Returns the memory of the cluster's smallest device, if that was examined.
    """
    trains = not config.is_adopted
    if trains:
        with findings.catching("versions"):
            require_versions()
            if difference := unknown_set(stack()):
                findings.add("versions", WARN, difference, UNKNOWN_SET)
        check_environment(os.environ, config, findings)
        _check_devices(config, model, findings)
    with findings.catching("trackers"):
        require_trackers(config.train.trackers)
    _check_serving(config, facts, findings)
    _check_cache(config, facts, findings)
    _check_disk(config, facts, findings)
    if trains and config.train.ray_address is not None:
        return check_cluster(config, model, is_whole, findings)
    return None


def _check_devices(config: ChainConfig, model: Path | None, findings: Findings) -> None:
    """Check this machine's devices for ranks and engines, unless a cluster provides them."""
    train, device = config.train, device_for(config.train.device)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        findings.add(
            "engine",
            FAIL,
            "rollout.engine=vllm, but vLLM is not installed here",
            "install requirements/ for your device, or --set rollout.engine=hf",
        )
    if train.ray_address is not None:
        return
    with findings.catching("devices"):
        device.require()
        if device.kind == "cpu":
            cores = len(os.sched_getaffinity(0))
            num_threads = train.num_ranks * config.threads_per_rank
            findings.add("devices", OK, f"{cores} cores; {num_threads} threads of policy ranks")
            return
        names = device.visible(os.environ)
        if config.num_devices > len(names):
            engines, sharing = "", ""
            if not train.is_colocated:
                engines = f" + {config.rollout.num_devices} for rollout.num_workers"
                sharing = ", let ranks and engines share (train.placement=colocated)"
            raise ConfigError(
                f"train.num_ranks={train.num_ranks}{engines} = {config.num_devices} devices, but "
                f"this machine has {len(names)} visible {device.kind} devices "
                f"({device.visible_variable}); lower these keys{sharing} or set train.ray_address "
                "to a cluster"
            )
        findings.add("devices", OK, f"{config.num_devices} of {len(names)} {device.kind} devices")
        check_devices_here(config, model, findings)


def _check_serving(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """Check port and compiler of the server, and on a CPU the model's head size."""
    serve = config.serve
    with findings.catching("serving"):
        choose_port(serve)
        if vllm_device().kind == "cpu":
            if not serve.eager and not any(map(shutil.which, ("g++", "c++", "clang++"))):
                raise ConfigError(
                    "serve.eager=false compiles the model, but there is no C++ compiler; --set "
                    "serve.eager=true"
                )
            if facts.head_width is not None and facts.head_width not in CPU_HEAD_WIDTHS:
                raise ConfigError(
                    f"the model's attention head size is {facts.head_width}, but vLLM on a CPU "
                    f"supports {', '.join(map(str, CPU_HEAD_WIDTHS))}: its server would crash at "
                    "the first request; choose another model"
                )
            if serve.memory_gigabytes is None:
                findings.add(
                    "serving",
                    WARN,
                    "serve.memory_gigabytes is unset: on a CPU vLLM takes most of the memory for "
                    "its cache",
                    "--set serve.memory_gigabytes=1.0",
                )
    if config.train.compile and config.train.device == "cpu" and not shutil.which("g++"):
        findings.add(
            "compiler", FAIL, "train.compile=true needs g++ on a CPU", "--set train.compile=false"
        )


def _check_cache(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """Check that the longest sequence fits each KV cache whose size the recipe sets."""
    if facts.token_bytes is None:
        return
    serve, rollout = config.serve, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    caches = [("serve.memory_gigabytes", serve.memory_gigabytes, serve.max_model_len, 1)]
    if rollout.engine == "vllm" and config.train.device == "cpu":
        caches.append(("rollout.memory_gigabytes", rollout.memory_gigabytes, longest, 2))  # float32
    for key, gigabytes, tokens, factor in caches:
        needed = tokens * facts.token_bytes * factor / GIB
        if gigabytes is not None and needed > gigabytes:
            findings.add(
                "cache",
                FAIL,
                f"{key}={gigabytes:g} cannot hold a sequence of {tokens} tokens, whose keys and "
                f"values take {needed:.2f} GiB: vLLM would refuse to start",
                f"--set {key}={needed * CACHE_MARGIN + 0.05:.1f}, or lower the lengths",
            )


def _check_disk(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """Check that the store is writable and has room for checkpoints and merged models."""
    store = Path(config.store.path).absolute()
    existing = next(path for path in (store, *store.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        findings.add(
            "store",
            FAIL,
            f"{store} is not writable: {existing} is not a writable folder",
            "set store.path to another directory",
        )
        return
    steps = config.checkpoint_steps
    disk = disk_plan(config, facts.parameters, steps, facts.num_adapted)
    if config.is_adopted:  # its files are linked
        disk = replace(disk, num_checkpoints=0)
    needed = disk.num_bytes
    free = shutil.disk_usage(existing).free
    written = _written_bytes(config, disk) if needed > free else 0
    needed = max(needed - written, 0)
    found = f"{describe_bytes(free)} free in {config.store.path}"
    num_kept = len({*config.checkpoint.keep_steps, *steps})
    kept_bytes = describe_bytes(disk.checkpoint * num_kept + disk.merged * len(steps))
    kept = f", {kept_bytes} of them for {num_kept} steps whose checkpoints are kept"
    kept = kept if num_kept and not written else ""
    if needed > free:
        findings.add(
            "disk",
            FAIL,
            f"{found}; {disk.num_checkpoints} checkpoints and merged models take about "
            f"{describe_bytes(needed)}{' more than is already written' if written else ''}{kept}",
            "set another store.path, fewer steps in evaluate.checkpoints or a lower "
            "checkpoint.keep_last, or run `dapo runs gc --keep-runs N`",
        )
    else:
        needs = f", about {describe_bytes(needed)} needed{kept}" if needed else ""
        findings.add("disk", OK, f"{found}{needs}")


def _written_bytes(config: ChainConfig, disk: Disk) -> int:
    """Return how many of the plan's bytes finished stages and an unfinished training hold."""
    store, num_bytes = ArtifactStore(config.store.path), 0
    checkpoints = disk.checkpoint * disk.num_checkpoints
    found: dict[str, Artifact] = {}
    for link in chain_of(config):
        is_training, is_merged = link.label == "train_policy", link.label.startswith("merge_")
        is_counted = is_training or is_merged or link.label in INPUTS
        if not is_counted or not found.keys() >= set(link.needs):
            continue
        try:
            key = link.key(*(found[label] for label in link.needs))
        except (DapoError, DownloadError, EvaluationError):  # another check or the stage reports it
            continue
        if (artifact := store.lookup(key.stage, key.key)) is not None:
            found[link.label] = artifact
            num_bytes += is_training * checkpoints + is_merged * disk.merged
        elif is_training and (left := store.unfinished(key.stage, key.key)) is not None:
            with suppress(FileNotFoundError):  # a running training removes old checkpoints
                size = sum(path.stat().st_size for path in left.rglob("*") if path.is_file())
                num_bytes += min(size, checkpoints)
    return num_bytes
