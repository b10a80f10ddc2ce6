"""`dapo eval` and related commands without the packages of the extra `chain`."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.cli import CHAIN_MODULES
from tests.integration.arithmetic_server import running

# Runs command lines in one process that hides the modules named first, and prints their exit
# statuses.
ALONE = """
import importlib.metadata, importlib.machinery, json, sys
names, lines = json.loads(sys.argv[1]), json.loads(sys.argv[2])
finder, distribution = importlib.machinery.PathFinder, importlib.metadata.Distribution
find_spec, from_name = finder.find_spec, distribution.from_name
def found(name, *rest):
    return None if name.partition(".")[0] in names else find_spec(name, *rest)
def installed(name):
    if name.replace("-", "_") in names:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)
finder.find_spec, distribution.from_name = staticmethod(found), staticmethod(installed)
from flows.cli import main
for line in lines:
    sys.argv = ["dapo", *line]
    try:
        main()
    except SystemExit as end:
        print("exit status", end.code or 0)
assert not {*names} & {*sys.modules}
"""


SUITE = "evaluate.benchmarks=[sums.jsonl, {set: sums.jsonl, name: avg2, num_samples: 2}]"


def dapo_alone(folder: Path, *lines: Sequence[str]) -> subprocess.CompletedProcess[str]:
    arguments = [json.dumps([*CHAIN_MODULES, "vllm"]), json.dumps(lines)]
    command = [sys.executable, "-c", ALONE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_evaluation_and_report_work_without_the_chain(tmp_path: Path) -> None:
    rows = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.csv").write_text("item,score\n1,1\n2,0\n")
    with running() as server:
        asked = (
            "eval",
            "--model-name",
            "m",
            "--data",
            "sums.jsonl",
            "--base-url",
            server.url,
            "--output",
        )
        done = dapo_alone(
            tmp_path,
            (*asked, "before"),
            (*asked, "after"),
            (
                "eval",
                "--model-name",
                "m",
                "--base-url",
                server.url,
                "--output",
                "suite",
                "--set",
                SUITE,
            ),
            ("grade", "before"),
            ("grade", "suite"),
            ("compare", "before", "after"),
            ("compare", "before", "after", "--output", "page"),
            ("compare", "scores.csv", "scores.csv", "--gate", "pooled >= before"),
            ("datasets",),
            ("datasets", "show", "sums.jsonl", "--use", "eval"),
        )
    assert re.findall("exit status (.*)", done.stdout) == ["0"] * 10, done.stdout + done.stderr
    for text in (
        "avg2: accuracy 100.0% of 16",
        "after: accuracy 100.0% of 8",
        "no verdict changed",
        "report.html",
        "Gates: 1 of 1 passed",
        "math500",
        "1 + 1 = ?",
    ):
        assert text in done.stdout
    assert (tmp_path / "page" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_commands_that_need_the_chain_say_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text("deployments: []")
    (tmp_path / "c.yaml").write_text(
        "model: {source: recipe}\ndata: {train: arithmetic, eval: arithmetic}\n"
    )
    done = dapo_alone(
        tmp_path,
        ("up",),
        ("run", "c.yaml"),
        ("fetch-model", "c.yaml", "--data", "d", "--output", "o"),
    )
    assert re.findall("exit status (.*)", done.stdout) == ["2"] * 3, done.stdout + done.stderr
    assert done.stderr.count("pip install '.[chain]'") == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_the_extra_installs_the_modules_named_in_the_message() -> None:
    needs = importlib.metadata.requires("dapo-pipeline") or []
    names = {
        re.split(r"[\[<>=; ]", need)[0] for need in needs if re.search("extra == .chain.", need)
    }
    assert {name.replace("-", "_") for name in names} == set(CHAIN_MODULES)
