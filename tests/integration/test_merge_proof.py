"""A merge uses bounded memory, never leaves a partial model and writes a correct manifest."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3Config

from dapo_core.checkpoint.manifest import MANIFEST_FILE, write_manifest
from dapo_core.checkpoint.shards import _Writer
from dapo_core.checkpoint.state import state_files
from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import file_digest
from dapo_core.merge.run import merge_checkpoint, open_source, remove_leftovers
from dapo_core.merge.verification import compare_logits
from dapo_core.merge.writer import output_tensors
from dapo_core.model.folder import MERGE_MANIFEST
from dapo_core.model.pretrained import empty_causal_lm
from durable import locked
from tests.checkpoints import make_state
from tests.ranks import run_ranks
from tests.verl_folders import Case, write_folders

MIB = 1024**2
SHARD_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Model folder and verl checkpoint."""
    case = Case(2, (2,), "qwen3", True)
    return write_folders([case], tmp_path_factory.mktemp("small"))[case]


def _in_child(function: Callable[..., None], *arguments: Any) -> tuple[int | None, Any]:
    """Run `function(send, *arguments)` in a process; returns its exit code and what it sent."""
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sending.send, *arguments))
    process.start()
    sending.close()
    process.join(120)
    return process.exitcode, receiving.recv() if process.exitcode == 0 else None


def _save_all(rank: int, folder: Path) -> None:
    for num_layers in (1, 6):
        _save(rank, folder / str(num_layers), num_layers)


