"""What a night decides before it begins: its seed, and whether it comes too late."""

from __future__ import annotations

import datetime

import pytest

from dapo_core.errors import RunSkipped
from flows.dapo_nightly import check_in_time, seed_of_night

DUE = datetime.datetime(2026, 1, 31, 2, 0, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    ("hours", "is_late"), [(-0.1, False), (0.0, False), (2.9, False), (3.1, True), (50.0, True)]
)
def test_a_night_is_dropped_when_it_comes_too_late(hours: float, is_late: bool) -> None:
    now = DUE + datetime.timedelta(hours=hours)
    if not is_late:
        check_in_time(DUE, now, 3.0)
        return
    with pytest.raises(RunSkipped, match=rf"came {hours:.1f} hours late, due 2026-01-31 02:00 UTC"):
        check_in_time(DUE, now, 3.0)


def test_each_night_has_the_seed_of_its_date() -> None:
    assert seed_of_night(DUE, fresh_seed=True) == ("run.seed=20484",)
    assert seed_of_night(DUE + datetime.timedelta(days=1), fresh_seed=True) == ("run.seed=20485",)
    assert seed_of_night(DUE, fresh_seed=False) == ()


def test_the_date_is_that_of_greenwich_wherever_the_clock_is() -> None:
    shanghai = DUE.astimezone(datetime.timezone(datetime.timedelta(hours=8)))
    assert seed_of_night(shanghai, fresh_seed=True) == seed_of_night(DUE, fresh_seed=True)
