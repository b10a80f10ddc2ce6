"""Nightly runs: seed, date, and lateness."""

import datetime
from pathlib import Path

import pytest
import yaml
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows.config import load_config
from flows.dapo_nightly import check_in_time, seed_of_night
from flows.recipe_flow import night_of
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.data.prepare import build_dataset
from tasks.runs.run import RunSkipped

DUE = datetime.datetime(2026, 1, 31, 2, 0, tzinfo=datetime.timezone.utc)


def test_a_late_nightly_run_is_skipped() -> None:
    for hours in (-0.1, 0.0, 2.9):
        check_in_time(DUE, DUE + datetime.timedelta(hours=hours), 3.0)
    for hours in (3.1, 50.0):
        with pytest.raises(
            RunSkipped, match=rf"started {hours:.1f} hours late, due 2026-01-31 02:00 UTC"
        ):
            check_in_time(DUE, DUE + datetime.timedelta(hours=hours), 3.0)


def test_each_night_is_seeded_with_its_date() -> None:
    assert seed_of_night(DUE.date()) == ("run.seed=20484",)
    assert seed_of_night(DUE.date() + datetime.timedelta(days=1)) == ("run.seed=20485",)


def test_nights_around_a_clock_change_have_different_dates() -> None:
    """At 01:30 in Berlin, they are 23 hours apart in spring and 25 in autumn."""

    def scheduled(timezone: str | None, is_active: bool) -> DeploymentSchedule:
        return DeploymentSchedule(
            schedule=CronSchedule(cron="30 1 * * *", timezone=timezone), active=is_active
        )

    schedules = [scheduled("Asia/Shanghai", False), scheduled("Europe/Berlin", True)]
    due = ("2026-03-29T00:30Z", "2026-03-29T23:30Z", "2026-10-24T23:30Z", "2026-10-26T00:30Z")
    times = [datetime.datetime.fromisoformat(each.replace("Z", "+00:00")) for each in due]
    nights = [str(night_of(time, schedules)) for time in times]
    assert nights == ["2026-03-29", "2026-03-30", "2026-10-25", "2026-10-26"]
    assert str(night_of(times[1], schedules[:1])) == "2026-03-30"  # paused
    for without_zone in ([], [scheduled(None, True)]):
        assert str(night_of(times[1], without_zone)) == "2026-03-29"


def test_deployed_nightly_runs_use_the_same_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nights could not be compared item by item."""
    monkeypatch.chdir(PROJECT_ROOT)
    deployments = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
    [given] = [each["parameters"] for each in deployments if each["name"] == "dapo-nightly"]
    written = []
    assert given["fresh_seed"]
    for night in (DUE, DUE + datetime.timedelta(days=1)):
        seed = seed_of_night(night.date())
        folder = tmp_path / f"{night:%d}"
        folder.mkdir()
        few = ("data.arithmetic.num_train=40", "data.arithmetic.num_eval=20")
        build_dataset(load_config(given["config"], (*given["overrides"], *few, *seed)), folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert {"train.parquet", "eval.parquet"} < set(written[0])
