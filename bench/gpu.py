"""Measures the training core on one accelerator with one command, in six minutes at most.

    python3 bench/gpu.py OUT                        # on a machine with an H100 or H200
    python3 bench/gpu.py OUT --device cpu --tiny    # the rehearsal: every part, tiny shapes

Each part runs in a process of its own, within its share of the time, and writes a row per case. A
part that fails, hangs or runs out of memory ends as a row with its error; the others go on. OUT
gets gpu.json (machine, versions, rows), gpu.md (the same as tables, for docs/gpu.md) and gpu.log.

Needs neither Ray nor vLLM, but torch, transformers, pyarrow, psutil, xxhash, pydantic and blake3.
To carry the last two to a machine without network:

    python3 -m pip download -d wheels --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 pydantic blake3
    python3 bench/gpu.py OUT --wheels wheels
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

SHARES = {  # seconds of each part on an accelerator
    "policy": 125.0,
    "gradients": 25.0,
    "transfer": 35.0,
    "decoding": 40.0,
    "checkpoint": 40.0,
    "training": 85.0,
}
CPU_FACTOR = 4  # a rehearsal may take longer
TITLES = {
    "policy": "Log-probs and updates: tokens per second, MFU, and memory against the plan",
    "gradients": "Gradients against a CPU's, fused kernels against plain torch",
    "transfer": "Weights from a policy rank to an engine in another process",
    "decoding": "Decoding, and the engine's log-probs against the policy's",
    "checkpoint": "Checkpoints, and optimizer state that moves while the policy computes",
    "training": "A training of the arithmetic model",
}
PACKAGES = ("torch", "transformers", "vllm", "ray", "pydantic", "numpy")
ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def main() -> None:
    """Run the parts; write gpu.json and gpu.md after each."""
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        paths = [ROOT, *([install(options.wheels, Path(scratch))] if options.wheels else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        facts, rows = machine(), list[Row]()
        for part in options.parts:
            started = time.monotonic()
            rows += run_part(part, options, environment, Path(scratch))
            facts["seconds"][part] = round(time.monotonic() - started, 1)
            report = {**facts, "rows": rows}
            (options.output / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
            (options.output / "gpu.md").write_text(render(report))
    sys.stdout.write(render(report))


def parse_options() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for the results")
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a rehearsal")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install for the parts")
    parser.add_argument(
        "--parts", nargs="+", choices=[*SHARES], default=[*SHARES], help="default: all"
    )
    return parser.parse_args()


def install(wheels: Path, scratch: Path) -> Path:
    """Install the wheels without network; returns their folder."""
    target = scratch / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    files = sorted(map(str, wheels.glob("*.whl")))
    subprocess.run([*command, "--target", str(target), *files], check=True)
    return target


def machine() -> Row:
    """The machine, its packages and the commit."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "device": said_by(query) or "no nvidia-smi",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": said_by(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]) or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "seconds": {},
    }


def said_by(command: list[str]) -> str:
    """The command's output; "" if it fails or is missing."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    return ""


def run_part(
    part: str, options: argparse.Namespace, environment: Mapping[str, str], scratch: Path
) -> list[Row]:
    """Run a part in its own process group; returns its rows, with one for its error if any."""
    rows_path = scratch / f"{part}.jsonl"
    rows_path.touch()
    log_path = options.output / "gpu.log"
    command = [sys.executable, str(ROOT / "bench" / "gpu_parts.py"), part, str(rows_path)]
    command += [options.device, *(["--tiny"] if options.tiny else [])]
    share = SHARES[part] * (CPU_FACTOR if options.device == "cpu" else 1)
    with log_path.open("a") as log:
        log.write(f"== {part}\n")
        log.flush()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(share)
            error = f"exit status {code}: {last_line(log_path)}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"stopped at its share of {share:.0f} s; the rows above are complete"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
    rows: list[Row] = [json.loads(line) for line in rows_path.read_text().splitlines()]
    return [*rows, {"part": part, "case": "the part", "error": error}] if error else rows


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]


def render(report: Mapping[str, Any]) -> str:
    """The page: a table per part."""
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    seconds = ", ".join(f"{part} {value:.0f} s" for part, value in report["seconds"].items())
    lines = [
        "# Measured on an accelerator",
        "",
        f"`python3 bench/gpu.py OUT` on {report['device']}, {report['cores']} CPU cores, Python "
        f"{report['python']}, {versions}, commit {report['commit']}, {report['date']}. Every part "
        f"runs in its own process: {seconds}. A case that failed shows its error.",
        "",
    ]
    for part in report["seconds"]:
        rows = [row for row in report["rows"] if row["part"] == part]
        lines += [f"## {TITLES[part]}", "", *table(rows), ""]
    return "\n".join(lines)


def table(rows: list[Row]) -> Iterator[str]:
    """A Markdown table of the rows with figures, then a line per error."""
    measured = [row for row in rows if "error" not in row]
    names = list(dict.fromkeys(name for row in measured for name in row if name != "part"))
    if measured:
        yield f"| {' | '.join(names)} |"
        yield f"|{'---|' * len(names)}"
    for row in measured:
        yield f"| {' | '.join(cell(row.get(name, '')) for name in names)} |"
    failed = [row for row in rows if "error" in row]
    if measured and failed:
        yield ""
    for row in failed:
        yield f"- {row['case']}: **{row['error']}**"


def cell(value: Any) -> str:
    """A number with four digits, or the text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


if __name__ == "__main__":
    main()
