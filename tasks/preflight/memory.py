"""The memory plan of a recipe: model shape, device memory, and whether training and servers fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.config.training import TrainingConfig
from dapo_core.demo.recipe_model import recipe_config
from dapo_core.errors import ConfigError, ModelError
from dapo_core.machine.device import device_for
from dapo_core.memory.devices import DEVICES, GIB, Limit, find_device
from dapo_core.memory.engine import EngineMemory, engine_memory
from dapo_core.memory.plan import ADVICE, MemoryPlan, plan_memory
from dapo_core.memory.published import PUBLISHED, published_config
from dapo_core.memory.shape import shape_of
from dapo_core.model.folder import read_config
from dapo_core.model.lora import full_model
from tasks.config import ChainConfig, ModelConfig
from tasks.fetched_model import model_name
from tasks.preflight.finding import FAIL, OK, WARN, Findings

if TYPE_CHECKING:
    from dapo_core.memory.shape import ModelShape

SERVER_SHARE = 0.9  # of device memory; vLLM's default is 0.9 or 0.92, depending on its version
MOST_PARTS = 64  # devices that advice splits a server across


def plan_of(
    config: ChainConfig,
    folder: Path | None = None,
    gigabytes: float | None = None,
    limit: Limit | None = None,
) -> MemoryPlan:
    """Return the recipe's plan; `folder` is the fetched model.

    The device has `gigabytes` GiB if given; `limit` is the memory found, for a recipe that names no
    device model. Raises ConfigError for a model that is neither here nor in the published table,
    and for an unknown device; ModelError for an architecture whose tensors are not known.
    """
    shape = shape_of(model_config(config.model, folder))
    if limit is None or config.train.device_model is not None:
        limit = device_limit(config, gigabytes)
    return plan_memory(config, shape, limit, config.checkpoint_steps)


def check_memory(
    config: ChainConfig, folder: Path | None, findings: Findings, limit: Limit | None = None
) -> None:
    """Check that the plan fits; skipped for a model that is not fetched yet and not in the table.

    `limit` is the memory found on the devices, for a recipe that names no device model.
    """
    if not (folder and (folder / "config.json").is_file()) and _known_config(config.model) is None:
        return
    try:
        plan = plan_of(config, folder, limit=limit)
    except ModelError as error:
        advice = "watch perf/max_memory_allocated_gb in the first steps"
        findings.add("memory", WARN, str(error), advice)
        return
    except ConfigError as error:
        findings.add("memory", FAIL, str(error))
        return
    check_server(config, folder, plan.limit, findings)
    if not plan.shortages:
        if plan.limit.num_bytes is None and config.train.device != "cpu":
            found = f"the memory of the devices is not known here; needed: {summary(plan)}"
            findings.add("memory", WARN, found, f"set train.device_model: {', '.join(DEVICES)}")
        else:
            findings.add("memory", OK, summary(plan))
        return
    is_allowed = config.train.allow_oversubscription
    advice = f"{ADVICE}; dapo plan CONFIG --memory shows the details"
    if not is_allowed:
        advice += ", and train.allow_oversubscription=true runs it anyway"
    findings.add("memory", WARN if is_allowed else FAIL, "; ".join(plan.shortages), advice)


def check_server(
    config: ChainConfig, folder: Path | None, limit: Limit, findings: Findings
) -> None:
    """Check that the evaluation's servers fit; extra arguments may make more room."""
    serve = config.serve
    if limit.num_bytes is None or config.train.device == "cpu" or serve.memory_gigabytes:
        return
    shape = shape_of(model_config(config.model, folder))
    memory = server_memory(config, shape, limit.num_bytes)
    if memory.num_sequences:
        return
    least = least_server(config, shape, limit.num_bytes, MOST_PARTS)
    found = (
        f"serve.tensor_parallel={serve.tensor_parallel} puts {memory.weights / GIB:.1f} GiB of "
        f"weights on a device, and vLLM uses {_share(config):g} of its "
        f"{limit.num_bytes / GIB:.1f} GiB ({limit.name}): there is no room to serve a sequence of "
        f"serve.max_model_len={serve.max_model_len} tokens, whose keys and values take "
        f"{memory.sequence_bytes / GIB:.1f} GiB"
    )
    advice = "lower serve.max_model_len or raise serve.memory_utilization"
    if least is not None and least != serve.tensor_parallel:
        advice = f"set serve.tensor_parallel={least}, or {advice}"
    is_allowed = config.train.allow_oversubscription or bool(serve.extra_args)
    findings.add("memory", WARN if is_allowed else FAIL, found, advice)


