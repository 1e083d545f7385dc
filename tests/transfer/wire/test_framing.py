"""Requests and frames: what is asked for, and how the answer is cut."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightwire.transfer.errors import RegionError, RequestError, TransferError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import Frame, ReadRequest, check_extent, cut_frames

REQUEST = ReadRequest(
    generation=7,
    weight_version=2**62,
    manifest="ab" * 32,
    target_instance="ü/\ud800",
    target_rank=3,
    regions=(row_major((5,), offset=2), Region(offset=0, shape=(2, 3), strides=(9, 2))),
)
FIELDS = json.loads(REQUEST.to_bytes())


@st.composite
def flat_spaces(draw: st.DrawFn) -> tuple[Shells, list[Region]]:
    """Storages of every size around that of a chunk, and regions all over them."""
    chunk_bytes = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    numbers = itertools.count()
    storages = [torch.tensor([next(numbers) % 251 for _ in range(n)], dtype=torch.uint8) for n in sizes]
    manifest = Manifest(model="", revision="", storages=tuple(sizes), tensors=(), chunk_bytes=chunk_bytes)
    return Shells(manifest, storages), draw(st.lists(_regions(manifest), max_size=5))


@st.composite
def _regions(draw: st.DrawFn, manifest: Manifest) -> Region:
    if draw(st.booleans()):
        begin = draw(st.integers(0, manifest.total_bytes))
        return row_major((draw(st.integers(0, manifest.total_bytes - begin)),), offset=begin)
    base, limit = draw(st.sampled_from(list(pairwise(manifest.storage_bases))))
    region = _strided(draw)
    return region.shifted(base) if base + region.end <= limit else row_major((limit - base,), offset=base)


def _strided(draw: st.DrawFn) -> Region:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return Region(offset=0, shape=tuple(shape), strides=tuple(draw(st.integers(0, 6)) for _ in shape))


def bytes_of(region: Region, memory: bytes) -> bytes:
    positions = itertools.product(*map(range, region.shape))
    return bytes(memory[region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True))] for p in positions)


def payload(shells: Shells, frame: Frame) -> bytes:
    return b"".join(view for part in frame.parts for view in shells.gather(*part))


@settings(max_examples=300)
@given(flat_spaces())
def test_frames_carry_the_packed_bytes_of_the_regions_in_order(space: tuple[Shells, list[Region]]) -> None:
    shells, regions = space
    frames = list(cut_frames(shells.manifest, regions))
    memory = b"".join(shells.views(0, shells.manifest.total_bytes))
    assert b"".join(payload(shells, frame) for frame in frames) == b"".join(bytes_of(r, memory) for r in regions)
    for frame in frames:
        assert frame.nbytes == len(payload(shells, frame)) == sum(part.end - part.begin for part in frame.parts)
        assert 1 <= frame.nbytes <= shells.manifest.chunk_bytes


@settings(max_examples=300)
@given(flat_spaces())
def test_whole_chunk_travels_alone_under_its_number_and_nothing_else_has_one(
    space: tuple[Shells, list[Region]],
) -> None:
    shells, regions = space
    bounds = shells.manifest.chunk_bounds
    whole = [
        number
        for region in regions
        if region.is_contiguous
        for number, (begin, end) in enumerate(pairwise(bounds))
        if region.offset <= begin and end <= region.offset + region.numel
    ]
    frames = list(cut_frames(shells.manifest, regions))
    assert [frame.chunk for frame in frames if frame.chunk is not None] == whole
    for frame in frames:
        if frame.chunk is not None:
            ((region, begin, end),) = frame.parts
            assert (region.offset + begin, region.offset + end) == (bounds[frame.chunk], bounds[frame.chunk + 1])


def cut_by_the_rule(manifest: Manifest, regions: list[Region]) -> list[int]:
    """Lengths of the frames as docs/protocol.md, "How frames are cut", has them."""
    bounds, limit = set(manifest.chunk_bounds), manifest.chunk_bytes
    pieces: list[tuple[int, bool]] = []
    for region in regions:
        begin = 0
        while begin < region.numel:
            if region.is_contiguous:
                end = next(
                    at
                    for at in range(begin + 1, region.numel + 1)
                    if at == region.numel or region.offset + at in bounds
                )
                whole = {region.offset + begin, region.offset + end} <= bounds
            else:
                end, whole = min(begin + limit, region.numel), False
            pieces.append((end - begin, whole))
            begin = end
    lengths: list[int] = []
    joinable = False
    for length, whole in pieces:
        if joinable and not whole and lengths[-1] + length <= limit:
            lengths[-1] += length
        else:
            lengths.append(length)
        joinable = not whole
    return lengths


@given(flat_spaces())
def test_frames_are_cut_by_the_rule_of_the_protocol(space: tuple[Shells, list[Region]]) -> None:
    shells, regions = space
    assert [frame.nbytes for frame in cut_frames(shells.manifest, regions)] == cut_by_the_rule(shells.manifest, regions)


@given(flat_spaces())
def test_frames_do_not_depend_on_how_a_region_is_written(space: tuple[Shells, list[Region]]) -> None:
    """The reader cuts what it asked for, the source what it understood."""
    shells, regions = space
    request = ReadRequest(
        generation=0, weight_version=0, manifest="", target_instance="", target_rank=0, regions=tuple(regions)
    )
    understood = ReadRequest.from_bytes(request.to_bytes()).regions

    def shape_of(asked: list[Region]) -> list[tuple[int, int | None]]:
        return [(frame.nbytes, frame.chunk) for frame in cut_frames(shells.manifest, asked)]

    assert shape_of(list(understood)) == shape_of(regions)


SPACE = Manifest(model="", revision="", storages=(10, 0, 10), tensors=(), chunk_bytes=8)


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        pytest.param(row_major((21,)), "ends at byte 21", id="past the end"),
        pytest.param(row_major((0,), offset=21), "ends at byte 21", id="nothing, behind the end"),
        pytest.param(Region(offset=0, shape=(3,), strides=(10,)), "byte 21", id="strided past the end"),
        pytest.param(Region(offset=1, shape=(2,), strides=(10,)), "one storage", id="strided over two storages"),
        pytest.param(Region(offset=9, shape=(2, 1), strides=(2, 1)), "one storage", id="strided over the border"),
    ],
)
def test_region_that_reaches_too_far_is_refused(region: Region, expected: str) -> None:
    with pytest.raises(RegionError, match=expected):
        list(cut_frames(SPACE, [region]))


def test_region_that_is_contiguous_may_cross_storages() -> None:
    frames = list(cut_frames(SPACE, [row_major((20,))]))
    assert [(frame.nbytes, frame.chunk) for frame in frames] == [(8, 0), (2, 1), (8, 2), (2, 3)]


def test_loose_parts_share_a_frame_until_it_is_full() -> None:
    regions = [row_major((3,), offset=at) for at in (0, 10, 4)]
    assert [frame.nbytes for frame in cut_frames(SPACE, regions)] == [6, 3]


def test_region_of_thousands_of_dimensions_is_refused_at_once() -> None:
    wide = [0, [2, *[1] * 5000, 3], [9, *[1] * 5000, 2]]
    with pytest.raises(TransferError, match="5002 dimensions, expected at most 64"):
        ReadRequest.from_bytes(json.dumps(FIELDS | {"regions": [wide]}).encode())


@pytest.mark.parametrize(
    "regions",
    [
        pytest.param([row_major((20,)), row_major((1,))], id="all, and a byte more"),
        pytest.param([Region(offset=0, shape=(2**62,), strides=(0,))], id="one byte again and again"),
        pytest.param([row_major((1,))] * 21, id="many times the same"),
    ],
)
def test_request_for_more_than_there_is_is_refused(regions: list[Region]) -> None:
    """Or a line of text would make a source cut frames until its memory is full."""
    request = ReadRequest(
        generation=0, weight_version=0, manifest="", target_instance="", target_rank=0, regions=tuple(regions)
    )
    with pytest.raises(RegionError, match="of a flat space of 20"):
        check_extent(SPACE, request)


def test_request_for_what_the_source_ties_may_ask_for_it_twice() -> None:
    weight = torch.zeros(5)
    manifest = Shells.from_tensors({"embed": weight, "head": weight}).manifest
    twice = json.dumps(FIELDS | {"regions": [[0, 20], [0, 20]]}).encode()
    check_extent(manifest, ReadRequest.from_bytes(twice))
    with pytest.raises(RegionError, match="asks for 41 bytes of a flat space of 20"):
        check_extent(manifest, ReadRequest.from_bytes(twice.replace(b"]]", b"], [0, 1]]")))


def test_request_for_all_there_is_is_taken() -> None:
    check_extent(SPACE, ReadRequest.from_bytes(json.dumps(FIELDS | {"regions": [[0, 15], [15, 5]]}).encode()))


# Requests


def test_request_round_trip() -> None:
    assert ReadRequest.from_bytes(REQUEST.to_bytes()) == REQUEST


def test_request_is_written_as_the_protocol_says() -> None:
    assert json.loads(REQUEST.to_bytes()) == {
        "generation": 7,
        "weight_version": 2**62,
        "manifest": "ab" * 32,
        "target": {"instance_id": "ü/\ud800", "rank": 3},
        "regions": [[2, 5], [0, [2, 3], [9, 2]]],
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"more": 1}, id="an unknown field"),
        pytest.param({"packed": True}, id="an unknown field that might matter"),
        pytest.param({"target": FIELDS["target"] | {"more": 1}}, id="an unknown field of the target"),
        pytest.param({"target": {"instance_id": "a"}}, id="a target without rank"),
        pytest.param({"target": {"instance_id": "a", "rank": True}}, id="a boolean for a rank"),
        pytest.param({"generation": True}, id="a boolean for a generation"),
        pytest.param({"generation": 7.0}, id="a float for a generation"),
        pytest.param({"generation": "7"}, id="text for a generation"),
        pytest.param({"weight_version": None}, id="no version"),
        pytest.param({"manifest": 5}, id="a number for a digest"),
        pytest.param({"regions": {}}, id="an object for regions"),
        pytest.param({"regions": None}, id="no regions"),
    ],
)
def test_b39_request_with_an_odd_field_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="exactly the fields"):
        ReadRequest.from_bytes(json.dumps(FIELDS | change).encode())


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_b39_request_without_a_field_is_refused(field: str) -> None:
    with pytest.raises(RequestError):
        ReadRequest.from_bytes(json.dumps({name: value for name, value in FIELDS.items() if name != field}).encode())


@pytest.mark.parametrize(
    "region",
    [
        *(None, 1, "x", [], [1], [0, -1], [-1, 1], [0, True], [False, 1], [0, 1.0], [0, 1, 2], [0, [1]], {}),
        *([2**63, 1], [0, 2**64], [0, [1, 2], [1]], [0, [1], [-1]], [0, [[1]], [1]], [0, [2**40, 2**40], [1, 1]]),
    ],
    ids=repr,
)
def test_region_that_makes_no_sense_is_refused(region: object) -> None:
    with pytest.raises(RegionError):
        ReadRequest.from_bytes(json.dumps(FIELDS | {"regions": [region]}).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=2), children, max_size=2),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON))
def test_any_object_is_a_request_or_a_typed_error(change: dict[str, object]) -> None:
    try:
        ReadRequest.from_bytes(json.dumps(FIELDS | change).encode())
    except (RequestError, RegionError):
        return
    assert isinstance(change.get("regions", []), list)


@given(st.binary(max_size=30))
@example(b"")
@example(b"[]")
@example(b"null")
@example(b"\xff\xfe")
@example(b"[" * 1_000_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 100_000)
@example(b"NaN")
def test_any_bytes_are_a_request_error(raw: bytes) -> None:
    with pytest.raises(RequestError):
        ReadRequest.from_bytes(raw)
