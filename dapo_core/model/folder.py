"""Files of a Hugging Face model folder."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from dapo_core.errors import ModelError, counted
from durable import is_lfs_pointer

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MERGE_MANIFEST = "merge_manifest.json"  # next to the weights of a merged model
MANIFESTS = ("manifest.json", MERGE_MANIFEST)  # not part of the model
WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}
)
CHAT_TEMPLATES = "additional_chat_templates"
FINGERPRINT_BYTES = 1024**2
IMAGE_TOKEN = "image_token_id"  # in config.json of a model that reads pictures
PICKLE_INDEX = "pytorch_model.bin.index.json"
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_STANDARD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_SMALL_FILES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
_PART_SUFFIXES = _SMALL_FILES | {".safetensors", ".py"}
_PART_NAMES = ("LICENSE", CHAT_TEMPLATES)
_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_experts",
)
_OTHER_FORMS = {
    "adapter_config.json": "it contains a LoRA adapter: merge it into its base model",
    "*.gguf": "it contains a GGUF file, which is quantized for inference: use the original model",
    "pytorch_model*.bin": "its weights are pickled, a format that can run code: load and "
    "save_pretrained it with transformers, or fetch it with model.allow_pickle=true, which loads "
    "only tensors",
    "model_world_size_*.pt": "it contains verl's shards: merge them with dapo merge",
    "*.distcp": "it contains the shards of a checkpoint: merge them with dapo merge",
    INDEX_FILE: "it contains only the index of its weights: fetch the files that it lists",
}


def require_model_folder(model_path: str | Path, key: str = "model.path") -> None:
    """Raise ModelError unless the folder has configuration, weights, tokenizer and no outer link.

    `key` is the configuration key of the folder.
    """
    folder = Path(model_path)
    if folder.is_file():
        raise ModelError(
            f"{folder} is a file, not a model folder; set {key} to a Hugging Face folder"
        )
    if not folder.is_dir():
        where = f" in {Path.cwd()}" if not folder.is_absolute() else ""
        raise ModelError(
            f"model folder {folder} does not exist{where}; set {key} to a Hugging Face folder"
        )
    skipped_links(folder)
    inner = (*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json"))
    names = [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *inner)]
    if lacks := _lacks(names, has_weights=any(folder.glob("*.safetensors"))):
        raise ModelError(
            f"model folder {folder} lacks {lacks}; set {key} to a complete Hugging Face folder"
        )
    files = [path for path in sorted(folder.glob("*")) if path.is_file()]
    pointers = [path.name for path in files if is_lfs_pointer(path)]
    if pointers:
        raise ModelError(
            f"{folder} has {counted(len(pointers), 'Git LFS pointer')} instead of files, such as "
            f"{pointers[0]}; run `git lfs pull` there, or fetch the model with model.source"
        )


def require_reference(path: str | None, model_path: Path | None = None) -> None:
    """Raise ModelError unless algorithm.kl.reference_path, if set, is a model folder.

    With `model_path`, also compares the sizes in config.json with the policy's; ranks compare every
    tensor later.
    """
    if path is None:
        return
    require_model_folder(path, "algorithm.kl.reference_path")
    if model_path is None or not (model_path / "config.json").is_file():
        return
    reference_config, policy_config = read_config(Path(path)), read_config(model_path)
    for name in _SIZES:
        actual, expected = reference_config.get(name), policy_config.get(name)
        if actual != expected:
            raise ModelError(
                f"the reference model {path} has {name} {actual}, but the policy has {expected}: "
                "both must have "
                "the same architecture and sizes; set another algorithm.kl.reference_path"
            )


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the contents of a JSON file; raises ModelError if it is not a JSON object."""
    path = folder / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again") from error
    return config


def skipped_links(folder: Path) -> set[Path]:
    """Return the links that lead out of the folder or nowhere, and are not part of the model.

    Raises ModelError for those that are: a link could expose any file. A snapshot in a Hugging Face
    cache may link to its blobs.
    """
    root = folder.resolve()
    allowed = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    skipped = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            continue
        fault = _fault_of(path, allowed)
        if fault and (path.suffix in _PART_SUFFIXES or path.name.startswith(_PART_NAMES)):
            raise ModelError(
                f"{path} is {fault}; replace it with a copy, or set model.path to the folder with "
                "the files"
            )
        if fault:
            skipped.add(path)
    return skipped


def _fault_of(link: Path, allowed: Sequence[Path]) -> str:
    """Return what is wrong with a link; "" if it leads to a file in one of the folders."""
    try:
        target = link.resolve()
    except (RuntimeError, OSError):  # a circle: RuntimeError before Python 3.13
        return f"a circular link to {link.readlink()}"
    if not any(target.is_relative_to(parent) for parent in allowed):
        return f"a link to {target}, outside the model folder"
    return "" if target.exists() else f"a link to {target}, which does not exist"


