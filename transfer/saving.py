"""Writes what lies in a rank's shells as a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from weightwire.transfer.checkpoint import WritableTensor, write_safetensors
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.export import exported_tensors
from weightwire.transfer.manifest import TensorEntry
from weightwire.transfer.shells import Shells


def save_rank(shells: Shells, folder: Path) -> Path:
    """Write `rank-<global rank>.safetensors` into `folder`, which is made if absent.

    Each storage region once, under its first name; the file appears whole or not at all.

    Returns:
        The file's path.

    Raises:
        CheckpointError: If it cannot be written; a file of that name is as it was.
    """
    tensors, aliases = exported_tensors(shells.manifest)
    writable = (
        WritableTensor(
            name=tensor.name, dtype=dtype_named(tensor.dtype), shape=tensor.shape, pieces=_pieces(shells, tensor)
        )
        for tensor in tensors
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{shells.manifest.rank}.safetensors"
    write_safetensors(path, list(writable), aliases)
    return path


def _pieces(shells: Shells, tensor: TensorEntry) -> Callable[[], Iterator[memoryview]]:
    region = shells.manifest.flat_region(tensor)
    step = shells.manifest.chunk_bytes

    def pieces() -> Iterator[memoryview]:
        for begin in range(0, region.numel, step):
            yield from shells.gather(region, begin, min(begin + step, region.numel))

    return pieces
