"""Fills shells from several sources at once, over several streams each.

The streams share a ledger for each manifest. A source that fails loses its unverified segments to the others; what
was verified stays, and is never fetched again.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.transfer.control import Control
from weightwire.transfer.errors import (
    CancelledError,
    ChecksumError,
    DeadlineError,
    ManifestError,
    ProtocolError,
    SourceBusyError,
    SourceError,
    SourceStalledError,
    SourceUnreachableError,
    TransferError,
)
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Plan
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.ledger import Ledger, Segment, cut_segments
from weightwire.transfer.wire.stream import Endpoint, Place, Places, SourceStream, Timeouts

logger = logging.getLogger(__name__)

# How often a stream opens its connection again after one that broke, in all.
_MAX_RECONNECTS = 5
# Progress is told in steps of this size: telling it for every chunk would cost more than hashing the chunk.
_REPORT_BYTES = 4 << 20
# Damaged answers from one source before nothing of it is believed any more.
_MAX_DAMAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """How hard to pull.

    Attributes:
        streams: Connections to each source.
        busy_patience_s: How long a source may answer 503 before it is given up.
        tls: Trust for sources on https.
    """

    streams: int = 2
    timeouts: Timeouts = field(default_factory=Timeouts)
    busy_patience_s: float = 30.0
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailure:
    """Why a source was given up."""

    instance_id: str
    rank: int
    code: str
    detail: str


class Coverage:
    """What is verified: flat bytes of the target, and of each source's manifest. Thread-safe.

    Attributes:
        target: Flat intervals of the shells that are verified.
        proven: By manifest digest, flat intervals of the source whose bytes hash to the manifest's own digests.
        bytes_by_source: Verified bytes by (instance, rank).
    """

    def __init__(self) -> None:
        self.target = IntervalSet()
        self.proven: dict[str, IntervalSet] = {}
        self.bytes_by_source: Counter[tuple[str, int]] = Counter()
        self._strided: dict[Region, Counter[tuple[str, int]]] = {}
        self._lock = threading.Lock()

    def add(self, places: Iterable[Place], chunks: Iterable[int], lane: _Lane) -> None:
        """Record places that are verified, and the manifest's chunks that this proved."""
        endpoint, bounds = lane.endpoint, lane.manifest.chunk_bounds
        with self._lock:
            for place in places:
                if place.is_contiguous:
                    self.bytes_by_source[endpoint.instance_id, endpoint.rank] += place.nbytes
                    self.target.add(*place.flat)
                else:
                    self._add_strided(place, (endpoint.instance_id, endpoint.rank))
            proven = self.proven.setdefault(endpoint.manifest, IntervalSet())
            for chunk in chunks:
                proven.add(bounds[chunk], bounds[chunk + 1])

    def forget_partial(self) -> None:
        """Strided regions that are not complete will be fetched whole again."""
        with self._lock:
            self._strided.clear()

    def _add_strided(self, place: Place, source: tuple[str, int]) -> None:
        # The bytes of a strided region interleave with its neighbours', so it counts when all of it is there.
        given = self._strided.setdefault(place.target, Counter())
        given[source] += place.nbytes
        if given.total() == place.target.numel:
            self.bytes_by_source.update(given)
            self.target.add_region(place.target)


