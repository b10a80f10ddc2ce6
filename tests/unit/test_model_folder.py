"""Files of a model folder: locating tensors, links, fetching, and incomplete models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo_core.errors import ModelError
from dapo_core.model.folder import (
    INDEX_FILE,
    SINGLE_FILE,
    copy_model_files,
    files_to_fetch,
    model_fingerprint,
    require_model_folder,
    require_reference,
)
from dapo_core.model.tensors import weight_files, weight_names
from tasks.config import ModelConfig
from tasks.fetched_model import link_model_folder
from tests.tiny_models import build_tiny_qwen3


def _save(path: Path, *names: str) -> None:
    save_file({name: torch.zeros(1) for name in names}, path)


def test_tensors_are_located_by_headers_even_if_the_index_confuses_files(tmp_path: Path) -> None:
    _save(tmp_path / "one.safetensors", "a")
    _save(tmp_path / "two.safetensors", "b", "c")
    assert weight_names(tmp_path) == {"a", "b", "c"}
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert weight_files(tmp_path) == {
        "a": tmp_path / "one.safetensors",
        "b": tmp_path / "two.safetensors",
    }
    (tmp_path / INDEX_FILE).unlink()
    _save(tmp_path / SINGLE_FILE, "d")  # the name transformers and vLLM look for first
    assert weight_files(tmp_path) == {"d": tmp_path / SINGLE_FILE}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}',
            "lacks 2 of its 2 weight files",
        ),
        ("{}", "is not a weight index: weight_map is None"),
        ("<html>", "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"weight_map": {"a": 3}}', "names 3, which is not a weight file"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"names \.\./x\.safetensors, which is not a"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ModelError, match=message):
        weight_files(tmp_path)


def test_a_fingerprint_depends_on_the_model_not_the_folder(tmp_path: Path) -> None:
    folders = [
        build_tiny_qwen3(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    prints = [model_fingerprint(folder) for folder in folders]
    assert prints[0] == prints[1] != prints[2]
    (folders[1] / "config.json").write_text("{}", encoding="utf-8")
    assert model_fingerprint(folders[1]) != prints[0]


def test_links_may_only_lead_to_the_blobs_of_a_cache(tmp_path: Path) -> None:
    """As in a cache: models--x/snapshots/REVISION/config.json -> ../../blobs/DIGEST."""
    cache, target = tmp_path / "models--x", tmp_path / "copy"
    snapshot = build_tiny_qwen3(cache / "snapshots" / "1a2b")
    (cache / "blobs").mkdir()
    (snapshot / "config.json").rename(cache / "blobs" / "digest")
    (snapshot / "config.json").symlink_to("../../blobs/digest")
    require_model_folder(snapshot)
    copy_model_files(snapshot, target)
    assert not (target / "config.json").is_symlink()
    secret = tmp_path / "secret"
    secret.write_text("{}")
    link = snapshot / "generation_config.json"
    link.unlink()
    link.symlink_to(secret)
    for refuse in (
        require_model_folder,
        lambda folder: copy_model_files(folder, tmp_path / "stolen"),
    ):
        with pytest.raises(
            ModelError, match=rf"generation_config\.json is a link to {secret}, outside the model"
        ):
            refuse(snapshot)
    assert not (tmp_path / "stolen").exists()
    link.unlink()
    (cache / "blobs" / "digest").unlink()
    (cache / "blobs" / "digest").symlink_to(secret)  # a blob that is a link itself
    with pytest.raises(ModelError, match=r"config\.json is a link to"):
        require_model_folder(snapshot)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_circular_and_broken_links_are_refused(tmp_path: Path, name: str) -> None:
    folder = build_tiny_qwen3(tmp_path / "model")
    (folder / name).unlink()
    (folder / name).symlink_to("other")
    with pytest.raises(ModelError, match=rf"{name} is a link to .*other, which does not exist;"):
        require_model_folder(folder)
    (folder / "other").symlink_to(name)
    with pytest.raises(ModelError, match=rf"{name} is a circular link to other; replace it"):
        require_model_folder(folder)


def test_links_that_a_model_does_not_need_are_skipped(tmp_path: Path) -> None:
    folder, copy, linked = (
        build_tiny_qwen3(tmp_path / "model"),
        tmp_path / "copy",
        tmp_path / "linked",
    )
    files = {path.name for path in folder.iterdir()}
    (tmp_path / "secret").write_text("secret")
    targets = {"README.md": "../secret", "logs": "..", "gone.bin": "gone", "loop": "loop"}
    for name, target in targets.items():
        (folder / name).symlink_to(target)
    require_model_folder(folder)
    copy_model_files(folder, copy)
    linked.mkdir()
    link_model_folder(ModelConfig(path=str(folder)), linked)
    assert {path.name for path in linked.iterdir()} == files
    assert {path.name for path in copy.iterdir()} == files - {"model.safetensors"}


SMALL = ["config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
SHARDS = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        (
            ["model.safetensors", "README.md", ".gitattributes", "LICENSE"],
            ["model.safetensors", "LICENSE"],
        ),
        (
            [*SHARDS, "consolidated.safetensors", "params.json", "original/consolidated.00.pth"],
            [*SHARDS, "params.json"],
        ),
        ([*SHARDS, "model.safetensors", "model.fp16.safetensors"], SHARDS),
        (
            ["model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"],
            ["model.safetensors"],
        ),
        (["weights.safetensors", "chat_template.jinja", "tokenizer.model"], None),
        (["model.safetensors", "additional_chat_templates/tool_use.jinja"], None),
        (
            ["model.safetensors", "modeling_x.py", "figures/plot.png", "model-q4.gguf"],
            ["model.safetensors"],
        ),
    ],
)
def test_only_files_in_use_are_fetched_from_a_repository(
    others: list[str], kept: list[str] | None
) -> None:
    assert files_to_fetch([*SMALL, *others]) == sorted(
        [*SMALL, *(others if kept is None else kept)]
    )


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([*SMALL, "pytorch_model.bin"], r"lacks weights .*\(its weights are pickled"),
        ([*SMALL, "model-q4.gguf"], r"lacks weights \(\*\.safetensors\) \(it contains a GGUF"),
        (["adapter_config.json", "adapter_model.safetensors"], "it contains a LoRA adapter"),
        ([*SMALL[1:], "model.safetensors"], r"it lacks config\.json;"),
    ],
)
def test_a_repository_without_a_model_is_refused_with_the_reason(
    paths: list[str], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        files_to_fetch(paths)


def test_pickles_and_code_are_fetched_only_if_allowed() -> None:
    pickles = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)] + [
        "pytorch_model.bin.index.json"
    ]
    code = ["modeling_x.py", "parts/rope.py"]
    paths = [*SMALL, *pickles, *code, "training_args.bin"]
    assert files_to_fetch(paths, allow_pickle=True) == sorted([*SMALL, *pickles])
    assert files_to_fetch(paths, allow_pickle=True, with_code=True) == sorted(
        [*SMALL, *pickles, *code]
    )


def test_a_reference_model_with_other_sizes_is_refused(tmp_path: Path) -> None:
    policy, same = (build_tiny_qwen3(tmp_path / name) for name in ("policy", "same"))
    require_reference(None, policy)
    require_reference(str(same), policy)
    require_reference(str(same), tmp_path / "not fetched yet")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(ModelError, match="same has num_hidden_layers 7, but the policy has 2"):
        require_reference(str(same), policy)
    (same / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        require_reference(str(same), policy)
    with pytest.raises(ModelError, match=r"does not exist; set algorithm\.kl\.reference_path to"):
        require_reference(str(tmp_path / "nowhere"), policy)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", r"lacks config\.json .*\(it contains a LoRA adapter"),
        ("snapshots/1a2b/config.json", r"\(a model is in its folder snapshots/1a2b\); set"),
    ],
)
def test_what_an_incomplete_folder_contains_is_named_in_the_error(
    tmp_path: Path, file: str, said: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=said):
        require_model_folder(tmp_path)
    with pytest.raises(
        ModelError, match=rf"{file} is a file, not a model folder; set model\.path to"
    ):
        require_model_folder(tmp_path / file)
