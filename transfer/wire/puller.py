"""Fills shells from several sources at once, over several streams each.

The streams share a ledger for each manifest. A source that fails loses its unverified segments to the others; what
was verified stays, and is never fetched again.
"""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightwire.transfer.control import Control
from weightwire.transfer.errors import TransferError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Plan
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.connecting import Network
from weightwire.transfer.wire.coverage import Coverage
from weightwire.transfer.wire.lanes import Lane, Work
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.rounds import Patience, Round, in_turn
from weightwire.transfer.wire.stream import Endpoint, SourceStream, Timeouts

# How often a round ends early to be planned again. Each time what is left to win is less.
_MAX_EARLY_ENDS = 8
# Two shares that differ by less are equal: measured rates are not more precise.
_RATE_DIGITS = 2
_LEAST_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """How hard to pull.

    Attributes:
        streams: Connections to each source; to one that is still receiving what it serves, one.
        busy_patience_s: How long a source may answer 503, or say that it waits, before it is given up.
        min_rate_bytes_per_s: A source that delivers less is given up.
        stall_window_s: After so long, if others, or the disk, have what it has; else after `timeouts.stall_s`.
        pipelined: Fetch in rising order, in short claims, for others who read what is there already.
        tls: Trust for sources on https; by default the system's, or for a source with a fingerprint only that.
        network: Proxies and sockets.
    """

    streams: int = 2
    timeouts: Timeouts = field(default_factory=Timeouts)
    busy_patience_s: float = 30.0
    min_rate_bytes_per_s: float = 64 << 10
    stall_window_s: float = 1.5
    pipelined: bool = False
    tls: ssl.SSLContext | None = None
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailure:
    """Why a source was given up."""

    instance_id: str
    rank: int
    code: str
    detail: str


