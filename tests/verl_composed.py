"""What verl's own configuration code says of our recipes, in two versions.

`python -m tests.verl_composed` writes tests/data/verl again: what each recipe changes in verl's
defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flows.config import load_config
from interop.render.launch import Places
from interop.render.verl import render
from tests.verl_wheels import folder_with, verl_folder

# What verl's code for configuration and data imports that this project does not install.
BESIDE = (
    "datasets==5.2.0",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
    "hydra-core==1.3.2",
    "omegaconf==2.3.1",
    "antlr4-python3-runtime==4.9.3",
    "tensordict==0.15.3",
    "pyvers==0.2.3",
    "codetiming==1.4.0",
)
NEWEST, OLDER = "0.9.1", "0.7.0"
CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = sorted(  # without adapters and divided experts, which are rendered for no trainer
    path.stem
    for path in CONFIGS.glob("*.yaml")
    if (train := load_config(path).train).backend in ("own", "verl")
    and not train.lora.rank
    and train.expert_parallel == 1
)
GOLDEN = Path(__file__).parent / "data/verl"
PLACES = Places(
    *(
        Path("/places") / name
        for name in ("", "model", "train.parquet", "eval.parquet", "checkpoints")
    )
)
# Changes of recipes for a CPU.
OF_A_GPU = ("train.device=cuda", "rollout.engine=vllm", "rollout.dtype=auto")
CHECK = Path(__file__).with_name("verl_check.py")


def folder_beside() -> Path:
    """A folder with what verl's code needs."""
    return folder_with("beside-verl", *BESIDE)


def checked_by_verl(
    version: str, jobs: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What verl's own code makes of each job, {"config_name": ..., "overrides": [...]}, in one
    process.

    A result has `changed`, the keys that differ from the defaults, or `error`. `asked` is a job
    with `calls` of its reward function and a `tokenizer` for its rows: the results "scored" and
    "first row".
    """
    folder = verl_folder(version)
    path = os.pathsep.join([str(folder), str(folder_beside())])
    done = subprocess.run(
        [sys.executable, str(CHECK), str(folder / "verl/trainer/config")],
        input=json.dumps({"jobs": jobs, "asked": asked}),
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def jobs_of(version: str, source: Path) -> dict[str, dict[str, Any]]:
    """Every recipe as a job of a version; `source` stands for verl's checkout, for versions that
    need one.
    """
    (source / "recipe/dapo").mkdir(parents=True, exist_ok=True)
    jobs = {}
    for name in RECIPES:
        is_for_cpu = load_config(CONFIGS / f"{name}.yaml").train.device == "cpu"
        tree = load_config(CONFIGS / f"{name}.yaml", OF_A_GPU if is_for_cpu else ()).model_dump(
            mode="json"
        )
        tree["external"]["source"] = str(source)
        if tree["custom_reward"]["path"]:
            tree["custom_reward"]["path"] = "/places/custom.py"  # wherever this checkout is
        launch = render(tree, PLACES, version)
        is_megatron = any("megatron" in each for each in launch.argv[2:3])
        config_name = "ppo_megatron_trainer" if is_megatron else "ppo_trainer"
        jobs[name] = {"config_name": config_name, "overrides": list(launch.overrides)}
    return jobs


def main() -> None:
    """Write what each recipe changes in the newest version's defaults."""
    with tempfile.TemporaryDirectory() as source:
        results = checked_by_verl(NEWEST, jobs_of(NEWEST, Path(source)))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
        (GOLDEN / f"{name}.yaml").write_text(yaml.safe_dump(result["changed"]), encoding="utf-8")


if __name__ == "__main__":
    main()
