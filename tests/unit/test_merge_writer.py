"""The files that a merge writes, read by safetensors itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.errors import CheckpointError
from dapo_core.merge.sources import CHUNK_BYTES, StoredTensor, values_in_order
from dapo_core.merge.writer import (
    OutputFile,
    OutputTensor,
    output_tensors,
    plan_files,
    require_opens,
    write_file,
)
from dapo_core.parameter_names import FilePiece, expert_pieces

REAL_PWRITE, REAL_PREADV = os.pwrite, os.preadv


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
    for file in files:
        written = write_file(tmp_path / file.name, file, source)
        digests |= written.tensors
        assert written.file == hashlib.sha256((tmp_path / file.name).read_bytes()).hexdigest()
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
    write_file(tmp_path / files[0].name, files[0], source)
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


def _other_bytes(descriptor: int, part: memoryview, offset: int) -> int:
    return REAL_PWRITE(descriptor, bytes([part[0] ^ 1]) + part[1:], offset)


def _nothing(descriptor: int, part: memoryview, offset: int) -> int:
    return len(part)


def _elsewhere(descriptor: int, part: memoryview, offset: int) -> int:
    return REAL_PWRITE(descriptor, part, offset + 1)


@pytest.mark.parametrize("pwrite", [_other_bytes, _nothing, _elsewhere])
@pytest.mark.parametrize(("since", "what"), [(0, "the header"), (300, "t2")])
def test_what_the_disk_does_not_give_back_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pwrite: Callable[[int, memoryview, int], int],
    since: int,
    what: str,
) -> None:
    source = InMemory({f"t{index}": torch.full((100,), index + 1, dtype=torch.uint8) for index in range(4)})
    file = plan_files(output_tensors(source, "keep", set()), 10**9)[0]
    since = since and len(file.header()) + 200  # where t2 begins
    monkeypatch.setattr(os, "pwrite", lambda *write: (pwrite if write[2] >= since else REAL_PWRITE)(*write))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {what} read back differs"):
        write_file(tmp_path / file.name, file, source)


def test_a_system_that_takes_and_gives_little_at_a_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = InMemory({"t": torch.randn(1000)})
    file = plan_files(output_tensors(source, "keep", set()), 10**9)[0]
    monkeypatch.setattr(os, "pwrite", lambda to, part, offset: REAL_PWRITE(to, part[:999], offset))
    monkeypatch.setattr(os, "preadv", lambda of, parts, offset: REAL_PREADV(of, [parts[0][:777]], offset))
    write_file(tmp_path / file.name, file, source)
    assert torch.equal(load_file(tmp_path / file.name)["t"], source.values["t"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"model\.safetensors cannot be opened: .*"),
        (lambda path: path.write_bytes(b""), r"model\.safetensors cannot be opened: .*"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"F64", b"I64")),
            r"model\.safetensors has other tensors than were",
        ),
        (lambda path: save_file({"x": torch.zeros(1)}, path), r"model\.safetensors has other tensors than were"),
    ],
)
def test_a_file_that_safetensors_reads_otherwise_is_found(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    source = mixed()
    file = plan_files(output_tensors(source, "keep", {"long"}), 10**9)[0]
    write_file(tmp_path / file.name, file, source)
    require_opens(tmp_path / file.name, file)
    spoil(tmp_path / file.name)
    with pytest.raises(CheckpointError, match=message):
        require_opens(tmp_path / file.name, file)


def test_values_at_any_byte_are_converted(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    unaligned = torch.frombuffer(bytearray(b"." + whole.numpy().tobytes()), dtype=torch.float32, offset=1)
    assert unaligned.data_ptr() % 4
    parts = list(values_in_order(unaligned.reshape(5, 3), torch.bfloat16))
    assert torch.equal(torch.cat(parts), whole.reshape(-1).bfloat16())
