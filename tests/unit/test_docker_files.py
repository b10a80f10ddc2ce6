"""Checks the text of the files in docker/; no image is built."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.specifiers import SpecifierSet

from dapo_core.machine.versions import sets
from tasks.preflight.environment import TABLE

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.suffix[1:]: path for path in sorted((ROOT / "docker").glob("Dockerfile.*"))}
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
NEEDED = {name.split(".")[0] for name in BUILD["packages"]} | {
    f"{name}.py" for name in BUILD["py-modules"]
}
TOOLS = {"wget"}  # older KubeRay releases probe Ray with it
RUNTIME_PREFIX = "NVIDIA_"  # variables of the container runtime


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, value) of each instruction, with joined lines and build arguments replaced by their
    defaults.
    """
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [
        line.split(None, 1)
        for line in "\n".join(lines).replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    defaults = dict(value.split("=", 1) for name, value in found if name == "ARG")
    return [
        (name, re.sub(r"\$\{(\w+)\}", lambda each: defaults[each[1]], value))
        for name, value in found
    ]


def problems(device: str, text: str) -> Iterator[str]:
    """Yield the faults of a Dockerfile."""
    steps = instructions(text)
    (base,) = (value for name, value in steps if name == "FROM")
    yield from wrong_base(device, base)
    copied = [word for name, value in steps if name == "COPY" for word in value.split()[:-1]]
    yield from (
        f"{source} is not in the repository" for source in copied if not (ROOT / source).exists()
    )
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    yield from (f".dockerignore leaves {each} out" for each in copied if not is_kept(each, kept))
    yield from (
        f"{name} is not copied" for name in NEEDED - {source.rstrip("/") for source in copied}
    )
    commands = [value for name, value in steps if name == "RUN"]
    for name in {
        each for command in commands for each in re.findall(r"requirements/[\w.-]+", command)
    }:
        if name not in copied:
            yield f"{name} is used but not copied"
    for command in commands:
        if "pip install" in command and command.count("pip install") != command.count(
            "--no-cache-dir"
        ):
            yield f"pip keeps its cache in: {command}"
        if "apt-get install" in command and not {
            "--no-install-recommends",
            "/var/lib/apt/lists/*",
        } <= set(command.split()):
            yield f"apt leaves files behind: {command}"
    installed = {
        word for command in commands if "apt-get install" in command for word in command.split()
    }
    if device != "npu":  # its base image has them
        yield from (f"{tool} is not installed" for tool in sorted(TOOLS - installed))
    yield from wrong_environment(
        [word for name, value in steps if name == "ENV" for word in shlex.split(value)]
    )
    if device != "npu" and [value for name, value in steps if name == "USER"][-1:] != ["dapo"]:
        yield "runs as root"


def is_kept(source: str, kept: list[str]) -> bool:
    return any(source == each or (each.endswith("/") and source.startswith(each)) for each in kept)


def wrong_base(device: str, base: str) -> Iterator[str]:
    image, _, tag = base.partition(":")
    if not re.search(r"\d", tag):
        yield f"{base} has no version"
    if device == "npu":
        wanted = sets()["npu-newest"].packages["vllm-ascend"]
        if not (image == "quay.io/ascend/vllm-ascend" and tag in (f"v{wanted}", f"v{wanted}-a3")):
            yield f"{base} is not of vllm-ascend {wanted}"
    elif not SpecifierSet(sets()[device].python).contains(tag.split("-")[0]):
        yield f"{base} has another Python than the set"


def wrong_environment(words: list[str]) -> Iterator[str]:
    """Yield variables that the table does not have, or has with another value."""
    known = {
        row["name"]: str(row.get("chain_value", row.get("value", "")))
        for row in yaml.safe_load(TABLE.read_text())
    }
    for name, _, value in (word.partition("=") for word in words):
        if name in known and known[name] != value:
            yield f"{name}={value}, but the table has {known[name]!r}"
        elif name not in known and not name.startswith(RUNTIME_PREFIX):
            yield f"{name} is in no row of the table"


def test_each_kind_of_device_has_a_dockerfile() -> None:
    assert FILES.keys() == {"cpu", "cuda", "npu"}


@pytest.mark.parametrize("device", FILES)
def test_a_dockerfile_matches_the_versions_files_and_variables(device: str) -> None:
    assert list(problems(device, FILES[device].read_text())) == []


@pytest.mark.parametrize(
    ("device", "old", "new", "problem"),
    [
        ("npu", "v0.23.0-a3", "latest", "quay.io/ascend/vllm-ascend:latest has no version"),
        ("npu", "v0.23.0-a3", "v0.24.0-a3", "vllm-ascend:v0.24.0-a3 is not of vllm-ascend 0.23.0"),
        (
            "cpu",
            "python:3.11-slim",
            "python:3.14-slim",
            "python:3.14-slim-bookworm has another Python than the set",
        ),
        ("cpu", "COPY eval/ eval/", "COPY evl/ eval/", "evl/ is not in the repository"),
        ("cpu", "COPY eval/ eval/", "COPY eval/ tests/ ./", ".dockerignore leaves tests/ out"),
        ("cuda", "COPY eval/ eval/\n", "", "eval is not copied"),
        (
            "cuda",
            "COPY requirements/cuda.txt requirements/cuda.txt\n",
            "",
            "requirements/cuda.txt is used but not copied",
        ),
        (
            "cuda",
            " --no-cache-dir --no-deps -r",
            " --no-deps -r",
            "pip keeps its cache in: python3 -m pip install",
        ),
        ("cpu", "--no-install-recommends ", "", "apt leaves files behind: apt-get update"),
        (
            "npu",
            "TASK_QUEUE_ENABLE=1",
            "TASK_QUEUE_ENABLED=1",
            "TASK_QUEUE_ENABLED is in no row of the table",
        ),
        ("npu", "ENABLE_NZ=0", "ENABLE_NZ=1", "VLLM_ASCEND_ENABLE_NZ=1, but the table has '0'"),
        ("cuda", "USER dapo\n", "", "runs as root"),
        ("cuda", " wget", "", "wget is not installed"),
    ],
)
def test_each_fault_of_a_dockerfile_is_found(device: str, old: str, new: str, problem: str) -> None:
    text = FILES[device].read_text()
    assert old in text

    found = list(problems(device, text.replace(old, new)))

    assert [each for each in found if problem in each], found
