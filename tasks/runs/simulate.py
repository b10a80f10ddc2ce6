"""Simulates a recipe's training step and its alternatives, and names the keys of the fastest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dapo_core.config.loading import resolve
from dapo_core.config.training import TrainingConfig
from dapo_core.draw.report import NotEnoughSignal
from dapo_core.errors import ConfigError, DapoError, counted
from dapo_core.memory.devices import DEVICES, cpu_rates, find_device
from dapo_core.memory.shape import ModelShape, shape_of
from dapo_core.simulation.costs import (
    ANCHOR,
    GENERATE,
    METRICS,
    OTHER,
    UPDATE,
    Machine,
    Measured,
    assumed_workload,
    estimate,
    measure,
)
from dapo_core.simulation.steps import Setup, Simulated, simulate
from dapo_core.simulation.workload import Workload
from durable import write_atomically
from eval import EvaluationError
from eval.report.training import read_training_metrics
from eval.results.rows import make_folder
from tasks.artifacts.artifact import StoreError
from tasks.config import ChainConfig
from tasks.config.chain import ModelConfig
from tasks.preflight.memory import device_limit, model_config, plan_of
from tasks.runs.history import STEPS_FILE, find_run, find_training_log, read_config

NUM_NEWEST = 50  # steps of a run that count
MOST_RESPONSES, MIN_STEPS, MAX_STEPS = 30_000, 5, 20  # of a simulation
ENOUGH_RESPONSES = 1024  # of a step that is not divided
WINDOWS = [{"sampler.window": window} for window in (0.0, 0.3, 1.0)]
SPECULATIONS = [{"rollout.speculation": speculation} for speculation in ("off", "ngram")]
ENGINE_SHARES = (0.25, 0.5, 0.75)  # of the devices, if ranks and engines have their own
FIGURES = tuple(
    "seconds trained_tokens idle_share prefill_share waste_ratio mean_age max_age".split()
)
MOST_DOUBLINGS, NUM_BISECTIONS = 8.0, 11  # of the estimated times of engines
TINY = 1e-9
LEAST_GAIN = 1.03  # in tokens per second, for which keys are changed
LITTLE, MANY = 0.1, 0.85  # share of a step, and of slots


@dataclass(frozen=True)
class Basis:
    """What the simulations of a recipe start from."""

    shape: ModelShape
    workload: Workload
    factors: Mapping[str, float]  # measured / estimated by phase; seconds of `other`
    tokens_per_pass: float | None
    source: str  # of times and workload

    def about(self, is_dynamic: bool) -> list[str]:
        """What simulations assume, as lines; `is_dynamic` as in sampler.dynamic."""
        work = self.workload
        signal = f"; {work.signal_share:.0%} of groups have signal" if is_dynamic else ""
        lines = [
            f"times and lengths: {self.source}",
            f"prompts of {work.prompt_tokens:,} tokens; responses of {work.mean_tokens:,.0f} in "
            f"the mean, {work.cut_share:.1%} cut at {work.limit:,}{signal}",
        ]
        if self.factors:
            factors = ((name, self.factors[name]) for name in METRICS if name in self.factors)
            corrected = ", ".join(f"{name} x {factor:.2f}" for name, factor in factors)
            lines.append(
                f"corrected by that run: {corrected}; {self.factors[OTHER]:.2f} s a step for "
                "the rest"
            )
        return lines


@dataclass(frozen=True)
class Alternative:
    """A simulated recipe."""

    keys: Mapping[str, Any]  # that differ from the recipe's own
    config: ChainConfig
    found: Simulated


@dataclass(frozen=True)
class Simulation:
    """A recipe's own step and its alternatives."""

    alternatives: tuple[Alternative, ...]  # the recipe's own first
    best: Alternative
    about: list[str]

    @property
    def own(self) -> Alternative:
        return self.alternatives[0]

    @property
    def verdict(self) -> str:
        """One sentence: the fastest keys, and what bounds them."""
        own, best = self.own.found, self.best.found
        if not self.best.keys:
            start = f"The recipe's own keys are the fastest: {own.step_seconds:,.4g} s a step"
        else:
            keys = " ".join(f"--set {name}={value}" for name, value in self.best.keys.items())
            times = best.tokens_per_second / own.tokens_per_second
            start = (
                f"Fastest: {keys}: {best.step_seconds:,.4g} s a step instead of "
                f"{own.step_seconds:,.4g}, {times:.2f} times the tokens per second"
            )
        return f"{start}; {_bound(self.best)}."


