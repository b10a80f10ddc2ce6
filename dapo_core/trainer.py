"""DAPO training: draw -> pack -> anchor -> weigh -> learn -> publish -> validate -> keep -> tell, once a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dapo_core import metrics as measure
from dapo_core.advantage import group_advantages
from dapo_core.batch import Batch, build_batch
from dapo_core.checkpoint.folder import CHECKPOINTS, latest_checkpoint
from dapo_core.checkpoint.resume import (
    find_start,
    finish_if_done,
    lock_checkpoints,
    require_resume,
    require_same_training,
    resume_metrics,
)
from dapo_core.checkpoint.state import TrainerState, read_state, read_step
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.cluster import Cluster, start_cluster
from dapo_core.compat import Compat
from dapo_core.data import Prompt, PromptStream, load_tokenizer, read_rows, tokenize_prompts
from dapo_core.device import device_for
from dapo_core.errors import ConfigError, TrainingStopped
from dapo_core.flops import ActorUtilization
from dapo_core.identity import training_identity
from dapo_core.kl import KLController, reward_penalties
from dapo_core.loss import LossTotals
from dapo_core.model_folder import require_model_folder
from dapo_core.policy import UpdateSums, read_model_config, require_trainable
from dapo_core.restarts import Restarts
from dapo_core.reward.routing import require_scorers
from dapo_core.rollout_correction import correct_rollouts, mismatch_metrics
from dapo_core.sampler import Sampler
from dapo_core.stopping import StopRequest, StopRequested
from dapo_core.validation import held_out_prompts, validate
from dapo_core.weight_sync import probe_difference, publish_weights

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.rollout import Group

logger = logging.getLogger(__name__)

KL_COEFFICIENT = "algorithm.kl.coefficient"

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainResult:
    """Where training ended."""

    checkpoint: Path
    steps: int
    policy_version: int


def train(
    config: TrainingConfig,
    train_path: Path,
    model_path: Path,
    output_dir: Path,
    on_step: OnStep | None = None,
    held_out_path: Path | None = None,
) -> TrainResult:
    """Train the model on the parquet's prompts; checkpoints and metrics.jsonl go to `output_dir`.

    checkpoint.resume says what it continues from. When a rank or a rollout worker dies, all are started again from
    the last checkpoint, within the bound of train.max_restarts; beyond it WorkerDied is raised. `held_out_path` is
    what validations ask. `on_step(step, metrics)` is called after each training step. Input is checked before any
    worker starts. On SIGTERM or SIGINT a last checkpoint is written and TrainingStopped raised; a second signal
    raises KeyboardInterrupt at once.
    """
    folder = output_dir / CHECKPOINTS
    with StopRequest() as stop, _told_as_stopped(stop, config, folder):
        stream, held_out = _read_prompts(config, train_path, model_path, held_out_path)
        identity = training_identity(config, stream, model_path)  # as it begins: a scorer may be edited meanwhile
        with lock_checkpoints(folder):
            start = find_start(folder, config.checkpoint.resume)
            if start is not None:
                require_same_training(config, start, folder, identity)
                if (end := finish_if_done(config, start, output_dir)) is not None:
                    return TrainResult(start, end.step, end.policy_version)

            def attempt(start: Path | None) -> Trainer:
                with start_cluster(config, model_path) as cluster:
                    trainer = Trainer(config, cluster, stream, model_path, output_dir, identity, held_out)
                    trainer.resume(start)
                    trainer.run(on_step, stop)
                    return trainer

            restarts = Restarts(config.train.max_restarts, config.train.restart_delay_seconds)
            trainer = restarts.until_done(attempt, start, folder, stop)
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None, "the last step always writes a checkpoint"
    return TrainResult(checkpoint, trainer.step, trainer.policy_version)


@contextmanager
def _told_as_stopped(stop: StopRequest, config: TrainingConfig, folder: Path) -> Iterator[None]:
    """Raise TrainingStopped, with what it continues from, where the first signal ends training."""
    try:
        yield
    except (StopRequested, KeyboardInterrupt) as error:
        if stop.signal is None or stop.is_urgent:
            raise
        checkpoint = latest_checkpoint(folder)
        with_auto = " with --set checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
        message = "training was stopped before its first checkpoint; the same command begins anew"
        if checkpoint is not None:
            message = (
                f"training was stopped after step {read_step(checkpoint)} of {config.train.total_steps}; its "
                f"checkpoint is {checkpoint}; the same command{with_auto} continues"
            )
        stopped = TrainingStopped(message)
        stopped.exit_code = 128 + stop.signal
        raise stopped from error


def _read_prompts(
    config: TrainingConfig, train_path: Path, model_path: Path, held_out_path: Path | None
) -> tuple[PromptStream, list[Prompt]]:
    """The training's prompts and those of validations, if there are any; checked with model and scorers."""
    require_resume(config.checkpoint.resume)
    require_model_folder(model_path)
    require_trainable(read_model_config(model_path), config.train.sequence_parallel)
    tokenizer = load_tokenizer(model_path)
    prompts = tokenize_prompts(read_rows(train_path), tokenizer, config.data.max_prompt_tokens)
    held_out: list[Prompt] = []
    if config.validation.every:
        if held_out_path is None:
            raise ConfigError(
                f"validation.every={config.validation.every} needs a held-out set; name one with --held-out, or "
                "set validation.every=0"
            )
        held_out = held_out_prompts(held_out_path, tokenizer, config)
    require_scorers({prompt.data_source for prompt in prompts}, config.reward, config.custom_reward)
    return PromptStream(prompts, config.run.seed, config.data.shuffle), held_out


