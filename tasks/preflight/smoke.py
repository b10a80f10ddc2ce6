"""The smoke test: start a recipe's engines as its stages would, and sample responses from them."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from dapo_core.config.compat import Compat
from dapo_core.draw.account import TokenAccount, has_signal
from dapo_core.draw.encoding import PromptEncoder
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.report import cause_of
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.draw.texts import decoder, example
from dapo_core.draw.tokenizing import tokenize_prompts
from dapo_core.engines.factory import build_engine
from dapo_core.errors import ModelError, counted
from dapo_core.machine.device import device_for
from dapo_core.machine.environment import WORKERS, set_defaults
from dapo_core.model.precision import with_model_dtypes
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.model.sampling import with_model_sampling
from eval.problems.items import Problem
from eval.problems.prompts import Prompt
from eval.problems.registry import OWN
from eval.requests.pictures import with_pictures
from heartbeat import heartbeat
from tasks.config import ChainConfig
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings
from tasks.preflight.inputs import Inputs
from tasks.serve_model.failure import ServeError
from tasks.serve_model.servers import serve_model

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet

NUM_TOKENS = 8  # from a server
NUM_PROMPTS = NUM_SAMPLES = 8  # groups and responses per group from a rollout engine
NUM_SHOWN = 2
SAMPLE_SECONDS = 300.0
ENGINE_SECONDS = 600.0  # for an engine on a node to start and sample
TEXT = "What is 2 + 3?"
QUESTION = Problem(
    "smoke", TEXT, "5", messages=({"role": "user", "content": TEXT},), data_source=OWN.scorer
)


@dataclass(frozen=True)
class Sampled:
    """A group, and its first response with prompt and verdict as text."""

    group: Group
    example: str


def check_server(
    model: Path, config: ChainConfig, evaluation: EvaluationSet | None, findings: Findings
) -> None:
    """Get one response from a server that is started as for an evaluation."""
    with tempfile.TemporaryDirectory(prefix="dapo-smoke-") as folder, findings.catching("smoke"):
        _ask_server(model, config, evaluation, Path(folder) / "serve.log", findings)


def check_sampling(inputs: Inputs, config: ChainConfig, findings: Findings) -> None:
    """Sample and score a few groups as the training does, and say whether they have signal.

    Without problems, a fixed question only shows that the engine answers.
    """
    assert inputs.model is not None
    is_here = config.train.ray_address is None
    problems = [one for one in inputs.problems if not one.images]
    problems += inputs.pictured if is_here else ()  # a node does not see their files
    chosen = list(problems[:: max(len(problems) // NUM_PROMPTS, 1)][:NUM_PROMPTS])
    sample = partial(_sample_here, pictures=inputs.folder) if is_here else _sample_on_node
    trial = f"{config.rollout.engine} samples {len(chosen) or 1} x {NUM_SAMPLES} responses"
    with findings.catching("smoke"), heartbeat(lambda: trial):
        groups = sample(inputs.model, config, chosen or [QUESTION], findings)
        if groups and chosen:
            findings.append(describe_sampling(groups, config))


def _ask_server(
    model: Path,
    config: ChainConfig,
    evaluation: EvaluationSet | None,
    log_path: Path,
    findings: Findings,
) -> None:
    began = time.monotonic()
    item = None if evaluation is None else evaluation.items[0]
    prompt: Prompt = ({"role": "user", "content": TEXT},) if item is None else item.prompt
    if config.model.chat_template is not None:  # added by fetch-model; this folder may not have it
        prompt = TEXT
    with serve_model(model, config.served, log_path) as server:
        body: dict[str, Any] = {"model": server.model, "max_tokens": NUM_TOKENS, "temperature": 0.0}
        if isinstance(prompt, str):
            body |= {"prompt": prompt}
        else:
            body |= {"messages": with_pictures(prompt, () if item is None else item.images)}
        answer = httpx.post(
            server.url("completions" if isinstance(prompt, str) else "chat/completions"),
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


def _sample_here(
    model: Path,
    config: ChainConfig,
    problems: Sequence[Problem],
    findings: Findings,
    pictures: Path,
) -> list[Sampled]:
    """Try the engine in a child process: an instruction that this CPU lacks kills it."""
    began = time.monotonic()
    engine = f"rollout.engine={config.rollout.engine}"
    set_defaults(WORKERS)  # as Ray's workers have them; the child loads OpenMP
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            groups = pool.submit(_sample, model, config, problems, pictures).result()
        except BrokenProcessPool:
            findings.add(
                "smoke",
                FAIL,
                f"the process of {engine} was killed at startup",
                "its last lines are above; if rollout.dtype=bfloat16 on a CPU, set float32",
            )
            return []
    findings.add("smoke", OK, f"{engine} gave {_took(groups, began)}")
    return groups


def _sample_on_node(
    model: Path, config: ChainConfig, problems: Sequence[Problem], findings: Findings
) -> list[Sampled]:
    """Try the engine on a free device of the cluster."""
    from dapo_core.cluster.connection import connected_to_ray  # loads Ray
    from dapo_core.cluster.every_node import finish, living_nodes, start_on

    device, engine = device_for(config.train.device), f"rollout.engine={config.rollout.engine}"
    if (num_parts := config.rollout.num_devices // config.rollout.num_workers) > 1:
        found = f"{engine} spans {num_parts} devices and was not tried"
        advice = "only the training starts it; --set rollout.tensor_parallel=1 tries one device"
        findings.add("smoke", WARN, found, advice)
        return []
    began = time.monotonic()
    with connected_to_ray(config.train, num_cpus=0):
        free = [node for node in living_nodes() if node.free.get(device.ray_resource, 0) >= 1]
        if not free:
            found = f"no {device.ray_resource} of the cluster is free"
            findings.add("smoke", WARN, found, "repeat when one is free")
            return []
        node = free[0]
        devices = {} if device.kind == "cpu" else {device.ray_resource: 1.0}
        task = start_on(node, devices, _sample, model.absolute(), config, problems)
        groups: list[Sampled] = finish({node: task}, ENGINE_SECONDS).require()[node]
    findings.add("smoke", OK, f"{engine} on {node.name} gave {_took(groups, began)}")
    return groups


def _took(groups: Sequence[Sampled], began: float) -> str:
    num_tokens = sum(each.group.num_response_tokens for each in groups)
    return f"{num_tokens} tokens after {time.monotonic() - began:.0f} s"


def _sample(
    model: Path, config: ChainConfig, problems: Sequence[Problem], pictures: Path = Path()
) -> list[Sampled]:
    """The groups that a rollout worker finishes in SAMPLE_SECONDS.

    Names of pictures are relative to the folder `pictures`.
    """
    from dapo_core.engines.factory import engine_settings

    device = device_for(config.train.device)
    config = with_model_dtypes(with_model_sampling(config, model), model)
    tokenizer = load_tokenizer(model, config.model.trust_remote_code, config.model.chat_template)
    encoder = PromptEncoder(tokenizer, model, pictures, config.rollout.chat_template_kwargs)
    prompts = tokenize_prompts(problems, encoder, sys.maxsize)
    fitting = [one for one in prompts if len(one.input.token_ids) <= config.data.max_prompt_tokens]
    build = partial(
        build_engine,
        config.rollout.engine,
        model,
        engine_settings(config, device),
        config.run.seed,
        str(device.torch_device()),
    )
    worker, groups = RolloutWorker(build, tokenizer, config), list[Group]()
    try:
        requests = [
            GroupRequest(number, prompt, 0, num_samples=NUM_SAMPLES)
            for number, prompt in enumerate(fitting)
        ]
        worker.submit(requests)
        deadline = time.monotonic() + SAMPLE_SECONDS
        while len(groups) < len(fitting) and time.monotonic() < deadline:
            groups += worker.poll(1.0).groups
    finally:
        worker.close()
    if not groups:
        raise ModelError(
            f"rollout.engine={config.rollout.engine} finished {NUM_SAMPLES} responses to none of "
            f"{counted(len(fitting), 'prompt')} within {SAMPLE_SECONDS:g} s; lower "
            "rollout.max_response_tokens, or use a smaller model"
        )
    decode = decoder(tokenizer)
    return [Sampled(each, example(each.prompt, each.rollouts[0], decode)) for each in groups]


def describe_sampling(groups: Sequence[Sampled], config: ChainConfig) -> Finding:
    """Say what the responses are like, and if all groups are even, what to change."""
    account, verdicts, num_with_signal = TokenAccount(), Counter[str](), 0
    for group in (each.group for each in groups):
        account.add_finished(group)
        verdicts.update(rollout.verdict for rollout in group.rollouts)
        if has_signal(group, config.sampler.metric, Compat.of(config.algorithm)):
            num_with_signal += 1
        else:
            account.add_without_signal(group)
    count, lengths = account.num_finished, account.lengths["finished"]
    shares = {"right": verdicts["right"], "no answer": verdicts["no_answer"]}
    shares["cut"] = lengths.num_cut
    found = (
        f"{counted(len(groups), 'prompt')} x {NUM_SAMPLES} responses at temperature "
        f"{config.rollout.temperature:g}: "
        + ", ".join(f"{number / count:.1%} {name}" for name, number in shares.items())
        + f", {lengths.num_tokens / count:.0f} tokens each; {num_with_signal} of {len(groups)} "
        "groups have signal"
    )
    if num_with_signal:
        return Finding("sampling", OK, found)
    shown = "".join(f"\n  {each.example}" for each in groups[:NUM_SHOWN])
    advice = f"{cause_of(account)}. Such as{shown}"
    return Finding("sampling", WARN, found, advice, why="such a training has nothing to learn from")
