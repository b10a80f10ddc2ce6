"""Digests of files by parts cover every byte."""

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from dapo_core.machine.digests import (
    CHUNK_BYTES,
    content_part,
    digest_of,
    file_digest,
    file_parts,
    safetensors_sizes,
)


def test_a_safetensors_file_is_hashed_by_header_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(3.0), "b": torch.zeros(0), "c": torch.ones(5, dtype=torch.uint8)}
    save_file(tensors, path)
    content = path.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    expected = [header, tensors["a"].numpy().tobytes(), tensors["c"].numpy().tobytes()]
    sizes = safetensors_sizes(path)
    assert file_parts(path, sizes) == [content_part(part) for part in expected]
    lines = "".join(f"{len(part)} {blake3(part).hexdigest()}\n" for part in expected)
    assert file_digest(path) == blake3(lines.encode()).hexdigest()


@pytest.mark.parametrize(
    "entry",
    [{"data_offsets": [0, 10**9]}, {"data_offsets": "x"}, {}, [], "x", {"data_offsets": [0, 3]}],
)
def test_every_byte_changes_the_digest_whatever_the_header_says(
    tmp_path: Path, entry: object
) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + b"0123456789"
    path.write_bytes(content)
    digest = file_digest(path)
    assert sum(safetensors_sizes(path)) == len(content)
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert file_digest(path) != digest
    path.write_bytes(content + b"0")
    assert file_digest(path) != digest


def test_a_missing_byte_in_any_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytes(range(256)) * (CHUNK_BYTES // 128)
    path.write_bytes(content)
    assert file_digest(path) == digest_of([content_part(content)])
    assert file_parts(path, [len(content) - 5, 10]) == [
        content_part(content[:-5]),
        content_part(content[-5:]),
    ]
