"""Shells for a whole checkpoint by its own names, filled from the local disk alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint import Checkpoint, CheckpointFiles
from weightwire.transfer.checkpoint.formats import ReaderOptions
from weightwire.transfer.checkpoint.iteration import open_reader
from weightwire.transfer.checkpoint.read_plan import ReadOptions, choose_reader
from weightwire.transfer.checkpoint.reused_buffers import own
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CheckpointNotFoundError
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.layouts import ModelIdentity, plain_layout
from weightwire.transfer.session import RankProgress
from weightwire.transfer.shells import Shells


def identity_of(checkpoint: Checkpoint, *, model: str, revision: str | None = None) -> ModelIdentity:
    """What shells of this checkpoint are a copy of; the revision is the checkpoint's own unless one is named."""
    return ModelIdentity(
        model=model,
        revision=revision or checkpoint.revision,
        config=checkpoint.config,
        checkpoint=specs_of(checkpoint),
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    identity: ModelIdentity,
    *,
    control: Control,
    exclude: Sequence[str] = (),
    on_progress: Callable[[RankProgress], None] = lambda _: None,
    shared: bool = False,
) -> tuple[Shells, FillResult]:
    """Allocate shells for a checkpoint and read it into them.

    Args:
        checkpoint: Read.
        identity: See `identity_of`.
        control: Deadline and stop button.
        exclude: Shell patterns of checkpoint names to leave out.
        on_progress: As for `fill`.
        shared: Allocate memory that a `SourceProcess` can serve.

    Raises:
        CheckpointNotFoundError: If the patterns leave nothing.
        AdmissionError: If it does not fit into memory; nothing was allocated.
        CheckpointError: If the files do not deliver what their headers say.
    """
    wanted = [spec for spec in specs_of(checkpoint) if not any(fnmatchcase(spec.name, pattern) for pattern in exclude)]
    if not wanted:
        raise CheckpointNotFoundError(f"checkpoint: no tensor is left after leaving out {list(exclude)}")
    layout = plain_layout(wanted, identity)
    check_memory(layout.total_bytes, purpose=f"loading {identity.model!r}")
    shells = Shells.allocate(layout, shared=shared)
    result = fill(shells, Origins(checkpoint=checkpoint), control=control, on_progress=on_progress)
    return shells, result


def load_streamed(
    files: CheckpointFiles, identity: ModelIdentity, *, control: Control, exclude: Sequence[str] = ()
) -> tuple[Shells, int, int]:
    """Shells of a checkpoint that has no byte ranges: each tensor as the reader gives it, by its own name.

    Files are read into memory one after the other: shells outlive them, and a stop is seen after each.

    Args:
        files: What discovery found.
        identity: See `identity_of`.
        control: Deadline and stop button.
        exclude: Shell patterns of checkpoint names to leave out.

    Returns:
        The shells, the bytes that were read, and the number of names that were left out.

    Raises:
        CheckpointNotFoundError: If the patterns leave nothing.
        AdmissionError: If the files do not fit into memory; nothing was read.
        CheckpointError: If a file cannot be read, or is more than tensors by name.
    """
    left_out = set[str]()

    def wanted(name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            left_out.add(name)
        return name not in left_out

    control.check()
    check_memory(sum(file.stat().st_size for file in files.files), purpose=f"loading {identity.model!r}")
    one_by_one = ReadOptions(mmap=False, threads=ReaderOptions(enable_multithread_load=False))
    tensors = dict[str, torch.Tensor]()
    for name, tensor in open_reader(files, choose_reader(one_by_one)).iterate(wanted):
        control.check()
        tensors[name] = _contiguous(own(tensor), name)
    if not tensors:
        raise CheckpointNotFoundError(f"checkpoint: no tensor is left after leaving out {list(exclude)}")
    shells = Shells.from_tensors(tensors, identity)
    return shells, sum(tensor.nbytes for tensor in tensors.values()), len(left_out)


def _contiguous(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, or a packed copy of it: many a name may claim the same few bytes."""
    if not tensor.is_contiguous():
        check_memory(tensor.nbytes, purpose=f"packing {name!r}")
    return tensor.contiguous()
