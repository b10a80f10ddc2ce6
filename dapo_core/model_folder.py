"""What a Hugging Face model folder must hold."""

from __future__ import annotations

from pathlib import Path

from dapo_core.errors import ModelError

_PARTS = (
    ("config.json", ("config.json",)),
    ("weights (*.safetensors)", ("*.safetensors",)),
    ("a tokenizer (tokenizer.json or tokenizer_config.json)", ("tokenizer.json", "tokenizer_config.json")),
)


def require_model_folder(model_path: str | Path) -> None:
    """Raise ModelError unless the folder has a configuration, weights and a tokenizer."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; set model.path to a Hugging Face folder")
    missing = [what for what, patterns in _PARTS if not any(any(folder.glob(pattern)) for pattern in patterns)]
    if missing:
        raise ModelError(
            f"model folder {folder} lacks {' and '.join(missing)}; "
            "set model.path to a complete Hugging Face folder"
        )


def weight_names(model_path: str | Path) -> set[str]:
    """Names of the tensors in the folder's safetensors files; only their headers are read."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in Path(model_path).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names
