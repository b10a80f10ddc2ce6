"""DAPO training: draw -> pack -> anchor -> weigh -> learn -> publish -> validate -> keep -> log, once a step.

dapo train (training.py)        the trainer: this file, one process without an accelerator
  |                               |  ^
  | starts Ray and the actors,    |  | waits for the step's train_prompts groups (sampler.py)
  | restarts all if one dies      |  |
  v                               v  |
rollout workers (rollout.py)     GroupRequest ->   <- Group: tokens, log-probs and scores of G responses
  one engine (engines/), over rollout.tensor_parallel processes, and its scoring processes (reward/) each; an
  engine decodes on a thread of its own while its worker scores and the trainer is busy; all idle while the policy
  learns, and under train.placement=colocated give their devices to the ranks (turns.py)
  ^
  | weights, two buckets at a time: policy rank 0 -> every engine process (weight_transfer/), proven by checksums
  |
policy ranks (policy/rank.py)    RankShare ->      <- log-probs, then sums of the update
  FSDP2 shards over one collective group; every call goes to all ranks at once, and the trainer waits for all;
  they write their own shards of a checkpoint to the disk while the next step draws (checkpoint/)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core import metrics as measure
from dapo_core.advantage import weigh
from dapo_core.batch import build_batch, shuffled
from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.resume import resume_metrics
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.compat import Compat
from dapo_core.device import device_for
from dapo_core.engine_checks import probe_difference, require_sampled_alike
from dapo_core.flops import ActorUtilization
from dapo_core.kl import KLController
from dapo_core.loss import LossTotals
from dapo_core.pretrained import load_model_config
from dapo_core.rollout_metrics import correction_metrics
from dapo_core.sampler import Sampler
from dapo_core.stopping import StopRequest
from dapo_core.turns import Turns

if TYPE_CHECKING:
    from dapo_core.cluster.start import Cluster
    from dapo_core.config.training import TrainingConfig
    from dapo_core.data import PromptStream
    from dapo_core.validation import Validation

logger = logging.getLogger(__name__)

KL_COEFFICIENT = "algorithm.kl.coefficient"

OnStep = Callable[[int, dict[str, float]], None]


class Trainer:
    """The state of a training run and its step."""

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
        self.sampler = Sampler(
            cluster.rollouts,
            stream,
            config.train.train_prompts,
            config.sampler,
            Compat.of(config.algorithm),
            config.run.deterministic,
        )
        self.sampler.while_waiting = self._while_waiting
        self.turns = Turns(cluster.policy, cluster.rollouts, config.train)
        self.kl = KLController(config.algorithm.kl)
        self.checkpoints = CheckpointWriter(output_dir / CHECKPOINTS, model_path, cluster.policy, config)
        device = device_for(config.train.device)
        self.dtypes = [device.resolve_dtype(section.dtype) for section in (config.train, config.rollout)]
        model_config = load_model_config(model_path, config.model.trust_remote_code)
        self.utilization = ActorUtilization(
            model_config, cluster.policy.device_name(), self.dtypes[0], config.train.num_ranks
        )
        self.stop = StopRequest()  # placeholder; run() installs the real one
        self.num_steps = 0  # training steps done
        self.policy_version = 0  # optimizer steps behind the engines' weights

    def resume(self, checkpoint: Path | None) -> None:
        """Continue from the checkpoint, or start from the beginning without one."""
        if checkpoint is None:
            self.stream.position = 0
            self.log = measure.MetricsLog(self.output_dir, None)
            self.validation.begin()
            return
        state = read_state(checkpoint)
        self.num_steps, self.policy_version = state.step, state.policy_version
        self.stream.position = state.prompt_position
        if state.identity == self.identity:
            self.sampler.surplus, self.sampler.unfinished = state.surplus, state.unfinished
        elif num_groups := len(state.surplus) + len(state.unfinished):
            if state.identity.get("prompts") == self.identity["prompts"]:
                self.sampler.redraw(state.step + 1, state.surplus, state.unfinished)
            logger.warning(
                "checkpoint.allow_changed: %d groups sampled before the change are not trained on", num_groups
            )
        if state.identity.get(KL_COEFFICIENT) == self.identity[KL_COEFFICIENT]:
            self.kl.coefficient = state.kl_coefficient
        timer = measure.PhaseTimer()
        self.turns.enter("update", timer)
        self.cluster.policy.load(str(checkpoint))
        self.turns.enter("publish", timer)
        self.cluster.weights.send(self.policy_version)
        self.turns.enter("generate", timer)
        is_own = checkpoint.parent == self.output_dir / CHECKPOINTS  # else its metrics are another training's
        self.log = resume_metrics(self.output_dir, state, is_own)
        logger.info("continuing after step %d from %s", self.num_steps, checkpoint.name)

    def run(self, on_step: OnStep | None = None, stop: StopRequest | None = None) -> None:
        """Do all steps that are left; on a stop request write a last checkpoint and raise StopRequested."""
        self.stop = stop or self.stop
        with self.stop.deferred(), self.checkpoints.ending():
            if self.num_steps == 0 and self.config.validation.before_training:
                self._begin(on_step)
            for number in range(self.num_steps + 1, self.config.train.total_steps + 1):
                is_traced = number in self.config.train.profile.steps
                with self.cluster.policy.profiled(number, self.output_dir) if is_traced else nullcontext():
                    metrics = self.step(number)
                if on_step is not None:
                    on_step(number, metrics)

    def _begin(self, on_step: OnStep | None) -> None:
        """Step 0: the validation of the model before training."""
        timer = measure.PhaseTimer()
        self.stop.check()
        with timer.phase("testing"):
            metrics = self.validation.run(self.cluster.rollouts, 0)
        metrics |= {"training/global_step": 0.0, "timing_s/testing": timer.seconds["testing"]}
        self.log.append(0, self.policy_version, metrics)
        logger.info("%s", measure.format_step(0, metrics))
        if on_step is not None:
            on_step(0, metrics)

    def step(self, number: int) -> dict[str, float]:
        """Do training step `number`, 1 for the first; returns its metrics."""
        config, policy, timer = self.config, self.cluster.policy, measure.PhaseTimer()
        with timer.phase("gen"), self.stop.interruptible(number):
            draw = self.sampler.draw(number)
        timer.attribute(self.checkpoints.take_polled_seconds(), "gen", "save_checkpoint")
        timer.attribute(draw.account.reward_seconds, "gen", "reward")
        metrics = measure.draw_metrics(draw, config.sampler.gen_prompts, self.policy_version)

        if draw.groups:  # none where on_exhausted=skip_step skips the step
            groups = shuffled(draw.groups, config.run.seed, number)
            drawn = build_batch(groups, config.reward.mask_truncated, self.policy_version)
            self.turns.enter("anchor", timer)
            batch, measured = policy.anchor(drawn, timer)
            with timer.phase("adv"):
                batch, kl_metrics = self.kl.penalise(batch)
                batch = weigh(batch, config, measured)
            self.turns.enter("update", timer)
            with timer.phase("update_actor"):
                updates, measured = policy.learn(batch, measured, number)
            require_sampled_alike(measured.log_probs, drawn, config, self.dtypes)
            self.turns.enter("publish", timer)
            with timer.phase("weight_sync"):
                self.policy_version = updates[-1].policy_version
                self.cluster.weights.send(self.policy_version)
                probe = batch.select([0])
                probed = policy.log_probs(probe, temperature=1.0).log_probs
            self.turns.enter("generate", timer)
            with timer.phase("weight_sync"):
                difference = probe_difference(self.cluster.rollouts, probe, probed, self.dtypes)
                metrics["weight_sync/probe_difference"] = difference
            metrics |= kl_metrics
            metrics |= correction_metrics(measured.log_probs, drawn, config.rollout_correction)
            metrics |= measure.response_metrics(groups, batch.rewards, config.data.max_prompt_tokens)
            token_weights = LossTotals.of(batch).token_weights(batch.response_mask, config.algorithm)
            metrics |= measure.batch_metrics(batch, measured.entropy, token_weights)
            metrics |= measure.update_metrics(updates, config.algorithm.kl)
            metrics |= measure.seqlen_metrics(batch.lengths, updates, config.train.passes)
            metrics |= self.utilization.metrics(batch, timer.seconds["update_actor"], config.train.passes)

        policy.refresh_reference(number, timer)
        self.num_steps = number
        if is_due(number, config.validation.every, config.train.total_steps):
            with timer.phase("testing"):
                metrics |= self.validation.run(self.cluster.rollouts, number)
        metrics |= {"training/global_step": float(number), "training/epoch": self.stream.epoch}
        metrics |= self.turns.memory_metrics()
        with timer.phase("save_checkpoint"):
            save_every = config.checkpoint.save_every
            self.checkpoints.keep(self._state(metrics), is_due(number, save_every, config.train.total_steps))
        metrics |= measure.timing_metrics(timer.read(), draw.groups, config.num_devices)
        self.log.append(number, self.policy_version, metrics)
        logger.info("%s", measure.format_step(number, metrics))
        return metrics

    def _while_waiting(self) -> None:
        self.checkpoints.poll()
        self.stop.check()

    def _state(self, metrics: Mapping[str, float]) -> TrainerState:
        """The state after the step, in copies that the next draw does not change."""
        return TrainerState(
            step=self.num_steps,
            policy_version=self.policy_version,
            prompt_position=self.stream.position,
            surplus=list(self.sampler.surplus),
            unfinished=list(self.sampler.unfinished),
            kl_coefficient=self.kl.coefficient,
            metrics=dict(metrics),
            identity=self.identity,
        )


def is_due(step: int, every: int, total_steps: int) -> bool:
    """True on every `every`-th step and on the last; 0 means never."""
    return every > 0 and (step % every == 0 or step == total_steps)
