"""Command line, ports, devices and environment of `vllm serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from dapo_core.config.engine_args import media_limits
from dapo_core.machine.device import Device, device_for, is_bfloat16_faster
from dapo_core.machine.environment import brief_spinning
from dapo_core.machine.ports import bind_fault, free_ports, is_ipv6
from dapo_core.model.folder import IMAGE_TOKEN
from dapo_core.model.lora import Adapter, open_adapter, vllm_rank
from redaction import is_secret, redact
from tasks.config.serve import ServeConfig
from tasks.serve_model.failure import ServeError

SERVED_NAME = "policy"  # set by `dapo serve`, default of `dapo eval`
SHORT_DIGEST_LENGTH = 12
API_KEY_VARIABLE = "VLLM_API_KEY"
CPU_BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
WORKER_PROCESS_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"
CPU_PREFILL_TOKENS = 8192  # per step of a CPU server
MEDIA_OPTION = "--limit-mm-per-prompt"
MAX_UNBOUND_CORES = 8  # with more, a worker process that binds threads is worth its start


def serve_command(
    model_path: str | Path, settings: ServeConfig, port: int, name: str = SERVED_NAME
) -> list[str]:
    """The command line. The API key goes into the environment, which `ps` does not show.

    An adapter is served on its base model, which is then called NAME-base.
    """
    adapter = open_adapter(Path(model_path))
    num_bytes = settings.memory_gigabytes and int(settings.memory_gigabytes * 1024**3)
    tensor_parallel, data_parallel = settings.tensor_parallel, settings.data_parallel
    options = {
        "--served-model-name": name if adapter is None else f"{name}-base",
        "--host": settings.host,
        "--port": port,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        # requests set their sampling; the model's defaults must not apply
        "--generation-config": "vllm",
        "--reasoning-parser": settings.reasoning_parser,
        "--tensor-parallel-size": tensor_parallel if tensor_parallel > 1 else None,
        "--data-parallel-size": data_parallel if data_parallel > 1 else None,
        "--gpu-memory-utilization": settings.memory_utilization,
        "--kv-cache-memory-bytes": num_bytes,
    }
    return [
        sys.executable,
        "-m",
        "dapo_core.engines.vllm_command",
        "serve",
        str(model_path if adapter is None else adapter.base),
        *(
            word
            for option, value in options.items()
            if value is not None
            for word in (option, str(value))
        ),
        *(["--enforce-eager"] if settings.eager else []),
        *([] if adapter is None else _adapter_options(adapter, name)),
        *settings.extra_args,
    ]


def _adapter_options(adapter: Adapter, name: str) -> list[str]:
    """Options for one adapter; without targets, vLLM's adapted head fails on prompt log-probs."""
    options = ["--enable-lora", "--lora-modules", f"{name}={adapter.folder}"]
    options += ["--max-lora-rank", str(vllm_rank(adapter.lora))]
    return [*options, "--lora-target-modules", *adapter.lora.targets]


def on_this_device(
    settings: ServeConfig, model: Mapping[str, Any], num_pictures: int | None = None
) -> ServeConfig:
    """The settings; on a CPU without chunked prefill, and in float32 if that is faster.

    `model` is the content of config.json. If it reads pictures, no memory is planned for videos,
    which nothing sends, and none for more pictures in a prompt than `num_pictures`, if known.
    Raises ConfigError if serve.extra_args allow fewer.

    vLLM 0.32's CPU worker crashes on a chunked prompt with a seed: "CPU Generator does not use
    offset". Its own dtype `auto` is half precision on every CPU.
    """
    if IMAGE_TOKEN in model:
        extra = (*_media_options(settings.extra_args, num_pictures), *settings.extra_args)
        settings = settings.model_copy(update={"extra_args": extra})
    if vllm_device().kind != "cpu":
        return settings
    text = model.get("text_config", model)
    hidden_size = text.get("hidden_size", 0)
    head_dim = text.get("head_dim") or hidden_size // text.get("num_attention_heads", 1)
    is_slow = settings.dtype == "auto" and not is_bfloat16_faster(hidden_size, head_dim)
    tokens = max(settings.max_model_len, settings.max_num_seqs, CPU_PREFILL_TOKENS)
    whole = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens))
    changes = {"extra_args": (*whole, *settings.extra_args)}
    return settings.model_copy(update={**changes, **({"dtype": "float32"} if is_slow else {})})


