"""Saves and loads each rank's weights, optimizer state and random generators.

    model.NAME                        parameters (tied ones once) and persistent buffers; under
                                      train.lora only adapters
    optimizer.NAME.{step,exp_avg,exp_avg_sq}   AdamW state of each parameter
    reference.NAME                    parameters of a refreshed reference model (kl.refresh_every)
    num_optimizer_steps
    rng.rank_R.GENERATOR              random generator states of rank R
All are tensors. Hyperparameters come from the configuration.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from dapo_core.checkpoint.manifest import write_shards
from dapo_core.checkpoint.metadata import METADATA_FILE, read_metadata
from dapo_core.errors import CheckpointError
from dapo_core.machine.device import Device
from dapo_core.machine.digests import Part, content_part
from dapo_core.model.lora import is_adapter
from dapo_core.model.names import tied_names

_RNG, _REFERENCE = "rng", "reference"
_NO_STEPS = torch.tensor(0.0, dtype=torch.float32)


class Shards:
    """Saves and loads this rank's model part, AdamW optimizer and random generators.

    `__init__`, `save` and `load` are collective. They use a separate host process group, so
    training can use the default group during a save.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        device: Device,
        offload_optimizer: bool,
        run_seed: int,
        reference: nn.Module | None = None,
    ) -> None:
        """Create missing moments on the host if `offload_optimizer` is set, else on the device.

        `reference` is saved as well; loading a checkpoint without one leaves it unchanged.
        """
        self._model = model
        self._reference = reference
        self._optimizer = optimizer
        self._device_kind = device.kind
        self._moments_device = torch.device("cpu") if offload_optimizer else device.torch_device()
        self._run_seed = run_seed
        self._rank = torch.distributed.get_rank()
        self._group = torch.distributed.new_group(backend="gloo")
        self._running: tuple[str, Future[Any]] | None = (
            None  # folder and future of the save in progress
        )

    def save(self, folder: str, num_optimizer_steps: int, asynchronous: bool) -> None:
        """Write to the folder; if asynchronous, return once the state is copied (see is_saved).

        Every rank raises OSError with the errno if a write failed on any rank, and CheckpointError
        for other errors.
        """
        self._require_idle()
        state = self._state(num_optimizer_steps)
        if asynchronous:
            # copy-ahead is for tensors on a device
            writer = _Writer(folder, per_thread_copy_ahead=0)
            future: Any = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            self._running = folder, future
            return
        try:
            dcp.save(state, storage_writer=_Writer(folder), process_group=self._group)
        except CheckpointException as failure:
            raise _save_error(folder, failure) from failure

    def is_saved(self) -> bool:
        """True if no save is running; raises the last save's error once, as `save` would."""
        if self._running is None:
            return True
        folder, future = self._running
        if not future.done():
            return False
        self._running = None
        try:
            future.result()
        except CheckpointException as failure:
            raise _save_error(folder, failure) from failure
        return True

    def end_save(self) -> None:
        """Wait for the running asynchronous save and discard its result."""
        if self._running is not None:
            wait([self._running[1]])
        self._running = None

    def load(self, folder: str) -> int:
        """Load any number of ranks' checkpoint in place; returns the number of optimizer steps.

        Generators missing from the folder get a new seed. Raises CheckpointError on every rank if
        the shards do not match the model or cannot be read.
        """
        self._require_idle()
        state = self._state(num_optimizer_steps=0)
        planner = _LoadPlanner()
        try:
            dcp.load(
                state, storage_reader=_Reader(folder), planner=planner, process_group=self._group
            )
        except CheckpointException as failure:
            raise CheckpointError(
                f"the shards in {folder} cannot be loaded: {_summary(failure)}"
            ) from failure
        num_optimizer_steps = int(state["num_optimizer_steps"])
        if any(name.startswith(f"{_RNG}.") for name in planner.missing):
            seed_generators(self._run_seed, self._rank, num_optimizer_steps)
        rank = f"rank_{self._rank}"
        generators = state[_RNG][rank]
        set_generators(
            {n: s for n, s in generators.items() if f"{_RNG}.{rank}.{n}" not in planner.missing}
        )
        return num_optimizer_steps

    def num_bytes(self) -> int:
        """Return the bytes that this rank saves; replicas count on one rank.

        Excluded: under 2 KiB of overhead per tensor and 15 KiB of random generators per rank.
        """
        tensors: list[Any] = list(_weights(self._model).values())
        if self._reference is not None:
            tensors += _weights(self._reference).values()
        for parameter in self._trained():
            same_size = {"step": _NO_STEPS, "exp_avg": parameter, "exp_avg_sq": parameter}
            tensors += (self._optimizer.state.get(parameter) or same_size).values()
        return sum(_written_bytes(tensor) for tensor in tensors)

    def _require_idle(self) -> None:
        if self._running is not None:
            raise CheckpointError(
                f"the checkpoint in {self._running[0]} is still being written; call is_saved until "
                "it is True before the next save or load"
            )

    def _state(self, num_optimizer_steps: int) -> dict[str, Any]:
        """Return the live tensors to save, or to load in place."""
        # torch would create missing moments with a gradient-free optimizer step, which counts as a
        # step, and would skip that if a skipped update left gradients.
        for parameter in self._trained():
            if not self._optimizer.state.get(parameter):
                self._optimizer.state[parameter] = _new_state(parameter, self._moments_device)
        reference = {} if self._reference is None else {_REFERENCE: _weights(self._reference)}
        return {
            **reference,
            "model": _weights(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer)["state"],
            "num_optimizer_steps": torch.tensor(num_optimizer_steps),
            _RNG: {f"rank_{self._rank}": generator_states(self._device_kind)},
        }

    def _trained(self) -> list[torch.Tensor]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]


