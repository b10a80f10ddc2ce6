"""Every rank's part of weights, optimizer and random generators, in files of torch.distributed.checkpoint.

    model.NAME                        parameters, tied ones once, and the persistent buffers
    optimizer.NAME.{step,exp_avg,exp_avg_sq}   AdamW's state of each parameter
    reference.NAME                parameters of a reference model that changes (algorithm.kl.refresh_every)
    num_optimizer_steps
    rng.rank_R.GENERATOR              states of rank R's random generators
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
from dapo_core.device import Device
from dapo_core.digests import Part, content_part
from dapo_core.errors import CheckpointError
from dapo_core.parameter_names import tied_names

_RNG, _REFERENCE = "rng", "reference"
_NO_STEPS = torch.tensor(0.0, dtype=torch.float32)


class Shards:
    """This rank's part of a model, its AdamW optimizer and the process's random generators, saved and loaded.

    `__init__`, `save` and `load` are collective. They use a host process group of their own, so that training may
    use the default one during a save.
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
        """New moments are created on the host if `offload_optimizer` is set, else on the device.

        `reference` is saved, too; a checkpoint without one leaves it as it is.
        """
        self._model = model
        self._reference = reference
        self._optimizer = optimizer
        self._device_kind = device.kind
        self._moments_device = torch.device("cpu") if offload_optimizer else device.torch_device()
        self._run_seed = run_seed
        self._rank = torch.distributed.get_rank()
        self._group = torch.distributed.new_group(backend="gloo")
        self._running: tuple[str, Future[Any]] | None = None  # the folder being written, and its write

    def save(self, folder: str, num_optimizer_steps: int, asynchronous: bool) -> None:
        """Write into the folder. Asynchronous: return when the state is copied to host memory; see is_saved.

        Raises OSError with the errno of a write that failed on any rank, else CheckpointError, on every rank.
        """
        self._require_idle()
        state = self._state(num_optimizer_steps)
        if asynchronous:
            writer = _Writer(folder, per_thread_copy_ahead=0)  # its copies are from a device
            writing: Any = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            self._running = folder, writing  # a future, except for torch's own stagers
            return
        try:
            dcp.save(state, storage_writer=_Writer(folder), process_group=self._group)
        except CheckpointException as failure:
            raise _save_error(folder, failure) from failure

    def is_saved(self) -> bool:
        """Whether no asynchronous save is running; raises once what the last one raised, as `save` would."""
        if self._running is None:
            return True
        folder, writing = self._running
        if not writing.done():
            return False
        self._running = None
        try:
            writing.result()
        except CheckpointException as failure:
            raise _save_error(folder, failure) from failure
        return True

    def end_save(self) -> None:
        """Wait for the running asynchronous save, and forget its outcome."""
        if self._running is not None:
            wait([self._running[1]])
        self._running = None

    def load(self, folder: str) -> int:
        """Load in place what any number of ranks wrote; returns the number of optimizer steps.

        Generators that the folder lacks begin a new stream. Raises CheckpointError on every rank when the shards
        do not fit the model or cannot be read.
        """
        self._require_idle()
        state = self._state(num_optimizer_steps=0)
        planner = _LoadPlanner()
        try:
            dcp.load(state, storage_reader=_Reader(folder), planner=planner, process_group=self._group)
        except CheckpointException as failure:
            raise CheckpointError(f"the shards in {folder} cannot be loaded: {_summary(failure)}") from failure
        num_optimizer_steps = int(state["num_optimizer_steps"])
        if any(name.startswith(f"{_RNG}.") for name in planner.left_out):
            seed_generators(self._run_seed, self._rank, num_optimizer_steps)
        own = f"rank_{self._rank}"
        generators = state[_RNG][own]
        set_generators({n: s for n, s in generators.items() if f"{_RNG}.{own}.{n}" not in planner.left_out})
        return num_optimizer_steps

    def num_bytes(self) -> int:
        """Bytes of parameters and optimizer state that `save` writes on this rank; replicas count on one rank.

        A save also writes less than 2 KiB per tensor and 15 KiB of random generators per rank.
        """
        tensors: list[Any] = list(_weights(self._model).values())
        if self._reference is not None:
            tensors += _weights(self._reference).values()
        for parameter in self._trained():
            future = {"step": _NO_STEPS, "exp_avg": parameter, "exp_avg_sq": parameter}  # in size
            tensors += (self._optimizer.state.get(parameter) or future).values()
        return sum(_written_bytes(tensor) for tensor in tensors)

    def _require_idle(self) -> None:
        if self._running is not None:
            raise CheckpointError(
                f"the checkpoint in {self._running[0]} is still being written; call is_saved until it is True "
                "before the next save or load"
            )

    def _state(self, num_optimizer_steps: int) -> dict[str, Any]:
        """Everything that is saved, as the live tensors; loading fills them in place."""
        # torch would create missing moments by a step without gradients, which counts as a step, and not at all
        # where a skipped update has left gradients.
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
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


