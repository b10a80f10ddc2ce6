"""The environment linter: each variable's effect, and which are missing, obsolete or harmful."""

from __future__ import annotations

import difflib
import platform
import re
import resource
import shlex
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from packaging.version import Version

from dapo_core.config.loading import TEMPLATE_WORDS
from dapo_core.config.training import TrainingConfig
from dapo_core.machine.versions import installed
from redaction import redact
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.preflight.interfaces import INTERFACE_VARIABLES, is_virtual

TABLE = Path(__file__).parent / "environment.yaml"
INTERFACE = "INTERFACE"  # stands for the node's own interface
NODE = "node"  # a condition beside those of `conditions_of`: this machine is a node of the cluster
MIN_OPEN_FILES = 32_768
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file
_PREFIXES = ("HCCL_", "ASCEND_", "VLLM_ASCEND_", "PYTORCH_NPU_", "NCCL_", "GLOO_")
_SIMILARITY = 0.9  # of difflib: about one letter in ten; the vendors' own names differ more
_KNOWN = ("ASCEND_VISIBLE_DEVICES",)  # except this one, of Ascend's container runtime
_TO_SET = ("missing", "low")  # states that only `dapo doctor env` shows

State = Literal[
    "set", "ours", "missing", "low", "dead", "misspelt", "caution", "conflict", "placeholder"
]
STATUSES: dict[State, str] = {
    "set": OK,
    "ours": OK,
    "missing": WARN,
    "low": WARN,
    "dead": WARN,
    "misspelt": WARN,
    "caution": WARN,
    "conflict": FAIL,
    "placeholder": FAIL,
}


@dataclass(frozen=True)
class Variable:
    """The state of one variable; `value` is the one to set if it is missing or set by the chain."""

    name: str
    state: State
    value: str
    effect: str
    advice: str = ""


@cache
def table_rows() -> list[dict[str, Any]]:
    """Return the rows of environment.yaml."""
    rows: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return rows


def lint(
    environment: Mapping[str, str], config: TrainingConfig, is_node: bool = False
) -> list[Variable]:
    """Return the state of every variable that matters to the training, in the table's order.

    `is_node`: this machine is a node of the training's cluster, if it has one.
    """
    conditions = conditions_of(config) | ({NODE} if is_node else set())
    return lint_under(environment, config.train.device, conditions)


def lint_under(
    environment: Mapping[str, str], device: str, conditions: frozenset[str]
) -> list[Variable]:
    """Like `lint`, for a kind of device and the conditions (`when` in the table) that hold."""
    found: list[Variable] = []
    rows = table_rows()
    applicable = [row for row in rows if device in row.get("devices", (device,))]
    for row in applicable:
        found += _check_row(row, environment, conditions, device)
    unknown = environment.keys() - {row["name"] for row in rows} - {*_KNOWN}
    return [*found, *_misspelt(unknown, environment, applicable), *_open_files()]


def wanted(config: TrainingConfig) -> dict[str, str]:
    """Return the variables that a training needs; INTERFACE stands for each node's own."""
    conditions = conditions_of(config)
    return {
        row["name"]: value
        for row in table_rows()
        if config.train.device in row.get("devices", (config.train.device,))
        if set(row.get("when", ())) <= conditions
        if (value := row.get("chain_value", row.get("value")))
    }


def wanted_alike(config: TrainingConfig) -> dict[str, str]:
    """Return the variables that a training needs with the same value on every node."""
    return {name: value for name, value in wanted(config).items() if value != INTERFACE}


def check_environment(
    environment: Mapping[str, str], config: TrainingConfig, findings: Findings
) -> None:
    """Add findings for obsolete and harmful variables; `dapo doctor env` shows missing ones."""
    advice = "`dapo doctor env` lists all variables"
    for name, status, fault in faults(lint(environment, config)):
        findings.add("environment", status, f"{name}: {fault}", advice)


def faults(variables: Iterable[Variable]) -> Iterator[tuple[str, str, str]]:
    """Yield NAME=VALUE, status and reason of each obsolete or harmful variable."""
    for each in variables:
        if (status := STATUSES[each.state]) != OK and each.state not in _TO_SET:
            yield f"{each.name}={each.value}", status, each.advice