def described_keys(one: Alternative) -> str:
    """Return the keys that the alternative sets, as values of --set."""
    return " ".join(f"{name}={value}" for name, value in one.keys.items()) or "the recipe's own"


def describe(simulation: Simulation) -> dict[str, Any]:
    """Return the simulation as JSON values."""
    rows = [
        {
            "keys": dict(one.keys),
            "is_best": one is simulation.best,
            "step_seconds": one.found.step_seconds,
            "tokens_per_second": one.found.tokens_per_second,
            **{name: getattr(one.found, name) for name in FIGURES},
        }
        for one in simulation.alternatives
    ]
    return {"alternatives": rows, "about": simulation.about, "verdict": simulation.verdict}


def write_simulation(simulation: Simulation, folder: Path) -> None:
    """Write simulate.json, and the timelines of the recipe's own keys and of the fastest."""
    from eval.report.timeline import render_timelines, timeline_png

    shown = {described_keys(one): one.found for one in (simulation.own, simulation.best)}
    timelines = {name: (found.spans, found.occupied) for name, found in shown.items()}
    content = describe(simulation)
    names = [described_keys(one) for one in simulation.alternatives]
    make_folder(folder)
    write_atomically(folder / "simulate.json", json.dumps(content, indent=2) + "\n")
    write_atomically(folder / "timeline.html", render_timelines(content, names, timelines))
    write_atomically(folder / "timeline.png", timeline_png(timelines))


def simulate_recipe(
    config: ChainConfig,
    source: str | None = None,
    mean_tokens: float | None = None,
    num_steps: int | None = None,
) -> Simulation:
    """Simulate a recipe and its alternatives, one kind of key after the other.

    `source` is a run or a metrics.jsonl that the times and lengths are taken from. Raises
    ConfigError for an accelerator without train.device_model, StoreError for an unknown run,
    ResultsError for a log without steps, NotEnoughSignal if the recipe draws too little, and what
    `model_config` and `shape_of` raise.
    """
    limit = config.rollout.max_response_tokens
    if mean_tokens is not None and mean_tokens >= limit:
        raise ConfigError(
            f"--mean-tokens {mean_tokens:g} is not below rollout.max_response_tokens={limit}, "
            "where responses are cut; lower it, or raise the limit with --set"
        )
    basis = basis_of(config, source, mean_tokens)
    own = best = Alternative({}, config, _simulated(config, basis, num_steps))
    found = [own]
    for kind in (_open_prompts, _placements, lambda _: WINDOWS, lambda _: SPECULATIONS):
        for change in kind(best.config):
            keys = {**best.keys, **change}
            keys = {name: keys[name] for name in keys if keys[name] != attrgetter(name)(config)}
            candidate = None if keys in [one.keys for one in found] else _changed(config, keys)
            if candidate is None:
                continue
            with suppress(NotEnoughSignal):  # within its own limits
                result = _simulated(candidate, basis, num_steps)
                found.append(Alternative(keys, candidate, result))
        fastest = max(found, key=lambda one: one.found.tokens_per_second)
        if fastest.found.tokens_per_second > LEAST_GAIN * best.found.tokens_per_second:
            best = fastest
    about = basis.about(config.sampler.dynamic)
    about += [f"the recipe does not fit: {shortage}" for shortage in plan_of(config).shortages]
    return Simulation(tuple(found), best, about)


def advice(config: ChainConfig, model: Path, metrics: Path) -> str:
    """Return what the simulator says about the next training, from the steps of the last one.

    `model` is the folder it trained. Says why if the recipe cannot be simulated.
    """
    if config.model.source != "path":
        changes = {"model": ModelConfig(source="path", path=str(model))}
        config = config.model_copy(update=changes)
    try:
        return simulate_recipe(config, str(metrics)).verdict
    except (DapoError, EvaluationError) as error:
        return f"no advice: {error}"


def _open_prompts(config: ChainConfig) -> Iterator[dict[str, Any]]:
    """The keys for one step's prompts open at a time, and for as many as staleness allows."""
    train_prompts = config.train.train_prompts
    yield {"sampler.gen_prompts": train_prompts}
    yield {"sampler.gen_prompts": (1 + config.sampler.max_staleness) * train_prompts}


