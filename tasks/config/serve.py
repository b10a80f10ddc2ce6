"""The section `serve`: what `vllm serve` is started with."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key, volatile

# The key that replaces each argument. vLLM accepts _ for - in long arguments, and = before a value.
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
    "--served-model-name": "nothing: the evaluation asks for its own name",
    "--hf-token": "nothing: a server loads a local folder",
    "--api-key": "the environment variable VLLM_API_KEY, which `ps` does not show",
}


class ServeConfig(Section):
    """The `vllm serve` processes that answer the evaluation."""

    num_servers: int = volatile(1, "Independent servers of an evaluation, each on its own devices.", ge=1, le=1024)
    tensor_parallel: int = volatile(1, "Devices over which the layers of a model are split.", ge=1, le=1024)
    data_parallel: int = volatile(
        1, "Copies of the model behind one server, by vLLM's data parallelism.", ge=1, le=1024
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "Precision of the served weights; auto: the model's own, on a CPU that lacks its kernels float32."
    )
    max_model_len: int = key(22528, "Prompt plus response tokens.", ge=2)
    max_num_seqs: int = volatile(24, "Sequences decoded at once.", ge=1)
    reasoning_parser: str | None = key(
        None,
        "vLLM's parser of the model's thinking, such as qwen3 or deepseek_r1; unset: <think> tags are read.",
        min_length=1,
    )
    eager: bool = key(False, "Do not compile: a small model starts sooner, a large one runs slower.")
    memory_utilization: float | None = volatile(
        None, "Share of a device's memory that a server takes; unset: vLLM's default.", gt=0, le=1
    )
    memory_gigabytes: float | None = volatile(
        None,
        "Size of the KV cache instead of a share of the memory, as a CPU needs; unset: vLLM's default.",
        gt=0,
    )
    host: str = volatile("127.0.0.1", "Address to bind, IPv4 or IPv6.", min_length=1)
    port: int = volatile(
        0, "First port to bind; further servers take the next ones. 0 chooses free ports.", ge=0, le=65_535
    )
    startup_seconds: float = volatile(900.0, "Deadline for all servers to become healthy.", gt=0)
    extra_args: tuple[str, ...] = key((), "More arguments of `vllm serve`.")

    @property
    def devices_per_server(self) -> int:
        """Devices that one server works on."""
        return self.tensor_parallel * self.data_parallel

    @model_validator(mode="after")
    def _one_word_on_memory(self) -> ServeConfig:
        if self.memory_utilization is not None and self.memory_gigabytes is not None:
            raise ValueError(
                f"serve.memory_utilization={self.memory_utilization:g} would be ignored by serve.memory_gigabytes="
                f"{self.memory_gigabytes:g}, which sizes the KV cache by itself; set one of the two to null"
            )
        return self

    @model_validator(mode="after")
    def _ports_exist(self) -> ServeConfig:
        last = self.port + self.num_servers - 1
        if self.port and last > 65_535:
            raise ValueError(
                f"serve.port={self.port} with serve.num_servers={self.num_servers} needs ports up to {last}, "
                "beyond 65535; lower serve.port, or set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _keys_before_arguments(self) -> ServeConfig:
        for word in self.extra_args:
            name = word.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if name in _SERVE_KEYS:
                raise ValueError(f"serve.extra_args: {word} has a place of its own; use {_SERVE_KEYS[name]}")
        return self
