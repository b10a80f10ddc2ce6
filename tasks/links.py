"""The chain of a recipe as data: its stages in order, with the inputs of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dapo_core.checkpoint.folder import CHECKPOINTS, checkpoint_folders, named_step, step_folder
from dapo_core.errors import CheckpointError, ConfigError
from tasks.adopted import adopted_files
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import StageKey
from tasks.config import ChainConfig, ModelConfig
from tasks.config.evaluate import BaselineConfig
from tasks.data.sources import source_files
from tasks.stage_inputs import (
    adopted_inputs,
    evaluate_model_inputs,
    evaluation_files,
    model_files,
    model_inputs,
    train_policy_inputs,
    training_files,
)
from tasks.stages import (
    ADOPT_CHECKPOINT,
    BUILD_MODEL,
    EVALUATE_MODEL,
    EVALUATE_SERVED,
    FETCH_MODEL,
    MERGE_CHECKPOINT,
    MERGE_STEP,
    PREPARE_DATA,
    TRAIN_POLICY,
    Stage,
)

BASELINE_MODEL, BASELINE_EVALUATION = "fetch_baseline_", "evaluate_baseline_"


@dataclass(frozen=True)
class Link:
    """A stage at its position in the chain; `label` names its output in records and tables."""

    label: str
    stage: Stage
    config: ChainConfig  # read by the stage
    needs: tuple[str, ...]  # labels of the upstream artifacts, given to `inputs`
    inputs: Callable[..., dict[str, str]]  # (config, *artifacts) -> digests
    files: Callable[[ChainConfig], dict[str, str]] = lambda _: {}  # digests of configured files

    @property
    def command(self) -> str:
        """The command that runs this stage alone."""
        side = side_of(self.label)
        return f"dapo stage {self.stage.command} CONFIG" + (f" --side {side}" if side else "")

    def key(self, *artifacts: Artifact) -> StageKey:
        """The key of the output, given the upstream artifacts in the order of `needs`."""
        inputs = self.inputs(self.config, *artifacts[: len(self.needs)])
        return self.key_for(inputs)

    def key_for(self, inputs: Mapping[str, str]) -> StageKey:
        """The key of the output for digests of the upstream artifacts."""
        return self.stage.key(self.config, {**inputs, **self.files(self.config)})


def chain_of(config: ChainConfig) -> tuple[Link, ...]:
    """The links of a recipe in topological order."""
    return (
        Link("prepare_data", PREPARE_DATA, config, (), lambda _: {}, source_files),
        _model(config),
        _evaluation("before", config, "fetch_model"),
        *(link for baseline in config.evaluate.baselines for link in _baseline(config, baseline)),
        _training(config),
        Link("merge_checkpoint", MERGE_CHECKPOINT, config, ("train_policy",), _merge_inputs),
        _evaluation("after", config, "merge_checkpoint"),
        *(link for step in config.checkpoint_steps for link in _checkpoint(config, step)),
    )


def link_of(config: ChainConfig, label: str) -> Link:
    """The link with this label; raises ConfigError if the recipe has none."""
    links = {link.label: link for link in chain_of(config)}
    if label not in links:
        raise ConfigError(f"the recipe has no stage {label}; it has {', '.join(links)}")
    return links[label]


def side_of(label: str) -> str | None:
    """The `--side` of a link: before, after, a baseline's name, step_N, or None."""
    for prefix in (BASELINE_EVALUATION, BASELINE_MODEL, "evaluate_", "merge_step_"):
        if label.startswith(prefix):
            return label.removeprefix("merge_" if prefix == "merge_step_" else prefix)
    return None


def step_of(label: str) -> int | None:
    """The step of a link of evaluate.checkpoints; None for other links."""
    side = side_of(label) or ""
    return int(side.removeprefix("step_")) if side.startswith("step_") else None


def label_of(config: ChainConfig, stage: str, side: str | None) -> str:
    """The label for a stage name and a side; raises ConfigError if the recipe has no such link."""
    links = [link for link in chain_of(config) if link.stage.name == stage]
    default = "after" if stage == EVALUATE_MODEL.name else None
    for link in links:
        if side_of(link.label) == (side or default):
            return link.label
    sides = ", ".join(filter(None, (side_of(link.label) for link in links))) or "none"
    raise ConfigError(
        f"{stage.replace('_', '-')} of this recipe has no side {side}; it has {sides}: "
        "evaluate.baselines and evaluate.checkpoints add more"
    )