class _Writer(FileSystemWriter):
    """Hashes files while it writes them, and raises operating system errors unwrapped."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.fs = self._files = _DigestingFiles()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy in host memory; torch's own implementation copies from the device twice."""
        return _copied(state_dict)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file and attach the tensors' digests to the results.

        The digests replace the archives' CRC32s, which cost about as much. torch.save wraps a
        file's OSError in a RuntimeError, and its context is lost on the way to the other ranks.
        """
        has_crc32s = get_crc32_options()
        set_crc32_options(False)
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
        finally:
            set_crc32_options(has_crc32s)
        digests = self._files.digests
        written: list[WriteResult] = [
            _Written(
                **vars(result),
                digest=digests[result.storage_data.relative_path][result.storage_data.offset],
            )
            for result in results
        ]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write .metadata and the list of all ranks' files for the manifest."""
        super().finish(metadata, results)
        places = sorted(
            (
                it.storage_data.relative_path,
                it.storage_data.offset,
                it.storage_data.length,
                it.digest,
            )
            for it in chain.from_iterable(results)
            if isinstance(it, _Written)
        )
        parts: dict[str, list[Part]] = {}
        for name, _, length, digest in places:
            parts.setdefault(name, []).append((length, digest))
        parts[METADATA_FILE] = [content_part((Path(self.path) / METADATA_FILE).read_bytes())]
        write_shards(Path(self.path), parts)


@dataclass(frozen=True)
class _Written(WriteResult):
    digest: str = ""


class _DigestingFiles(FileSystem):
    """torch's file system, extended with a blake3 digest of each tensor written."""

    def __init__(self) -> None:
        self.digests: dict[str, dict[int, str]] = {}  # by file name and tensor offset

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file and record the digests of what is written to it."""
        with super().create_stream(path, mode) as file:
            stream = _DigestingStream(file)
            yield cast("io.IOBase", stream)
            self.digests[Path(path).name] = stream.digests


class _DigestingStream:
    """A file that is hashed by tensor while it is written: torch calls `tell` around each."""

    def __init__(self, file: io.IOBase) -> None:
        self._file: Any = file
        self._digest, self._start = blake3(), 0
        self.digests: dict[int, str] = {}  # by offset of the part

    def write(self, content: Any) -> int:
        """Write and hash bytes."""
        self._digest.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        """Return the position, and end the current part there."""
        position = self._file.tell()
        if position > self._start:
            self.digests[self._start] = self._digest.hexdigest()
            self._digest, self._start = blake3(), position
        return position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Reader(FileSystemReader):
    """Reads .metadata safely: torch's own reader would execute a malicious pickle."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return torch's Metadata of the checkpoint."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Loads everything, but tolerates missing random generators and a missing reference model."""

    missing: frozenset[str] = frozenset()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Skip optional tensors that are missing from the checkpoint."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        stored = metadata.state_dict_metadata if metadata else {}
        self.missing = frozenset(
            name
            for name in self.state_dict
            if name.startswith((f"{_RNG}.", f"{_REFERENCE}.")) and name not in stored
        )
        self.state_dict = {
            name: value for name, value in self.state_dict.items() if name not in self.missing
        }


