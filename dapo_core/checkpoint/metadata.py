"""Reads .metadata, the tensor list of a distributed checkpoint, without executing its pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from dapo_core.errors import CheckpointError

METADATA_FILE = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
}


class _Unpickler(pickle.Unpickler):
    """Builds only the classes that .metadata needs; torch's own reader executes any pickle."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if name in _CLASSES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it references {module}.{name}, which no checkpoint needs")


def read_metadata(checkpoint: Path) -> Any:
    """Return torch's Metadata; raises CheckpointError unless it is a plain tensor list."""
    try:
        with (checkpoint / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        places = {place.relative_path for place in metadata.storage_data.values()}
        if outside := sorted(name for name in places if Path(name).name != name):
            raise ValueError(f"it names {outside[0]}, which is outside the checkpoint")
        if any(place.offset < 0 or place.length < 0 for place in metadata.storage_data.values()):
            raise ValueError("it has a negative offset")
        metadata.state_dict_metadata.items()
    except Exception as error:  # the file may contain anything
        raise CheckpointError(
            f"{METADATA_FILE} in {checkpoint} cannot be read ({error}), so its shards cannot be "
            "located; copy it from the node that wrote it, or use another checkpoint"
        ) from error
    return metadata
