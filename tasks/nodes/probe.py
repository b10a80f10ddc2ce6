"""The first program on a node: does it have the project and the same code, which Python and Ray.

`reach.py` pipes this file into the node's interpreter, so it only uses the standard library. The
request is then handled by the node's own copy of the project, in on_node.py.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MARK = "dapo-node-answers "  # starts the reply's line; shells may print other lines at login
FOLDERS = ("dapo_core", "downloads", "eval", "flows", "interop", "tasks")
FILES = ("durable.py", "heartbeat.py", "redaction.py")


def code_digest(root: str) -> str:
    """Return the sha256 of the names and contents of the project's code in a folder."""
    paths = [path for name in FILES if (path := Path(root, name)).is_file()]
    for folder in FOLDERS:
        paths += [path for end in ("py", "yaml") for path in Path(root, folder).rglob(f"*.{end}")]
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()


def answer(request: dict[str, Any]) -> None:
    """Print the reply: versions, and on_node.py's answer unless code that must be equal is not."""
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec("tasks")
    places = spec.submodule_search_locations if spec else None
    root = os.path.dirname(places[0]) if places else ""
    has_project = os.path.exists(os.path.join(root, "tasks", "nodes", "on_node.py"))
    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = None
    reply: dict[str, Any] = {
        "python": platform.python_version(),
        "ray": ray,
        "interpreter": sys.executable,
        "cwd": os.getcwd(),
        "digest": code_digest(root) if has_project else None,
    }
    if has_project and (reply["digest"] == request["digest"] or not request["must_be_equal"]):
        reply["answer"] = importlib.import_module("tasks.nodes.on_node").answer(request)
    sys.stdout.write(f"\n{MARK}{json.dumps(reply)}\n")
