"""Shells for a whole checkpoint by its own names, filled from the local disk alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint import Checkpoint, CheckpointFiles
from weightwire.transfer.checkpoint.iteration import open_reader
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
) -> tuple[Shells, FillResult]:
    """Allocate shells for a checkpoint and read it into them.

    Args:
        checkpoint: Read.
        identity: See `identity_of`.
        control: Deadline and stop button.
        exclude: Shell patterns of checkpoint names to leave out.
        on_progress: As for `fill`.

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
    shells = Shells.allocate(layout)
    result = fill(shells, Origins(checkpoint=checkpoint), control=control, on_progress=on_progress)
    return shells, result


def load_streamed(
    files: CheckpointFiles, identity: ModelIdentity, *, control: Control, exclude: Sequence[str] = ()
) -> tuple[Shells, int, int]:
    """Shells of a checkpoint that has no byte ranges: each tensor as the reader gives it, by its own name.

    Args:
        files: What discovery found.
        identity: See `identity_of`.
        control: Deadline and stop button.
        exclude: Shell patterns of checkpoint names to leave out.

    Returns:
        The shells, the bytes that were read, and the number of names that were left out.

    Raises:
        CheckpointNotFoundError: If the patterns leave nothing.
        CheckpointError: If a file cannot be read, or is more than tensors by name.
    """
    left_out = set[str]()

    def wanted(name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            left_out.add(name)
        return name not in left_out

    tensors = dict[str, torch.Tensor]()
    for name, tensor in open_reader(files).iterate(wanted):
        control.check()
        tensors[name] = own(tensor).contiguous()
    if not tensors:
        raise CheckpointNotFoundError(f"checkpoint: no tensor is left after leaving out {list(exclude)}")
    shells = Shells.from_tensors(tensors, identity)
    return shells, sum(tensor.nbytes for tensor in tensors.values()), len(left_out)