def recorded(environment: Mapping[str, str], config: TrainingConfig) -> list[dict[str, str]]:
    """Return the variables that the training reads: names, values, and who sets them."""
    return [
        {
            "name": each.name,
            "value": redact(each.value),
            "set_by": "the chain" if each.state == "ours" else "this environment",
        }
        for each in lint(environment, config)
        if each.state not in _TO_SET
    ]


def described(rows: Iterable[Mapping[str, str]]) -> str:
    """Return recorded variables on one line."""
    return "; ".join(f"{row['name']}={row['value']} ({row['set_by']})" for row in rows)


def exports(variables: list[Variable]) -> list[str]:
    """Return shell lines that set the missing variables; a comment if no value is known."""
    return [
        f"export {each.name}={_quoted(each.value)}"
        if each.value and each.state == "missing"
        else f"# {each.name}: {each.advice}"
        for each in variables
        if each.state in _TO_SET
    ]


def _quoted(value: str) -> str:
    """Quote a value for any shell: zsh would expand =eth0 to the path of a command."""
    return f"'='{shlex.quote(value[1:])}" if value.startswith("=") else shlex.quote(value)


def conditions_of(config: TrainingConfig) -> frozenset[str]:
    """Return the conditions (`when` in the table) that hold for the training."""
    conditions = {
        "shared": config.train.is_colocated,
        "graphs": config.train.device != "cpu"
        and not config.rollout.engine_args.get("enforce_eager", False),
        "nodes": config.train.ray_address is not None,
        "deterministic": config.run.deterministic,
    }
    return frozenset(name for name, is_true in conditions.items() if is_true)


