"""What this machine remembers of the clusters that it started: a file of the store for each."""

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
    """The cluster's name in folders: its head and port."""
    return re.sub(r"[^\w.-]", "_", f"{inventory.head_host.name}_{inventory.port}")


class ClusterRecord:
    """The record of one cluster; `hosts` by name: how each is reached, and what was started there."""

    def __init__(self, store: Path, inventory: Inventory) -> None:
        self.path = store / FOLDER / f"{cluster_key(inventory)}.json"
        self.values: dict[str, Any] = {"hosts": {}}
        with contextlib.suppress(FileNotFoundError):
            self.values = json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """What is known of each host."""
        found: dict[str, dict[str, Any]] = self.values["hosts"]
        return found

    def no_longer_listed(self, inventory: Inventory) -> list[Host]:
        """Hosts that were started and that the inventory has no more."""
        listed = {host.name for host in inventory.hosts}
        return [Host.model_validate(known["host"]) for name, known in self.hosts.items() if name not in listed]

    def write(self, hosts: Mapping[str, Mapping[str, Any]], **changes: Any) -> None:
        """Replace what is known of the hosts; without any the record goes."""
        self.values = {**self.values, **changes, "hosts": dict(hosts)}
        if hosts:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_atomically(self.path, json.dumps(self.values, indent=1))
        else:
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other command of this machine starts or ends the cluster."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock")

        with durable.locked(lock, waiting="which starts or ends the cluster"):
            with contextlib.suppress(FileNotFoundError):  # what that one wrote
                self.values = json.loads(self.path.read_text(encoding="utf-8"))
            try:
                yield
            finally:
                lock.unlink()


def others_started(store: Path, inventory: Inventory) -> list[str]:
    """Records of further clusters that this store knows, as "head_port (from FILE)"."""
    own = cluster_key(inventory)
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (store / FOLDER).glob("*.json")}
    return [f"{key} (from {values.get('source')})" for key, values in sorted(found.items()) if key != own]
