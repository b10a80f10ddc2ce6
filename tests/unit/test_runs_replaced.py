"""Runs whose artifact is rebuilt by force, or removed at the wrong moment."""

import shutil
from pathlib import Path

from flows.config import Config
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import StageKey
from tasks.runs.history import artifact_of, read_runs
from tasks.runs.run import Run
from tests.recorded_runs import small_config

KEY = StageKey("probe", {}, {}, "code", {})


def probe(config: Config, content: str, forced: tuple[str, ...] = ()) -> Run:
    """A run of one stage with this output."""
    with Run.start(config, "probe", forced) as run:
        run.produce(
            "prepare_data", KEY, lambda folder: {"n": (folder / "content").write_text(content)}
        )
    return run


def test_a_forced_stage_does_not_change_earlier_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    with Run.start(config, "long") as first:  # still in progress while others build by force
        first.produce(
            "prepare_data", KEY, lambda folder: {"n": (folder / "content").write_text("one")}
        )
        runs = [first, probe(config, "two", ("prepare_data",)), probe(config, "never built")]
    assert [(run.folder / "prepare_data" / "content").read_text() for run in runs] == [
        "one",
        "two",
        "two",
    ]
    newest, second, oldest = read_runs(first.store.root)
    assert [run.stages["prepare_data"].cached for run in (oldest, second, newest)] == [
        False,
        False,
        True,
    ]
    assert [Path(run.stages["prepare_data"].artifact).name for run in (oldest, second, newest)] == [
        "1",
        "2",
        "2",
    ]
    found = artifact_of(oldest, "prepare_data")
    assert found is not None
    assert (Path(found.path) / "content").read_text() == "one"


def test_an_artifact_removed_before_it_is_recorded_is_rebuilt(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    probe(config, "one")
    with Run.start(config) as run:
        produce = run.store.produce

        def produce_then_remove(*arguments: object, **options: object) -> tuple[Artifact, bool]:
            run.store.produce = produce  # type: ignore[method-assign]
            artifact, cached = produce(*arguments, **options)  # type: ignore[arg-type]
            shutil.rmtree(artifact.path)
            return artifact, cached

        run.store.produce = produce_then_remove  # type: ignore[method-assign,assignment]
        made = run.produce(
            "prepare_data", KEY, lambda folder: {"n": (folder / "content").write_text("again")}
        )
    assert (Path(made.path) / "content").read_text() == "again"
    assert not run.stages["prepare_data"].cached
