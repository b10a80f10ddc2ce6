"""The training loop: draw, pack, anchor, weigh, learn, publish, validate, keep, log.

                   +--------------------------------------------------+
                   |   Trainer (this file), in the driver process     |
                   +--------------------------------------------------+
         requests: |  ^ groups: tokens,            shares of | ^ log-probs,
         prompts   v  | log-probs, scores          the batch v | loss sums
    +-----------------------------------+         +---------------------------------+
    | rollout workers (rollout.py):     | weights | policy ranks (policy/rank.py):  |
    | one engine each, scoring processes| <------ | FSDP2 shards and optimizer      |
    +-----------------------------------+         +---------------------------------+

draw           The trainer waits for P groups with signal (sampler.py); engines decode and score.
anchor, learn  The trainer waits for all ranks; every call is collective. Engines idle until
publish, or with rollout.schedule=asynchronous decode for the next draw.
publish        Rank 0 sends weights in buckets to all engines; checksums verify them (weights/).
keep           Ranks write their checkpoint shards to disk while the next step draws (checkpoint/).

With train.placement=colocated, ranks and engines take turns on the same devices (turns.py). If an
actor dies, all restart from the last checkpoint (training.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.algorithm.advantage import weigh
from dapo_core.algorithm.batch import Batch, TokenStats, build_batch, shuffled
from dapo_core.algorithm.kl import KLController
from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.recorded import RecordedDraws, record_draw
from dapo_core.checkpoint.resume import intact_start, resume_metrics
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.config.compat import Compat
from dapo_core.draw.account import Draw
from dapo_core.draw.groups import Group
from dapo_core.draw.report import DrawProgress
from dapo_core.draw.sampler import Sampler
from dapo_core.draw.texts import decoder, rollout_rows
from dapo_core.machine.device import device_for
from dapo_core.machine.stopping import StopRequest
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.engine_checks import check_sampled_alike, probe_difference
from dapo_core.metrics.flops import ActorUtilization
from dapo_core.metrics.log import MetricsLog, format_step
from dapo_core.metrics.step import draw_metrics, timing_metrics, training_metrics
from dapo_core.metrics.step_files import ROLLOUTS, StepFiles
from dapo_core.model.pretrained import load_model_config
from dapo_core.turns import Turns

if TYPE_CHECKING:
    from dapo_core.algorithm.update import Update
    from dapo_core.cluster.interface import Cluster
    from dapo_core.config.training import TrainingConfig
    from dapo_core.draw.prompts import PromptStream
    from dapo_core.validation import Validation

logger = logging.getLogger(__name__)

KL_COEFFICIENT = "algorithm.kl.coefficient"

OnStep = Callable[[int, dict[str, float]], None]


class Trainer:
    """The state of a training run, and its step."""

    def __init__(
        self,
        config: TrainingConfig,
        cluster: Cluster,
        stream: PromptStream,
        model_path: Path,
        output_dir: Path,
        identity: Mapping[str, Any],
        validation: Validation,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.stream = stream
        self.validation = validation
        self.output_dir = output_dir
        self.identity = dict(identity)
        self.decode = decoder(validation.tokenizer)
        self.rollouts = StepFiles(output_dir, ROLLOUTS)
        self.sampler: Sampler | RecordedDraws = Sampler(
            cluster.rollouts,
            stream,
            config.sampler,
            DrawProgress(config.train.train_prompts, self.decode),
            Compat.of(config.algorithm),
            config.run.deterministic,
            runs_ahead=config.rollout.schedule == "asynchronous",
        )
        self.turns = Turns(cluster.policy, cluster.rollouts, config.train)
        self.kl = KLController(config.algorithm.kl)
        self.checkpoints = CheckpointWriter(
            output_dir / CHECKPOINTS, model_path, cluster.policy, config
        )
        device = device_for(config.train.device)
        self.dtypes = [device.resolve_dtype(each.dtype) for each in (config.train, config.rollout)]
        model_config = load_model_config(model_path, config.model.trust_remote_code)
        self.utilization = ActorUtilization(
            model_config,
            cluster.policy.device_name(),
            self.dtypes[0],
            config.train.num_ranks,
            config.train.lora,
            "vision" not in config.train.freeze,
        )
        self.stop = StopRequest()  # placeholder; run() installs the real one
        self.num_steps = 0  # completed training steps
        self.policy_version = 0  # optimizer steps behind the engines' weights

    def step(self, number: int) -> dict[str, float]:
        """Run training step `number`, starting at 1; returns its metrics."""
        config, timer = self.config, PhaseTimer(f"training step {number}")
        draw = self._draw(number, timer)
        with timer.phase("metrics"):
            metrics = draw_metrics(draw, config.sampler.gen_prompts, self.policy_version)

        if draw.groups:  # empty if on_exhausted=skip_step skips the step
            with timer.phase("pack"):
                groups = shuffled(draw.groups, config.run.seed, number)
                drawn = build_batch(groups, config.reward.mask_truncated, self.policy_version)
            batch, stats = self._anchor(drawn, timer)
            batch, kl_metrics = self._weigh(batch, stats, timer)
            updates, stats = self._learn(batch, stats, number, timer)
            with timer.phase("metrics"):
                check_sampled_alike(stats.log_probs, drawn, config, self.dtypes)
                metrics |= kl_metrics
                metrics |= training_metrics(groups, drawn, batch, stats, updates, config)
                seconds = timer.seconds["update_actor"]
                metrics |= self.utilization.metrics(batch, seconds, config.train.passes)
            metrics |= self._publish(batch, updates[-1].policy_version, timer)

        self.cluster.policy.refresh_reference(number, timer)
        self.num_steps = number
        metrics |= self._validate(number, timer)
        with timer.phase("metrics"):
            metrics |= {"training/global_step": float(number), "training/epoch": self.stream.epoch}
            metrics |= self.turns.memory_metrics()
        self._save_rollouts(number, draw.groups, timer)
        self._keep(metrics, timer)
        metrics |= timing_metrics(timer.read(), draw.groups, config.num_devices)
        self._log(number, metrics)
        return metrics

    def run(self, report: OnStep, stop: StopRequest | None = None) -> None:
        """Run all remaining steps. A stop request saves the last one and raises StopRequested."""
        self.stop = stop or self.stop
        with self.stop.deferred(), self.checkpoints.ending():
            if self.num_steps == 0 and self.config.validation.before_training:
                self.stop.check()
                report(0, self._validate_before_training())
            policy, traced = self.cluster.policy, self.config.train.profile.steps
            for number in range(self.num_steps + 1, self.config.train.total_steps + 1):
                is_traced = number in traced
                with policy.profiled(number, self.output_dir) if is_traced else nullcontext():
                    metrics = self.step(number)
                report(number, metrics)

    def resume(self, checkpoint: Path | None) -> None:
        """Restore the state of a checkpoint, or start from the beginning if None."""
        folder, verify = self.output_dir / CHECKPOINTS, self.cluster.policy.verify
        checkpoint = intact_start(checkpoint, folder, self.config.checkpoint, verify)
        if checkpoint is None:
            self._rewind(0, [])
            self.log = MetricsLog(self.output_dir, None)
            self._begin_files(None)
            return
        state = read_state(checkpoint)
        self._begin_files(state.step)
        self.num_steps, self.policy_version = state.step, state.policy_version
        is_same_data = state.identity.get("prompts") == self.identity["prompts"]
        self._rewind(state.prompt_position, state.visits if is_same_data else [])
        if state.identity == self.identity:
            self.sampler.surplus, self.sampler.unfinished = state.surplus, state.unfinished
        elif num_groups := len(state.surplus) + len(state.unfinished):
            if is_same_data:
                self.sampler.redraw(state.step + 1, state.surplus, state.unfinished)
            logger.warning(
                "checkpoint.allow_changed: discarding %d groups sampled before the change",
                num_groups,
            )
        if state.identity.get(KL_COEFFICIENT) == self.identity[KL_COEFFICIENT]:
            self.kl.coefficient = state.kl_coefficient
        timer = PhaseTimer()
        self.turns.enter("update", timer)
        self.cluster.policy.load(str(checkpoint))
        self.turns.enter("publish", timer)
        self.cluster.weights.send(self.policy_version)
        self.turns.enter("generate", timer)
        is_own = checkpoint.parent == folder  # else of another training
        self.log = resume_metrics(self.output_dir, state, is_own)
        logger.info("resuming after step %d from %s", self.num_steps, checkpoint.name)

    def _rewind(self, position: int, visits: Sequence[Sequence[int]]) -> None:
        self.stream.position = position
        if self.stream.backoff is not None:
            self.stream.backoff.visits = {prompt: list(visit) for prompt, *visit in visits}

    def _draw(self, number: int, timer: PhaseTimer) -> Draw:
        with timer.phase("gen"), self.stop.interruptible(number):
            draw = self.sampler.draw(number, self._while_waiting)
        timer.attribute(self.checkpoints.take_polled_seconds(), "gen", "save_checkpoint")
        timer.attribute(draw.account.reward_seconds, "gen", "reward")
        return draw

    def _anchor(self, batch: Batch, timer: PhaseTimer) -> tuple[Batch, TokenStats | None]:
        self.turns.enter("anchor", timer)
        return self.cluster.policy.anchor(batch, timer)

    def _weigh(
        self, batch: Batch, stats: TokenStats | None, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        with timer.phase("adv"):
            batch, metrics = self.kl.penalise(batch)
            return weigh(batch, self.config, stats), metrics

    def _learn(
        self, batch: Batch, stats: TokenStats | None, number: int, timer: PhaseTimer
    ) -> tuple[list[Update], TokenStats]:
        self.turns.enter("update", timer)
        with timer.phase("update_actor"):
            return self.cluster.policy.learn(batch, stats, number)

    def _publish(self, batch: Batch, policy_version: int, timer: PhaseTimer) -> dict[str, float]:
        """Send the weights to the engines; returns how far the worst engine is from the policy."""
        probe = batch.probe
        with timer.phase("weight_sync"):
            probed = self.cluster.policy.log_probs(probe, temperature=1.0).log_probs
            self.sampler.pause()
        self.turns.enter("publish", timer)
        with timer.phase("weight_sync"):
            self.policy_version = policy_version
            self.cluster.weights.send(policy_version)
        self.turns.enter("generate", timer)
        with timer.phase("weight_sync"):
            engines = self.cluster.rollouts.log_probs
            difference = probe_difference(engines, probe, probed, self.dtypes)
        usage = self.cluster.rollouts.usage_metrics(self.config.rollout)
        return {"weight_sync/probe_difference": difference, **usage}

    def _validate(self, number: int, timer: PhaseTimer) -> dict[str, float]:
        if not is_due(number, self.config.validation.every, self.config.train.total_steps):
            return {}
        with timer.phase("testing"):
            return self.validation.run(self.cluster.rollouts, number)

    def _validate_before_training(self) -> dict[str, float]:
        """Validate the initial model as step 0."""
        timer = PhaseTimer()
        metrics = self._validate(0, timer)
        metrics |= {"training/global_step": 0.0, "timing_s/testing": timer.seconds["testing"]}
        self._log(0, metrics)
        return metrics

    def _begin_files(self, last_step: int | None) -> None:
        for files in (self.rollouts, self.validation.files):
            files.begin(last_step)

    def _save_rollouts(self, number: int, groups: Sequence[Group], timer: PhaseTimer) -> None:
        """Save responses, as text and for a replay, before the checkpoint: a resume misses none."""
        train = self.config.train
        every = train.save_rollouts_every
        if train.record_draws:
            with timer.phase("save_rollouts"):
                record_draw(self.output_dir, number, groups)
        if groups and (is_due(number, every, train.total_steps) or (every and number == 1)):
            with timer.phase("save_rollouts"):
                saved = groups[: train.num_saved_prompts]
                self.rollouts.write(number, rollout_rows(number, saved, self.decode))

    def _keep(self, metrics: Mapping[str, float], timer: PhaseTimer) -> None:
        save_every, total_steps = self.config.checkpoint.save_every, self.config.train.total_steps
        with timer.phase("save_checkpoint"):
            due = is_due(self.num_steps, save_every, total_steps)
            self.checkpoints.keep(self._state(metrics), due)

    def _log(self, number: int, metrics: Mapping[str, float]) -> None:
        self.log.append(number, self.policy_version, metrics)
        logger.info("%s", format_step(number, metrics))

    def _while_waiting(self) -> None:
        self.checkpoints.poll()
        self.stop.check()

    def _state(self, metrics: Mapping[str, float]) -> TrainerState:
        """Return the state after the step, as copies that the next draw does not change."""
        visits = self.stream.backoff.visits if self.stream.backoff is not None else {}
        return TrainerState(
            step=self.num_steps,
            policy_version=self.policy_version,
            prompt_position=self.stream.position,
            surplus=list(self.sampler.surplus),
            unfinished=list(self.sampler.unfinished),
            kl_coefficient=self.kl.coefficient,
            metrics=dict(metrics),
            identity=self.identity,
            visits=[[prompt, *visit] for prompt, visit in visits.items()],
        )


def is_due(step: int, every: int, total_steps: int) -> bool:
    """True on every `every`-th step and on the last; 0 means never."""
    return every > 0 and (step % every == 0 or step == total_steps)
