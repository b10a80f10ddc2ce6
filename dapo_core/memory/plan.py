"""The memory plan: what each role holds on its devices in each phase, the peaks and the limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.machine.device import device_for
from dapo_core.memory.devices import GIB, Limit
from dapo_core.memory.engine import EngineMemory, engine_memory, longest_sequence
from dapo_core.memory.holdings import (
    GRADIENTS,
    KV_CACHE,
    OF_ENGINES,
    OPTIMIZER,
    WEIGHTS,
    Holding,
    holdings,
)
from dapo_core.memory.rank import MASTER, MOMENTS, RankMemory, rank_memory
from dapo_core.model.precision import with_cpu_dtypes

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

PHASES = ("generate", "anchor", "update", "publish", "checkpoint")
RANK, ENGINE, OTHERS = "rank", "engine", "trainer, Ray and scorers"
Part = tuple[str, int, int]  # name, bytes on the device, bytes on the host
CONTEXT_BYTES = GIB  # assumed per process on an accelerator: context and NCCL's buffers
# Share of a rank's tensors: freed blocks that the allocator cannot reuse. Assumed for torch's,
# measured for jemalloc's on a CPU.
SLACK, CPU_SLACK = 0.05, 0.20
# Measured on a CPU: resident memory of a process after its imports.
PROCESS_BYTES = {"rank": int(0.45 * GIB), "vllm": int(0.8 * GIB), "hf": int(0.45 * GIB)}
OTHERS_BYTES, SCORER_BYTES = GIB, int(0.1 * GIB)
MERGED = 4  # bytes per parameter of a merged model, at most
ADVICE = (
    "from cheap to dear: lower train.logits_chunk_tokens, train.micro_batch_tokens or "
    "rollout.max_num_seqs; change rollout.memory_utilization (on a CPU memory_gigabytes); set "
    "train.gradient_checkpointing, train.offload_* or train.placement=colocated; raise "
    "train.sequence_parallel or rollout.tensor_parallel; use more devices"
)


@dataclass(frozen=True)
class Use:
    """Memory of one kind that a role holds in a phase, on each device and beside it."""

    phase: str
    role: str
    what: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Load:
    """A kind of device with its roles and peak phase; on a CPU the whole machine."""

    name: str
    num_devices: int
    processes: Mapping[str, int]  # processes per device, by role
    phase: str
    peak_bytes: int
    limit_bytes: int | None  # None: unknown

    @property
    def fits(self) -> bool | None:
        """None if the limit is unknown."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Disk:
    """Maximum bytes that a training and the stages after it leave in the store."""

    checkpoint: int  # bytes of one checkpoint
    num_checkpoints: int  # kept, plus one being written
    merged: int  # bytes of one merged model
    num_merged: int

    @property
    def num_bytes(self) -> int:
        return self.checkpoint * self.num_checkpoints + self.merged * self.num_merged


@dataclass(frozen=True)
class MemoryPlan:
    """The complete plan."""

    num_parameters: int
    num_tower_parameters: int  # of these; 0 without a vision tower
    limit: Limit
    uses: tuple[Use, ...]
    loads: tuple[Load, ...]
    rank: RankMemory
    engine: EngineMemory
    num_engines: int
    longest: int  # tokens of the longest sequence
    disk: Disk
    host_bytes: int  # host memory of all ranks and engines in the peak phase

    @property
    def shortages(self) -> list[str]:
        """What does not fit, with numbers; empty if everything fits or the devices are unknown."""
        shortages = [
            f"{load.name} needs {load.peak_bytes / GIB:.1f} GiB in phase {load.phase}, but has "
            f"{load.limit_bytes / GIB:.1f}"
            for load in self.loads
            if load.limit_bytes is not None and not load.fits
        ]
        if self.engine.num_sequences == 0:
            assert self.engine.cache is not None
            shortages.append(
                f"an engine has {max(self.engine.cache, 0) / GIB:.2f} GiB of KV cache per device, "
                f"but one sequence of {self.longest} tokens needs "
                f"{self.engine.sequence_bytes / GIB:.2f}"
            )
        return shortages


