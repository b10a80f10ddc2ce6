"""Render files that start Ray on the hosts of an inventory, from the templates beside this file."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError
from redaction import is_secret
from tasks.config import ChainConfig
from tasks.nodes.inventory import PROJECT, Host, Inventory
from tasks.nodes.launch import ray_options
from tasks.preflight.environment import MIN_OPEN_FILES, wanted_alike
from tasks.preflight.interfaces import INTERFACE_VARIABLES

TEMPLATES = Path(__file__).parent / "templates"
# Schedulers' names of the devices: SLURM's generic resource (sites may rename it), and the resource
# of the Kubernetes device plugins (NVIDIA's; Ascend's, for A2 and A3 alike).
_GRES = {"cuda": "gpu", "npu": "npu"}
_PLUGINS = {"cpu": "cpu", "cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
# Host paths that vllm-ascend's documentation mounts: the driver with hccn_tool, npu-smi and its
# library, the install record; with several nodes also the addresses of the NPUs' ports.
_ASCEND_PATHS = {
    "/usr/local/Ascend/driver": "Directory",
    "/usr/local/dcmi": "Directory",
    "/usr/local/bin/npu-smi": "File",
    "/etc/ascend_install.info": "File",
}
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
RECIPE_FOLDER = "/etc/dapo"  # holds the recipe in the head's pod
STOP_MARGIN_SECONDS = 60  # for a stopped run to end, beyond flow.stop_seconds
_DEVICE_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")  # of sbatch
_MAX_SIGNAL_SECONDS = 65_535  # of sbatch's --signal
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of a file and a job
_NOT_IN_KEYS = re.compile(r"[^-._a-zA-Z0-9]")  # characters that ConfigMap keys cannot have
_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")  # RayJobs allow 47 characters


@dataclass(frozen=True)
class Site:
    """The files' source and the site's own `KEY=VALUE` settings."""

    source: str
    words: Sequence[str] = ()

    def of_kuberay(self) -> dict[str, str | None]:
        """Return the settings for KubeRay: image, claim, queue, cpu, memory; raises ConfigError for
        other keys.
        """
        values: dict[str, str | None] = {
            "image": None,
            "claim": "dapo-store",
            "queue": None,
            "cpu": None,
            "memory": None,
        }
        for word in self.words:
            key, _, value = word.partition("=")
            if key not in values or not value:
                raise ConfigError(
                    f"--site {word}: with --kuberay the keys are {', '.join(values)}, as KEY=VALUE"
                )
            values[key] = value
        return values

    def remarks_of_stale_scripts(self, folder: Path, names: Collection[str]) -> list[str]:
        """Name other scripts in a folder whose header says that they were rendered from the same
        source.
        """
        header = f"\n# Rendered from {self.source} by `dapo cluster render`: ".encode()
        others = (path for path in sorted(folder.glob("*.sh")) if path.name not in names)
        stale = [path.name for path in others if header in path.read_bytes()]
        hosts = (
            f"{folder}: these scripts belong to hosts that are no longer in {self.source}: "
            f"{', '.join(stale)}"
        )
        return [f"{hosts}; stop Ray there, then remove them"] if stale else []


@dataclass(frozen=True)
class Recipe:
    """The recipe to run, and its overrides `section.key=value`."""

    path: str
    overrides: Sequence[str] = ()

    @property
    def words(self) -> str:
        """The arguments of `dapo run`, quoted for a shell."""
        return shlex.join(
            [self.path, *(word for change in self.overrides for word in ("--set", change))]
        )


def render_scripts(
    inventory: Inventory, config: TrainingConfig, site: Site, recipe: Recipe | None = None
) -> dict[str, str]:
    """Render a shell script per host, by file name, that takes `start` or `stop`."""
    _require_devices(inventory, config, recipe)
    order = inventory.in_order
    shared = {
        **_shared(inventory, site),
        "head": inventory.head_host,
        "names": [host.name for host in order],
        "hosts": [host.reached_at for host in order],
    }
    files = {}
    for host in order:
        is_head = host is inventory.head_host
        peers = order[1:] if is_head and len(order) > 1 else order[:1]
        files[f"{host.name}.sh"] = _template("node.sh").render(
            **shared,
            host=host,
            is_head=is_head,
            peers=[peer.reached_at for peer in peers],
            devices=inventory.devices_of(host),
            environment=_shell_environment(inventory, host, config),
            options=shlex.join(ray_options(inventory, host)),
        )
    return files


def render_slurm(
    inventory: Inventory, config: ChainConfig, site: Site, recipe: Recipe
) -> dict[str, str]:
    """Render a batch file that starts Ray on as many nodes as the inventory has and runs the
    recipe.

    Raises ConfigError if the inventory's hosts differ: all nodes of an allocation are requested
    alike.
    """
    _require_devices(inventory, config, recipe)
    host = _one_for_all(inventory, "--slurm", "devices", "env", "interface")
    directives = [word.removeprefix("--") for word in site.words]
    has_devices = any(line.partition("=")[0] in _DEVICE_OPTIONS for line in directives)
    if not _NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name={config.run.name} names a file and a job, which allow letters, digits and "
            "._- only: use "
            "--set run.name=math or the like"
        )
    stop_seconds, most = config.flow.stop_seconds, _MAX_SIGNAL_SECONDS - STOP_MARGIN_SECONDS
    if stop_seconds > most:
        raise ConfigError(
            f"flow.stop_seconds={stop_seconds:.10g} is too long: SLURM signals a job at most "
            f"{most} s before its "
            f"time limit; --set flow.stop_seconds={most} or less"
        )
    name = f"{config.run.name}.sbatch"
    text = _template("job.sbatch").render(
        **_shared(inventory, site),
        file=name,
        name=config.run.name,
        config=recipe.path,
        recipe=recipe.words,
        gres=None if has_devices else _GRES.get(inventory.device),
        devices=inventory.devices_of(host),
        directives=directives,
        signal_seconds=math.ceil(stop_seconds) + STOP_MARGIN_SECONDS,
        store=config.store.path,
        interface=host.interface,
        environment=_shell_environment(inventory, host, config),
        options=shlex.join(ray_options(inventory, host)),
    )
    return {name: text}


def render_kuberay(
    inventory: Inventory,
    config: TrainingConfig,
    site: Site,
    recipe: Recipe | None,
    stop_seconds: float,
) -> dict[str, str]:
    """Render a RayCluster, or with a recipe a RayJob that runs it, with one pod per host of the
    inventory.

    Raises ConfigError if the inventory's hosts differ, and for a name that Kubernetes rejects.
    """
    _require_devices(inventory, config, recipe)
    host = _one_for_all(inventory, "--kuberay", "devices", "env")
    place = site.of_kuberay()
    name = config.run.name.lower().replace("_", "-") if recipe else "dapo"
    if not _KUBERNETES_NAME.fullmatch(name):
        raise ConfigError(
            f"run.name={config.run.name} becomes {name}, which Kubernetes rejects as a name; "
            "rename the run"
        )
    options = ray_options(inventory, host)
    parameters = dict(option.removeprefix("--").split("=", 1) for option in options)
    if "resources" in parameters:  # KubeRay copies the value into a command line unquoted
        parameters["resources"] = shlex.quote(parameters["resources"])
    path = f"{RECIPE_FOLDER}/{_NOT_IN_KEYS.sub('-', Path(recipe.path).name)}" if recipe else None
    run = f"dapo run CONFIG --set train.ray_address=auto --set store.path={STORE}"
    text = _template("kuberay.yaml").render(
        **_shared(inventory, site),
        file=f"{name}.yaml",
        name=name,
        config=recipe.path if recipe else None,
        recipe=replace(recipe, path=path).words if recipe and path else None,
        recipe_path=path,
        recipe_text=Path(recipe.path).read_text(encoding="utf-8") if recipe else None,
        in_pod=f"bash -c {shlex.quote(f'{inventory.setup}; {run}')}" if inventory.setup else run,
        remarks=[
            textwrap.wrap(each, 115)
            for each in remarks_of_kuberay(inventory, config if recipe else None)
        ],
        start_parameters=parameters,
        limits={
            _PLUGINS[inventory.device]: inventory.devices_of(host),
            **{key: place[key] for key in ("cpu", "memory") if place[key]},
        },
        host_paths=_host_paths(inventory),
        environment=_plain_environment(inventory, host, config),  # a pod has one interface
        stop_seconds=int(stop_seconds),
        grace_seconds=int(stop_seconds) + STOP_MARGIN_SECONDS,
        ray_version=importlib.metadata.version("ray"),
        image=place["image"] or f"dapo:{inventory.device}",
        claim=place["claim"],
        queue=place["queue"],
        store=STORE,
    )
    return {f"{name}.yaml": text}


def _host_paths(inventory: Inventory) -> dict[str, str]:
    """Return the paths that a pod mounts from its node, with their type."""
    if inventory.device != "npu":
        return {}
    return {**_ASCEND_PATHS, **({"/etc/hccn.conf": "File"} if len(inventory.hosts) > 1 else {})}


def _require_devices(inventory: Inventory, config: TrainingConfig, recipe: Recipe | None) -> None:
    """Raise ConfigError if a recipe needs more devices than the inventory has, or others."""
    if recipe is None:
        return
    if config.train.device != inventory.device:
        raise ConfigError(
            f"the recipe has train.device={config.train.device}, but the inventory has "
            f"device={inventory.device}; "
            "make them equal"
        )
    if config.train.backend == "own" and config.num_devices > inventory.num_devices:
        raise ConfigError(
            f"the recipe needs {config.num_devices} {inventory.resource}, but the inventory has "
            f"{inventory.num_devices}: add hosts, or lower "
            f"train.num_ranks={config.train.num_ranks} and "
            f"rollout.num_workers={config.rollout.num_workers}"
        )


def _shared(inventory: Inventory, site: Site) -> dict[str, Any]:
    return {
        "source": site.source,
        "num_nodes": len(inventory.hosts),
        "num_devices": inventory.num_devices,
        "resource": inventory.resource,
        "project": inventory.project,
        "setup": inventory.setup,
        "python": inventory.python,
        "port": inventory.port,
        "seconds": inventory.start_seconds,
        "head_options": f"--head --port={inventory.port} --include-dashboard={str(inventory.dashboard).lower()}",
        "open_files": MIN_OPEN_FILES,
    }


def _one_for_all(inventory: Inventory, option: str, *keys: str) -> Host:
    """Return a host that represents all; raises ConfigError if they differ in one of the keys."""
    first, *others = (
        host.model_copy(update={"devices": inventory.devices_of(host)})
        for host in inventory.in_order
    )
    for host in others:
        for key in keys:
            if (here := getattr(host, key)) != (there := getattr(first, key)):
                raise ConfigError(
                    f"{option} starts all nodes alike, but {key} is {here or 'unset'} for "
                    f"{host.name} and "
                    f"{there or 'unset'} for {first.name}; make them equal, or render --scripts"
                )
    return first


def _shell_environment(inventory: Inventory, host: Host, config: TrainingConfig) -> dict[str, str]:
    """Return shell assignments: the node's interface and address, the table's variables, the
    inventory's.
    """
    named = {
        name: form.format("$INTERFACE")
        for name, form in INTERFACE_VARIABLES[inventory.device].items()
    }
    of_node = {name: f'"{value}"' for name, value in {**named, "VLLM_HOST_IP": "$ADDRESS"}.items()}
    return {
        **of_node,
        **{
            name: shlex.quote(value)
            for name, value in _plain_environment(inventory, host, config).items()
        },
    }


def _plain_environment(inventory: Inventory, host: Host, config: TrainingConfig) -> dict[str, str]:
    """Return the variables that do not depend on the node's interface."""
    return {**wanted_alike(config), **inventory.environment_of(host)}


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "quote_path": _quote_path, "json": json.dumps}
    return environment.get_template(name)