def _media_options(words: Sequence[str], num_pictures: int | None) -> list[str]:
    """The limits of media per prompt, unless the words of serve.extra_args have them."""
    given: Any = {}
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == MEDIA_OPTION:
            with contextlib.suppress(ValueError, IndexError):  # vLLM explains what it cannot read
                given = json.loads(value or words[place + 1])
    limits = {"video": 0}
    if num_pictures is not None and isinstance(given, dict):
        limits = media_limits(given, num_pictures, f"serve.extra_args {MEDIA_OPTION}")
    return [] if given else [MEDIA_OPTION, json.dumps(limits)]


def served_name(digest: str) -> str:
    """The served name for a model digest, so that no other model can answer."""
    return f"{SERVED_NAME}-{digest[:SHORT_DIGEST_LENGTH]}"


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as a shell line with its environment, without secrets."""
    shown = [
        f"{name}={shlex.quote(value)}"
        for name, value in environment.items()
        if not is_secret(name, value)
    ]
    return redact(" ".join([*shown, shlex.join(command)]))


def serve_environment(settings: ServeConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the server gets in addition: no telemetry, and on a CPU how it uses cores."""
    added = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if settings.eager:
        # --enforce-eager still compiles the sampler, which requires a C++ compiler on a CPU
        added["TORCHDYNAMO_DISABLE"] = "1"
    if vllm_device().kind != "cpu":
        return added
    added |= brief_spinning(environment)
    if CPU_BINDING_VARIABLE in environment:
        return added
    if settings.num_devices > 1:
        added[CPU_BINDING_VARIABLE] = _cores_of_workers(settings.num_devices)
    elif WORKER_PROCESS_VARIABLE in environment:
        return added
    elif len(os.sched_getaffinity(0)) <= MAX_UNBOUND_CORES:
        added[WORKER_PROCESS_VARIABLE] = "0"  # the worker in the engine's process: 10 s less
    return added


def _cores_of_workers(num_workers: int) -> str:
    """Cores for each worker; vLLM itself wants a NUMA node for each.

    Like vLLM, leaves one core per worker to the scheduler. With fewer cores than workers, nothing
    is bound.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_workers
    if share == 0:
        return "nobind"
    starts = range(0, num_workers * share, share)
    own = (cores[start : start + max(1, share - 1)] for start in starts)
    return "|".join(",".join(map(str, numbers)) for numbers in own)


def vllm_device() -> Device:
    """The device that vLLM is built for. Raises ServeError if vLLM is not installed."""
    for distribution in ("vllm-ascend", "vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            if distribution == "vllm-ascend":
                return device_for("npu")
            return device_for("cpu" if distribution == "vllm-cpu" or "cpu" in version else "cuda")
    raise ServeError(
        "vLLM is not installed for this interpreter; install requirements/cpu.txt or your device's"
    )


def base_url(host: str, port: int) -> str:
    """The URL of a server on this machine that is bound to the host."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{address}]:{port}" if is_ipv6(address) else f"http://{address}:{port}"


def choose_port(settings: ServeConfig) -> int:
    """serve.port, or a free one."""
    if settings.port == 0:
        try:
            return free_ports(settings.host, 1)[0]
        except OSError as error:
            raise ServeError(
                f"serve.host={settings.host} has no free port to bind: {error}; set serve.host"
            ) from None
    if fault := bind_fault(settings.host, settings.port):
        raise ServeError(
            f"port {settings.port} on {settings.host} cannot be bound: {fault}; set serve.port=0 "
            "to take a free one"
        )
    return settings.port
