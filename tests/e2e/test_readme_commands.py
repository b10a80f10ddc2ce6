"""The README's stage commands on a recipe cut short; what is served in the end is the policy that was trained."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from dapo_core.batch import Batch, split_batch
from dapo_core.policy.rank import Policy
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BLOCK_BEGINS = "Each stage is also a command on plain paths"
SHORT = {
    "data.arithmetic.num_train": 256,
    "data.arithmetic.num_eval": 12,
    "model.recipe.num_steps": 20,
    "sampler.dynamic": "false",
    "train.total_steps": 2,
}
START_SECONDS = 180.0
NUM_RANKS = 2
SIDES = ("before", "after")


def readme_commands() -> list[str]:
    """The lines of the README's block of stage commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(BLOCK_BEGINS, 1)[1]
    return re.findall(r"^    ((?:VLLM_API_KEY=\w+ )?dapo .+)$", text.split("`dapo COMMAND --help`", 1)[0], re.M)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's recipe with SHORT applied, as a file."""
    path = tmp_path_factory.mktemp("recipe") / "short.yaml"
    changes = [word for name, value in SHORT.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "flows.cli", "config", "show", "configs/arith_cpu.yaml", *changes]
    path.write_text(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return path


def typed(command: str, recipe: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The words to run and the environment, with CONFIG and the port filled in."""
    words = shlex.split(command.partition(" #")[0].replace("CONFIG", str(recipe)).replace("8000", str(port)))
    assignments = dict(word.split("=", 1) for word in words[: words.index("dapo")])
    words = [sys.executable, "-m", "flows.cli", *words[words.index("dapo") + 1 :]]
    return words, {**os.environ, "PYTHONPATH": str(ROOT), **assignments}


def wait_for_server(server: subprocess.Popen[bytes], port: int, api_key: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    headers = {"Authorization": f"Bearer {api_key}"}
    while time.monotonic() < deadline:
        assert server.poll() is None, "dapo serve ended before it answered"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"dapo serve did not answer within {START_SECONDS:.0f} s")


def served_log_probs(url: str, batch: Batch) -> list[list[float]]:
    """The server's log-probs of each response of the batch behind its prompt."""
    served = []
    for row in range(batch.num_responses):
        num_prompt = int(batch.prompt_lengths[row])
        ids = batch.token_ids[row, : num_prompt + int(batch.response_lengths[row])].tolist()
        question = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = httpx.post(
            url, json=question, headers={"Authorization": "Bearer secret"}, timeout=60, trust_env=False
        )
        shown = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
        served.append([shown[place][str(ids[place])]["logprob"] for place in range(num_prompt, len(ids))])
    return served


def trained_log_probs(
    rank: int, model_path: Path, checkpoint: str, batch: Batch
) -> tuple[list[int], torch.Tensor]:
    """Rows of the batch that fall to this rank, and their log-probs by the policy as training left it."""
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


def test_the_stage_commands_make_a_report_out_of_a_recipe(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = readme_commands()
    assert [line.split("dapo ")[1].split()[0] for line in commands] == [
        *("prepare-data", "fetch-model", "train", "merge", "serve", "eval", "serve", "eval", "report")
    ]
    server: subprocess.Popen[bytes] | None = None
    try:
        for line in commands:
            words, environment = typed(line, recipe, port)
            if " serve " in line:
                if server is not None:
                    stop(server)
                with (tmp_path / "server.log").open("wb") as log:
                    server = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=log)
                wait_for_server(server, port, environment["VLLM_API_KEY"])
                continue
            done = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, said
            assert "nanobind: leaked" not in said  # as where Python's last collection is left out
        batch = random_batch(num_groups=2, group_size=2)
        served = served_log_probs(f"http://127.0.0.1:{port}/v1/completions", batch)
    finally:
        if server is not None:
            stop(server)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["n"] == 12
    accuracy = {side: json.loads((tmp_path / side / "summary.json").read_text())["accuracy"] for side in SIDES}
    assert {side: report[side]["accuracy"] for side in SIDES} == accuracy
    assert report["train"]["steps"] == 2
    checkpoint = tmp_path / "training" / "checkpoints" / "step_000002"
    ranks = run_ranks(NUM_RANKS, trained_log_probs, tmp_path / "model", str(checkpoint), batch)
    compared = 0
    for rows, log_probs in ranks:
        for row, expected in zip(rows, log_probs.tolist(), strict=True):
            assert served[row] == pytest.approx(expected[: len(served[row])], abs=1e-3)
            compared += len(served[row])
    assert compared == int(batch.response_lengths.sum())
