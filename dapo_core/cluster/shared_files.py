"""Checks that all nodes of a cluster see the same model, output and scorer as the trainer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.cluster.every_node import finish, living_nodes, own_node, start_on
from dapo_core.errors import ConfigError
from dapo_core.machine.digests import file_digest
from dapo_core.model.folder import model_fingerprint

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

OUTPUT = "output"
ADVICE = (
    "put the store (store.path) and these files on storage that all nodes mount at the same path "
    "(docs/clusters.md)"
)


def require_shared(
    nodes: Sequence[str], config: TrainingConfig, model_path: Path, output_dir: Path
) -> None:
    """Raise ConfigError, naming the nodes, unless `nodes` (Ray's IDs) see all files of a training.

    These are the model, the reference model, the scorer's file, and the output that ranks write
    checkpoints to, which must be the same folder and not just have the same name. The trainer's own
    node is skipped. Raises WorkerDied if a node does not answer.
    """
    others = [node for node in living_nodes() if node.id in nodes and node.id != own_node()]
    if not others:
        return
    paths = shared_paths(config, model_path) | {OUTPUT: output_dir}
    with probe_in(output_dir) as probe:
        task = differences, paths, digests(paths), probe
        answers = finish({node: start_on(node, {}, *task) for node in others}).require()
    problems = [
        f"node {node.name} does not see {', '.join(found)}"
        for node, found in answers.items()
        if found
    ]
    if problems:
        raise ConfigError(f"{'; '.join(problems)}: {ADVICE}")


def shared_paths(config: TrainingConfig, model_path: Path | None) -> dict[str, Path]:
    """Return the paths that ranks and workers read, by their name in messages."""
    paths = {} if model_path is None else {"model folder": model_path}
    if config.custom_reward.path is not None:
        paths["custom_reward.path"] = Path(config.custom_reward.path)
    if config.algorithm.custom_loss.path is not None:
        paths["algorithm.custom_loss.path"] = Path(config.algorithm.custom_loss.path)
    if config.algorithm.kl.reference_path is not None:
        paths["algorithm.kl.reference_path"] = Path(config.algorithm.kl.reference_path)
    return paths


def differences(paths: Mapping[str, Path], expected: Mapping[str, str], probe: str) -> list[str]:
    """Return the `paths` whose digests differ from `expected` on this machine, with the reasons.

    The output must be writable and contain the file `probe`.
    """
    problems = []
    for name, path in paths.items():
        try:
            if name != OUTPUT:
                reason = "" if _digest(path) == expected[name] else "different content"
            elif not (path / probe).is_file():
                reason = "another folder" if path.is_dir() else "no such folder"
            else:
                test_file = path / f"{probe}.{secrets.token_hex(4)}"
                test_file.touch()
                test_file.unlink()
                reason = ""
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            problems.append(f"{name} {path} ({reason})")
    return problems


def digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of each model folder and file on this machine."""
    return {name: _digest(path) for name, path in paths.items() if name != OUTPUT}


def _digest(path: Path) -> str:
    return model_fingerprint(path) if path.is_dir() else file_digest(path)


@contextmanager
def probe_in(folder: Path) -> Iterator[str]:
    """Yield the name of a temporary file in the folder."""
    probe = folder / f".{secrets.token_hex(8)}.seen"
    probe.touch()
    try:
        yield probe.name
    finally:
        probe.unlink()
