"""A checkpoint on disk as a mapping from names to byte ranges, and positional reads of exactly these bytes."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from weightwire.transfer.checkpoint.discovery import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    CheckpointFiles,
    DiscoveryOptions,
    DuplicatePolicy,
    find_checkpoint,
)
from weightwire.transfer.checkpoint.pinned_files import PinnedFiles
from weightwire.transfer.checkpoint.regular_files import (
    FileIdentity,
    opened_regular,
    printable,
    read_at,
    read_text,
    refusal_for,
    subject_of,
)
from weightwire.transfer.checkpoint.safetensors_format import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Header,
    parse_header,
    parse_prefix,
)
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.diagnostics import Diagnostic
from weightwire.transfer.dtypes import Dtype
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError, NotFoundError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a checkpoint and where its bytes lie.

    Attributes:
        name: Checkpoint name.
        dtype: Its dtype.
        shape: In torch elements.
        file: The file that holds it.
        begin: First byte, counted from the start of the file.
        end: One past the last byte.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Checkpoint:
    """An open checkpoint. Threads may read from it at the same time.

    Only headers and `config.json` have been read; tensor bytes are read when asked for.

    Attributes:
        files: What discovery found, once.
        entries: Tensors by name: files in order, names sorted within a file.
        config: Text of the `config.json` that lies in the folder, unparsed; None if there is none.
        revision: See `checkpoint_revision`.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        entries: Mapping[str, CheckpointTensor],
        *,
        pinned: PinnedFiles,
        config: str | None,
    ) -> None:
        self.files = files
        self.entries = MappingProxyType(dict(entries))
        self.config = config
        self.revision = checkpoint_revision(config, self.entries.values())
        self._pinned = pinned

    @classmethod
    def open(
        cls, path: Path, options: DiscoveryOptions | None = None, *, max_header_bytes: int = MAX_HEADER_BYTES
    ) -> Self:
        """Find and check a checkpoint; no tensor byte is read.

        Args:
            path: A folder, or one `.safetensors` file (whose folder may have a `config.json`).
            options: See `find_checkpoint`.
            max_header_bytes: Limit on each file's header, in bytes.

        Raises:
            CheckpointError: If the files are not one well-formed checkpoint; see `find_checkpoint`, `parse_header`.
            DtypeError: If a dtype's tag is unknown.
        """
        return cls.open_files(find_checkpoint(path, options), max_header_bytes=max_header_bytes)

    @classmethod
    def open_files(cls, files: CheckpointFiles, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Self:
        """`open` for what discovery found before; the folder is not listed again.

        Raises:
            CheckpointError: If the files are pickles, which have no byte ranges, or as `open`.
            DtypeError: If a dtype's tag is unknown.
        """
        if files.container != "safetensors":
            raise CheckpointError(
                f"checkpoint {printable(files.folder)!r}: {printable(files.files[0])!r} is a PyTorch pickle; "
                "byte ranges can be read of safetensors alone",
                path=printable(files.folder),
            )
        identities, entries = dict[Path, FileIdentity](), dict[str, CheckpointTensor]()
        repeated = list[str]()
        for file in files.files:
            header, identities[file] = read_header(file, max_header_bytes=max_header_bytes)
            repeated += _add_entries(entries, file, header, files.duplicates)
        _check_promises(files, entries)
        if repeated:
            files = replace(files, notes=(*files.notes, _first_copies_note(files, repeated)))
        return cls(files, entries, pinned=PinnedFiles(identities), config=_read_config(files.folder))

    @property
    def bytes_read(self) -> int:
        """Tensor bytes that were read from disk so far; headers do not count."""
        return self._pinned.bytes_read

    def read_into(self, name: str, begin: int, end: int, buffer: memoryview) -> None:
        """Read bytes [begin, end) of a tensor, counted in its packed row-major bytes, straight into `buffer`.

        Args:
            name: Checkpoint name.
            begin: First byte, counted from the tensor's first.
            end: One past the last byte.
            buffer: Writable, C-contiguous, exactly `end - begin` bytes. Only valid if this returns.

        Raises:
            NotFoundError: If the checkpoint has no such tensor.
            CheckpointError: If the file has changed since it was opened, or delivers fewer bytes than it should.
            ValueError: If the range is outside the tensor or `buffer` does not fit it, or after `close`.
        """
        tensor = self._tensor(name)
        if not 0 <= begin <= end <= tensor.nbytes:
            raise ValueError(f"tensor {quoted(name)}: bytes [{begin}, {end}) lie outside its {tensor.nbytes}")
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes != end - begin:
            raise ValueError(f"tensor {quoted(name)}: buffer is not {end - begin} writable, contiguous bytes")
        # memoryview.cast refuses views without elements.
        if begin == end:
            return
        got = self._pinned.read_into(tensor.file, tensor.begin + begin, buffer.cast("B"))
        if got != end - begin:
            raise CheckpointError(
                f"{subject_of(tensor.file)}: tensor {quoted(name)}: ends after {got} bytes, expected {end - begin}",
                path=printable(tensor.file),
                tensor=name,
                expected_bytes=end - begin,
                actual_bytes=got,
            )

    def expect_scattered_reads(self) -> None:
        """Say that `read_into` will take pieces of the files, between which nothing should be read from disk."""
        self._pinned.expect_scattered_reads()

    @contextmanager
    def mapped(self, name: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Bytes [begin, end) of a tensor out of the page cache, as flat uint8 memory that no other tensor may outlive.

        The memory is aligned for the tensor's dtype: a view of a mapping where the file is aligned, else a copy.

        Raises:
            NotFoundError: If the checkpoint has no such tensor.
            CheckpointError: If the file has changed since it was opened.
            ValueError: If the range is empty or outside the tensor, or after `close`.
        """
        tensor = self._tensor(name)
        if not 0 <= begin < end <= tensor.nbytes:
            raise ValueError(f"tensor {quoted(name)}: bytes [{begin}, {end}) lie outside its {tensor.nbytes}")
        at = tensor.begin + begin
        with self._pinned.mapped(tensor.file, at, end - begin) as mapping:
            flat = torch.frombuffer(mapping, dtype=torch.uint8)[at % mmap.ALLOCATIONGRANULARITY :]
            try:
                yield flat.clone() if at % tensor.dtype.itemsize else flat
            finally:
                # The mapping cannot be closed while a tensor holds its buffer.
                del flat

    def read_tensor(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU, in memory of its own (not the page cache), whatever its alignment on disk.

        Raises:
            NotFoundError: If the checkpoint has no such tensor.
            DtypeError: If this build of torch does not have its dtype.
            CheckpointError: As `read_into`.
        """
        entry = self._tensor(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype.torch_dtype)
        if entry.nbytes:
            self.read_into(name, 0, entry.nbytes, _bytes_of(tensor, entry.nbytes))
        return tensor

    def iterate(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors one at a time, in the order of `entries`; nothing of the others is touched.

        Args:
            wanted: Which names to read; all, if None.

        Yields:
            Name and tensor, as `read_tensor` returns it. No reference is kept here.
        """
        for name in self.entries:
            if wanted is None or wanted(name):
                yield name, self.read_tensor(name)

    def close(self) -> None:
        """Refuse further reads; reads under way finish. May be called again."""
        self._pinned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, name: str) -> CheckpointTensor:
        tensor = self.entries.get(name)
        if tensor is None:
            raise NotFoundError(
                f"tensor {quoted(name)}: not in the checkpoint {printable(self.files.folder)!r}",
                kind="tensor",
                name=name,
            )
        return tensor


def read_header(file: Path, *, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[Header, FileIdentity]:
    """Read and check the header of one file; what the file was just before comes with it.

    Raises:
        CheckpointError: If the file cannot be read, or its header is refused.
        DtypeError: If a dtype's tag is unknown.
    """
    where = subject_of(file)
    with opened_regular(file) as (fd, identity):
        try:
            prefix = _read_start(fd, 0, min(PREFIX_BYTES, identity.size))
            length = parse_prefix(prefix, identity.size, where, max_header_bytes=max_header_bytes)
            raw = _read_start(fd, PREFIX_BYTES, length)
        except OSError as error:
            raise refusal_for(file, error) from error
        return parse_header(raw, file_bytes=identity.size, where=where), identity


def checkpoint_revision(config: str | None, tensors: Iterable[CheckpointTensor]) -> str:
    """Identity of a model's definition: hex SHA-256 over its config and its tensors' names, dtypes and shapes.

    How the tensors are dealt to files, and in which order, does not count, so that a checkpoint and its resharded
    copy are one revision. Neither do the tensors' bytes: two trainings of one model have the same revision unless
    somebody names another.

    Args:
        config: Text of `config.json`, byte for byte; None if there is none.
        tensors: In any order.
    """
    specs = sorted((tensor.name, tensor.dtype.name, tensor.shape) for tensor in tensors)
    text = json.dumps({"config": config, "tensors": specs}, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _read_start(fd: int, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: read_at(fd, offset, memoryview(buffer))])


def _add_entries(
    entries: dict[str, CheckpointTensor], file: Path, header: Header, duplicates: DuplicatePolicy
) -> list[str]:
    """Add the tensors of a file; returns the names that an earlier file had, where that is allowed."""
    repeated = list[str]()
    # Sorted here, so that no order of keys in a file can change the order of reads (L34).
    for entry in sorted(header.entries, key=lambda entry: entry.name):
        other = entries.get(entry.name)
        if other is not None and duplicates is DuplicatePolicy.FIRST:
            repeated.append(entry.name)
            continue
        if other is not None:
            raise CheckpointError(
                f"tensor {quoted(entry.name)}: is in two files, {printable(other.file)!r} and {printable(file)!r}; "
                "expected one",
                tensor=entry.name,
                files=[printable(other.file), printable(file)],
                diagnostic="D02",
            )
        entries[entry.name] = CheckpointTensor(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            file=file,
            begin=header.data_begin + entry.begin,
            end=header.data_begin + entry.end,
        )
    return repeated


def _first_copies_note(files: CheckpointFiles, repeated: list[str]) -> Diagnostic:
    detail = f"{len(repeated)} names are in several files; the first file's copy counts: {quoted(repeated)}"
    _LOG.warning("checkpoint %r: %s", printable(files.folder), detail)
    return Diagnostic(code="D02", subject=f"checkpoint {printable(files.folder)!r}", detail=detail)


def _check_promises(files: CheckpointFiles, entries: Mapping[str, CheckpointTensor]) -> None:
    """Refuse a checkpoint that holds nothing, or not all that its index says."""
    if not entries:
        raise CheckpointNotFoundError(
            f"checkpoint {printable(files.folder)!r}: its {len(files.files)} files hold no tensor",
            path=printable(files.folder),
        )
    missing = [name for name in files.indexed_names if name not in entries]
    if missing and files.index is not None:
        first = missing[0]
        raise CheckpointError(
            f"index {printable(files.index)!r}: {len(missing)} of its tensors are in no file; the first is "
            f"{quoted(first)}, expected in {printable(files.indexed_names[first])!r}",
            missing=[quoted(name) for name in missing],
        )


def _read_config(folder: Path) -> str | None:
    path = folder / CONFIG_NAME
    return read_text(path, max_bytes=MAX_CONFIG_BYTES) if os.path.lexists(path) else None


def _bytes_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """View, not copy, of the memory of a contiguous CPU tensor that has elements; `tensor` must outlive it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")
