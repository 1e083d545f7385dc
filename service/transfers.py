"""Grants, and what becomes of them: the transfers of a store."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from weightwire.service.fleet import RUNNING, Fleet
from weightwire.service.grants import GrantedInstance, SourceKey, TargetRank, Transfer, granted_instance
from weightwire.service.instances import Instance
from weightwire.service.matching import Choice, Want, choose_sources
from weightwire.service.quarantine import DAMAGE_CODES, DamageReport, Record, Verdict, judge
from weightwire.service.records import Table
from weightwire.service.registry import INSTANCES, find_instance
from weightwire.service.store import Store, Transaction
from weightwire.service.waves import arrange, count_readers
from weightwire.transfer.errors import ConflictError, NotFoundError, RequestError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, Session, TransferState

ENDED = Table("ended_transfer", Transfer)
RECORDS = Table("damage", Record)
_IDEMPOTENCY = "idempotency"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """A target asks for its weights.

    Attributes:
        revision: None takes what `choose_sources` prefers, or the target's own if that is known.
        ranks: (rank, generation) of the target processes that will take.
        relay: Whether they serve what they have verified while they receive the rest.
        takes_relays: Whether the target knows what relays and tiers are; without, it gets complete sources only.
    """

    model: str
    revision: str | None
    weight_version: int | None
    target_instance: str
    target_epoch: int
    ranks: tuple[tuple[int, int], ...]
    topology: Topology
    deadline_s: float
    max_sources: int
    relay: bool = False
    takes_relays: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBytes:
    """Bytes that a target rank has had from one source rank, so far."""

    instance_id: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFailure:
    """Why a target rank gave a source rank up."""

    instance_id: str
    rank: int
    generation: int
    code: str
    detail: str


class TransferObserver(Protocol):
    """Is told of what happened, after it has been stored; from any thread."""

    def transfer_changed(self, before: Transfer, after: Transfer) -> None: ...


class Transfers:
    """Transfers in a store. Every method is one transaction, and may block."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        observers: Sequence[TransferObserver] = (),
        quarantine_s: float = 600.0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._observers = observers
        self._quarantine_s = quarantine_s

    def create(self, request: TransferRequest, *, idempotency_key: str | None = None) -> tuple[Transfer, bool]:
        """Grant a transfer: choose the sources, and let each target rank read from all their ranks until the deadline.

        Returns:
            The transfer, and False if it is that of an earlier request with the same key.

        Raises:
            NotFoundError: If the target is not registered, or a lease of it ran out.
            ConflictError: If the target is registered as something else, or the key was used for another request.
            RequestError: If the target's ranks name one twice.
        """
        # One transaction: of two requests with one key the second finds what the first has made.
        with self._store.transaction() as transaction:
            transfer_id = _earlier(transaction, request, idempotency_key)
            is_new = transfer_id is None
            if transfer_id is None:
                now = self._clock()
                verdicts = _verdicts(transaction, now, keep_s=self._quarantine_s)
                granted = _granted(transaction, request, idempotency_key, now, verdicts=verdicts)
                transfer_id = granted.transfer_id
                RUNNING.put(transaction, transfer_id, granted)
                if idempotency_key is not None:
                    transaction.put(_IDEMPOTENCY, idempotency_key, transfer_id.encode())
        transfer = self.get(transfer_id)
        if is_new:
            _log_granted(transfer)
        return transfer, is_new

    def get(self, transfer_id: str) -> Transfer:
        """One transfer as it is now.

        Raises:
            NotFoundError: If it is not known, or forgotten.
        """
        return self._change(transfer_id, lambda transfer: transfer)

    def newest(self, *, limit: int) -> list[Transfer]:
        """The newest transfers, newest first."""
        self.settle()
        with self._store.transaction() as transaction:
            found = [*RUNNING.scan(transaction), *ENDED.scan(transaction)]
        return sorted(found, key=lambda transfer: (-transfer.created_at, transfer.transfer_id))[:limit]

    def report(
        self,
        transfer_id: str,
        rank: int,
        progress: RankProgress,
        *,
        generation: int,
        sources: Sequence[SourceBytes] = (),
        failures: Sequence[ReportedFailure] = (),
    ) -> Transfer:
        """Record how far a target rank is, and whom it gave up; late and repeated reports are counted once.

        Raises:
            NotFoundError: If there is no such transfer.
            ConflictError: If the transfer has no such rank, another process takes for it, or it contradicts its end.
            RequestError: If the report names a source that was not granted.
        """

        def reported(transfer: Transfer) -> Transfer:
            target = next((target for target in transfer.ranks if target.rank == rank), None)
            if target is not None and target.generation != generation:
                raise ConflictError(
                    f"transfer {transfer_id!r} rank {rank}: generation {generation}, granted to {target.generation}",
                    current_generation=target.generation,
                )
            _check_granted(transfer, rank, {(failure.instance_id, failure.rank) for failure in failures}, "failures")
            after = transfer.moved_to(transfer.session.rank_reported(rank, progress), now=self._clock())
            # What has ended takes no more bytes, or sums would change after they were told.
            if target is None or transfer.state.is_final:
                return after
            return _with_source_bytes(after, target, sources)

        after = self._change(transfer_id, reported)
        damages = [failure for failure in failures if failure.code in DAMAGE_CODES]
        if damages or after.state is TransferState.READY:
            self._keep_records(after, damages)
        return after

    def verdicts(self) -> Mapping[str, Verdict]:
        """The sources that are in quarantine now, by instance."""
        with self._store.transaction() as transaction:
            return _verdicts(transaction, self._clock(), keep_s=self._quarantine_s)

    def forget_damage(self) -> None:
        """Drop what was reported of sources that are other processes now, or so long ago that it does not count."""
        now = self._clock()
        with self._store.transaction() as transaction:
            for record in RECORDS.scan(transaction):
                instance = INSTANCES.get(transaction, record.instance_id)
                if not record.standing(instance, now=now, keep_s=self._quarantine_s):
                    RECORDS.delete(transaction, record.instance_id)

    def _keep_records(self, transfer: Transfer, damages: Sequence[ReportedFailure]) -> None:
        """Note which sources of a transfer sent damage, and which ones served it to a good end."""
        with self._store.transaction() as transaction:
            accuser = _accuser(transaction, transfer)
            given = {source.key: source for source in transfer.sources}
            for failure in damages:
                source = given[failure.instance_id, failure.rank]
                # A report about the process before this one would say nothing about it.
                if failure.generation != source.generation:
                    continue
                record = RECORDS.get(transaction, failure.instance_id) or Record(
                    instance_id=failure.instance_id, served=_served_by(transaction, failure.instance_id)
                )
                report = DamageReport(
                    accuser=accuser, rank=failure.rank, generation=failure.generation,
                    weight_version=source.weight_version, code=failure.code, detail=failure.detail,
                    reported_at=self._clock(),
                )  # fmt: skip
                RECORDS.put(transaction, failure.instance_id, record.with_report(report))
                logger.warning("instance %s: damaged bytes, says %s: %s", failure.instance_id, accuser, failure.detail)
            if transfer.state is TransferState.READY:
                _note_served(transaction, transfer, accuser)

    def cancel(self, transfer_id: str) -> Transfer:
        """Cancel a transfer; one that has ended stays as it is.

        Raises:
            NotFoundError: If there is no such transfer.
        """
        detail = f"transfer {transfer_id!r}: cancelled on request"
        return self._change(
            transfer_id, lambda transfer: transfer.moved_to(transfer.session.cancelled(detail), now=self._clock())
        )

    def settle(self) -> None:
        """End what is over: deadlines that passed, targets that were replaced."""
        with self._store.transaction() as transaction:
            changes = []
            for transfer in RUNNING.scan(transaction):
                after = _settled(transaction, transfer, self._clock())
                _save(transaction, transfer, after)
                changes.append((transfer, after))
        self._tell(changes)

    def forget_ended(self, *, keep_s: float) -> None:
        """Drop transfers that ended more than `keep_s` ago."""
        now = self._clock()
        with self._store.transaction() as transaction:
            for transfer in ENDED.scan(transaction):
                if transfer.ended_at is not None and transfer.ended_at + keep_s <= now:
                    ENDED.delete(transaction, transfer.transfer_id)
                    if transfer.idempotency_key is not None:
                        transaction.delete(_IDEMPOTENCY, transfer.idempotency_key)

    def active_readers(self) -> Counter[str]:
        """Running transfers that take from each instance now, by its id."""
        with self._store.transaction() as transaction:
            return count_readers(Fleet.read(transaction, self._clock()).members())

    def states(self) -> Counter[TransferState]:
        """How many transfers are known, by state."""
        with self._store.transaction() as transaction:
            return Counter(transfer.state for table in (RUNNING, ENDED) for transfer in table.scan(transaction))

    def used_manifests(self) -> set[str]:
        """Digests of the manifests that running transfers were granted."""
        with self._store.transaction() as transaction:
            running = RUNNING.scan(transaction)
        return {source.manifest_digest for transfer in running for source in transfer.sources}

    def _change(self, transfer_id: str, change: Callable[[Transfer], Transfer]) -> Transfer:
        """Bring a transfer up to date, change it, store it and tell the observers."""
        with self._store.transaction() as transaction:
            before = _find(transaction, transfer_id)
            after = change(before if before.state.is_final else _settled(transaction, before, self._clock()))
            _save(transaction, before, after)
        # After the commit: what was rolled back must not be counted.
        self._tell([(before, after)])
        return after

    def _tell(self, changes: Sequence[tuple[Transfer, Transfer]]) -> None:
        for before, after in changes:
            if after is before:
                continue
            if after.state.is_final:
                _log_end(after)
            for observer in self._observers:
                observer.transfer_changed(before, after)


