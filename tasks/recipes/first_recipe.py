"""`dapo init`: a commented recipe sized for the machine, the model and the prompts."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dapo_core.config.fields import known_fields
from dapo_core.errors import ConfigError, ModelError
from dapo_core.machine.device import accelerators, device_for
from dapo_core.memory.devices import GIB
from dapo_core.memory.shape import shape_of
from dapo_core.reward.routing import routes
from eval.problems.recognition import scorer_of
from eval.problems.registry import OWN
from tasks.config import ChainConfig
from tasks.config.lengths import Bounds, Lengths, fitted
from tasks.config.serve import ServeConfig
from tasks.data.sources import ARITHMETIC
from tasks.preflight.finding import Findings
from tasks.preflight.inputs import inputs_here
from tasks.preflight.memory import device_limit, model_config, summary
from tasks.preflight.model import ModelFacts, check_model
from tasks.preflight.prompts import longest_item, longest_problems
from tasks.recipes.first_data import HUB_ID, NO_COLUMNS, NewFiles, data_sets
from tasks.recipes.layout import ON_HOST, fitting_layout, layouts, merged

logger = logging.getLogger(__name__)

CPU_RESPONSE_TOKENS, RESPONSE_TOKENS = 256, 8192
ALWAYS = ("train.learning_rate", "rollout.temperature")  # written even if they are the defaults
MAX_PASSES = 10  # over the training problems
CPU_CACHE_SEQUENCES = 16  # longest sequences that fit into the KV cache on a CPU


@dataclass(frozen=True)
class Machine:
    """The devices available to a recipe."""

    kind: str
    num_devices: int
    num_cores: int

    @staticmethod
    def this() -> Machine:
        """This machine: NPUs if any, else CUDA devices, else the CPU."""
        cores = len(os.sched_getaffinity(0))
        for device in accelerators():
            if count := len(device.visible(os.environ)):
                return Machine(device.kind, count, cores)
        return Machine("cpu", 1, cores)


def first_recipe(
    path: Path,
    model: Mapping[str, Any],
    train: str,
    held_out: str | None,
    machine: Machine,
    columns: Mapping[str, Any] = NO_COLUMNS,
) -> str:
    """The text of a recipe; `model` is its section `model`.

    Data files that a recipe cannot use directly are converted beside it, and removed again on
    errors. Raises ConfigError for unknown names, and for files whose columns cannot be identified.
    """
    with NewFiles(path) as new_files:
        facts = _facts(model)
        data, count = data_sets(new_files, train, held_out, columns, facts)
        tree: dict[str, Any] = {"data": data, "model": dict(model)}
        bounds, unknown, num_problems = _bounds(tree, facts)
        lengths = sized_lengths(machine, bounds)
    for reason, number in count.refused.items():
        logger.warning(
            f"{train}: left out of the recipe's files: {number} of {count.read} rows, with "
            f"{reason}; {count.examples[reason][0]}"
        )
    tree["data"]["max_prompt_tokens"] = lengths.prompt
    tree |= sized(machine, facts, lengths, num_problems)
    tree["train"]["learning_rate"] = learning_rate(facts.parameters or named_size(model))
    memory = ""
    if machine.kind != "cpu":
        tree, memory = _laid_out(tree, machine)
    if unknown:
        tree["reward"]["scorers"] = [f"{source}={scorer}" for source, scorer in unknown.items()]
    return render(tree, machine, facts, bounds, memory)


def model_keys(model: str, chat_template: Path | None = None) -> dict[str, Any]:
    """The section `model` for a folder or a hub id; raises ConfigError for anything else."""
    more = {} if chat_template is None else {"chat_template": str(chat_template)}
    if Path(model).exists():
        return {"source": "path", "path": model, **more}
    hub, _, rest = model.rpartition(":")
    name, _, revision = rest.partition("@")
    source = {"": "huggingface", "hf": "huggingface", "modelscope": "modelscope"}.get(hub)
    if source is None or not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"--model {model} is neither a folder here nor a hub id such as Qwen/Qwen3-8B"
        )
    return {"source": source, "id": name, **({"revision": revision} if revision else {}), **more}


def _facts(model: Mapping[str, Any]) -> ModelFacts:
    """A local model's facts, none for a remote one. Raises PreflightError if it is unusable."""
    no_data = {"train": ARITHMETIC, "eval": ARITHMETIC}
    config = ChainConfig.model_validate({"data": no_data, "model": dict(model)})
    facts, findings = ModelFacts(), Findings()
    if config.model.source == "path":
        facts = check_model(Path(str(config.model.path)), config, findings)
    findings.require()
    return facts


