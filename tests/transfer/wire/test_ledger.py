"""The ledger: every byte has one owner at a time, none is lost, none is fetched twice."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.transfer.conftest import PATIENCE_S
from weightwire.transfer.manifest import MAX_CHUNK_BYTES, Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.wire.claims import Claim, Reader
from weightwire.transfer.wire.framing import cut_frames
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.segments import Segment, cut_segments, merged_regions, part_of

MIB = 1 << 20


def space(*storages: int, chunk_bytes: int = 8) -> Manifest:
    return Manifest(model="", revision="", storages=storages, tensors=(), chunk_bytes=chunk_bytes)


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions]


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    """Copies out of a flat space of 60 bytes, each into a target of its own."""
    found: list[Copy] = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            begin = draw(st.integers(0, 59))
            source = row_major((draw(st.integers(1, 60 - begin)),), offset=begin)
        else:
            shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
            strides = tuple(draw(st.integers(1, 9)) for _ in shape)
            source = Region(offset=draw(st.integers(0, 5)), shape=shape, strides=strides)
        found.append(Copy(source=source, target=row_major((source.numel,), offset=1000 * number)))
    return found


MANIFEST = space(60)


def wanted(plan: list[Copy]) -> dict[int, int]:
    """The source's address of every target address."""
    return {
        target: source
        for copy in plan
        for target, source in zip(indices(copy.target), indices(copy.source), strict=True)
    }


def fetched(segments: list[Segment]) -> Counter[tuple[int, int]]:
    """Pairs of target and source address that fetching these segments would move."""
    return Counter(
        (target, source)
        for segment in segments
        for target, source in zip(
            indices(segment.target)[segment.begin : segment.begin + segment.nbytes],
            indices(segment.source),
            strict=True,
        )
    )


@given(copies(), st.integers(1, 3))
def test_segments_are_the_copies_cut_at_the_bounds_of_chunks(plan: list[Copy], num_streams: int) -> None:
    segments = list(cut_segments(MANIFEST, plan, num_streams=num_streams))
    assert fetched(segments) == Counter(wanted(plan).items())
    assert all(segment.nbytes == segment.source.numel > 0 for segment in segments)
    bounds = set(MANIFEST.chunk_bounds)
    for segment in segments:
        source = segment.source
        if source.is_contiguous and any(copy.target == segment.target for copy in plan if copy.is_contiguous):
            assert segment.begin == 0 or source.offset in bounds
            assert segment.begin + segment.nbytes == segment.target.numel or source.end in bounds


def test_copy_is_cut_into_pieces_for_each_stream_of_a_bounded_size() -> None:
    large = [Copy(source=row_major((1 << 30,)), target=row_major((1 << 30,)))]
    pieces = [segment.nbytes for segment in cut_segments(space(1 << 30, chunk_bytes=MIB), large, num_streams=2)]
    assert pieces == [16 * MIB] * 64
    middle = [Copy(source=row_major((40 * MIB,)), target=row_major((40 * MIB,)))]
    pieces = [segment.nbytes for segment in cut_segments(space(40 * MIB, chunk_bytes=MIB), middle, num_streams=2)]
    assert pieces == [5 * MIB] * 8
    small = [Copy(source=row_major((3,)), target=row_major((3,)))]
    assert [segment.nbytes for segment in cut_segments(space(3), small, num_streams=2)] == [3]


def test_large_strided_copy_is_cut_into_boxes_of_a_bounded_size() -> None:
    source = Region(offset=0, shape=(80, MIB), strides=(2 * MIB, 1))
    plan = [Copy(source=source, target=row_major((80 * MIB,)))]
    segments = list(cut_segments(space(160 * MIB, chunk_bytes=MIB), plan, num_streams=1))
    assert [segment.nbytes for segment in segments] == [16 * MIB] * 5
    assert [segment.begin for segment in segments] == [begin * 16 * MIB for begin in range(5)]


