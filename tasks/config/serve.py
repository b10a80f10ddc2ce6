"""The section `serve`: settings of `vllm serve`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key, volatile

# What to use instead of each argument. vLLM accepts _ for - in long arguments, and = before a
# value.
_SERVE_KEYS = {
    "--tensor-parallel-size": "serve.tensor_parallel",
    "-tp": "serve.tensor_parallel",
    "--data-parallel-size": "serve.data_parallel",
    "-dp": "serve.data_parallel",
    "--dtype": "serve.dtype",
    "--max-model-len": "serve.max_model_len",
    "--max-num-seqs": "serve.max_num_seqs",
    "--enforce-eager": "serve.eager",
    "--no-enforce-eager": "serve.eager",
    "--reasoning-parser": "serve.reasoning_parser",
    "--gpu-memory-utilization": "serve.memory_utilization",
    "--kv-cache-memory-bytes": "serve.memory_gigabytes",
    "--host": "serve.host",
    "--port": "serve.port",
    "--trust-remote-code": "model.trust_remote_code",
    "--served-model-name": "none: the evaluation sets the name",
    "--hf-token": "none: a server loads a local folder",
    "--api-key": "the environment variable VLLM_API_KEY, which `ps` does not show",
}


class ServeConfig(Section):
    """The server used for evaluation."""

    tensor_parallel: int = volatile(1, "Devices that each layer is split across.", ge=1, le=1024)
    data_parallel: int = volatile(
        1, "Replicas of the model behind the server's URL, each on its own devices.", ge=1, le=1024
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "Precision of the served weights; auto: the model's, bfloat16 for a float32 model; float32 "
        "on a CPU without bfloat16 instructions.",
    )
    max_model_len: int = key(22528, "Prompt plus response tokens.", ge=2)
    max_num_seqs: int = volatile(24, "Sequences decoded concurrently.", ge=1)
    reasoning_parser: str | None = key(
        None,
        "vLLM reasoning parser, such as qwen3 or deepseek_r1; unset: <think> tags are parsed.",
        min_length=1,
    )
    eager: bool = key(
        False, "Disable compilation: small models start sooner, large ones run slower."
    )
    memory_utilization: float | None = volatile(
        None, "Share of device memory for a server; unset: vLLM's default.", gt=0, le=1
    )
    memory_gigabytes: float | None = volatile(
        None,
        "Size of the KV cache instead of a share of memory, as needed on a CPU; unset: vLLM's "
        "default.",
        gt=0,
    )
    host: str = volatile("127.0.0.1", "Address to bind, IPv4 or IPv6.", min_length=1)
    port: int = volatile(0, "Port to bind; 0 picks a free one.", ge=0, le=65_535)
    startup_seconds: float | None = volatile(
        None,
        "Time limit for the server to become healthy; unset: 900 s, and a second for each 200 MB "
        "of weights.",
        gt=0,
    )
    extra_args: tuple[str, ...] = key((), "More arguments of `vllm serve`.")

    @property
    def num_devices(self) -> int:
        """Devices that the server uses."""
        return self.tensor_parallel * self.data_parallel

    @model_validator(mode="after")
    def _memory_is_set_once(self) -> ServeConfig:
        if self.memory_utilization is not None and self.memory_gigabytes is not None:
            raise ValueError(
                f"serve.memory_utilization={self.memory_utilization:g} would be ignored by "
                f"serve.memory_gigabytes={self.memory_gigabytes:g}, which sizes the KV cache by "
                "itself; set one of the two to null"
            )
        return self

    @model_validator(mode="after")
    def _keys_before_arguments(self) -> ServeConfig:
        for word in self.extra_args:
            name = word.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if name in _SERVE_KEYS:
                raise ValueError(
                    f"serve.extra_args: {word} cannot be given here; use {_SERVE_KEYS[name]}"
                )
        return self