def _placements(config: ChainConfig) -> Iterator[dict[str, Any]]:
    """The keys for each schedule, and on accelerators each placement of the same devices."""
    if not config.train.is_colocated:
        for schedule in ("synchronous", "asynchronous"):
            yield {"rollout.schedule": schedule}
    if config.train.device == "cpu":  # its cores are no devices to divide
        return
    num_devices = config.num_devices
    parts = config.rollout.num_devices // config.rollout.num_workers
    together = {"train.num_ranks": num_devices, "rollout.num_workers": num_devices // parts}
    yield {"train.placement": "colocated", "rollout.schedule": "synchronous", **together}
    for share in ENGINE_SHARES:
        num_workers = round(share * num_devices / parts)
        apart = {
            "train.num_ranks": num_devices - num_workers * parts,
            "rollout.num_workers": num_workers,
        }
        yield {"train.placement": "separate", "rollout.schedule": "asynchronous", **apart}


def _changed(config: ChainConfig, keys: Mapping[str, Any]) -> ChainConfig | None:
    """Return the recipe with these keys; None if they contradict others, or do not fit.

    On a CPU, ranks and engines that work at the same time need cores of their own.
    """
    tree = config.model_dump(mode="json")
    for name, value in keys.items():
        section, _, key = name.partition(".")
        tree[section][key] = value
    try:
        candidate = resolve(type(config), tree)
    except ConfigError:
        return None
    is_ahead = candidate.rollout.schedule == "asynchronous"
    is_local = candidate.train.device == "cpu" and candidate.train.ray_address is None
    if is_ahead and is_local and candidate.num_cpus > len(os.sched_getaffinity(0)):
        return None
    return None if plan_of(candidate).shortages else candidate


def setup_of(config: TrainingConfig, basis: Basis) -> Setup:
    """Return what a recipe is simulated with."""
    num_parts = _num_parts(config)
    costs = estimate(config, basis.shape, _machine(config), basis.workload, basis.tokens_per_pass)
    num_open = config.sampler.gen_prompts // num_parts
    return Setup(
        workload=basis.workload,
        costs=costs.scaled(basis.factors),
        sampler=config.sampler.model_copy(update={"gen_prompts": num_open}),
        train_prompts=config.train.train_prompts // num_parts,
        num_engines=config.rollout.num_workers // num_parts,
        is_asynchronous=config.rollout.schedule == "asynchronous",
        num_parts=num_parts,
    )


def _num_parts(config: TrainingConfig) -> int:
    """Return into how many equal parts a large step falls, of which one is simulated."""
    train_prompts = config.train.train_prompts
    common = math.gcd(train_prompts, config.sampler.gen_prompts, config.rollout.num_workers)
    most = max(train_prompts * config.rollout.group_size // ENOUGH_RESPONSES, 1)
    return max(part for part in range(1, most + 1) if common % part == 0)


def _simulated(config: TrainingConfig, basis: Basis, num_steps: int | None = None) -> Simulated:
    """Simulate a recipe; the first steps, in which the engines' work settles, do not count."""
    setup = setup_of(config, basis)
    num_responses = setup.train_prompts * config.rollout.group_size
    steps = num_steps or min(max(MOST_RESPONSES // num_responses, MIN_STEPS), MAX_STEPS)
    try:
        return simulate(setup, steps, num_skipped=2 * (1 + config.sampler.max_staleness))
    except NotEnoughSignal:  # its message shows responses, which are made up here
        work, num_prompts = basis.workload, config.train.train_prompts
        raise NotEnoughSignal(
            f"a simulated step finds fewer than {num_prompts} groups with signal: "
            f"{work.signal_share:.1%} of the groups have some, but {work.cut_share:.1%} of the "
            "responses are cut, which counts as wrong here; raise rollout.max_response_tokens or "
            "sampler.max_num_gen_batches, or lower train.train_prompts"
        ) from None


def basis_of(config: ChainConfig, source: str | None, mean_tokens: float | None) -> Basis:
    """Return the workload and the corrections of the costs, from a run if one is given."""
    shape = shape_of(model_config(config.model))
    if source is None:
        workload = assumed_workload(config, mean_tokens)
        assumed = "assumed, from published lengths and the devices' rates; --from RUN takes a run's"
        return Basis(shape, workload, {}, None, assumed)
    ran_with, steps = _read(config, source)
    measured = measure(ran_with, steps)
    if measured is None:
        raise ConfigError(
            f"--from {source}: none of {len(steps)} steps trained on anything, so they say nothing "
            "about a step's time; name another run"
        )
    workload = measured.workload
    if mean_tokens is not None:
        given = assumed_workload(config, mean_tokens)
        workload = replace(workload, log_mean=given.log_mean, log_sigma=given.log_sigma)
    workload = replace(
        workload,
        limit=config.rollout.max_response_tokens,
        group_size=config.rollout.group_size,
    )
    about = f"as in {counted(measured.num_steps, 'step')} of {source}"
    factors = _factors(ran_with, shape, measured)
    return Basis(shape, workload, factors, measured.tokens_per_pass, about)


def _factors(config: ChainConfig, shape: ModelShape, measured: Measured) -> dict[str, float]:
    """Return measured / estimated seconds by phase, so that the simulated run takes as long.

    Where engines decode while ranks work, their factor is searched: the slowest engines for which
    ranks wait no longer than they did.
    """
    factors = {**dict.fromkeys(METRICS, 1.0), OTHER: measured.seconds[OTHER]}

    def simulated(factors: Mapping[str, float]) -> Mapping[str, float]:
        basis = Basis(shape, measured.workload, factors, measured.tokens_per_pass, "")
        return _simulated(config, basis).seconds

    found = simulated(factors)
    for phase in METRICS:
        factors[phase] = measured.seconds[phase] / found[phase] if found[phase] else 1.0
    if config.rollout.schedule == "asynchronous":
        low, high = -MOST_DOUBLINGS, MOST_DOUBLINGS
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            waiting = simulated({**factors, GENERATE: 2**middle})[GENERATE]
            low, high = (middle, high) if waiting < measured.seconds[GENERATE] else (low, middle)
        factors[GENERATE] = 2**low
    return factors


def _read(config: ChainConfig, source: str) -> tuple[ChainConfig, list[dict[str, Any]]]:
    """Return the configuration and the newest steps of a run, or of a log of this recipe."""
    store, path = Path(config.store.path), Path(source)
    if not path.exists() and not store.is_dir():
        raise StoreError(
            f"--from {source}: there is no such file or folder, and no store {store} with runs; "
            "correct the path, or set store.path"
        )
    steps = read_training_metrics(find_training_log(store, source))[-NUM_NEWEST:]
    if path.is_file() or (path / STEPS_FILE).is_file():
        return config, steps
    tree = read_config(find_run(store, source, "train_policy"))
    ran_with = resolve(ChainConfig, {name: tree[name] for name in tree if name != "flow"})
    for name in ("model", "train.device", "train.device_model", "rollout.engine"):
        ours, others = map(attrgetter(name), (config, ran_with))
        if ours != others:
            raise ConfigError(
                f"--from {source}: that run has another {name} ({others}, not {ours}), so its "
                "times say nothing about this recipe; name another run"
            )
    return ran_with, steps


def _machine(config: TrainingConfig) -> Machine:
    train = config.train
    if train.device == "cpu":
        ranks, engines = cpu_rates(config.threads_per_rank), cpu_rates(config.threads_per_worker)
        return Machine(ranks, engines, None)
    if train.device_model is None:
        raise ConfigError(
            f"the time of a step on train.device={train.device} depends on the device: set "
            f"train.device_model to one of {', '.join(DEVICES)}"
        )
    rates = find_device(train.device_model).rates
    return Machine(rates, rates, device_limit(config).num_bytes)


def _bound(one: Alternative) -> str:
    """Say what a step waits for."""
    found, seconds, whole = one.found, one.found.seconds, one.found.step_seconds
    ranks, waiting = (seconds[ANCHOR] + seconds[UPDATE]) / whole, seconds[GENERATE] / whole
    is_ahead = one.config.rollout.schedule == "asynchronous"
    decoding = min((1 - found.idle_share) / max(waiting + is_ahead * ranks, TINY), 1.0)
    if waiting < LITTLE:
        return f"ranks bound it: old log-probs and update take {ranks:.0%} of a step"
    engines = f"{decoding:.0%} of the engines' slots decode"
    if found.prefill_share > LITTLE / 2:
        engines += f", and {found.prefill_share:.0%} of their time is prefill"
    if not is_ahead:
        return (
            f"engines and ranks take turns: the draw is {waiting:.0%} of a step, in which "
            f"{engines}; old log-probs and update are {ranks:.0%}"
        )
    cause = "engines bound" if decoding > MANY else "the longest responses bound"
    return f"{cause} it: ranks wait {waiting:.0%} of a step for the draw, and {engines}"
