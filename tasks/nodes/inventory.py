"""The inventory: a file that lists the machines of a cluster and how to run a command on each."""

from __future__ import annotations

import ipaddress
import itertools
import re
import shlex
import string
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from dapo_core.config.fields import Section
from dapo_core.config.loading import TEMPLATE_WORDS, placeholders, read_tree, requirement
from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from downloads.nearest import nearest
from tasks.config import ChainConfig

SSH = "ssh"
PROJECT = Path(__file__).resolve().parents[2]
# Names go into command lines: no blanks, options or shell characters.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_SET_BY_UP = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
_SHELL_FIELDS = ("host", "address", "user")
_TEXTS = ("hosts", "head", "env")  # their values stay text: 0123 is not 83


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        hint = "set the user with the key user" if "@" in value else "letters, digits and .-_: only"
        raise ValueError(f"{value!r} is not a host name or address: {hint}")
    return value


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"env has {name!r}, which is not a valid variable name")
        if name in _SET_BY_UP:
            raise ValueError(f"env has {name}, which `dapo cluster up` sets itself: remove it")
        if name.endswith("_SOCKET_IFNAME"):
            raise ValueError(
                f"env has {name}, but the interface is found on each node: to use another one, set "
                "the host's interface"
            )
    return variables


Environment = Annotated[
    dict[str, str], BeforeValidator(lambda v: v or {}), AfterValidator(_environment)
]
HostName = Annotated[str, AfterValidator(_name)]


