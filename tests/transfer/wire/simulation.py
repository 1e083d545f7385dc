"""Sources of given rates that share a ledger, as discrete events: no thread, no socket, no clock that runs."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import row_major
from weightwire.transfer.wire.claims import Claim, Reader
from weightwire.transfer.wire.framing import cut_frames
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.segments import merged_regions

MIB = 1 << 20
# What a request costs until its first byte comes, and how often an idle stream looks again.
LATENCY_S = 0.002
LOOK_S = 0.1
# By when a source that has stopped is dropped.
DROPPED_S = 1.75


@dataclass(kw_only=True)
class Stream:
    """One simulated stream.

    Attributes:
        rate: Bytes per second.
        stops_at: When it says nothing any more.
        slows_at: When it goes on at `slow_rate`.
        requests: How many it has sent.
        cut: How many of its answers it did not read to the end.
    """

    reader: Reader
    rate: float
    stops_at: float = float("inf")
    slows_at: float = float("inf")
    slow_rate: float = 1.0
    requests: int = 0
    cut: int = 0
    claim: Claim | None = None

    def ends(self, begins: float, nbytes: int) -> float:
        """When bytes that begin to come are there."""
        return begins + nbytes / (self.slow_rate if begins >= self.slows_at else self.rate)


class Simulation:
    """Streams that read what ledgers give out, until nothing is left.

    Attributes:
        now: Seconds since the beginning.
        ended_at: When the last byte was verified.
        closes_at: When nobody begins anything any more.
        fetched: How often each byte was verified, by chunk.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.now = self.ended_at = 0.0
        self.closes_at = float("inf")
        self.fetched: Counter[int] = Counter()
        self._manifest = manifest
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._idle: list[tuple[Stream, Ledger]] = []

    def clock(self) -> float:
        return self.now

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def start(self, stream: Stream, ledger: Ledger) -> None:
        """Claim, or come back later; ends when the ledger is done."""
        if min(stream.stops_at, self.closes_at) <= self.now:
            return
        claim = ledger.claim(stream.reader, timeout_s=0)
        if claim is None:
            if not ledger.is_done and (stream, ledger) not in self._idle:
                self._idle.append((stream, ledger))
                self.at(self.now + LOOK_S, lambda: self._look(stream, ledger))
            return
        stream.claim = claim
        stream.requests += 1
        frames = [frame.nbytes for frame in cut_frames(self._manifest, merged_regions(claim.segments))]
        self._next(stream, ledger, frames, 0, begins=self.now + LATENCY_S)

    def _next(self, stream: Stream, ledger: Ledger, frames: list[int], number: int, *, begins: float) -> None:
        ends = stream.ends(begins, frames[number])
        if ends > stream.stops_at:
            self.at(stream.stops_at + DROPPED_S, lambda: self._settle(stream, ledger))
            return
        self.at(ends, lambda: self._came(stream, ledger, frames, number))

    def _came(self, stream: Stream, ledger: Ledger, frames: list[int], number: int) -> None:
        claim = stream.claim
        assert claim is not None
        goes_on = claim.ended(frames[number])
        if goes_on and number + 1 < len(frames):
            self._next(stream, ledger, frames, number + 1, begins=self.now)
            return
        self._settle(stream, ledger)
        if number + 1 < len(frames):
            stream.cut += 1
            self.at(self.now + LATENCY_S, lambda: self.start(stream, ledger))
        else:
            self.start(stream, ledger)

    def _settle(self, stream: Stream, ledger: Ledger) -> None:
        claim = stream.claim
        assert claim is not None
        at = 0
        for segment in claim.segments:
            for begin in range(0, min(segment.nbytes, claim.done - at), MIB):
                self.fetched[(segment.source.offset + begin) // MIB] += 1
            at += segment.nbytes
        ledger.settle(claim)
        self.ended_at = self.now
        waiting, self._idle = self._idle, []
        for other, its in waiting:
            self.start(other, its)

    def _look(self, stream: Stream, ledger: Ledger) -> None:
        if (stream, ledger) in self._idle:
            self._idle.remove((stream, ledger))
            self.start(stream, ledger)


def flat(nbytes: int, *, chunk_bytes: int = MIB) -> Manifest:
    return Manifest(model="", revision="", storages=(nbytes,), tensors=(), chunk_bytes=chunk_bytes)


def part(begin: int, nbytes: int) -> Copy:
    return Copy(source=row_major((nbytes,), offset=begin), target=row_major((nbytes,), offset=begin))


def whole(nbytes: int) -> list[Copy]:
    return [part(0, nbytes)]


def race(nbytes: int, sources: list[list[Stream]]) -> tuple[Simulation, list[Stream]]:
    """All sources of one manifest from the same moment on."""
    manifest = flat(nbytes)
    simulation = Simulation(manifest)
    streams = [stream for source in sources for stream in source]
    ledger = Ledger(manifest, whole(nbytes), num_streams=len(streams), num_sources=len(sources), clock=simulation.clock)
    for stream in streams:
        simulation.at(0, lambda stream=stream: simulation.start(stream, ledger))  # type: ignore[misc]
    simulation.run()
    assert ledger.is_done
    return simulation, streams
