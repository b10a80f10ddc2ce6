"""The parts of bench/gpu.py: `python gpu_parts.py PART ROWS DEVICE [--tiny]` appends to a file.

Each part uses the product's own roles. Imports no Ray, and vLLM only where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_up import NUM_TOKEN_IDS, rows, write_model_folder
from real_policy import write_model
from transformers import AutoConfig
from without_ray import join_alone, start_processes

from dapo_core.algorithm.balance import RankShare, split_batch
from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.config.training import TrainingConfig
from dapo_core.config.warm_start import WarmStartConfig
from dapo_core.demo.arithmetic import generate_problems
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import Engine, GenerationRequest
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.machine.device import Device, device_for
from dapo_core.memory.devices import GIB, Limit
from dapo_core.memory.holdings import OPTIMIZER
from dapo_core.memory.plan import RANK, plan_memory
from dapo_core.memory.published import PUBLISHED
from dapo_core.memory.shape import shape_of
from dapo_core.metrics.flops import ActorUtilization
from dapo_core.metrics.mismatch import token_differences
from dapo_core.model.inputs import ModelInput
from dapo_core.policy.kernels import KERNELS, require_parity
from dapo_core.policy.rank import Policy
from dapo_core.training import train
from dapo_core.weights.inbox import open_inbox
from dapo_core.weights.links import Link
from dapo_core.weights.plan import WeightPlan
from dapo_core.weights.proof import Loaded

MODES: dict[str, dict[str, bool]] = {
    "checkpointing": {},
    "no checkpointing": {"gradient_checkpointing": False},
    "activations on the host": {"offload_activations": True},
    "checkpointing, compiled": {"compile": True},
}
NUM_TIMED = 2  # repetitions after a warm-up
NUM_SYNCS = 3
TINY_MODEL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's smallest on a CPU
    "tie_word_embeddings": True,
}
SMALL_MODEL = TINY_MODEL | {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}


@dataclass(frozen=True)
class Sizes:
    """Shapes of the measurements."""

    models: Mapping[str, Mapping[str, Any]]  # the first one also decodes and is saved
    tokens: tuple[int, ...]  # of a micro-batch
    small: Mapping[str, Any]  # model whose gradients are compared
    small_tokens: int
    engines: tuple[str, ...]
    num_prompts: int
    response_tokens: int
    warm_steps: int  # supervised steps of the arithmetic model
    num_steps: int
    train_prompts: int


FULL = Sizes(
    models={name: PUBLISHED[name] for name in ("Qwen3-0.6B", "Qwen3-4B")},
    tokens=(2048, 16384),
    small=SMALL_MODEL,
    small_tokens=512,
    engines=("hf", "vllm"),
    num_prompts=64,
    response_tokens=128,
    warm_steps=600,
    num_steps=10,
    train_prompts=16,
)
TINY = replace(
    FULL,
    models={"tiny": TINY_MODEL},
    tokens=(64,),
    small=TINY_MODEL,
    small_tokens=64,
    num_prompts=4,
    response_tokens=8,
    warm_steps=20,
    num_steps=2,
    train_prompts=4,
)


class Record:
    """Appends rows of one part to a file, each at once, so that a killed part keeps its rows."""

    def __init__(self, part: str, path: Path, device: Device) -> None:
        self.part = part
        self.path = path
        self.device = device

    @contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """Append a row with the figures that the block sets, or with its error."""
        figures: dict[str, Any] = {}
        gc.collect()  # what an earlier case left
        if (module := self.device.module()) is not None:
            module.empty_cache()
        try:
            yield figures
        except Exception as error:  # noqa: BLE001 - whatever fails, the other cases go on
            message = str(error).partition("\n")[0][:300]  # "" for an error without a text
            figures = {"error": f"{type(error).__name__}: {message}"}
        if figures:
            with self.path.open("a") as file:
                file.write(json.dumps({"part": self.part, "case": name, **figures}) + "\n")


class RandomPolicy(Policy):
    """A rank of a model folder without values: its weights are random."""

    def __init__(self, model_path: str | Path, config: TrainingConfig) -> None:
        super().__init__(model_path, config)
        with torch.no_grad():
            parameters: dict[str, Any] = dict(self.model.named_parameters())
            for name, parameter in parameters.items():
                local = parameter.to_local()
                local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)


def random_rank(meeting_point: str, model_path: Path, config: TrainingConfig) -> RandomPolicy:
    """Build a random rank in a process of its own."""
    join_alone(meeting_point, config)
    return RandomPolicy(model_path, config)


class Receiver:
    """The part of a rollout worker that takes weights."""

    def __init__(self, model_path: Path, config: TrainingConfig) -> None:
        self.device = device_for(config.train.device)
        self.device.require()
        self.engine = engine_of("hf", model_path, config)

    def connect(self, link: Link, plan: WeightPlan) -> None:
        self.engine.inbox = open_inbox(link, plan, self.device)

    def receive_weights(self, policy_version: int) -> None:
        self.engine.receive_weights(policy_version)

    def loaded_weights(self) -> Loaded:
        return self.engine.loaded


def model_config_of(published: Mapping[str, Any]) -> Any:
    """A model's configuration; its last token ends a response."""
    return AutoConfig.for_model(**published, eos_token_id=published["vocab_size"] - 1)