def _bounds(tree: dict[str, Any], facts: ModelFacts) -> tuple[Bounds, dict[str, str], int]:
    """The bounds of the local model and prompts, scorers for data sources without one, and the
    number of local training problems, of large sets the first ones.

    Raises PreflightError for unusable inputs.
    """
    findings = Findings()
    bounds = Bounds(positions=facts.positions)
    with inputs_here(ChainConfig.model_validate(tree), findings) as inputs:
        findings.require()
        if facts.tokenizer is not None:
            longest = max(longest_problems(facts, inputs))
            if inputs.evaluation is not None:
                longest = max(longest, longest_item(facts, inputs, inputs.evaluation))
            bounds = replace(
                bounds, longest_prompt=longest or None, longest_question=longest or None
            )
    golds: dict[str, list[str]] = {}
    for one in inputs.problems:
        golds.setdefault(one.data_source or OWN.scorer, []).append(one.gold)
    unknown = sorted(golds.keys() - routes().keys())
    return bounds, {name: scorer_of(golds[name]) for name in unknown}, len(inputs.problems)


def learning_rate(parameters: float) -> float:
    """The learning rate for a model's size: the DAPO paper's 1e-6 at 32B, more for smaller models.

    It falls with the square root of the size: 2e-5 for 135M parameters, where 1e-6 shows nothing
    in 30 steps, 7e-6 for 0.6B and 2e-6 for 8B. Unknown sizes (0) get the paper's.
    """
    scale = math.sqrt(32e9 / parameters) if parameters else 1.0
    return float(f"{min(max(1e-6 * scale, 1e-6), 3e-5):.0e}")


def named_size(model: Mapping[str, Any]) -> float:
    """The parameters in a hub id such as Qwen/Qwen3-0.6B, 0 if it names none."""
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", str(model.get("id", "")), re.I)
    return float(found[1]) * {"b": 1e9, "m": 1e6}[found[2].lower()] if found else 0.0


