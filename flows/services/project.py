"""The project directory: what its prefect.yaml says, read without Prefect."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import yaml

from dapo_core.errors import ConfigError

PREFECT_FILE = "prefect.yaml"


def read_deployments(project: Path) -> list[dict[str, Any]]:
    """The deployments that the project's prefect.yaml describes."""
    path = project / PREFECT_FILE
    if not path.is_file():
        raise ConfigError(f"no {PREFECT_FILE} in {project}: type this in the project directory")
    return list(yaml.safe_load(path.read_text(encoding="utf-8")).get("deployments") or [])


def project_digest(project: Path, database: str) -> str:
    """Changes when deployments would be registered differently: prefect.yaml, sources, Prefect, database."""
    digest = hashlib.sha256(f"{importlib.metadata.version('prefect')} {project} {database}".encode())
    folders = {(project / item["entrypoint"].split(":")[0]).parent for item in read_deployments(project)}
    for path in [project / PREFECT_FILE, *sorted(source for folder in folders for source in folder.rglob("*.py"))]:
        digest.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
