from __future__ import annotations

import pytest
import torch

from vidgen.runtime.checkpoint import (
    CheckpointError,
    atomic_directory,
    atomic_write,
    file_checksum,
    load_safetensors,
    save_safetensors,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_nothing_appears_under_the_name_before_the_end(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.suffix == ".txt"
    assert path.read_text() == "new"


def test_a_failed_folder_leaves_the_old_folder_and_nothing_else(tmp_path):
    path = tmp_path / "weights"
    for text in ("one", "two"):
        with atomic_directory(path) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / f"{text}.txt").write_text(text)
    with pytest.raises(RuntimeError), atomic_directory(path) as temporary:
        (temporary / "three.txt").write_text("three")
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]
    assert [file.name for file in path.rglob("*.txt")] == ["two.txt"]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "1"}])
@pytest.mark.parametrize("empty", [False, True])
def test_tensors_round_trip(tmp_path, metadata, empty):
    base = torch.randn(4, 6)
    tensors = {
        "base": base,
        "tied": base,
        "view": base[1:3],
        "transposed": base.T,
        "bf16": base.bfloat16(),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 3),
        "integer": torch.tensor([2**40]),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    tensors = {} if empty else tensors
    save_safetensors(tensors, tmp_path / "a.safetensors", metadata)
    loaded, read = load_safetensors(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert read == (metadata or {})
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "absent"])
def test_damage_names_the_file(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    save_safetensors({"a": torch.ones(100)}, path)
    if damage == "absent":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-10], "empty": b"", "text": b"not tensors at all"}[damage])
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        load_safetensors(path)


def test_checksum_sees_one_flipped_bit(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(3 * 2**20))
    before = file_checksum(path)
    content = bytearray(path.read_bytes())
    content[2**21] ^= 1
    path.write_bytes(content)
    assert file_checksum(path) != before
