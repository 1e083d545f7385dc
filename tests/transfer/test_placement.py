"""Placements: which checkpoint region lies in which runtime region, in one form whatever way it was spelled."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.errors import ManifestError, RegionError, TransferError
from weightwire.transfer.placement import Pattern, PlacedConstant, PlacedPiece, is_whole, place_whole
from weightwire.transfer.regions import MAX_ELEMENTS, Region, row_major

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=2),
    max_leaves=10,
)


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions]


def elements(piece: PlacedPiece) -> dict[int, int]:
    """For each element of the storage, the checkpoint's that lies there."""
    return dict(zip(indices(piece.runtime), indices(piece.checkpoint), strict=True))


def region_of(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of this shape: cut out of something larger whose axes have any order."""
    order = draw(st.permutations(range(len(shape))))
    whole = torch.empty([shape[axis] * 2 + draw(st.integers(0, 2)) for axis in order], device="meta")
    cuts = []
    for at, axis in enumerate(order):
        step = draw(st.sampled_from([1, 1, 2]))
        begin = draw(st.integers(0, whole.shape[at] - shape[axis] * step))
        cuts.append(slice(begin, begin + shape[axis] * step, step))
    return whole[tuple(cuts)].permute([order.index(axis) for axis in range(len(shape))])


@st.composite
def copies(draw: st.DrawFn) -> tuple[Region, Region]:
    """What a loader copies: views of two tensors, the one in the checkpoint perhaps broadcast."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    there, here = region_of(draw(views(shape))), region_of(draw(views(shape)))
    if draw(st.booleans()):
        whole = row_major([size * 2 for size in shape], offset=there.offset)
        there = Region(offset=there.offset, shape=shape, strides=whole.strides)
    repeated = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    strides = tuple(0 if again else stride for again, stride in zip(repeated, there.strides, strict=True))
    return (replace(there, strides=strides) if draw(st.integers(0, 3)) == 0 else there), here


@st.composite
def respelled(draw: st.DrawFn, regions: tuple[Region, Region]) -> tuple[Region, Region]:
    """The same copy with dimensions split in two, of size one put in, and in another order."""
    walks = list(zip(regions[0].shape, regions[0].strides, regions[1].strides, strict=True))
    for at, (size, there, here) in enumerate(walks):
        inner = draw(st.sampled_from([n for n in range(1, size) if size % n == 0] or [1]))
        if inner > 1:
            walks[at] = (inner, there, here)
            walks.append((size // inner, there * inner, here * inner))
    walks += draw(st.lists(st.tuples(st.just(1), st.integers(0, 99), st.integers(0, 99)), max_size=2))
    walks = draw(st.permutations(walks))
    shape = tuple(size for size, _, _ in walks)
    return (
        Region(offset=regions[0].offset, shape=shape, strides=tuple(there for _, there, _ in walks)),
        Region(offset=regions[1].offset, shape=shape, strides=tuple(here for _, _, here in walks)),
    )


# One piece, one form


@given(st.data())
def test_piece_is_the_same_however_its_dimensions_were_ordered_or_split(data: st.DataObject) -> None:
    there, here = regions = data.draw(copies())
    piece = PlacedPiece.of("w", checkpoint=there, runtime=here)
    assert elements(piece) == dict(zip(indices(here), indices(there), strict=True))
    again = PlacedPiece.of("w", **dict(zip(("checkpoint", "runtime"), data.draw(respelled(regions)), strict=True)))
    assert again == piece
    assert hash(again.pattern) == hash(piece.pattern)


@given(copies())
def test_piece_knows_its_measures(regions: tuple[Region, Region]) -> None:
    there, here = regions
    piece = PlacedPiece.of("w", checkpoint=there, runtime=here)
    assert piece.numel == there.numel
    assert piece.ends == (max(indices(there)) + 1, max(indices(here)) + 1)
    assert not piece.pattern.repeats
    assert piece.shifted(7).runtime == piece.runtime.shifted(7)
    assert piece.shifted(7).checkpoint == piece.checkpoint


def test_pieces_without_elements_are_one_whatever_their_shape() -> None:
    shapes = [(0,), (2, 0), (0, 3, 4), (0, 0)]
    pieces = {PlacedPiece.of("w", checkpoint=row_major(shape), runtime=row_major(shape)) for shape in shapes}
    assert [(piece.numel, piece.ends) for piece in pieces] == [(0, (0, 0))]


def test_pattern_tells_if_an_element_of_the_storage_is_written_again() -> None:
    assert Pattern.of(row_major((3,)), Region(offset=0, shape=(3,), strides=(0,))).repeats
    assert not Pattern.of(Region(offset=0, shape=(3,), strides=(0,)), row_major((3,))).repeats


def test_sizes_past_the_range_of_32_bits_stay_exact() -> None:
    rows = Region(offset=1 << 40, shape=(1 << 20, 1 << 20), strides=(1 << 21, 1))
    piece = PlacedPiece.of("w", checkpoint=rows, runtime=row_major((1 << 20, 1 << 20), offset=3))
    assert piece.numel == 1 << 40
    assert piece.ends == ((1 << 40) + (1 << 41) - (1 << 20), 3 + (1 << 40))
    assert Pattern.from_json(json.loads(json.dumps(piece.pattern.to_json()))) == piece.pattern


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: piece_at(-1, 0), id="before the first element of the tensor"),
        pytest.param(lambda: piece_at(0, -1), id="before the first element of the storage"),
        pytest.param(lambda: piece_at(MAX_ELEMENTS, 0), id="past what can be addressed in the tensor"),
        pytest.param(lambda: piece_at(0, MAX_ELEMENTS - 1), id="past what can be addressed in the storage"),
        pytest.param(lambda: piece_at(0, 5).shifted(-6), id="shifted before the first element"),
    ],
)
def test_piece_outside_of_what_can_be_is_refused(make: Callable[[], PlacedPiece]) -> None:
    with pytest.raises(ManifestError, match="placement of 'w': begins at element"):
        make()