def server_memory(config: ChainConfig, shape: ModelShape, device_bytes: int) -> EngineMemory:
    """Return the memory of the evaluation's server: that of an engine with its settings."""
    serve = config.serve
    settings = {
        "engine": "vllm",
        "tensor_parallel": serve.tensor_parallel,
        "pipeline_parallel": 1,
        "dtype": serve.dtype,
        "max_num_seqs": serve.max_num_seqs,
        "max_response_tokens": serve.max_model_len - config.data.max_prompt_tokens,
        "memory_utilization": _share(config),
        "engine_args": {"enforce_eager": serve.eager},
    }
    server = config.rollout.model_copy(update=settings)
    return engine_memory(config.model_copy(update={"rollout": server}), shape, device_bytes)


def least_server(
    config: ChainConfig, shape: ModelShape, device_bytes: int, most: int, num_sequences: int = 1
) -> int | None:
    """Return the smallest serve.tensor_parallel up to `most` with a cache for that many sequences.

    None if there is none.
    """
    for parts in powers_of_2(most):
        serve = config.serve.model_copy(update={"tensor_parallel": parts})
        one = config.model_copy(update={"serve": serve})
        fitting = server_memory(one, shape, device_bytes).num_sequences or 0
        if shape.heads % parts == 0 and fitting >= num_sequences:
            return parts
    return None


def powers_of_2(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _share(config: ChainConfig) -> float:
    return config.serve.memory_utilization or SERVER_SHARE


def summary(plan: MemoryPlan) -> str:
    """Return the peak and the limit of each kind of device, as in the headers of recipes."""
    limit = "" if plan.limit.num_bytes is None else f" of {plan.limit.num_bytes / GIB:.1f}"
    peaks = [f"{load.name} {load.peak_bytes / GIB:.1f}{limit} GiB" for load in plan.loads]
    return f"{', '.join(peaks)} ({plan.limit.name})"


def device_limit(config: TrainingConfig, gigabytes: float | None = None) -> Limit:
    """Return a device's memory: as given, of train.device_model, or this machine's."""
    train = config.train
    if gigabytes is not None:
        return Limit(f"{gigabytes:g} GiB as given", int(gigabytes * GIB))
    if train.device_model is not None:
        size = find_device(train.device_model)
        if size.kind != train.device:
            raise ConfigError(
                f"train.device_model={train.device_model} is a {size.kind} device, but "
                f"train.device={train.device}; change one of the two"
            )
        return Limit(train.device_model, size.num_bytes)
    own = None if train.ray_address is not None else device_for(train.device).memory_bytes()
    if own is None:
        return Limit("unknown: set train.device_model", None)
    return Limit("this machine's memory" if train.device == "cpu" else "this machine's device", own)


def model_config(model: ModelConfig, folder: Path | None = None) -> Mapping[str, Any]:
    """Return the model's config.json, from its folder, the published models or the recipe."""
    path = folder or (Path(str(model.path)) if model.source == "path" else None)
    path = None if path is None else full_model(path)
    if path is not None and (path / "config.json").is_file():
        return read_config(path)
    known = _known_config(model)
    if known is None:
        name = model.path if model.source == "path" else model_name(model)
        raise ConfigError(
            f"the memory plan needs config.json of {name}, which is not on this machine; fetch the "
            "model (dapo "
            f"stage fetch-model) or set model.path to its folder. Built in: {', '.join(PUBLISHED)}"
        )
    return known


def _known_config(model: ModelConfig) -> Mapping[str, Any] | None:
    if model.source == "recipe":
        return recipe_config(model.recipe)
    return published_config(str(model.id or model.path or ""))