def _earlier(transaction: Transaction, request: TransferRequest, key: str | None) -> str | None:
    """Id of the transfer that an earlier request with the same key made."""
    found = None if key is None else transaction.get(_IDEMPOTENCY, key)
    if found is None:
        return None
    transfer = _find(transaction, found.decode())
    if transfer.request_digest != request.digest:
        raise ConflictError(f"idempotency key {key!r}: was used for another request", transfer_id=transfer.transfer_id)
    return transfer.transfer_id


def _log_granted(transfer: Transfer) -> None:
    names = ", ".join(sorted(transfer.source_instances))
    if not names:
        logger.info(
            "transfer %s granted to %s: no source for %s",
            transfer.transfer_id,
            transfer.target_instance,
            transfer.model,
        )
        return
    logger.info(
        "transfer %s granted: %s at version %s to %s from %s",
        transfer.transfer_id,
        transfer.model,
        transfer.weight_version,
        transfer.target_instance,
        names,
    )


def _verdicts(transaction: Transaction, now: float, *, keep_s: float) -> Mapping[str, Verdict]:
    records = RECORDS.scan(transaction)
    return judge(records, INSTANCES.scan(transaction), now=now, keep_s=keep_s) if records else {}


def _accuser(transaction: Transaction, transfer: Transfer) -> str:
    """Whose word a report of a transfer is: that of a machine, since a target that starts again has another name."""
    target = INSTANCES.get(transaction, transfer.target_instance)
    hosts = {process.host for process in target.ranks.values()} if target else set()
    host = hosts.pop() if len(hosts) == 1 else None
    return transfer.target_instance if host is None else host


