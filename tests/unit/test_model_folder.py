"""Which file holds which tensor of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo_core.errors import ModelError
from dapo_core.model_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    copy_model_files,
    model_fingerprint,
    require_model_folder,
    weight_files,
    weight_names,
)
from tests.tiny_models import build_tiny_qwen3


def _save(path: Path, *names: str) -> None:
    save_file({name: torch.zeros(1) for name in names}, path)


def test_an_index_or_the_headers_say_where_tensors_are(tmp_path: Path) -> None:
    _save(tmp_path / "one.safetensors", "a")
    _save(tmp_path / "two.safetensors", "b", "c")
    assert weight_names(tmp_path) == {"a", "b", "c"}
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert weight_files(tmp_path) == {"a": tmp_path / "one.safetensors", "b": tmp_path / "two.safetensors"}
    (tmp_path / INDEX_FILE).unlink()
    _save(tmp_path / SINGLE_FILE, "d")  # the name transformers and vLLM look for first
    assert weight_files(tmp_path) == {"d": tmp_path / SINGLE_FILE}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}', "lacks 2 of the 2 files .* such as x"),
        ("{}", r"is no index of weights \(KeyError"),
        ("<html>", "is no index of weights"),
        ('{"weight_map": {"a": 1}}', "is no index of weights"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "names '../other/model.safetensors', which is no"),
        ('{"weight_map": {"a": "/etc/hostname"}}', "names '/etc/hostname', which is no file of this folder"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ModelError, match=message):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["notes.json", "additional_chat_templates/tool.jinja", "model-2.safetensors"])
def test_no_link_leads_out_of_a_model_folder(tmp_path: Path, name: str) -> None:
    folder, secret = build_tiny_qwen3(tmp_path / "model"), tmp_path / "secret"
    secret.write_text("private")
    (folder / name).parent.mkdir(exist_ok=True)
    for place in (secret, Path("../secret" if "/" not in name else "../../secret")):
        (folder / name).symlink_to(place)
        for use in (require_model_folder, lambda source: copy_model_files(source, tmp_path / "copy")):
            with pytest.raises(ModelError, match=rf"{name} is a link to {secret}, outside the model folder"):
                use(folder)
        (folder / name).unlink()
    assert not (tmp_path / "copy").exists()


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot as the Hugging Face hub downloads it: links to blobs."""
    built = build_tiny_qwen3(tmp_path / "built")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    built.rename(repository / "blobs")
    for blob in (repository / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_snapshot_of_the_hub_cache_is_a_model_folder(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (tmp_path / "current").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "current"):
        require_model_folder(folder)
    copy_model_files(snapshot, tmp_path / "copy")
    assert not [path for path in (tmp_path / "copy").iterdir() if path.is_symlink()]
    blobs = snapshot.parents[1] / "blobs"
    (blobs / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is a link to .*, which does not exist"):
        require_model_folder(snapshot)
    # A folder that only looks like a cache: its blobs are elsewhere.
    blobs.rename(tmp_path / "elsewhere")
    (tmp_path / "config.json").rename(tmp_path / "elsewhere" / "config.json")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="outside the model folder"):
        require_model_folder(snapshot)


def test_a_fingerprint_tells_models_apart_and_not_folders(tmp_path: Path) -> None:
    folders = [build_tiny_qwen3(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    prints = [model_fingerprint(folder) for folder in folders]
    assert prints[0] == prints[1] != prints[2]
    (folders[1] / "config.json").write_text("{}", encoding="utf-8")
    assert model_fingerprint(folders[1]) != prints[0]
