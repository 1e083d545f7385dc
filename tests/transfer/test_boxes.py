"""Pieces in the coordinates of their tensor, against sets of indices."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.boxes import Box, BoxView, cells, views_of
from weightwire.transfer.errors import ManifestError
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.regions import Region, row_major

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
Index = tuple[int, ...]


def region(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


def indices(box: Box) -> set[Index]:
    return set(product(*(range(begin, end) for begin, end in zip(box.begins, box.ends, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(begin + 1, size)) for begin, size in zip(begins, shape, strict=True)]
    box = Box.between(begins, ends)
    assert box is not None
    return box


def cut_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(begin, end) for begin, end in zip(box.begins, box.ends, strict=True))]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[PlacedPiece, torch.Tensor, Box]:
    """A cut of a tensor, with axes in any order, placed anywhere in a shell."""
    box = draw(boxes(shape))
    part = cut_of(numbered(shape), box).permute(draw(st.permutations(range(len(shape)))))
    shell = torch.full([size + draw(st.integers(0, 2)) for size in part.shape], -1)
    target = shell[tuple(slice(shell.shape[i] - size, None) for i, size in enumerate(part.shape))]
    target.copy_(part)
    return PlacedPiece.of("w", checkpoint=region(part), runtime=region(target)), shell, box


def held_in(shell: torch.Tensor, piece: PlacedPiece, view: BoxView, box: Box) -> torch.Tensor:
    """What lies in a shell where a view says that a box of the tensor lies."""
    found = view.region(box).shifted(piece.runtime_offset)
    return shell.reshape(-1).as_strided(found.shape, found.strides, found.offset)


# Boxes


@given(st.data())
def test_boxes_meet_where_both_have_the_index(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    met = one.meet(other)
    assert (indices(met) if met else set()) == indices(one) & indices(other)
    assert met == other.meet(one)
    assert one.contains(other) == (indices(other) <= indices(one))


@given(st.data())
def test_box_without_another_is_the_rest_in_disjoint_boxes(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    left = list(one.without(other))
    found = [index for box in left for index in indices(box)]
    assert sorted(found) == sorted(indices(one) - indices(other))
    assert len(left) <= max(1, 2 * len(shape))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3))
def test_box_between_bounds_is_none_if_it_is_empty(bounds: list[tuple[int, int]]) -> None:
    box = Box.between([low for low, _ in bounds], [high for _, high in bounds])
    expected = set(product(*(range(low, high) for low, high in bounds)))
    assert (indices(box) if box else set()) == expected


def test_box_of_a_scalar_is_one_index() -> None:
    box = Box(begins=(), sizes=())
    assert box.meet(box) == box
    assert box.contains(box)
    assert list(box.without(box)) == []
    assert cells(box, [box, box]) == [(box, (0, 1))]


# Pieces as boxes


@given(st.data())
def test_a_cut_in_any_order_of_axes_is_its_box(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    piece, shell, box = data.draw(pieces(shape))
    views = views_of(piece, shape)
    assert views is not None
    (view,) = views
    assert view.box == box
    assert held_in(shell, piece, view, box).equal(cut_of(numbered(shape), box))
    part = data.draw(boxes(shape)).meet(box)
    if part is not None:
        assert held_in(shell, piece, view, part).equal(cut_of(numbered(shape), part))


@given(st.data())
def test_two_cuts_hold_the_same_where_they_meet(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    (one, shell, _), (other, second, _) = data.draw(pieces(shape)), data.draw(pieces(shape))
    (view,), (another,) = views_of(one, shape) or (), views_of(other, shape) or ()
    met = view.box.meet(another.box)
    if met is not None:
        assert held_in(shell, one, view, met).equal(held_in(second, other, another, met))


@given(st.data())
def test_elements_that_follow_each_other_are_few_boxes_from_anywhere_to_anywhere(data: st.DataObject) -> None:
    """What a loader that flattens, or packs, copies."""
    shape = data.draw(shapes)
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    step = data.draw(st.integers(1, 3))
    shell = torch.full((total * 3 + 5,), -1)
    target = shell[2:][: (end - begin) * step : step]
    target.copy_(torch.arange(begin, end))
    piece = PlacedPiece.of("w", checkpoint=row_major((end - begin,), offset=begin), runtime=region(target))
    views = views_of(piece, shape)
    assert views is not None
    assert len(views) <= 2 * len(shape) + 1
    found = [index for view in views for index in indices(view.box)]
    assert sorted(found) == [tuple(index) for index in product(*map(range, shape))][begin:end]
    for view in views:
        assert held_in(shell, piece, view, view.box).equal(cut_of(numbered(shape), view.box))


@given(st.data())
def test_whatever_a_piece_is_its_boxes_are_it_or_there_are_none(data: st.DataObject) -> None:
    """Any strides, boxes or not, inside the tensor or not."""
    shape = data.draw(shapes)
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=3))
    there = Region(
        offset=data.draw(st.integers(0, 20)),
        shape=tuple(sizes),
        strides=tuple(data.draw(st.integers(0, 30)) for _ in sizes),
    )
    here = row_major(sizes, offset=data.draw(st.integers(0, 9)))
    piece = PlacedPiece.of("w", checkpoint=there, runtime=here)
    views = views_of(piece, shape)
    if views is None:
        return
    expected = dict(zip(positions(piece.runtime), positions(piece.checkpoint), strict=True))
    found: dict[int, int] = {}
    for view in views:
        at = positions(view.region(view.box).shifted(piece.runtime_offset))
        found |= dict(zip(at, cut_of(numbered(shape), view.box).flatten().tolist(), strict=True))
    assert found == expected


def positions(box: Region) -> list[int]:
    return [
        box.offset + sum(index * stride for index, stride in zip(at, box.strides, strict=True))
        for at in product(*map(range, box.shape))
    ]


def test_merged_dimensions_are_told_apart_again() -> None:
    piece = PlacedPiece.of("w", checkpoint=row_major((24,), offset=24), runtime=row_major((24,)))
    views = views_of(piece, (4, 3, 8))
    assert views == (BoxView(box=Box(begins=(1, 0, 0), sizes=(1, 3, 8)), offset=0, strides=(0, 8, 1)),)


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(Region(offset=0, shape=(2, 3), strides=(0, 2)), id="every second element, again"),
        pytest.param(Region(offset=0, shape=(5000,), strides=(0,)), id="one element more often than there are slots"),
        pytest.param(Region(offset=0, shape=(5,), strides=(2,)), id="every second element"),
        pytest.param(Region(offset=0, shape=(2, 5), strides=(4, 1)), id="rows that are longer than the tensor's"),
        pytest.param(Region(offset=2, shape=(2, 3), strides=(4, 1)), id="rows that go over the edge"),
        pytest.param(row_major((13,)), id="more than there is"),
        pytest.param(row_major((2,), offset=11), id="over the end"),
    ],
)
def test_what_is_no_box_has_none(checkpoint: Region) -> None:
    piece = PlacedPiece.of("w", checkpoint=checkpoint, runtime=row_major(checkpoint.shape))
    assert views_of(piece, (3, 4)) is None


@pytest.mark.parametrize(
    ("source", "shape"), [("scalar", ()), ("one", (1,)), ("row", (1, 4)), ("column", (3, 1)), ("matrix", (3, 4))]
)
def test_what_is_broadcast_is_a_box_for_each_time_that_it_comes(source: str, shape: tuple[int, ...]) -> None:
    """B09: one scale for three slots."""
    whole = numbered(shape)
    shell = torch.full((5, 3, 4), -1)
    target = shell[1:4]
    target.copy_(whole)
    piece = PlacedPiece.of("w", checkpoint=region(whole.expand(3, 3, 4)), runtime=region(target))
    views = views_of(piece, shape)
    assert views is not None
    assert len(views) == 36 // math.prod(shape), source
    for view in views:
        assert view.box == Box(begins=(0,) * len(shape), sizes=shape)
        assert held_in(shell, piece, view, view.box).equal(whole)
    assert len({view.offset for view in views}) == len(views)


def test_what_comes_again_in_the_same_place_has_no_boxes() -> None:
    again = Region(offset=0, shape=(3,), strides=(0,))
    assert views_of(PlacedPiece.of("w", checkpoint=again, runtime=again), (3, 4)) is None


def test_what_is_empty_is_no_box_and_no_trouble() -> None:
    piece = PlacedPiece.of("w", checkpoint=row_major((0, 4)), runtime=row_major((0, 4)))
    assert views_of(piece, (3, 4)) == views_of(piece, (0,)) == ()


def test_sizes_past_the_range_of_32_bits_stay_exact() -> None:
    shape = (1 << 17, 1 << 16)
    piece = PlacedPiece.of(
        "w",
        checkpoint=Region(offset=(1 << 33) - (1 << 16), shape=(1, 1 << 15), strides=(1 << 16, 1)),
        runtime=row_major((1, 1 << 15), offset=1 << 40),
    )
    (view,) = views_of(piece, shape) or ()
    assert view.box == Box(begins=((1 << 17) - 1, 0), sizes=(1, 1 << 15))
    half = Box(begins=((1 << 17) - 1, 1 << 14), sizes=(1, 1 << 14))
    assert view.region(half).shifted(piece.runtime_offset).offset == (1 << 40) + (1 << 14)
    flat = PlacedPiece.of("w", checkpoint=row_major((1 << 32,), offset=5), runtime=row_major((1 << 32,)))
    assert [view.box.sizes for view in views_of(flat, shape) or ()] == [
        (1, (1 << 16) - 5),
        ((1 << 16) - 1, 1 << 16),
        (1, 5),
    ]


# Cells


@given(st.data())
def test_cells_are_the_box_and_each_lies_in_the_others_wholly_or_not_at_all(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes(shape))
    held = data.draw(st.lists(boxes(shape), max_size=4))
    found = cells(box, held)
    assert sorted(index for part, _ in found for index in indices(part)) == sorted(indices(box))
    for part, members in found:
        for number, other in enumerate(held):
            common = indices(part) & indices(other)
            assert common == (indices(part) if number in members else set())


@given(st.integers(0, 2), st.integers(2, 7))
@example(0, 5)
def test_cells_of_an_even_cut_are_its_parts(axis: int, parts: int) -> None:
    def part(number: int) -> Box:
        return Box(begins=tuple(number * 2 if at == axis else 0 for at in range(3)),
                   sizes=tuple(2 if at == axis else 9 for at in range(3)))  # fmt: skip

    held = [part(number) for number in range(parts)]
    whole = Box(begins=(0, 0, 0), sizes=tuple(parts * 2 if at == axis else 9 for at in range(3)))
    assert cells(whole, held) == [(one, (number,)) for number, one in enumerate(held)]


def test_cells_without_end_are_refused_before_they_are_made() -> None:
    size = 1 << 12
    held = [Box(begins=(at, at), sizes=(1, 1)) for at in range(size)]
    with pytest.raises(ManifestError, match="4096 pieces cut a tensor into 16777216 parts"):
        cells(Box(begins=(0, 0), sizes=(size, size)), held)


def test_cells_of_a_diagonal_are_found_without_comparing_each_with_each() -> None:
    size = 1 << 9
    held = [Box(begins=(at, at), sizes=(1, 1)) for at in range(size)]
    found = cells(Box(begins=(0, 0), sizes=(size, size)), held)
    assert [members for part, members in found if members] == [(at,) for at in range(size)]
    assert len(found) == size * size
