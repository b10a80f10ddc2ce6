"""What the digest of a stage's code sees: everything it can reach, and nothing that changes no result."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from dapo_core.errors import StoreError
from tasks.artifacts import code_digest

SOURCES = {
    "tasks/__init__.py": "",
    "tasks/train.py": '''
        """Trains."""
        def train():
            # a comment
            from dapo_core.loss import loss
            return loss(2)
        ''',
    "dapo_core/__init__.py": "",
    "dapo_core/config.py": "STEPS = 1",
    "dapo_core/loss.py": "import json\nfrom dapo_core import numbers\nfrom . import config\ndef loss(x): return x",
    "dapo_core/numbers.py": "ONE = 1",
    "dapo_core/engines/__init__.py": "ENGINES = {'fast': 'dapo_core.engines.fast:FastEngine'}",
    "dapo_core/engines/fast.py": "from ..numbers import ONE",
    "dapo_core/unused.py": "X = 1",
    "eval/__init__.py": "",
    "eval/report.py": "Y = 1",
    "eval/templates/report.html": "<p>",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def digest_after(project: Path, name: str, text: str, modules: list[str], exclude: tuple[str, ...] = ()) -> str:
    (project / name).write_text(textwrap.dedent(text))
    return code_digest(modules, root=project, exclude=exclude)


@pytest.mark.parametrize(
    ("modules", "name", "text", "does_count"),
    [
        (["tasks.train"], "tasks/train.py", SOURCES["tasks/train.py"].replace("a comment", "another"), False),
        (["tasks.train"], "tasks/train.py", SOURCES["tasks/train.py"].replace("Trains.", "Learns."), False),
        (
            ["tasks.train"],
            "tasks/train.py",
            SOURCES["tasks/train.py"].replace("loss(2)", "loss( 2, )  # two"),
            False,
        ),
        (["tasks.train"], "tasks/train.py", SOURCES["tasks/train.py"].replace("loss(2)", "loss(2.0)"), True),
        (["tasks.train"], "tasks/__init__.py", "import os", True),
        (["tasks.train"], "dapo_core/loss.py", "def loss(x): return -x", True),  # imported inside a function
        (["tasks.train"], "dapo_core/numbers.py", "ONE = 2", True),  # from package import module
        (["tasks.train"], "dapo_core/config.py", "STEPS = 2", True),  # relative import
        (["tasks.train"], "dapo_core/unused.py", "X = 2", False),
        (["dapo_core.engines"], "dapo_core/engines/fast.py", "SLOW = 1", True),  # named by a string
        (["dapo_core.engines.fast"], "dapo_core/numbers.py", "ONE = 2", True),  # relative, one level up
        (
            ["dapo_core.engines.fast"],
            "dapo_core/engines/__init__.py",
            "ENGINES = {}",
            True,
        ),  # its package runs too
        (["eval"], "eval/templates/report.html", "<b>", True),
        (["eval"], "eval/report.py", "Y = 2", False),
        (["eval.report"], "eval/templates/report.html", "<b>", False),
        (["eval.report"], "eval/report.py", "Y = 2", True),
    ],
)
def test_what_changes_the_code_digest(
    project: Path, modules: list[str], name: str, text: str, does_count: bool
) -> None:
    before = code_digest(modules, root=project)
    assert (project / name).read_text() != textwrap.dedent(text)
    after = digest_after(project, name, text, modules)
    assert (after != before) == does_count


def test_an_excluded_module_does_not_count_nor_does_what_only_it_imports(project: Path) -> None:
    (project / "dapo_core/config.py").write_text("from dapo_core.unused import X")
    excluded = ("dapo_core.config",)
    before = code_digest(["tasks.train"], root=project, exclude=excluded)
    assert digest_after(project, "dapo_core/config.py", "STEPS = 2", ["tasks.train"], excluded) == before
    assert digest_after(project, "dapo_core/unused.py", "X = 2", ["tasks.train"], excluded) == before
    assert digest_after(project, "dapo_core/numbers.py", "ONE = 2", ["tasks.train"], excluded) != before


def test_an_excluded_package_takes_its_modules_along(project: Path) -> None:
    (project / "tasks/train.py").write_text("from dapo_core.engines.fast import ONE")
    before = code_digest(["tasks.train"], root=project, exclude=["dapo_core.engines"])
    after = digest_after(project, "dapo_core/engines/fast.py", "ONE = 3", ["tasks.train"], ("dapo_core.engines",))
    assert after == before
    assert code_digest(["tasks.train"], root=project) != before


def test_the_code_digest_does_not_depend_on_the_place_or_the_order(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for name in SOURCES:
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        (moved / name).write_bytes((project / name).read_bytes())
    here = code_digest(["tasks.train", "eval"], root=project)
    assert code_digest(["eval", "tasks.train", "eval"], root=moved) == here


def test_a_module_that_does_not_exist_is_named(project: Path) -> None:
    with pytest.raises(StoreError, match=r"'tasks\.trian', which a stage declares as its code, does not exist"):
        code_digest(["tasks.trian"], root=project)


def test_the_store_is_part_of_its_own_code_digest() -> None:
    # On the real tree: tasks.artifacts imports dapo_core.errors, and excluding that must show.
    assert code_digest(["tasks.artifacts"]) != code_digest(["tasks.artifacts"], exclude=["dapo_core.errors"])
