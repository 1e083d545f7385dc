"""How claims are cut for servers that take only so much: every byte once, in order, and never more than was learnt."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.conftest import filled
from weightwire.transfer.errors import FencedError, SourceRefusedError, TooLargeError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.portions import Portions
from weightwire.transfer.wire.segments import Segment

CHUNK = 16
EMPTY = 100


def manifest_of(nbytes: int) -> Manifest:
    return Shells.from_tensors({"a": filled("uint8", (nbytes,))}, chunk_bytes=CHUNK).manifest


def flat(begin: int, nbytes: int) -> Segment:
    source = Region(offset=begin, shape=(nbytes,), strides=(1,))
    return Segment(source=source, target=source, begin=0, nbytes=nbytes)


def strided(rows: int) -> Segment:
    source = Region(offset=0, shape=(rows, 4), strides=(8, 1))
    return Segment(source=source, target=source, begin=0, nbytes=source.numel)


def elements(segments: list[Segment]) -> list[int]:
    """Every source byte, in the order in which it would come."""
    found: list[int] = []
    for segment in segments:
        region = segment.source
        indices = [region.offset]
        for size, stride in zip(region.shape, region.strides, strict=True):
            indices = [at + step * stride for at in indices for step in range(size)]
        found += indices
    return found


def all_of(portions: Portions, segments: list[Segment]) -> list[list[Segment]]:
    waiting, taken = deque(segments), list[list[Segment]]()
    while waiting:
        taken.append(portions.take(waiting))
    return taken


def refused(status: int) -> SourceRefusedError:
    return SourceRefusedError("a page", status=status)


def test_claim_is_one_request_as_long_as_nothing_was_refused() -> None:
    segments = [flat(0, 40), strided(3), flat(64, 1)]
    assert all_of(Portions(manifest_of(128)), segments) == [segments]


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    rows=st.integers(1, 9),
    answer=st.one_of(st.none(), st.integers(CHUNK, 120)),
    request=st.one_of(st.none(), st.integers(1, EMPTY + 60)),
)
def test_portions_are_the_claim_and_no_more_than_was_learnt(
    sizes: list[int], rows: int, answer: int | None, request: int | None
) -> None:
    segments = [strided(rows)]
    at = 0
    for size in sizes:
        segments.append(flat(at, size))
        at += size + 3
    portions = Portions(manifest_of(at + 100), empty_request_bytes=EMPTY)
    portions.answer_bytes, portions.request_bytes = answer, request
    taken = all_of(portions, segments)
    assert elements([each for portion in taken for each in portion]) == elements(segments)
    for portion in taken:
        nbytes = sum(each.nbytes for each in portion)
        # One chunk goes whole, since its digest is of the whole.
        assert answer is None or nbytes <= max(answer, CHUNK)
        text = EMPTY + sum(len(str(each.source.to_json()).replace(" ", "")) + 1 for each in portion)
        assert request is None or text <= request or len(portion) == 1


def test_answer_is_cut_at_bounds_of_chunks() -> None:
    portions = Portions(manifest_of(200))
    portions.answer_bytes = 40
    (first, *_) = all_of(portions, [flat(5, 150)])
    assert [(each.source.offset, each.nbytes) for each in first] == [(5, 27)]


@pytest.mark.parametrize(
    ("error", "request_bytes", "learnt"),
    [
        pytest.param(refused(413), 4000, 1000, id="a page"),
        pytest.param(TooLargeError("x", limit_bytes=3000), 4000, 3000, id="a stated limit"),
        pytest.param(TooLargeError("x", limit_bytes=5000), 4000, 1000, id="a stated limit that is none"),
        pytest.param(TooLargeError("x"), 4000, 1000, id="no stated limit"),
    ],
)
def test_request_that_is_too_large_makes_the_next_one_smaller(
    error: SourceRefusedError | TooLargeError, request_bytes: int, learnt: int
) -> None:
    portions = Portions(manifest_of(64), empty_request_bytes=EMPTY)
    assert portions.learn(error, [flat(0, 1), flat(3, 1)], request_bytes=request_bytes)
    assert (portions.request_bytes, portions.answer_bytes) == (learnt, None)


@pytest.mark.parametrize("status", [502, 504])
def test_answer_that_a_gateway_gives_up_makes_the_next_one_smaller_down_to_a_chunk(status: int) -> None:
    portions = Portions(manifest_of(400))
    learnt = []
    claim = [flat(0, 400)]
    while portions.learn(refused(status), claim, request_bytes=EMPTY):
        learnt.append(portions.answer_bytes)
        claim = portions.take(deque(claim))
    assert learnt == [100, 24]
    assert [segment.nbytes for segment in claim] == [CHUNK]


@pytest.mark.parametrize(
    ("error", "claim"),
    [
        pytest.param(refused(413), [flat(0, 400)], id="nothing smaller can be asked for"),
        pytest.param(refused(502), [flat(0, CHUNK)], id="nothing smaller can be answered"),
        pytest.param(refused(403), [flat(0, 99), flat(200, 99)], id="refused for another reason"),
        pytest.param(FencedError("x", status=413), [flat(0, 99), flat(200, 99)], id="a source's own word"),
    ],
)
def test_nothing_is_learnt_where_smaller_portions_do_not_help(
    error: SourceRefusedError | FencedError, claim: list[Segment]
) -> None:
    assert not Portions(manifest_of(400)).learn(error, claim, request_bytes=1000)
