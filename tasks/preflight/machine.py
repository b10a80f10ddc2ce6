"""Checks of the machine that a recipe's stages run on: devices, memory, compilers, Ray, ports and disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.device import device_for
from dapo_core.errors import ConfigError, DapoError
from dapo_core.memory.devices import GIB, describe_bytes
from dapo_core.memory.plan import Disk, disk_plan
from dapo_core.trackers import require_trackers
from dapo_core.versions import UNKNOWN_SET, require_versions, stack, unknown_set
from downloads import DownloadError
from eval import EvaluationError
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.store import ArtifactStore
from tasks.config import ChainConfig
from tasks.external.launch import job_server
from tasks.links import chain_of
from tasks.preflight.cluster import check_cluster, check_devices_here
from tasks.preflight.environment import check_environment
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.serve_model.command import choose_ports, serve_environments, vllm_device

if TYPE_CHECKING:
    from dapo_core.memory.devices import Limit
    from tasks.preflight.model import ModelFacts

INPUTS = ("prepare_data", "fetch_model")  # of a training, by their labels
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPUAttentionBackend
CACHE_ROOM = 1.25  # vLLM rounds to blocks and keeps some

OF_ANOTHER_MACHINE = frozenset(
    {"devices", "engine", "memory", "Ray", "trainer"}
)  # checks that may fail where one only plans


def check_machine(
    config: ChainConfig, facts: ModelFacts, model: Path | None, is_whole: bool, findings: Findings
) -> Limit | None:
    """Everything that the stages need of the machine; if `is_whole`, of each node of the cluster, too.

    Returns the memory of the cluster's smallest device, where that was looked at.
    """
    is_own = config.train.backend == "own"
    if is_own:  # another trainer's packages and devices are not those of this environment
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
    if is_own and config.train.ray_address is not None:
        return check_cluster(config, model, is_whole, findings)
    return None


def _check_devices(config: ChainConfig, model: Path | None, findings: Findings) -> None:
    """The devices of policy ranks and rollout workers; those of a cluster are Ray's to know."""
    train, device = config.train, device_for(config.train.device)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        findings.add(
            "engine", FAIL, "rollout.engine=vllm, and vLLM is not installed here",
            "install requirements/ for your device, or --set rollout.engine=hf",
        )  # fmt: skip
    if train.ray_address is not None or _is_on_a_cluster(config):
        return
    with findings.catching("devices"):
        device.require()
        if device.kind == "cpu":
            cores = len(os.sched_getaffinity(0))
            wanted = train.num_ranks * train.threads_per_rank
            findings.add("devices", OK, f"{cores} cores; {wanted} threads of policy ranks")
            return
        names = device.visible(os.environ)
        if config.num_devices > len(names):
            engines = "" if train.is_colocated else f" + {config.rollout.num_devices} of rollout.num_workers"
            sharing = "" if train.is_colocated else ", or let ranks and engines share: train.placement=colocated"
            raise ConfigError(
                f"train.num_ranks={train.num_ranks}{engines} = {config.num_devices} devices, and this machine "
                f"shows {len(names)} of {device.kind} ({device.visible_variable}); lower them{sharing}, or set "
                "train.ray_address to a cluster"
            )
        findings.add("devices", OK, f"{config.num_devices} of {len(names)} {device.kind} devices")
        check_devices_here(config, model, findings)


def _is_on_a_cluster(config: ChainConfig) -> bool:
    """Whether another trainer runs on devices of a Ray cluster, which this machine cannot count."""
    return config.train.backend != "own" and (
        job_server(config.external) is not None or os.environ.get("RAY_ADDRESS", "local") not in ("", "local")
    )


