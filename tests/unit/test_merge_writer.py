"""The files that a merge writes, read by safetensors itself."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo_core.errors import CheckpointError
from dapo_core.merge.sources import StoredTensor
from dapo_core.merge.verification import Verifier
from dapo_core.merge.writer import (
    CHUNK_BYTES,
    OutputFile,
    OutputTensor,
    _read_ahead,
    output_tensors,
    plan_files,
    write_files,
)
from dapo_core.parameter_names import FilePiece, expert_pieces


class InMemory:
    """A source whose tensors arrive three rows at a time."""

    label, model_files = "memory", Path("none")

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        self.tensors = {name: StoredTensor(tuple(value.shape), value.dtype) for name, value in values.items()}

    def pieces(self, name: str) -> list[FilePiece]:
        return expert_pieces(name, self.tensors[name].shape) or [FilePiece(name)]

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        yield from self.values[name].split(3) if self.values[name].ndim else [self.values[name]]

    def describe(self) -> dict[str, Any]:
        return {}


def mixed() -> InMemory:
    """Odd numbers of elements of every width, nothing, a scalar, a row-cut tensor, and experts."""
    torch.manual_seed(0)
    return InMemory(
        {
            "flag": torch.tensor([True, False, True]),
            "half": torch.randn(5, 3).bfloat16(),
            "eighth": torch.randn(7).to(torch.float8_e4m3fn),
            "empty": torch.zeros(0, 4),
            "count": torch.tensor(12),
            "wide": torch.randn(3, 2).double(),
            "long": torch.randn(7, CHUNK_BYTES // 8 + 1),  # a row is half a chunk, so chunks are single rows
            "a.experts.gate_up_proj": torch.randn(5, 6, 4),
            "a.experts.down_proj": torch.randn(5, 4, 3),
            "transposed": torch.randn(4, 6).t(),
        }
    )


def expected_tensors(source: InMemory) -> dict[str, torch.Tensor]:
    whole = dict(source.values)
    gate_up, down = whole.pop("a.experts.gate_up_proj"), whole.pop("a.experts.down_proj")
    for expert in range(5):
        whole[f"a.experts.{expert}.gate_proj.weight"] = gate_up[expert, :3]
        whole[f"a.experts.{expert}.up_proj.weight"] = gate_up[expert, 3:]
        whole[f"a.experts.{expert}.down_proj.weight"] = down[expert]
    return whole


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100])
def test_safetensors_reads_what_was_written(tmp_path: Path, max_shard_bytes: int) -> None:
    source = mixed()
    files = plan_files(output_tensors(source, "keep", set()), max_shard_bytes)
    digests: dict[str, str] = {}
    write_files(tmp_path, files, source, lambda file, of_file: digests.update(of_file))
    read = {name: value for file in files for name, value in load_file(tmp_path / file.name).items()}
    expected = expected_tensors(source)
    assert read.keys() == expected.keys() == digests.keys()
    for name, value in expected.items():
        values = value.contiguous().reshape(-1).view(torch.uint8)
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), values), name
        assert digests[name] == hashlib.sha256(values.numpy().tobytes()).hexdigest(), name


def test_a_dtype_applies_to_floating_point_only(tmp_path: Path) -> None:
    source = mixed()
    files = plan_files(output_tensors(source, "float16", {"long"}), 10**9)
    write_files(tmp_path, files, source, lambda file, digests: None)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        whole = expected_tensors(source)[name]
        assert torch.equal(value, whole.half() if whole.dtype.is_floating_point else whole), name


def outputs(*sizes: int) -> list[OutputTensor]:
    return [
        OutputTensor(f"t{index}", (size,), torch.uint8, f"t{index}", FilePiece(f"t{index}"))
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((40, 60, 1), [["t0", "t1"], ["t2"]]),  # 40 + 60 = 100 fills the first
        ((150, 10), [["t0"], ["t1"]]),  # larger than a file may be: alone
        ((10, 150, 90, 20), [["t0"], ["t1"], ["t2"], ["t3"]]),  # 10 + 150, 150 + 90, 90 + 20 > 100
        ((0, 100), [["t0", "t1"]]),
    ],
)
def test_files_are_filled_up_to_their_bound(sizes: tuple[int, ...], groups: list[list[str]]) -> None:
    files = plan_files(outputs(*sizes), 100)
    assert [[tensor.name for tensor in file.tensors] for file in files] == groups
    assert [file.num_bytes for file in files] == [sum(sizes[int(name[1:])] for name in group) for group in groups]


def test_what_safetensors_cannot_hold_is_refused() -> None:
    whole = OutputTensor("z", (2,), torch.complex64, "z", FilePiece("z"))
    with pytest.raises(CheckpointError, match=r"z is complex64, which safetensors files cannot hold"):
        OutputFile("f", [whole]).header()


def test_the_next_is_read_while_the_present_one_is_written() -> None:
    begun = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for index, event in enumerate(begun):
            event.set()
            yield index

    for index in _read_ahead(items()):
        assert all(event.wait(60) for event in begun[: index + 2])  # else it would be read after this returns
        assert not any(event.is_set() for event in begun[index + 2 :])  # and no more than one is held


def test_a_file_that_changed_on_the_disk_is_found(tmp_path: Path) -> None:
    source = mixed()
    files = plan_files(output_tensors(source, "keep", {"long"}), 10**9)
    with Verifier(tmp_path) as verifier:

        def spoil(file: OutputFile, digests: dict[str, str]) -> None:
            content = bytearray((tmp_path / file.name).read_bytes())
            content[-1] ^= 1
            (tmp_path / file.name).write_bytes(content)
            verifier.submit(file, digests)

        write_files(tmp_path, files, source, spoil)
        last = files[0].tensors[-1].name
        with pytest.raises(
            CheckpointError, match=rf"model\.safetensors: {last} read back differs from the checkp"
        ):
            verifier.manifest()
