"""The files in docker/ copy what the package needs; no image is built."""

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = PROJECT["tool"]["setuptools"]
NEEDED = {f"{name.removesuffix('*')}/" for name in BUILD["packages"]["find"]["include"]} | {
    f"{name}.py" for name in BUILD["py-modules"]
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_an_image_has_every_package_and_each_copied_file_is_in_the_build_context(
    path: Path,
) -> None:
    text = path.read_text().replace("\\\n", " ")
    copied = {word for line in re.findall(r"^COPY (.*)", text, re.M) for word in line.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = tuple(line[1:] for line in ignored if line.startswith("!"))
    used = set(re.findall(r"requirements/[\w.-]+", text))
    assert NEEDED | used <= copied
    for source in copied:
        assert (ROOT / source).exists()
        assert source.startswith(kept)


def test_the_ray_of_vllm_ascend_s_image_is_replaced() -> None:
    """It has no tokens, and dapo_core.cluster cannot be imported with it."""
    chain = map(Requirement, PROJECT["project"]["optional-dependencies"]["chain"])
    [ray] = [each for each in chain if each.name == "ray"]
    assert not ray.specifier.contains("2.48.0")
