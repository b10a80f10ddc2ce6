"""safetensors reads what a merge writes, and a merge detects damage in what it reads."""

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import CHUNK_BYTES, digest_of, file_digest
from dapo_core.merge.run import merge_checkpoint
from dapo_core.merge.sources import Block, StoredTensor
from dapo_core.merge.verification import require_on_disk
from dapo_core.merge.writer import (
    ModelWriter,
    OutputFile,
    OutputTensor,
    output_tensors,
    plan_files,
    require_opens,
)
from dapo_core.model.names import FilePiece, expert_pieces

REAL_PWRITE, REAL_PREADV = os.pwrite, os.preadv


class OnDisk:
    """A source with all tensors in one file, three rows per block."""

    label, model_files = "disk", Path("none")

    def __init__(self, path: Path, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        self.tensors = {
            name: StoredTensor(tuple(value.shape), value.dtype) for name, value in values.items()
        }
        self._blocks: dict[str, list[Block]] = {}
        with path.open("wb") as file:
            for name, value in values.items():
                rows = value.split(3) if value.ndim else [value]
                self._blocks[name] = [block for part in rows for block in self._write(file, part)]

    def _write(self, file: Any, part: torch.Tensor) -> list[Block]:
        """Values surrounded by other bytes, as in an archive; alternating checksum kinds."""
        content = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        start = file.tell()
        file.write(whole := b"abc" + content + b"defgh")
        checksum = zlib.crc32(whole) if start % 2 else blake3(whole).hexdigest()
        block = Block(Path(file.name), start + 3, len(content), start, file.tell(), checksum)
        return [block] if content else []

    def pieces(self, name: str) -> list[FilePiece]:
        return expert_pieces(name, self.tensors[name].shape) or [FilePiece(name)]

    def blocks(self, name: str) -> list[Block]:
        return self._blocks[name]

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def source(tmp_path: Path) -> OnDisk:
    """Odd element counts of every width, an empty tensor, a scalar, a large tensor, and experts."""
    torch.manual_seed(0)
    values = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(5, 3).bfloat16(),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
        "count": torch.tensor(12),
        "wide": torch.randn(3, 2).double(),
        # a block is a little over one and a half chunks
        "long": torch.randn(7, CHUNK_BYTES // 8 + 1),
        "a.experts.gate_up_proj": torch.randn(5, 6, 4),
        "a.experts.down_proj": torch.randn(5, 4, 3),
    }
    return OnDisk(tmp_path / "source", values)


def expected_tensors(source: OnDisk) -> dict[str, torch.Tensor]:
    whole = dict(source.values)
    gate_up, down = whole.pop("a.experts.gate_up_proj"), whole.pop("a.experts.down_proj")
    for expert in range(5):
        whole[f"a.experts.{expert}.gate_proj.weight"] = gate_up[expert, :3]
        whole[f"a.experts.{expert}.up_proj.weight"] = gate_up[expert, 3:]
        whole[f"a.experts.{expert}.down_proj.weight"] = down[expert]
    return whole


def write(
    folder: Path, source: OnDisk, dtype: str = "keep", max_shard_bytes: int = 10**9
) -> tuple[list[OutputFile], dict[str, str], dict[str, str]]:
    """The files, and the digests of tensors and of files."""
    files = plan_files(output_tensors(source, dtype, set()), max_shard_bytes)
    with ModelWriter(folder, files, source) as writer:
        digests = writer.write([], None)
        by_file = {name: digest_of(parts) for name, parts in writer.parts(digests).items()}
    return files, digests, by_file


@pytest.mark.parametrize(
    ("dtype", "max_shard_bytes"), [("keep", 10**9), ("keep", 100), ("float16", 10**9)]
)
def test_safetensors_reads_what_was_written(
    tmp_path: Path, source: OnDisk, dtype: str, max_shard_bytes: int
) -> None:
    files, digests, file_digests = write(tmp_path, source, dtype, max_shard_bytes)
    assert file_digests == {file.name: file_digest(tmp_path / file.name) for file in files}
    read = {
        name: value for file in files for name, value in load_file(tmp_path / file.name).items()
    }
    expected = expected_tensors(source)
    assert read.keys() == expected.keys() == digests.keys()
    for name, value in expected.items():
        if dtype == "float16" and value.dtype.is_floating_point:  # only floating point is converted
            value = value.half()
        values = value.contiguous().reshape(-1).view(torch.uint8)
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), values), name
        assert digests[name] == blake3(values.numpy().tobytes()).hexdigest(), name


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((40, 60, 1), [["t0", "t1"], ["t2"]]),  # 40 + 60 = 100 fills the first
        ((150, 10), [["t0"], ["t1"]]),  # above the limit: a file of its own
        ((10, 150, 90, 20), [["t0"], ["t1"], ["t2"], ["t3"]]),  # 10 + 150, 150 + 90, 90 + 20 > 100
        ((0, 100), [["t0", "t1"]]),
    ],
)
def test_files_are_filled_up_to_the_size_limit(
    sizes: tuple[int, ...], groups: list[list[str]]
) -> None:
    outputs = [
        OutputTensor(f"t{index}", (size,), torch.uint8, f"t{index}", FilePiece(f"t{index}"))
        for index, size in enumerate(sizes)
    ]
    files = plan_files(outputs, 100)
    assert [[tensor.name for tensor in file.tensors] for file in files] == groups
    assert [file.num_bytes for file in files] == [
        sum(sizes[int(name[1:])] for name in group) for group in groups
    ]