def _misspelt(
    unknown: Iterable[str], environment: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> Iterator[Variable]:
    """Yield variables whose names are almost those of a row."""
    known = [row["name"] for row in rows if "ignored_since" not in row]
    for name in sorted(unknown):
        prefix = next(filter(name.startswith, _PREFIXES), None)
        alike = [each for each in known if prefix is not None and each.startswith(prefix)]
        if near := difflib.get_close_matches(name, alike, 1, _SIMILARITY):
            yield Variable(
                name, "misspelt", environment[name], "Unknown variable.", f"did you mean {near[0]}?"
            )


def _check_row(
    row: dict[str, Any], environment: Mapping[str, str], conditions: frozenset[str], device: str
) -> Iterator[Variable]:
    name, effect = row["name"], row["effect"]
    value = environment.get(name)
    if value is None and name.endswith("_PROXY"):
        value = environment.get(name.lower())
    if value is None:
        if set(row.get("when", ())) <= conditions:
            yield from _check_unset(row, device)
        return
    for package, version in row.get("ignored_since", {}).items():
        here = installed(package)
        if here is None or Version(here) >= Version(version):
            state = f"{package} {here} is installed" if here else f"{package} is not installed here"
            advice = f"unset it: {package} ignores it since {version}, and {state}"
            yield Variable(name, "dead", value, effect, advice)
            return
    if TEMPLATE_WORDS.search(value):
        yield Variable(name, "placeholder", value, effect, "set the real value, or unset it")
        return
    state, fault = _fault(row, value, conditions)
    yield Variable(name, state, value, effect, fault)


def _check_unset(row: dict[str, Any], device: str) -> Iterator[Variable]:
    name, effect = row["name"], row["effect"]
    if "chain_value" in row:
        advice = "set by the chain for its own processes"
        yield Variable(name, "ours", row["chain_value"], effect, advice)
    elif row.get("value") == INTERFACE:
        names, advice = _interfaces(), "differs on each node"
        if len(names) == 1:
            only = INTERFACE_VARIABLES[device][name].format(names[0])
            yield Variable(name, "missing", only, effect, advice)
        else:
            advice += f"; this machine has {', '.join(names)}"
            yield Variable(name, "missing", "", effect, advice)
    elif "value" in row:
        yield Variable(name, "missing", row["value"], effect)


def _fault(row: dict[str, Any], value: str, conditions: frozenset[str]) -> tuple[State, str]:
    """Return the state of a value and what is wrong with it."""
    for against in row.get("conflicts", ()):
        applies = set(against.get("when", ())) <= conditions
        if applies and re.fullmatch(against["value"], value, re.IGNORECASE):
            return "caution" if against.get("is_caution") else "conflict", str(against["why"])
    is_elsewhere = "nodes" in conditions and NODE not in conditions
    local_state: State = "caution" if is_elsewhere else "conflict"
    state, fault = local_state, ""
    match row.get("must_be"):
        case "interface":
            fault = _fault_of_interface(value)
        case "address":
            fault = _fault_of_address(value)
        case "libraries":
            found = map(_fault_of_library, re.split(r"[: ]+", value.strip()))
            state, fault = "caution", "; ".join(filter(None, found))
        case "ascending":
            numbers = [part.strip() for part in value.split(",") if part.strip()]
            are_numbers = all(part.isdigit() for part in numbers)
            if not are_numbers or numbers != sorted(set(numbers), key=int):
                fault = "devices must be distinct numbers in ascending order, such as 0,1,2"
                state = "conflict"
    return (state, fault) if fault else ("set", "")


def _interfaces() -> list[str]:
    """Return the names of interfaces that may reach other nodes: up, with a routable address."""
    is_up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    return sorted(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if is_up.get(name) and name != "lo" and not is_virtual(name)
        if any(
            each.family in (socket.AF_INET, socket.AF_INET6)
            and not each.address.startswith(("169.254.", "fe80:"))
            for each in addresses
        )
    )


def chosen_addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses that the *_SOCKET_IFNAME variables select here, by NAME=VALUE."""
    addresses = {
        name: each.address
        for name, several in psutil.net_if_addrs().items()
        for each in several
        if each.family == socket.AF_INET
    }
    chosen = {}
    for variable in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        first = value.split(",")[0]
        named = _named(first, addresses)
        if first and not first.startswith("^") and named:
            chosen[f"{variable}={value}"] = addresses[first if first in addresses else named[0]]
    return chosen


def _named(part: str, interfaces: Iterable[str]) -> list[str]:
    """Return the interfaces that =NAME, or the beginning of a name, selects."""
    if part.startswith("="):
        return [name for name in interfaces if name == part[1:]]
    return [name for name in interfaces if name.startswith(part)]


def _fault_of_interface(value: str) -> str:
    here = psutil.net_if_stats()
    if value.startswith("^"):
        return ""
    sign = "=" if value.startswith("=") else ""
    for part in value.removeprefix("=").split(","):
        named = _named(f"{sign}{part}", here)
        if not named:
            return f"this machine has no interface {part}; it has {', '.join(sorted(here))}"
        if not any(here[name].isup for name in named):
            return f"{', '.join(named)} is down"
    return ""


def _fault_of_address(value: str) -> str:
    held = {
        each.address: name
        for name, several in sorted(psutil.net_if_addrs().items())
        for each in several
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    if value in held:
        return ""
    alike = [f"{each} ({name})" for each, name in held.items() if (":" in each) == (":" in value)]
    return f"no interface of this machine has this address; it has {', '.join(alike)}"


def _fault_of_library(path: str) -> str:
    """Why the loader skips a library of LD_PRELOAD with only a warning; "" for a bare name."""
    if not path or "/" not in path:
        return ""
    if not Path(path).is_file():
        return f"{path} does not exist; programs start without it"
    head = Path(path).read_bytes()[:20]
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return f"{path} is not a library"
    [number] = struct.unpack_from("<H" if head[5] == 1 else ">H", head, 18)
    machine, here = _MACHINES.get(number, "another architecture"), platform.machine()
    return "" if machine == here else f"{path} is for {machine}, this machine is {here}"


def _open_files() -> Iterator[Variable]:
    """Yield the limit of open files, which Ray and the engines exhaust together."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    effect = "Files and connections that a process may have open at once."
    is_low = limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES
    advice = f"ulimit -n {MIN_OPEN_FILES}" if is_low else ""
    shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    yield Variable("ulimit -n", "low" if is_low else "set", shown, effect, advice)
