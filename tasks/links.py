"""The chain of a recipe as data: its stages in order, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dapo_core.errors import ConfigError
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import StageKey
from tasks.config import ChainConfig
from tasks.data.sources import source_files
from tasks.stages import (
    BUILD_MODEL,
    EVALUATE_MODEL,
    FETCH_MODEL,
    MERGE_CHECKPOINT,
    PREPARE_DATA,
    TRAIN_POLICY,
    Stage,
    evaluate_model_inputs,
    evaluation_files,
    model_files,
    model_inputs,
    train_policy_inputs,
    training_files,
)


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
        side = f" --side {self.label.removeprefix('evaluate_')}" if self.stage is EVALUATE_MODEL else ""
        return f"dapo stage {self.stage.name.replace('_', '-')} CONFIG{side}"

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
        Link(
            "train_policy",
            TRAIN_POLICY,
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
    )


def labels_of(config: ChainConfig) -> tuple[str, ...]:
    """The labels of a recipe's links, in order."""
    return tuple(link.label for link in chain_of(config))


def link_of(config: ChainConfig, label: str) -> Link:
    """The link of that label. Raises ConfigError when the recipe has none."""
    links = {link.label: link for link in chain_of(config)}
    if label not in links:
        raise ConfigError(f"the recipe has no {label}, but {', '.join(links)}")
    return links[label]


def _model(config: ChainConfig) -> Link:
    """The model to improve: only one that is built needs the data."""
    if config.model.source == "recipe":
        return Link("fetch_model", BUILD_MODEL, config, ("prepare_data",), model_inputs, model_files)
    return Link("fetch_model", FETCH_MODEL, config, (), model_inputs, model_files)


def _evaluation(side: str, config: ChainConfig, model: str) -> Link:
    needs = ("prepare_data", model)
    return Link(f"evaluate_{side}", EVALUATE_MODEL, config, needs, evaluate_model_inputs, evaluation_files)
