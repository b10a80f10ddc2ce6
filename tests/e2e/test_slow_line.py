"""Two hosts on a line that is slow: a cluster starts over it, its checks say what is so, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_sites import Site, make_site, preflight
from tests.namespaces import FakeHost, NoNamespacesError, hosts

FAR, VERY_FAR, FARTHEST = 0.03, 0.25, 2.0  # seconds one way: another city, a satellite, a network in trouble


@pytest.fixture(scope="module")
def far() -> Iterator[list[FakeHost]]:
    """Two hosts, the second at the end of a slow line."""
    try:
        with hosts(2, are_slow=True) as found:
            yield found
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def site(far: list[FakeHost], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster that was started over the line."""
    site = make_site(tmp_path_factory.mktemp("site"), far)
    far[1].slow_down(FAR)
    result = site.up()
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    yield site
    far[1].slow_down(0.0)
    site.down()


def test_all_is_well_over_a_line_that_is_far_and_loses_packets(
    far: list[FakeHost], site: Site, tmp_path: Path
) -> None:
    far[1].slow_down(FAR, loss=0.02)
    found = preflight(far[0], far[0], tmp_path)
    assert not [check for check, status in found if status == "fail"], found
    assert {("network", "ok"), ("all-reduce", "ok"), ("clock", "ok")} <= set(found)


def test_a_host_that_is_very_far_is_answered(far: list[FakeHost], site: Site, tmp_path: Path) -> None:
    """It takes more than the ten seconds after which an address where nothing listens is given up."""
    far[1].slow_down(VERY_FAR)
    found = preflight(far[1], far[0], tmp_path, is_whole=False)
    assert ("Ray", "ok") in found, found
    assert ("Ray", "fail") not in found, found


def test_a_round_trip_of_four_seconds_is_no_firewall(far: list[FakeHost], site: Site) -> None:
    far[1].slow_down(FARTHEST)
    assert [(host["state"], host["reason"]) for host in site.status().values()] == [("up", ""), ("up", "")]