def pairs_of(segments: Iterable[Segment]) -> list[tuple[int, int]]:
    """What fetching these segments moves, in the order of the packed stream."""
    return [pair for segment in segments for pair in fetched([segment])]


@given(copies(), st.integers(0, 250), st.integers(0, 250))
def test_part_of_segments_is_that_part_of_their_packed_stream(plan: list[Copy], begin: int, end: int) -> None:
    segments = list(cut_segments(MANIFEST, plan, num_streams=1))
    assert pairs_of(part_of(segments, begin, end)) == pairs_of(segments)[begin:end]


def frames_of(claim: Claim, manifest: Manifest = MANIFEST) -> list[int]:
    """Sizes of the frames in which its answer comes."""
    return [frame.nbytes for frame in cut_frames(manifest, merged_regions(claim.segments))]


@dataclass(kw_only=True)
class Reading:
    """A claim and its frames, as a stream has them before it."""

    claim: Claim
    frames: list[int]
    is_over: bool = False

    def read(self, *, is_good: bool) -> None:
        goes_on = self.claim.ended(self.frames.pop(0), is_good=is_good)
        self.is_over = not goes_on or not self.frames


class LedgerMachine(RuleBasedStateMachine):
    """Claims are taken, read frame by frame, cut short by others, damaged, and given back, in any order."""

    @initialize(plan=copies(), num_streams=st.integers(1, 3), num_sources=st.integers(1, 2), pipelined=st.booleans())
    def open(self, plan: list[Copy], num_streams: int, num_sources: int, pipelined: bool) -> None:
        self.now = 0.0
        self.ledger = Ledger(
            MANIFEST,
            plan,
            num_streams=num_streams,
            num_sources=num_sources,
            pipelined=pipelined,
            clock=lambda: self.now,
        )
        self.left = Counter(wanted(plan).items())
        self.readings: list[Reading] = []
        self.idle = [Reader(number % num_sources) for number in range(4)]
        self.is_ending = False

    @precondition(lambda self: bool(getattr(self, "idle", [])))
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        reader = self.idle.pop(data.draw(st.integers(0, len(self.idle) - 1)))
        claim = self.ledger.claim(reader, timeout_s=0)
        if claim is None:
            self.idle.append(reader)
            return
        assert not self.is_ending
        assert not Counter(pairs_of(claim.segments)) - self.left
        self.readings.append(Reading(claim=claim, frames=frames_of(claim)))

    @precondition(lambda self: bool(getattr(self, "readings", [])))
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.001, 0.3, 5.0]), is_good=st.booleans())
    def read(self, data: st.DataObject, seconds: float, is_good: bool) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        self.now += seconds
        if not reading.is_over:
            reading.read(is_good=is_good)

    @precondition(lambda self: bool(getattr(self, "readings", [])))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        reading = self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1)))
        pairs = pairs_of(reading.claim.segments)
        for begin, end in reading.claim.verified:
            moved = Counter(pairs[begin:end])
            assert not moved - self.left
            self.left -= moved
        self.ledger.settle(reading.claim)
        self.idle.append(reading.claim.reader)

    @rule()
    def end_soon(self) -> None:
        if hasattr(self, "ledger") and self.now > 20:
            self.is_ending = True
            self.ledger.end_soon()

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def every_byte_is_waiting_owned_by_one_or_verified(self) -> None:
        assert self.ledger.is_done == (not self.left)
        owned = Counter[tuple[int, int]]()
        for reading in self.readings:
            claim = reading.claim
            # What is verified, and what may still land, whatever its reader does next.
            owned += Counter(pairs_of(part_of(claim.segments, 0, claim.owned)))
            assert claim.done <= claim.owned
        assert not owned - self.left
        assert self.ledger.left_bytes == self.left.total() - sum(r.claim.done for r in self.readings)


TestLedger = LedgerMachine.TestCase


