"""Pieces in the coordinates of their tensor, against sets of indices."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.boxes import Box, BoxedPiece
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.regions import Region, row_major

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def region(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    found = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        found.append(slice(begin, draw(st.integers(begin + 1, size))))
    return tuple(found)


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[PlacedPiece, torch.Tensor, tuple[slice, ...]]:
    """A cut of a tensor, with axes in any order, placed anywhere in a shell, its dimensions merged or not."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    cut = draw(cuts(shape))
    part = whole[cut].permute(draw(st.permutations(range(len(shape)))))
    shell = torch.full([size + draw(st.integers(0, 2)) for size in part.shape], -1)
    target = shell[tuple(slice(shell.shape[i] - size, None) for i, size in enumerate(part.shape))]
    target.copy_(part)
    source, runtime = region(part), region(target)
    if draw(st.booleans()) and source.is_contiguous and runtime.is_contiguous:
        source, runtime = source.coalesced(), Region(offset=runtime.offset, shape=(part.numel(),), strides=(1,))
        source = Region(offset=source.offset, shape=(part.numel(),), strides=(1,))
    return PlacedPiece(name="w", checkpoint=source, runtime=runtime), shell, cut


@given(st.data())
def test_a_cut_in_any_order_of_axes_is_its_box(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    piece, shell, cut = data.draw(pieces(shape))
    boxed = BoxedPiece.of(piece, shape)
    assert boxed is not None
    assert boxed.box == Box(begins=tuple(c.start for c in cut), sizes=tuple(c.stop - c.start for c in cut))
    held = boxed.region(boxed.box)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    assert shell.view(-1).as_strided(held.shape, held.strides, held.offset).equal(whole[cut])


@given(st.data())
def test_two_cuts_meet_where_both_have_the_index(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    (one, shell, cut), (other, second, another) = data.draw(pieces(shape)), data.draw(pieces(shape))
    boxes = BoxedPiece.of(one, shape), BoxedPiece.of(other, shape)
    assert boxes[0] is not None
    assert boxes[1] is not None
    met = boxes[0].box.meet(boxes[1].box)
    common = [set(range(a.start, a.stop)) & set(range(b.start, b.stop)) for a, b in zip(cut, another, strict=True)]
    expected = set(product(*common))
    if met is None:
        assert not expected
        return
    held = set(product(*(range(b, b + n) for b, n in zip(met.begins, met.sizes, strict=True))))
    assert held == expected
    regions = [boxed.region(met) for boxed in boxes if boxed is not None]
    views = [
        memory.view(-1).as_strided(r.shape, r.strides, r.offset)
        for memory, r in zip((shell, second), regions, strict=True)
    ]
    assert views[0].equal(views[1])


def test_merged_dimensions_are_told_apart_again() -> None:
    piece = PlacedPiece(name="w", checkpoint=row_major((24,), offset=24), runtime=row_major((24,)))
    boxed = BoxedPiece.of(piece, (4, 3, 8))
    assert boxed is not None
    assert (boxed.box, boxed.strides) == (Box(begins=(1, 0, 0), sizes=(1, 3, 8)), (0, 8, 1))


def test_what_is_no_box_has_none() -> None:
    runtime = row_major((5,))
    for checkpoint in (
        Region(offset=2, shape=(5,), strides=(1,)),
        Region(offset=0, shape=(5,), strides=(0,)),
        Region(offset=0, shape=(5,), strides=(2,)),
    ):
        assert BoxedPiece.of(PlacedPiece(name="w", checkpoint=checkpoint, runtime=runtime), (3, 4)) is None


def test_sizes_past_the_range_of_32_bits_stay_exact() -> None:
    shape = (1 << 17, 1 << 16)
    piece = PlacedPiece(
        name="w",
        checkpoint=Region(offset=(1 << 33) - (1 << 16), shape=(1, 1 << 15), strides=(1 << 16, 1)),
        runtime=row_major((1, 1 << 15), offset=1 << 40),
    )
    boxed = BoxedPiece.of(piece, shape)
    assert boxed is not None
    assert boxed.box == Box(begins=((1 << 17) - 1, 0), sizes=(1, 1 << 15))
    assert boxed.region(Box(begins=((1 << 17) - 1, 7), sizes=(1, 2))).offset == (1 << 40) + 7