@dataclass(frozen=True)
class Lesson:
    """What a step learned from, and how."""

    groups: list[Group]
    batch: Batch
    entropy: torch.Tensor  # [B, R], of the policy before the update
    rewards: np.ndarray  # [B], what the advantages are made of
    noted: dict[str, float]  # metrics on the way: engine against policy, KL in the reward
    updates: list[UpdateSums]
    rank_rows: list[np.ndarray]  # rows of the batch that each data-parallel rank trained on
    probe_difference: float  # nats per token between policy and engines after the update


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
        held_out: Sequence[Prompt] = (),
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.stream = stream
        self.held_out = held_out
        self.sampler = Sampler(
            cluster.rollouts,
            stream,
            config.train.train_prompts,
            config.sampler,
            Compat.of(config.algorithm),
            config.run.deterministic,
        )
        self.sampler.while_waiting = self._while_waiting
        self.kl_controller = KLController(config.algorithm.kl)
        self.output_dir = output_dir
        self.checkpoints = CheckpointWriter(output_dir / CHECKPOINTS, model_path, cluster.policy, config)
        device = device_for(config.train.device)
        self.dtypes = [device.resolve_dtype(section.dtype) for section in (config.train, config.rollout)]
        self.utilization = ActorUtilization(
            read_model_config(model_path), cluster.policy.device_name(), self.dtypes[0], config.train.num_ranks
        )
        self.identity = dict(identity)
        self.stop = StopRequest()  # to which nobody listens
        self.step = 0  # training steps done
        self.policy_version = 0  # optimizer steps behind the engines' weights

    def resume(self, checkpoint: Path | None) -> None:
        """Continue from the checkpoint, or begin when there is none."""
        if checkpoint is None:
            self.stream.position = 0
            self.log = measure.MetricsLog(self.output_dir, 0)
            return
        state = read_state(checkpoint)
        self.step, self.policy_version = state.step, state.policy_version
        self.stream.position = state.prompt_position
        if state.identity == self.identity:
            self.sampler.surplus, self.sampler.unfinished = state.surplus, state.unfinished
        elif state.surplus or state.unfinished:
            num_groups = len(state.surplus) + len(state.unfinished)
            logger.warning("checkpoint.allow_changed: %d groups sampled before the change are dropped", num_groups)
        if state.identity.get(KL_COEFFICIENT) == self.identity[KL_COEFFICIENT]:
            self.kl_controller.coefficient = state.kl_coefficient
        self.cluster.policy.load(str(checkpoint))
        publish_weights(self.cluster, self.policy_version)
        is_own = checkpoint.parent == self.checkpoints.folder  # else lines there are of another training
        self.log = resume_metrics(self.output_dir, state, is_own)
        logger.info("continuing after step %d from %s", self.step, checkpoint.name)

    def run(self, on_step: OnStep | None = None, stop: StopRequest | None = None) -> None:
        """All steps that are left; StopRequested after fewer when `stop` is asked to, with a last checkpoint."""
        self.stop = stop or self.stop
        with self.stop.deferred(), self.checkpoints.ending():
            while self.step < self.config.train.total_steps:
                step_metrics = self.run_step()
                if on_step is not None:
                    on_step(self.step, step_metrics)

    def run_step(self) -> dict[str, float]:
        """One training step; returns its metrics."""
        timer = measure.PhaseTimer()
        with timer.phase("gen"), self.stop.interruptible(self.step):
            draw = self.sampler.draw(self.step + 1)
        timer.attribute(self.checkpoints.take_polled_seconds(), "gen", "save_checkpoint")
        timer.attribute(draw.account.reward_seconds, "gen", "reward")
        metrics = measure.draw_metrics(draw)
        num_tokens = (0, 0)  # of responses; of prompts and responses
        if draw.groups:
            lesson = self._learn_from(self._mixed(draw.groups), timer)
            metrics |= self._measure(lesson, timer.read()["update_actor"])
            num_tokens = (int(lesson.batch.response_lengths.sum()), lesson.batch.num_tokens)
        self.step += 1
        if self._is_due(self.config.validation.every):
            with timer.phase("testing"):
                metrics |= self._validate()
        metrics |= self._standing()
        num_devices = self.config.num_devices
        with timer.phase("save_checkpoint"):
            told = metrics | measure.timing_metrics(timer.read(), *num_tokens, num_devices)
            self.checkpoints.keep(self._state(told), self._is_due(self.config.checkpoint.save_every))
        return self._tell(metrics | measure.timing_metrics(timer.read(), *num_tokens, num_devices))

    def _mixed(self, groups: Sequence[Group]) -> list[Group]:
        """The groups in a random order of the step's own.

        They come in the order in which they finished, short responses first. Mini-batches in that order would
        differ in length, and token-mean would weigh a token of a short response more than one of a long response.
        """
        order = np.random.default_rng([self.config.run.seed, self.step]).permutation(len(groups))
        return [groups[number] for number in order]

    def _learn_from(self, groups: list[Group], timer: measure.PhaseTimer) -> Lesson:
        policy = self.cluster.policy
        batch = build_batch(groups, self.config.reward.mask_truncated)
        with timer.phase("old_log_prob"):
            policy.onload()
            old_log_probs, entropy = policy.log_probs(batch)
            batch = batch.with_old_log_probs(old_log_probs)
        if self.config.algorithm.kl.place != "off":
            with timer.phase("ref"):
                batch = replace(batch, ref_log_probs=policy.ref_log_probs(batch))
        with timer.phase("adv"):
            noted = mismatch_metrics(batch.old_log_probs, batch.rollout_log_probs, batch.response_mask)
            rewards, kl = self._rewards(groups, batch)
            is_scored = np.array([rollout.is_scored for group in groups for rollout in group.rollouts])
            batch = self._weigh(batch, rewards, is_scored)
        with timer.phase("update_actor"):
            updates, rank_rows = self._learn(batch)
        with timer.phase("weight_sync"):
            self.policy_version += len(updates)
            probe = self._publish(batch)
            policy.offload()
        return Lesson(groups, batch, entropy, rewards, noted | kl, updates, rank_rows, probe)

    def _rewards(self, groups: list[Group], batch: Batch) -> tuple[np.ndarray, dict[str, float]]:
        """What each response is worth, less its KL where that counts in the reward: [B]; and the KL's metrics."""
        rewards = np.array([reward for group in groups for reward in group.rewards])
        kl = self.config.algorithm.kl
        if kl.place != "reward":
            return rewards, {}
        assert batch.ref_log_probs is not None
        # Also of responses that train no token: their siblings are compared with them.
        penalties, mean = reward_penalties(batch.old_log_probs, batch.ref_log_probs, batch.is_response, kl)
        coefficient = self.kl_controller.coefficient
        self.kl_controller.update(mean, batch.num_responses)
        told = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coefficient}
        return rewards - coefficient * penalties, told

    def _weigh(self, batch: Batch, rewards: np.ndarray, is_scored: np.ndarray) -> Batch:
        """The batch with advantages among scored siblings, and corrected for what the engine sampled from."""
        group_ids = np.arange(batch.num_responses) // self.config.rollout.group_size
        advantages = group_advantages(rewards, group_ids, self.config.algorithm, is_scored)
        weights, mask = correct_rollouts(
            batch.old_log_probs,
            batch.rollout_log_probs,
            batch.response_mask,
            self.config.algorithm.rollout_correction,
        )
        return replace(
            batch,
            advantages=torch.as_tensor(advantages),
            importance_weights=weights,
            response_mask=mask,
        )

    def _learn(self, batch: Batch) -> tuple[list[UpdateSums], list[np.ndarray]]:
        """Optimizer steps over consecutive mini-batches of whole groups, and the rows each rank trained on."""
        size = self.config.train.mini_prompts * self.config.rollout.group_size
        updates, rank_rows = [], []
        for start in range(0, batch.num_responses, size):
            rows = np.arange(start, min(start + size, batch.num_responses))
            sums, indices = self.cluster.policy.update(batch.select(rows))
            updates.append(sums)
            rank_rows.append([rows[of_rank] for of_rank in indices])
        return updates, [np.concatenate(parts) for parts in zip(*rank_rows, strict=True)]

    def _publish(self, batch: Batch) -> float:
        """New weights into the engines, proven on one response of the batch; returns the difference in nats."""
        publish_weights(self.cluster, self.policy_version)
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return probe_difference(self.cluster, batch.select([0]), names)

    def _measure(self, lesson: Lesson, update_seconds: float) -> dict[str, float]:
        """The step's metrics of what was learned."""
        batch, algorithm = lesson.batch, self.config.algorithm
        totals = LossTotals(batch.num_loss_tokens, batch.num_loss_responses)
        lengths = (batch.prompt_lengths + batch.response_lengths).numpy()
        return {
            **measure.response_metrics(lesson.groups, lesson.rewards, self.config.data.max_prompt_tokens),
            **measure.batch_metrics(batch, lesson.entropy, totals.token_weights(batch.response_mask, algorithm)),
            **measure.seqlen_metrics(lengths, lesson.rank_rows),
            **measure.update_metrics(lesson.updates, algorithm.kl),
            **lesson.noted,
            **self.utilization.metrics(lengths, int(batch.response_lengths.sum()), update_seconds),
            "weight_sync/probe_difference": lesson.probe_difference,
        }

    def _standing(self) -> dict[str, float]:
        """Where training stands, and the memory it takes."""
        return {
            "training/global_step": float(self.step),
            "training/epoch": self.stream.epoch,
            **self.cluster.policy.memory_metrics(),
        }

    def _is_due(self, every: int) -> bool:
        """Whether what happens every so many steps, 0 for never, happens at this one; at the last one it does."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.total_steps)

    def _validate(self) -> dict[str, float]:
        """Accuracy on the held-out prompts under the weights just published."""
        limit = self.config.sampler.max_seconds_without_kept
        return validate(self.cluster.rollouts, self.held_out, self.step, limit)

    def _while_waiting(self) -> None:
        self.checkpoints.poll()
        self.stop.check()

    def _state(self, metrics: dict[str, float]) -> TrainerState:
        """The state after the step, which the next draw does not change."""
        return TrainerState(
            step=self.step,
            policy_version=self.policy_version,
            prompt_position=self.stream.position,
            surplus=list(self.sampler.surplus),
            unfinished=list(self.sampler.unfinished),
            kl_coefficient=self.kl_controller.coefficient,
            metrics=metrics,
            identity=self.identity,
        )

    def _tell(self, metrics: dict[str, float]) -> dict[str, float]:
        self.log.append(self.step, self.policy_version, metrics)
        logger.info("%s", measure.format_step(self.step, metrics))
        return metrics
