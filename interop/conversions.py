"""Unit conversions between verl's keys and ours, both ways; `convert` in the tables names them.

A `from_foreign` function gets one value and all settings. Its inverse in TO_FOREIGN gets all our
keys by name; without an inverse, the row's single key of ours has the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interop.foreign_config import (
    TO_FOREIGN,
    ForeignConfig,
    Outcome,
    from_foreign,
    taken,
    to_foreign,
)
from interop.table import NOT_SET

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")

Ours = Mapping[str, Any]


def unsupported(note: str) -> Outcome:
    """Return an outcome that stops an import."""
    return Outcome("unsupported", {}, note)


def _register_sets(name: str, ours_key: str) -> None:
    @from_foreign(name)
    def _sets(value: Any, config: ForeignConfig) -> Outcome:
        return Outcome("taken", {ours_key: value if isinstance(value, list) else [value]})

    @to_foreign(name)
    def _their_sets(ours: Ours) -> Any:
        return [ours[ours_key]] if isinstance(ours[ours_key], str) else list(ours[ours_key])


_register_sets("sets", "data.train")
_register_sets("eval_sets", "data.eval")


_FOLDERS = (
    "models",
    "model",
    "checkpoints",
    "ckpts",
    "ckpt",
    "weights",
    "pretrained",
    "data",
    "outputs",
    "output",
)


@from_foreign("model")
def _model(value: Any, config: ForeignConfig) -> Outcome:
    is_name = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", str(value))
    if is_name is not None and is_name[1].lower() not in _FOLDERS and not Path(value).exists():
        return taken(model__source="huggingface", model__id=value)
    return taken(model__source="path", model__path=value)


@from_foreign("every")
def _every(value: Any, config: ForeignConfig) -> Outcome:
    return taken(validation__every=max(int(value), 0))


@from_foreign("num_logged")
def _num_logged(value: Any, config: ForeignConfig) -> Outcome:
    return taken(validation__num_logged=max(int(value), 0))


@from_foreign("before_training")
def _before_training(value: Any, config: ForeignConfig) -> Outcome:
    if value and config["trainer.test_freq"] <= 0:
        return Outcome(
            "other-stage", {}, "the chain evaluates the model before training in a separate stage"
        )
    return taken(validation__before_training=bool(value))


@from_foreign("save_every")
def _save_every(value: Any, config: ForeignConfig) -> Outcome:
    if int(value) > 0:
        return taken(checkpoint__save_every=int(value))
    return Outcome(
        "default",
        {},
        "never saves there; here checkpoint.save_every applies, since resume and merge need "
        "checkpoints",
    )


@from_foreign("kept")
def _kept(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or int(value) <= 0:
        return Outcome("default", {}, "keeps all there; here the newest checkpoint.keep_last")
    return taken(checkpoint__keep_last=int(value))


def num_devices(config: ForeignConfig) -> int:
    """Return the trainer's device count: devices per node x nodes."""
    return int(config["trainer.n_gpus_per_node"]) * int(config["trainer.nnodes"])


@from_foreign("devices")
def _devices(value: Any, config: ForeignConfig) -> Outcome:
    num, per_engine = num_devices(config), _devices_of_engine(config)
    if num % per_engine:
        return unsupported(f"{num} devices cannot be split into engines of {per_engine}")
    return taken(
        "ranks and engines share the devices, one rank each",
        train__num_ranks=num,
        train__placement="colocated",
        rollout__num_workers=num // per_engine,
    )


def _devices_of_engine(config: ForeignConfig) -> int:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensor, pipeline = (int(config[f"{ROLLOUT}.{name}"] or 1) for name in names)
    return tensor * pipeline


@from_foreign("too_long")
def _too_long(value: Any, config: ForeignConfig) -> Outcome:
    if config["data.filter_overlong_prompts"]:
        return taken("overlong prompts are filtered out first", data__too_long="drop")
    known = {"error": "error", "left": "truncate_left"}
    if value not in known:
        return unsupported("data.too_long takes error, truncate_left and drop")
    return taken(data__too_long=known[value])


@from_foreign("drop_too_long")
def _drop_too_long(value: Any, config: ForeignConfig) -> Outcome:
    if value:
        return taken(data__too_long="drop")
    if config["data.truncation"] == "left":
        return taken(
            "overlong prompts are truncated, as data.truncation says",
            data__too_long="truncate_left",
        )
    return Outcome("default", {}, "data.truncation applies")


