"""Pickle containers (`.bin`, `.pt`), read so that nothing in them can run.

`weights_only` is always on: there is no switch. A container is one plain dict of tensors.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from weightwire.transfer.checkpoint.regular_files import (
    FileIdentity,
    opened_regular,
    printable,
    read_at,
    subject_of,
)
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
        mapped = mmap and read_at(fd, 0, memoryview(start)) == len(start) and bytes(start) == _ZIP_MAGIC
        content = _load(file, identity, mmap=mapped)
    tensors = _tensors_of(file, content)
    check_unchanged(file, identity)
    return LoadedShard(file, tensors, backed_by=identity if mapped else None)


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


def _tensors_of(file: Path, content: object) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{subject_of(file)}: holds a {type(content).__name__}, expected a dict of names and tensors",
            path=printable(file),
        )
    tensors = dict[str, torch.Tensor]()
    strangers = list[str]()
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, torch.Tensor) and _is_plain(value):
            # A Parameter's memory, without its history.
            tensors[name] = value.detach()
        else:
            strangers.append(f"{quoted(name)} ({_kind_of(value)})")
    if strangers:
        more = f" and {len(strangers) - _MOST_SHOWN} more" if len(strangers) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{subject_of(file)}: {len(strangers)} members are no tensors of a checkpoint: "
            f"{', '.join(strangers[:_MOST_SHOWN])}{more}; expected a dict of names and tensors",
            path=printable(file),
            members=strangers,
        )
    return tensors


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of layout {value.layout}, dtype {value.dtype}, device {value.device}"
    return type(value).__name__
