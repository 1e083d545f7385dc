"""Placements: which checkpoint region lies in which runtime region."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.errors import ManifestError, TransferError
from weightwire.transfer.placement import PlacedPiece, place_whole
from weightwire.transfer.regions import Region, row_major


@given(st.lists(st.integers(0, 3), max_size=3).map(tuple))
def test_placement_of_a_whole_tensor_round_trips(shape: tuple[int, ...]) -> None:
    (piece,) = place_whole("a", Region(offset=3, shape=shape, strides=tuple(4**n for n in range(len(shape)))))
    assert PlacedPiece.from_json(json.loads(json.dumps(piece.to_json()))) == piece
    assert piece.checkpoint == row_major(shape)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=2), lambda c: st.lists(c, max_size=3), max_leaves=10))
@example(["a", [0, [1], [1]], [0, [2], [1]]])
@example(["a", [0, [1], [1]]])
def test_placement_from_anything_is_a_placement_or_a_typed_error(value: object) -> None:
    with pytest.raises(TransferError):
        PlacedPiece.from_json(value)


def test_placement_of_unequal_shapes_is_refused_although_the_counts_agree() -> None:
    with pytest.raises(ManifestError, match="'a'"):
        PlacedPiece(name="a", checkpoint=row_major((4,)), runtime=row_major((2, 2)))