def _weights(model: nn.Module) -> dict[str, Any]:
    """Return parameters and persistent buffers by name, tied ones under their first name.

    Of a model with adapters, only those: the others never change.
    """
    tied, tensors = tied_names(model), get_model_state_dict(model)
    adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    return adapters or {name: tensor for name, tensor in tensors.items() if name not in tied}


def _new_state(parameter: torch.Tensor, moments_device: torch.device) -> dict[str, torch.Tensor]:
    """Return the AdamW state of a parameter before its first step."""
    moments = {
        name: torch.zeros_like(parameter).to(moments_device) for name in ("exp_avg", "exp_avg_sq")
    }
    return {"step": _NO_STEPS.clone(), **moments}


def _copied(state: Any) -> Any:
    """Return a nested dict with its tensors copied to host memory."""
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return state.detach().to("cpu", copy=True)


def _written_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor that this rank writes; the first replica writes it."""
    if not isinstance(tensor, DTensor):
        return tensor.nbytes if torch.distributed.get_rank() == 0 else 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of the mesh"
    is_copy = any(
        place and placement.is_replicate()
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return 0 if is_copy else tensor.to_local().nbytes


def _save_error(folder: str, failure: CheckpointException) -> Exception:
    """Return an OSError with the errno of a rank that failed to write, else a CheckpointError."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if isinstance(error, OSError) and error.errno is not None:
            return OSError(
                error.errno, f"rank {rank} cannot write its shards: {error.strerror}", folder
            )
    return CheckpointError(f"the shards cannot be written to {folder}: {_summary(failure)}")


def _summary(failure: CheckpointException) -> str:
    """Return the ranks' errors in one line; torch's own text includes their tracebacks."""
    return "; ".join(
        f"rank {rank}: {error!r}" for rank, (error, _) in sorted(failure.failures.items())
    )


def generator_states(device_kind: str) -> dict[str, torch.Tensor]:
    """Return the global generators' states by name; an accelerator's is named after its kind."""
    numpy_state = np.random.get_state(legacy=False)
    _, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        # float64 holds the 32-bit words and the cached normal draw exactly.
        "numpy": torch.tensor(
            [
                *numpy_state["state"]["key"],
                numpy_state["state"]["pos"],
                numpy_state["has_gauss"],
                numpy_state["gauss"],
            ],
            dtype=torch.float64,
        ),
        "python": torch.tensor(
            [*words, next_gauss is not None, next_gauss or 0.0], dtype=torch.float64
        ),
    }
    if device_kind != "cpu":
        states[device_kind] = torch.get_device_module(device_kind).get_rng_state()
    return states


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Restore the named generators and leave the others unchanged."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "numpy":
            *keys, position, has_gauss, gauss = state.tolist()
            np.random.set_state(
                ("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), gauss)
            )
        elif name == "python":
            *words, has_gauss, gauss = state.tolist()
            random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
        else:
            torch.get_device_module(name).set_rng_state(state)


def seed_generators(run_seed: int, rank: int, num_optimizer_steps: int) -> None:
    """Seed all generators with a stream unique to this rank and step count."""
    words = np.random.SeedSequence((run_seed, rank, num_optimizer_steps)).generate_state(4)
    torch.manual_seed(int.from_bytes(words[:2].tobytes(), "little"))  # also seeds accelerators
    np.random.seed(words)
    random.seed(words.tobytes())