def updates_per_step(config: ForeignConfig) -> int:
    """Return the optimizer steps per training step."""
    batch, mini = int(config["data.train_batch_size"]), int(config[f"{ACTOR}.ppo_mini_batch_size"])
    return math.ceil(batch / mini) * int(config[f"{ACTOR}.ppo_epochs"] or 1)


def _first_of_warmup(config: ForeignConfig) -> int:
    """Return the smallest lr_warmup_steps that takes precedence over the ratio: 0 before verl 0.8,
    then 1.
    """
    versions = config.table.versions
    return int("0.8.0" in versions and versions.index(config.version) >= versions.index("0.8.0"))


@from_foreign("warmup_steps")
def _warmup_steps(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or int(value) < _first_of_warmup(config):
        return Outcome("default", {}, f"{ACTOR}.optim.lr_warmup_steps_ratio applies")
    updates = updates_per_step(config)
    return taken(
        f"{value} training steps x {updates} optimizer steps each",
        train__warmup_steps=int(value) * updates,
    )


@to_foreign("warmup_steps")
def _their_warmup_steps(ours: Ours) -> Any:
    updates = ours["train.train_prompts"] // ours["train.mini_prompts"] * ours["train.passes"]
    return (
        ours["train.warmup_steps"] // updates
        if ours["train.warmup_steps"] % updates == 0
        else NOT_SET
    )


@from_foreign("warmup_ratio", is_one_way=True)
def _warmup_ratio(value: Any, config: ForeignConfig) -> Outcome:
    steps = config[f"{ACTOR}.optim.lr_warmup_steps"]
    if steps is not None and int(steps) >= _first_of_warmup(config):
        return Outcome("meaningless", {}, f"{ACTOR}.optim.lr_warmup_steps applies")
    total = total_steps(config)
    if not value:
        return taken(train__warmup_steps=0)
    if total is None:
        return unsupported(
            "a fraction of an unknown number of steps; set trainer.total_training_steps"
        )
    steps = int(value * total)
    return taken(
        f"{value} of {total} training steps x {updates_per_step(config)} optimizer steps each",
        train__warmup_steps=steps * updates_per_step(config),
    )


def total_steps(config: ForeignConfig) -> int | None:
    """Return the number of training steps, None if it depends on an unknown number of training
    rows.
    """
    steps = config["trainer.total_training_steps"]
    rows = config.facts.get("num_train_rows")
    if rows is None:
        return None if steps is None else int(steps)
    batch = int(config["data.gen_batch_size"] or config["data.train_batch_size"])
    of_epochs = rows // batch * int(config["trainer.total_epochs"])
    return of_epochs if steps is None else min(int(steps), of_epochs)


@from_foreign("total_steps")
def _total_steps(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return Outcome("default", {}, "trainer.total_epochs applies")
    if (steps := total_steps(config)) is None or steps == int(value):
        return taken(train__total_steps=int(value))
    return _of_epochs(config["trainer.total_epochs"], steps, config)


@from_foreign("epochs", is_one_way=True)
def _epochs(value: Any, config: ForeignConfig) -> Outcome:
    if config["trainer.total_training_steps"] is not None:
        return Outcome(
            "meaningless", {}, "trainer.total_training_steps applies, unless the epochs end first"
        )
    if (steps := total_steps(config)) is None:
        return unsupported(
            f"the steps in {value} epochs depend on the rows of data.train_files, which are "
            "unknown: set "
            "trainer.total_training_steps, or give the row count (--set-env num_train_rows=N)"
        )
    return _of_epochs(value, steps, config)


def _of_epochs(epochs: Any, steps: int, config: ForeignConfig) -> Outcome:
    rows = f"{epochs} epochs of {config.facts['num_train_rows']} rows in full batches"
    return (
        taken(rows, train__total_steps=steps)
        if steps > 0
        else unsupported(f"{rows} make no training step")
    )


@from_foreign("micro_batch_tokens")
def _micro_batch_tokens(value: Any, config: ForeignConfig) -> Outcome:
    if not config[f"{ACTOR}.use_dynamic_bsz"]:
        return Outcome(
            "meaningless",
            {},
            f"without {ACTOR}.use_dynamic_bsz, ppo_micro_batch_size_per_gpu applies",
        )
    return taken(train__micro_batch_tokens=int(value))


def longest_sequence(config: ForeignConfig) -> int:
    """Return the maximum tokens of a prompt with its response."""
    return int(config["data.max_prompt_length"]) + int(config["data.max_response_length"])


@from_foreign("micro_batch_of_all", is_one_way=True)
def _micro_batch_of_all(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return Outcome("default", {}, "unset")
    ranks = int(config[f"{ACTOR}.ulysses_sequence_parallel_size"] or 1)
    return _micro_batch_responses(int(value) * ranks // num_devices(config), config)


@from_foreign("micro_batch_responses", is_one_way=True)
def _micro_batch_responses(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return Outcome("default", {}, "unset")
    if config[f"{ACTOR}.use_dynamic_bsz"]:
        return Outcome(
            "meaningless", {}, f"with {ACTOR}.use_dynamic_bsz, ppo_max_token_len_per_gpu applies"
        )
    longest, ranks = (
        longest_sequence(config),
        int(config[f"{ACTOR}.ulysses_sequence_parallel_size"] or 1),
    )
    return taken(
        f"{value} responses of at most {longest} tokens, over {ranks} ranks that share each "
        "sequence",
        train__micro_batch_tokens=math.ceil(int(value) * longest / ranks),
    )


@from_foreign("fsdp_size")
def _fsdp_size(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or int(value) <= 0 or int(value) >= num_devices(config):
        return Outcome("default", {}, "the weights are sharded over all ranks")
    return taken(train__fsdp_size=int(value))


@from_foreign("bucket")
def _bucket(value: Any, config: ForeignConfig) -> Outcome:
    return taken(train__weight_bucket_bytes=int(value) * 1024**2)


@from_foreign("compute_dtype")
def _compute_dtype(value: Any, config: ForeignConfig) -> Outcome:
    known = {"bfloat16": "auto", "bf16": "auto", "float32": "float32", "fp32": "float32"}
    return (
        taken(train__dtype=known[value])
        if value in known
        else unsupported("float16 needs loss scaling")
    )


@from_foreign("expert_parallel")
def _expert_parallel(value: Any, config: ForeignConfig) -> Outcome:
    devices = int(config[f"{ROLLOUT}.tensor_model_parallel_size"])
    if int(value) not in (1, devices):
        return unsupported(
            f"experts are split over all {devices} devices of an engine, or not at all"
        )
    return taken(rollout__expert_parallel=int(value) > 1)


@from_foreign("trackers")
def _trackers(value: Any, config: ForeignConfig) -> Outcome:
    names = value if isinstance(value, list) else [value]
    unknown = [str(name) for name in names if name not in (*TRACKERS, "console", "file")]
    if unknown:
        return unsupported(f"train.trackers takes {', '.join(TRACKERS)}, not {', '.join(unknown)}")
    return taken(
        "the console and metrics.jsonl always get every step",
        train__trackers=[name for name in names if name in TRACKERS],
    )


@from_foreign("resume")
def _resume(value: Any, config: ForeignConfig) -> Outcome:
    if value == "resume_path":
        return taken(checkpoint__resume=str(config["trainer.resume_from_path"]))
    known = {"auto": "auto", "disable": "never"}
    return (
        taken(checkpoint__resume=known[value])
        if value in known
        else unsupported("known are auto, disable and resume_path")
    )


@from_foreign("resume_path")
def _resume_path(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or config["trainer.resume_mode"] != "resume_path":
        return Outcome("meaningless", {}, "trainer.resume_mode applies")
    return taken(checkpoint__resume=str(value))


TO_FOREIGN.update(
    {
        "model": lambda ours: ours["model.id"] or ours["model.path"] or NOT_SET,
        "every": lambda ours: ours["validation.every"] or -1,
        "too_long": lambda ours: {"error": "error", "truncate_left": "left", "drop": "error"}[
            ours["data.too_long"]
        ],
        "drop_too_long": lambda ours: ours["data.too_long"] == "drop",
        "fsdp_size": lambda ours: ours["train.fsdp_size"] or -1,
        "bucket": lambda ours: -(-ours["train.weight_bucket_bytes"] // 1024**2),
        "compute_dtype": lambda ours: "float32" if ours["train.dtype"] == "float32" else "bfloat16",
        "expert_parallel": lambda ours: (
            ours["rollout.tensor_parallel"] if ours["rollout.expert_parallel"] else 1
        ),
        "trackers": lambda ours: ["console", *ours["train.trackers"]],
        "resume": lambda ours: {"auto": "auto", "never": "disable"}.get(
            ours["checkpoint.resume"], "resume_path"
        ),
        "resume_path": lambda ours: (
            NOT_SET if ours["checkpoint.resume"] in ("auto", "never") else ours["checkpoint.resume"]
        ),
    }
)
