"""The smoke test: start a recipe's engines as its stages would, and ask each for one response."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from dapo_core.engines.base import GenerationRequest, Response
from dapo_core.engines.factory import build_engine
from dapo_core.errors import ModelError
from dapo_core.machine.device import device_for
from dapo_core.model.precision import with_model_dtypes
from dapo_core.model.pretrained import load_tokenizer
from tasks.config import ChainConfig
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.serve_model.failure import ServeError
from tasks.serve_model.servers import serve_model

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
QUESTION = "What is 2 + 3?"
ENGINE_SECONDS = 600.0  # for an engine on a node to start and answer


def check_engines(
    model: Path, config: ChainConfig, evaluation: EvaluationSet | None, findings: Findings
) -> None:
    """Get one response from a server, then, once that is stopped, one from a rollout engine."""
    with tempfile.TemporaryDirectory(prefix="dapo-smoke-") as folder, findings.catching("smoke"):
        _ask_server(model, config, evaluation, Path(folder) / "serve.log", findings)
    if config.train.backend != "own":  # the other trainer's engine runs in its own environment
        return
    with findings.catching("smoke"):
        if config.train.ray_address is None:
            _ask_engine(model, config, findings)
        else:
            _ask_engine_of_node(model, config, findings)


def _ask_server(
    model: Path,
    config: ChainConfig,
    evaluation: EvaluationSet | None,
    log_path: Path,
    findings: Findings,
) -> None:
    began = time.monotonic()
    prompt = (
        evaluation.items[0].prompt
        if evaluation is not None
        else ({"role": "user", "content": QUESTION},)
    )
    if config.model.chat_template is not None:  # added by fetch-model; this folder may not have it
        prompt = QUESTION
    is_chat = not isinstance(prompt, str)
    with serve_model(model, config.served, log_path) as server:
        body = {"model": server.model, "max_tokens": NUM_TOKENS, "temperature": 0.0}
        body |= {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        answer = httpx.post(
            server.url("chat/completions" if is_chat else "completions"),
            json=body,
            headers={"Authorization": f"Bearer {server.api_key}"},
            timeout=config.evaluate.request_timeout_seconds,
            trust_env=False,
        )
        if not answer.is_success:
            raise ServeError(
                f"the server rejects a prompt of the evaluation: HTTP {answer.status_code} "
                f"{answer.text}"
            )
    findings.add("smoke", OK, f"vllm serve answered after {time.monotonic() - began:.0f} s")


def _ask_engine(model: Path, config: ChainConfig, findings: Findings) -> None:
    """Try the engine in a child process: an instruction that this CPU lacks kills it."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            num_tokens = pool.submit(_respond, model, config).result()
        except BrokenProcessPool:
            findings.add(
                "smoke",
                FAIL,
                f"the process of rollout.engine={config.rollout.engine} was killed at startup",
                "its last lines are above; if rollout.dtype=bfloat16 on a CPU, set float32",
            )
            return
    took = f"{num_tokens} tokens after {time.monotonic() - began:.0f} s"
    findings.add("smoke", OK, f"rollout.engine={config.rollout.engine} gave {took}")


def _ask_engine_of_node(model: Path, config: ChainConfig, findings: Findings) -> None:
    """Try the engine on a free device of the cluster."""
    from dapo_core.cluster.connection import connected_to_ray  # loads Ray
    from dapo_core.cluster.every_node import finish, living_nodes, start_on

    device, engine = device_for(config.train.device), f"rollout.engine={config.rollout.engine}"
    if (num_parts := config.rollout.num_devices // config.rollout.num_workers) > 1:
        found = f"{engine} spans {num_parts} devices and was not tried"
        advice = "only the training starts it; --set rollout.tensor_parallel=1 tries one device"
        findings.add("smoke", WARN, found, advice)
        return
    began = time.monotonic()
    with connected_to_ray(config.train, num_cpus=0):
        free = [node for node in living_nodes() if node.free.get(device.ray_resource, 0) >= 1]
        if not free:
            found = f"no {device.ray_resource} of the cluster is free"
            findings.add("smoke", WARN, found, "repeat when one is free")
            return
        node = free[0]
        devices = {} if device.kind == "cpu" else {device.ray_resource: 1.0}
        task = start_on(node, devices, _respond, model.absolute(), config)
        num_tokens = finish({node: task}, ENGINE_SECONDS).require()[node]
    took = f"{num_tokens} tokens after {time.monotonic() - began:.0f} s"
    findings.add("smoke", OK, f"{engine} on {node.name} gave {took}")


def _respond(model: Path, config: ChainConfig) -> int:
    """Send one request to the recipe's rollout engine; returns the number of response tokens."""
    from dapo_core.engines.factory import engine_settings

    device = device_for(config.train.device)
    settings = engine_settings(with_model_dtypes(config, model), device)
    engine = build_engine(
        config.rollout.engine, model, settings, config.run.seed, str(device.torch_device())
    )
    try:
        tokenizer = load_tokenizer(
            model, config.model.trust_remote_code, config.model.chat_template
        )
        prompt_ids = tokenizer(QUESTION).input_ids
        engine.submit(
            [GenerationRequest("smoke", prompt_ids[: settings.max_model_tokens // 2], seed=0)]
        )
        responses: list[Response] = []
        while not responses:
            responses = engine.step()
            if engine.num_unfinished_tokens() >= NUM_TOKENS:
                responses += engine.abort(["smoke"])
    finally:
        engine.close()
    if not len(responses[0].response_ids):
        given = f"rollout.engine={config.rollout.engine} gave no token for {QUESTION!r}"
        raise ModelError(f"{given}; check model.path")
    return len(responses[0].response_ids)
