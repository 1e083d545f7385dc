"""What Prometheus is told, from a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from weightwire.service.grants import Transfer
from weightwire.transfer import errors
from weightwire.transfer.errors import TransferError
from weightwire.transfer.session import TransferState

_CODES = frozenset(
    kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransferError)
)
_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is true at this moment.

    Attributes:
        transfers: Known transfers, by state.
        active_readers: Running grants: pairs of a transfer and a source instance.
        leases: Ranks whose lease is live.
        quarantined: Why sources are in quarantine, as codes by instance.
    """

    transfers: Mapping[TransferState, int]
    active_readers: int
    leases: int
    quarantined: Mapping[str, str]


class Metrics:
    """Counters that grow with events, and gauges that are read when somebody asks."""

    def __init__(self, read_figures: Callable[[], Figures]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(read_figures))
        self._bytes = Counter(
            "weightwire_bytes",
            "Shell bytes that targets have reported as filled, by origin; each byte once.",
            ["origin"],
            registry=self._registry,
        )
        self._errors = Counter(
            "weightwire_errors",
            "Errors that were answered, and errors that ended transfers, by code.",
            ["code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "weightwire_transfer_seconds",
            "Seconds from the grant to ready.",
            buckets=_SECONDS_BUCKETS,
            registry=self._registry,
        )
        # From the start, since a rate needs the zero before the first byte.
        for origin in ("peer", "disk"):
            self._bytes.labels(origin)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format; reads the store."""
        return generate_latest(self._registry)

    def error_seen(self, code: str) -> None:
        # Ranks report codes of their own; only known ones become labels.
        self._errors.labels(code if code in _CODES else "transfer_failed").inc()

    def transfer_changed(self, before: Transfer, after: Transfer) -> None:
        """Count what a stored change added."""
        for rank, progress in after.session.ranks.items():
            earlier = before.session.ranks[rank]
            self._bytes.labels("peer").inc(progress.bytes_peer - earlier.bytes_peer)
            self._bytes.labels("disk").inc(progress.bytes_disk - earlier.bytes_disk)
        # An ended transfer does not change any more, so its end is seen once.
        if not after.state.is_final:
            return
        if after.state is TransferState.READY and after.ended_at is not None:
            self._seconds.observe(after.seconds(after.ended_at))
        else:
            self.error_seen(after.session.error_code or after.state.value)


class _Gauges(Collector):
    def __init__(self, read_figures: Callable[[], Figures]) -> None:
        self._read_figures = read_figures

    def describe(self) -> list[GaugeMetricFamily]:
        # Registering must not read the store, which is what the default does.
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures = self._read_figures()
        transfers = GaugeMetricFamily("weightwire_transfers", "Known transfers, by state.", labels=["state"])
        for state in TransferState:
            transfers.add_metric([state.value], figures.transfers.get(state, 0))
        yield transfers
        yield GaugeMetricFamily(
            "weightwire_active_readers", "Running grants: pairs of transfer and source.", figures.active_readers
        )
        yield GaugeMetricFamily("weightwire_leases", "Ranks whose lease is live.", figures.leases)
        quarantined = GaugeMetricFamily(
            "weightwire_quarantined", "Sources in quarantine, by what was reported.", labels=["instance_id", "code"]
        )
        for instance_id, code in sorted(figures.quarantined.items()):
            quarantined.add_metric([instance_id, code], 1)
        yield quarantined