def sized_lengths(machine: Machine, bounds: Bounds) -> Lengths:
    """Lengths that suit the machine, model and prompts. Raises ConfigError if none fit."""
    response = CPU_RESPONSE_TOKENS if machine.kind == "cpu" else RESPONSE_TOKENS
    known = bounds.longest_prompt
    prompt = 1024 if known is None else max(-(-known // 64) * 64, 64)
    preferred = Lengths(
        prompt, response, response // 5, response, prompt + response, 2 * (prompt + response)
    )
    lengths = fitted(preferred, bounds)
    if lengths is None:
        raise ConfigError(
            f"the longest prompt has {known} tokens, which leaves no room for a response in the "
            f"model's {bounds.positions} positions; use a model with more, or shorter prompts"
        )
    served = max(lengths.prompt, bounds.longest_question or 0) + lengths.answer
    micro_batch = max(2 * (lengths.prompt + lengths.response), 4096)
    return replace(lengths, served=served, micro_batch=micro_batch)


def sized(
    machine: Machine, facts: ModelFacts, lengths: Lengths, num_problems: int
) -> dict[str, Any]:
    """The sections that depend on the machine, and on the training problems if their number is
    known: a step has at most all of them, and the training about MAX_PASSES over them.
    """
    is_cpu = machine.kind == "cpu"
    prompts, mini, steps = (8, 8, 30) if is_cpu else (64, 16, 100)
    while num_problems and prompts > num_problems:
        prompts //= 2
    mini = min(mini, prompts)
    if num_problems:
        steps = min(steps, max(MAX_PASSES * num_problems // prompts, 10))
    rollout: dict[str, Any] = {"group_size": 8 if is_cpu else 16}
    rollout["temperature"] = 1.0
    rollout["max_response_tokens"] = lengths.response
    serve: dict[str, Any] = {"max_model_len": lengths.served}
    train: dict[str, Any] = {
        "device": machine.kind,
        "total_steps": steps,
        "train_prompts": prompts,
        "mini_prompts": mini,
        "micro_batch_tokens": lengths.micro_batch,
        "warmup_steps": max(steps * (prompts // mini) // 10, 1),
    }
    if is_cpu:
        rollout["max_num_seqs"] = 64
        rollout["memory_gigabytes"] = cache_gigabytes(facts, lengths.prompt + lengths.response)
        serve |= {"memory_gigabytes": cache_gigabytes(facts, lengths.served), "eager": True}
    return {
        "rollout": rollout,
        "reward": {"overlong": {"buffer_tokens": lengths.buffer}},
        "sampler": {"gen_prompts": 3 * prompts},
        "train": train,
        "serve": serve,
        "evaluate": {
            "max_response_tokens": lengths.answer,
            "concurrency": ServeConfig().max_num_seqs,
        },
    }


def _laid_out(tree: dict[str, Any], machine: Machine) -> tuple[dict[str, Any], str]:
    """Return the recipe with the machine's devices laid out, and a sentence on their memory.

    Raises ConfigError if the model does not fit in any layout.
    """
    number, config = machine.num_devices, ChainConfig.model_validate(tree)
    limit = device_limit(config)
    try:
        shape = shape_of(model_config(config.model))
    except (ConfigError, ModelError) as error:  # a model that has to be fetched first, or unknown
        logger.warning("the layout is not checked against the memory plan: %s", error)
        first = next(layouts(number, number, None, tree["train"]["micro_batch_tokens"]))
        tree = merged(tree, {**first, "serve": {"data_parallel": number}})
        memory = "No memory plan yet: dapo plan CONFIG --memory, once the model is fetched."
    else:
        tree, plan, _ = fitting_layout(tree, number, shape, limit)
        memory = (
            f"Memory plan: {summary(plan)}; at most {plan.host_bytes / GIB:.0f} GiB of host memory."
        )
    if tree["train"].get(ON_HOST):  # the optimizer runs on the CPU
        cores = max(machine.num_cores // tree["train"]["num_ranks"], 1)
        tree = merged(tree, {"train": {"threads_per_rank": cores}})
    requests = ServeConfig().max_num_seqs * tree["serve"]["data_parallel"]
    return merged(tree, {"evaluate": {"concurrency": requests}}), memory


def cache_gigabytes(facts: ModelFacts, tokens: int) -> float:
    """KV cache for some of the longest sequences, at most 1/8 of memory, in 0.1 GiB."""
    needed = CPU_CACHE_SEQUENCES * tokens * (facts.token_bytes or 65_536) * 2 / GIB  # float32
    limit = (device_for("cpu").memory_bytes() or 0) / 8 / GIB
    return max(math.ceil(10 * min(needed, limit)) / 10, 0.2)


def render(
    tree: dict[str, Any], machine: Machine, facts: ModelFacts, bounds: Bounds, memory: str
) -> str:
    """The recipe as YAML with a comment per section."""
    is_cpu = machine.kind == "cpu"
    devices = (
        f"{machine.num_cores} cores" if is_cpu else f"{machine.num_devices} {machine.kind} devices"
    )
    model = (
        f"a model of {facts.parameters:,} parameters"
        if facts.parameters
        else "a model that is fetched first"
    )
    positions = f" and {facts.positions:,} positions" if facts.positions else ""
    longest = (
        f"the longest prompt has {bounds.longest_prompt} tokens"
        if bounds.longest_prompt
        else "not measured"
    )
    comments = {
        "data": "Names (dapo datasets), files, folders, hf:ORG/NAME. Longest prompt allowed; "
        f"{longest}.",
        "model": "A folder, or source: huggingface or modelscope with id and revision.",
        "rollout": "Responses to each prompt, their longest length, and the engines that sample "
        "them.\n# A lower temperature makes a group's responses alike, and equal rewards teach "
        "nothing.",
        "reward": "The last tokens before the limit cost points. Scorers by data source, or "
        "custom_reward.path.",
        "sampler": "Prompts in flight at once; groups all right or all wrong are drawn again.",
        "train": "Steps first: enough to see something; published trainings take hundreds.\n"
        "# Learning rate: the DAPO paper's is 1e-6 for 32B; small models learn at 1e-5 to 3e-5.",
        "checkpoint": "An asynchronous copy would take more host memory.",
        "serve": "vLLM servers of the evaluation before and after.",
        "evaluate": "Answers are greedy and as long as in training. Requests beyond "
        "serve.max_num_seqs would wait.",
    }
    lines = [
        f"# Written by dapo init for {devices}, {model}{positions}.",
        *([f"# {memory}"] if memory else []),
        "# Every other key has its default: dapo config explain KEY. "
        "Next: dapo plan, then dapo run.",
    ]
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in known_fields(ChainConfig).items()
    }
    for section, keys in tree.items():
        chosen = {
            name: one
            for name, one in keys.items()
            if one != defaults.get(f"{section}.{name}") or f"{section}.{name}" in ALWAYS
        }
        text = yaml.dump({section: chosen}, Dumper=_Plain, sort_keys=False, allow_unicode=True)
        lines += [f"# {comments[section]}", text.rstrip()] if chosen else []
    return "\n".join(lines) + "\n"


class _Plain(yaml.SafeDumper):
    """YAML without anchors, so that columns are repeated for each set."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
