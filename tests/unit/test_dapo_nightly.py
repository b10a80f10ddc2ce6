"""What a night decides before it begins: its seed, and whether it comes too late."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml

from flows.config import load_config
from flows.dapo_nightly import check_in_time, seed_of_night
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.data.prepare import build_dataset
from tasks.runs.run import RunSkipped

DUE = datetime.datetime(2026, 1, 31, 2, 0, tzinfo=datetime.timezone.utc)


def test_a_night_is_dropped_when_it_comes_too_late() -> None:
    for hours in (-0.1, 0.0, 2.9):
        check_in_time(DUE, DUE + datetime.timedelta(hours=hours), 3.0)
    for hours in (3.1, 50.0):
        with pytest.raises(RunSkipped, match=rf"started {hours:.1f} hours late, due 2026-01-31 02:00 UTC"):
            check_in_time(DUE, DUE + datetime.timedelta(hours=hours), 3.0)


def test_each_night_has_the_seed_of_its_date() -> None:
    assert seed_of_night(DUE, fresh_seed=True) == ("run.seed=20484",)
    assert seed_of_night(DUE + datetime.timedelta(days=1), fresh_seed=True) == ("run.seed=20485",)
    assert seed_of_night(DUE, fresh_seed=False) == ()
    shanghai = DUE.astimezone(datetime.timezone(datetime.timedelta(hours=8)))
    assert seed_of_night(shanghai, fresh_seed=True) == seed_of_night(DUE, fresh_seed=True)  # by Greenwich's date


def test_the_nights_as_deployed_have_the_same_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an item of one night can be compared with that of another."""
    monkeypatch.chdir(PROJECT_ROOT)
    deployments = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
    [given] = [each["parameters"] for each in deployments if each["name"] == "dapo-nightly"]
    written = []
    for night in (DUE, DUE + datetime.timedelta(days=1)):
        seed = seed_of_night(night, given["fresh_seed"])
        folder = tmp_path / f"{night:%d}"
        folder.mkdir()
        few = ("data.arithmetic.num_train=40", "data.arithmetic.num_eval=20")
        build_dataset(load_config(given["config"], (*given["overrides"], *few, *seed)), folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert {"train.parquet", "eval.parquet"} < set(written[0])
