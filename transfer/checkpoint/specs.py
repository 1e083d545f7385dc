"""What a checkpoint holds, as values that know no file."""

from __future__ import annotations

from weightwire.transfer.checkpoint.reader import Checkpoint
from weightwire.transfer.manifest import CheckpointSpec


def specs_of(checkpoint: Checkpoint) -> tuple[CheckpointSpec, ...]:
    """Name, dtype and shape of every tensor of a checkpoint, in its order."""
    return tuple(
        CheckpointSpec(name=entry.name, dtype=entry.dtype.name, shape=entry.shape)
        for entry in checkpoint.entries.values()
    )
