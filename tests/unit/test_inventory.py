"""The inventory: its defaults, and the errors for invalid files."""

import re
from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from tasks.nodes.inventory import Inventory, read

ROOT = Path(__file__).resolve().parents[2]
SSH = "ssh -o BatchMode=yes -o ControlMaster=no -o ControlPath=none -o ConnectTimeout=10"


def _read(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "nodes.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path)


def test_the_example_is_four_nodes_of_16_dies() -> None:
    inventory = read(ROOT / "deploy/inventory.yaml")
    assert [host.name for host in inventory.in_order] == ["node1", "node2", "node3", "node4"]
    assert (inventory.num_devices, inventory.resource) == (4 * 16, "NPU")
    assert inventory.environment_of(inventory.hosts[0])["HCCL_CONNECT_TIMEOUT"] == "5400"


def test_a_name_is_enough(tmp_path: Path) -> None:
    inventory = _read(
        tmp_path,
        "hosts: [a, {name: b, devices: 4, env: {X: 1}}]\nhead: b\ndevices: 8\nenv: {X: 0, Y: 2}\n",
    )
    first, second = inventory.hosts
    assert [host.name for host in inventory.in_order] == ["b", "a"]
    assert (inventory.devices_of(first), inventory.devices_of(second)) == (8, 4)
    assert inventory.environment_of(second) == {"X": "1", "Y": "2"}
    assert (first.reached_at, inventory.project) == ("a", str(ROOT))


def test_names_and_variables_are_kept_as_written(tmp_path: Path) -> None:
    values = "{A: 0022, B: 2.10, C: 12:30, D: 1_2, E: 2026-01-31, F: '007', G: 0x1F}"
    hosts = f"[0123, {{name: 1_0, address: 10.0, devices: 2, env: {values}}}]"
    inventory = _read(tmp_path, f"hosts: {hosts}\nhead: 0123\ndevices: 1\nenv: {values}")
    first, second = inventory.in_order
    assert (first.name, second.name, second.reached_at) == ("0123", "1_0", "10.0")
    written = ["0022", "2.10", "12:30", "1_2", "2026-01-31", "007", "0x1F"]
    for host in (first, second):
        assert list(inventory.environment_of(host).values()) == written


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("shell: ssh", f"{SSH} -- 10.0.0.1"),
        ("user: me", f"{SSH} -l me -- 10.0.0.1"),
        ("shell: 'docker exec -i {host} sh -c'", "docker exec -i a sh -c"),
        ("shell: 'ssh -p 2222 {user}@{address}', user: me", "ssh -p 2222 me@10.0.0.1"),
    ],
)
def test_the_command_that_runs_a_line_on_a_host(tmp_path: Path, text: str, command: str) -> None:
    inventory = _read(tmp_path, f"{{hosts: [{{name: a, address: 10.0.0.1}}], devices: 1, {text}}}")
    assert inventory.command(inventory.hosts[0], "cd x && ls") == [*command.split(), "cd x && ls"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nodes.yaml: hosts is not set: list the machines, such as [node1, node2]"),
        ("serve: {port: 8000}\ntrain: {}", "is a recipe; this command needs an inventory"),
        ("hosts: node1\ndevices: 1", "hosts = 'node1' is invalid: it must be a list"),
        ("hosts: [a]", "devices is not set for a: set the number per host, such as 16"),
        ("hosts: [a, b, a]\ndevices: 1", "host a is listed twice"),
        ("hosts: [{name: a, address: fd00::1}, 'fd00:0::1']\ndevices: 1", "the same address"),
        ("hosts: [A, a]\ndevices: 1", "hosts A and a have the same address a"),
        ("hosts: [node1]\nhead: nod1\ndevices: 1", "head = nod1 is not among the hosts (did you"),
        ("hosts: [a]\ndevise: npu\ndevices: 1", "unknown key devise (did you mean device, "),
        ("hosts: [{name: a, interfase: x}]\ndevices: 1", "unknown key hosts.0.interfase (did you"),
        ("hosts: [[a]]\ndevices: 1", "a host must be a name or a section with keys"),
        ("hosts: [root@a]\ndevices: 1", "set the user with the key user"),
        ("hosts: ['-oProxyCommand=x']\ndevices: 1", "is not a host name or address"),
        ("hosts: ['a b']\ndevices: 1", "is not a host name or address"),
        ("hosts: [IP FOR MASTER NODE]\ndevices: 1", "still holds a placeholder"),
        ("hosts: [a]\ndevices: 1\nenv: {X: <NAME>}", "env.X = '<NAME>' still holds a placeholder"),
        ("hosts: [a]\ndevices: 1\nenv: {X: true}", "env.X = True is invalid: it must be text"),
        ("hosts: [a]\ndevices: 1\nenv: {GLOO_SOCKET_IFNAME: eth0}", "set the host's interface"),
        ("hosts: [a]\ndevices: 1\nenv: {RAY_AUTH_TOKEN: x}", "`dapo cluster up` sets itself"),
        ("hosts: [a]\ndevices: 1\nenv: {A-B: x}", "'A-B', which is not a valid variable name"),
        ("hosts: [a, b]\ndevices: 1\nshell: docker exec a sh -c", "everything on one machine"),
        ("hosts: [a]\ndevices: 1\nshell: ssh {name}", "shell has {name}, but only {host}"),
        ("hosts: [a]\ndevices: 1\nshell: ssh {user}@{host}", "{user}, but user is not set"),
        ("hosts: [a]\ndevices: 1\nshell: ssh '{host}", "is not a command: No closing quotation"),
        ("hosts: [a]\ndevices: 1\nport: 70000", "port = 70000 is invalid: it must be at"),
        ("hosts: [a]\ndevice: cpu\ndevices: 2\nnum_cpus: 2", "for nodes with accelerators"),
    ],
)
def test_an_invalid_inventory_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _read(tmp_path, text)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, "hosts: [a, root@b]\nprot: 1\nenv: {X: <NAME>}\n")
    assert [line.partition("nodes.yaml: ")[2][:14] for line in str(caught.value).splitlines()] == [
        "env.X = '<NAME",
        "'root@b' is no",
        "unknown key pr",
    ]
