"""The model to improve: built from a recipe, or taken from a local folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.model_folder import require_model_folder
from tasks.artifacts import MANIFEST_NAME, Artifact
from tasks.config import ChainConfig
from tasks.page import StageProgress
from tasks.runs.run import Run
from tasks.stage_command import run_dapo
from tasks.stage_task import stage_task
from tasks.stages import FETCH_MODEL, TRAIN_FILE, fetch_model_inputs


@stage_task("fetch-model", hours=lambda limits: limits.fetch_model_hours)
def fetch_model(run: Run, data: Artifact) -> Artifact:
    """The Hugging Face model folder as an artifact, from the store when it is there."""
    key = FETCH_MODEL.key(run.config, fetch_model_inputs(run.config, data))

    def build(folder: Path) -> Mapping[str, Any]:
        if run.config.model.source == "path":
            return take_model_folder(run.config, folder)
        paths = ("--data", Path(data.path) / TRAIN_FILE, "--output", folder)
        run_dapo(
            ["fetch-model", run.config_path, *paths], run, key, on_line=StageProgress(run, "fetch_model").on_line
        )
        return {}

    return run.produce("fetch_model", key, build)


def take_model_folder(config: ChainConfig, folder: Path) -> Mapping[str, Any]:
    """Bring the files of model.path into the folder, as hard links where the file system allows, else copies."""
    source = Path(str(config.model.path))
    require_model_folder(source)
    num_bytes = 0
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir(exist_ok=True)
            continue
        if path.name == MANIFEST_NAME:  # the folder may be an artifact of a store itself
            continue
        num_bytes += path.stat().st_size
        try:
            os.link(path.resolve(), target)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, target)
    return {"bytes": num_bytes}
