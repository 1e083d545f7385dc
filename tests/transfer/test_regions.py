"""Regions against lists of indices, written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightwire.transfer.errors import RegionError
from weightwire.transfer.regions import MAX_ELEMENTS, Region, row_major, row_major_strides

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=2), children, max_size=2),
    max_leaves=12,
)


@st.composite
def regions(draw: st.DrawFn, *, max_stride: int = 9) -> Region:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    strides = tuple(draw(st.integers(0, max_stride)) for _ in shape)
    return Region(offset=draw(st.integers(0, 5)), shape=shape, strides=strides)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """What a model may hold: a tensor that was sliced, narrowed, permuted and viewed."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for dimension, size in enumerate(shape):
        begin = draw(st.integers(0, size))
        step = draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dimension + (slice(begin, draw(st.integers(begin, size)), step),)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * stride for i, stride in zip(p, region.strides, strict=True)) for p in positions]


def box_of(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


@given(regions())
def test_region_measures_itself_as_its_indices_say(region: Region) -> None:
    found = indices(region)
    assert region.numel == len(found)
    assert region.end == max(found, default=region.offset - 1) + 1
    assert region.is_contiguous == (found == list(range(region.offset, region.offset + len(found))))


@given(views())
def test_region_of_a_torch_view_has_the_elements_of_the_view(tensor: torch.Tensor) -> None:
    region = box_of(tensor)
    assert indices(region) == tensor.flatten().tolist()
    assert not region.overlaps_itself


@given(regions())
def test_overlap_is_never_missed(region: Region) -> None:
    found = indices(region)
    assert region.overlaps_itself or len(found) == len(set(found))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        pytest.param((), (), False, id="one element"),
        pytest.param((0, 3), (0, 0), False, id="no elements"),
        pytest.param((3,), (0,), True, id="one element three times"),
        pytest.param((1, 3), (0, 1), False, id="a dimension of one may have any stride"),
        pytest.param((2, 2), (1, 1), True, id="two dimensions that meet"),
        pytest.param((2, 2), (2, 3), False, id="interleaved without meeting"),
        pytest.param((4, 4), (1, 4), False, id="transposed"),
    ],
)
def test_overlap_of_small_regions(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert Region(offset=0, shape=shape, strides=strides).overlaps_itself is expected


@given(regions())
def test_coalesced_keeps_elements_and_order_in_as_few_dimensions_as_can_be(region: Region) -> None:
    flat = region.coalesced()
    assert indices(flat) == indices(region)
    assert flat.coalesced() == flat
    assert flat.shape == (0,) or 1 not in flat.shape
    assert all(flat.strides[i] != flat.shape[i + 1] * flat.strides[i + 1] for i in range(len(flat.shape) - 1))


@given(regions())
def test_runs_are_the_elements_in_order_and_never_empty(region: Region) -> None:
    runs = list(region.runs())
    assert [i for start, length in runs for i in range(start, start + length)] == indices(region)
    assert all(length > 0 for _, length in runs)
    if region.is_contiguous:
        assert len(runs) == min(region.numel, 1)


@given(regions())
def test_memory_order_is_the_same_elements_ascending_and_coalesced(region: Region) -> None:
    ordered = region.in_memory_order()
    assert sorted(indices(ordered)) == sorted(indices(region))
    assert ordered.coalesced() == ordered
    assert ordered.in_memory_order() == ordered
    if not region.overlaps_itself:
        assert indices(ordered) == sorted(indices(region))


@given(views())
def test_memory_order_of_a_view_is_that_of_its_storage(tensor: torch.Tensor) -> None:
    region = box_of(tensor)
    assert indices(region.in_memory_order()) == sorted(indices(region))


@settings(max_examples=300)
@given(regions(), regions() | views().map(box_of))
@example(row_major((4, 4)), Region(offset=5, shape=(2, 2), strides=(4, 1)))
@example(Region(offset=0, shape=(2, 2), strides=(1, 3)), Region(offset=0, shape=(2,), strides=(4,)))
@example(Region(offset=1, shape=(2, 2), strides=(5, 3)), Region(offset=6, shape=(2,), strides=(3,)))
@example(Region(offset=0, shape=(3, 2), strides=(2, 7)), row_major((1,), offset=6))
def test_containment_is_that_of_the_sets_of_elements(whole: Region, part: Region) -> None:
    if whole.overlaps_itself:
        with pytest.raises(RegionError, match="overlaps itself"):
            whole.contains(part)
        return
    assert whole.contains(part) == (set(indices(part)) <= set(indices(whole)))


@given(views(), st.data())
def test_view_contains_every_view_of_itself(tensor: torch.Tensor, data: st.DataObject) -> None:
    whole, part = box_of(tensor), tensor
    for axis, size in enumerate(tensor.shape):
        begin = data.draw(st.integers(0, size))
        part = part.narrow(axis, begin, data.draw(st.integers(0, size - begin)))
    part = part.permute(data.draw(st.permutations(range(part.ndim))))
    assert whole.contains(box_of(part))
    if part.numel():
        outside = box_of(part).shifted(int(tensor.max()) + 1 - int(part.min()))
        assert not whole.contains(outside)


@given(regions(), st.data())
def test_packed_is_that_slice_of_the_row_major_order(region: Region, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, region.numel))
    end = data.draw(st.integers(begin, region.numel))
    boxes = list(region.packed(begin, end))
    assert [i for box in boxes for i in indices(box)] == indices(region)[begin:end]
    assert all(box.numel for box in boxes)
    assert len(boxes) <= 2 * len(region.shape) + 1


