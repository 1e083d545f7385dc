"""Pickle containers (`.bin`, `.pt`), read so that nothing in them can run.

`weights_only` is always on: there is no switch. A container is one plain dict of tensors.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import torch

from weightwire.transfer.checkpoint.regular_files import (
    FileIdentity,
    opened_regular,
    printable,
    read_at,
    subject_of,
)
from weightwire.transfer.checkpoint.safetensors_format import is_tensor_name
from weightwire.transfer.checkpoint.shard_files import LoadedShard, check_unchanged
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.errors import CheckpointError

# What torch.save writes since 1.6 is a zip archive; only such a file can be mapped.
_ZIP_MAGIC = b"PK\x03\x04"
_FORBIDDEN = re.compile(r"(?:Unsupported (?:global|class|operand)|GLOBAL) [^\n]{0,200}")
_MOST_SHOWN = 20


def load_pickle(file: Path, *, mmap: bool = True) -> LoadedShard:
    """Load a pickle container on the CPU.

    Args:
        file: The container.
        mmap: Let tensors be views of the page cache, where the container allows that; writes to them never reach the
            file.

    Raises:
        CheckpointError: If the file cannot be read, holds or does anything but tensors, or changed on the way.
    """
    with opened_regular(file) as (fd, identity):
        start = bytearray(len(_ZIP_MAGIC))
        is_zip = read_at(fd, 0, memoryview(start)) == len(start) and bytes(start) == _ZIP_MAGIC
        if is_zip:
            _check_members(file, identity)
        mapped = mmap and is_zip
        content = _load(file, identity, mmap=mapped)
    tensors = _tensors_of(file, content, most_bytes=identity.size)
    check_unchanged(file, identity)
    return LoadedShard(file, tensors, backed_by=identity if mapped else None)


def _check_members(file: Path, identity: FileIdentity) -> None:
    """Refuse an archive that unpacks to more than it is: a few megabytes could ask for all memory there is."""
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    # A damaged directory can make the parser raise much else.
    except Exception as error:
        raise CheckpointError(
            f"{subject_of(file)}: {identity.size} bytes are not a pickle of plain tensors, which is all that is read "
            f"({type(error).__name__}); expected a zip archive as torch writes it",
            path=printable(file),
        ) from error
    if unpacked > identity.size:
        raise CheckpointError(
            f"{subject_of(file)}: unpacks to {unpacked} bytes from {identity.size}, expected members that are stored "
            "as they are, as torch writes them",
            path=printable(file),
            expected_bytes=identity.size,
            actual_bytes=unpacked,
        )


def _load(file: Path, identity: FileIdentity, *, mmap: bool) -> object:
    try:
        content: object = torch.load(os.fspath(file), map_location="cpu", weights_only=True, mmap=mmap)
    # A hostile or damaged stream can make the interpreter of pickles raise whatever it likes.
    except Exception as error:
        found = _FORBIDDEN.search(str(error))
        # torch's own text advises to switch the protection off.
        reason = f": {found.group()}" if found else ""
        raise CheckpointError(
            f"{subject_of(file)}: {identity.size} bytes are not a pickle of plain tensors, which is all that is read "
            f"({type(error).__name__}{reason}); expected a dict of names and tensors",
            path=printable(file),
        ) from error
    return content


def _tensors_of(file: Path, content: object, *, most_bytes: int) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{subject_of(file)}: holds a {type(content).__name__}, expected a dict of names and tensors",
            path=printable(file),
        )
    tensors = dict[str, torch.Tensor]()
    strangers = list[str]()
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or not _is_plain(value, most_bytes):
            strangers.append(f"{quoted(name)} ({_kind_of(value)})")
        elif not is_tensor_name(name):
            # Nothing could save, send or print it.
            strangers.append(f"{quoted(name)} (tensor under a name that no safetensors file can have)")
        else:
            # A Parameter's memory, without its history.
            tensors[name] = value.detach()
    if strangers:
        more = f" and {len(strangers) - _MOST_SHOWN} more" if len(strangers) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{subject_of(file)}: {len(strangers)} members are no tensors of a checkpoint: "
            f"{', '.join(strangers[:_MOST_SHOWN])}{more}; expected a dict of names and tensors",
            path=printable(file),
            members=strangers,
        )
    return tensors


def _is_plain(tensor: torch.Tensor, most_bytes: int) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return False
    # A stride of 0 makes any number of elements out of one. `nbytes` would overflow.
    return tensor.numel() <= most_bytes // tensor.itemsize


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of layout {value.layout}, dtype {value.dtype}, device {value.device}, {value.numel()} elements"
    return type(value).__name__
