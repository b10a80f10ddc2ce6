"""Whether the nodes of a cluster see the model, the output and the scorer as the trainer's machine does."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo_core.digests import file_digest
from dapo_core.errors import ConfigError, WorkerDied
from dapo_core.model_folder import model_fingerprint

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

ANSWER_SECONDS = 120.0  # in which a node starts a process and answers


def require_shared(nodes: Sequence[str], config: TrainingConfig, model_path: Path, output_dir: Path) -> None:
    """Raise ConfigError, which names the nodes, unless these (Ray's IDs) see what ranks and workers use.

    This is the model, the scorer's file and the output, into which ranks write checkpoints: the same folder, not
    one of the same name. The trainer's own node is left out. Raises WorkerDied if a node does not answer.
    """
    others = [node for node in nodes if node != ray.get_runtime_context().get_node_id()]
    if not others:
        return
    paths = {"model folder": model_path, "output": output_dir}
    if config.custom_reward.path is not None:
        paths["custom_reward.path"] = Path(config.custom_reward.path)
    with _probe_in(output_dir) as probe:
        problems = _answers(others, paths, digests(paths), probe)
    if any(problems.values()):
        raise ConfigError(
            "; ".join(f"node {node} does not see {', '.join(found)}" for node, found in problems.items() if found)
            + ": put the store (store.path) and these files on storage that all nodes mount at the same place "
            "(docs/clusters.md)"
        )


def differences(paths: Mapping[str, Path], expected: Mapping[str, str], probe: str) -> list[str]:
    """What of `paths` this machine does not see with the `expected` digests, each with the reason.

    In the output it must find the file `probe`, and be able to write.
    """
    found = []
    for what, path in paths.items():
        try:
            if what != "output":
                reason = "" if _digest(path) == expected[what] else "other content"
            elif not (path / probe).is_file():
                reason = "another folder" if path.is_dir() else "no such folder"
            else:
                own = path / f"{probe}.{secrets.token_hex(4)}"
                own.touch()
                own.unlink()
                reason = ""
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            found.append(f"{what} {path} ({reason})")
    return found


def digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """A digest of each model folder and file as this machine sees it."""
    return {what: _digest(path) for what, path in paths.items() if what != "output"}


def _digest(path: Path) -> str:
    return model_fingerprint(path) if path.is_dir() else file_digest(path)


@contextmanager
def _probe_in(folder: Path) -> Iterator[str]:
    """Name of a new file in the folder, which goes afterwards."""
    probe = folder / f".{secrets.token_hex(8)}.seen"
    probe.touch()
    try:
        yield probe.name
    finally:
        probe.unlink()


def _answers(
    nodes: Sequence[str], paths: Mapping[str, Path], expected: Mapping[str, str], probe: str
) -> dict[str, list[str]]:
    """`differences` on each node, by the node's name."""
    names = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()
    }
    ask = ray.remote(differences)
    asked = {
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(paths, expected, probe): names[node]
        for node in nodes
    }
    done, missing = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    if missing:
        silent = ", ".join(asked[one] for one in missing)
        raise WorkerDied(f"node {silent} did not answer within {ANSWER_SECONDS:.0f} s")
    answers = {}
    for one in done:
        try:
            answers[asked[one]] = ray.get(one)
        except RayTaskError as error:  # such as a node without this project
            reason = str(error.cause).strip().splitlines()[-1]
            raise ConfigError(f"node {asked[one]} cannot run this project: {reason}; install it there") from error
        except RayError as error:
            raise WorkerDied(f"node {asked[one]} is lost: {str(error).strip().splitlines()[0]}") from error
    return answers
