"""A transfer as a value: what a target was granted, and how far it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from weightwire.service.instances import Instance
from weightwire.service.matching import Reason
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, Session, TransferState
from weightwire.transfer.tickets import Ticket

SourceKey: TypeAlias = tuple[str, int]

# Sources compare a ticket's expiry with clocks of their own.
_CLOCK_SKEW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedSource:
    """A source rank that target ranks may read from, as it was when the transfer was granted."""

    instance_id: str
    epoch: int
    rank: int
    generation: int
    url: str
    weight_version: int
    manifest_digest: str
    certificate_sha256: str | None = None

    @property
    def key(self) -> SourceKey:
        return self.instance_id, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedInstance:
    """A source instance, with all of its ranks in their order.

    Attributes:
        relay: Whether it was still receiving itself; then it is of the target's topology, and gives each rank to that
            of the same number alone.
        standby: Its tier: it is read once the sources of all lower tiers are given up.
    """

    topology: Topology
    ranks: tuple[GrantedSource, ...]
    relay: bool = False
    standby: int = 0

    @property
    def instance_id(self) -> str:
        return self.ranks[0].instance_id

    def in_order_for(self, target_rank: int, topology: Topology) -> list[GrantedSource]:
        """The ranks as a rank of another topology, or of the same one, should look at them."""
        if self.relay:
            return [source for source in self.ranks if source.rank == target_rank]
        twin = target_rank if topology == self.topology else None
        return sorted(self.ranks, key=lambda source: (source.rank != twin, source.rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRank:
    """One rank of the target: the process that takes, and what it has read.

    Attributes:
        nbytes_read: By id and rank of the source; a source that it has read nothing from is not in it.
    """

    rank: int
    generation: int
    nbytes_read: dict[str, dict[int, int]] = field(default_factory=dict)

    def nbytes_from(self, source: GrantedSource) -> int:
        return self.nbytes_read.get(source.instance_id, {}).get(source.rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer. Times are in seconds since 1970.

    Attributes:
        revision: What the sources hold; None if there is no source and none was asked for.
        ranks: The target's, in order of rank.
        instances: The sources, best first. Every target rank may read from every rank of them; they are kept once, and
            tickets are derived from them, so that a transfer does not grow with the product of both.
        sequence: Grows with each change.
        request_digest: Of the request that made it: a repeated request is known by it.
        relay: Whether the target serves what it has verified while it receives the rest.
    """

    transfer_id: str
    model: str
    revision: str | None
    weight_version: int | None
    topology: Topology
    target_instance: str
    target_epoch: int
    ranks: tuple[TargetRank, ...]
    instances: tuple[GrantedInstance, ...]
    reasons: tuple[Reason, ...]
    created_at: float
    deadline_at: float
    request_digest: str
    relay: bool = False
    idempotency_key: str | None = None
    ended_at: float | None = None
    sequence: int = 1
    session: Session = field(default_factory=Session)

    @property
    def state(self) -> TransferState:
        return self.session.state

    @property
    def sources(self) -> Iterator[GrantedSource]:
        """Every source rank once: instance by instance, best first, in order of rank."""
        return (source for instance in self.instances for source in instance.ranks)

    def sources_of(self, target_rank: int) -> Iterator[GrantedSource]:
        """What one target rank may read from: instance by instance, its own number first where that is its twin."""
        for instance in self.instances:
            yield from instance.in_order_for(target_rank, self.topology)

    @property
    def source_instances(self) -> frozenset[str]:
        return frozenset(source.instance_id for source in self.sources)

    def twin(self, rank: int) -> GrantedSource | None:
        """The best source that lies in memory as a rank of the target does, if it is laid out as the source is."""
        return next(
            (
                source
                for instance in self.instances
                if instance.topology == self.topology
                for source in instance.ranks
                if source.rank == rank
            ),
            None,
        )

    def nbytes_from(self, instance_id: str) -> int:
        """What all target ranks have read from an instance."""
        return sum(sum(rank.nbytes_read.get(instance_id, {}).values()) for rank in self.ranks)

    def seconds(self, now: float) -> float:
        """How long it has been running, or ran."""
        return (now if self.ended_at is None else self.ended_at) - self.created_at

    def ticket(self, target_rank: int, source: GrantedSource) -> Ticket:
        """What the ticket says with which a target rank reads from a source."""
        return Ticket(
            transfer_id=self.transfer_id,
            source_instance=source.instance_id,
            source_rank=source.rank,
            source_generation=source.generation,
            target_instance=self.target_instance,
            target_rank=target_rank,
            weight_version=source.weight_version,
            expires_at=self.deadline_at + _CLOCK_SKEW_S,
        )

    def moved_to(self, session: Session, *, now: float) -> Transfer:
        """The transfer after its session has changed; the same value if it has not."""
        if session == self.session:
            return self
        ended_at = now if session.state.is_final else None
        return replace(self, session=session, ended_at=ended_at, sequence=self.sequence + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Mean rate of a transfer or of one rank since the grant, and the time left at that rate.

    Attributes:
        bytes_per_s: None before any time has passed.
        eta_s: None where nothing is known: no byte has come, the total is not known, or it is over.
    """

    bytes_per_s: float | None
    eta_s: float | None

    @classmethod
    def of(cls, *, done: int, total: int, seconds: float, is_final: bool) -> Rate:
        # The mean since the grant, not a window: a transfer that stalls is seen to slow down, without any state.
        per_s = done / seconds if seconds > 0 else None
        known = bool(per_s) and total > 0 and not is_final
        return cls(bytes_per_s=per_s, eta_s=max(total - done, 0) / per_s if per_s and known else None)


def bytes_done(progress: RankProgress) -> int:
    return progress.bytes_peer + progress.bytes_disk


def granted_instance(instance: Instance, *, standby: int = 0) -> GrantedInstance:
    """What a transfer keeps of an instance that `choose_sources` took."""
    ranks = []
    for _, process in sorted(instance.ranks.items()):
        assert process.url is not None, "choose_sources takes sources that serve"
        assert process.publication is not None, "choose_sources takes sources that have published"
        ranks.append(
            GrantedSource(
                instance_id=instance.instance_id,
                epoch=instance.epoch,
                rank=process.rank,
                generation=process.generation,
                url=process.url,
                weight_version=process.publication.weight_version,
                manifest_digest=process.publication.digest,
                certificate_sha256=process.certificate_sha256,
            )
        )
    return GrantedInstance(topology=instance.topology, ranks=tuple(ranks), standby=standby)


def granted_relay(
    transfer: Transfer, instance: Instance, ranks: Collection[int], *, now: float
) -> GrantedInstance | None:
    """What the target of a running transfer can give to these ranks of another one; None if it can not.

    Each of its ranks will hold what its twin at the source holds: that is the manifest under which it serves.
    """
    found = []
    for target in transfer.ranks:
        process, twin = instance.ranks.get(target.rank), transfer.twin(target.rank)
        if target.rank not in ranks:
            continue
        if process is None or process.generation != target.generation or not process.is_live(now):
            return None
        if process.url is None or twin is None:
            return None
        found.append(
            replace(
                twin,
                instance_id=instance.instance_id,
                epoch=instance.epoch,
                generation=process.generation,
                url=process.url,
            )
        )
    if not transfer.relay or transfer.state.is_final or len(found) != len(ranks):
        return None
    return GrantedInstance(topology=transfer.topology, ranks=tuple(found), relay=True)