class Host(Section):
    """One machine."""

    name: HostName = Field(description="Name in this file and in messages.")
    address: HostName | None = Field(
        None, description="Address for ssh and the other machines; default: the name."
    )
    devices: int | None = Field(
        None, ge=1, description="Number of devices; default: the inventory's."
    )
    interface: str | None = Field(
        None, min_length=1, description="Network interface; default: the one towards the head."
    )
    env: Environment = Field({}, description="Variables of its Ray, before the inventory's.")

    @model_validator(mode="before")
    @classmethod
    def _a_name_is_a_host(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def reached_at(self) -> str:
        """The name or address that ssh and the other machines connect to."""
        return self.address or self.name


class Inventory(Section):
    """The machines of a cluster, the devices they offer to Ray, and how to run commands on them."""

    hosts: tuple[Host, ...] = Field(
        min_length=1, description="The machines: names, or sections with keys."
    )
    head: str | None = Field(
        None, description="Name of the host that runs Ray's head; default: the first."
    )
    user: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")] | None = Field(
        None, description="ssh user; default: ssh's own."
    )
    device: Literal["cpu", "cuda", "npu"] = Field(
        "npu", description="Kind of device, as in train.device."
    )
    devices: int | None = Field(
        None, ge=1, description="Devices of each host; with device=cpu, the CPUs that Ray may use."
    )
    num_cpus: int | None = Field(
        None, ge=1, description="CPUs that Ray may use on each host; default: all."
    )
    shell: str = Field(
        SSH,
        description="ssh, or a command that runs a line, such as docker exec -i {host} bash -c.",
    )
    project: str = Field(str(PROJECT), description="The project's folder on every host.")
    python: str = Field(
        sys.executable, description="Interpreter with the packages; may be relative to project."
    )
    setup: str | None = Field(
        None,
        min_length=1,
        description="bash line to run first on every host, for CANN's variables.",
    )
    port: int = Field(6379, ge=1, le=65535, description="Port of Ray's head.")
    dashboard: bool = Field(
        False, description="Run Ray's dashboard and job server, at 127.0.0.1:8265 of the head."
    )
    env: Environment = Field({}, description="Environment variables of Ray and all its processes.")
    connect_seconds: int = Field(
        10, ge=1, le=600, description="Time limit for a host to accept a connection."
    )
    start_seconds: int = Field(
        120, ge=5, le=3600, description="Time limit until all hosts have joined."
    )

    @field_validator("shell")
    @classmethod
    def _shell_names_the_host(cls, value: str) -> str:
        if value == SSH:
            return value
        try:
            fields = map(string.Formatter().parse, shlex.split(value))
            names = {name for _, name, _, _ in itertools.chain(*fields) if name is not None}
        except ValueError as error:
            raise ValueError(f"shell = {value!r} is not a command: {error}") from None
        if unknown := sorted(names - {*_SHELL_FIELDS}):
            known = "{host}, {address} and {user}"
            raise ValueError(f"shell has {{{unknown[0]}}}, but only {known} are filled in")
        if names.isdisjoint({"host", "address"}):
            raise ValueError(
                f"shell = {value!r} would run everything on one machine: it needs {{host}} or "
                "{address}, as in docker exec -i {host} bash -c"
            )
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> Inventory:
        names = [host.name for host in self.hosts]
        if self.head is not None and self.head not in names:
            raise ValueError(
                f"head = {self.head} is not among the hosts{nearest(self.head, names)}"
            )
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"host {', '.join(duplicates)} is listed twice; remove one")
        by_address: dict[str, str] = {}
        for host in self.hosts:
            address = host.reached_at
            other = by_address.setdefault(_canonical(address), host.name)
            if other != host.name:
                raise ValueError(f"hosts {other} and {host.name} have the same address {address}")
        if unset := [host.name for host in self.hosts if not (host.devices or self.devices)]:
            raise ValueError(
                f"devices is not set for {', '.join(unset)}: set the number per host, such as 16"
            )
        if self.device == "cpu" and self.num_cpus is not None:
            raise ValueError("num_cpus is for nodes with accelerators: with device=cpu set devices")
        if "{user}" in self.shell and self.user is None:
            raise ValueError("shell has {user}, but user is not set")
        return self

    @property
    def head_host(self) -> Host:
        """The host that runs Ray's head."""
        return next(host for host in self.hosts if self.head in (None, host.name))

    @property
    def in_order(self) -> tuple[Host, ...]:
        """The hosts, the head first."""
        return self.head_host, *(host for host in self.hosts if host is not self.head_host)

    @property
    def resource(self) -> str:
        """Ray's resource name of the devices."""
        return device_for(self.device).ray_resource

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts together."""
        return sum(self.devices_of(host) for host in self.hosts)

    def devices_of(self, host: Host) -> int:
        """Return the number of devices of a host."""
        return int(host.devices or self.devices or 0)

    def environment_of(self, host: Host) -> dict[str, str]:
        """Return the inventory's environment variables for a host's Ray."""
        return {**self.env, **host.env}

    def command(self, host: Host, line: str) -> list[str]:
        """Return the local command that runs a shell line on a host and passes on its input."""
        if self.shell == SSH:
            unshared = "-o ControlMaster=no -o ControlPath=none"  # a shared connection may hang
            options = f"-o BatchMode=yes {unshared} -o ConnectTimeout={self.connect_seconds}"
            user = ("-l", self.user) if self.user else ()
            return [SSH, *options.split(), *user, "--", host.reached_at, line]
        values = {"host": host.name, "address": host.reached_at, "user": self.user or ""}
        return [*(word.format(**values) for word in shlex.split(self.shell)), line]


def read(path: str | Path) -> Inventory:
    """Read an inventory file; raises ConfigError with all its problems."""
    tree = read_tree(Path(path), "inventory", _TEXTS)
    if "hosts" not in tree and not tree.keys().isdisjoint(ChainConfig.model_fields):
        raise ConfigError(
            f"{path} is a recipe; this command needs an inventory such as deploy/inventory.yaml"
        )
    return resolve(tree, f"inventory {path}")


def resolve(tree: Mapping[str, Any], source: str) -> Inventory:
    """Validate an inventory given as plain values; raises ConfigError with all its problems."""
    problems = list(placeholders(tree, TEMPLATE_WORDS))
    try:
        inventory = Inventory.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(problem) for problem in error.errors()]
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in dict.fromkeys(problems)))
    return inventory


def _canonical(address: str) -> str:
    """Normalize an address or a host name, so that different spellings compare equal."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()


def _explain(problem: ErrorDetails) -> str:
    *places, leaf = [str(part) for part in problem["loc"]] or [""]
    name = ".".join((*places, leaf))
    match problem["type"]:
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
        case "missing":
            advice = ": list the machines, such as [node1, node2]" if name == "hosts" else ""
            return f"{name} is not set{advice}"
        case "extra_forbidden":
            known = Host.model_fields if places[:1] == ["hosts"] else Inventory.model_fields
            return f"unknown key {name}{nearest(leaf, list(known))}"
        case "tuple_type":
            message = "it must be a list, such as [node1, node2]"
        case "model_type":
            message = "a host must be a name or a section with keys"
        case _:
            message = requirement(problem)
    return f"{name} = {problem['input']!r} is invalid: {message}"
