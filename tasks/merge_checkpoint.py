"""FSDP shards into a Hugging Face folder, as the child process `dapo merge`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import Artifact
from tasks.runs.run import Run
from tasks.stage_command import run_dapo
from tasks.stage_task import stage_task
from tasks.stages import MERGE_CHECKPOINT, merge_checkpoint_inputs


@stage_task("merge-checkpoint", hours=lambda limits: limits.merge_checkpoint_hours)
def merge_checkpoint(run: Run, training: Artifact) -> Artifact:
    """The trained model as a folder that transformers and vLLM load."""
    key = MERGE_CHECKPOINT.key(run.config, merge_checkpoint_inputs(run.config, training))

    def build(folder: Path) -> Mapping[str, Any]:
        merge = run.config.merge
        options = ["--checkpoint", merge.checkpoint, "--dtype", merge.dtype]
        options += ["--max-shard-bytes", str(merge.max_shard_bytes)]
        run_dapo(["merge", training.path, folder, *options], run, key)
        return {"bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}

    return run.produce("merge_checkpoint", key, build)
