"""The ledger: every byte has one owner at a time, none is lost, none is fetched twice."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.transfer.conftest import PATIENCE_S
from weightwire.transfer.manifest import MAX_CHUNK_BYTES, Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.wire.ledger import Ledger, Segment, cut_segments

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


class LedgerMachine(RuleBasedStateMachine):
    """Claims are taken, finished, and given back in part, in any order."""

    @initialize(plan=copies(), num_streams=st.integers(1, 3))
    def open(self, plan: list[Copy], num_streams: int) -> None:
        self.ledger = Ledger(cut_segments(MANIFEST, plan, num_streams=num_streams), num_streams=num_streams)
        self.left = Counter(wanted(plan).items())
        self.claims: list[list[Segment]] = []

    @rule()
    def claim(self) -> None:
        taken = self.ledger.claim(timeout_s=0)
        out = sum((fetched(claim) for claim in self.claims), Counter[tuple[int, int]]())
        assert not out & fetched(taken)
        assert not fetched(taken) - self.left
        assert bool(taken) == bool(self.left - out)
        if taken:
            self.claims.append(taken)

    @precondition(lambda self: bool(getattr(self, "claims", [])))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        nbytes = sum(segment.nbytes for segment in claim)
        verified = data.draw(st.integers(0, nbytes) | st.just(nbytes))
        moved = [pair for segment in claim for pair in fetched([segment])]
        self.left -= Counter(moved[:verified])
        self.ledger.settle(claim, verified_bytes=verified)

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def ledger_is_done_when_everything_is(self) -> None:
        assert self.ledger.is_done == (not self.left)


TestLedger = LedgerMachine.TestCase


@given(copies(), st.integers(0, 200))
def test_claim_that_is_given_back_in_part_is_cut_where_it_broke(plan: list[Copy], verified: int) -> None:
    ledger = Ledger(cut_segments(MANIFEST, plan, num_streams=1), num_streams=1)
    claim = ledger.claim(timeout_s=0)
    verified = min(verified, sum(segment.nbytes for segment in claim))
    ledger.settle(claim, verified_bytes=verified)
    rest = ledger.claim(timeout_s=0)
    pairs = [pair for segment in claim for pair in fetched([segment])]
    assert [pair for segment in rest for pair in fetched([segment])] == pairs[verified:]
    ledger.settle(rest, verified_bytes=len(pairs) - verified)
    assert ledger.is_done


# How much a claim takes


def sizes_of(ledger: Ledger) -> list[int]:
    found: list[int] = []
    while claim := ledger.claim(timeout_s=0):
        found.append(sum(segment.nbytes for segment in claim))
        ledger.settle(claim, verified_bytes=found[-1])
    return found


@pytest.mark.parametrize("num_streams", [1, 2, 16])
def test_claims_are_large_at_first_and_smaller_towards_the_end(num_streams: int) -> None:
    total = 8 << 30
    manifest = space(total, chunk_bytes=MIB)
    sizes = sizes_of(
        Ledger(
            cut_segments(
                manifest, [Copy(source=row_major((total,)), target=row_major((total,)))], num_streams=num_streams
            ),
            num_streams=num_streams,
        )
    )
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    # Seven eighths of a stream's share, in pieces of 16 MiB.
    assert sizes[0] == (448 * MIB if num_streams == 16 else 512 * MIB)
    assert sizes[-1] == 16 * MIB


def test_claim_takes_one_segment_however_large_it_is() -> None:
    manifest = space(MAX_CHUNK_BYTES, chunk_bytes=MAX_CHUNK_BYTES)
    region = row_major((MAX_CHUNK_BYTES,))
    assert sizes_of(
        Ledger(cut_segments(manifest, [Copy(source=region, target=region)], num_streams=9), num_streams=9)
    ) == [64 * MIB]


def test_claim_of_very_small_segments_stays_a_request_that_a_source_takes() -> None:
    manifest = space(40_000, chunk_bytes=MIB)
    scattered = [
        Copy(source=row_major((1,), offset=at), target=row_major((1,), offset=at)) for at in range(0, 40_000, 2)
    ]
    ledger = Ledger(cut_segments(manifest, scattered, num_streams=1), num_streams=1)
    assert len(ledger.claim(timeout_s=0)) == 1 << 14


def test_claim_never_asks_a_source_for_more_than_it_holds_however_often_a_target_wants_it() -> None:
    manifest = space(3 * MIB, chunk_bytes=MIB)
    again = [Copy(source=row_major((MIB,)), target=row_major((MIB,), offset=at * MIB)) for at in range(9)]
    segments = list(cut_segments(manifest, again, num_streams=1))
    assert max(sizes_of(Ledger(segments, num_streams=1))) == 7 * MIB
    sizes = sizes_of(Ledger(segments, num_streams=1, most_bytes=manifest.total_bytes))
    assert (max(sizes), sum(sizes)) == (3 * MIB, 9 * MIB)


def test_ledger_of_nothing_is_done() -> None:
    ledger = Ledger([], num_streams=1)
    assert ledger.is_done
    assert ledger.claim(timeout_s=60) == []


# Threads


def whole(nbytes: int, *, chunk_bytes: int = 1) -> Ledger:
    manifest = space(nbytes, chunk_bytes=chunk_bytes)
    return Ledger(
        cut_segments(manifest, [Copy(source=row_major((nbytes,)), target=row_major((nbytes,)))], num_streams=2),
        num_streams=2,
    )


def waiting(ledger: Ledger) -> tuple[threading.Thread, list[list[Segment]]]:
    """A thread that claims, with as much patience as a test has."""
    found: list[list[Segment]] = []
    thread = threading.Thread(target=lambda: found.append(ledger.claim(timeout_s=PATIENCE_S)))
    thread.start()
    return thread, found


def test_claim_waits_for_what_may_come_back_and_gets_it() -> None:
    ledger = whole(5)
    claim = ledger.claim(timeout_s=0)
    thread, found = waiting(ledger)
    ledger.settle(claim, verified_bytes=3)
    thread.join(PATIENCE_S)
    assert [[segment.begin for segment in taken] for taken in found] == [[3, 4]]


def test_claim_ends_when_the_last_segment_is_verified() -> None:
    ledger = whole(5)
    claim = ledger.claim(timeout_s=0)
    thread, found = waiting(ledger)
    ledger.settle(claim, verified_bytes=5)
    thread.join(PATIENCE_S)
    assert found == [[]]


def test_closed_ledger_wakes_who_waits_and_gives_nothing_more() -> None:
    ledger = whole(5)
    claim = ledger.claim(timeout_s=0)
    thread, found = waiting(ledger)
    ledger.close()
    thread.join(PATIENCE_S)
    assert found == [[]]
    ledger.settle(claim, verified_bytes=0)
    assert ledger.claim(timeout_s=0) == []
    assert not ledger.is_done


def test_streams_that_fail_at_random_lose_nothing_and_fetch_nothing_twice() -> None:
    ledger = whole(1000, chunk_bytes=7)
    done: list[Counter[tuple[int, int]]] = []

    def stream(seed: int) -> None:
        chance = random.Random(seed)
        while claim := ledger.claim(timeout_s=PATIENCE_S):
            nbytes = sum(segment.nbytes for segment in claim)
            verified = chance.choice([0, chance.randint(0, nbytes), nbytes])
            pairs = [pair for segment in claim for pair in fetched([segment])]
            done.append(Counter(pairs[:verified]))
            ledger.settle(claim, verified_bytes=verified)

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ledger.is_done
    assert sum(done, Counter[tuple[int, int]]()) == Counter((at, at) for at in range(1000))
