"""Files that are either whole or absent, and tensors in safetensors: nothing here can execute code when it is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import CheckpointError

__all__ = [
    "CheckpointError",
    "atomic_directory",
    "atomic_write",
    "file_checksum",
    "load_safetensors",
    "save_safetensors",
]


def _sync(path: Path) -> None:
    """Forces a file's or folder's content to the disk, so that a later rename never exposes an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems refuse to sync a folder; its entries are then written in order
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary sibling of `path`; on success it is synced and renamed to `path`, on an error removed.

    Readers see the old file or the new one, never a part. Parent folders are made.

    Args:
        path: The final name of the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: many writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.tmp{path.suffix}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty temporary sibling folder; on success it takes the place of `path`, on an error it is removed.

    Args:
        path: The final name of the folder. An existing folder of that name is replaced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        if path.exists():
            # A non-empty folder cannot be replaced in one call; between the two renames the old one is kept aside.
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_checksum(path: str | os.PathLike) -> int:
    """Returns the CRC-32 of a file: it finds damage by disks and interrupted copies, not tampering."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def save_safetensors(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors to one safetensors file, atomically.

    Args:
        tensors: Name to tensor, any device, any layout; tensors that share memory are written twice.
        path: The final name of the file.
        metadata: Strings kept in the header.
    """
    stored: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        if storage in storages:
            value = value.clone()
        storages.add(storage)
        stored[name] = value
    with atomic_write(path) as temporary:
        # An empty metadata object gives a header that safetensors itself cannot read back.
        save_file(stored, temporary, metadata=dict(metadata) if metadata else None)


def load_safetensors(
    path: str | os.PathLike, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads a safetensors file.

    Args:
        path: The file.
        device: Where the tensors are placed.

    Returns:
        The tensors by name, and the metadata of the header.

    Raises:
        CheckpointError: The file is missing, cut short, or not in safetensors format.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file ({error})") from error
