"""What the service says of instances and transfers, as values: who holds what, who feeds whom, and how fast. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias, cast

Json: TypeAlias = Mapping[str, object]

_FINAL = ("ready", "failed", "cancelled")
# Reports come a few times a second, each with whole steps of bytes: a shorter window would make rates jump.
_WINDOW_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance.

    Attributes:
        reason: Why it cannot serve; None if it can.
        version: Of its weights, where all ranks have published the same one.
        lease_s: Until the first of its leases runs out; less than 0 once one has.
        readers: Running transfers that read from it.
    """

    instance_id: str
    model: str
    revision: str
    topology: str
    state: str
    reason: str | None
    version: int | None
    lease_s: float | None
    readers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedView:
    """What a source instance gives to a transfer.

    Attributes:
        nbytes: So far, as far as it was reported.
        standby: 0 is read from at once; a higher tier once all lower ones are lost.
        relay: It is still receiving what it gives.
    """

    instance_id: str
    nbytes: int
    standby: int
    relay: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of a target."""

    rank: int
    state: str
    bytes_done: int
    bytes_total: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView:
    """One transfer.

    Attributes:
        bytes_disk: Of those that are done, what came from the local checkpoint.
        mean_rate: Bytes a second since the grant; None before any time has passed.
        feeds: Source instances, best first.
        error: Code and detail.
        reasons: Why other instances were not taken, by instance.
    """

    transfer_id: str
    target: str
    model: str
    version: int | None
    state: str
    seconds: float
    bytes_done: int
    bytes_disk: int
    bytes_total: int
    mean_rate: float | None
    feeds: Sequence[FeedView]
    ranks: Sequence[RankView]
    error: str | None
    reasons: Mapping[str, str]

    @property
    def is_running(self) -> bool:
        return self.state not in _FINAL

    @property
    def feeding(self) -> Iterator[FeedView]:
        """Those that give something, or would be asked first."""
        return (feed for feed in self.feeds if feed.nbytes or feed.standby == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All that the service said at one moment.

    Attributes:
        at: Seconds since 1970.
        transfers: Newest first.
    """

    at: float
    instances: Sequence[InstanceView]
    transfers: Sequence[TransferView]

    @classmethod
    def of(cls, instances: Sequence[Json], transfers: Sequence[Json], *, at: float) -> Fleet:
        """From the answers of the API."""
        seen = [transfer_view(transfer) for transfer in transfers]
        readers = Counter(feed.instance_id for view in seen if view.is_running for feed in view.feeding)
        return cls(at=at, instances=[_instance(item, readers, at) for item in instances], transfers=seen)

    @property
    def running(self) -> list[TransferView]:
        return [transfer for transfer in self.transfers if transfer.is_running]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes a second, now.

    Attributes:
        transfers: By transfer.
        feeds: By transfer and source instance; what was not measured is not in it.
    """

    transfers: Mapping[str, float] = field(default_factory=dict)
    feeds: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, transfer: TransferView) -> float | None:
        """Of a transfer: as measured, or the mean since the grant."""
        if transfer.is_running and transfer.transfer_id in self.transfers:
            return self.transfers[transfer.transfer_id]
        return transfer.mean_rate


class RateMeter:
    """Measures rates over the last seconds of what it is shown."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, deque[tuple[float, int]]] = {}

    def observe(self, fleet: Fleet) -> Rates:
        """Take the newest figures; what is not running any more is forgotten."""
        counts: dict[Hashable, int] = {}
        for transfer in fleet.running:
            counts[transfer.transfer_id] = transfer.bytes_done
            for feed in transfer.feeds:
                counts[transfer.transfer_id, feed.instance_id] = feed.nbytes
        self._seen = {key: self._seen.get(key, deque()) for key in counts}
        rates = {key: rate for key, count in counts.items() if (rate := self._rate(key, fleet.at, count)) is not None}
        return Rates(
            transfers={key: rate for key, rate in rates.items() if isinstance(key, str)},
            feeds={key: rate for key, rate in rates.items() if isinstance(key, tuple)},
        )

    def _rate(self, key: Hashable, at: float, count: int) -> float | None:
        points = self._seen[key]
        points.append((at, count))
        while points[0][0] < at - _WINDOW_S and len(points) > 2:
            points.popleft()
        (began, before), passed = points[0], at - points[0][0]
        return (count - before) / passed if passed > 0 and began < at else None


def transfer_view(item: Json) -> TransferView:
    """A transfer as the API has it."""
    feeds: dict[str, FeedView] = {}
    for source in _items(item, "sources"):
        name = str(source["instance_id"])
        before = feeds.get(name)
        feeds[name] = FeedView(
            instance_id=name,
            nbytes=_int(source["bytes"]) + (before.nbytes if before else 0),
            standby=_int(source.get("standby") or 0),
            relay=bool(source.get("relay")),
        )
    return TransferView(
        transfer_id=str(item["transfer_id"]),
        target=str(item["target_instance_id"]),
        model=str(item["model"]),
        version=cast("int | None", item["weight_version"]),
        state=str(item["state"]),
        seconds=cast(float, item["seconds"]),
        bytes_done=_int(item["bytes_peer"]) + _int(item["bytes_disk"]),
        bytes_disk=_int(item["bytes_disk"]),
        bytes_total=_int(item["bytes_total"]),
        mean_rate=cast("float | None", item["rate_bytes_per_s"]),
        feeds=tuple(feeds.values()),
        ranks=tuple(map(_rank, _items(item, "ranks"))),
        error=_error(item),
        reasons={str(reason["instance_id"]): str(reason["reason"]) for reason in _items(item, "reasons")},
    )


def _rank(item: Json) -> RankView:
    return RankView(
        rank=_int(item["rank"]),
        state=str(item["state"]),
        bytes_done=_int(item["bytes_peer"]) + _int(item["bytes_disk"]),
        bytes_total=_int(item["bytes_total"]),
        error=_error(item),
    )


def _instance(item: Json, readers: Mapping[str, int], at: float) -> InstanceView:
    ranks = _items(item, "ranks")
    versions = {cast("Json", rank["published"])["weight_version"] for rank in ranks if rank["published"]}
    leases = [datetime.fromisoformat(str(rank["expires_at"])).timestamp() - at for rank in ranks]
    name = str(item["instance_id"])
    return InstanceView(
        instance_id=name,
        model=str(item["model"]),
        revision=str(item["revision"] or ""),
        topology=_topology(cast(Json, item["topology"])),
        state=str(item["state"]),
        reason=cast("str | None", item["reason"]),
        version=_int(versions.pop()) if len(versions) == 1 else None,
        lease_s=min(leases, default=None),
        readers=readers.get(name, 0),
    )


def _topology(sizes: Json) -> str:
    """`tp=8,ep=8`, as the command line has it; sizes of 1 are left out, all of them but tp."""
    named = [f"{name}={sizes[name]}" for name in ("tp", "pp", "ep") if sizes[name] != 1]
    return ",".join(named) or "tp=1"


def _error(item: Json) -> str | None:
    error = cast("Json | None", item["error"])
    return None if error is None else f"{error['code']}: {error['detail']}"


def _items(value: Json, name: str) -> list[Json]:
    return cast("list[Json]", value[name])


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
