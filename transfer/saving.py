"""Writes what lies in a rank's shells as a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from weightwire.transfer.checkpoint import WritableTensor, write_safetensors
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import CheckpointError, SettingsError
from weightwire.transfer.export import exported_tensors
from weightwire.transfer.manifest import TensorEntry
from weightwire.transfer.shells import Shells


def save_rank(shells: Shells, folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Write `rank-<global rank>.safetensors` into `folder`.

    Each storage region once, under its first name; the file appears whole or not at all.

    Args:
        shells: Filled.
        folder: Made if absent.
        on_bytes: Called with the bytes of each piece that is written.

    Returns:
        The file's path.

    Raises:
        CheckpointError: If it cannot be written; a file of that name is as it was.
    """
    tensors, aliases = exported_tensors(shells.manifest)
    writable = (
        WritableTensor(
            name=tensor.name,
            dtype=dtype_named(tensor.dtype),
            shape=tensor.shape,
            pieces=_pieces(shells, tensor, on_bytes),
        )
        for tensor in tensors
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"folder {str(folder)!r}: cannot be made: {error.strerror or error}") from error
    path = folder / f"rank-{shells.manifest.rank}.safetensors"
    write_safetensors(path, list(writable), aliases)
    return path


def check_destination(folder: Path, *, checkpoint: Path | None = None) -> None:
    """Check, before anything is loaded, that `save_rank` can write there, and spoils no checkpoint by it.

    Raises:
        SettingsError: If it is no folder, cannot be made or written, or is the checkpoint's own.
    """
    if checkpoint is not None:
        own = checkpoint.parent if os.path.isfile(checkpoint) else checkpoint
        # pathlib's `resolve` has errors of its own for links in a circle.
        if os.path.realpath(folder) == os.path.realpath(own):
            raise SettingsError(f"folder {folder}: is the checkpoint's own, a second file of weights would spoil it")
    target = Path(os.path.realpath(folder))
    try:
        nearest = next(path for path in (target, *target.parents) if _is_there(path))
    except OSError as error:
        raise SettingsError(f"folder {folder}: cannot be looked at: {error.strerror}") from error
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingsError(f"folder {folder}: {nearest} is no folder that this process may write to")


def _is_there(path: Path) -> bool:
    """Whether there is anything of that name, be it a link to nothing; what else the system says is raised."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _pieces(shells: Shells, tensor: TensorEntry, on_bytes: Callable[[int], None]) -> Callable[[], Iterator[memoryview]]:
    region = shells.manifest.flat_region(tensor)

    def pieces() -> Iterator[memoryview]:
        for views in shells.steps(region):
            yield from views
            on_bytes(sum(map(len, views)))

    return pieces