@given(regions(), st.integers(-2, 300), st.integers(-2, 300))
def test_packed_outside_the_region_is_refused(region: Region, begin: int, end: int) -> None:
    if not 0 <= begin <= end <= region.numel:
        with pytest.raises(RegionError, match="elements"):
            list(region.packed(begin, end))


@given(regions(), st.integers(1, 16))
def test_in_bytes_is_every_byte_of_every_element(region: Region, itemsize: int) -> None:
    flat = region.in_bytes(itemsize)
    assert indices(flat) == [i * itemsize + byte for i in indices(region) for byte in range(itemsize)]
    # One form for one walk: regions in bytes are compared to find out what is tied.
    assert region.coalesced().in_bytes(itemsize) == flat


@given(regions(), st.integers(0, 50))
def test_shifted_moves_every_element(region: Region, distance: int) -> None:
    assert indices(region.shifted(distance)) == [i + distance for i in indices(region)]


def test_shifted_before_the_first_element_is_refused() -> None:
    with pytest.raises(RegionError, match="shifted by -4, expected to stay between 0 and"):
        row_major((2,), offset=3).shifted(-4)


@given(regions())
def test_json_round_trip(region: Region) -> None:
    assert Region.from_json(region.to_json()) == region


@given(JSON | st.tuples(JSON, st.lists(JSON), st.lists(JSON)).map(list))
def test_from_json_of_anything_is_a_region_or_a_region_error(value: object) -> None:
    try:
        region = Region.from_json(value)
    except RegionError:
        return
    assert region.to_json() == value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([True, [2], [1]], id="offset is a boolean"),
        pytest.param([0, [True], [1]], id="size is a boolean"),
        pytest.param([0, [2.0], [1]], id="size is a float"),
        pytest.param([0, [2], [1], 0], id="one member too many"),
        pytest.param([0, "2", "1"], id="sizes are text"),
        pytest.param([0, [-1], [1]], id="negative size"),
        pytest.param([-1, [1], [1]], id="negative offset"),
        pytest.param([0, [1], [-1]], id="negative stride"),
        pytest.param([0, [1, 2], [1]], id="more sizes than strides"),
        pytest.param([2**63, [1], [1]], id="offset past 2^63"),
        pytest.param([0, [2**70, 0], [1, 1]], id="size past 2^63 that counts for nothing"),
        pytest.param([0, [1], [2**70]], id="stride past 2^63 that counts for nothing"),
        pytest.param([0, [2**32, 2**32], [0, 0]], id="more elements than 2^63 in one place"),
    ],
)
def test_from_json_refuses(value: object) -> None:
    with pytest.raises(RegionError):
        Region.from_json(value)