def _check_serving(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """Devices, ports and compiler of the servers; on a CPU the widths of heads that vLLM can compute."""
    serve = config.serve
    with findings.catching("serving"):
        serve_environments(serve, os.environ)
        choose_ports(serve)
        if vllm_device().kind == "cpu":
            needs_compiler = not serve.eager and not any(map(shutil.which, ("g++", "c++", "clang++")))
            if needs_compiler:
                raise ConfigError(
                    "serve.eager=false compiles the model, and no C++ compiler is here; --set serve.eager=true"
                )
            if facts.head_width is not None and facts.head_width not in CPU_HEAD_WIDTHS:
                raise ConfigError(
                    f"the model's attention heads have {facts.head_width} numbers, and vLLM on a CPU computes "
                    f"heads of {', '.join(map(str, CPU_HEAD_WIDTHS))}: its server would end at the first request; "
                    f"choose another model"
                )
            if serve.memory_gigabytes is None:
                findings.add(
                    "serving", WARN,
                    "serve.memory_gigabytes is unset: on a CPU vLLM then takes most of the memory for its cache",
                    "--set serve.memory_gigabytes=1.0",
                )  # fmt: skip
    if config.train.compile and config.train.device == "cpu" and not shutil.which("g++"):
        findings.add("compiler", FAIL, "train.compile=true needs g++ on a CPU", "--set train.compile=false")


def _check_cache(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """Whether keys and values of one longest sequence fit the caches whose size the recipe names."""
    if facts.token_bytes is None:
        return
    rollout, longest = config.rollout, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    caches = [("serve.memory_gigabytes", config.serve.memory_gigabytes, config.serve.max_model_len, 1)]
    if rollout.engine == "vllm" and config.train.device == "cpu":
        caches.append(("rollout.memory_gigabytes", rollout.memory_gigabytes, longest, 2))  # float32
    for key, gigabytes, tokens, factor in caches:
        needed = tokens * facts.token_bytes * factor / GIB
        if gigabytes is not None and needed > gigabytes:
            findings.add(
                "cache", FAIL,
                f"{key}={gigabytes:g} holds no sequence of {tokens} tokens, whose keys and values take "
                f"{needed:.2f} GiB: vLLM would refuse it",
                f"--set {key}={needed * CACHE_ROOM + 0.05:.1f}, or shorter lengths",
            )  # fmt: skip


def _check_disk(config: ChainConfig, facts: ModelFacts, findings: Findings) -> None:
    """The store can be written to, and has room for checkpoints and the merged models."""
    store = Path(config.store.path).absolute()
    existing = next(path for path in (store, *store.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        findings.add(
            "store",
            FAIL,
            f"{store} cannot be written to: {existing} is not a writable folder",
            "set store.path to another directory",
        )
        return
    steps = config.checkpoint_steps
    disk = disk_plan(config, facts.parameters, steps)
    needed = disk.num_bytes
    free = shutil.disk_usage(existing).free
    there = _bytes_there(config, disk) if needed > free else 0
    needed = max(needed - there, 0)
    found = f"{describe_bytes(free)} are free in {config.store.path}"
    num_kept = len({*config.checkpoint.keep_steps, *steps})
    of_steps = describe_bytes(disk.checkpoint * num_kept + disk.merged * len(steps))
    kept = (
        f", {of_steps} of them for checkpoints of {num_kept} steps that are kept" if num_kept and not there else ""
    )
    if needed > free:
        findings.add(
            "disk", FAIL,
            f"{found}; {disk.num_checkpoints} checkpoints and merged models take about "
            f"{describe_bytes(needed)}{' more than is there' if there else ''}{kept}",
            "another store.path, fewer steps in evaluate.checkpoints, a lower checkpoint.keep_last, or `dapo gc "
            "--keep-runs N`",
        )  # fmt: skip
    else:
        findings.add("disk", OK, found + (f", about {describe_bytes(needed)} are needed{kept}" if needed else ""))


def _bytes_there(config: ChainConfig, disk: Disk) -> int:
    """Of the plan's bytes those that finished stages wrote, and an unfinished training, which continues."""
    store, num_bytes = ArtifactStore(config.store.path), 0
    found: dict[str, Artifact] = {}
    for link in chain_of(config):
        is_training, is_merged = link.label == "train_policy", link.label.startswith("merge_")
        if not (is_training or is_merged or link.label in INPUTS) or not found.keys() >= set(link.needs):
            continue
        try:
            key = link.key(*(found[label] for label in link.needs))
        except (DapoError, DownloadError, EvaluationError):  # another check, or the stage, says why
            continue
        if (artifact := store.lookup(key.stage, key.key)) is not None:
            found[link.label] = artifact
            num_bytes += is_training * disk.checkpoint * disk.num_checkpoints + is_merged * disk.merged
        elif is_training and (left := store.unfinished(key.stage, key.key)) is not None:
            with suppress(FileNotFoundError):  # a training that is at work removes old checkpoints
                written = sum(path.stat().st_size for path in left.rglob("*") if path.is_file())
                num_bytes += min(written, disk.checkpoint * disk.num_checkpoints)
    return num_bytes
