"""What `dapo cluster render` says beside the files: secrets in them, and what did not get into KubeRay's YAML."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_core.config.training import TrainingConfig
from redaction import is_secret
from tasks.nodes.inventory import PROJECT, Inventory

STORE = "/store"  # where pods have the shared claim
_OF_PODS: dict[str, Any] = {
    "store": True,
    "flow": {"lock_path"},
    "external": {"env"},
}  # paths there, not of files that are brought
# Why a key of the inventory is not in KubeRay's YAML.
_NOT_OF_PODS = {
    **dict.fromkeys(("shell", "user", "connect_seconds"), "no command is run on a node"),
    **dict.fromkeys(("project", "python"), "the image has its own"),
    **dict.fromkeys(("head", "address", "interface"), "a pod gets its name and address from Kubernetes"),
    **dict.fromkeys(("port", "dashboard", "start_seconds"), "KubeRay sets it"),
}


def remarks_of_env(inventory: Inventory) -> list[str]:
    """What is said of variables that hold secrets: every rendering has their values in clear."""
    variables = {
        name
        for host in inventory.hosts
        for name, value in inventory.environment_of(host).items()
        if is_secret(name, value)
    }
    if not variables:
        return []
    return [
        f"env has {', '.join(sorted(variables))}, and the files have the value in clear: better remove it there, "
        "and set it on the nodes, in pods by valueFrom.secretKeyRef."
    ]


def remarks_of_kuberay(inventory: Inventory, config: TrainingConfig | None) -> list[str]:
    """Keys of the inventory that pods have no use for, and files of a recipe that are not in the pods."""
    used = {name for host in inventory.hosts for name in ("address", "interface") if getattr(host, name)}
    used |= {name for name, field in Inventory.model_fields.items() if getattr(inventory, name) != field.default}
    unused = [
        f"{', '.join(keys)} ({reason})"
        for reason in dict.fromkeys(_NOT_OF_PODS.values())
        if (keys := [key for key in _NOT_OF_PODS if key in used and _NOT_OF_PODS[key] == reason])
    ]
    left_out = [f"Pods do not use these keys of the inventory: {'; '.join(unused)}."] if unused else []
    return left_out + (_remarks_of_files(config) if config is not None else [])


def _remarks_of_files(config: TrainingConfig) -> list[str]:
    return [
        f"{key}={path} is not in the pods: copy it into the claim, and name it {STORE}/... in the recipe."
        for key, path in _named_files(config.model_dump(exclude=_OF_PODS))
        if not Path(path).is_relative_to(STORE) and not _is_in_image(Path(path))
    ]


def _named_files(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Files and folders that a configuration names, after their keys."""
    if isinstance(value, str):
        is_path = value.startswith(("/", "./", "../", "~")) or (key.endswith("path") and ":" not in value)
        if is_path or (("/" in value or Path(value).suffix) and os.path.exists(value)):
            yield key, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for child, child_value in items:
            yield from _named_files(child_value, f"{key}.{child}" if key else str(child))


def _is_in_image(path: Path) -> bool:
    """True for a file of configs/, which docker/ copies, named as in the project's folder."""
    return path.parts[:1] == ("configs",) and (PROJECT / path).exists()
