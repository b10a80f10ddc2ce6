"""The chain of a recipe as data: its stages in order, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dapo_core.checkpoint.folder import CHECKPOINTS, checkpoint_folders, named_step, step_folder
from dapo_core.checkpoint.others import other_checkpoints
from dapo_core.errors import CheckpointError, ConfigError
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import StageKey
from tasks.config import ChainConfig, ModelConfig
from tasks.config.evaluate import BaselineConfig
from tasks.data.sources import source_files
from tasks.stages import (
    BUILD_MODEL,
    EVALUATE_MODEL,
    EVALUATE_SERVED,
    FETCH_MODEL,
    MERGE_CHECKPOINT,
    MERGE_STEP,
    PREPARE_DATA,
    TRAIN_OTHER,
    TRAIN_POLICY,
    Stage,
    evaluate_model_inputs,
    evaluation_files,
    model_files,
    model_inputs,
    train_policy_inputs,
    training_files,
)

BASELINE_MODEL, BASELINE_EVALUATION = "fetch_baseline_", "evaluate_baseline_"


@dataclass(frozen=True)
class Link:
    """A stage at its place in a recipe's chain, where `label` names its output: in run.json, links and tables."""

    label: str
    stage: Stage
    config: ChainConfig  # that the stage reads
    needs: tuple[str, ...]  # labels of the artifacts that `inputs` takes after the configuration
    inputs: Callable[..., dict[str, str]]  # digests from the configuration and these artifacts
    files: Callable[[ChainConfig], dict[str, str]] = lambda _: {}  # of files that the configuration names

    @property
    def command(self) -> str:
        """The command that makes it."""
        side = side_of(self.label)
        return f"dapo stage {self.stage.name.replace('_', '-')} CONFIG" + (f" --side {side}" if side else "")

    def key(self, *artifacts: Artifact) -> StageKey:
        """The key of its output, given those of the links it needs, in their order."""
        inputs = self.inputs(self.config, *artifacts[: len(self.needs)])
        return self.stage.key(self.config, {**inputs, **self.files(self.config)})


def chain_of(config: ChainConfig) -> tuple[Link, ...]:
    """The links of a recipe, each after those that it needs."""
    return (
        Link("prepare_data", PREPARE_DATA, config, (), lambda _: {}, source_files),
        _model(config),
        _evaluation("before", config, "fetch_model"),
        *(link for baseline in config.evaluate.baselines for link in _baseline(config, baseline)),
        Link(
            "train_policy",
            TRAIN_POLICY if config.train.backend == "own" else TRAIN_OTHER,
            config,
            ("prepare_data", "fetch_model"),
            train_policy_inputs,
            training_files,
        ),
        Link(
            "merge_checkpoint",
            MERGE_CHECKPOINT,
            config,
            ("train_policy",),
            lambda _, training: {"training": training.digest},
        ),
        _evaluation("after", config, "merge_checkpoint"),
        *(link for step in config.checkpoint_steps for link in _checkpoint(config, step)),
    )


def link_of(config: ChainConfig, label: str) -> Link:
    """The link of that label. Raises ConfigError when the recipe has none."""
    links = {link.label: link for link in chain_of(config)}
    if label not in links:
        raise ConfigError(f"the recipe has no {label}, but {', '.join(links)}")
    return links[label]


def side_of(label: str) -> str | None:
    """What `--side` calls a link: before, after, a baseline's name, step_N; None for the links of every recipe."""
    for prefix in (BASELINE_EVALUATION, BASELINE_MODEL, "evaluate_", "merge_step_"):
        if label.startswith(prefix):
            return label.removeprefix("merge_" if prefix == "merge_step_" else prefix)
    return None


def label_of(config: ChainConfig, stage: str, side: str | None) -> str:
    """The label of the link that a stage and a side name. Raises ConfigError when the recipe has none."""
    links = [link for link in chain_of(config) if link.stage.name == stage]
    default = "after" if stage == EVALUATE_MODEL.name else None
    for link in links:
        if side_of(link.label) == (side or default):
            return link.label
    sides = ", ".join(filter(None, (side_of(link.label) for link in links))) or "none"
    raise ConfigError(
        f"{stage.replace('_', '-')} of this recipe has no side {side}; it has {sides}: evaluate.baselines and "
        "evaluate.checkpoints add some"
    )


def baseline_of(link: Link) -> BaselineConfig:
    """The entry of evaluate.baselines that the link is of."""
    return next(one for one in link.config.evaluate.baselines if one.name == side_of(link.label))


def _baseline(config: ChainConfig, baseline: BaselineConfig) -> tuple[Link, ...]:
    """A model that is fetched and served, or one that is only asked."""
    asked, fetched = f"{BASELINE_EVALUATION}{baseline.name}", f"{BASELINE_MODEL}{baseline.name}"
    if baseline.base_url is None:
        recipe = config.model_copy(update={"model": model_of(baseline)})
        needs = ("prepare_data", fetched)
        return (
            Link(fetched, FETCH_MODEL, recipe, (), model_inputs, model_files),
            Link(asked, EVALUATE_MODEL, recipe, needs, evaluate_model_inputs, evaluation_files),
        )

    def inputs(recipe: ChainConfig, data: Artifact) -> dict[str, str]:
        from tasks.evaluation.served_baseline import served_model  # imports HTTP clients

        return evaluate_model_inputs(recipe, data, served_model(recipe, baseline))

    return (Link(asked, EVALUATE_SERVED, config, ("prepare_data",), inputs, evaluation_files),)


def model_of(baseline: BaselineConfig) -> ModelConfig:
    """The baseline as the model of a recipe, as which it is fetched and served; not for a base_url."""
    return ModelConfig(
        source="path" if baseline.path is not None else baseline.source,
        path=baseline.path,
        id=baseline.id,
        revision=baseline.revision,
        chat_template=baseline.chat_template,
        trust_remote_code=baseline.trust_remote_code,
    )


def _checkpoint(config: ChainConfig, step: int) -> tuple[Link, Link]:
    merged = f"merge_step_{step}"

    def inputs(_: ChainConfig, training: Artifact) -> dict[str, str]:
        step_checkpoint(training, step)  # raises unless it was kept
        return {"training": training.digest, "step": str(step)}

    return (
        Link(merged, MERGE_STEP, config, ("train_policy",), inputs),
        _evaluation(f"step_{step}", config, merged),
    )


def step_checkpoint(training: Artifact, step: int) -> Path:
    """The checkpoint of a step in a training's output. Raises CheckpointError when it was not kept."""
    folder = Path(training.path) / CHECKPOINTS
    others = {other.step: other.path for other in other_checkpoints(folder)}
    if not (path := others.get(step, step_folder(folder, step))).is_dir():
        kept = ", ".join(str(kept) for kept in others or map(named_step, checkpoint_folders(folder)))
        raise CheckpointError(
            f"the training in the store kept checkpoints of steps {kept}, and evaluate.checkpoints names {step}; "
            "dapo stage train-policy CONFIG --force trains again and keeps it, or name one of these"
        )
    return path


def _model(config: ChainConfig) -> Link:
    """The model to improve: only one that is built needs the data."""
    if config.model.source == "recipe":
        return Link("fetch_model", BUILD_MODEL, config, ("prepare_data",), model_inputs, model_files)
    return Link("fetch_model", FETCH_MODEL, config, (), model_inputs, model_files)


def _evaluation(side: str, config: ChainConfig, model: str) -> Link:
    needs = ("prepare_data", model)
    return Link(f"evaluate_{side}", EVALUATE_MODEL, config, needs, evaluate_model_inputs, evaluation_files)