def open_ledger(
    nbytes: int, *, chunk_bytes: int = 1, num_streams: int = 2, num_sources: int = 1, pipelined: bool = False
) -> tuple[Ledger, list[float]]:
    """A ledger of one flat space, and the clock that it looks at."""
    now = [0.0]
    ledger = Ledger(
        space(nbytes, chunk_bytes=chunk_bytes),
        [Copy(source=row_major((nbytes,)), target=row_major((nbytes,)))],
        num_streams=num_streams,
        num_sources=num_sources,
        pipelined=pipelined,
        clock=lambda: now[0],
    )
    return ledger, now


def taken(ledger: Ledger, reader: Reader | None = None) -> Claim:
    claim = ledger.claim(reader or Reader("s"), timeout_s=0)
    assert claim is not None
    return claim


def begins_of(claim: Claim) -> list[tuple[int, int]]:
    return [(segment.source.offset, segment.source.end) for segment in claim.segments]


def finish(ledger: Ledger, claim: Claim, nbytes: int | None = None) -> None:
    """All that is left of a claim comes in one piece, or only so much of it."""
    claim.ended(claim.owned - claim.done if nbytes is None else nbytes)
    ledger.settle(claim)


@given(copies(), st.integers(0, 20))
def test_claim_that_is_given_back_in_part_is_cut_where_it_broke(plan: list[Copy], frames: int) -> None:
    ledger = Ledger(MANIFEST, plan, num_streams=1)
    claim = taken(ledger)
    pairs, verified = pairs_of(claim.segments), sum(frames_of(claim)[:frames])
    for nbytes in frames_of(claim)[:frames]:
        assert claim.ended(nbytes)
    ledger.settle(claim)
    found: list[tuple[int, int]] = []
    while rest := ledger.claim(Reader("s"), timeout_s=0):
        found += pairs_of(rest.segments)
        finish(ledger, rest)
    assert found[: len(pairs) - verified] == pairs[verified:]
    assert ledger.is_done


def test_damaged_frames_alone_come_back() -> None:
    ledger, _ = open_ledger(40, chunk_bytes=10, num_streams=1)
    claim = taken(ledger)
    for is_good in (False, True, False, True):
        claim.ended(10, is_good=is_good)
    assert claim.verified == [(10, 20), (30, 40)]
    ledger.settle(claim)
    again = taken(ledger)
    assert begins_of(again) == [(0, 10), (20, 30)]
    finish(ledger, again)
    assert ledger.is_done


# How much a claim takes


def sizes_of(ledger: Ledger) -> list[int]:
    found: list[int] = []
    reader = Reader("s")
    while claim := ledger.claim(reader, timeout_s=0):
        found.append(claim.owned)
        finish(ledger, claim)
    return found


@pytest.mark.parametrize("num_streams", [1, 2, 16])
def test_claims_of_one_source_are_large_at_first_and_smaller_towards_the_end(num_streams: int) -> None:
    total = 8 << 30
    sizes = sizes_of(open_ledger(total, chunk_bytes=MIB, num_streams=num_streams)[0])
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    # Seven eighths of a stream's share.
    assert sizes[0] == (448 * MIB if num_streams == 16 else 512 * MIB)
    assert sizes[-1] == MIB


def test_first_claims_of_all_streams_are_alike() -> None:
    ledger, _ = open_ledger(1 << 30, chunk_bytes=MIB, num_streams=2)
    assert [taken(ledger).owned for _ in range(2)] == [448 * MIB, 448 * MIB]


def test_claim_takes_one_segment_however_large_it_is() -> None:
    sizes = sizes_of(open_ledger(MAX_CHUNK_BYTES, chunk_bytes=MAX_CHUNK_BYTES, num_streams=9)[0])
    assert sizes == [64 * MIB]


