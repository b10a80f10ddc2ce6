"""The inventory of an allocation: the nodes that SLURM, PBS or Volcano gave to this job, from its environment."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_core.device import device_for
from dapo_core.errors import ConfigError
from tasks.nodes.inventory import SSH, Inventory, read, resolve

# A step of its own on a node of the job, beside those that already run there. Where SLURM tracks processes by
# cgroup, what a step leaves behind ends with it, and so would Ray: there ssh, which puts it into the job itself.
SRUN = "srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none --nodelist={host} sh -c"
SCONTROL_SECONDS = 20
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 72(x2),36 in SLURM's words: 72, 72, 36
_GRES = re.compile(r"gres[:/](\w+)(?:[:/][\w.-]*[a-zA-Z][\w.-]*)?[:=](\d+)")  # gres/gpu:a100:8, gres:npu:16
_NPU_GRES = re.compile(r"npu|ascend|davinci", re.IGNORECASE)  # what sites call it
_OF_DEVICES = re.compile(rf"gpu|{_NPU_GRES.pattern}", re.IGNORECASE)
_VOLCANO = re.compile(r"VC_(\w+)_HOSTS")
_ITEM = re.compile(r"(?:\[[^]]*\]|[^,[])+")  # between commas outside of brackets
_BRACKET = re.compile(r"\[([^]]*)\]")
_HEADS = ("HEAD", "MASTER", "DRIVER", "LAUNCHER")  # Volcano's tasks whose pod leads


@dataclass(frozen=True)
class _Allocation:
    """Nodes with what they have of devices and of processors; None where the scheduler does not say."""

    source: str
    devices: Mapping[str, int | None]
    processors: Mapping[str, int | None]
    kind: str | None = None
    shell: str = SSH


def machines_of(path: Path | None, environ: Mapping[str, str]) -> tuple[Inventory, str]:
    """The inventory of a file, or without one of the job that this process is in; and the file as it is typed."""
    return (from_scheduler(environ), "") if path is None else (read(path), str(path))


def from_scheduler(environ: Mapping[str, str]) -> Inventory:
    """The nodes of the job that this process runs in, of one kind of devices; the first is the head.

    SLURM, PBS and Torque, and Volcano's jobs on Kubernetes are known. Where the scheduler does not count devices,
    each node has as many as this machine. Raises ConfigError outside of any job, and where a job does not name its
    nodes.
    """
    for name, allocation_of in (
        ("SLURM_JOB_ID", _of_slurm),
        ("PBS_NODEFILE", _of_pbs),
        ("KUBERNETES_SERVICE_HOST", _of_pods),
    ):
        if environ.get(name):
            return _inventory(allocation_of(environ), environ)
    raise ConfigError(
        "this is no job of a scheduler (none of SLURM_JOB_ID, PBS_NODEFILE and KUBERNETES_SERVICE_HOST is set): "
        "name an inventory, such as deploy/inventory.yaml with your machines, or type this inside of an allocation"
    )


def _inventory(found: _Allocation, environ: Mapping[str, str]) -> Inventory:
    kind, here = found.kind, 0
    counts = found.processors if kind == "cpu" else found.devices
    if kind is None or None in counts.values():
        kind, here = _devices_here(kind, environ)
        counts = found.processors if kind == "cpu" else found.devices
    hosts = [{"name": name, "devices": counts[name] or here or None} for name in found.devices]
    setup = _setup_of_cann(environ) if (kind, found.shell) == ("npu", SSH) else None
    return resolve({"hosts": hosts, "device": kind, "shell": found.shell, "setup": setup}, found.source)


def _setup_of_cann(environ: Mapping[str, str]) -> str | None:
    """The files that set CANN's variables here, as a line of shell: a command over ssh does not have them."""
    homes = [Path(environ[name]) for name in ("ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH") if environ.get(name)]
    files = [next((file for up in home.parents if (file := up / "set_env.sh").is_file()), None) for home in homes]
    return " && ".join(f". {shlex.quote(str(file))}" for file in files if file is not None) or None


