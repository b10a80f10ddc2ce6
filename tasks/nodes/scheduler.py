"""Build an inventory from the nodes that SLURM, PBS or Volcano allocated to this job."""

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

from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from tasks.nodes.inventory import SSH, Inventory, read, resolve

# Runs an overlapping step on a node of the job. If SLURM tracks processes by cgroup, Ray would end
# with the step: then ssh is used, which puts Ray into the job itself.
SRUN = "srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none --nodelist={host} sh -c"
SCONTROL_SECONDS = 20
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # SLURM writes 72(x2),36 for 72, 72, 36
# gres/gpu:a100:8, gres:npu:16
_GRES = re.compile(r"gres[:/](\w+)(?:[:/][\w.-]*[a-zA-Z][\w.-]*)?[:=](\d+)")
_NPU_GRES = re.compile(r"npu|ascend|davinci", re.IGNORECASE)  # sites choose the name
_DEVICE_GRES = re.compile(rf"gpu|{_NPU_GRES.pattern}", re.IGNORECASE)
_VOLCANO = re.compile(r"VC_(\w+)_HOSTS")
_ITEM = re.compile(r"(?:\[[^]]*\]|[^,[])+")  # between commas outside brackets
_BRACKET = re.compile(r"\[([^]]*)\]")
_HEADS = ("HEAD", "MASTER", "DRIVER", "LAUNCHER")  # Volcano tasks whose pod becomes the head


@dataclass(frozen=True)
class _Allocation:
    """An allocation's nodes with their devices and CPUs; None where the scheduler has no count."""

    source: str
    devices: Mapping[str, int | None]
    cpus: Mapping[str, int | None]
    kind: str | None = None
    shell: str = SSH


def machines_of(path: Path | None, environ: Mapping[str, str]) -> tuple[Inventory, str]:
    """Return the inventory of a file or of the current job, and the file's path ("" for a job)."""
    return (from_scheduler(environ), "") if path is None else (read(path), str(path))


def from_scheduler(environ: Mapping[str, str]) -> Inventory:
    """Return the nodes of the current job as an inventory; the first is the head.

    Nodes without a count of devices are assumed to have as many as this machine. Raises ConfigError
    outside a job, and if the job does not list its nodes.
    """
    for name, allocation_of in (
        ("SLURM_JOB_ID", _from_slurm),
        ("PBS_NODEFILE", _from_pbs),
        ("KUBERNETES_SERVICE_HOST", _from_volcano),
    ):
        if environ.get(name):
            return _inventory(allocation_of(environ), environ)
    raise ConfigError(
        "not inside a scheduler's job (none of SLURM_JOB_ID, PBS_NODEFILE and "
        "KUBERNETES_SERVICE_HOST is set): name an inventory, such as deploy/inventory.yaml with "
        "your machines, or run this inside an allocation"
    )


def _inventory(found: _Allocation, environ: Mapping[str, str]) -> Inventory:
    kind, here = found.kind, 0
    counts = found.cpus if kind == "cpu" else found.devices
    if kind is None or None in counts.values():
        kind, here = _devices_here(kind, environ)
        counts = found.cpus if kind == "cpu" else found.devices
    hosts = [{"name": name, "devices": counts[name] or here or None} for name in found.devices]
    setup = _setup_of_cann(environ) if (kind, found.shell) == ("npu", SSH) else None
    return resolve(
        {"hosts": hosts, "device": kind, "shell": found.shell, "setup": setup}, found.source
    )


def _setup_of_cann(environ: Mapping[str, str]) -> str | None:
    """Return a line that sources this machine's CANN files: ssh commands lack their variables."""
    lines = []
    for name in ("ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH"):
        folders = Path(environ[name]).parents if environ.get(name) else ()
        files = (folder / "set_env.sh" for folder in folders)
        lines += [f". {shlex.quote(str(file))}" for file in files if file.is_file()][:1]
    return " && ".join(lines) or None


def _devices_here(kind: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the kind of device and how many this machine has; `kind` if it is known already."""
    from tasks.recipes.first_recipe import Machine

    machine = Machine.this()
    if kind in (None, machine.kind):
        return machine.kind, machine.num_cores if machine.kind == "cpu" else machine.num_devices
    visible = environ.get(device_for(str(kind)).visible_variable, "")
    return str(kind), len([name for name in visible.split(",") if name.strip()])


def _from_slurm(environ: Mapping[str, str]) -> _Allocation:
    source = f"SLURM job {environ['SLURM_JOB_ID']}"
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not listed:
        raise ConfigError(
            f"{source}: SLURM_JOB_NODELIST is not set; run this inside sbatch or salloc"
        )
    if int(environ.get("SLURM_HET_SIZE", "1")) > 1:
        raise ConfigError(
            f"{source} is heterogeneous, and SLURM_JOB_NODELIST={listed} has the nodes of its "
            "first component only: name an inventory of all"
        )
    names = _scontrol("show", "hostnames", listed) or expand(listed)
    gres, devices = _gres(environ)
    tasks = _repeated(environ.get("SLURM_TASKS_PER_NODE", ""))
    each = environ.get("SLURM_GPUS_PER_TASK")
    if devices is None and each and len(tasks) == len(names):
        devices = [_last_number(each) * task for task in tasks]
    cpus = _repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    has_own_tracking = re.compile(r"ProctrackType\s*=\s*proctrack/(linuxproc|pgid)\s*").fullmatch
    shell = SRUN if any(map(has_own_tracking, _scontrol("show", "config"))) else SSH
    kind = "npu" if _NPU_GRES.search(gres) or environ.get("ASCEND_RT_VISIBLE_DEVICES") else None
    if kind is None and devices is not None:
        kind = _kind_of_gpus()
    return _Allocation(source, _by_name(names, devices), _by_name(names, cpus), kind, shell)


def expand(hosts: str) -> list[str]:
    """Expand SLURM's compressed host list: `a[01-03,7],b5` is a01, a02, a03, a7, b5.

    Several brackets in a name are combined, the last one varying fastest.
    """
    names = []
    for item in _ITEM.findall(hosts):
        parts = _BRACKET.split(item)  # every second part is the inside of a bracket
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """Expand the inside of a bracket, padded with zeros like the first number of each range."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return [
        str(number).zfill(len(first))
        for first, _, last in ends
        for number in range(int(first), int(last or first) + 1)
    ]


