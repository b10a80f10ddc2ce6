"""The environment variables that the chain sets for child processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dapo_core.cluster.environment import Given, given_by_training
from dapo_core.cluster.started import AUTH_TOKEN
from dapo_core.machine.environment import PASSIVE_WAITING, SOCKETS_VARIABLE
from redaction import REDACTED, is_secret, redact
from tasks.config import ChainConfig
from tasks.links import Link
from tasks.preflight.environment import table_rows
from tasks.processes.child import OUTPUT_AT_ONCE
from tasks.serve_model.command import API_KEY_VARIABLE, serve_environment
from tasks.stages import EVALUATE_MODEL
from tasks.tracking.clients import MLFLOW

Rows = list[dict[str, Any]]
# Set by every `dapo` command; also hides the progress of weight loading.
COMMANDS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def child_environment(
    link: Link, metrics: Mapping[str, Any], environment: Mapping[str, str]
) -> Rows:
    """The variables a stage set for its child processes: name, value, children, why.

    Excludes defaults that `environment` overrides, and the values of secrets. `metrics` are those
    of the stage.
    """
    effects = {row["name"]: row["effect"] for row in table_rows()}
    found = []
    for given in _given(link, metrics, environment):
        for name, value in given.values.items():
            if not (given.is_default and environment.get(name, value) != value):
                shown = REDACTED if is_secret(name, value) else redact(value)
                row = {"name": name, "value": shown, "children": given.children}
                found.append(row | ({"why": effects[name]} if name in effects else {}))
    return found


def merge_stages(stages: Mapping[str, Rows]) -> Rows:
    """The distinct rows of all stages, each with the labels of its stages."""
    found: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for label, rows in stages.items():
        for row in rows:
            found.setdefault(tuple(row.items()), []).append(label)
    return [{**dict(row), "stages": labels} for row, labels in found.items()]


def by_children(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Shell assignments by child process."""
    found: dict[str, list[str]] = {}
    for row in rows:
        word = f"{row['name']}={shlex.quote(row['value'])}"
        if word not in (words := found.setdefault(row["children"], [])):
            words.append(word)
    return {children: " ".join(words) for children, words in found.items()}


def _given(
    link: Link, metrics: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Given]:
    config = link.config
    match link.stage.name:
        case "fetch_model" if config.model.source != "path":
            yield from _of_command("fetch-model")
            if config.model.source == "recipe":
                yield Given("fetch-model", PASSIVE_WAITING, is_default=True)
        case "evaluate_model" if (
            link.stage is EVALUATE_MODEL and metrics.get("serve_command") != ""
        ):
            yield from _of_server(config, environment)
        case "train_policy" if not config.is_adopted:
            yield from _of_command("training")
            yield from _of_training(config)
        case "merge_checkpoint":
            yield from _of_command("merge")


def _of_command(name: str) -> Iterator[Given]:
    yield Given(name, {**OUTPUT_AT_ONCE, **COMMANDS}, is_default=True)


def _of_server(config: ChainConfig, environment: Mapping[str, str]) -> Iterator[Given]:
    yield Given("server", OUTPUT_AT_ONCE, is_default=True)
    hidden = {API_KEY_VARIABLE: REDACTED, SOCKETS_VARIABLE: "(a new folder)"}
    yield Given("server", serve_environment(config.served, environment) | hidden)


def _of_training(config: ChainConfig) -> Iterator[Given]:
    yield from given_by_training(config)
    if "mlflow" in config.train.trackers:
        yield Given("trackers", MLFLOW, is_default=True)
    if config.train.ray_address is None:
        yield Given("Ray", {AUTH_TOKEN: REDACTED})
