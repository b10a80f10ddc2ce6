"""Remarks of `dapo cluster render`: secrets in the files, and what the KubeRay YAML leaves out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_core.config.training import TrainingConfig
from redaction import is_secret
from tasks.nodes.inventory import PROJECT, Inventory

STORE = "/store"  # mount point of the shared claim in the pods
# Keys of paths that are created or set in the pods.
_PATHS_IN_PODS: dict[str, Any] = {"store": True, "flow": {"lock_path"}, "external": {"env"}}
# Keys of the inventory that the KubeRay YAML does not use, and why.
_UNUSED = {
    **dict.fromkeys(("shell", "user", "connect_seconds"), "no command is run on a node"),
    **dict.fromkeys(("project", "python"), "the image has its own"),
    **dict.fromkeys(("head", "address", "interface"), "Kubernetes assigns names and addresses"),
    **dict.fromkeys(("port", "dashboard", "start_seconds"), "KubeRay sets it"),
}


def remarks_of_env(inventory: Inventory) -> list[str]:
    """Warn of variables that look like secrets: the rendered files contain their values in clear text."""
    variables = {
        name
        for host in inventory.hosts
        for name, value in inventory.environment_of(host).items()
        if is_secret(name, value)
    }
    if not variables:
        return []
    return [
        f"env has {', '.join(sorted(variables))}, which the files contain in clear text: remove it from env and "
        "set it on the nodes, or with valueFrom.secretKeyRef in pods."
    ]


def remarks_of_kuberay(inventory: Inventory, config: TrainingConfig | None) -> list[str]:
    """List inventory keys that pods do not use, and the recipe's files that pods do not have."""
    used = {name for host in inventory.hosts for name in ("address", "interface") if getattr(host, name)}
    used |= {name for name, field in Inventory.model_fields.items() if getattr(inventory, name) != field.default}
    unused = [
        f"{', '.join(keys)} ({reason})"
        for reason in dict.fromkeys(_UNUSED.values())
        if (keys := [key for key in _UNUSED if key in used and _UNUSED[key] == reason])
    ]
    left_out = [f"Pods do not use these keys of the inventory: {'; '.join(unused)}."] if unused else []
    return left_out + (_remarks_of_files(config) if config is not None else [])


def _remarks_of_files(config: TrainingConfig) -> list[str]:
    return [
        f"{key}={path} is not in the pods: copy it into the claim, and set the key to its path below {STORE}."
        for key, path in _named_files(config.model_dump(exclude=_PATHS_IN_PODS))
        if not Path(path).is_relative_to(STORE) and not _is_in_image(Path(path))
    ]


def _named_files(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys and values of files and folders in a configuration."""
    if isinstance(value, str):
        is_path = value.startswith(("/", "./", "../", "~")) or (key.endswith("path") and ":" not in value)
        if is_path or (("/" in value or Path(value).suffix) and os.path.exists(value)):
            yield key, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for child, child_value in items:
            yield from _named_files(child_value, f"{key}.{child}" if key else str(child))


def _is_in_image(path: Path) -> bool:
    """True for a relative path of a file in configs/, which the images contain."""
    return path.parts[:1] == ("configs",) and (PROJECT / path).exists()