def test_message_about_a_long_value_is_short() -> None:
    with pytest.raises(RegionError) as caught:
        Region.from_json(["x" * 1_000_000])
    assert len(str(caught.value)) < 1000


@given(st.lists(st.integers(0, 4), max_size=4))
def test_row_major_strides_are_those_of_torch(shape: list[int]) -> None:
    assert row_major_strides(shape) == torch.empty(shape).stride()
    assert indices(row_major(shape, offset=2)) == [i + 2 for i in range(math.prod(shape))]


# Beyond 2^31 and towards 2^63: nothing may be counted out.


def test_large_region_is_cut_without_being_written_out() -> None:
    region = Region(offset=7, shape=(2**20, 2**20, 2**20), strides=(2**41, 2**21, 2))
    begin, end = 2**40 + 2**21 + 3, 2**59 + 5
    boxes = list(region.packed(begin, end))
    assert sum(box.numel for box in boxes) == end - begin
    assert len(boxes) <= 7
    assert boxes[0].offset == 7 + 2**41 + 2 * 2**21 + 6
    assert next(region.runs()) == (7, 1)


def test_large_region_contains_without_being_written_out() -> None:
    """Runs of the part are walked through, elements of the whole never."""
    rows = Region(offset=7, shape=(2**20, 2**20, 2**20), strides=(2**42, 2**21, 1))
    assert rows.contains(next(rows.shifted(2**42).packed(0, 2**40)))
    inner = Region(offset=7 + 2**61, shape=(3, 2**20), strides=(2**21, 1))
    assert rows.contains(inner)
    assert not rows.contains(inner.shifted(1))
    assert not rows.contains(inner.shifted(-(2**61) - 7))
    assert not rows.contains(Region(offset=7, shape=(2,), strides=(2**62,)))
    turned = Region(offset=7, shape=(2**20, 2**20, 2), strides=(1, 2**42, 2**21))
    assert turned.in_memory_order() == Region(offset=7, shape=(2**20, 2, 2**20), strides=(2**42, 2**21, 1))


def test_large_contiguous_region_is_one_run_and_one_box() -> None:
    region = row_major((2**31, 2**31 - 1))
    assert list(region.runs()) == [(0, 2**62 - 2**31)]
    assert list(region.packed(5, 2**61)) != []
    assert region.is_contiguous
    assert region.in_bytes(1).numel == region.numel


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: row_major((2**32, 2**31)), id="elements"),
        pytest.param(lambda: Region(offset=0, shape=(3,), strides=(2**62,)), id="reach"),
        pytest.param(lambda: row_major((2**61,)).in_bytes(4), id="bytes"),
        pytest.param(lambda: row_major((1,), offset=MAX_ELEMENTS), id="offset"),
        pytest.param(lambda: row_major((2,)).shifted(MAX_ELEMENTS - 1), id="shift"),
    ],
)
def test_region_past_what_can_be_addressed_is_refused(make: Callable[[], Region]) -> None:
    with pytest.raises(RegionError, match=r"2\^63"):
        make()


def test_region_up_to_what_can_be_addressed_is_taken() -> None:
    assert row_major((MAX_ELEMENTS,)).end == MAX_ELEMENTS


def test_region_of_more_dimensions_than_a_tensor_has_is_refused_before_its_size_is_computed() -> None:
    with pytest.raises(RegionError, match="20000 dimensions, expected at most 64"):
        Region(offset=0, shape=(2,) * 19_999 + (0,), strides=(0,) * 20_000)
