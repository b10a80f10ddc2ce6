"""DAPO training: draw -> weigh -> pack -> anchor -> learn -> publish -> tell -> keep, once a step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core import metrics as measure
from dapo_core.advantage import group_advantages
from dapo_core.batch import Batch, balance_over_ranks, build_batch
from dapo_core.checkpoint import (
    TrainerState,
    latest_checkpoint,
    read_state,
    refuse_other_training,
    write_checkpoint,
)
from dapo_core.cluster import Cluster, start_cluster
from dapo_core.config import result_values
from dapo_core.data import PromptStream, load_tokenizer, read_rows, tokenize_prompts
from dapo_core.device import device_for
from dapo_core.flops import ActorUtilization
from dapo_core.loss import LossTotals
from dapo_core.model_folder import require_model_folder
from dapo_core.policy import UpdateSums
from dapo_core.reward import require_scorers
from dapo_core.sampler import Draw, Sampler
from dapo_core.weight_sync import probe_difference, publish_weights

if TYPE_CHECKING:
    from dapo_core.config import Config
    from dapo_core.rollout import Group

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainResult:
    """Where training ended."""

    checkpoint: Path
    steps: int
    policy_version: int


def train(
    config: Config, train_path: Path, model_path: Path, output_dir: Path, on_step: OnStep | None = None
) -> TrainResult:
    """Train the model on the parquet's prompts; checkpoints and metrics.jsonl go to `output_dir`.

    An `output_dir` with checkpoints is continued from the newest. `on_step(step, metrics)` is called after each
    training step. Input is checked before any worker starts.
    """
    require_model_folder(model_path)
    prompts = tokenize_prompts(read_rows(train_path), load_tokenizer(model_path), config.data.max_prompt_tokens)
    require_scorers({prompt.data_source for prompt in prompts}, config.reward, config.custom_reward)
    stream = PromptStream(prompts, config.run.seed, config.data.shuffle)
    output_dir.mkdir(parents=True, exist_ok=True)
    with start_cluster(config, model_path) as cluster:
        trainer = Trainer(config, cluster, stream, model_path, output_dir)
        trainer.resume()
        while trainer.step < config.train.total_steps:
            step_metrics = trainer.run_step()
            if on_step is not None:
                on_step(trainer.step, step_metrics)
    checkpoint = latest_checkpoint(trainer.checkpoint_dir)
    assert checkpoint is not None, "the last step always writes a checkpoint"
    return TrainResult(checkpoint, trainer.step, trainer.policy_version)


class Trainer:
    """The state of a training run and its step."""

    def __init__(
        self, config: Config, cluster: Cluster, stream: PromptStream, model_path: Path, output_dir: Path
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.stream = stream
        self.sampler = Sampler(
            cluster.rollouts,
            stream,
            config.train.train_prompts,
            config.sampler,
            config.algorithm.compat,
            config.run.deterministic,
        )
        self.model_path = model_path
        self.output_dir = output_dir
        self.checkpoint_dir = output_dir / "checkpoints"
        from transformers import AutoConfig

        device = device_for(config.train.device)
        self.utilization = ActorUtilization(
            AutoConfig.from_pretrained(str(model_path), local_files_only=True),
            cluster.policy.device_name(),
            device.resolve_dtype(config.train.dtype),
            config.train.num_ranks,
        )
        self.step = 0  # training steps done
        self.policy_version = 0  # optimizer steps behind the engines' weights

    def resume(self) -> None:
        """Continue from the newest checkpoint of the output folder, or begin."""
        checkpoint = latest_checkpoint(self.checkpoint_dir)
        if checkpoint is None:
            self.log = measure.MetricsLog(self.output_dir, 0)
            return
        state = read_state(checkpoint)
        refuse_other_training(checkpoint, state.identity, self._identity())
        self.step, self.policy_version = state.step, state.policy_version
        self.stream.position = state.prompt_position
        self.sampler.surplus, self.sampler.unfinished = state.surplus, state.unfinished
        self.cluster.policy.load(str(checkpoint))
        publish_weights(self.cluster, self.policy_version)
        self.log = measure.MetricsLog(self.output_dir, self.step)
        told = measure.read_metrics(self.log.path)
        if not told or told[-1]["step"] < self.step:
            self.log.append(self.step, self.policy_version, state.metrics)
        logger.info("continuing after step %d from %s", self.step, checkpoint.name)

    def run_step(self) -> dict[str, float]:
        """One training step; returns its metrics."""
        timer = measure.PhaseTimer()
        with timer.phase("gen"):
            draw = self.sampler.draw(self.step + 1)
        timer.attribute(draw.account.reward_seconds, "gen", "reward")
        metrics = measure.draw_metrics(draw)
        num_tokens = (0, 0)  # of responses, and of prompts and responses
        if draw.groups:
            learned, num_tokens = self._learn_from(draw, timer)
            metrics |= learned
        self.step += 1
        metrics = {
            "training/global_step": float(self.step),
            "training/epoch": self.stream.epoch,
            **metrics,
            **self.cluster.policy.memory_metrics(),
        }
        num_devices = self.config.train.num_ranks
        with timer.phase("save_checkpoint"):
            self._keep(metrics | measure.timing_metrics(timer.read(), *num_tokens, num_devices))
        return self._tell(metrics | measure.timing_metrics(timer.read(), *num_tokens, num_devices))

    def _learn_from(self, draw: Draw, timer: measure.PhaseTimer) -> tuple[dict[str, float], tuple[int, int]]:
        with timer.phase("adv"):
            rewards = np.array([rollout.reward for group in draw.groups for rollout in group.rollouts])
            advantages = self._weigh(draw.groups, rewards)
            batch = build_batch(draw.groups, advantages, self.config.reward.mask_truncated)
        with timer.phase("old_log_prob"):
            old_log_probs, entropy = self.cluster.policy.log_probs(batch)
            batch = batch.with_old_log_probs(old_log_probs)
        with timer.phase("update_actor"):
            updates, rank_rows = self._learn(batch)
        with timer.phase("weight_sync"):
            self.policy_version += len(updates)
            probe = self._publish(batch)
        totals = LossTotals(batch.num_loss_tokens, batch.num_loss_responses)
        weights = totals.token_weights(batch.response_mask, self.config.algorithm.loss_aggregation)
        lengths = (batch.prompt_lengths + batch.response_lengths).numpy()
        num_response_tokens = int(batch.response_lengths.sum())
        return {
            **measure.response_metrics(draw.groups, rewards, self.config.data.max_prompt_tokens),
            **measure.batch_metrics(batch, entropy, weights),
            **measure.seqlen_metrics(lengths, rank_rows),
            **measure.update_metrics(updates, self.config.algorithm.kl),
            **self.utilization.metrics(lengths, num_response_tokens, timer.seconds["update_actor"]),
            "weight_sync/probe_difference": probe,
        }, (num_response_tokens, int(lengths.sum()))

    def _weigh(self, groups: list[Group], rewards: np.ndarray) -> np.ndarray:
        group_ids = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        return group_advantages(rewards, group_ids, self.config.algorithm.normalize_by_std)

    def _learn(self, batch: Batch) -> tuple[list[UpdateSums], list[np.ndarray]]:
        """Optimizer steps over consecutive mini-batches of whole groups, and the rows each rank trained on."""
        size = self.config.train.mini_prompts * self.config.rollout.group_size
        updates, rank_rows = [], []
        for start in range(0, batch.num_responses, size):
            rows = np.arange(start, min(start + size, batch.num_responses))
            mini_batch = batch.select(rows)
            indices = balance_over_ranks(mini_batch.lengths, self.config.train.num_ranks)
            rank_rows.append([rows[of_rank] for of_rank in indices])
            updates.append(self.cluster.policy.update(mini_batch))
        return updates, [np.concatenate(parts) for parts in zip(*rank_rows, strict=True)]

    def _publish(self, batch: Batch) -> float:
        """New weights into the engines, proven on one response of the batch; returns the difference in nats."""
        publish_weights(self.cluster, self.policy_version)
        device = device_for(self.config.train.device)
        dtypes = [device.resolve_dtype(section.dtype) for section in (self.config.train, self.config.rollout)]
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return probe_difference(self.cluster, batch.select([0]), names)

    def _keep(self, metrics: dict[str, float]) -> None:
        is_last = self.step == self.config.train.total_steps
        if self.step % self.config.train.save_every and not is_last:
            return
        state = TrainerState(
            step=self.step,
            policy_version=self.policy_version,
            prompt_position=self.stream.position,
            surplus=self.sampler.surplus,
            unfinished=self.sampler.unfinished,
            metrics=metrics,
            identity=self._identity(),
        )
        # The output holds one checkpoint, so that its content does not depend on a volatile key.
        keep_last = 1 if is_last else self.config.train.keep_last
        write_checkpoint(self.checkpoint_dir, state, self.model_path, self.cluster.policy.save, keep_last)

    def _identity(self) -> dict[str, Any]:
        """What must not change between the attempts at one training; it may only become longer."""
        sections = ("algorithm", "reward", "sampler", "rollout", "train")
        values = {
            f"{section}.{name}": value
            for section in sections
            for name, value in result_values(getattr(self.config, section)).items()
        }
        del values["train.total_steps"]
        identity = {"run.seed": self.config.run.seed, **values, "prompts": self.stream.digest}
        return json.loads(json.dumps(identity))  # as a checkpoint gives it back

    def _tell(self, metrics: dict[str, float]) -> dict[str, float]:
        self.log.append(self.step, self.policy_version, metrics)
        logger.info("%s", measure.format_step(self.step, metrics))
        return metrics