def plan_memory(
    config: TrainingConfig,
    shape: ModelShape,
    limit: Limit,
    merged_steps: Collection[int] = (),
) -> MemoryPlan:
    """Plan the memory for devices of that size; on a CPU `limit` is the machine's memory.

    `merged_steps` are those of evaluate.checkpoints, which are kept, and merged besides the last
    one.
    """
    config = with_cpu_dtypes(config, shape.hidden, shape.head_dim)
    engine = engine_memory(config, shape, limit.num_bytes)
    # A bucket is sent while the next is gathered, and loaded while the next arrives.
    bucket = max(config.train.weight_bucket_bytes, engine.item_bytes * shape.largest_tensor)
    bucket = min(bucket, engine.item_bytes * shape.num_parameters)
    adapters = shape.adapter_parameters(config.train.lora)
    if adapters and config.rollout.lora == "adapter":
        bucket = min(bucket, MASTER * adapters)
    rank = rank_memory(config, shape)
    uses = (
        *_rank_uses(config, rank, bucket),
        *_engine_uses(config, engine, bucket),
        *_other_uses(config, bucket, _routing_bytes(config, shape)),
    )
    loads = tuple(_loads(config, uses, limit.num_bytes))
    hosts = [
        config.train.num_ranks * _total(uses, phase, {RANK: 1}, "host_bytes")
        + config.rollout.num_devices * _total(uses, phase, {ENGINE: 1}, "host_bytes")
        + _total(uses, phase, {OTHERS: 1}, "host_bytes")
        for phase in PHASES
    ]
    return MemoryPlan(
        num_parameters=shape.num_parameters,
        num_tower_parameters=shape.tower_parameters,
        limit=limit,
        uses=uses,
        loads=loads,
        rank=rank,
        engine=engine,
        num_engines=config.rollout.num_workers,
        longest=longest_sequence(config),
        disk=disk_plan(config, shape.num_parameters, merged_steps, adapters),
        host_bytes=max(hosts),
    )


def disk_plan(
    config: TrainingConfig,
    num_parameters: int,
    merged_steps: Collection[int] = (),
    num_adapted: int = 0,
) -> Disk:
    """Plan the disk space for checkpoints, including one being written, and merged models.

    num_adapted: parameters of adapters, which checkpoints hold alone; 0 if all are trained.
    """
    keep = config.checkpoint
    num_kept = keep.keep_last + keep.keep_best + len({*keep.keep_steps, *merged_steps})
    item = device_for(config.train.device).item_bytes(config.train.dtype)
    checkpoint = (MASTER + MOMENTS + item * is_reference_kept(config)) * (
        num_adapted or num_parameters
    )
    return Disk(checkpoint, num_kept + 1, MERGED * num_parameters, 1 + len(merged_steps))


def is_reference_kept(config: TrainingConfig) -> bool:
    """True if checkpoints contain the reference model because it is refreshed."""
    return config.algorithm.kl.place != "off" and config.algorithm.kl.refresh_every > 0


def _rank_uses(config: TrainingConfig, rank: RankMemory, bucket: int) -> list[Use]:
    uses = []
    for phase in PHASES:
        parts = list(_rank_parts(config, rank, bucket, phase))
        is_cpu = config.train.device == "cpu"
        process, share = (PROCESS_BYTES[RANK], CPU_SLACK) if is_cpu else (CONTEXT_BYTES, SLACK)
        process += int(share * sum(on_device for _, on_device, _ in parts))
        parts += [("groups", _group_bytes(config, RANK), 0), ("process", process, 0)]
        uses += _uses(phase, RANK, parts)
    return uses