def config_of(device: Device, num_tokens: int, **train: Any) -> TrainingConfig:
    """A training on one device, with sequences of this many tokens."""
    num_prompt = num_tokens // 8
    return TrainingConfig.model_validate(
        {
            "data": {"max_prompt_tokens": num_prompt},
            "rollout": {
                "engine": "hf",
                "max_response_tokens": num_tokens - num_prompt,
                "max_num_seqs": 256,
                "memory_utilization": 0.3,
            },
            "reward": {"overlong": {"enabled": False}},
            "train": {"device": device.kind, "micro_batch_tokens": num_tokens, **train},
        }
    )


def share_of(config: TrainingConfig) -> RankShare:
    """Two sequences of the longest length, whose update computes their old log-probs."""
    share = rows(config.data.max_prompt_tokens, config.rollout.max_response_tokens, 2)
    return RankShare(replace(share.batch, old_log_probs=None), share.micro_batches)


def engine_of(kind: Any, model_path: Path, config: TrainingConfig) -> Engine:
    """The engine of a rollout worker."""
    device = device_for(config.train.device)
    settings = engine_settings(config, device)
    return build_engine(kind, model_path, settings, 0, str(device.torch_device()))


def measure_policy(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """Log-probs and updates of each model in each mode, at each number of tokens."""
    join_alone(f"{scratch}/meet", config_of(device, sizes.tokens[0]))
    for name, published in sizes.models.items():
        write_model_folder(model_config_of(published), scratch / name)
    for mode, keys in MODES.items():
        for name, published in sizes.models.items():
            with record.case(f"{name}, {mode}"):
                configs = [config_of(device, number, **keys) for number in sizes.tokens]
                measure_model(f"{name}, {mode}", scratch / name, configs, published, record)


def measure_model(
    case: str,
    model_path: Path,
    configs: Sequence[TrainingConfig],
    published: Mapping[str, Any],
    record: Record,
) -> None:
    """One policy, which is freed on return, at each number of tokens."""
    policy = RandomPolicy(model_path, configs[-1])
    for config in configs:
        measure_passes(case, policy, config, published, record)


def measure_passes(
    case: str,
    policy: Policy,
    config: TrainingConfig,
    published: Mapping[str, Any],
    record: Record,
) -> None:
    """Seconds, MFU and peak memory of log-probs and of an update, a row each."""
    share, device = share_of(config), policy.device
    num_tokens = int(share.batch.lengths.sum())
    dtype = device.resolve_dtype(config.train.dtype)
    model_config = model_config_of(published)
    utilization = ActorUtilization(model_config, device.name(), dtype, 1)
    totals = LossTotals.of(share.batch, 1)
    passes: dict[str, tuple[str, Callable[[], Any], int]] = {
        "log-probs": ("anchor", lambda: policy.log_probs(share), 3),
        "update": ("update", lambda: policy.update(share, totals), 1),
    }
    with record.case(f"{case}, {config.train.micro_batch_tokens} tokens, first update"):
        policy.update(share, totals)  # creates Adam's moments, which the plan counts
    for name, (phase, call, flops_divisor) in passes.items():
        with record.case(f"{case}, {config.train.micro_batch_tokens} tokens, {name}") as row:
            policy.optimizer.zero_grad(set_to_none=True)
            policy.take_memory()  # discards earlier peaks
            seconds = timed(call, device)
            memory = policy.take_memory()
            peak = memory.get("perf/max_memory_allocated_gb", memory.get("perf/max_rss_gb"))
            mfu = utilization.metrics(share.batch, seconds).get("perf/mfu/actor")
            row["seconds"] = seconds
            row["tokens/s"] = round(num_tokens / seconds)
            row["MFU"] = "unknown" if mfu is None else mfu / flops_divisor
            row["peak GiB"], row["planned GiB"] = peak, planned_gib(config, published, phase)


def timed(call: Callable[[], Any], device: Device) -> float:
    """Shortest seconds of a call after a warm-up, with all work on the device done."""
    found = []
    for _ in range(1 + NUM_TIMED):
        device.synchronize()
        began = time.perf_counter()
        call()
        device.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def planned_gib(config: TrainingConfig, published: Mapping[str, Any], phase: str) -> float:
    """What the plan says that a rank holds on its device; of the process itself only on a CPU."""
    plan = plan_memory(config, shape_of(published), Limit("this device", None))
    is_cpu = config.train.device == "cpu"
    uses = (use for use in plan.uses if (use.role, use.phase) == (RANK, phase))
    return sum(use.device_bytes for use in uses if is_cpu or use.what != "process") / GIB


def measure_gradients(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """Log-probs and gradients of a small model against the CPU's in float32; fused kernels."""
    join_alone(f"{scratch}/meet", config_of(device, sizes.small_tokens))
    write_model(model_config_of(sizes.small), scratch / "small")
    expected, log_probs = gradients_of(scratch / "small", "cpu", "float32", sizes.small_tokens)
    norm = expected.norm()
    for dtype in ("float32", "bfloat16"):
        with record.case(f"{dtype} on {device.name()}") as row:
            found, theirs = gradients_of(scratch / "small", device.kind, dtype, sizes.small_tokens)
            row["gradient norm"] = float(found.norm())
            row["gradient norm, CPU float32"] = float(norm)
            row["relative difference"] = float((found - expected).norm() / norm)
            row["cosine"] = float(found @ expected / (norm * found.norm()))
            row["largest difference of log-probs"] = float((theirs - log_probs).abs().max())
    fused = device.fused_kernels()
    for name in KERNELS:
        with record.case(f"fused kernel {name}") as row:
            if name in fused:
                require_parity(name, fused[name], device)
            row["result"] = "equals plain torch" if name in fused else "none on this device"


def gradients_of(
    model_path: Path, kind: str, dtype: str, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All gradients of an update as one vector, and the log-probs before it."""
    config = config_of(device_for(kind), num_tokens, dtype=dtype, max_grad_norm=1e9)
    policy, share = Policy(model_path, config), share_of(config)
    log_probs = policy.log_probs(share).log_probs
    policy.update(share, LossTotals.of(share.batch, 1))
    gradients: list[Any] = [parameter.grad for parameter in policy.model.parameters()]
    return torch.cat([each.full_tensor().flatten().double().cpu() for each in gradients]), log_probs


def measure_transfer(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """All weights of the first model, sent to an engine in another process on the same device."""
    name, published = next(iter(sizes.models.items()))
    write_model_folder(model_config_of(published), scratch / name)
    config = config_of(device, sizes.tokens[0])
    roles: dict[str, Any] = {"build_rank": random_rank, "build_worker": Receiver}
    with record.case(name) as row, start_processes(config, scratch / name, **roles) as cluster:
        plan = cluster.weights.plan
        seconds = []
        for number in range(1 + NUM_SYNCS):
            began = time.perf_counter()
            cluster.weights.send(number)  # raises unless every checksum matches
            seconds.append(time.perf_counter() - began)
        gigabytes = sum(each.numel for each in plan.tensors.values()) * plan.dtype.itemsize / 1e9
        row["transport"] = "IPC handles" if device.has_own_memory else "shared memory"
        row["GB"] = gigabytes
        row["seconds"] = statistics.median(seconds[1:])
        row["seconds per GB"] = row["seconds"] / gigabytes
        row["checksums"] = f"{len(plan.tensors)} tensors, all equal in {len(seconds)} syncs"


def measure_decoding(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """Decoding speed of each engine, and its log-probs against the policy's."""
    name, published = next(iter(sizes.models.items()))
    write_model(model_config_of(published), scratch / name)
    config = config_of(device, 8 * sizes.response_tokens // 7)
    join_alone(f"{scratch}/meet", config)
    policy = Policy(scratch / name, config)
    for kind in sizes.engines:
        with record.case(f"{name}, {kind} engine") as row:
            if kind == "vllm" and importlib.util.find_spec("vllm") is None:
                row["tokens/s"] = "vLLM is not installed"
                continue
            engine = engine_of(kind, scratch / name, config)
            groups, seconds = decoded(engine, sizes, config)
            num_tokens = sum(group.num_response_tokens for group in groups)
            row["responses"], row["response tokens"] = len(groups), num_tokens
            row["seconds"], row["tokens/s"] = seconds, round(num_tokens / seconds)
            batch = build_batch(groups, mask_truncated=False)
            differences = token_differences(
                scored(policy, batch), batch.rollout_log_probs, batch.response_mask
            )
            row["mean difference of log-probs"] = differences["log_probs_diff_mean"]
            row["largest difference of probabilities"] = differences["probs_diff_max"]
            engine.close()  # with the process group, if it is vLLM


def decoded(engine: Engine, sizes: Sizes, config: TrainingConfig) -> tuple[list[Group], float]:
    """A response to each of random prompts, and the seconds of decoding; the first run warms."""
    random = np.random.default_rng(0)
    shape = sizes.num_prompts, config.data.max_prompt_tokens
    rows = random.integers(NUM_TOKEN_IDS, size=shape).tolist()
    prompts = [ModelInput(tuple(row)) for row in rows]
    for _ in range(2):
        began = time.perf_counter()
        engine.submit([GenerationRequest(str(n), one, seed=n) for n, one in enumerate(prompts)])
        responses = []
        while engine.num_unfinished():
            responses += engine.step()
        seconds = time.perf_counter() - began
    groups = []
    for response in responses:
        number = int(response.request_id)
        tokens = response.response_ids, response.rollout_log_probs, response.finish_reason
        rollout = Rollout(*tokens, 0.0, 0.0, "wrong", 0.0, [(0, len(response.response_ids))])
        groups.append(Group(number, Prompt(number, prompts[number], "", ""), [rollout]))
    return groups, seconds


def scored(policy: Policy, batch: Batch) -> torch.Tensor:
    """The policy's log-probs of the responses, in batch order: [B, R]."""
    (share,), (order,) = split_batch(batch, 1, policy.train.micro_batch_tokens)
    values = torch.zeros(batch.response_mask.shape)
    part = policy.log_probs(share).log_probs
    values[order, : part.shape[1]] = part
    return values


def measure_checkpoint(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """Saving and loading a checkpoint, and an update while the moments return to the device."""
    name, published = next(iter(sizes.models.items()))
    write_model_folder(model_config_of(published), scratch / name)
    config = config_of(device, sizes.tokens[0], offload_optimizer=True)
    join_alone(f"{scratch}/meet", config)
    policy, share = RandomPolicy(scratch / name, config), share_of(config)
    update = partial(policy.update, share, LossTotals.of(share.batch, 1))
    update()
    gigabytes = policy.checkpoint_bytes() / 1e9
    own: list[Any] = list(policy.model.parameters())
    weights = [parameter.to_local().clone() for parameter in own]
    for is_asynchronous in (False, True):
        folder = scratch / f"step_{int(is_asynchronous)}"
        folder.mkdir()
        with record.case("saved while training" if is_asynchronous else "saved") as row:
            began = time.perf_counter()
            policy.save(str(folder), is_asynchronous)
            row["GB"], row["seconds"] = gigabytes, time.perf_counter() - began
            while not policy.is_saved():
                time.sleep(0.01)
            row["seconds until written"] = time.perf_counter() - began
            row["GB/s"] = gigabytes / row["seconds until written"]
    with record.case("loaded after an update") as row:
        update()
        began = time.perf_counter()
        policy.load(str(folder))
        row["GB"], row["seconds"] = gigabytes, time.perf_counter() - began
        pairs = zip(weights, own, strict=True)
        row["weights"] = "equal" if all(a.equal(b.to_local()) for a, b in pairs) else "DIFFER"
    with record.case("optimizer state returns during an update") as row:
        row["seconds, state on the device"] = timed(update, device)
        policy.offload({OPTIMIZER})
        policy.begin_profile()
        policy.onload({OPTIMIZER})
        began = time.perf_counter()
        update()
        device.synchronize()
        row["seconds, state on the host"] = time.perf_counter() - began
        policy.end_profile(str(scratch / "trace.json"))
        copying, overlapped = overlap(scratch / "trace.json")
        row["copies, ms"], row["of these during kernels, ms"] = copying, overlapped


def overlap(trace: Path) -> tuple[float, float]:
    """Milliseconds of a trace's copies to the device, and of these during kernels."""
    events = json.loads(trace.read_text())["traceEvents"]
    spans: dict[str, list[tuple[float, float]]] = {"gpu_memcpy": [], "kernel": []}
    for event in events:
        is_copy = event.get("cat") == "gpu_memcpy" and "HtoD" in event.get("name", "")
        if event.get("ph") == "X" and (is_copy or event.get("cat") == "kernel"):
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    merged: list[list[float]] = []
    for begin, end in sorted(spans["kernel"]):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    copies = sorted(spans["gpu_memcpy"])
    shared = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in copies
        for first, last in merged
    )
    return sum(end - begin for begin, end in copies) / 1000, shared / 1000


def measure_training(sizes: Sizes, device: Device, scratch: Path, record: Record) -> None:
    """A training of the arithmetic model, its rank and its engine in a process each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dapo_core.demo.warm_start import build_model

    problems = generate_problems(20_000 if sizes is FULL else 200, 1, 3, seed=0)[0]
    pq.write_table(pa.Table.from_pylist(problems), scratch / "train.parquet")
    with record.case("warm start on the CPU") as row:
        recipe = WarmStartConfig(num_steps=sizes.warm_steps)
        num_threads = min(len(os.sched_getaffinity(0)), 8)
        row |= {
            "seconds": build_model(problems, scratch / "model", recipe, 0, num_threads=num_threads)[
                "seconds"
            ]
        }
    is_short = sizes is TINY
    config = TrainingConfig.model_validate(
        {
            "data": {"max_prompt_tokens": 96},
            "reward": {"overlong": {"buffer_tokens": 8}},
            "sampler": {
                "gen_prompts": 2 * sizes.train_prompts,
                "max_staleness": 0,  # so that every step compares engine and policy
                "dynamic": not is_short,
            },
            "rollout": {
                "engine": "hf",
                "group_size": 8,
                "max_response_tokens": 24 if is_short else 56,
                "memory_utilization": 0.3,
            },
            "train": {
                "device": device.kind,
                "total_steps": sizes.num_steps,
                "train_prompts": sizes.train_prompts,
                "mini_prompts": sizes.train_prompts // 2,
                "micro_batch_tokens": 16384,
                "learning_rate": 1e-3,
                "warmup_steps": 2,
                "weight_decay": 0.0,
                "gradient_checkpointing": False,
                "max_restarts": 0,
            },
        }
    )

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        with record.case(f"step {step}") as row:
            row["reward"] = metrics["critic/rewards/mean"]
            row["accuracy of all sampled"] = metrics["sampler/accuracy"]
            row["seconds"] = metrics["timing_s/step"]
            row["tokens/s"] = round(metrics["perf/throughput"])
            row["mean difference of log-probs"] = metrics["rollout/fresh_log_probs_diff_mean"]

    with record.case("training"):
        paths = scratch / "train.parquet", scratch / "model", scratch / "output"
        train(config, *paths, on_step, start_roles=start_processes)


PARTS = {
    "policy": measure_policy,
    "gradients": measure_gradients,
    "transfer": measure_transfer,
    "decoding": measure_decoding,
    "checkpoint": measure_checkpoint,
    "training": measure_training,
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("rows", type=Path)
    parser.add_argument("device")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = device_for(options.device)
    device.require()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = TINY if options.tiny else FULL
        record = Record(options.part, options.rows, device)
        PARTS[options.part](sizes, device, Path(scratch), record)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
