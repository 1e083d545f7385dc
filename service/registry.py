"""Who is there, and what they say that they hold: instances with leases."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from weightwire.service.addresses import check_certificate, check_dialable, check_endpoint, resolve_name
from weightwire.service.instances import Instance, Publication, RankProcess
from weightwire.service.manifests import ManifestFacts, Manifests, PackedManifest
from weightwire.service.records import Table
from weightwire.service.store import Store, Transaction
from weightwire.transfer.address import is_loopback
from weightwire.transfer.errors import ConflictError, ManifestError, NotFoundError, RequestError
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.tickets import Ticket, derive_source_key, issue_ticket
from weightwire.transfer.wire.limits import LimitOverrides

INSTANCES = Table("instance", Instance)
_TICKET_KEY_BYTES = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClaim:
    """A process that says which rank it is, where it serves (None: it does not), and with which certificate."""

    rank: int
    generation: int
    url: str | None
    certificate_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a caller registers: the instance, and the ranks that it speaks for.

    Attributes:
        lease_s: None for the service's own.
        peer_host: Address that the caller connected from; None if unknown.
        limits: As a service told it last, for one that has forgotten them.
    """

    instance_id: str
    model: str
    revision: str | None
    epoch: int
    topology: Topology
    ranks: tuple[RankClaim, ...]
    lease_s: float | None = None
    peer_host: str | None = None
    limits: LimitOverrides = field(default_factory=LimitOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a rank process says that it holds; `manifest` is None if the service may know the digest."""

    epoch: int
    generation: int
    weight_version: int
    digest: str
    manifest: Manifest | None


class Registry:
    """Instances in a store. Every method is one transaction, and may block."""

    def __init__(
        self,
        store: Store,
        manifests: Manifests,
        *,
        clock: Callable[[], float] = time.time,
        lease_s: float = 15.0,
        resolve: Callable[[str], Iterable[str]] = resolve_name,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._clock = clock
        self._lease_s = lease_s
        self._resolve = resolve
        self._master_key = self._read_master_key()

    def resume(self, *, grace_s: float) -> None:
        """Prolong leases after a restart: nobody could renew while the service was away.

        A lease that had run out before the last sign of life in the store stays run out.
        """
        now = self._clock()
        with self._store.transaction() as transaction:
            instances = INSTANCES.scan(transaction)
            processes = [process for instance in instances for process in instance.ranks.values()]
            # The service lived at the last renewal, so a lease that had run out by then ran out before its eyes.
            last_sign = max((process.renewed_at for process in processes), default=now)
            for instance in instances:
                ranks = {
                    process.rank: replace(process, expires_at=max(process.expires_at, now + grace_s))
                    if process.expires_at > last_sign
                    else process
                    for process in instance.ranks.values()
                }
                INSTANCES.put(transaction, instance.instance_id, replace(instance, ranks=ranks))

    def register(self, registration: Registration) -> Instance:
        """Register an instance or some of its ranks, or renew their leases.

        Raises:
            RequestError: If a rank or URL cannot be right.
            ConflictError: If the epoch or a generation is stale, or the instance is known as something else.
        """
        _check_ranks(registration)
        self._check_urls(registration)
        now = self._clock()
        lease_s = self._lease_s if registration.lease_s is None else registration.lease_s
        host = None if registration.peer_host is None or is_loopback(registration.peer_host) else registration.peer_host
        with self._store.transaction() as transaction:
            # All ranks or none: what one stale process says must not renew the lease of its neighbours.
            instance = _joined(INSTANCES.get(transaction, registration.instance_id), registration)
            for claim in registration.ranks:
                instance = instance.with_process(
                    RankProcess(
                        rank=claim.rank,
                        generation=claim.generation,
                        url=claim.url,
                        certificate_sha256=claim.certificate_sha256,
                        lease_s=lease_s,
                        renewed_at=now,
                        expires_at=now + lease_s,
                        host=host,
                    )
                )
            INSTANCES.put(transaction, instance.instance_id, instance)
        return instance

    def source_key(self, instance_id: str, process: RankProcess) -> bytes:
        """The key with which a process checks tickets for its rank; see `transfer.tickets`."""
        return derive_source_key(
            self._master_key, instance_id=instance_id, rank=process.rank, generation=process.generation
        )

    def sign(self, ticket: Ticket) -> str:
        """A ticket as text, signed with the key of its source process."""
        key = derive_source_key(
            self._master_key,
            instance_id=ticket.source_instance,
            rank=ticket.source_rank,
            generation=ticket.source_generation,
        )
        return issue_ticket(key, ticket)

    def leave(self, instance_id: str, *, epoch: int, rank: int | None = None, generation: int | None = None) -> None:
        """Take an instance, or one rank of it, out at once.

        Args:
            generation: Of the rank, if only this process of it may be taken out.

        Raises:
            NotFoundError: If there is no such instance or rank.
            ConflictError: If the epoch or generation is not the current one.
        """
        with self._store.transaction() as transaction:
            instance = find_instance(transaction, instance_id)
            instance.check_epoch(epoch)
            if rank is not None:
                instance = instance.without(instance.process(rank, generation=generation))
            if rank is None or not instance.ranks:
                INSTANCES.delete(transaction, instance_id)
            else:
                INSTANCES.put(transaction, instance_id, instance)
        logger.info("instance %s left%s", instance_id, "" if rank is None else f" with rank {rank}")

    def set_limits(self, instance_id: str, limits: LimitOverrides) -> Instance:
        """Set what an instance gives at most; its processes hear of it at their next renewal.

        Raises:
            NotFoundError: If it is not known.
        """
        with self._store.transaction() as transaction:
            instance = replace(find_instance(transaction, instance_id), limits=limits)
            INSTANCES.put(transaction, instance_id, instance)
        logger.info("instance %s: limits are set to %s", instance_id, limits)
        return instance

    def instance(self, instance_id: str) -> Instance:
        """One instance.

        Raises:
            NotFoundError: If it is not known.
        """
        with self._store.transaction() as transaction:
            return find_instance(transaction, instance_id)

    def instances(self, *, model: str | None = None) -> list[Instance]:
        """All instances, or those of one model, in order of their ids; also those whose leases ran out."""
        with self._store.transaction() as transaction:
            found = INSTANCES.scan(transaction)
        return [instance for instance in found if model in (None, instance.model)]

    def publish(self, instance_id: str, rank: int, announcement: Announcement) -> bool:
        """Record what a rank holds.

        Returns:
            True if the manifest was new and has been stored.

        Raises:
            NotFoundError: If the rank is not registered, its lease ran out, or the manifest has to be sent.
            ConflictError: If epoch or generation are not the current ones, or the version is older than the
                published one.
            ManifestError: If the manifest has another digest, or is that of another instance or rank.
        """
        digest, manifest = announcement.digest, announcement.manifest
        # Packed before the transaction begins: nobody waits for it.
        packed = None if manifest is None else PackedManifest.of(manifest, digest=digest)
        with self._store.transaction() as transaction:
            instance = find_instance(transaction, instance_id)
            instance.check_epoch(announcement.epoch)
            process = instance.live_process(rank, generation=announcement.generation, now=self._clock())
            facts, stored = self._manifests.refer(transaction, digest, packed)
            instance = _published(instance, process, facts, weight_version=announcement.weight_version)
            INSTANCES.put(transaction, instance_id, instance)
        logger.info(
            "instance %s rank %d published manifest %s at version %d: %d bytes",
            instance_id,
            rank,
            digest,
            announcement.weight_version,
            facts.nbytes,
        )
        return stored

    def forget_expired(self, *, keep_s: float) -> None:
        """Drop instances whose last lease ran out more than `keep_s` ago."""
        now = self._clock()
        with self._store.transaction() as transaction:
            for instance in INSTANCES.scan(transaction):
                if instance.expires_at + keep_s <= now:
                    INSTANCES.delete(transaction, instance.instance_id)
                    logger.info("instance %s forgotten: its leases ran out", instance.instance_id)

    def used_manifests(self) -> set[str]:
        """Digests of the manifests that are published."""
        return {digest for instance in self.instances() for digest in instance.digests}

    def _read_master_key(self) -> bytes:
        with self._store.transaction() as transaction:
            key = transaction.get("meta", "ticket_key")
            if key is None:
                key = secrets.token_bytes(_TICKET_KEY_BYTES)
                transaction.put("meta", "ticket_key", key)
        return key

    def _check_urls(self, registration: Registration) -> None:
        # Names are looked up outside of the transaction, and not again at each renewal.
        with self._store.transaction() as transaction:
            known = INSTANCES.get(transaction, registration.instance_id)
        known_urls = {process.url for process in known.ranks.values()} if known else set()
        for claim in registration.ranks:
            check_certificate(claim.url, claim.certificate_sha256)
        for url in {claim.url for claim in registration.ranks} - known_urls:
            if url is not None:
                check_dialable(check_endpoint(url), peer_host=registration.peer_host, resolve=self._resolve)


def find_instance(transaction: Transaction, instance_id: str) -> Instance:
    """One instance, within a transaction.

    Raises:
        NotFoundError: If it is not known.
    """
    instance = INSTANCES.get(transaction, instance_id)
    if instance is None:
        raise NotFoundError(f"instance {instance_id!r}: not registered", kind="instance", name=instance_id)
    return instance


def _check_ranks(registration: Registration) -> None:
    numbers: Sequence[int] = [claim.rank for claim in registration.ranks]
    world_size = registration.topology.world_size
    if len(set(numbers)) != len(numbers):
        raise RequestError(f"instance {registration.instance_id!r}: ranks {numbers} name one twice")
    if outside := [rank for rank in numbers if not 0 <= rank < world_size]:
        raise RequestError(f"instance {registration.instance_id!r}: ranks {outside} of a world of {world_size}")


def _joined(known: Instance | None, registration: Registration) -> Instance:
    """The instance that the registration speaks of: the known one, or a new one in its place."""
    fresh = Instance(
        instance_id=registration.instance_id,
        model=registration.model,
        revision=registration.revision,
        topology=registration.topology,
        epoch=registration.epoch,
        # What was set for a name stands for it, whichever process has it.
        limits=registration.limits if known is None else known.limits,
    )
    if known is None or registration.epoch > known.epoch:
        return fresh
    if registration.epoch < known.epoch:
        raise ConflictError(
            f"instance {known.instance_id!r}: epoch {registration.epoch} is stale, the current one is {known.epoch}",
            current_epoch=known.epoch,
        )
    # A target may learn its revision from its first source, so one that was not known may be set once.
    revision = known.revision if registration.revision is None else registration.revision
    for name, was, now in (
        ("model", repr(known.model), repr(registration.model)),
        ("revision", repr(known.revision or revision), repr(revision)),
        ("topology", str(known.topology), str(registration.topology)),
    ):
        if was != now:
            raise ConflictError(
                f"instance {known.instance_id!r}: {name} is {was} in epoch {known.epoch}, registered again as "
                f"{now}; expected another --instance-id, or a higher --epoch"
            )
    return replace(known, revision=revision)


def _published(instance: Instance, process: RankProcess, facts: ManifestFacts, *, weight_version: int) -> Instance:
    """The instance after one of its ranks has published."""
    revision = instance.revision or facts.revision
    for name, theirs, ours in (
        ("model", repr(facts.model), repr(instance.model)),
        ("revision", repr(facts.revision), repr(revision)),
        ("topology", str(facts.topology), str(instance.topology)),
        ("rank", str(facts.rank), str(process.rank)),
    ):
        if theirs != ours:
            raise ManifestError(
                f"manifest {facts.digest}: {name} is {theirs}, expected {ours} of instance {instance.instance_id!r}"
            )
    if process.publication is not None and weight_version < process.publication.weight_version:
        raise ConflictError(
            f"instance {instance.instance_id!r} rank {process.rank}: weight version {weight_version} is older than "
            f"{process.publication.weight_version}, which it has published"
        )
    publication = Publication(weight_version=weight_version, digest=facts.digest, nbytes=facts.nbytes)
    process = replace(process, publication=publication)
    return replace(instance, revision=revision, ranks={**instance.ranks, process.rank: process})
