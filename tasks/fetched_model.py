"""Model folders from a hub, a web server or a path: reference, files, fetching, additions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from rich.filesize import decimal

import downloads
from dapo_core.errors import ConfigError, ModelError
from dapo_core.model.folder import (
    files_to_fetch,
    read_config,
    require_model_folder,
    skipped_links,
)
from dapo_core.model.lora import is_adapter_folder
from dapo_core.model.pretrained import load_tokenizer, read_template
from dapo_core.model.sampling import GENERATION_CONFIG, read_eos_ids
from downloads.nearest import nearest
from downloads.snapshot import OnProgress, Snapshot
from downloads.urls import is_archive
from durable import link_or_copy
from heartbeat import heartbeat
from tasks.artifacts.artifact import MANIFEST_NAME
from tasks.artifacts.references import COMMIT, FILE, inputs_of, resolve_once
from tasks.artifacts.store import ArtifactStore
from tasks.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "chat_template.jinja"  # takes precedence over tokenizer_config.json in transformers and vLLM
)
SCHEMES = {"huggingface": "hf", "modelscope": "modelscope"}
PROBE = "How many apples are left?"


def reference_of(model: ModelConfig, revision: str | None = None) -> str | tuple[str, ...]:
    """The download reference of the section; `revision` overrides model.revision."""
    if model.source == "url":
        return model.urls
    revision = revision or model.revision
    at = f"@{quote(revision, safe='')}" if revision else ""
    return f"{SCHEMES[model.source]}:{model.id}{at}"


def fetched_inputs(model: ModelConfig) -> dict[str, str]:
    """The current commit and digests of the files to fetch. Raises DownloadError and ModelError."""
    snapshot = resolve_once(reference_of(model), "model")
    return inputs_of(snapshot, _chosen(model, snapshot))


def describe_fetch(model: ModelConfig) -> str:
    """What a run would fetch, or why that is unknown."""
    try:
        snapshot = resolve_once(reference_of(model), "model")
    except downloads.Unreachable as error:
        return f"would fetch {model_name(model)}, which cannot be resolved now: {error}"
    chosen = {*_chosen(model, snapshot)}
    sizes = [file.size for file in snapshot.files if file.path in chosen]
    total = "" if None in sizes else f", {decimal(sum(size or 0 for size in sizes))}"
    return f"fetches {model_name(model)} at {snapshot.commit[:12]}: {len(chosen)} files{total}"


def link_known_files(
    store: ArtifactStore, stage: str, inputs: Mapping[str, str], folder: Path
) -> None:
    """Hard-link files of the same name and digest from earlier artifacts, to be verified again.

    A new commit often changes only the model card.
    """
    wanted = {name: digest for name, digest in inputs.items() if name.startswith(FILE)}
    for earlier, manifest in store.finished(stage):
        for name in dict(wanted.items() & manifest["inputs"].items()):
            path = name.removeprefix(FILE)
            if (folder / path).exists():
                continue
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            # a file system without hard links, or a converted file
            with contextlib.suppress(OSError):
                os.link(earlier / path, folder / path)


def fetched_metrics(model: ModelConfig, inputs: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Manifest metrics of a fetched model."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "source": model_name(model),
        "commit": inputs[COMMIT],
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }


def fetch_model_files(
    model: ModelConfig,
    folder: Path,
    commit: str | None = None,
    on_progress: OnProgress | None = None,
) -> Snapshot:
    """Fetch the model's files into `folder` and return the snapshot they belong to.

    Any commit other than `commit`, if given, is refused. Raises DownloadError and ModelError.
    """
    pinned = commit if model.source == "huggingface" else None  # ModelScope cannot resolve a commit
    snapshot = downloads.resolve(reference_of(model, pinned))
    if commit not in (None, snapshot.commit):
        raise ModelError(
            f"{model_name(model)} changed during the run: its commit was {commit} and is now "
            f"{snapshot.commit}; run again to use the new one"
        )
    chosen = _chosen(model, snapshot)
    if not _is_archive(snapshot):
        _require_no_other_weights(folder, chosen)
    downloads.fetch(snapshot, folder, chosen, on_progress)
    if _is_archive(snapshot):
        unpacked = [path for path in folder.rglob("*") if path.is_file()]
        kept = _files_to_fetch(model, [path.relative_to(folder).as_posix() for path in unpacked])
        for path in unpacked:
            if path.relative_to(folder).as_posix() not in kept:
                path.unlink()
    if any(folder.glob("pytorch_model*.bin")):
        from dapo_core.model.pickled_weights import convert_pickles

        convert_pickles(folder)
    place_additions(model, folder)
    require_model_folder(folder)
    return snapshot


@heartbeat(lambda: "linking the files of model.path, or copying them to another file system")
def link_model_folder(model: ModelConfig, folder: Path) -> int:
    """Hard-link the files of model.path into `folder`, with the additions; returns their bytes.

    An adapter is merged into its base model instead, in float32.

    Files are copied if links are impossible. Symbolic links within a Hugging Face cache become
    files. Links that lead elsewhere are skipped; raises ModelError if the model needs them.
    """
    source = Path(str(model.path))
    if is_adapter_folder(source):
        from dapo_core.merge.run import merge_checkpoint

        num_bytes = merge_checkpoint([source], folder)["bytes"]
        place_additions(model, folder)
        return num_bytes
    require_model_folder(source)
    num_bytes, skipped = 0, skipped_links(source)
    if skipped:
        names = ", ".join(path.name for path in sorted(skipped))
        logger.info("%s: skipped %s, links out of the folder", source, names)
    for path in sorted({*source.rglob("*")} - skipped):
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir()
        elif path.name != MANIFEST_NAME:  # present if the folder is itself an artifact
            num_bytes += path.stat().st_size
            link_or_copy(path.resolve(), target)
    place_additions(model, folder)
    return num_bytes


def require_additions(model: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if the folder lacks model.chat_template or model.stop_tokens."""
    missing, path = [], folder / CHAT_TEMPLATE
    if model.chat_template is not None:
        wanted = read_template(model.chat_template)
        if not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            missing.append(f"model.chat_template={model.chat_template}")
    if model.stop_tokens:
        ids = stop_ids(load_tokenizer(folder, model.trust_remote_code), model.stop_tokens)
        if not {*ids} <= {*read_eos_ids(folder)}:
            missing.append(f"model.stop_tokens={' '.join(model.stop_tokens)}")
    if missing:
        raise ConfigError(
            f"{folder} was made without {' and '.join(missing)}; pass the folder that `dapo "
            "fetch-model` writes from this recipe, or unset the key"
        )