def _devices_here(kind: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """The kind of the devices if it is not known, and how many of them this machine has; 0 if it has none."""
    from tasks.recipes.first_recipe import Machine

    machine = Machine.this()
    if kind in (None, machine.kind):
        return machine.kind, machine.num_cores if machine.kind == "cpu" else machine.num_devices
    named = environ.get(device_for(str(kind)).visible_variable, "")
    return str(kind), len([name for name in named.split(",") if name.strip()])


def _of_slurm(environ: Mapping[str, str]) -> _Allocation:
    source = f"SLURM job {environ['SLURM_JOB_ID']}"
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not listed:
        raise ConfigError(f"{source}: SLURM_JOB_NODELIST is not set; type this inside of sbatch or salloc")
    names = _scontrol("show", "hostnames", listed) or expand(listed)
    gres, devices = _gres(environ)
    tasks = _repeated(environ.get("SLURM_TASKS_PER_NODE", ""))
    if devices is None and (each := environ.get("SLURM_GPUS_PER_TASK")) and len(tasks) == len(names):
        devices = [_last_number(each) * task for task in tasks]
    processors = _repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    tracking = [line.split()[-1] for line in _scontrol("show", "config") if line.startswith("ProctrackType")]
    shell = SRUN if tracking in (["proctrack/linuxproc"], ["proctrack/pgid"]) else SSH
    kind = "npu" if _NPU_GRES.search(gres) or environ.get("ASCEND_RT_VISIBLE_DEVICES") else None
    if kind is None and devices is not None:
        kind = _kind_of_gpus()
    return _Allocation(source, _by_name(names, devices), _by_name(names, processors), kind, shell)


def expand(hosts: str) -> list[str]:
    """The names of SLURM's compressed list: `a[01-03,7],b5` is a01, a02, a03, a7, b5.

    Several brackets in a name multiply, the last running fastest.
    """
    names = []
    for item in _ITEM.findall(hosts):
        parts = _BRACKET.split(item)  # each second one is the inside of a bracket
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """The numbers of a bracket, with the leading zeros of each range's first."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return [
        str(number).zfill(len(first))
        for first, _, last in ends
        for number in range(int(first), int(last or first) + 1)
    ]


def _gres(environ: Mapping[str, str]) -> tuple[str, list[int] | None]:
    """The generic resource's name and its number, one for all nodes; None if SLURM does not say it."""
    job = " ".join(_scontrol("show", "job", "--oneliner", environ["SLURM_JOB_ID"]))
    per_node = re.search(r"TresPerNode=(\S+)", job)
    if per_node and (found := _GRES.findall(per_node[1])):
        names = [name for name, _ in found if _OF_DEVICES.search(name)]
        if names:
            return names[0], [sum(int(count) for name, count in found if name == names[0])]
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environ.get(name):
            return "gpu", [sum(_last_number(part) for part in environ[name].split(","))]
    if environ.get("SLURM_JOB_GPUS"):  # ids of this node's: 0,1,4-7
        return "gpu", [len(expand(f"[{environ['SLURM_JOB_GPUS']}]"))]
    return "", None


def _kind_of_gpus() -> str:
    """What SLURM counts as GPUs: NPUs where a site registers them so, CUDA devices else."""
    import importlib.util

    return "npu" if importlib.util.find_spec("torch_npu") else "cuda"


def _last_number(text: str) -> int:
    """8 of `8` and of `a100:8`."""
    number = text.rpartition(":")[2].strip()
    if not number.isdigit():
        raise ConfigError(f"SLURM's {text!r} is no number of devices, such as 8 or a100:8")
    return int(number)


def _repeated(text: str) -> list[int]:
    """72, 72, 36 of SLURM's `72(x2),36`; empty if that is not its form."""
    matches = [_REPEATED.fullmatch(part) for part in text.split(",")]
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))] if all(matches) else []


def _by_name(names: Sequence[str], counts: Sequence[int] | None) -> dict[str, int | None]:
    """A count for each name; one count is of all of them."""
    if counts is not None and len(counts) == 1:
        counts = [counts[0]] * len(names)
    fits = counts is not None and len(counts) == len(names)
    return dict(zip(names, counts if fits and counts else [None] * len(names), strict=True))


def _scontrol(*arguments: str) -> list[str]:
    """The lines of SLURM's own answer; none where the command is missing or does not answer."""
    if (command := shutil.which("scontrol")) is None:
        return []
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _of_pbs(environ: Mapping[str, str]) -> _Allocation:
    source = f"PBS job {environ.get('PBS_JOBID', '')}".strip()
    slots = Counter(_lines(environ["PBS_NODEFILE"], source))  # a line for each processor or MPI process
    if not slots:
        raise ConfigError(f"{source}: {environ['PBS_NODEFILE']} names no node")
    devices: dict[str, int | None] = dict.fromkeys(slots)
    if environ.get("PBS_GPUFILE"):  # Torque: lines such as node1-gpu0
        counted = Counter(line.rpartition("-gpu")[0] for line in _lines(environ["PBS_GPUFILE"], source))
        devices |= {name: counted[name] for name in slots if counted[name]}
    kind = _kind_of_gpus() if all(devices.values()) else None
    return _Allocation(source, devices, dict(slots), kind)


def _lines(path: str, source: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(
            f"{source}: {path} cannot be read: {error.strerror}; it is on the job's first node"
        ) from None


def _of_pods(environ: Mapping[str, str]) -> _Allocation:
    found = {match[1]: value for name, value in environ.items() if (match := _VOLCANO.fullmatch(name))}
    if not found:
        name = socket.gethostname()
        raise ConfigError(
            f"pod {name}: Kubernetes does not give a pod the names of the others. Volcano does (plugin svc, "
            "VC_*_HOSTS); else write them into an inventory (a StatefulSet has NAME-0.SERVICE and so on), "
            "or let KubeRay start them: `dapo cluster render INVENTORY --kuberay`"
        )
    tasks = sorted(found, key=lambda task: (not any(head in task for head in _HEADS), task))
    names = [name.strip() for task in tasks for name in found[task].split(",") if name.strip()]
    return _Allocation("Volcano job", dict.fromkeys(names), dict.fromkeys(names))