def _quote_path(path: str) -> str:
    """Quote a path for a shell, with a leading ~ left to the host's shell."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def remarks_of_env(inventory: Inventory) -> list[str]:
    """Warn of variables that look like secrets: the rendered files contain their values in clear
    text.
    """
    variables = {
        name
        for host in inventory.hosts
        for name, value in inventory.environment_of(host).items()
        if is_secret(name, value)
    }
    if not variables:
        return []
    return [
        f"env has {', '.join(sorted(variables))}, which the files contain in clear text: remove it "
        "from env and "
        "set it on the nodes, or with valueFrom.secretKeyRef in pods."
    ]


def remarks_of_kuberay(inventory: Inventory, config: TrainingConfig | None) -> list[str]:
    """List inventory keys that pods do not use, and the recipe's files that pods do not have."""
    used = {
        name for host in inventory.hosts for name in ("address", "interface") if getattr(host, name)
    }
    used |= {
        name
        for name, field in Inventory.model_fields.items()
        if getattr(inventory, name) != field.default
    }
    unused = [
        f"{', '.join(keys)} ({reason})"
        for reason in dict.fromkeys(_UNUSED.values())
        if (keys := [key for key in _UNUSED if key in used and _UNUSED[key] == reason])
    ]
    left_out = (
        [f"Pods do not use these keys of the inventory: {'; '.join(unused)}."] if unused else []
    )
    return left_out + (_remarks_of_files(config) if config is not None else [])


def _remarks_of_files(config: TrainingConfig) -> list[str]:
    return [
        f"{key}={path} is not in the pods: copy it into the claim, and set the key to its path "
        f"below {STORE}."
        for key, path in _named_files(config.model_dump(exclude=_PATHS_IN_PODS))
        if not Path(path).is_relative_to(STORE) and not _is_in_image(Path(path))
    ]


def _named_files(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys and values of files and folders in a configuration."""
    if isinstance(value, str):
        is_path = value.startswith(("/", "./", "../", "~")) or (
            key.endswith("path") and ":" not in value
        )
        if is_path or (("/" in value or Path(value).suffix) and os.path.exists(value)):
            yield key, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for child, child_value in items:
            yield from _named_files(child_value, f"{key}.{child}" if key else str(child))


def _is_in_image(path: Path) -> bool:
    """True for a relative path of a file in configs/, which the images contain."""
    return path.parts[:1] == ("configs",) and (PROJECT / path).exists()