@pytest.mark.parametrize("num_sources", [1, 2])
def test_claim_of_very_small_segments_stays_a_request_that_a_source_takes(num_sources: int) -> None:
    manifest = space(40_000, chunk_bytes=MIB)
    scattered = [
        Copy(source=row_major((1,), offset=at), target=row_major((1,), offset=at)) for at in range(0, 40_000, 2)
    ]
    ledger = Ledger(manifest, scattered, num_streams=1, num_sources=num_sources)
    assert len(taken(ledger).segments) == 1 << 14


def test_claim_never_asks_a_source_for_more_than_it_holds_however_often_a_target_wants_it() -> None:
    manifest = space(3 * MIB, chunk_bytes=MIB)
    again = [Copy(source=row_major((MIB,)), target=row_major((MIB,), offset=at * MIB)) for at in range(9)]
    sizes = sizes_of(Ledger(manifest, again, num_streams=1))
    assert (max(sizes), sum(sizes)) == (3 * MIB, 9 * MIB)


def measured(ledger: Ledger, now: list[float], name: str, rate: float) -> Reader:
    """A stream that has read its first claim at a rate, in bytes per second."""
    reader = Reader(name)
    claim = taken(ledger, reader)
    now[0] += claim.owned / rate
    finish(ledger, claim)
    return reader


def test_claims_of_several_sources_are_a_quarter_of_a_second_of_each_from_a_first_chunk_on() -> None:
    ledger, now = open_ledger(1024 * MIB, chunk_bytes=MIB, num_streams=2, num_sources=2)
    first = taken(ledger, Reader("x"))
    assert first.owned == MIB
    now[0] += 0.01
    finish(ledger, first)
    assert first.reader.rate == 100 * MIB
    assert taken(ledger, first.reader).owned == 25 * MIB
    slow = measured(ledger, now, "y", 40 * MIB)
    assert taken(ledger, slow).owned == 10 * MIB


def test_claims_on_a_long_link_are_long() -> None:
    """Or a source far away would mostly wait for the next request."""
    ledger, now = open_ledger(4096 * MIB, chunk_bytes=MIB, num_streams=2, num_sources=2)
    reader = Reader("x")
    reader.rate, reader.latency_s = 100.0 * MIB, 0.05
    claim = taken(ledger, reader)
    assert claim.owned == 100 * MIB
    now[0] += 0.06
    claim.ended(MIB)
    now[0] += 0.99
    finish(ledger, claim)
    assert reader.latency_s == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(("num_streams", "most"), [(1, 16), (2, 1)], ids=["one stream", "two streams"])
def test_claims_of_a_pipeline_are_short_and_in_rising_order(num_streams: int, most: int) -> None:
    ledger, _ = open_ledger(64 * MIB, chunk_bytes=MIB, num_streams=num_streams, pipelined=True)
    begins: list[int] = []
    reader = Reader("parent")
    while claim := ledger.claim(reader, timeout_s=0):
        # Of a clock that stands nothing is known about a rate.
        assert claim.owned <= most * MIB
        begins.append(claim.segments[0].source.offset)
        finish(ledger, claim)
    assert begins == sorted(begins)
    assert len(begins) >= 64 // most


@pytest.mark.parametrize(
    ("num_streams", "latency_s", "expected"),
    [
        pytest.param(2, 0.0, 5, id="a twentieth of a second"),
        pytest.param(2, 0.1, 20, id="two latencies on a long link"),
        pytest.param(1, 0.1, 100, id="a second where nobody fetches what is behind"),
    ],
)
def test_claims_of_a_pipeline_grow_with_the_rate(num_streams: int, latency_s: float, expected: int) -> None:
    ledger, _ = open_ledger(4096 * MIB, chunk_bytes=MIB, num_streams=num_streams, pipelined=True)
    reader = Reader("x")
    reader.rate, reader.latency_s = 100.0 * MIB, latency_s
    assert taken(ledger, reader).owned == expected * MIB


