"""Checksums and their text."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.integrity import DIGEST_BYTES, checksum, digest_at, digest_text


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_checksum_is_that_of_the_bytes_however_they_are_cut(pieces: list[bytes]) -> None:
    expected = xxhash.xxh3_64(b"".join(pieces), seed=0).intdigest()
    assert checksum([memoryview(piece) for piece in pieces]) == expected
    assert checksum(memoryview(piece) for piece in pieces) == expected


def test_checksum_of_nothing_is_the_one_that_others_compute() -> None:
    """From the reference implementation's own test vectors: XXH3_64bits of no bytes, seed 0."""
    assert digest_text(checksum([])) == "2d06800538d394c2"


def test_digest_text_keeps_leading_zeros() -> None:
    assert digest_text(0xAB) == "00000000000000ab"


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_digest_at_is_the_entry_of_that_number(digests: list[int]) -> None:
    packed = b"".join(digest.to_bytes(DIGEST_BYTES, "big") for digest in digests)
    assert [digest_at(packed, index) for index in range(len(digests))] == digests
