"""`dapo cluster up`, `status` and `down` on network namespaces, or on loopback addresses without
them.
"""

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dapo_core.cluster.started import clusters_folder
from tasks.processes.supervisor import descendants
from tests.cluster_sites import PORT, Site, make_site, preflight, train
from tests.namespaces import FakeHost, NoNamespacesError, hosts
from tests.trainings import World

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def network() -> Iterator[list[FakeHost] | str]:
    """Two hosts, or why they cannot be created."""
    try:
        with hosts(2) as found:
            yield found
    except NoNamespacesError as error:
        yield str(error)


@pytest.fixture
def namespaces(network: list[FakeHost] | str) -> list[FakeHost]:
    if isinstance(network, str):
        pytest.skip(network)
    return network


@pytest.fixture(scope="module")
def site(network: list[FakeHost] | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts of the tests below, which share one cluster and run in order."""
    site = make_site(tmp_path_factory.mktemp("site"), network)
    yield site
    site.down()


def _refused(site: Site) -> str:
    """The error of an `up` that starts nothing."""
    result = site.up()
    message = str(result.exception)
    assert "nothing was started" in message, result.output
    assert not clusters_folder().exists() or not list(clusters_folder().iterdir())
    return message


def test_a_link_local_or_unreachable_address_is_refused(
    namespaces: list[FakeHost], tmp_path: Path
) -> None:
    first, second = namespaces
    listed = [{"name": first.name, "address": "169.254.7.1"}, {"name": second.name}]
    message = _refused(make_site(tmp_path, namespaces, hosts=listed))
    assert (
        f"{first.name}: 169.254.7.1: usb0 has only a link-local address, 169.254.7.1; this machine "
        "has " in message
    )
    assert f"{first.interface} ({first.address}" in message
    ask = (
        "from tasks.nodes.interface import interface_towards as towards; "
        "print(towards(['203.0.113.9']))"
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        first.run(f'{sys.executable} -c "{ask}"')
    assert (
        "203.0.113.9 cannot be reached: Network is unreachable; this machine has "
        in caught.value.stderr
    )
    first.run(f"ip addr add fd77::1/64 dev {first.interface} nodad")
    ask = (
        "from tasks.nodes.interface import interface_towards as towards; "
        "print(towards(['fd77::2']).address)"
    )
    assert first.run(f'{sys.executable} -c "{ask}"') == "fd77::1\n"


def test_interfaces_may_have_several_addresses_and_labels(namespaces: list[FakeHost]) -> None:
    first = namespaces[0]
    wire, label = first.interface, f"{first.interface}:1"
    first.run(
        f"ip addr add 198.19.0.1/24 dev {wire} label {label}; ip addr add 198.19.1.1/24 dev {wire}"
    )
    program = (
        "import sys; from tasks.nodes.interface import describe_interfaces, interface_towards\n"
        "for target, *words in map(str.split, sys.stdin):\n"
        "    found = interface_towards([target], *words)\n"
        "    print(found.name, found.address)\n"
        "print(describe_interfaces())"
    )
    asked = (
        f"198.19.0.9\n198.19.1.9\n198.19.1.9 {wire}\n198.19.1.9 {wire} 198.19.1.1\n198.19.1.9 "
        f"{label}\n"
    )
    *found, described = first.run(
        f'printf "{asked}" | {sys.executable} -c "{program}"'
    ).splitlines()
    own, other, labelled = f"{wire} {first.address}", f"{wire} 198.19.1.1", f"{label} 198.19.0.1"
    assert found == [labelled, other, own, other, labelled]
    assert f"{label} (198.19.0.1)" in described
    first.run(f"ip addr del 198.19.0.1/24 dev {wire}; ip addr del 198.19.1.1/24 dev {wire}")


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("eth7", "no interface eth7; this machine has docker0 (172.17.0.1"),
        ("spare0", "interface spare0 is down"),
        ("usb0", "interface usb0 has only the link-local address 169.254.7.2"),
        ("docker0", "its address 172.17.0.1 belongs to the head itself: set the host's interface"),
    ],
)
def test_a_wrong_interface_is_refused_with_the_reason(
    namespaces: list[FakeHost], tmp_path: Path, interface: str, words: str
) -> None:
    first, second = namespaces
    listed = [
        {"name": first.name, "address": first.address},
        {"name": second.name, "address": second.address, "interface": interface},
    ]
    assert f"{second.name}: {words}" in _refused(make_site(tmp_path, namespaces, hosts=listed))


def test_a_missing_host_and_a_taken_port_are_refused_together(
    namespaces: list[FakeHost], tmp_path: Path
) -> None:
    first, _ = namespaces
    listed = [
        {"name": first.name, "address": first.address},
        {"name": "dapo-none", "address": "198.18.0.99"},
    ]
    listens = (
        f"s = socket.create_server(({first.address!r}, {PORT})); print('open', flush=True); "
        "s.accept()"
    )
    program = f"import socket; {listens}"
    command = ["ip", "netns", "exec", first.name, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "open\n"
            message = _refused(make_site(tmp_path, namespaces, hosts=listed))
        finally:
            stranger.kill()
    assert f"{first.name}: port {PORT} is taken by pid {stranger.pid} of " in message
    assert "stop it, or set another port" in message
    assert "dapo-none: ip netns exec dapo-none sh -c ... exited with status 255" in message
    assert 'Cannot open network namespace "dapo-none"' in message


# One cluster from start to end, in order.


def test_a_blocked_port_is_named(namespaces: list[FakeHost], site: Site) -> None:
    first, second = namespaces
    with first.closed(PORT):
        result = site.up()
    message = str(result.exception)
    assert f"1 of 2 hosts have joined {first.address}:{PORT}; missing:\n" in message
    assert (
        f"  {second.name}: {first.address}:{PORT} did not answer within 8 s: a firewall drops"
        in message
    )
    status = site.status()
    assert [status[host.name]["state"] for host in namespaces] == ["up", "not started"]


def test_up_starts_the_missing_host_and_a_second_up_changes_nothing(
    network: list[FakeHost] | str, site: Site
) -> None:
    head, other = site.names
    result = site.up()
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    assert f"{other}: started, " in result.output
    # it was running already
    assert f"{head}: started, " in result.output or not isinstance(network, str)
    status = site.status()
    assert [host["state"] for host in status.values()] == ["up", "up"]
    assert [(host["devices"], host["free"]) for host in status.values()] == [(1, 1), (1, 1)]
    assert len({host["node_id"] for host in status.values()}) == 2
    if not isinstance(network, str):
        assert [(host["interface"], host["address"]) for host in status.values()] == [
            (host.interface, host.address) for host in network
        ]
    began = {host["started_at"] for host in status.values()}
    result = site.up()
    assert f"{head}: already running" in result.output
    assert f"{other}: already running" in result.output
    assert (
        f"dapo run CONFIG --set train.ray_address={status[head]['address']}:{PORT}" in result.output
    )
    assert {host["started_at"] for host in site.status().values()} == began


def test_the_token_is_private_and_on_no_command_line(site: Site) -> None:
    [token] = clusters_folder().glob("*/token")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)] == [0o600, 0o700]
    secret = token.read_bytes()
    assert len(secret) == 64
    pids = [pid for record in _records() for pid in (record["pid"], *descendants(record["pid"]))]
    assert len(pids) > 8
    assert not [pid for pid in pids if secret in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert secret not in b"".join(
        path.read_bytes() for path in site.store.rglob("*") if path.is_file()
    )
    for record in _records():
        assert stat.S_IMODE(Path(record["folder"]).stat().st_mode) == 0o700


def test_a_recipe_trains_across_two_hosts(
    namespaces: list[FakeHost], site: Site, world: World, tmp_path: Path
) -> None:
    first = namespaces[0]
    before = [host.sent_bytes() for host in namespaces]
    assert "is used without a token" not in train(first, first, world, tmp_path / "output")
    sent = [host.sent_bytes() - start for host, start in zip(namespaces, before, strict=True)]
    assert min(sent) > 100_000, f"gradients and weights of two ranks crossed the wire: {sent} bytes"


def test_the_preflight_names_the_pair_of_hosts_with_a_closed_port(
    namespaces: list[FakeHost], site: Site, tmp_path: Path
) -> None:
    first, second = namespaces
    last = 19999  # of the worker ports; the preflight starts there
    with second.closed(last):
        found = preflight(first, first, tmp_path)
    assert not [check for check, status in found if status == "fail" and check != "network"], found
    network = found["network", "fail"]
    assert first.address in network["where"].split(" to ")[0]
    assert second.address in network["where"].split(" to ")[1]
    assert network["found"] == (
        f"no connection to {second.address} port {last} (Ray's workers, 10002-{last}; Ray's "
        f"address, GLOO_SOCKET_IFNAME={second.interface}): no answer within 3 s"
    )
    assert ("all-reduce", "ok") in found


def test_status_reports_a_partition(namespaces: list[FakeHost], site: Site) -> None:
    first, second = namespaces
    with second.cut_off():
        result = site.type("status")
    assert result.exit_code == 1
    line = f"{second.name}: {first.address}:{PORT} did not answer within 8 s"
    assert line in result.output


def test_down_ends_what_was_started_and_nothing_else(
    network: list[FakeHost] | str, site: Site
) -> None:
    records = _records()
    assert len(records) == 2
    ours = {
        pid: psutil.Process(pid)
        for record in records
        for pid in (record["pid"], *descendants(record["pid"]))
    }
    place = [] if isinstance(network, str) else ["ip", "netns", "exec", network[0].name]
    # Another process on a host that looks like Ray; `ray stop` would end it.
    command = [
        *place,
        sys.executable,
        "-c",
        "import time; time.sleep(300)",
        "raylet/raylet",
        "--node_ip_address=x",
    ]
    stranger = subprocess.Popen(command)
    try:
        if not isinstance(network, str):  # an unreachable host keeps its record
            known = yaml.safe_load(site.inventory.read_text())
            enter = 'exec ip netns exec $0 sh -c "$1"'
            away = {**known, "shell": f"sh -c '[ $0 = {site.names[0]} ] && {enter}' {{host}}"}
            site.inventory.write_text(yaml.safe_dump(away))
            result = site.down()
            assert result.exit_code == 1
            assert f"stopped {site.names[0]}: " in result.output
            assert f"{site.names[1]}: not stopped: sh -c " in result.output
            assert [known["host"] for known in _records()] == [site.names[1]]
            site.inventory.write_text(yaml.safe_dump(known))
        result = site.down()
        assert result.exit_code == 0, result.output
        assert f"stopped {site.names[1]}: " in result.output
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    left = [process for process in ours.values() if process.is_running()]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert [record["folder"] for record in records if Path(record["folder"]).exists()] == []
    assert list(clusters_folder().iterdir()) == []
    assert list(site.store.rglob("*.json")) == []
    assert f"nothing from {site.inventory} is running" in site.down().output


def _records() -> list[dict[str, Any]]:
    """The records of all hosts."""
    files = sorted(clusters_folder().glob("*/*/record.json"))
    return [{**json.loads(path.read_text()), "host": path.parent.name} for path in files]
