"""`dapo cluster up`, `status` and `down`: Ray on the machines of an inventory."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import JsonOption, StoreOption
from flows.services import DEFAULT_STORE, store_option

if TYPE_CHECKING:
    from tasks.nodes.status import HostStatus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
cluster = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: dapo cluster up nodes.yaml; dapo cluster down nodes.yaml",
)
app.add_typer(
    cluster,
    name="cluster",
    help="Start, inspect and stop Ray on the machines of an inventory.",
    short_help="Start, inspect and stop Ray on several machines.",
)
InventoryArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="INVENTORY",
        help="Machines, in the format of deploy/inventory.yaml; default: those of this SLURM, PBS "
        "or Volcano job.",
    ),
]


@cluster.command(
    epilog="Example: dapo cluster up nodes.yaml",
    short_help="Start Ray on every machine that lacks it.",
)
def up(inventory: InventoryArgument = None, store: StoreOption = DEFAULT_STORE) -> None:
    """Start Ray on every machine of the inventory, head first, and wait until all have joined.

    Before anything starts, each machine is checked: same code, Python and Ray; the interface that
    reaches the head; a free port; the devices. Nodes that already run are left alone.
    """
    from tasks.nodes.launch import bring_up
    from tasks.nodes.scheduler import machines_of

    machines, source = machines_of(inventory, os.environ)
    again = _typed(source)
    stop = f"dapo cluster down{again}{store_option(store)}"
    try:
        cluster = bring_up(machines, store, source or "the job's nodes")
    except KeyboardInterrupt:
        said = f"interrupted: Ray keeps running where it was started; `{stop}` stops it"
        typer.echo(said, err=True)
        raise
    for name, known in cluster.hosts.items():
        state = "started" if name in cluster.started else "already running"
        place = f"{known['address']} on {known['name']}, node {known['node_id'][:8]}"
        typer.echo(f"{name}: {state}, {place}")
    address = cluster.address  # YAML reads [...] as a list
    key = f"train.ray_address={address}"
    key = f"'train.ray_address=\"{address}\"'" if address.startswith("[") else key
    num_devices = f"{machines.num_devices} {machines.resource}"
    typer.echo(
        f"Ray at {address}: {len(cluster.hosts)} hosts, {num_devices}\n"
        f"On any host:         dapo doctor CONFIG --set {key}\n"
        f"                     dapo run CONFIG --set {key}\n"
        "Training finds the token by itself. Other programs need:\n"
        "                     export RAY_AUTH_MODE=token "
        f"RAY_AUTH_TOKEN_PATH={shlex.quote(cluster.token_path)}\n"
        f"Inspect, stop:       dapo cluster status{again}; {stop}"
    )


@cluster.command(
    epilog="Example: dapo cluster status nodes.yaml --json",
    short_help="Show what runs on every machine and what is lost.",
)
def status(inventory: InventoryArgument = None, is_json: JsonOption = False) -> None:
    """Show every machine's interface, address, Ray node, devices, free devices, and start time.

    Exit status 1 if a machine is missing.
    """
    from flows.tables import print_json
    from tasks.nodes.scheduler import machines_of
    from tasks.nodes.status import UP, look_at

    machines, _ = machines_of(inventory, os.environ)
    hosts = look_at(machines)
    if is_json:
        print_json([asdict(host) for host in hosts])
    else:
        _print_hosts(hosts, machines.resource)
    if any(host.state != UP for host in hosts):
        raise typer.Exit(1)


@cluster.command(
    epilog="Example: dapo cluster down nodes.yaml",
    short_help="Stop what `dapo cluster up` started, and nothing else.",
)
def down(inventory: InventoryArgument = None, store: StoreOption = DEFAULT_STORE) -> None:
    """Stop what `dapo cluster up` started on every machine: only its own processes and folders.

    Unreachable machines are listed and stay in the store's record; the exit status is then 1.
    """
    from tasks.nodes.record import others_started
    from tasks.nodes.scheduler import machines_of
    from tasks.nodes.status import take_down

    machines, source = machines_of(inventory, os.environ)
    ending = take_down(machines, store)
    for line in ending.ended:
        typer.echo(f"stopped {line}")
    for name, reason in ending.left.items():
        typer.echo(f"{name}: not stopped: {reason}")
    if not ending.ended and not ending.left:
        typer.echo(f"nothing from {source or 'this job'} is running")
        if others := others_started(store, machines):
            typer.echo(f"{store} has other clusters: {', '.join(others)}")
    if ending.left:
        again = f"dapo cluster down{_typed(source)}{store_option(store)}"
        typer.echo(f"run `{again}` again once they are reachable")
        raise typer.Exit(1)


def _print_hosts(hosts: Sequence[HostStatus], resource: str) -> None:
    from rich.table import Table

    from flows.tables import print_table

    table = Table("host", "state", "interface", "address", "node", resource, "free", "since")
    for host in hosts:
        devices = (f"{host.devices:g}", f"{host.free:g}") if host.node_id else ("", "")
        place = (host.interface, host.address, host.node_id[:8])
        table.add_row(host.host, host.state, *place, *devices, _since(host.started_at))
    print_table(table)
    for host in hosts:
        if host.reason:
            typer.echo(f"{host.host}: {host.reason}")


def _since(started_at: float | None) -> str:
    if started_at is None:
        return ""
    began = datetime.datetime.fromtimestamp(started_at, datetime.timezone.utc)
    up_for = datetime.datetime.now(datetime.timezone.utc) - began
    return f"{began:%Y-%m-%d %H:%M} UTC ({str(up_for).partition('.')[0]})"


def _typed(source: str) -> str:
    """Return an inventory file as an argument, "" for the job's own nodes."""
    return f" {shlex.quote(source)}" if source else ""