def _group_bytes(config: TrainingConfig, role: str) -> int:
    """Return the buffers of a process's groups; one of them sends the weights, on rank 0."""
    train, rollout = config.train, config.rollout
    size = train.fsdp_size or train.num_ranks
    if role == ENGINE:
        sizes = [rollout.tensor_parallel, rollout.pipeline_parallel]
        sizes += [rollout.tensor_parallel] * 2 * rollout.expert_parallel  # vllm-ascend has two
    else:
        sizes = [train.num_ranks, train.sequence_parallel, train.expert_parallel]
        sizes += [train.num_ranks // train.expert_parallel] * (train.expert_parallel > 1)
        sizes += [size, train.num_ranks // size] * (size < train.num_ranks)
    return device_for(train.device).group_bytes * (1 + sum(size > 1 for size in sizes))


def _uses(phase: str, role: str, parts: Iterable[Part]) -> list[Use]:
    return [Use(phase, role, *part) for part in parts if part[1] or part[2]]


def _rank_parts(
    config: TrainingConfig, rank: RankMemory, bucket: int, phase: str
) -> Iterator[Part]:
    is_cpu = config.train.device == "cpu"
    yield from _states(config.train, rank, phase)
    if phase == "anchor":
        yield "gathered weights", rank.forward_weights, 0
        yield "activations", rank.scoring_activations, 0
        yield "logits", rank.scoring_logits, 0
    elif phase == "update":
        yield "gathered weights", rank.update_weights, 0
        yield "full gradients and buffers", rank.update_gradients, 0
        yield "gloo's copies", rank.update_copies, 0
        yield "activations", rank.update_activations, rank.host_activations
        yield "logits", rank.update_logits, 0
        if config.train.offload_shards and not is_cpu:
            yield "optimizer step", 0, rank.optimizer_step
    elif phase == "publish":
        yield "weights being sent", 0 if is_cpu else 2 * bucket, 0  # on rank 0
    elif phase == "checkpoint" and config.checkpoint.asynchronous:
        trained = rank.gradients if config.train.lora.rank else rank.weights  # as many bytes
        saved = trained + rank.optimizer + rank.reference * is_reference_kept(config)
        yield "copy being written", saved * is_cpu, saved * (not is_cpu)


def _states(train: TrainConfig, rank: RankMemory, phase: str) -> Iterator[Part]:
    """Yield what a rank keeps between phases, on the device and on the host."""
    is_cpu, held = train.device == "cpu", _holding(train, phase).ranks
    # on separate devices gradients move with the weights
    gradients = GRADIENTS if train.takes_turns else WEIGHTS
    # under offload_shards moments stay in pageable host memory
    moments = rank.optimizer if train.offload_shards else 2 * rank.pinned_trained
    states = [
        ("weights", WEIGHTS, rank.weights, rank.pinned),
        ("gradients", gradients, rank.gradients, rank.pinned_trained),
        ("optimizer", OPTIMIZER, rank.optimizer, moments),
        ("reference model", WEIGHTS, rank.reference, rank.reference),
    ]
    for label, name, size, on_host in states:
        if name not in held and (name == GRADIENTS or (is_cpu and train.takes_turns)):
            continue  # dropped, or spilled
        is_here = is_cpu or (name in held and not train.offload_shards)
        yield (label, size, 0) if is_here else (label, 0, on_host)


def _holding(train: TrainConfig, phase: str) -> Holding:
    return holdings(train)["generate" if phase == "checkpoint" else phase]  # type: ignore[index]


def _engine_uses(config: TrainingConfig, engine: EngineMemory, bucket: int) -> list[Use]:
    train = config.train
    is_cpu = train.device == "cpu"
    # on the host
    keeps_weights = config.rollout.engine == "hf" or device_for(train.device).sleep_level == 1
    if train.lora.rank and config.rollout.lora == "adapter":
        keeps_weights = True  # no sync replaces them
    process = PROCESS_BYTES[config.rollout.engine] if is_cpu else CONTEXT_BYTES
    # on a shared device, rank 0's engine reads what rank 0 sends, and other ranks send nothing
    received = 0 if is_cpu or train.is_colocated else 2 * bucket
    uses = []
    for phase in PHASES:
        # engines on a CPU cannot sleep
        held = OF_ENGINES if is_cpu else _holding(train, phase).engines
        is_awake = KV_CACHE in held
        parts = [
            ("weights", engine.weights, 0)
            if WEIGHTS in held
            else ("weights", 0, engine.weights * keeps_weights),
            ("keys and values", max(engine.cache or 0, 0) * is_awake, 0),
            ("activations", engine.activations * (is_awake and phase != "publish"), 0),
            ("weights being received", received * (phase == "publish"), 0),
            ("module being loaded", engine.reload * (phase == "publish"), 0),
            ("probe's logits", engine.probe * (phase == "generate"), 0),
            ("graphs", engine.graphs, 0),
            ("groups", _group_bytes(config, ENGINE), 0),
            ("process", process, 0),
        ]
        uses += _uses(phase, ENGINE, parts)
    return uses


def _routing_bytes(config: TrainingConfig, shape: ModelShape) -> int:
    """Return the bytes of the experts that a step replays: one for each of a token in a layer."""
    if config.algorithm.routing_replay == "off":
        return 0
    tokens = config.train.train_prompts * config.rollout.group_size * longest_sequence(config)
    return tokens * len(shape.layers) * shape.experts_per_token


def _other_uses(config: TrainingConfig, bucket: int, routing: int) -> list[Use]:
    is_cpu = config.train.device == "cpu"
    scorers = config.rollout.num_workers * config.reward.num_processes * SCORER_BYTES
    uses = []
    for phase in PHASES:
        parts = [
            ("process", is_cpu * (OTHERS_BYTES + scorers), 0),
            ("weights being sent", 2 * bucket * (is_cpu and phase == "publish"), 0),
            ("routing", is_cpu * routing, (not is_cpu) * routing),
        ]
        uses += _uses(phase, OTHERS, parts)
    return uses


def _loads(config: TrainingConfig, uses: Sequence[Use], device_bytes: int | None) -> list[Load]:
    num_ranks, num_engine_devices = config.train.num_ranks, config.rollout.num_devices
    if config.train.device == "cpu":
        kinds = [("the machine", 1, {RANK: num_ranks, ENGINE: num_engine_devices, OTHERS: 1})]
    elif config.train.is_colocated:
        kinds = [("a device", num_ranks, {RANK: 1, ENGINE: 1})]
    else:
        kinds = [
            ("a rank's device", num_ranks, {RANK: 1}),
            ("an engine's device", num_engine_devices, {ENGINE: 1}),
        ]
    loads = []
    for name, number, processes in kinds:
        peaks = {phase: _total(uses, phase, processes, "device_bytes") for phase in PHASES}
        phase = max(peaks, key=peaks.__getitem__)
        loads.append(Load(name, number, processes, phase, peaks[phase], device_bytes))
    return loads


def _total(uses: Sequence[Use], phase: str, processes: Mapping[str, int], field: str) -> int:
    return sum(
        processes.get(use.role, 0) * getattr(use, field) for use in uses if use.phase == phase
    )
