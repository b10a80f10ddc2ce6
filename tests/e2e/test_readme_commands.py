"""The README's stage commands on a shortened demo: the policy learns, and the served model is the
trained one.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.machine.ports import free_ports
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.policy.rank import Policy
from durable import read_json_lines
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BLOCK_BEGINS = "Each stage is also a command on plain paths"
NUM_STEPS, NUM_RANKS = 16, 2
SHORT = {
    "data.arithmetic.num_eval": 12,
    "model.recipe.num_steps": 400,
    "train.total_steps": NUM_STEPS,
    "validation.every": 0,
}
START_SECONDS = 180.0
SIDES = ("before", "after")
OUTCOMES = ("kept", "all_right", "all_wrong", "all_equal", "surplus")
pytestmark = pytest.mark.timeout(1500)  # on two busy cores


def readme_commands() -> list[str]:
    """Return the README's stage commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(BLOCK_BEGINS, 1)[1]
    return re.findall(
        r"^    ((?:VLLM_API_KEY=\w+ )?dapo .+)$", text.split("`dapo COMMAND --help`", 1)[0], re.M
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's recipe with SHORT applied."""
    path = tmp_path_factory.mktemp("recipe") / "short.yaml"
    changes = [word for name, value in SHORT.items() for word in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "config",
        "show",
        "configs/arith_cpu.yaml",
        *changes,
    ]
    path.write_text(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    return path


def typed(command: str, recipe: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment with CONFIG and the port filled in."""
    words = shlex.split(
        command.partition(" #")[0].replace("CONFIG", str(recipe)).replace("8000", str(port))
    )
    assignments = dict(word.split("=", 1) for word in words[: words.index("dapo")])
    words = [sys.executable, "-m", "flows.cli", *words[words.index("dapo") + 1 :]]
    return words, {**os.environ, "PYTHONPATH": str(ROOT), **assignments}


def wait_for_server(server: subprocess.Popen[bytes], port: int, api_key: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    headers = {"Authorization": f"Bearer {api_key}"}
    while time.monotonic() < deadline:
        assert server.poll() is None, "dapo serve exited before it was ready"
        try:
            if httpx.get(
                f"http://127.0.0.1:{port}/v1/models", headers=headers, trust_env=False
            ).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"dapo serve was not ready within {START_SECONDS:.0f} s")


def served_log_probs(url: str, batch: Batch) -> list[list[float]]:
    """Return the server's log-probs for each response in the batch."""
    served = []
    for row in range(batch.num_responses):
        num_prompt = int(batch.prompt_lengths[row])
        ids = batch.token_ids[row, : num_prompt + int(batch.response_lengths[row])].tolist()
        question = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = httpx.post(
            url,
            json=question,
            headers={"Authorization": "Bearer secret"},
            timeout=300,
            trust_env=False,
        )
        shown = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
        served.append(
            [shown[place][str(ids[place])]["logprob"] for place in range(num_prompt, len(ids))]
        )
    return served


def trained_log_probs(
    rank: int, model_path: Path, checkpoint: str, batch: Batch
) -> tuple[list[int], torch.Tensor]:
    """Return this rank's rows of the batch and their log-probs under the trained policy."""
    policy = Policy(model_path, make_config(model_path))
    policy.load(checkpoint)
    shares, rows = split_batch(batch, NUM_RANKS, max_tokens=4096)
    return rows[rank].tolist(), policy.log_probs(shares[rank])[0]


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def folder(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder after running the commands; the last server still runs, at `url`."""
    folder, port = tmp_path_factory.mktemp("typed"), free_ports("127.0.0.1")[0]
    (folder / "url").write_text(f"http://127.0.0.1:{port}")
    commands = readme_commands()
    assert [line.split("dapo ")[1].split()[0] for line in commands] == [
        "prepare-data",
        "fetch-model",
        "train",
        "merge",
        "serve",
        "eval",
        "serve",
        "eval",
        "compare",
    ]
    server: subprocess.Popen[bytes] | None = None
    try:
        for line in commands:
            words, environment = typed(line, recipe, port)
            if " serve " in line:
                if server is not None:
                    stop(server)
                with (folder / "server.log").open("wb") as log:
                    server = subprocess.Popen(
                        words, cwd=folder, env=environment, stdout=log, stderr=log
                    )
                wait_for_server(server, port, environment["VLLM_API_KEY"])
                continue
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
            )
            output = done.stdout + done.stderr
            assert done.returncode == 0, output
            # printed if Python's final garbage collection is skipped
            assert "nanobind: leaked" not in output
        yield folder
    finally:
        if server is not None:
            stop(server)


def test_the_stage_commands_produce_a_report(folder: Path) -> None:
    report = json.loads((folder / "report" / "report.json").read_text())
    assert report["n"] == 12
    accuracy = {
        side: json.loads((folder / side / "summary.json").read_text())["accuracy"] for side in SIDES
    }
    assert {side: report[side]["accuracy"] for side in SIDES} == accuracy
    assert report["train"]["steps"] == NUM_STEPS


def test_the_served_model_is_the_trained_policy(folder: Path) -> None:
    batch = random_batch(num_groups=2, group_size=2)
    served = served_log_probs(f"{(folder / 'url').read_text()}/v1/completions", batch)
    checkpoint = folder / "training" / "checkpoints" / f"step_{NUM_STEPS:06d}"
    ranks = run_ranks(NUM_RANKS, trained_log_probs, folder / "model", str(checkpoint), batch)
    compared = 0
    for rows, log_probs in ranks:
        for row, expected in zip(rows, log_probs.tolist(), strict=True):
            assert served[row] == pytest.approx(expected[: len(served[row])], abs=1e-3)
            compared += len(served[row])
    assert compared == int(batch.response_lengths.sum())


def test_the_demo_learns(folder: Path) -> None:
    """Sampled accuracy rises by 0.2 within these steps, and by 0.3 within 24."""
    lines = read_json_lines(folder / "training" / METRICS_FILE)
    assert len(lines) == NUM_STEPS
    accuracy = [line["sampler/accuracy"] for line in lines if "sampler/accuracy" in line]
    assert sum(accuracy[-6:]) / 6 > sum(accuracy[:6]) / 6 + 0.08


def test_only_groups_with_signal_are_trained_and_every_token_is_counted(folder: Path) -> None:
    lines = read_json_lines(folder / "training" / METRICS_FILE)
    carried_in = 0.0
    for line in lines:
        assert line["sampler/kept_groups"] == 16
        assert 0 < line["reward/right_ratio"] < 1
        counted = sum(line[f"sampler/{outcome}_tokens"] for outcome in OUTCOMES)
        carried_out = line["sampler/carried_out_tokens"]
        assert line["perf/generated_tokens"] + carried_in == counted + carried_out
        carried_in = line["sampler/surplus_tokens"] + carried_out
    assert (
        sum(line["sampler/all_wrong_groups"] + line["sampler/all_right_groups"] for line in lines)
        > 0
    )
    assert sum(line["sampler/surplus_groups"] for line in lines) > 0
