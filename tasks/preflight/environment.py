"""The environment linter: what variables do to a training, which are missing, dead or in the way."""

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
from dapo_core.versions import installed
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.preflight.interfaces import INTERFACE_VARIABLES, is_virtual

TABLE = Path(__file__).parent / "environment.yaml"
INTERFACE = "INTERFACE"  # stands for the node's interface that reaches the others
NODE = "node"  # beside the names of `conditions_of`: the machine is one of a cluster's
MIN_OPEN_FILES = 32_768
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file
_PREFIXES = ("HCCL_", "ASCEND_", "VLLM_ASCEND_", "PYTORCH_NPU_", "NCCL_", "GLOO_")
_NEARNESS = 0.9  # of difflib: one letter of ten, as no two names of the vendors are but the next one
_OF_VENDORS = ("ASCEND_VISIBLE_DEVICES",)  # of Ascend's container runtime

State = Literal["set", "ours", "missing", "dead", "misspelt", "caution", "conflict", "placeholder"]
STATUSES: dict[State, str] = {
    "set": OK, "ours": OK, "missing": WARN, "dead": WARN, "misspelt": WARN, "caution": WARN, "conflict": FAIL,
    "placeholder": FAIL,
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """What is found of one variable: `value` as set, or to set where it is missing or the chain's own."""

    name: str
    state: State
    value: str
    effect: str
    advice: str = ""


@cache
def table_rows() -> list[dict[str, Any]]:
    """The rows of environment.yaml, read once."""
    rows: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return rows


def lint(environment: Mapping[str, str], config: TrainingConfig, is_node: bool = False) -> list[Variable]:
    """What is set, what the chain sets, what is missing, dead, misspelt or in the way, in the table's order.

    `is_node`: this machine is one of the cluster's, if the training has one.
    """
    return lint_under(environment, config.train.device, conditions_of(config) | ({NODE} if is_node else set()))


def lint_under(environment: Mapping[str, str], device: str, conditions: frozenset[str]) -> list[Variable]:
    """As `lint`, for a kind of device and the names that `when` knows and that hold."""
    found: list[Variable] = []
    rows = table_rows()
    own = [row for row in rows if device in row.get("devices", (device,))]
    for row in own:
        found += _of_row(row, environment, conditions, device)
    unknown = environment.keys() - {row["name"] for row in rows} - {*_OF_VENDORS}
    return [*found, *_misspelt(unknown, environment, own), *_open_files()]


def wanted(config: TrainingConfig) -> dict[str, str]:
    """What a training wants set, by name; INTERFACE stands for each node's own interface."""
    conditions = conditions_of(config)
    return {
        row["name"]: value
        for row in table_rows()
        if config.train.device in row.get("devices", (config.train.device,))
        if set(row.get("when", ())) <= conditions
        if (value := row.get("ours", row.get("want")))
    }


def wanted_alike(config: TrainingConfig) -> dict[str, str]:
    """What a training wants set to the same value on every node."""
    return {name: value for name, value in wanted(config).items() if value != INTERFACE}


def check_environment(environment: Mapping[str, str], config: TrainingConfig, findings: Findings) -> None:
    """Findings of the variables that are set and dead or in the way; what is missing, `dapo doctor env` says."""
    for name, status, fault in faults(lint(environment, config)):
        findings.add("environment", status, f"{name}: {fault}", "`dapo doctor env` has all")


def faults(variables: Iterable[Variable]) -> Iterator[tuple[str, str, str]]:
    """Of variables that are dead or in the way: name and value, status, and why."""
    for each in variables:
        if (status := STATUSES[each.state]) != OK and each.state != "missing":
            yield f"{each.name}={each.value}", status, each.advice


def exports(variables: list[Variable]) -> list[str]:
    """Shell lines that set what is missing on this node; what it cannot know is a comment."""
    return [
        f"export {each.name}={_quoted(each.value)}" if each.value else f"# {each.name}: {each.advice}"
        for each in variables
        if each.state == "missing"
    ]


def _quoted(value: str) -> str:
    """The value as one word of any shell: zsh takes =eth0 for the path of a command."""
    return f"'='{shlex.quote(value[1:])}" if value.startswith("=") else shlex.quote(value)


def conditions_of(config: TrainingConfig) -> frozenset[str]:
    """The names that `when` knows and that hold for the training."""
    held = {
        "shared": config.train.is_colocated,
        "graphs": config.train.device != "cpu" and not config.rollout.engine_args.get("enforce_eager", False),
        "nodes": config.train.ray_address is not None,
        "deterministic": config.run.deterministic,
    }
    return frozenset(name for name, is_true in held.items() if is_true)


def _misspelt(
    unknown: Iterable[str], environment: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> Iterator[Variable]:
    """Variables whose names are almost one of the rows'; the vendors have many more names than the table."""
    known = [row["name"] for row in rows if "dead" not in row]
    for name in sorted(unknown):
        prefix = next(filter(name.startswith, _PREFIXES), None)
        alike = [each for each in known if prefix is not None and each.startswith(prefix)]
        if near := difflib.get_close_matches(name, alike, 1, _NEARNESS):
            yield Variable(name, "misspelt", environment[name], "None that is known.", f"did you mean {near[0]}?")


def _of_row(
    row: dict[str, Any], environment: Mapping[str, str], conditions: frozenset[str], device: str
) -> Iterator[Variable]:
    name, effect = row["name"], row["effect"]
    is_asked = set(row.get("when", ())) <= conditions
    value = environment.get(name, environment.get(name.lower()) if name.endswith("_PROXY") else None)
    if value is None:
        if is_asked and "ours" in row:
            yield Variable(name, "ours", row["ours"], effect, "set by the chain for its own processes")
        elif is_asked and row.get("want") == INTERFACE:
            names = _interfaces()
            alone = INTERFACE_VARIABLES[device][name].format(names[0]) if len(names) == 1 else ""
            advice = "each node has its own" + ("" if alone else f"; here {', '.join(names)}")
            yield Variable(name, "missing", alone, effect, advice)
        elif is_asked and "want" in row:
            yield Variable(name, "missing", row["want"], effect)
        return
    for package, version in row.get("dead", {}).items():
        here = installed(package)
        if here is None or Version(here) >= Version(version):
            which = f"{package} {here} is installed" if here else f"{package} is not installed here"
            advice = f"unset it: {package} does not read it from {version} on, and {which}"
            yield Variable(name, "dead", value, effect, advice)
            return
    if TEMPLATE_WORDS.search(value):
        yield Variable(name, "placeholder", value, effect, "put the real value there, or unset it")
        return
    state, fault = _fault(row, value, conditions)
    yield Variable(name, state, value, effect, fault)


def _fault(row: dict[str, Any], value: str, conditions: frozenset[str]) -> tuple[State, str]:
    """Whether the value is in the way, and why."""
    for against in row.get("not", ()):
        applies = set(against.get("when", ())) <= conditions
        if applies and re.fullmatch(against["value"], value, re.IGNORECASE):
            return "caution" if against.get("is_caution") else "conflict", str(against["why"])
    state: State = "conflict"
    of_this_machine: State = "caution" if "nodes" in conditions and NODE not in conditions else "conflict"
    match row.get("is"):
        case "interface":
            fault, state = _fault_of_interface(value), of_this_machine
        case "address":
            fault, state = _fault_of_address(value), of_this_machine
        case "libraries":
            fault = "; ".join(filter(None, map(_fault_of_library, re.split(r"[: ]+", value.strip()))))
            state = "caution"
        case "ascending":
            numbers = [part.strip() for part in value.split(",") if part.strip()]
            is_ascending = all(part.isdigit() for part in numbers) and numbers == sorted(set(numbers), key=int)
            fault = "" if is_ascending else "devices must be numbers in ascending order, each once, such as 0,1,2"
        case _:
            fault = ""
    return (state, fault) if fault else ("set", "")


def _interfaces() -> list[str]:
    """Names of this machine's interfaces that may reach other nodes: up, with an address that is routed."""
    is_up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    return sorted(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if is_up.get(name) and name != "lo" and not is_virtual(name)
        if any(each.family == socket.AF_INET and not each.address.startswith("169.254.") for each in addresses)
    )


def chosen_addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Addresses of the interfaces that variables choose for collectives on this machine, by name and value."""
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
        named = [
            name for name in addresses if (name == first[1:] if first.startswith("=") else name.startswith(first))
        ]
        if first and not first.startswith("^") and named:
            chosen[f"{variable}={value}"] = addresses[first if first in addresses else named[0]]
    return chosen


def _fault_of_interface(value: str) -> str:
    here = psutil.net_if_stats()
    if value.startswith("^"):
        return ""
    for part in value.removeprefix("=").split(","):
        named = [name for name in here if (name == part if value.startswith("=") else name.startswith(part))]
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
    return f"no interface of this machine has it; there are {', '.join(alike)}"


def _fault_of_library(path: str) -> str:
    """Why a library of LD_PRELOAD is not loaded, of which the loader only warns; "" for a name without a path."""
    if not path or "/" not in path:
        return ""
    if not Path(path).is_file():
        return f"{path} does not exist, and programs start without it"
    head = Path(path).read_bytes()[:20]
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return f"{path} is no library"
    machine = _MACHINES.get(struct.unpack_from("<H" if head[5] == 1 else ">H", head, 18)[0], "another machine")
    return "" if machine == platform.machine() else f"{path} is for {machine}, and this is {platform.machine()}"


def _open_files() -> Iterator[Variable]:
    """The limit of open files, which Ray and engines use up together."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    effect = "Files and connections that a process may have open at once."
    is_low = limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES
    advice = f"ulimit -n {MIN_OPEN_FILES}" if is_low else ""
    shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    yield Variable("ulimit -n", "missing" if is_low else "set", "" if is_low else shown, effect, advice)