def _served_by(transaction: Transaction, instance_id: str) -> frozenset[str]:
    """Who became ready from an instance, of the transfers that are remembered."""
    return frozenset(
        _accuser(transaction, transfer)
        for transfer in ENDED.scan(transaction)
        if transfer.state is TransferState.READY and transfer.nbytes_from(instance_id)
    )


def _note_served(transaction: Transaction, transfer: Transfer, target: str) -> None:
    for record in RECORDS.scan(transaction):
        if transfer.nbytes_from(record.instance_id) and target not in record.served:
            RECORDS.put(transaction, record.instance_id, replace(record, served=record.served | {target}))


def _granted(
    transaction: Transaction,
    request: TransferRequest,
    key: str | None,
    now: float,
    *,
    verdicts: Mapping[str, Verdict],
) -> Transfer:
    target = _check_target(transaction, request, now)
    want = Want(
        model=request.model,
        revision=request.revision or target.revision,
        weight_version=request.weight_version,
        topology=request.topology,
        exclude_instance=request.target_instance,
        max_sources=request.max_sources,
    )
    fleet = Fleet.read(transaction, now)
    readers = count_readers(fleet.members())
    choice = choose_sources(fleet.instances.values(), want, readers=readers, now=now, verdicts=verdicts)
    instances = _arranged(fleet, choice, request, untrusted=verdicts)
    taken = {instance.instance_id for instance in instances}
    return Transfer(
        transfer_id=secrets.token_hex(12),
        model=request.model,
        revision=choice.revision,
        weight_version=choice.weight_version,
        topology=request.topology,
        target_instance=request.target_instance,
        target_epoch=request.target_epoch,
        ranks=tuple(TargetRank(rank=rank, generation=generation) for rank, generation in sorted(request.ranks)),
        instances=instances,
        reasons=tuple(reason for reason in choice.reasons if reason.instance_id not in taken),
        created_at=now,
        deadline_at=now + request.deadline_s,
        request_digest=request.digest,
        relay=request.relay,
        idempotency_key=key,
        session=Session(ranks={rank: RankProgress() for rank, _ in sorted(request.ranks)}),
    )


def _find(transaction: Transaction, transfer_id: str) -> Transfer:
    transfer = RUNNING.get(transaction, transfer_id) or ENDED.get(transaction, transfer_id)
    if transfer is None:
        raise NotFoundError(f"transfer {transfer_id!r}: not known", kind="transfer", name=transfer_id)
    return transfer


def _save(transaction: Transaction, before: Transfer, after: Transfer) -> None:
    if after is before:
        return
    if after.state.is_final:
        RUNNING.delete(transaction, after.transfer_id)
        ENDED.put(transaction, after.transfer_id, after)
    else:
        RUNNING.put(transaction, after.transfer_id, after)


