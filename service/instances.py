"""Instances as values: who they are, which of their ranks live, and whether they can serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from weightwire.transfer.errors import ConflictError, NotFoundError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.wire.limits import LimitOverrides


class InstanceState(StrEnum):
    """Whether an instance can be a source now."""

    READY = "ready"
    INCOMPLETE = "incomplete"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What one rank has published: a manifest by its digest, at a weight version."""

    weight_version: int
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process that speaks for a rank.

    Attributes:
        generation: New for each process start; a higher one replaces a lower one.
        url: Where it serves; None while it only takes.
        certificate_sha256: Fingerprint of the certificate that is met there; None leaves that to authorities.
        lease_s: Length of its lease.
        renewed_at: When it was heard of last. Times are in seconds since 1970.
        expires_at: When the lease runs out.
        publication: What it holds; None until it publishes.
        host: The machine that it was registered from; None if it is not known, or this one.
    """

    rank: int
    generation: int
    url: str | None
    lease_s: float
    renewed_at: float
    expires_at: float
    publication: Publication | None = None
    certificate_sha256: str | None = None
    host: str | None = None

    def is_live(self, now: float) -> bool:
        return now < self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One deployment of one model.

    Attributes:
        revision: None as long as the instance does not know it (a target that takes whatever is there).
        epoch: All ranks of an instance share it; a higher one replaces the instance wholly.
        ranks: The processes that registered, by rank.
        limits: What somebody set at run time; each of its processes keeps them by itself.
    """

    instance_id: str
    model: str
    revision: str | None
    topology: Topology
    epoch: int
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    limits: LimitOverrides = field(default_factory=LimitOverrides)

    @property
    def expires_at(self) -> float:
        """When the last of the leases runs out."""
        return max((process.expires_at for process in self.ranks.values()), default=-math.inf)

    @property
    def weight_version(self) -> int | None:
        """The version that all ranks have published; None if they have not, or differ."""
        published = [process.publication for process in self.ranks.values()]
        versions = {None if publication is None else publication.weight_version for publication in published}
        return versions.pop() if len(versions) == 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes that the ranks have published, together."""
        return sum(process.publication.nbytes for process in self.ranks.values() if process.publication)

    @property
    def digests(self) -> tuple[str, ...]:
        """The manifests that the ranks have published, in order of rank."""
        published = (self.ranks[rank].publication for rank in sorted(self.ranks))
        return tuple(publication.digest for publication in published if publication)

    def state(self, now: float) -> InstanceState:
        if self.expires_at <= now:
            return InstanceState.EXPIRED
        if self.why_no_source(now) is None:
            return InstanceState.READY
        return InstanceState.PAUSED if self._why_incomplete(now) is None else InstanceState.INCOMPLETE

    def why_no_source(self, now: float) -> str | None:
        """What keeps the instance from serving, in words; None if it can serve."""
        if (reason := self._why_incomplete(now)) is not None:
            return reason
        return "takes no readers: its limit was set to 0" if self.limits.max_readers == 0 else None

    def _why_incomplete(self, now: float) -> str | None:
        # In order of rank, so that the same state gives the same reason.
        version: int | None = None
        for rank in range(self.topology.world_size):
            process = self.ranks.get(rank)
            if process is None:
                return f"rank {rank} has not registered"
            if not process.is_live(now):
                return f"the lease of rank {rank} ran out {now - process.expires_at:.1f} s ago"
            if process.url is None:
                return f"rank {rank} does not serve"
            if process.publication is None:
                return f"rank {rank} has published nothing"
            published = process.publication.weight_version
            if version not in (None, published):
                return f"weight version is {published} on rank {rank}, {version} on rank 0"
            version = published
        return None

    def process(self, rank: int, *, generation: int | None) -> RankProcess:
        """The process that speaks for a rank, whether its lease is live or not; None takes any generation.

        Raises:
            NotFoundError: If nobody speaks for the rank.
            ConflictError: If another process speaks for it.
        """
        found = self.ranks.get(rank)
        if found is None:
            raise NotFoundError(f"{self._name(rank)}: not registered", kind="rank", name=str(rank))
        if generation not in (None, found.generation):
            raise ConflictError(
                f"{self._name(rank)}: generation {generation}, but the current one is {found.generation}",
                current_generation=found.generation,
            )
        return found

    def live_process(self, rank: int, *, generation: int, now: float) -> RankProcess:
        """The process that speaks for a rank.

        Raises:
            NotFoundError: If nobody speaks for the rank, or the lease ran out.
            ConflictError: If another process speaks for it.
        """
        found = self.process(rank, generation=generation)
        if not found.is_live(now):
            raise NotFoundError(f"{self._name(rank)}: its lease ran out; register again", kind="rank", name=str(rank))
        return found

    def check_epoch(self, epoch: int) -> None:
        """Check that a caller speaks of this epoch.

        Raises:
            ConflictError: If it does not.
        """
        if epoch != self.epoch:
            raise ConflictError(
                f"instance {self.instance_id!r}: epoch {epoch}, but the current one is {self.epoch}",
                current_epoch=self.epoch,
            )

    def with_process(self, process: RankProcess) -> Instance:
        """Let a process speak for its rank, or renew its lease; a publication outlives a renewal only.

        Raises:
            ConflictError: If a newer process speaks for the rank already.
        """
        known = self.ranks.get(process.rank)
        # Also after the newer one's lease ran out: a process that was replaced must not revive itself.
        if known is not None and process.generation < known.generation:
            raise ConflictError(
                f"{self._name(process.rank)}: generation {process.generation} is stale, "
                f"the current one is {known.generation}",
                current_generation=known.generation,
            )
        if known is not None and process.generation == known.generation:
            process = replace(process, publication=known.publication)
        return replace(self, ranks={**self.ranks, process.rank: process})

    def without(self, process: RankProcess) -> Instance:
        return replace(self, ranks={rank: other for rank, other in self.ranks.items() if rank != process.rank})

    def _name(self, rank: int) -> str:
        return f"instance {self.instance_id!r} rank {rank}"