def test_a_dtype_that_safetensors_lacks_is_refused() -> None:
    whole = OutputTensor("z", (2,), torch.complex64, "z", FilePiece("z"))
    with pytest.raises(CheckpointError, match="z is complex64, which safetensors does not support"):
        OutputFile("f", [whole]).header()


def test_short_reads_and_writes_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OnDisk(tmp_path / "source", {"t": torch.randn(1000)})
    monkeypatch.setattr(os, "pwrite", lambda to, part, offset: REAL_PWRITE(to, part[:999], offset))
    monkeypatch.setattr(
        os, "preadv", lambda of, parts, offset: REAL_PREADV(of, [parts[0][:777]], offset)
    )
    write(tmp_path, source)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], source.values["t"])


@pytest.mark.parametrize("name", ["flag", "half", "long", "a.experts.down_proj"])
@pytest.mark.parametrize("place", ["before", "first", "last", "after"])
def test_a_flipped_bit_in_the_source_fails_the_merge(
    tmp_path: Path, source: OnDisk, name: str, place: str
) -> None:
    """In the values, or beside them under the same checksum."""
    block = source.blocks(name)[-1]
    at = {"before": block.start, "first": block.offset, "last": block.offset + block.num_bytes - 1}
    content = bytearray(block.path.read_bytes())
    content[at.get(place, block.end - 1)] ^= 1
    block.path.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=rf"source is damaged or from another checkpoint: bytes {block.start:,} ",
    ):
        write(tmp_path, source)


def test_a_truncated_or_linked_shard_fails_the_merge(tmp_path: Path, source: OnDisk) -> None:
    block = source.blocks("a.experts.down_proj")[-1]
    os.truncate(block.path, block.end - 1)
    with pytest.raises(CheckpointError, match=rf"source ends at {block.end - 1:,} bytes"):
        list(block.read())
    (tmp_path / "link").symlink_to(block.path)
    with pytest.raises(OSError, match="symbolic link"):
        list(replace(block, path=tmp_path / "link").read())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"model\.safetensors cannot be"),
        (lambda path: path.write_bytes(b""), r"model\.safetensors cannot be opened: .*"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"F64", b"I64")),
            r"model\.safetensors does not contain the tensors written",
        ),
        (lambda path: save_file({"x": torch.zeros(1)}, path), r"model\.safetensors does not"),
    ],
)
def test_a_file_that_safetensors_reads_differently_is_detected(
    tmp_path: Path, source: OnDisk, spoil: Callable[[Path], object], message: str
) -> None:
    (file,), *_ = write(tmp_path, source)
    require_opens(tmp_path / file.name, file)
    spoil(tmp_path / file.name)
    with pytest.raises(CheckpointError, match=message):
        require_opens(tmp_path / file.name, file)


def test_a_corrupt_write_is_detected_when_read_back(tmp_path: Path, source: OnDisk) -> None:
    files = plan_files(output_tensors(source, "keep", set()), 10**9)
    with ModelWriter(tmp_path, files, source) as writer:
        parts = writer.parts(writer.write([], None))
    require_on_disk(tmp_path, parts)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors on disk differs from what was"):
        require_on_disk(tmp_path, parts)


def test_a_missing_source_is_named_before_a_target_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="nope has no complete checkpoint"):
        merge_checkpoint([tmp_path / "nope"], tmp_path)
