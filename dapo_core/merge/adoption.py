"""Opens weights that were trained elsewhere, if they are of the model that a recipe starts from."""

from __future__ import annotations

from pathlib import Path

from dapo_core.checkpoint.folder import HUGGINGFACE_FOLDER
from dapo_core.errors import CheckpointError
from dapo_core.merge.outputs import weights_in
from dapo_core.merge.run import checked_outputs, open_source
from dapo_core.merge.sources import Source
from dapo_core.merge.verl import FSDP_CONFIG_FILE, find_shards
from dapo_core.model.folder import INDEX_FILE, require_model_folder, weight_paths
from dapo_core.model.pretrained import empty_causal_lm, read_tokenizer

KEY = "adopt.folder"
_NAME_IT = "name the model that it was trained from (model.path or model.id)"


def open_trained(folder: Path, before: Path, trust_remote_code: bool = False) -> Source:
    """Return the weights in another trainer's output or checkpoint; reads headers alone.

    Raises ModelError for a folder without complete weights, and CheckpointError unless they have
    the tensors, the shapes and the tokenizer of the model in `before`.
    """
    source = open_source([require_weights(folder)])
    try:
        checked_outputs(source, empty_causal_lm(before), origin=f"of {before}")
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}: {error}; {_NAME_IT}") from None
    _require_same_tokens(source, before, trust_remote_code)
    return source


def require_weights(folder: Path) -> Path:
    """Return the folder with shards or a model in `folder`; raises ModelError if there is none."""
    place = weights_in(folder)
    if not find_shards([place]):
        require_model_folder(place, KEY)
    return place


def trained_files(place: Path) -> list[Path]:
    """Return the files with the weights, without optimizer state, and config.json."""
    if shards := find_shards([place]):
        files = [*shards, place / FSDP_CONFIG_FILE, place / HUGGINGFACE_FOLDER / "config.json"]
    else:
        files = [*weight_paths(place), place / INDEX_FILE, place / "config.json"]
    return [path for path in files if path.is_file()]


def _require_same_tokens(source: Source, before: Path, trust_remote_code: bool) -> None:
    """Raise CheckpointError if a token of the model before has another id, or none."""
    ids, known = (
        read_tokenizer(folder, trust_remote_code).get_vocab()
        for folder in (source.model_files, before)
    )
    others = sorted((token for token, number in known.items() if ids.get(token) != number), key=len)
    if others:
        raise CheckpointError(
            f"{KEY}: {source.model_files} has another tokenizer than {before}: {len(others)} of "
            f"its {len(known)} tokens have another id, such as {others[0]!r} "
            f"({ids.get(others[0])} instead of {known[others[0]]}); {_NAME_IT}, or copy its "
            "tokenizer into the folder"
        )
