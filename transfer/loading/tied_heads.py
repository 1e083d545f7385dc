"""The own tensor of a head that is tied to the embedding. It is not loaded (L77), but should be no other one."""

from __future__ import annotations

import logging

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.loading.resolver import NameTables

_LOG = logging.getLogger(__name__)

# A head that was trained differs everywhere, so pieces tell; all of two large tensors would cost a second to read.
_PIECE_BYTES = 4096
_PIECES = 16


def warn_of_own_head(checkpoint: Checkpoint, tables: NameTables) -> bool:
    """Say so if the file has a head that is not the embedding, although `config.json` ties them.

    Returns:
        Whether there was anything to say. Of large tensors only some pieces are compared.

    Raises:
        CheckpointError: If the files do not deliver what their headers say.
    """
    head, embedding = f"{tables.head}.weight", f"{tables.embedding}.weight"
    if not tables.tied or not {head, embedding} <= checkpoint.entries.keys() or _is_alike(checkpoint, head, embedding):
        return False
    _LOG.warning(
        "checkpoint tensor %s: is not what %s is, and is left out, since config.json ties the head to the embedding; "
        "expected tie_word_embeddings to be false if the head is one of its own",
        quoted(head),
        quoted(embedding),
    )
    return True


def _is_alike(checkpoint: Checkpoint, one: str, other: str) -> bool:
    first, second = checkpoint.entries[one], checkpoint.entries[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    step = max(_PIECE_BYTES, first.nbytes // _PIECES)
    for begin in range(0, first.nbytes, step):
        end = min(begin + _PIECE_BYTES, first.nbytes)
        if _bytes(checkpoint, one, begin, end) != _bytes(checkpoint, other, begin, end):
            return False
    return True


def _bytes(checkpoint: Checkpoint, name: str, begin: int, end: int) -> bytearray:
    buffer = bytearray(end - begin)
    checkpoint.read_into(name, begin, end, memoryview(buffer))
    return buffer
