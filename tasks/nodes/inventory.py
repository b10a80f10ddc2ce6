"""The inventory: one file with the machines of a cluster, and how to run a command on each."""

from __future__ import annotations

import ipaddress
import re
import shlex
import string
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from dapo_core.config.fields import Section
from dapo_core.config.loading import TEMPLATE_WORDS, placeholders, read_tree
from dapo_core.device import device_for
from dapo_core.errors import ConfigError
from downloads.nearest import nearest

SSH = "ssh"
PROJECT = Path(__file__).resolve().parents[2]
# A name goes into command lines: no blank, no option, nothing that a shell reads.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_OF_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")  # set by `dapo cluster up`
_IN_SHELL = ("host", "address", "user")
_TEXTS = ("hosts", "head", "env")  # keys under which 0123 is no 83; pydantic makes numbers of devices


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        hint = "the user is the key user" if "@" in value else "letters, digits and .-_: only"
        raise ValueError(f"{value!r} is no name or address of a machine: {hint}")
    return value


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"env has {name!r}, which is no name of an environment variable")
        if name in _OF_RAY:
            raise ValueError(f"env has {name}, which `dapo cluster up` sets itself: remove it")
        if name.endswith("_SOCKET_IFNAME"):
            raise ValueError(
                f"env has {name}: the interface is found on each node; where another is wanted, set the host's "
                "interface"
            )
    return variables


Environment = Annotated[dict[str, str], BeforeValidator(lambda v: v or {})]