def _gres(environ: Mapping[str, str]) -> tuple[str, list[int] | None]:
    """Return the name of the generic resource and its count per node; None if SLURM has none."""
    job = " ".join(_scontrol("show", "job", "--oneliner", environ["SLURM_JOB_ID"]))
    per_node = re.search(r"TresPerNode=(\S+)", job)
    found = _GRES.findall(per_node[1]) if per_node else []
    if names := [name for name, _ in found if _DEVICE_GRES.search(name)]:
        return names[0], [sum(int(count) for name, count in found if name == names[0])]
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environ.get(name):
            return "gpu", [sum(_last_number(part) for part in environ[name].split(","))]
    if environ.get("SLURM_JOB_GPUS"):  # this node's ids, such as 0,1,4-7
        return "gpu", [len(expand(f"[{environ['SLURM_JOB_GPUS']}]"))]
    return "", None


def _kind_of_gpus() -> str:
    """The kind of device that the scheduler counts as GPUs; some sites register NPUs so."""
    import importlib.util

    return "npu" if importlib.util.find_spec("torch_npu") else "cuda"


def _last_number(text: str) -> int:
    """Return 8 for `8` or `a100:8`."""
    number = text.rpartition(":")[2].strip()
    if not number.isdigit():
        raise ConfigError(f"SLURM's {text!r} is not a number of devices, such as 8 or a100:8")
    return int(number)


def _repeated(text: str) -> list[int]:
    """Return 72, 72, 36 for SLURM's `72(x2),36`; [] for any other form."""
    matches = [_REPEATED.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        return []
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def _by_name(names: Sequence[str], counts: Sequence[int] | None) -> dict[str, int | None]:
    """Assign a count to each name; a single count applies to all, another number to none."""
    if counts is not None and len(counts) == 1:
        return dict.fromkeys(names, counts[0])
    if counts is None or len(counts) != len(names):
        return dict.fromkeys(names)
    return dict(zip(names, counts, strict=True))


def _scontrol(*arguments: str) -> list[str]:
    """Return the output lines of scontrol; [] if it is missing or does not answer."""
    if (command := shutil.which("scontrol")) is None:
        return []
    try:
        output = subprocess.check_output(
            [command, *arguments], stderr=subprocess.DEVNULL, text=True, timeout=SCONTROL_SECONDS
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return []
    return output.splitlines()


def _from_pbs(environ: Mapping[str, str]) -> _Allocation:
    source = f"PBS job {environ.get('PBS_JOBID', '')}".strip()
    slots = Counter(_lines(environ["PBS_NODEFILE"], source))  # one line per CPU or MPI process
    if not slots:
        raise ConfigError(f"{source}: {environ['PBS_NODEFILE']} lists no node")
    devices: dict[str, int | None] = dict.fromkeys(slots)
    if path := environ.get("PBS_GPUFILE"):  # Torque: lines such as node1-gpu0
        counted = Counter(line.rpartition("-gpu")[0] for line in _lines(path, source))
        devices |= {name: counted[name] for name in slots if counted[name]}
    kind = _kind_of_gpus() if all(devices.values()) else None
    return _Allocation(source, devices, dict(slots), kind)


def _lines(path: str, source: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(
            f"{source}: {path} cannot be read: {error.strerror}; it exists on the job's first node"
        ) from None


def _from_volcano(environ: Mapping[str, str]) -> _Allocation:
    matches = {name: _VOLCANO.fullmatch(name) for name in environ}
    found = {match[1]: environ[name] for name, match in matches.items() if match}
    if not found:
        name = socket.gethostname()
        raise ConfigError(
            f"pod {name}: Kubernetes does not tell a pod the names of the others. Use Volcano, "
            "which does (plugin svc, VC_*_HOSTS), list the pods in an inventory (a StatefulSet has "
            "NAME-0.SERVICE and so on), or let KubeRay start them: deploy/rayjob.yaml"
        )
    tasks = sorted(found, key=lambda task: (not any(head in task for head in _HEADS), task))
    names = [name.strip() for task in tasks for name in found[task].split(",") if name.strip()]
    return _Allocation("Volcano job", dict.fromkeys(names), dict.fromkeys(names))
