"""The files of a Hugging Face model folder."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dapo_core.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MERGE_MANIFEST = "merge_manifest.json"  # beside the weights of a merged model
MANIFESTS = ("manifest.json", MERGE_MANIFEST)  # of the folder a model came in
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
CHAT_TEMPLATES = "additional_chat_templates"
FINGERPRINT_BYTES = 1024**2
PICKLE_INDEX = "pytorch_model.bin.index.json"
_STANDARD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_SMALL_FILES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_experts")
_PARTS = (
    ("config.json", ("config.json",)),
    ("weights (*.safetensors)", ("*.safetensors",)),
    ("a tokenizer (tokenizer.json or tokenizer_config.json)", ("tokenizer.json", "tokenizer_config.json")),
)
_OTHER_FORMS = {
    "adapter_config.json": "it holds a LoRA adapter: merge it into its base model, say by peft's merge_and_unload",
    "*.gguf": "it holds a GGUF file, which is quantized for inference: use the original model",
}


def require_model_folder(model_path: str | Path, key: str = "model.path") -> None:
    """Raise ModelError unless the folder has a configuration, weights and a tokenizer, and no link leads out.

    `key` is the one that names it.
    """
    folder = Path(model_path)
    if folder.is_file():
        raise ModelError(f"{folder} is a file, and a model is a whole folder; set {key} to a Hugging Face folder")
    if not folder.is_dir():
        where = f" in {Path.cwd()}" if not folder.is_absolute() else ""
        raise ModelError(f"model folder {folder} does not exist{where}; set {key} to a Hugging Face folder")
    missing = [what for what, patterns in _PARTS if not any(any(folder.glob(pattern)) for pattern in patterns)]
    if missing:
        instead = next((f" ({what})" for pattern, what in _OTHER_FORMS.items() if any(folder.glob(pattern))), "")
        raise ModelError(
            f"model folder {folder} lacks {' and '.join(missing)}; set {key} to a complete Hugging Face "
            f"folder{instead}"
        )
    require_own_files(folder)


def require_reference(path: str | None, model_path: Path | None = None) -> None:
    """Raise ModelError unless the folder that algorithm.kl.reference_path names, if it names one, is a model's.

    With the policy's folder also unless both have the sizes that config.json says; ranks compare every tensor.
    """
    if path is None:
        return
    require_model_folder(path, "algorithm.kl.reference_path")
    if model_path is None or not (model_path / "config.json").is_file():
        return
    its_config, own_config = (_read_config(Path(folder)) for folder in (path, model_path))
    for name in _SIZES:
        its, own = its_config.get(name), own_config.get(name)
        if its != own:
            raise ModelError(
                f"the reference model {path} has {name} {its} and the policy {own}: it must have the policy's "
                "architecture and sizes; name another algorithm.kl.reference_path"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read ({error}); fetch the model again") from error


def require_own_files(folder: Path) -> None:
    """Raise ModelError for a link that leads out of the folder: any file could be taken for the model's.

    A snapshot in a Hugging Face cache may link to the blobs beside it.
    """
    root = folder.resolve()
    places = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            continue
        target = _target_of(path)
        if not any(target.is_relative_to(place) for place in places):
            raise ModelError(
                f"{path} is a link to {target}, outside of the model folder; replace it with a copy, or "
                "set model.path to the folder that holds the files"
            )


def _target_of(link: Path) -> Path:
    """Where a link leads; raises ModelError for one of a circle of links."""
    try:
        return link.resolve()
    except (RuntimeError, OSError):  # a circle: RuntimeError before Python 3.13
        raise ModelError(
            f"{link} is a link to {link.readlink()}, which leads back to it; replace it with the file"
        ) from None


def weight_files(model_path: str | Path) -> dict[str, Path]:
    """The safetensors file of each tensor, by the tensor's name; only the index or the headers are read.

    Raises ModelError when the index cannot be read or names files that are not there.
    """
    folder = Path(model_path)
    index = folder / INDEX_FILE
    if index.is_file():
        places = _read_index(index)
        outside = sorted({file for file in places.values() if Path(file).name != file})
        if outside:
            raise ModelError(
                f"{INDEX_FILE} in {folder} names {outside[0]}, which is not a file name; fetch the model again"
            )
        lacking = sorted({file for file in places.values() if not (folder / file).is_file()})
        if lacking:
            raise ModelError(
                f"{folder} lacks {len(lacking)} of the {len(set(places.values()))} files that {INDEX_FILE} names, "
                f"such as {lacking[0]}; fetch the model again, or set model.path to a complete folder"
            )
        return {name: folder / file for name, file in places.items()}
    single = folder / SINGLE_FILE
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    return {name: path for path in paths for name in _names_in(path)}


def weight_names(model_path: str | Path) -> set[str]:
    """Names of the tensors in the folder's safetensors files."""
    return set(weight_files(model_path))


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that are not weights: config, tokenizer, chat templates, generation config."""
    return [
        path
        for path in sorted((*folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATES}/*")))
        if path.is_file()
        and path.suffix not in WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.name not in MANIFESTS
    ]


def copy_model_files(source: Path, target: Path) -> None:
    """Copy a model folder without its weights; raises ModelError for a link that leads out of it."""
    require_own_files(source)
    files = model_files(source)
    for folder in {target, *(target / path.relative_to(source).parent for path in files)}:
        folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, target / path.relative_to(source))


def _read_index(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{index} is no index of weights ({error!r}); fetch the model again") from error


def _names_in(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def model_fingerprint(model_path: str | Path) -> str:
    """sha256 over config.json and over name, size, first and last MiB of every weight file.

    Enough to distinguish models, without the minutes that reading all weights takes.
    """
    folder = Path(model_path)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(size - FINGERPRINT_BYTES, 0))
            digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def files_to_fetch(paths: Iterable[str], allow_pickle: bool = False, with_code: bool = False) -> list[str]:
    """Of a repository's files those that training and serving read, sorted.

    Weights in safetensors once, without copies in other formats, precisions and folders; configuration, tokenizer,
    chat templates, licence; Python files only `with_code`. Raises ModelError when these are no complete model.
    """
    top = [path for path in paths if "/" not in path or path.startswith(f"{CHAT_TEMPLATES}/")]
    weights = [path for path in top if path.endswith(".safetensors")]
    weights = [path for path in weights if _STANDARD_WEIGHTS.fullmatch(path)] or weights
    if INDEX_FILE in top and len(weights) > 1:
        weights = [path for path in weights if path != SINGLE_FILE]
    pickles = [path for path in top if _PICKLED_WEIGHTS.fullmatch(path)]
    if not weights and allow_pickle:
        weights = pickles
    if "config.json" not in top or not weights or not {"tokenizer.json", "tokenizer_config.json"} & {*top}:
        raise ModelError(_why_no_model(top, weights, pickles))
    indexes = {INDEX_FILE} if weights[0].endswith(".safetensors") else {PICKLE_INDEX}
    small = [
        path
        for path in top
        if (Path(path).suffix in _SMALL_FILES and not path.endswith(".index.json")) or path.startswith("LICENSE")
    ]
    code = [path for path in paths if path.endswith(".py")] if with_code else []
    return sorted({*weights, *small, *code, *(indexes & {*top})})


def _why_no_model(top: list[str], weights: list[str], pickles: list[str]) -> str:
    if "adapter_config.json" in top and "config.json" not in top:
        return "it holds an adapter, not a model: merge it into its base model, and set model.path to the result"
    if not weights and pickles:
        return (
            f"its weights are pickled ({pickles[0]}), a format that can run code; model.allow_pickle=true reads "
            "them as tensors only, and converts them to safetensors"
        )
    if not weights:
        others = sorted({Path(path).suffix for path in top} & WEIGHT_SUFFIXES)
        had = f", but weights as {' '.join(others)}" if others else ""
        return f"it has no safetensors{had}; name a repository with the original weights"
    lacking = (
        "config.json" if "config.json" not in top else "a tokenizer (tokenizer.json or tokenizer_config.json)"
    )
    return f"it lacks {lacking}; name a complete model, or fetch it by hand and set model.path"