def test_slow_source_takes_nothing_that_a_fast_one_would_have_sooner() -> None:
    ledger, now = open_ledger(12 * MIB, chunk_bytes=MIB, num_streams=2, num_sources=2)
    fast = measured(ledger, now, "fast", 100 * MIB)
    slow = measured(ledger, now, "slow", 1 * MIB)
    busy = taken(ledger, fast)
    assert ledger.claim(slow, timeout_s=0) is None
    # The one that is fast has stopped; nobody else is here.
    now[0] += 100
    assert ledger.claim(slow, timeout_s=0) is not None
    assert busy.done == 0


# Taking the end of a claim away


CHUNK = MIB // 16


def owner_and_thief(*, owner: float, thief: float, name: str = "other") -> tuple[Ledger, list[float], Claim, Reader]:
    """A stream that has claimed all of 16 chunks, and one that finds nothing left; rates in chunks a second."""
    ledger, now = open_ledger(16 * CHUNK, chunk_bytes=CHUNK, num_streams=1)
    busy, idle = Reader("owner"), Reader(name)
    busy.rate, idle.rate = owner * CHUNK, thief * CHUNK
    claim = taken(ledger, busy)
    assert claim.owned == 16 * CHUNK
    return ledger, now, claim, idle


@pytest.mark.parametrize(
    ("owner", "thief", "kept"),
    [
        pytest.param(4, 12, 4, id="three times as fast"),
        pytest.param(4, 4, 8, id="as fast"),
        pytest.param(12, 4, 12, id="a third as fast"),
        pytest.param(1, 1000, 1, id="so fast that only the frame that has begun is left"),
    ],
)
def test_idle_stream_takes_so_much_that_both_are_through_at_once(owner: float, thief: float, kept: int) -> None:
    ledger, _, claim, idle = owner_and_thief(owner=owner, thief=thief)
    stolen = taken(ledger, idle)
    assert claim.owned == kept * CHUNK
    assert begins_of(stolen)[0][0] == kept * CHUNK
    assert stolen.owned == (16 - kept) * CHUNK
    goes_on = [claim.ended(CHUNK) for _ in range(kept)]
    assert goes_on == [True] * (kept - 1) + [False]
    ledger.settle(claim)
    finish(ledger, stolen)
    assert ledger.is_done


@pytest.mark.parametrize(
    ("owner", "thief", "name"),
    [
        pytest.param(400, 400, "other", id="it would win less than a new connection costs"),
        pytest.param(4, 12, "owner", id="it is of the same source, which would not be faster"),
        pytest.param(8, 0.5, "other", id="it would need longer for one frame than the owner for all"),
    ],
)
def test_idle_stream_takes_nothing_if(owner: float, thief: float, name: str) -> None:
    ledger, _, claim, idle = owner_and_thief(owner=owner, thief=thief, name=name)
    assert ledger.claim(idle, timeout_s=0) is None
    assert claim.owned == 16 * CHUNK


def test_stream_of_the_same_source_helps_one_that_is_stuck() -> None:
    ledger, now, claim, idle = owner_and_thief(owner=16, thief=16, name="owner")
    claim.ended(CHUNK)
    now[0] += 0.4
    assert ledger.claim(idle, timeout_s=0) is None
    now[0] += 10
    assert taken(ledger, idle).owned == 14 * CHUNK
    # The frame that it is in is still its own: its bytes may come at any moment.
    assert claim.owned == 2 * CHUNK


def test_stream_that_has_stopped_loses_everything_behind_its_frame_without_anybody_dropping_it() -> None:
    ledger, now, claim, idle = owner_and_thief(owner=1000, thief=1000)
    for _ in range(4):
        claim.ended(CHUNK)
    assert ledger.claim(idle, timeout_s=0) is None
    now[0] += 1
    stolen = taken(ledger, idle)
    assert begins_of(stolen)[0][0] == 5 * CHUNK
    finish(ledger, stolen)
    assert not ledger.is_done
    ledger.settle(claim)
    assert begins_of(taken(ledger, idle)) == [(4 * CHUNK, 5 * CHUNK)]