class Puller:
    """Executes plans against the sources of one transfer. Use as a context manager: leaving it ends its threads."""

    def __init__(
        self,
        shells: Shells,
        endpoints: Sequence[Endpoint],
        manifests: Mapping[str, Manifest],
        options: PullOptions | None = None,
    ) -> None:
        """Args:
        shells: Written.
        endpoints: In order of preference.
        manifests: By digest; has that of every endpoint.
        """
        self.options = options or PullOptions()
        self.coverage = Coverage()
        self.failures: list[SourceFailure] = []
        self._shells = shells
        self._manifests = manifests
        self._digests = list(dict.fromkeys(endpoint.manifest for endpoint in endpoints))
        self._lanes = [_Lane(endpoint, manifests[endpoint.manifest], self.options) for endpoint in endpoints]
        for lane in self._lanes:
            lane.neighbours = [other for other in self._lanes if other.process == lane.process]
        self._collect_failures()

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._lanes:
            lane.close()

    @property
    def manifests(self) -> list[Manifest]:
        """What the sources hold, without repetition, in order of preference; those that were given up included."""
        return [self._manifests[digest] for digest in self._digests]

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of the manifests of which every source was given up."""
        return frozenset(number for number, capacity in enumerate(self.capacities) if not capacity)

    @property
    def capacities(self) -> list[int]:
        """For each manifest, how many sources hold it that were not given up."""
        live = Counter(lane.endpoint.manifest for lane in self._lanes if lane.error is None)
        return [live[digest] for digest in self._digests]

    def connect(self, plan: Plan) -> None:
        """Open the connections that `plan` needs now; a source that is not there is given up."""
        # All at once: hosts that are gone would let each other wait, and the living ones, too.
        threads = [
            threading.Thread(target=lane.connect, name=f"weightwire-connect-{lane.endpoint.instance_id}")
            for lane in self._lanes
            if lane.error is None and plan.copies[self._digests.index(lane.endpoint.manifest)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._collect_failures()

    def pull(self, plan: Plan, control: Control, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Fetch what `plan` wants from the live sources.

        Returns when everything is verified or every source that could help has failed; `coverage` and `failures`
        say which.

        Args:
            plan: Of `manifests`.
            control: Deadline and stop button.
            on_bytes: Called from the streams' threads with the bytes that were verified since the last call.

        Raises:
            CancelledError: If somebody stopped it.
            DeadlineError: If its time is over.
        """
        ledgers = {}
        for manifest, copies in zip(self.manifests, plan.copies, strict=True):
            lanes = [lane for lane in self._lanes if lane.error is None and lane.manifest is manifest]
            num_streams = max(1, len(lanes)) * self.options.streams
            ledgers[manifest.digest] = Ledger(
                cut_segments(manifest, copies, num_streams=num_streams),
                num_streams=num_streams,
                most_bytes=manifest.total_bytes,
            )
        work = _Work(shells=self._shells, coverage=self.coverage, control=control, on_bytes=on_bytes)
        threads = [
            thread
            for lane in self._lanes
            if lane.error is None and not ledgers[lane.endpoint.manifest].is_done
            for thread in lane.threads(ledgers[lane.endpoint.manifest], work)
        ]
        self._run(threads, list(ledgers.values()), control)
        self.coverage.forget_partial()
        self._collect_failures()
        control.check()

    def _run(self, threads: list[threading.Thread], ledgers: list[Ledger], control: Control) -> None:
        def abort() -> None:
            for ledger in ledgers:
                ledger.close()
            for lane in self._lanes:
                lane.abort()

        with control.on_cancel(abort):
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join(control.remaining_s)
            finally:
                if any(thread.is_alive() for thread in threads):
                    abort()
                for thread in threads:
                    thread.join()

    def _collect_failures(self) -> None:
        known = {(failure.instance_id, failure.rank) for failure in self.failures}
        for lane in self._lanes:
            endpoint = lane.endpoint
            if lane.error is not None and (endpoint.instance_id, endpoint.rank) not in known:
                logger.warning("gave up %s: %s", endpoint, lane.error)
                self.failures.append(
                    SourceFailure(
                        instance_id=endpoint.instance_id,
                        rank=endpoint.rank,
                        code=lane.error.code,
                        detail=str(lane.error),
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What the streams of one pull share."""

    shells: Shells
    coverage: Coverage
    control: Control
    on_bytes: Callable[[int], None]


class _Lane:
    """One source: its streams, and whether it was given up.

    Attributes:
        error: Why it was given up, once it was.
        neighbours: The lanes to all ranks that the same process serves, this one among them.
    """

    def __init__(self, endpoint: Endpoint, manifest: Manifest, options: PullOptions) -> None:
        self.endpoint = endpoint
        self.neighbours: list[_Lane] = [self]
        self.manifest = manifest
        self.error: TransferError | None = None
        if manifest.total_bytes and not manifest.chunk_digests:
            self.error = ManifestError(f"{endpoint}: its manifest has no digests, expected those of a loaded source")
        self._options = options
        self._lock = threading.Lock()
        self._damages = 0
        self._streams = [
            SourceStream(endpoint, manifest, timeouts=options.timeouts, tls=options.tls) for _ in range(options.streams)
        ]

    @property
    def process(self) -> tuple[str, str, int]:
        """What tells the process that serves this rank from others."""
        return self.endpoint.instance_id, self.endpoint.url, self.endpoint.generation

    def connect(self) -> None:
        try:
            for stream in self._streams:
                stream.connect()
        except SourceError as error:
            self._give_up(error)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def threads(self, ledger: Ledger, work: _Work) -> list[threading.Thread]:
        """One thread for each stream, not started. The lane is given up when the last of them fails."""
        running = [len(self._streams)]

        def run(stream: SourceStream) -> None:
            try:
                self._drive(stream, ledger, work)
            except (CancelledError, DeadlineError):
                stream.close()
            except SourceStalledError as error:
                stream.close()
                # A process that is stopped says nothing on any stream, nor for any of its ranks: to wait for each of
                # them in turn would take minutes.
                for lane in self.neighbours:
                    lane._give_up(error)
            except TransferError as error:
                stream.close()
                with self._lock:
                    running[0] -= 1
                    last = not running[0]
                if last or not _may_pass(error):
                    self._give_up(error)
            except Exception as error:
                stream.close()
                logger.exception("%s: stream ended by a fault of ours", self.endpoint)
                self._give_up(SourceError(f"{self.endpoint}: {type(error).__name__}: {error}"))

        name = f"weightwire-pull-{self.endpoint.instance_id}-{self.endpoint.rank}"
        return [threading.Thread(target=run, args=(stream,), name=name) for stream in self._streams]

    def _drive(self, stream: SourceStream, ledger: Ledger, work: _Work) -> None:
        """Claim and fetch until nothing is left, or this stream's patience is over."""
        reconnects = 0
        broke_without_progress = False
        busy_s = 0.0
        while self.error is None and (claim := ledger.claim(timeout_s=work.control.remaining_s)):
            fetch = _Fetch(claim, self, work)
            try:
                fetch.run(stream)
            except SourceBusyError as error:
                wait_s = _seconds(error)
                busy_s += wait_s
                if busy_s > self._options.busy_patience_s:
                    raise
                fetch.settle(ledger)
                work.control.pause(wait_s)
            except (ChecksumError, ProtocolError) as error:
                # A bit that flipped on the way spoils a frame's header as well as its payload.
                self._count_damage(error)
            except (SourceUnreachableError, SourceStalledError) as error:
                reconnects += 1
                stuck = broke_without_progress and not fetch.verified
                broke_without_progress = not fetch.verified
                if isinstance(error, SourceStalledError) or stuck or reconnects > _MAX_RECONNECTS:
                    raise
            finally:
                fetch.settle(ledger)
            if fetch.verified:
                busy_s = 0.0

    def _count_damage(self, error: ChecksumError | ProtocolError) -> None:
        with self._lock:
            self._damages += 1
            quarantined = self._damages >= _MAX_DAMAGES
        logger.warning("%s", error)
        if quarantined:
            self._give_up(error)

    def _give_up(self, error: TransferError) -> None:
        with self._lock:
            if self.error is None:
                self.error = error
        self.abort()


class _Fetch:
    """One claim on its way through one stream.

    Attributes:
        verified: Bytes so far.
    """

    def __init__(self, claim: list[Segment], lane: _Lane, work: _Work) -> None:
        self.verified = 0
        self._claim = claim
        self._lane = lane
        self._work = work
        self._chunks: list[int] = []
        self._reported = 0
        self._settled = False

    def run(self, stream: SourceStream) -> None:
        for frame in stream.fetch(self._claim, self._work.shells):
            self.verified += frame.nbytes
            if frame.chunk is not None:
                self._chunks.append(frame.chunk)
            if self.verified - self._reported >= _REPORT_BYTES:
                self._report()
            self._work.control.check()
            if self._lane.error is not None:
                raise self._lane.error

    def settle(self, ledger: Ledger) -> None:
        """Record what is verified, and give back the rest; once, however often it is called."""
        if self._settled:
            return
        self._settled = True
        self._work.coverage.add(Places(self._claim).take(self.verified), self._chunks, self._lane)
        # Before the report, which calls what is not ours: if it raises, nobody must wait for this claim.
        ledger.settle(self._claim, verified_bytes=self.verified)
        self._report()

    def _report(self) -> None:
        if self.verified > self._reported:
            self._work.on_bytes(self.verified - self._reported)
            self._reported = self.verified


def _may_pass(error: TransferError) -> bool:
    """True for what may be one connection's trouble; anything else is the source's."""
    return isinstance(error, (SourceUnreachableError, SourceBusyError))


def _seconds(busy: SourceBusyError) -> float:
    stated = busy.facts.get("retry_after_s", 1)
    # Compared before it becomes a float: a document from elsewhere may state a number of a thousand digits.
    return float(min(max(0.05, stated), 86400)) if isinstance(stated, (int, float)) else 1.0
