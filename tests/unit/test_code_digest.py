"""The code digest of a stage covers every file that it runs, and none without an effect."""

from pathlib import Path

import pytest

from tasks.artifacts.artifact import StoreError
from tasks.artifacts.stage_key import PROJECT_ROOT, code_digest, code_files
from tasks.stages import EVALUATE_MODEL, STAGES, TRAIN_POLICY, Stage
from tests.imports import files_imported

CODE = ("core", "eval/answers", "durable.py")
# Rooms of storage, pages and configuration: imported by stages, without effect on an output.
WITHOUT_EFFECT = (
    "dapo_core/config",
    "dapo_core/errors.py",
    "dapo_core/memory",
    "downloads",
    "durable.py",
    "eval/__init__.py",
    "eval/advice.py",
    "eval/report",
    "heartbeat.py",
    "redaction.py",
    "tasks/artifacts",
    "tasks/config",
    "tasks/serve_model",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    names = (
        "core/loss.py",
        "core/chat.j2",
        "core/__pycache__/loss.pyc",
        "eval/report/report.py",
        "eval/answers/exact.py",
        "durable.py",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    return tmp_path


def digest(project: Path, code: tuple[str, ...] = CODE) -> str:
    code_digest.cache_clear()
    return code_digest(code, project)


def test_a_change_counts_where_a_stage_declares_it(project: Path) -> None:
    for name in (
        "core/loss.py",
        "core/chat.j2",
        "core/new.py",
        "eval/answers/exact.py",
        "durable.py",
    ):
        before = digest(project)
        (project / name).write_text("two")
        assert digest(project) != before, name
    before = digest(project)
    for name in ("core/__pycache__/loss.pyc", "eval/report/report.py"):
        (project / name).write_text("two")
        assert digest(project) == before, name


def test_the_digest_does_not_depend_on_location_or_order(project: Path) -> None:
    here = digest(project)
    moved = project.rename(project.with_name("moved"))
    assert digest(moved, CODE[::-1]) == here


def test_missing_code_is_named(project: Path) -> None:
    with pytest.raises(
        StoreError, match=r"core/los\.py, which a stage declares as its code, does not exist"
    ):
        digest(project, ("core/los.py",))


def files_of(stage: Stage) -> set[str]:
    return {file.relative_to(PROJECT_ROOT).as_posix() for file in code_files(stage.code)}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_declares_all_its_imports(stage: Stage) -> None:
    """A change of any of it, also on one machine of several, must not be a cache hit."""
    declared = files_of(stage)
    missing = {
        f"{name} imports {other}"
        for name in declared
        if name.endswith(".py")
        for other in files_imported(name, with_strings=True) - declared
        if not any(other == path or other.startswith(f"{path}/") for path in WITHOUT_EFFECT)
    }
    assert missing == set()


def test_configuration_code_that_derives_values_counts_for_training() -> None:
    files = (PROJECT_ROOT / "dapo_core/config").glob("*.py")
    derive = {f"dapo_core/config/{file.name}" for file in files if "@property" in file.read_text()}
    assert derive
    assert derive <= files_of(TRAIN_POLICY)


def test_irrelevant_code_changes_do_not_invalidate_training() -> None:
    trained, evaluated = files_of(TRAIN_POLICY), files_of(EVALUATE_MODEL)
    assert {
        "dapo_core/trainer.py",
        "dapo_core/algorithm/loss.py",
        "dapo_core/reward/__init__.py",
    } <= trained
    assert {"eval/requests/client.py", "tasks/serve_model/command.py"} <= evaluated
    others = (
        "flows/",
        "tasks/",
        "dapo_core/merge/",
        "eval/report/templates/",
        "eval/report",
        "eval/client",
    )
    assert not [name for name in trained if name.startswith(others)]
    assert not [
        name
        for name in evaluated
        if name.startswith(("flows/", "eval/report/templates/", "eval/report"))
    ]
    assert "dapo_core/trainer.py" not in evaluated