def test_end_that_its_owner_has_reached_already_stays_with_it() -> None:
    ledger, _, claim, _ = owner_and_thief(owner=1, thief=1)
    first, second, *_ = claim.cuts()
    assert (first, second) == (CHUNK, 2 * CHUNK)
    claim.ended(CHUNK)
    claim.ended(CHUNK)
    assert claim.cut(second) is None
    assert claim.owned == 16 * CHUNK
    assert all(claim.ended(CHUNK) for _ in range(14))
    ledger.settle(claim)
    assert ledger.is_done


def test_everybody_stops_after_the_frame_that_is_on_its_way_and_the_rest_is_kept() -> None:
    ledger, _, claim, idle = owner_and_thief(owner=1, thief=1)
    assert claim.ended(CHUNK)
    ledger.end_soon()
    assert not claim.ended(CHUNK)
    ledger.settle(claim)
    assert ledger.claim(idle, timeout_s=60) is None
    assert ledger.left_bytes == 14 * CHUNK


def test_ledger_of_nothing_is_done() -> None:
    ledger = Ledger(space(1), [], num_streams=1)
    assert ledger.is_done
    assert ledger.claim(Reader("s"), timeout_s=60) is None


# Threads


def whole(nbytes: int, *, chunk_bytes: int = 1, num_sources: int = 1) -> Ledger:
    copy = Copy(source=row_major((nbytes,)), target=row_major((nbytes,)))
    return Ledger(space(nbytes, chunk_bytes=chunk_bytes), [copy], num_streams=2, num_sources=num_sources)


def waiting(ledger: Ledger) -> tuple[threading.Thread, list[Claim | None]]:
    """A thread that claims, with as much patience as a test has."""
    found: list[Claim | None] = []
    thread = threading.Thread(target=lambda: found.append(ledger.claim(Reader("w"), timeout_s=PATIENCE_S)))
    thread.start()
    return thread, found


def test_claim_waits_for_what_may_come_back_and_gets_it() -> None:
    ledger = whole(5)
    claim = taken(ledger)
    thread, found = waiting(ledger)
    finish(ledger, claim, 3)
    thread.join(PATIENCE_S)
    assert [begins_of(each) for each in found if each] == [[(3, 4), (4, 5)]]


def test_claim_ends_when_the_last_segment_is_verified() -> None:
    ledger = whole(5)
    claim = taken(ledger)
    thread, found = waiting(ledger)
    finish(ledger, claim)
    thread.join(PATIENCE_S)
    assert found == [None]


def test_closed_ledger_wakes_who_waits_and_gives_nothing_more() -> None:
    ledger = whole(5)
    claim = taken(ledger)
    thread, found = waiting(ledger)
    ledger.close()
    thread.join(PATIENCE_S)
    assert found == [None]
    ledger.settle(claim)
    assert ledger.claim(Reader("s"), timeout_s=0) is None
    assert not ledger.is_done


def test_streams_that_fail_at_random_and_steal_lose_nothing_and_fetch_nothing_twice() -> None:
    ledger = whole(1000, chunk_bytes=7, num_sources=6)
    done: list[Counter[tuple[int, int]]] = []

    def stream(seed: int) -> None:
        chance = random.Random(seed)
        # Made up, so that some think that others are slow and take from them.
        reader = Reader(seed)
        while claim := ledger.claim(reader, timeout_s=PATIENCE_S):
            reader.rate = 10.0 ** chance.randint(0, 3)
            for nbytes in frames_of(claim, space(1000, chunk_bytes=7)):
                if chance.random() < 0.1 or not claim.ended(nbytes, is_good=chance.random() > 0.2):
                    break
            pairs = pairs_of(claim.segments)
            done.extend(Counter(pairs[begin:end]) for begin, end in claim.verified)
            ledger.settle(claim)

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ledger.is_done
    assert sum(done, Counter[tuple[int, int]]()) == Counter((at, at) for at in range(1000))
