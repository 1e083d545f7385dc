"""Checksums of chunks and tensors: xxh3-64, seed 0."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

DIGEST_BYTES = 8


def checksum(pieces: Iterable[memoryview]) -> int:
    """xxh3-64 of the pieces' bytes, one after the other.

    Args:
        pieces: Contiguous views of bytes.
    """
    if isinstance(pieces, list) and len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def digest_text(digest: int) -> str:
    """The 16 hex digits by which a manifest writes a tensor's digest."""
    return f"{digest:016x}"


def digest_at(digests: bytes, index: int) -> int:
    """Entry `index` of a manifest's `chunk_digests`."""
    return int.from_bytes(digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES], "big")
