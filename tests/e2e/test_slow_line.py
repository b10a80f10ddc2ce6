"""Two hosts joined by a slow line: a cluster starts over it, and its checks find no faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_sites import Site, make_site, preflight
from tests.namespaces import FakeHost, NoNamespacesError, hosts

# seconds one way: another city, a satellite, a network in trouble
FAR, VERY_FAR, FARTHEST = (0.03, 0.25, 2.0)


@pytest.fixture(scope="module")
def far() -> Iterator[list[FakeHost]]:
    """Two hosts, the second at the end of a slow line."""
    try:
        with hosts(2, are_slow=True) as found:
            yield found
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def site(
    far: list[FakeHost], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A cluster started over the line."""
    site = make_site(tmp_path_factory.mktemp("site"), far)
    far[1].slow_down(FAR)
    result = site.up()
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    yield site
    far[1].slow_down(0.0)
    site.down()


def test_the_preflight_passes_over_a_slow_line_that_loses_packets(
    far: list[FakeHost], site: Site, tmp_path: Path
) -> None:
    far[1].slow_down(FAR, loss=0.02)
    found = preflight(far[0], far[0], tmp_path)
    assert not [check for check, status in found if status == "fail"], found
    assert {("network", "ok"), ("all-reduce", "ok"), ("clock", "ok")} <= set(found)


def test_a_very_distant_host_can_join(far: list[FakeHost], site: Site, tmp_path: Path) -> None:
    """It takes longer than the ten seconds after which a dead address is given up."""
    far[1].slow_down(VERY_FAR)
    found = preflight(far[1], far[0], tmp_path, is_whole=False)
    assert ("Ray", "ok") in found, found
    assert ("Ray", "fail") not in found, found


def test_a_round_trip_of_four_seconds_is_not_taken_for_a_firewall(
    far: list[FakeHost], site: Site
) -> None:
    far[1].slow_down(FARTHEST)
    assert [(host["state"], host["reason"]) for host in site.status().values()] == [
        ("up", ""),
        ("up", ""),
    ]
