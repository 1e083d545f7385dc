"""Who fetches what: the segments of a plan that are waiting, out, or verified. No I/O.

A byte has one owner at a time. An owner that fails gives back what it has not verified, after its socket is closed, so
that a late byte can never land on verified ones; one that is slow loses the end of its claim, which it has not begun.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.wire.claims import Claim, Reader
from weightwire.transfer.wire.segments import Segment, cut_point, cut_segments, part_of

# Below this not even the last bytes are worth sharing.
_MIN_CLAIM_BYTES = 1 << 20
# Above this one slow source would hold too much.
_MAX_CLAIM_BYTES = 512 << 20
# Keeps a request below the size that a source takes, however small the segments are.
_MAX_CLAIM_SEGMENTS = 1 << 14
# Where sources differ a claim is this long; on long links long enough for the wait for an answer not to show.
_CLAIM_S = 0.25
_CLAIM_LATENCIES = 20
_LONGEST_CLAIM_S = 4.0
_MIN_CLAIM_S = 0.01
# Where others wait for what comes first, a claim is shorter still: until it is through, what another stream fetches
# behind it is of no use to them. A single stream fetches in order anyway, and would only wait between its claims.
_PIPELINED_S = 0.05
_PIPELINED_LATENCIES = 2
_ALONE_S = 1.0
_ALONE_CHUNKS = 16
# What a new request costs, roughly, and what must be won for one to be cut short.
_REQUEST_S = 0.01
_WORTH_S = 0.05
# One stream of a source helps another one of the same only if that is stuck.
_STUCK = 0.25
# How often somebody who is idle looks whether others have become slow.
_LOOK_S = 0.1


class Ledger:
    """The segments that the sources of one manifest share. Thread-safe."""

    def __init__(
        self,
        manifest: Manifest,
        copies: Sequence[Copy],
        *,
        num_streams: int,
        num_sources: int = 1,
        pipelined: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        manifest: What the sources hold.
        copies: What is wanted of it.
        num_streams: How many read, in all.
        num_sources: How many sources they belong to. One is asked for much at once; several by how fast they are.
        pipelined: Others wait for what comes first: short claims, in rising order.
        """
        self._manifest = manifest
        self._waiting = deque(cut_segments(manifest, copies, num_streams=num_streams))
        self._waiting_bytes = sum(segment.nbytes for segment in self._waiting)
        self._out: list[Claim] = []
        self._present: set[Reader] = set()
        self._num_streams = num_streams
        self._by_rate = num_sources > 1
        self._pipelined = pipelined
        # A source refuses to send more at once than it holds, and a target that has an expert in several slots wants
        # some of it several times.
        self._most_bytes = min(manifest.total_bytes, _MAX_CLAIM_BYTES)
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False

    @property
    def is_done(self) -> bool:
        """True if every segment was verified."""
        return not self._waiting and not self._out

    @property
    def left_bytes(self) -> int:
        """What is not verified yet, roughly."""
        with self._changed:
            return self._waiting_bytes + sum(claim.owned - claim.done for claim in self._out)

    def claim(self, reader: Reader, *, timeout_s: float) -> Claim | None:
        """Take the next segments, or the end of what a slower reader has taken.

        Waits while there is nothing to take but some are out, since they may come back.

        Returns:
            Segments in the order of the source's flat space; None when all are verified, the ledger was closed, or the
            time is over.
        """
        with self._changed:
            ends_at = self._clock() + timeout_s
            self._present.add(reader)
            while not self._closed and not self.is_done:
                taken = self._next(reader)
                if taken:
                    claim = Claim(reader, taken, self._manifest, self._clock)
                    self._out.append(claim)
                    return claim
                left_s = ends_at - self._clock()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, _LOOK_S))
            self._present.discard(reader)
            return None

    def settle(self, claim: Claim) -> None:
        """End a claim: what has come is done with, the rest goes to whoever asks next."""
        with self._changed:
            # Not before: until here its end may be taken from it.
            back = claim.unverified()
            self._out.remove(claim)
            self._present.discard(claim.reader)
            claim.learn()
            self._waiting.extendleft(reversed(back))
            self._waiting_bytes += sum(segment.nbytes for segment in back)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more and wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end_soon(self) -> None:
        """Close, and let everybody stop after the frame that is on its way."""
        with self._changed:
            self.close()
            for claim in self._out:
                claim.end_soon()

    # -- decisions; the lock is held ------------------------------------------------------------------------------

    def _next(self, reader: Reader) -> list[Segment]:
        if not self._waiting:
            return self._steal(reader)
        if self._by_rate and self._would_be_late(reader):
            return []
        return self._take(self._limit(reader))

    def _take(self, limit: int) -> list[Segment]:
        """The first segments up to `limit` bytes, the last of them cut if it has to be; at least a chunk."""
        taken: list[Segment] = []
        size = 0
        while self._waiting and len(taken) < _MAX_CLAIM_SEGMENTS and size < limit:
            segment = self._waiting[0]
            at = segment.nbytes if size + segment.nbytes <= limit else cut_point(self._manifest, segment, limit - size)
            if taken and size + at > limit:
                break
            del self._waiting[0]
            head = [segment] if at == segment.nbytes else list(part_of([segment], 0, at))
            if at < segment.nbytes:
                self._waiting.extendleft(reversed(list(part_of([segment], at, segment.nbytes))))
            taken.extend(head)
            size += at
        self._waiting_bytes -= size
        return taken

    def _limit(self, reader: Reader) -> int:
        """How much to take at once: much at first and less towards the end, so that the streams finish together."""
        chunk = self._manifest.chunk_bytes
        out = sum(claim.owned - claim.done for claim in self._out)
        share = (self._waiting_bytes + out) * 7 // (8 * self._num_streams)
        if self._pipelined:
            if self._num_streams == 1:
                return min(max(_ALONE_CHUNKS * chunk, int(reader.rate * _ALONE_S)), self._most_bytes)
            wanted = int(reader.rate * max(_PIPELINED_S, reader.latency_s * _PIPELINED_LATENCIES))
            return min(max(wanted, chunk), max(share, chunk), self._most_bytes)
        if not self._by_rate:
            return min(max(share, _MIN_CLAIM_BYTES), self._most_bytes)
        if not reader.rate:
            # Of a source of which nothing is known yet.
            return chunk
        known = [other.rate for other in self._present if other.rate]
        all_rates = sum(known) + (len(self._present) - len(known)) * sum(known) / len(known)
        share = int(self._waiting_bytes * reader.rate / all_rates / 2)
        least = int(reader.rate * max(_MIN_CLAIM_S, reader.latency_s))
        wanted = int(reader.rate * min(max(_CLAIM_S, reader.latency_s * _CLAIM_LATENCIES), _LONGEST_CLAIM_S))
        return min(max(min(wanted, share), least, chunk), self._most_bytes)

    def _would_be_late(self, reader: Reader) -> bool:
        """Whether the faster ones that are here would be through with everything before this one has a chunk."""
        if not reader.rate:
            return False
        faster, ahead = 0.0, self._waiting_bytes
        out = {claim.reader: claim for claim in self._out}
        for other in self._present:
            nbytes, rate = out[other].left() if other in out else (0, other.rate)
            if rate > reader.rate:
                faster += rate
                ahead += nbytes
        if not faster:
            return False
        return min(self._manifest.chunk_bytes, self._waiting_bytes) / reader.rate > ahead / faster

    def _steal(self, thief: Reader) -> list[Segment]:
        """The end of the claim of which most time can be saved, if it is worth a request and a connection."""
        best: tuple[float, Claim, int] | None = None
        for claim in self._out:
            nbytes, rate = claim.left()
            speed = thief.rate or rate
            if nbytes / rate < _WORTH_S or (claim.reader.source == thief.source and rate > speed * _STUCK):
                continue
            for at in _balanced(claim.cuts(), nbytes / rate, claim, (rate, speed)):
                saved = nbytes / rate - max((at - claim.done) / rate, (claim.owned - at) / speed + _REQUEST_S)
                if saved > _WORTH_S and (best is None or saved > best[0]):
                    best = saved, claim, at
        if best is None:
            return []
        return best[1].cut(best[2]) or []


def _balanced(cuts: Sequence[int], left_s: float, claim: Claim, rates: tuple[float, float]) -> Iterable[int]:
    """The cuts around the one after which owner and thief would be through at the same time."""
    if not cuts:
        return ()
    owner, thief = rates
    wanted = claim.owned - (left_s - _REQUEST_S) * owner * thief / (owner + thief)
    later = next((number for number, at in enumerate(cuts) if at >= wanted), len(cuts) - 1)
    return cuts[max(later - 1, 0) : later + 1]