def weight_paths(folder: Path) -> list[Path]:
    """Return the safetensors files of the model, without copies in other formats.

    Raises ModelError if the index cannot be read or files are missing.
    """
    if (folder / INDEX_FILE).is_file():
        names = sorted({*read_index(folder).values()})
    else:
        names = _main_weights((path.name for path in folder.glob("*.safetensors")), has_index=False)
        if names and (shard := _SHARD.fullmatch(names[0])):
            count = shard[1]
            names = [f"model-{n:05}-of-{count}.safetensors" for n in range(1, int(count) + 1)]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of its {counted(len(names), 'weight file')}, such as "
            f"{missing[0]}; fetch the model again, or set model.path to a complete folder"
        )
    return [folder / name for name in names]


def read_index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor in the index; raises ModelError for other contents."""
    weight_map = read_config(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{folder / INDEX_FILE} is not a weight index: weight_map is {weight_map!r:.80}; fetch "
            "the model again"
        )
    for file in {*map(str, weight_map.values())}:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{INDEX_FILE} in {folder} names {file}, which is not a weight file; fetch the "
                "model again"
            )
    return weight_map


def _main_weights(names: Iterable[str], has_index: bool) -> list[str]:
    """Return the safetensors files with standard names, else all, without copies."""
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    weights = [name for name in weights if _STANDARD_WEIGHTS.fullmatch(name)] or weights
    if SINGLE_FILE not in weights or weights == [SINGLE_FILE]:
        return weights
    return [name for name in weights if name != SINGLE_FILE] if has_index else [SINGLE_FILE]


def model_files(folder: Path) -> list[Path]:
    """Return the folder's files but weights: config, tokenizer, templates, generation config.

    Raises ModelError for one that is a link out of the folder.
    """
    skipped = skipped_links(folder)
    return [
        path
        for path in sorted((*folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATES}/*")))
        if path.is_file()
        and path.suffix not in WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.name not in MANIFESTS
        and path not in skipped
    ]


def copy_model_files(source: Path, target: Path) -> None:
    """Copy a model folder without weights; raises ModelError for a link that leads out."""
    files = model_files(source)
    for folder in sorted({target, *(target / path.relative_to(source).parent for path in files)}):
        folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, target / path.relative_to(source))


def model_fingerprint(model_path: str | Path) -> str:
    """Return a sha256 over config.json and the name, size, first and last MiB of every weight file.

    Enough to distinguish models without reading all weights, which takes minutes.
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


def files_to_fetch(
    paths: Iterable[str], allow_pickle: bool = False, with_code: bool = False
) -> list[str]:
    """Return the files of a repository that training and serving need, sorted.

    These are safetensors weights (without copies in other formats, precisions or folders),
    configuration, tokenizer, chat templates, licence, and, with `with_code`, Python files. Raises
    ModelError if the model is incomplete.
    """
    top = [path for path in paths if "/" not in path or path.startswith(f"{CHAT_TEMPLATES}/")]
    weights = _main_weights(top, INDEX_FILE in top)
    if not weights and allow_pickle:
        weights = [path for path in top if _PICKLED_WEIGHTS.fullmatch(path)]
    if lacks := _lacks(top, has_weights=bool(weights)):
        raise ModelError(f"it lacks {lacks}; use a complete model")
    indexes = {INDEX_FILE} if weights[0].endswith(".safetensors") else {PICKLE_INDEX}
    small = [
        path
        for path in top
        if (Path(path).suffix in _SMALL_FILES and not path.endswith(".index.json"))
        or path.startswith("LICENSE")
    ]
    code = [path for path in paths if path.endswith(".py")] if with_code else []
    return sorted({*weights, *small, *code, *(indexes & {*top})})


def _lacks(names: Collection[str], has_weights: bool) -> str:
    """Return which parts of a model are not among the files, and what may be there instead."""
    has_tokenizer = not {*names}.isdisjoint(("tokenizer.json", "tokenizer_config.json"))
    parts = {
        "config.json": "config.json" in names,
        "weights (*.safetensors)": has_weights,
        "a tokenizer (tokenizer.json or tokenizer_config.json)": has_tokenizer,
    }
    missing = " and ".join(part for part, is_there in parts.items() if not is_there)
    forms = [form for pattern, form in _OTHER_FORMS.items() if fnmatch.filter(names, pattern)]
    inner = sorted(fnmatch.filter(names, "*/config.json"))
    forms += [f"a model is in its folder {Path(name).parent}" for name in inner]
    return f"{missing} ({forms[0]})" if missing and forms else missing
