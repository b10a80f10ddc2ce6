"""This machine's record of the clusters that it started: one file per cluster in the store."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import durable
from tasks.nodes.inventory import Host, Inventory

FOLDER = ".clusters"


def cluster_key(inventory: Inventory) -> str:
    """Return the cluster's name in paths: its head and port."""
    return re.sub(r"[^\w.-]", "_", f"{inventory.head_host.name}_{inventory.port}")


class ClusterRecord:
    """The record of one cluster; `hosts` by name: how each is reached, its interface and node."""

    def __init__(self, store: Path, inventory: Inventory) -> None:
        self.path = store / FOLDER / f"{cluster_key(inventory)}.json"
        self.values: dict[str, Any] = {"hosts": {}}

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """The recorded hosts."""
        hosts: dict[str, dict[str, Any]] = self.values["hosts"]
        return hosts

    def no_longer_listed(self, inventory: Inventory) -> list[Host]:
        """Return hosts that were started but are no longer in the inventory."""
        removed = self.hosts.keys() - {host.name for host in inventory.hosts}
        return [Host.model_validate(self.hosts[name]["host"]) for name in sorted(removed)]

    def write(self, hosts: Mapping[str, Mapping[str, Any]], **changes: Any) -> None:
        """Replace the recorded hosts; without any, the file is removed."""
        self.values = {**self.values, **changes, "hosts": dict(hosts)}
        if hosts:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_atomically(self.path, json.dumps(self.values, indent=1))
        else:
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Read the record, and exclude this machine's other commands that change the cluster."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock")
        with durable.locked(lock, waiting="which starts or stops the cluster"):
            with contextlib.suppress(FileNotFoundError):
                self.values = json.loads(self.path.read_text(encoding="utf-8"))
            try:
                yield
            finally:
                lock.unlink()


def others_started(store: Path, inventory: Inventory) -> list[str]:
    """List the store's records of other clusters, as "head_port (from FILE)"."""
    others = sorted(
        path for path in (store / FOLDER).glob("*.json") if path.stem != cluster_key(inventory)
    )
    return [f"{path.stem} (from {json.loads(path.read_text())['source']})" for path in others]
