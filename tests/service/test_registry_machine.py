"""Random histories of registry and transfers, against a model that keeps only what an invariant needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.service.conftest import MODEL, Clock, Fleet, make_manifest
from weightwire.service.store import MemoryStore
from weightwire.service.transfers import TransferRequest
from weightwire.transfer.errors import ConflictError, NotFoundError, TicketError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.tickets import read_ticket

TP2 = Topology(tp=2)
LEASE_S = 15.0
NAMES = st.sampled_from(["a", "b", "c"])
RANKS = st.integers(0, 1)
NUMBERS = st.integers(1, 3)


@dataclass
class Process:
    """What the model knows of a process: enough to say whether a target may be sent to it."""

    generation: int
    renewed_at: float
    version: int | None = None


@dataclass
class Known:
    """What the model knows of an instance."""

    epoch: int
    ranks: dict[int, Process] = field(default_factory=dict)

    def version(self, now: float) -> int | None:
        """What the instance can serve; None if it can not."""
        live = [process for process in self.ranks.values() if now < process.renewed_at + LEASE_S]
        versions = {process.version for process in live}
        return versions.pop() if len(live) == TP2.world_size and len(versions) == 1 else None


class Histories(RuleBasedStateMachine):
    """Registers, renews, publishes, leaves, lets time pass, asks for transfers and reports on them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = MemoryStore()
        self.fleet = Fleet(self.store, self.clock)
        self.known: dict[str, Known] = {}
        self.progress: dict[str, RankProgress] = {}

    @rule(name=NAMES, epoch=NUMBERS, rank=RANKS, generation=NUMBERS)
    def register(self, name: str, epoch: int, rank: int, generation: int) -> None:
        known = self.known.get(name)
        stale_epoch = known is not None and epoch < known.epoch
        if known is None or epoch > known.epoch:
            known = Known(epoch=epoch)
        old = known.ranks.get(rank)
        try:
            self.fleet.register(name, epoch=epoch, ranks=(rank,), generation=generation, topology=TP2)
        except ConflictError:
            assert stale_epoch or (old is not None and generation < old.generation)
            return
        assert not stale_epoch
        assert old is None or generation >= old.generation
        version = old.version if old is not None and old.generation == generation else None
        known.ranks[rank] = Process(generation=generation, renewed_at=self.clock(), version=version)
        self.known[name] = known

    @rule(name=NAMES, epoch=NUMBERS, rank=RANKS, generation=NUMBERS, version=st.integers(0, 2))
    def publish(self, name: str, epoch: int, rank: int, generation: int, version: int) -> None:
        known = self.known.get(name)
        process = known.ranks.get(rank) if known else None
        manifest = make_manifest(topology=TP2, rank=rank)
        try:
            self.fleet.publish(
                name, rank, epoch=epoch, generation=generation, weight_version=version, manifest=manifest
            )
        except NotFoundError:
            assert process is None or self.clock() >= process.renewed_at + LEASE_S
            return
        except ConflictError:
            assert known is not None
            older = process is not None and process.version is not None and version < process.version
            assert epoch != known.epoch or process is None or generation != process.generation or older
            return
        assert known is not None
        assert process is not None
        assert (epoch, generation) == (known.epoch, process.generation)
        process.version = version

    @rule(name=NAMES, epoch=NUMBERS, rank=st.none() | RANKS)
    def leave(self, name: str, epoch: int, rank: int | None) -> None:
        known = self.known.get(name)
        try:
            self.fleet.registry.leave(name, epoch=epoch, rank=rank)
        except (NotFoundError, ConflictError):
            assert known is None or known.epoch != epoch or (rank is not None and rank not in known.ranks)
            return
        assert known is not None
        known.ranks = {} if rank is None else {r: p for r, p in known.ranks.items() if r != rank}
        if not known.ranks:
            del self.known[name]

    @rule(seconds=st.sampled_from([1.0, 5.0, 14.0, 15.0, 16.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.pass_(seconds)

    @rule()
    def restart_without_grace(self) -> None:
        self.fleet = Fleet(self.store, self.clock)

    @rule(version=st.none() | st.integers(0, 2), tp=st.integers(1, 3))
    def ask_for_a_transfer(self, version: int | None, tp: int) -> None:
        target, topology = f"target of {tp}", Topology(tp=tp)
        self.fleet.register(target, url=None, topology=topology, revision=None, generation=1)
        request = TransferRequest(
            model=MODEL,
            revision=None,
            weight_version=version,
            target_instance=target,
            target_epoch=1,
            ranks=((0, 1),),
            topology=topology,
            deadline_s=20.0,
            max_sources=8,
        )
        transfer, _ = self.fleet.transfers.create(request)
        self.progress[transfer.transfer_id] = RankProgress()
        served = {name: known.version(self.clock()) for name, known in self.known.items()}
        wanted = max((v for v in served.values() if v is not None and version in (None, v)), default=None)
        expected = {name for name, held in served.items() if held is not None and held == wanted}
        assert transfer.source_instances == expected
        assert sorted(source.key for source in transfer.sources_of(0)) == [
            (name, r) for name in sorted(expected) for r in (0, 1)
        ]
        for source in transfer.sources_of(0):
            process = self.known[source.instance_id].ranks[source.rank]
            assert (source.generation, source.weight_version) == (process.generation, wanted)
            text = self.fleet.registry.sign(transfer.ticket(0, source))
            registered = self.fleet.registry.instance(source.instance_id).ranks[source.rank]
            key = self.fleet.registry.source_key(source.instance_id, registered)
            read_ticket(key, text, now=self.clock())
            successor = replace(registered, generation=registered.generation + 1)
            try:
                read_ticket(self.fleet.registry.source_key(source.instance_id, successor), text, now=self.clock())
            except TicketError:
                continue
            raise AssertionError("a ticket opened the successor of its source")

    @precondition(lambda self: bool(self.progress))
    @rule(data=st.data(), state=st.sampled_from(list(TransferState)), peer=st.integers(0, 9), disk=st.integers(0, 9))
    def report(self, data: st.DataObject, state: TransferState, peer: int, disk: int) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.progress)))
        event = RankProgress(state=state, bytes_total=9, bytes_peer=peer, bytes_disk=disk, error_code="x")
        before = self.fleet.transfers.get(transfer_id)
        after = self.fleet.transfers.report(transfer_id, 0, event, generation=1)
        if before.state.is_final:
            assert after == before
        else:
            assert after.sequence >= before.sequence
            assert after.session.ranks[0].bytes_peer >= max(peer, before.session.ranks[0].bytes_peer)
            assert after.session.ranks[0].bytes_disk >= max(disk, before.session.ranks[0].bytes_disk)
        self.progress[transfer_id] = after.session.ranks[0]

    @invariant()
    def transfers_are_where_they_were_left(self) -> None:
        for transfer_id, progress in self.progress.items():
            transfer = self.fleet.transfers.get(transfer_id)
            assert transfer.session.ranks[0] == progress
            assert transfer.state.is_final == (transfer.ended_at is not None)
            assert transfer.state.is_final or self.clock() < transfer.deadline_at


TestHistories = Histories.TestCase
