"""Runs a training from input checks to the last checkpoint, with resume and restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint.folder import CHECKPOINTS, latest_checkpoint
from dapo_core.checkpoint.identity import training_identity
from dapo_core.checkpoint.manifest import require_complete
from dapo_core.checkpoint.recorded import RecordedDraws
from dapo_core.checkpoint.resume import (
    find_start,
    finish_if_done,
    lock_checkpoints,
    require_resume,
    require_same_training,
)
from dapo_core.cluster.restarts import Restarts, continued_from
from dapo_core.config.engine_args import MEDIA_LIMITS, media_limits, require_known
from dapo_core.config.loading import changed
from dapo_core.draw.backoff import Backoff
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.draw.tokenizing import remove_prompts, tokenized_prompts
from dapo_core.errors import ConfigError
from dapo_core.machine.stopping import StopRequest, raising_stopped
from dapo_core.model.folder import (
    IMAGE_TOKEN,
    read_config,
    require_model_folder,
    require_reference,
)
from dapo_core.model.precision import with_model_dtypes
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.model.sampling import with_model_sampling
from dapo_core.policy.requirements import require_trainable
from dapo_core.reward.custom import require_loss
from dapo_core.reward.routing import require_scorers
from dapo_core.trainer import OnStep, Trainer
from dapo_core.validation import Validation, held_out_prompts
from heartbeat import heartbeat

if TYPE_CHECKING:
    from dapo_core.cluster.interface import Cluster
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Final state of a training."""

    checkpoint: Path
    steps: int
    policy_version: int


def train(
    config: TrainingConfig,
    train_path: Path,
    model_path: Path,
    output_dir: Path,
    on_step: OnStep = lambda _step, _metrics: None,
    held_out_path: Path | None = None,
    start_roles: Callable[..., AbstractContextManager[Cluster]] | None = None,
    replay: Path | None = None,
) -> TrainResult:
    """Train the model; writes checkpoints and metrics.jsonl to `output_dir`.

    Checks all input before any worker starts. If a worker dies, all restart from the last
    checkpoint; after train.max_restarts restarts without a new one, raises WorkerDied. On SIGTERM
    or SIGINT, writes a final checkpoint and raises TrainingStopped; a second signal raises
    KeyboardInterrupt immediately. `on_step(step, metrics)` is called after each step.
    `start_roles` replaces cluster.start.start_cluster, which starts them as Ray actors. `replay` is
    the output of a training with train.record_draws, whose draws this one trains on again.
    """
    if start_roles is None:
        from dapo_core.cluster.start import start_cluster  # imports Ray

        start_roles = start_cluster
    folder = output_dir / CHECKPOINTS
    restarts = Restarts(config.train.max_restarts, config.train.restart_delay_seconds)
    goes_on = partial(continued_from, config, folder)
    with StopRequest() as stop, raising_stopped(stop, goes_on), lock_checkpoints(folder):
        require_model_folder(model_path)
        draws = None if replay is None else RecordedDraws(replay, config.train.total_steps)
        config = with_model_sampling(config, model_path)
        inputs = train_path, model_path, output_dir, held_out_path
        with heartbeat(lambda: "reading the training problems"):
            stream, validation, num_pictures = _read_prompts(config, *inputs)
        # now: a scorer file may change later
        identity = training_identity(config, stream.digest, model_path)
        identity |= {} if replay is None else {"replay": str(replay)}
        config = with_media_limits(with_model_dtypes(config, model_path), model_path, num_pictures)
        own = config.checkpoint
        start = find_start(folder, own.resume, own.on_damage, require_complete)
        if start is not None:
            require_same_training(config, start, folder, identity)
            if (end := finish_if_done(config, start, output_dir)) is not None:
                remove_prompts(output_dir)
                return TrainResult(start, end.step, end.policy_version)

        def attempt(start: Path | None) -> Trainer:
            with start_roles(config, model_path, output_dir, restarts.is_restart) as cluster:
                places = model_path, output_dir, identity
                trainer = Trainer(cluster.config, cluster, stream, *places, validation)
                trainer.sampler = draws or trainer.sampler
                trainer.resume(start)
                trainer.run(on_step, stop)
                return trainer

        find_own = partial(find_start, folder, "auto", own.on_damage, require_complete)
        trainer = restarts.until_done(attempt, start, find_own, stop)
        remove_prompts(output_dir)
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None, "the last step always writes a checkpoint"
    return TrainResult(checkpoint, trainer.num_steps, trainer.policy_version)


def _read_prompts(
    config: TrainingConfig,
    train_path: Path,
    model_path: Path,
    output_dir: Path,
    held_out_path: Path | None,
) -> tuple[PromptStream, Validation, int]:
    """Load all prompts, and check all input against the model and the scorers.

    Also returns the largest number of pictures in a prompt.
    """
    require_resume(config.checkpoint.resume)
    require_reference(config.algorithm.kl.reference_path, model_path)
    require_loss(config.algorithm.custom_loss.path, config.algorithm.custom_loss.name)
    require_known(config.rollout.engine_args)
    require_trainable(config, model_path, config.algorithm.kl.reference_path)
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    arguments = config.rollout.chat_template_kwargs
    prompts = tokenized_prompts(
        train_path, model_path, tokenizer, output_dir, config.data, arguments
    )
    held_out: list[Prompt] = []
    if config.validation.every:
        if held_out_path is None:
            raise ConfigError(
                f"validation.every={config.validation.every} needs a held-out set; pass one with "
                "--held-out, or set validation.every=0"
            )
        held_out = held_out_prompts(held_out_path, model_path, tokenizer, config)
    shown = (len(prompt.input.images) for prompt in held_out)
    num_pictures = max(prompts.max_pictures, *shown, 0)
    if num_pictures and config.rollout.engine != "vllm":
        raise ConfigError(
            f"the problems have pictures, which rollout.engine={config.rollout.engine} does not "
            "read; set rollout.engine=vllm"
        )
    require_scorers(prompts.data_sources, config.reward, config.custom_reward)
    backoff = Backoff() if config.sampler.backoff else None
    order = config.run.seed, config.data.shuffle
    stream = PromptStream(prompts, *order, sets=prompts.sets, backoff=backoff)
    return stream, Validation(config, held_out, tokenizer, output_dir), num_pictures


def with_media_limits(
    config: TrainingConfig, model_path: Path, num_pictures: int
) -> TrainingConfig:
    """Return the configuration with vLLM's limits of pictures, if the model reads them."""
    rollout = config.rollout
    if rollout.engine != "vllm" or IMAGE_TOKEN not in read_config(model_path):
        return config
    given: Any = rollout.engine_args.get(MEDIA_LIMITS, {})
    limits = media_limits(given, num_pictures, f"rollout.engine_args.{MEDIA_LIMITS}")
    return changed(config, {"rollout.engine_args": {**rollout.engine_args, MEDIA_LIMITS: limits}})