class _Writer(FileSystemWriter):
    """Writes files, takes their digests meanwhile, and raises errors of the operating system as they are."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.fs = self._files = _DigestingFiles()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory; torch's own copies from the device twice."""
        return _copied(state_dict)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file; the results have the digests of its tensors.

        The digests take the place of the archives' CRC32s, which cost as much. torch.save wraps an OSError of its
        file in a RuntimeError, whose context, with the cause, is lost on the way to the other ranks.
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
            _Written(**vars(result), digest=digests[result.storage_data.relative_path][result.storage_data.offset])
            for result in results
        ]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write .metadata, and the list of all ranks' files for the checkpoint's manifest."""
        super().finish(metadata, results)
        places = sorted(
            (it.storage_data.relative_path, it.storage_data.offset, it.storage_data.length, it.digest)
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
    """torch's way to the disk, which takes the blake3 of each tensor on its way into a file."""

    def __init__(self) -> None:
        self.digests: dict[str, dict[int, str]] = {}  # by file and by the tensor's offset

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to write to whose digests are kept, or one to read."""
        with super().create_stream(path, mode) as file:
            stream = _DigestingStream(file)
            yield cast("io.IOBase", stream)
            self.digests[Path(path).name] = stream.digests


class _DigestingStream:
    """A file being written. Bytes between two calls of `tell` are one part: torch calls it around each tensor."""

    def __init__(self, file: io.IOBase) -> None:
        self._file: Any = file
        self._digest, self._start = blake3(), 0
        self.digests: dict[int, str] = {}  # by the part's offset

    def write(self, content: Any) -> int:
        """Write bytes and hash them."""
        self._digest.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        """The position, at which a part ends."""
        position = self._file.tell()
        if position > self._start:
            self.digests[self._start] = self._digest.hexdigest()
            self._digest, self._start = blake3(), position
        return position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Reader(FileSystemReader):
    """Reads .metadata without running what a planted one holds, unlike torch's own."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """torch's Metadata of the checkpoint."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Loads everything, except random generators and a reference model that the checkpoint lacks."""

    left_out: frozenset[str] = frozenset()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Leave out what the checkpoint may lack and does."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        stored = metadata.state_dict_metadata if metadata else {}
        self.left_out = frozenset(
            name
            for name in self.state_dict
            if name.startswith((f"{_RNG}.", f"{_REFERENCE}.")) and name not in stored
        )
        self.state_dict = {name: value for name, value in self.state_dict.items() if name not in self.left_out}


def _weights(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by name, tied ones under their first."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in tied}


def _new_state(parameter: torch.Tensor, moments_device: torch.device) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter before its first step."""
    moments = {name: torch.zeros_like(parameter).to(moments_device) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": _NO_STEPS.clone(), **moments}


def _copied(state: Any) -> Any:
    """The nested dict with copies of its tensors in host memory."""
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return state.detach().to("cpu", copy=True)


def _written_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor that this rank writes; of several replicas the first writes."""
    if not isinstance(tensor, DTensor):
        return tensor.nbytes if torch.distributed.get_rank() == 0 else 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of the mesh"
    is_copy = any(
        place and not placement.is_shard() for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return 0 if is_copy else tensor.to_local().nbytes


def _save_error(folder: str, failure: CheckpointException) -> Exception:
    """OSError with the errno of the first rank on which the system refused to write, else CheckpointError."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if isinstance(error, OSError) and error.errno is not None:
            return OSError(error.errno, f"rank {rank} cannot write its shards: {error.strerror}", folder)
    return CheckpointError(f"the shards cannot be written to {folder}: {_summary(failure)}")


def _summary(failure: CheckpointException) -> str:
    """The ranks' errors in one line; torch's own text has a traceback of each."""
    return "; ".join(f"rank {rank}: {error!r}" for rank, (error, _) in sorted(failure.failures.items()))


def generator_states(device_kind: str) -> dict[str, torch.Tensor]:
    """States of the global generators by name; an accelerator's is named after its kind."""
    of_numpy = np.random.get_state(legacy=False)
    _, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        # 32-bit words and the second of a pair of normal draws: float64 holds both exactly.
        "numpy": torch.tensor(
            [*of_numpy["state"]["key"], of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]],
            dtype=torch.float64,
        ),
        "python": torch.tensor([*words, next_gauss is not None, next_gauss or 0.0], dtype=torch.float64),
    }
    if device_kind != "cpu":
        states[device_kind] = torch.get_device_module(device_kind).get_rng_state()
    return states


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Restore the named generators; the others stay as they are."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "numpy":
            *keys, position, has_gauss, gauss = state.tolist()
            np.random.set_state(("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), gauss))
        elif name == "python":
            *words, has_gauss, gauss = state.tolist()
            random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
        else:
            torch.get_device_module(name).set_rng_state(state)


def seed_generators(run_seed: int, rank: int, num_optimizer_steps: int) -> None:
    """Seed every generator with a stream unique to this rank and number of steps."""
    words = np.random.SeedSequence((run_seed, rank, num_optimizer_steps)).generate_state(4)
    torch.manual_seed(int.from_bytes(words[:2].tobytes(), "little"))  # of accelerators as well
    np.random.seed(words)
    random.seed(words.tobytes())
