"""bench/gpu.py on a CPU with tiny shapes, so that only the device is new where it counts."""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dapo_core.machine.device import device_for

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
# Top-level modules of an image with torch and transformers, and those that wheels bring.
PRESENT = set(
    """torch torchgen transformers accelerate tokenizers safetensors huggingface_hub hf_xet numpy
    yaml packaging filelock regex tqdm typer click rich requests jinja2 markupsafe sympy mpmath PIL
    psutil pynvml xxhash pyarrow networkx fsspec typing_extensions colorama httpx httpcore anyio
    idna h11 certifi sniffio shellingham sklearn scipy pandas""".split()
)
CARRIED = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection", "blake3"}
# what huggingface_hub and transformers import where it is installed
OPTIONAL = {"dill", "h2", "hpack", "httpcore2", "httpx2", "hyperframe", "socksio", "torchvision"}
OPTIONAL |= {"truststore"}
REPORT_IMPORTS = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "vllm", "prefect", "datasets", "zlib_ng"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import gpu_parts
files = {name.split(".")[0]: getattr(module, "__file__", None) for name, module in
         list(sys.modules.items())}
print(json.dumps([name for name, file in files.items() if "site-packages" in (file or "")]))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The parts in this process, as ranks of its own group."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    num_threads = torch.get_num_threads()
    yield importlib.import_module("gpu_parts")
    if torch.distributed.is_initialized():  # closing vLLM ends the group
        torch.distributed.destroy_process_group()
    torch.set_num_threads(num_threads)


def _rows(parts: ModuleType, part: str, folder: Path) -> dict[str, dict[str, Any]]:
    record = parts.Record(part, folder / "rows.jsonl", device_for("cpu"))
    (folder / "scratch").mkdir()
    parts.PARTS[part](parts.TINY, device_for("cpu"), folder / "scratch", record)
    rows = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert not [row for row in rows if "error" in row]
    return {row["case"]: row for row in rows}


def test_the_policy_part_measures_every_mode_against_the_plan(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # compiling takes a minute of a CPU; the whole command below does it
    modes = {name: keys for name, keys in parts.MODES.items() if "compile" not in keys}
    monkeypatch.setattr(parts, "MODES", modes)
    rows = _rows(parts, "policy", tmp_path)
    assert len(rows) == 2 * len(modes)  # passes
    assert all(row["tokens/s"] > 0 and row["planned GiB"] > 0 for row in rows.values())


def test_the_gradients_part_compares_two_precisions(parts: ModuleType, tmp_path: Path) -> None:
    rows = _rows(parts, "gradients", tmp_path)
    assert rows["float32 on cpu"]["relative difference"] == 0
    assert 1e-4 < rows["bfloat16 on cpu"]["relative difference"] < 0.05
    assert rows["fused kernel swiglu"]["result"] == "none on this device"


def test_the_decoding_part_compares_engine_and_policy(parts: ModuleType, tmp_path: Path) -> None:
    rows = _rows(parts, "decoding", tmp_path)
    assert list(rows) == ["tiny, hf engine", "tiny, vllm engine"]
    for row in rows.values():
        assert row["responses"] == parts.TINY.num_prompts
        assert 0 < row["response tokens"] <= row["responses"] * parts.TINY.response_tokens
        assert row["mean difference of log-probs"] < 1e-5


def test_the_checkpoint_part_loads_what_it_saved(parts: ModuleType, tmp_path: Path) -> None:
    rows = _rows(parts, "checkpoint", tmp_path)
    assert rows["loaded after an update"]["weights"] == "equal"
    assert rows["saved while training"]["seconds until written"] > 0


def test_overlap_counts_copies_to_the_device_during_kernels(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    events = [
        ("kernel", "gemm", 0, 100),
        ("kernel", "gemm", 50, 100),  # together 0 to 150
        ("kernel", "norm", 300, 100),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 250),  # 50 + 50 during kernels
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 100),
    ]
    content = [
        {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}
        for kind, name, start, length in events
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": content}))
    assert parts.overlap(tmp_path / "trace.json") == (0.25, 0.1)


def test_a_bare_machine_has_what_the_parts_import() -> None:
    program = [sys.executable, "-c", REPORT_IMPORTS]
    environment = {"PYTHONPATH": f"{ROOT}:{BENCH}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    imported = {name for name in json.loads(done.stdout) if not name.startswith("_")}
    assert imported - PRESENT - OPTIONAL == CARRIED


def test_a_part_that_fails_or_hangs_is_a_row_with_its_error(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = argparse.Namespace(output=tmp_path, device="cuda", tiny=True)
    environment = {"PYTHONPATH": str(ROOT)}
    (row,) = gpu.run_part("gradients", options, environment, tmp_path)
    assert row["case"] == "the part"
    assert "train.device=cuda, but torch" in row["error"]
    monkeypatch.setitem(gpu.SHARES, "training", 0.2)
    options.device = "cpu"
    (row,) = gpu.run_part("training", options, environment, tmp_path)
    assert row["error"].startswith("stopped at its share of 1 s")
    measured = {"part": "training", "case": "step 1", "reward": 0.25}
    report = {**gpu.machine(), "seconds": {"training": 1.0}, "rows": [measured, row]}
    assert "| step 1 | 0.25 |\n\n- the part: **stopped" in gpu.render(report)


def test_all_shares_fit_into_six_minutes(gpu: ModuleType) -> None:
    assert sum(gpu.SHARES.values()) <= 350