def baseline_of(link: Link) -> BaselineConfig:
    """The entry of evaluate.baselines that this link evaluates."""
    return next(one for one in link.config.evaluate.baselines if one.name == side_of(link.label))


def _baseline(config: ChainConfig, baseline: BaselineConfig) -> tuple[Link, ...]:
    """The links of a baseline: fetch and evaluate, or evaluate only if it is served elsewhere."""
    asked, fetched = f"{BASELINE_EVALUATION}{baseline.name}", f"{BASELINE_MODEL}{baseline.name}"
    if baseline.base_url is None:
        recipe = config.model_copy(update={"model": model_of(baseline)})
        needs = ("prepare_data", fetched)
        return (
            Link(fetched, FETCH_MODEL, recipe, (), model_inputs, model_files),
            Link(asked, EVALUATE_MODEL, recipe, needs, evaluate_model_inputs, evaluation_files),
        )

    def inputs(recipe: ChainConfig, data: Artifact) -> dict[str, str]:
        from tasks.evaluation.served_model import served_model  # imports HTTP clients

        return evaluate_model_inputs(recipe, data, served_model(recipe, baseline))

    return (Link(asked, EVALUATE_SERVED, config, ("prepare_data",), inputs, evaluation_files),)


def model_of(baseline: BaselineConfig) -> ModelConfig:
    """The baseline as a `model` section, to fetch and serve; not for one with base_url."""
    return ModelConfig(
        source="path" if baseline.path is not None else baseline.source,
        path=baseline.path,
        id=baseline.id,
        revision=baseline.revision,
        chat_template=baseline.chat_template,
        stop_tokens=baseline.stop_tokens,
        trust_remote_code=baseline.trust_remote_code,
    )


def _merge_inputs(_: ChainConfig, training: Artifact) -> dict[str, str]:
    return {"training": training.digest}


def _checkpoint(config: ChainConfig, step: int) -> tuple[Link, Link]:
    merged = f"merge_step_{step}"

    def inputs(_: ChainConfig, training: Artifact) -> dict[str, str]:
        step_checkpoint(training, step)  # raises if it was not kept
        return {"training": training.digest, "step": str(step)}

    return (
        Link(merged, MERGE_STEP, config, ("train_policy",), inputs),
        _evaluation(f"step_{step}", config, merged),
    )


def step_checkpoint(training: Artifact, step: int) -> Path:
    """The checkpoint folder of a step; raises CheckpointError if it was not kept."""
    folder = Path(training.path) / CHECKPOINTS
    if not (path := step_folder(folder, step)).is_dir():
        kept = ", ".join(str(named_step(kept)) for kept in checkpoint_folders(folder))
        raise CheckpointError(
            f"the training in the store kept checkpoints of steps {kept}, but evaluate.checkpoints "
            f"names {step}; "
            "dapo stage train-policy CONFIG --force trains again and keeps it, or name one of these"
        )
    return path


def _model(config: ChainConfig) -> Link:
    """The policy's model; only a model built from model.recipe needs the data."""
    is_built = config.model.source == "recipe"
    stage, needs = (BUILD_MODEL, ("prepare_data",)) if is_built else (FETCH_MODEL, ())
    return Link("fetch_model", stage, config, needs, model_inputs, model_files)


def _training(config: ChainConfig) -> Link:
    needs = ("prepare_data", "fetch_model")
    if config.is_adopted:
        return Link("train_policy", ADOPT_CHECKPOINT, config, needs, adopted_inputs, adopted_files)
    return Link("train_policy", TRAIN_POLICY, config, needs, train_policy_inputs, training_files)


def _evaluation(side: str, config: ChainConfig, model: str) -> Link:
    needs = ("prepare_data", model)
    return Link(
        f"evaluate_{side}", EVALUATE_MODEL, config, needs, evaluate_model_inputs, evaluation_files
    )