class Host(Section):
    """One machine."""

    name: str = Field(description="What it is called here, and what ssh connects to.")
    address: str | None = Field(None, description="What ssh and the other machines connect to; default: the name.")
    devices: int | None = Field(None, ge=1, description="Its devices; default: the inventory's.")
    interface: str | None = Field(None, min_length=1, description="Network interface; default: the one found.")
    env: Environment = Field({}, description="Environment variables of its Ray, over the inventory's.")

    @model_validator(mode="before")
    @classmethod
    def _a_name_is_a_host(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    _names = field_validator("name", "address")(lambda value: value if value is None else _name(value))
    _variables = field_validator("env")(_environment)

    @property
    def reached_at(self) -> str:
        """The name or address that ssh and the other machines use."""
        return self.address or self.name


class Inventory(Section):
    """The machines of a cluster, the devices they give to Ray, and how commands are run on them."""

    hosts: tuple[Host, ...] = Field(min_length=1, description="The machines: names, or sections with keys.")
    head: str | None = Field(None, description="Name of the host with Ray's head; default: the first.")
    user: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")] | None = Field(
        None, description="User of ssh; default: ssh's own."
    )
    device: Literal["cpu", "cuda", "npu"] = Field(
        "npu", description="Kind of the devices, as train.device has it."
    )
    devices: int | None = Field(
        None, ge=1, description="Devices of each host; of cpu: processors that Ray gives away."
    )
    num_cpus: int | None = Field(None, ge=1, description="Processors that Ray gives away on each; default: all.")
    shell: str = Field(
        SSH, description="ssh, or a command that runs a line on {host}, such as docker exec -i {host} bash -c."
    )
    project: str = Field(str(PROJECT), description="The project's folder on every host; default: as here.")
    python: str = Field(
        sys.executable, description="Interpreter with the packages, also relative to project; default: as here."
    )
    setup: str | None = Field(
        None,
        min_length=1,
        description="Line of bash that runs first on every host, such as . /usr/local/Ascend/.../set_env.sh",
    )
    port: int = Field(6379, ge=1, le=65535, description="Port of Ray's head.")
    dashboard: bool = Field(
        False,
        description="Ray's page and job server on the head, at 127.0.0.1:8265; external.job_server needs it.",
    )
    env: Environment = Field({}, description="Environment variables of Ray, and of all that it starts.")
    connect_seconds: int = Field(10, ge=1, le=600, description="How long a host may take to accept a connection.")
    start_seconds: int = Field(
        120, ge=5, le=3600, description="How long Ray may take until all hosts have joined."
    )

    _variables = field_validator("env")(_environment)

    @field_validator("shell")
    @classmethod
    def _shell_names_the_host(cls, value: str) -> str:
        if value == SSH:
            return value
        try:
            words = shlex.split(value)
            names = {
                name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None
            }
        except ValueError as error:
            raise ValueError(f"shell = {value!r} is no command: {error}") from None
        if unknown := sorted(names - {*_IN_SHELL}):
            raise ValueError(
                f"shell has {{{unknown[0]}}}, and only {{host}}, {{address}} and {{user}} are filled in"
            )
        if names.isdisjoint({"host", "address"}):
            raise ValueError(
                f"shell = {value!r} would run everything on one machine: it needs {{host}}, such as "
                "docker exec -i {host} bash -c, or {address}"
            )
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> Inventory:
        names = [host.name for host in self.hosts]
        if self.head is not None and self.head not in names:
            raise ValueError(f"head = {self.head} is not among the hosts{nearest(self.head, names)}")
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"host {', '.join(twice)} is listed twice; keep one of the two")
        at: dict[str, str] = {}
        for host in self.hosts:
            other = at.setdefault(_canonical(host.reached_at), host.name)
            if other != host.name:
                raise ValueError(f"hosts {other} and {host.name} have the same address {host.reached_at}")
        if none := [host.name for host in self.hosts if host.devices is None and self.devices is None]:
            raise ValueError(
                f"devices is not set for {', '.join(none)}: how many of each host Ray gives away, such as 16"
            )
        if self.device == "cpu" and self.num_cpus is not None:
            raise ValueError("num_cpus is for nodes with other devices: with device=cpu set devices")
        if "{user}" in self.shell and self.user is None:
            raise ValueError("shell has {user}, and user is not set")
        return self

    @property
    def head_host(self) -> Host:
        """The host with Ray's head."""
        return next(host for host in self.hosts if self.head in (None, host.name))

    @property
    def in_order(self) -> tuple[Host, ...]:
        """The hosts, the head first."""
        return self.head_host, *(host for host in self.hosts if host is not self.head_host)

    @property
    def resource(self) -> str:
        """Ray's name of the devices."""
        return device_for(self.device).ray_resource

    @property
    def num_devices(self) -> int:
        """Devices of all hosts together."""
        return sum(self.devices_of(host) for host in self.hosts)

    def devices_of(self, host: Host) -> int:
        """Devices of one host."""
        return int(host.devices or self.devices or 0)

    def environment_of(self, host: Host) -> dict[str, str]:
        """Environment variables of a host's Ray, as the inventory has them."""
        return {**self.env, **host.env}

    def command(self, host: Host, line: str) -> list[str]:
        """The command here that runs a shell's line on a host and passes standard input on to it."""
        if self.shell == SSH:
            settings = ("BatchMode=yes", "ControlMaster=no", "ControlPath=none")  # a shared connection may hang
            options = [
                word for each in (*settings, f"ConnectTimeout={self.connect_seconds}") for word in ("-o", each)
            ]
            user = ("-l", self.user) if self.user else ()
            return [SSH, *options, *user, "--", host.reached_at, line]
        values = {"host": host.name, "address": host.reached_at, "user": self.user or ""}
        return [*(word.format(**values) for word in shlex.split(self.shell)), line]


def read(path: str | Path) -> Inventory:
    """The inventory of a file; raises ConfigError with all its problems."""
    return resolve(read_tree(Path(path), "inventory", _TEXTS), f"inventory {path}")


def resolve(tree: Mapping[str, Any], source: str) -> Inventory:
    """The checked inventory of plain values; raises ConfigError with all problems, each after `source`."""
    problems = list(placeholders(tree, TEMPLATE_WORDS))
    try:
        inventory = Inventory.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(problem) for problem in error.errors()]
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in dict.fromkeys(problems)))
    return inventory


def _canonical(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()


def _explain(problem: ErrorDetails) -> str:
    *places, leaf = [str(part) for part in problem["loc"]] or [""]
    name, message = ".".join((*places, leaf)), problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "value_error":
            return message
        case "missing":
            return f"{name} is not set" + (": the machines, such as [node1, node2]" if name == "hosts" else "")
        case "extra_forbidden":
            known = Host.model_fields if places[:1] == ["hosts"] else Inventory.model_fields
            return f"unknown key {name}{nearest(leaf, list(known))}"
        case "tuple_type":
            message = "it is a list, such as [node1, node2]"
        case "model_type":
            message = "a host is a name, or a section with keys"
    return f"{name} = {problem['input']!r} is refused: {message[0].lower()}{message[1:]}"