class Puller:
    """Executes plans against the sources of one transfer. Use as a context manager: leaving it ends its threads."""

    def __init__(
        self,
        shells: Shells,
        endpoints: Sequence[Endpoint],
        manifests: Mapping[str, Manifest],
        options: PullOptions | None = None,
        *,
        has_spare: bool = False,
        on_failure: Callable[[SourceFailure], None] = lambda _: None,
    ) -> None:
        """Args:
        shells: Written.
        endpoints: In order of preference.
        manifests: By digest; has that of every endpoint.
        has_spare: What no source delivers can be had elsewhere, so none has to be waited for.
        on_failure: Told of each source that is given up, when it is; from any thread.
        """
        self.options = options or PullOptions()
        self.coverage = Coverage()
        self.failures: list[SourceFailure] = []
        self._shells = shells
        self._manifests = manifests
        self._has_spare = has_spare
        self._on_failure = on_failure
        self._failing = threading.Lock()
        self._early_ends = 0
        self._digests = list(dict.fromkeys(endpoint.manifest for endpoint in endpoints))
        timeouts = self._timeouts(endpoints)
        self._lanes = [self._lane(endpoint, timeouts) for endpoint in endpoints]
        for lane in self._lanes:
            lane.neighbours = [other for other in self._lanes if other.process == lane.process]

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
        """For each manifest, how many sources give it now; 0 if all that hold it were given up."""
        given = Counter(lane.endpoint.manifest for lane in self._active())
        return [given[digest] for digest in self._digests]

    @property
    def rates(self) -> list[float] | None:
        """For each manifest, how fast its sources were, taken together, as a part of the fastest; None if not known."""
        lanes = self._active()
        if not any(lane.rate for lane in lanes):
            return None
        known = [lane.rate for lane in lanes if lane.rate]
        found = Counter[str]()
        for lane in lanes:
            found[lane.endpoint.manifest] += lane.rate or sum(known) / len(known)  # type: ignore[assignment]
        most = max(found.values())
        return [max(round(found[digest] / most, _RATE_DIGITS), _LEAST_RATE) for digest in self._digests]

    @property
    def bytes_received(self) -> int:
        """Bytes of all answers' bodies, whatever became of them."""
        return sum(stream.meter.received for lane in self._lanes for stream in lane.streams)

    def connect(self, plan: Plan) -> None:
        """Open the connections that `plan` needs now; a source that is not there is given up."""
        # All at once: hosts that are gone would let each other wait, and the living ones, too.
        threads = [
            threading.Thread(target=lane.connect, name=f"weightwire-connect-{lane.endpoint.instance_id}")
            for lane in self._active()
            if plan.copies[self._digests.index(lane.endpoint.manifest)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def pull(self, plan: Plan, control: Control, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
        """Fetch what `plan` wants from the live sources.

        Returns when everything is verified, every source that could help has failed, or some sources are through so
        long before others that it is better to plan again; `coverage` and `failures` say what is done.

        Args:
            plan: Of `manifests`.
            control: Deadline and stop button.
            on_bytes: Called from the streams' threads with the bytes that were verified since the last call.

        Returns:
            Whether it ended early, to be planned again.

        Raises:
            CancelledError: If somebody stopped it.
            DeadlineError: If its time is over.
        """
        options = self.options
        ledgers = {
            digest: self._ledger(digest, plan)
            for digest, copies in zip(self._digests, plan.copies, strict=True)
            if copies
        }
        step = {"step_bytes": 1} if options.pipelined else {}
        round_ = Round(
            lanes=[lane for lane in self._lanes if lane.endpoint.manifest in ledgers],
            ledgers=ledgers,
            work=Work(shells=self._shells, coverage=self.coverage, control=control, on_bytes=on_bytes, **step),
            patience=Patience(
                min_rate=options.min_rate_bytes_per_s,
                window_s=options.stall_window_s,
                alone_s=max(options.timeouts.stall_s, options.stall_window_s),
                waiting_s=max(options.busy_patience_s, options.stall_window_s),
                first_byte_s=options.timeouts.first_byte_s,
            ),
            has_spare=self._has_spare,
            may_end_early=len(ledgers) > 1 and self._early_ends < _MAX_EARLY_ENDS,
        )
        round_.run()
        self._early_ends += round_.ended_early
        self.coverage.settle_partial()
        control.check()
        return round_.ended_early

    def _ledger(self, digest: str, plan: Plan) -> Ledger:
        lanes = [lane for lane in self._active() if lane.endpoint.manifest == digest]
        return Ledger(
            self._manifests[digest],
            plan.copies[self._digests.index(digest)],
            num_streams=max(1, sum(len(lane.streams) for lane in lanes)),
            num_sources=len(lanes),
            pipelined=self.options.pipelined or any(lane.endpoint.relay for lane in lanes),
        )

    def _active(self) -> list[Lane]:
        """The lanes that are read now: of each manifest, those of the lowest tier that has any left."""
        live = [lane for lane in self._lanes if lane.error is None]
        return [
            lane
            for digest in self._digests
            for lane in in_turn([lane for lane in live if lane.endpoint.manifest == digest])
        ]

    def _timeouts(self, endpoints: Sequence[Endpoint]) -> Timeouts:
        """Where others can deliver a host that swallows all packets is not waited for longer than a process that says
        nothing."""
        timeouts = self.options.timeouts
        if len({(endpoint.instance_id, endpoint.url) for endpoint in endpoints}) < 2 and not self._has_spare:
            return timeouts
        return replace(timeouts, connect_s=min(timeouts.connect_s, self.options.stall_window_s))

    def _lane(self, endpoint: Endpoint, timeouts: Timeouts) -> Lane:
        manifest = self._manifests[endpoint.manifest]
        # What a relay has grows at one end: two streams of one reader would only wait for each other.
        num_streams = 1 if endpoint.relay else self.options.streams
        streams = [
            SourceStream(endpoint, manifest, timeouts=timeouts, tls=self.options.tls, network=self.options.network)
            for _ in range(num_streams)
        ]
        patience_s = self.options.busy_patience_s
        return Lane(endpoint, manifest, streams, busy_patience_s=patience_s, on_given_up=self._take_down)

    def _take_down(self, endpoint: Endpoint, error: TransferError) -> None:
        failure = SourceFailure(
            instance_id=endpoint.instance_id, rank=endpoint.rank, code=error.code, detail=str(error)
        )
        with self._failing:
            if any((known.instance_id, known.rank) == (failure.instance_id, failure.rank) for known in self.failures):
                return
            self.failures.append(failure)
        self._on_failure(failure)