def _settled(transaction: Transaction, transfer: Transfer, now: float) -> Transfer:
    """The transfer as it is now: ended if its deadline passed, or if another process took its target's place."""
    name = f"transfer {transfer.transfer_id!r}"
    if transfer.deadline_at <= now:
        allowed_s = transfer.deadline_at - transfer.created_at
        # It ended when the deadline passed, not when somebody noticed.
        session = transfer.session.expired(f"{name}: not ready after {allowed_s:g} s")
        return transfer.moved_to(session, now=transfer.deadline_at)
    target = INSTANCES.get(transaction, transfer.target_instance)
    # A target that is merely silent is left alone: bytes move whether or not it reaches the service.
    current: Mapping[int, int] = {}
    if target is not None and target.epoch == transfer.target_epoch:
        current = {process.rank: process.generation for process in target.ranks.values()}
    for rank in transfer.ranks:
        if current.get(rank.rank) != rank.generation:
            session = transfer.session.cancelled(
                f"{name}: rank {rank.rank} of target {transfer.target_instance!r} left, or was replaced"
            )
            return transfer.moved_to(session, now=now)
    return transfer


def _log_end(transfer: Transfer) -> None:
    ranks = transfer.session.ranks.values()
    logger.info(
        "transfer %s ended as %s after %.1f s: %d bytes from peers, %d from disk%s",
        transfer.transfer_id,
        transfer.state,
        transfer.seconds(transfer.deadline_at),
        sum(rank.bytes_peer for rank in ranks),
        sum(rank.bytes_disk for rank in ranks),
        f": {transfer.session.error_detail}" if transfer.session.error_detail else "",
    )


def _check_target(transaction: Transaction, request: TransferRequest, now: float) -> Instance:
    numbers = [rank for rank, _ in request.ranks]
    if len(set(numbers)) != len(numbers):
        raise RequestError(f"target {request.target_instance!r}: ranks {numbers} name one twice")
    target = find_instance(transaction, request.target_instance)
    target.check_epoch(request.target_epoch)
    for rank, generation in request.ranks:
        target.live_process(rank, generation=generation, now=now)
    for name, registered, asked in (
        ("model", target.model, request.model),
        ("topology", target.topology, request.topology),
        ("revision", target.revision or request.revision, request.revision or target.revision),
    ):
        if registered != asked:
            raise ConflictError(
                f"target {target.instance_id!r}: {name} is registered as {registered!r}, asked for {asked!r}"
            )
    return target


def _arranged(
    fleet: Fleet, choice: Choice, request: TransferRequest, *, untrusted: Collection[str]
) -> tuple[GrantedInstance, ...]:
    """The sources that were chosen, and relays before them if the target knows what these are."""
    if not request.takes_relays:
        return tuple(map(granted_instance, choice.sources))
    relays = fleet.relays(
        model=request.model,
        held=(choice.revision, choice.weight_version),
        topology=request.topology,
        ranks=[rank for rank, _ in request.ranks],
    )
    relays = {name: relay for name, relay in relays.items() if name not in untrusted and not fleet.is_paused(name)}
    complete = {instance.instance_id: instance for instance in choice.sources}
    tiers = arrange(request.target_instance, list(complete), fleet.members(relays))
    return tuple(
        granted_instance(complete[name], standby=standby)
        if name in complete
        else replace(relays[name], standby=standby)
        for standby, tier in enumerate(tiers)
        for name in tier
    )


def _check_granted(transfer: Transfer, rank: int, named: Set[SourceKey], what: str) -> None:
    if named and (unknown := sorted(named - {source.key for source in transfer.sources})):
        raise RequestError(f"rank {rank}: reports {what} of sources {unknown}, which it was not granted")


def _with_source_bytes(transfer: Transfer, target: TargetRank, reports: Sequence[SourceBytes]) -> Transfer:
    """The transfer after a target rank has said what it has read from whom; sums only grow."""
    # Refused rather than dropped: sums that leave bytes out would tell another story than what happened.
    _check_granted(transfer, target.rank, {(report.instance_id, report.rank) for report in reports}, "bytes")
    read = {name: dict(ranks) for name, ranks in target.nbytes_read.items()}
    for report in reports:
        if report.nbytes:
            of_instance = read.setdefault(report.instance_id, {})
            of_instance[report.rank] = max(of_instance.get(report.rank, 0), report.nbytes)
    if read == target.nbytes_read:
        return transfer
    changed = replace(target, nbytes_read=read)
    ranks = tuple(changed if rank.rank == target.rank else rank for rank in transfer.ranks)
    return replace(transfer, ranks=ranks, sequence=transfer.sequence + 1)
