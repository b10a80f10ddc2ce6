"""docs/ascend.md: its commands are valid, its blocks match the code's output, its recipes exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import typer
import yaml
from typer.testing import CliRunner

from flows.cli import app
from flows.config import load_config
from tests.metric_names import expand

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
BLOCKS = [block.splitlines() for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)]
LINES = [line.strip() for block in BLOCKS for line in block if line.strip()]
COMMANDS = [line for line in LINES if line.startswith("dapo ")]
RECIPE = "configs/dapo_qwen3_32b_math.yaml"


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the page describes: the recipes, and its nodes.yaml."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    [inventory] = [block for block in BLOCKS if block[0].strip().startswith("hosts:")]
    (tmp_path / "nodes.yaml").write_text("\n".join(line.strip() for line in inventory))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_all_commands_in_order() -> None:
    verbs = [" ".join(word for word in _words(line)[:2] if word.isalpha()) for line in COMMANDS]
    assert [verb.split()[-1] for verb in verbs] == [
        "doctor",
        "env",
        "plan",
        "up",
        "status",
        "render",
        "render",
        "render",
        "doctor",
        "run",
        "runs",
        "down",
    ]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_accepts_every_command(line: str) -> None:
    """Commands, options and values are parsed; nothing runs."""
    command: click.Command = typer.main.get_command(app)  # type: ignore[assignment]
    words = _words(line)
    while words and isinstance(command, typer.core.TyperGroup):
        command = command.commands[words.pop(0)]  # type: ignore[assignment]
    command.make_context(line, list(words))
    for word in words:
        assert not word.startswith("configs/") or (ROOT / word).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_plan_prints_the_page_s_line() -> None:
    [line] = [line for line in LINES if line.startswith("peak ")]
    done = CliRunner().invoke(app, ["plan", RECIPE, "--memory"])
    assert line in " ".join(done.output.split())


def test_the_scripts_export_the_page_s_variables(folder: Path) -> None:
    listed = [line for line in LINES if line.startswith("export ")]
    for line in (line for line in COMMANDS if " render " in line):
        done = CliRunner().invoke(app, _words(line))
        assert done.exit_code == 0, done.output
    for path in ("start/node1.sh", "start/node4.sh", "job/dapo_qwen3_32b_math.sbatch"):
        found = [
            line.strip() for line in (folder / path).read_text().splitlines() if "export " in line
        ]
        assert [line for line in found if line in listed] == listed, path
    *_, pods = yaml.safe_load_all((folder / "pods/dapo-qwen3-32b-math.yaml").read_text())
    assert pods["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3


@pytest.mark.usefixtures("folder")
def test_the_linter_exports_the_same_variables() -> None:
    names = {
        line.removeprefix("export ").partition("=")[0]
        for line in LINES
        if line.startswith("export ")
    }
    overrides = ["--set", "train.ray_address=node1:6379", "--export"]
    done = CliRunner().invoke(
        app, ["doctor", "env", RECIPE, *overrides], env={name: None for name in names}
    )
    asked = {
        re.split(r"[=:]", line.removeprefix("export ").removeprefix("# "))[0]
        for line in done.output.splitlines()
    }
    assert asked - {"ulimit -n"} <= names


def test_requirement_files_exist() -> None:
    for name in re.findall(r"requirements/[\w.-]+", PAGE):
        assert (ROOT / name).is_file(), name


def test_metrics_exist() -> None:
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    sources = subprocess.run(
        ["git", "grep", "-hoE", r"[a-z_]+/[a-z_/]+", "--", "dapo_core", "tests/unit"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    names = {
        name
        for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", cell)
    }
    assert len(names) == 8
    assert names <= {*sources, *expand("critic/score/mean")}


def test_recipes_of_the_guides_use_the_trainer_in_the_table() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([\w-]+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for recipe, backend in rows:
        assert load_config(ROOT / "configs" / f"{recipe}.yaml").train.backend == backend