def piece_at(there: int, here: int) -> PlacedPiece:
    pattern = Pattern.of(row_major((2,)), row_major((2,)))
    return PlacedPiece(name="w", checkpoint_offset=there, runtime_offset=here, pattern=pattern)


def test_placement_of_unequal_shapes_is_refused_although_the_counts_agree() -> None:
    with pytest.raises(ManifestError, match=r"placement of 'a': shape \[4\] in the checkpoint, \[2, 2\] in the shell"):
        PlacedPiece.of("a", checkpoint=row_major((4,)), runtime=row_major((2, 2)))


# Whole tensors


@given(st.data())
def test_tensor_that_is_the_checkpoints_is_whole_and_nothing_else_is(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    runtime = region_of(data.draw(views(shape)))
    (piece,) = placement = place_whole("a", runtime)
    assert is_whole("a", runtime, placement)
    assert math.prod(shape) == piece.numel
    assert elements(piece) == dict(zip(indices(runtime), range(piece.numel), strict=True))
    assert not is_whole("b", runtime, placement)
    assert not is_whole("a", runtime, ())
    assert not is_whole("a", runtime, placement * 2)
    assert not is_whole("a", runtime, [replace(piece, checkpoint_offset=1)])
    if piece.numel > 1:
        assert not is_whole("a", runtime, [replace(piece, runtime_offset=piece.runtime_offset + 1)])


def test_turned_tensor_is_not_the_checkpoints_though_its_memory_is() -> None:
    turned = PlacedPiece.of("a", checkpoint=row_major((2, 2)), runtime=Region(offset=0, shape=(2, 2), strides=(1, 2)))
    assert not is_whole("a", row_major((2, 2)), [turned])
    assert is_whole("a", Region(offset=0, shape=(2, 2), strides=(1, 2)), [turned])


# JSON


@given(copies())
def test_pattern_round_trips(regions: tuple[Region, Region]) -> None:
    pattern = Pattern.of(*regions)
    assert Pattern.from_json(json.loads(json.dumps(pattern.to_json()))) == pattern


@given(st.data())
def test_only_the_canonical_spelling_of_a_pattern_is_taken(data: st.DataObject) -> None:
    there, here = data.draw(respelled(data.draw(copies())))
    value = [list(there.shape), list(there.strides), list(here.strides)]
    if value == Pattern.of(there, here).to_json():
        assert Pattern.from_json(value) == Pattern.of(there, here)
        return
    with pytest.raises(ManifestError, match="no dimension to spare"):
        Pattern.from_json(value)


@given(JSON | st.tuples(*[st.lists(st.integers(-1, 2**64) | st.booleans(), max_size=2)] * 3).map(list))
@example([[0], [1], [1]])
@example([[], [], []])
@example([[2, 2], [2, 1], [2, 1]])
@example([[2**62], [0], [4]])
@example([[2**33, 2**33], [0, 0], [0, 0]])
@example([[True], [1], [1]])
@example([["2"], [1], [1]])
@example([[2], [1], [1], 0])
def test_pattern_from_anything_is_a_pattern_or_a_typed_error(value: object) -> None:
    try:
        pattern = Pattern.from_json(value)
    except TransferError:
        return
    assert pattern.to_json() == value


NUMBERS = st.floats(allow_nan=False)


@given(NUMBERS)
@example(math.inf)
@example(-math.inf)
@example(-0.0)
@example(5e-324)
def test_constant_round_trips_to_the_bit(value: float) -> None:
    constant = PlacedConstant(runtime=row_major((2, 3), offset=4), value=value)
    found = PlacedConstant.from_json(json.loads(json.dumps(constant.to_json())))
    assert found == constant
    assert found.value.hex() == value.hex()
    assert found.shifted(3) == PlacedConstant(runtime=constant.runtime.shifted(3), value=value)


def test_zeros_of_two_signs_are_two_constants() -> None:
    runtime = row_major((2,))
    assert PlacedConstant(runtime=runtime, value=0.0) != PlacedConstant(runtime=runtime, value=-0.0)


def test_constant_that_is_nan_is_refused() -> None:
    with pytest.raises(ManifestError, match="NaN"):
        PlacedConstant(runtime=row_major((2,)), value=math.nan)


def test_constant_that_repeats_an_element_is_refused() -> None:
    with pytest.raises(ManifestError, match="each element once"):
        PlacedConstant(runtime=Region(offset=0, shape=(4,), strides=(0,)), value=0.0)


ONE = row_major((2,)).to_json()


@given(JSON | st.tuples(st.just(ONE), JSON | st.text()).map(list))
@example([ONE, "nan"])
@example([ONE, "inf "])
@example([ONE, "0x1.0p+0"])
@example([ONE, "0x1p0"])
@example([ONE, "1" * 400])
@example([ONE, "0x1p99999"])
@example([ONE, 1.0])
@example([[0, [True], [1]], "0x0.0p+0"])
@example([[0, [2], [0]], "0x0.0p+0"])
def test_constant_from_anything_is_a_constant_or_a_typed_error(value: object) -> None:
    try:
        constant = PlacedConstant.from_json(value)
    except (ManifestError, RegionError):
        return
    assert constant.to_json() == value