def place_additions(model: ModelConfig, folder: Path) -> None:
    """Install model.chat_template and model.stop_tokens in the folder. Raises ModelError."""
    if model.chat_template is not None:
        place_chat_template(Path(model.chat_template), folder, model.trust_remote_code)
    if model.stop_tokens:
        place_stop_tokens(model.stop_tokens, folder, model.trust_remote_code)


def place_stop_tokens(tokens: Sequence[str], folder: Path, trust_remote_code: bool = False) -> None:
    """Let these tokens end a response too, in generation_config.json, which all engines read."""
    file = folder / GENERATION_CONFIG
    values = read_config(folder, GENERATION_CONFIG) if file.is_file() else {}
    ids = [*read_eos_ids(folder), *stop_ids(load_tokenizer(folder, trust_remote_code), tokens)]
    values["eos_token_id"] = list(dict.fromkeys(ids))
    file.unlink(missing_ok=True)  # it may be a hard link into another folder
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def stop_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    """Return the ids of model.stop_tokens; raises ModelError for one that the model lacks."""
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise ModelError(
                f"model.stop_tokens: {token!r} is not a token of the model"
                f"{nearest(token, list(tokenizer.get_added_vocab()))}"
            )
    return [vocabulary[token] for token in tokens]


def place_chat_template(template: Path, folder: Path, trust_remote_code: bool = False) -> None:
    """Install a chat template in a model folder. Raises ModelError if it renders no message."""
    target = folder / CHAT_TEMPLATE
    target.unlink(missing_ok=True)  # it may be a hard link into another folder
    shutil.copyfile(template, target)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    question = [{"role": "user", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.chat_template={template} cannot be rendered: {error}; correct the file"
        ) from error
    if PROBE not in text:
        raise ModelError(
            f"model.chat_template={template} drops the user message: it renders {text!r}"
        )


def _chosen(model: ModelConfig, snapshot: Snapshot) -> list[str]:
    """The files to fetch; an archive is filtered after unpacking."""
    paths = [file.path for file in snapshot.files]
    return paths if _is_archive(snapshot) else _files_to_fetch(model, paths)


def _files_to_fetch(model: ModelConfig, paths: Sequence[str]) -> list[str]:
    try:
        return files_to_fetch(paths, model.allow_pickle, model.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{model_name(model)} cannot be trained: {error}") from None


def _require_no_other_weights(folder: Path, chosen: Sequence[str]) -> None:
    """Raise ModelError if the folder also holds another model's weights."""
    present = {path.name for path in folder.glob("*.safetensors")}
    converted = {
        path.replace("pytorch_model", "model").replace(".bin", ".safetensors") for path in chosen
    }
    if others := sorted(present - converted):
        raise ModelError(
            f"{folder} holds {others[0]}, which is not part of the model to fetch: it belongs to "
            "another model or commit; name a new folder"
        )


def _is_archive(snapshot: Snapshot) -> bool:
    return snapshot.hub == "url" and is_archive(snapshot.files[0].path)


def model_name(model: ModelConfig) -> str:
    """The reference as text."""
    reference = reference_of(model)
    return reference if isinstance(reference, str) else ", ".join(reference)