def _save(rank: int, folder: Path, num_layers: int) -> None:
    """Save a random model, 15 MiB per layer, as a verl and as a dapo train checkpoint."""
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    verl, ours = folder / "verl" / "actor", folder / "ours" / "step_000001"
    if rank == 0:
        config.save_pretrained(verl / "huggingface")
        config.save_pretrained(ours / "huggingface")
    torch.distributed.barrier()
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    names = {
        name: parameter.shape
        for name, parameter in empty_causal_lm(verl / "huggingface").named_parameters()
    }
    state = {
        name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        for name, shape in names.items()
    }
    torch.save(state, verl / f"model_world_size_2_rank_{rank}.pt")
    rng = {f"rank_{rank}": torch.arange(7, dtype=torch.uint8)}  # a merge ignores it
    dcp.save({"model": state, "rng": rng}, storage_writer=_Writer(str(ours)))
    if rank == 0:
        (ours / "tensor_names.json").write_text(json.dumps(list(names)))
        (ours / "trainer_state.json").write_bytes(state_files(make_state(1))["trainer_state.json"])
        write_manifest(ours, "training", 1, {})


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _merge_and_watch(send: Callable[[Any], None], large: Path, target: Path) -> None:
    """Send the sizes and peak memory, mapped files included, of a merge from each source."""
    sent = {}
    for source, dtype in (("verl", "keep"), ("ours", "bfloat16")):
        # imports, thread pools
        merge_checkpoint([large / "1" / source], target / f"{source}-warm-up", dtype)
        before, peak, is_done = _resident_bytes(), 0, threading.Event()

        def watch(is_done: threading.Event = is_done) -> None:
            nonlocal peak
            while not is_done.wait(0.001):
                peak = max(peak, _resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        sizes = merge_checkpoint([large / "6" / source], target / source, dtype, SHARD_BYTES)
        is_done.set()
        watcher.join()
        sent[source] = sizes, peak - before
    send(sent)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of 1 and of 6 layers."""
    folder = tmp_path_factory.mktemp("large")
    run_ranks(2, _save_all, folder)
    return folder


def test_memory_is_bounded_whatever_the_model_size(large: Path, tmp_path: Path) -> None:
    exit_code, sent = _in_child(_merge_and_watch, large, tmp_path)
    assert exit_code == 0
    for source, (sizes, peak) in sent.items():
        assert sizes["parameters"] * 4 > 80 * MIB
        assert sizes["shards"] >= 2
        assert 0 < peak <= 24 * MIB, source


def _merge_and_die(send: Callable[[Any], None], source: Path, target: Path) -> None:
    merge_checkpoint(
        [source],
        target,
        max_shard_bytes=60_000,
        on_bytes=lambda done, total: os.kill(os.getpid(), signal.SIGKILL),
    )


def test_a_killed_merge_leaves_no_partial_model(small: tuple[Path, Path], tmp_path: Path) -> None:
    mine = tmp_path / "merged.partial"  # a name that a merge might use itself
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    exit_code, _ = _in_child(_merge_and_die, small[1], tmp_path / "merged")
    assert exit_code == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".merged.merging", "merged.partial"]
    shutil.copytree(tmp_path / ".merged.merging", tmp_path / ".other.merging")
    with locked(tmp_path / ".other.merging" / "lock"):
        remove_leftovers(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".other.merging",
            "merged.partial",
        ]
    shutil.move(tmp_path / ".other.merging", tmp_path / ".merged.merging")
    merge_checkpoint([small[1]], tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "merged.partial"]
    assert (mine / "notes.txt").read_text() == "mine"
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(small[0] / "model.safetensors").keys()
    )


def test_a_failed_or_interrupted_merge_leaves_nothing(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"merged could not be written: \[Errno 27\]"):
            merge_checkpoint([small[1]], tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []

    def stop(done: int, total: int) -> None:
        second = rf"merged is being written by another merge, pid {os.getpid()} on .*"
        with pytest.raises(CheckpointError, match=second):
            merge_checkpoint([small[1]], tmp_path / "merged")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_checkpoint([small[1]], tmp_path / "merged", on_bytes=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_target_is_refused(
    small: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / ".taken.merging").mkdir()
    (tmp_path / ".taken.merging" / "notes.txt").write_text("mine")
    for name, message in (
        (".", r"is not empty; merge into a new folder"),
        ("file", r"file is not a folder; merge into a new folder"),
        ("file/merged", r"file/merged could not be written: .*Not a directory"),
        (
            "taken",
            r"\.taken\.merging contains other files, but the merge needs that name; move it away",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge_checkpoint([small[1]], tmp_path / name)

    with pytest.raises(CheckpointError, match="file has no complete checkpoint"):
        merge_checkpoint([tmp_path / "file"], tmp_path / "merged")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    merge_checkpoint([small[1]], Path())
    assert (tmp_path / "here" / "config.json").exists()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # as root, the tests may write to a read-only folder
    with pytest.raises(CheckpointError, match=r"merged could not be written: .*Permission denied"):
        merge_checkpoint([small[1]], tmp_path / "merged")
    assert (
        (tmp_path / ".taken.merging" / "notes.txt").read_text()
        == (tmp_path / "file").read_text()
        == "mine"
    )


def test_the_manifest_has_a_digest_for_every_file_and_tensor(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(small[1], tmp_path / "step")
    chat = tmp_path / "step" / "actor" / "huggingface" / "additional_chat_templates" / "tool.jinja"
    chat.parent.mkdir()
    chat.write_text("{{ messages }}")
    processor = ("preprocessor_config.json", "processor_config.json")  # of a vision model
    for name in processor:
        (chat.parents[1] / name).write_text(f'{{"of": "{name}"}}')
    # weights that verl may put there
    save_file({"stale": torch.zeros(2)}, chat.parents[1] / "model.safetensors")
    target = tmp_path / "merged"
    target.mkdir()  # an existing empty folder is accepted
    merge_checkpoint([tmp_path / "step"], target, max_shard_bytes=60_000)
    manifest = json.loads((target / MERGE_MANIFEST).read_text())
    on_disk = {
        path.relative_to(target).as_posix(): path for path in target.rglob("*") if path.is_file()
    }
    assert manifest["files"].keys() == on_disk.keys() - {MERGE_MANIFEST}
    assert "additional_chat_templates/tool.jinja" in manifest["files"]
    for name, entry in manifest["files"].items():
        content = on_disk[name].read_bytes()
        assert entry == {"bytes": len(content), "blake3": file_digest(on_disk[name])}
    for name in processor:
        assert on_disk[name].read_text() == f'{{"of": "{name}"}}'
    tensors = {
        name: (path.name, value)
        for path in target.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    assert manifest["tensors"] == {
        name: {
            "file": place,
            "shape": list(value.shape),
            "dtype": "float32",
            "blake3": blake3(value.numpy().tobytes()).hexdigest(),
        }
        for name, (place, value) in tensors.items()
    }
    assert manifest["dtype"] == "keep"
    assert "logits" not in manifest


def test_verify_logits_detects_different_weights(small: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "merged"
    merge_checkpoint([small[1]], target, "bfloat16", verify_logits=True)
    source = open_source([small[1]])
    outputs = output_tensors(source, "bfloat16", {"lm_head.weight"})
    assert compare_logits(target, source, outputs) == {"tokens": 64, "max_difference": 0.0}
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.5
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"logits differ from those of \S+/actor by up to"):
        compare_logits(target, source, outputs)


def _validated(output: Path, accuracies: dict[int, float | None], like: Path) -> None:
    for step, accuracy in accuracies.items():
        place = output / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(like, place, copy_function=os.link)
        manifest = json.loads((place / MANIFEST_FILE).read_text()) | {"step": step}
        state = state_files(make_state(step, accuracy))["trainer_state.json"]
        contents = {"trainer_state.json": state, MANIFEST_FILE: json.dumps(manifest).encode()}
        for name, content in contents.items():
            (place / name).unlink()
            (place / name).write_bytes(content)


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ({2: 0.25, 4: 0.5, 6: 0.5, 8: None}, 4),  # ties go to the earlier
        ({2: 0.25, 4: None, 6: 0.75}, 6),
    ],
)
def test_the_best_checkpoint_is_merged_on_request(
    large: Path, tmp_path: Path, accuracies: dict[int, float | None], best: int
) -> None:
    _validated(tmp_path, accuracies, large / "1" / "ours" / "step_000001")
    merge_checkpoint([tmp_path], tmp_path / "best", checkpoint="best")
    merge_checkpoint([tmp_path], tmp_path / "latest")
    manifests = {
        name: json.loads((tmp_path / name / MERGE_MANIFEST).read_text())
        for name in ("best", "latest")
    }
    last = max(accuracies)
    assert {name: manifest["source"] for name, manifest in manifests.items()} == {
        name: {
            "format": "dapo",
            "name": f"step_{step:06d}",
            "shards": 2,
            "step": step,
            "validation_accuracy": accuracies[step],
        }
        for name, step in (("best", best), ("latest", last))
    }
    assert not any(
        name.startswith("rng") or name.startswith("rank") for name in manifests["best"]["tensors"]
    )


def test_a_missing_best_checkpoint_is_reported_before_anything_is_written(
    large: Path, small: tuple[Path, Path], tmp_path: Path
) -> None:
    one = large / "1" / "ours" / "step_000001"
    _validated(tmp_path / "output", {2: None}, one)
    for source, message in (
        (
            tmp_path / "output",
            r"no checkpoint in \S+/output was validated, .* set validation\.every and "
            r"checkpoint\.k",
        ),
        (one, r"step_000001 is one checkpoint, so there is no best one to choose"),
        (small[1], r"global_step_3/actor is one checkpoint, so there is no best one to choose"),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge_checkpoint([source], tmp_path / "merged", checkpoint="best")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
