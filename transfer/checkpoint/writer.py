"""Writes a safetensors file that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightwire.transfer.checkpoint.regular_files import printable, subject_of
from weightwire.transfer.checkpoint.safetensors_format import Header, build_header
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.dtypes import Dtype
from weightwire.transfer.errors import CheckpointError, CheckpointPathError

# Ten thousand norms must not cost ten thousand system calls; larger pieces go past the buffer.
_BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WritableTensor:
    """One tensor to write.

    Attributes:
        name: Checkpoint name.
        dtype: Its dtype.
        shape: In torch elements.
        pieces: Called when its turn comes; returns its packed row-major bytes as C-contiguous views in order.
            A piece is used up before the next one is asked for, so a buffer may be refilled.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]


def plan_file(tensors: Iterable[WritableTensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, Header]:
    """The bytes that go before the tensors, and where each tensor's bytes go; no piece is asked for.

    Raises:
        HeaderError: If a file cannot hold these names, shapes or metadata.
        DtypeError: If a packed dtype has no dimension that it can be packed along.
    """
    return build_header(((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), metadata)


def iter_pieces(tensor: WritableTensor, nbytes: int) -> Iterator[memoryview]:
    """The pieces of `tensor`, which must be `nbytes` long together.

    Yields:
        Views of bytes, never empty.

    Raises:
        CheckpointError: If there are more bytes (before any surplus is yielded) or fewer.
    """
    done = 0
    for piece in tensor.pieces():
        done += piece.nbytes
        if done > nbytes:
            break
        if piece.nbytes:
            yield piece.cast("B")
    if done != nbytes:
        raise CheckpointError(
            f"tensor {quoted(tensor.name)}: its pieces have {'at least ' if done > nbytes else ''}{done} bytes, "
            f"expected {nbytes}",
            tensor=tensor.name,
            expected_bytes=nbytes,
            actual_bytes=done,
        )


def write_safetensors(path: Path, tensors: Iterable[WritableTensor], metadata: Mapping[str, str] | None = None) -> int:
    """Write a file beside `path`, make it durable, and rename it to `path`.

    Tensors lie in the file in the order given. An existing file is replaced; after a failure it is untouched (unless
    only the last step failed, which makes the rename itself durable) and nothing is left beside it. The new file has
    the permissions of any file that this process makes.

    Returns:
        Length of the file in bytes.

    Raises:
        HeaderError: If a file cannot hold these names, shapes or metadata.
        CheckpointError: If the file cannot be written, or a tensor's pieces are not as long as its shape says.
        DtypeError: If a packed dtype has no dimension that it can be packed along.
    """
    if "\0" in str(path):
        raise CheckpointPathError(f"{subject_of(path)}: has a NUL byte", path=printable(path))
    ordered = tuple(tensors)
    prefix, header = plan_file(ordered, metadata)
    # The target's own name may be as long as names can be, so it is no part of this one.
    draft = path.parent / f".weightwire-{secrets.token_hex(8)}.tmp"
    try:
        _write_draft(draft, ordered, prefix, header)
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{subject_of(path)}: cannot be written: {reason}", path=printable(path)) from error
    finally:
        # Gone already after the rename; and what went wrong before must not be hidden by this going wrong too.
        with suppress(OSError):
            draft.unlink()
    return header.file_bytes


def _write_draft(draft: Path, tensors: Sequence[WritableTensor], prefix: bytes, header: Header) -> None:
    with open(draft, "xb", buffering=_BUFFER_BYTES) as stream:
        stream.write(prefix)
        for tensor, entry in zip(tensors, header.entries, strict=True):
            for piece in iter_pieces(tensor, entry.nbytes):
                stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
