"""Transfers: what is granted, what is reported, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.service.conftest import MODEL, Clock, Fleet
from weightwire.service.grants import Transfer
from weightwire.service.store import MemoryStore
from weightwire.service.transfers import SourceBytes, TransferRequest, Transfers
from weightwire.transfer.errors import ConflictError, NotFoundError, RequestError, TicketError, TransferError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.tickets import read_ticket

TP2 = Topology(tp=2)


REQUEST = TransferRequest(
    model=MODEL,
    revision=None,
    weight_version=None,
    target_instance="t",
    target_epoch=1,
    ranks=((0, 1),),
    topology=Topology(),
    deadline_s=60.0,
    max_sources=8,
)
TP2_REQUEST = replace(REQUEST, topology=TP2, ranks=((1, 1), (0, 1)))


def grant(fleet: Fleet, target: str = "t", *, max_sources: int = 8) -> Transfer:
    """A transfer to a target that is registered first."""
    fleet.register(target, url=None, revision=None)
    return fleet.transfers.create(replace(REQUEST, target_instance=target, max_sources=max_sources))[0]


def receiving(peer: int = 0, disk: int = 0, *, total: int = 32, state: str = "receiving") -> RankProgress:
    return RankProgress(state=TransferState(state), bytes_total=total, bytes_peer=peer, bytes_disk=disk)


def granted(transfer: Transfer, rank: int) -> list[tuple[str, int]]:
    """The sources of a target rank, in order, by instance and rank."""
    return [source.key for source in transfer.sources_of(rank)]


def test_create_grants_each_target_rank_every_rank_of_each_source(fleet: Fleet) -> None:
    fleet.source("s1", topology=TP2)
    fleet.source("s2", topology=TP2)
    fleet.register("t", url=None, topology=TP2)
    transfer, is_new = fleet.transfers.create(TP2_REQUEST)
    assert is_new
    assert transfer.state is TransferState.PLANNED
    assert [rank.rank for rank in transfer.ranks] == [0, 1]
    assert granted(transfer, 0) == [("s1", 0), ("s1", 1), ("s2", 0), ("s2", 1)]
    assert granted(transfer, 1) == [("s1", 1), ("s1", 0), ("s2", 1), ("s2", 0)]


def test_create_grants_across_topologies(fleet: Fleet) -> None:
    fleet.source("same", topology=TP2)
    fleet.source("other", topology=Topology(tp=3), names=tuple("abcdefgh"))
    fleet.source("one")
    fleet.register("t", url=None, topology=TP2)
    transfer, _ = fleet.transfers.create(TP2_REQUEST)
    others = [("other", 0), ("other", 1), ("other", 2), ("one", 0)]
    assert granted(transfer, 0) == [("same", 0), ("same", 1), *others]
    assert granted(transfer, 1) == [("same", 1), ("same", 0), *others]
    assert transfer.reasons == ()


@pytest.mark.parametrize(
    ("sources", "target"),
    [
        pytest.param(Topology(tp=3), Topology(), id="three ranks for one"),
        pytest.param(Topology(), Topology(tp=2, pp=2), id="one rank for four"),
        pytest.param(Topology(tp=4, ep=4), Topology(tp=2, pp=2), id="four ranks for four others"),
        pytest.param(Topology(tp=4), Topology(tp=4, ep=2), id="the same but for the experts"),
    ],
)
def test_ranks_of_another_topology_come_in_order(fleet: Fleet, sources: Topology, target: Topology) -> None:
    fleet.source("s", topology=sources)
    fleet.register("t", url=None, topology=target)
    ranks = tuple((rank, 1) for rank in range(target.world_size))
    transfer, _ = fleet.transfers.create(replace(REQUEST, topology=target, ranks=ranks))
    expected = [("s", rank) for rank in range(sources.world_size)]
    assert [granted(transfer, rank) for rank, _ in ranks] == [expected] * target.world_size


def test_create_takes_no_source_that_lacks_a_rank_and_names_it(fleet: Fleet) -> None:
    fleet.register("s", topology=Topology(tp=3), ranks=(0, 2))
    for rank in (0, 2):
        fleet.publish("s", rank)
    transfer = grant(fleet)
    assert granted(transfer, 0) == []
    assert [reason.reason for reason in transfer.reasons] == ["rank 1 has not registered"]


def test_create_without_sources_says_why(fleet: Fleet) -> None:
    fleet.register("s")
    transfer = grant(fleet)
    assert granted(transfer, 0) == []
    assert [(reason.instance_id, reason.reason) for reason in transfer.reasons] == [
        ("s", "rank 0 has published nothing"),
    ]


def test_create_takes_the_revision_that_the_target_is_registered_with(fleet: Fleet) -> None:
    fleet.source("s1", revision="r1", weight_version=1)
    fleet.source("s2", revision="r2", weight_version=2)
    fleet.register("t", url=None, revision="r1")
    assert fleet.transfers.create(REQUEST)[0].source_instances == {"s1"}
    with pytest.raises(ConflictError, match="revision is registered as 'r1', asked for 'r2'"):
        fleet.transfers.create(replace(REQUEST, revision="r2"))


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        pytest.param(
            replace(REQUEST, target_instance="nobody"),
            NotFoundError,
            "instance 'nobody': not registered",
            id="unknown target",
        ),
        pytest.param(
            replace(REQUEST, target_epoch=2), ConflictError, "epoch 2, but the current one is 1", id="another epoch"
        ),
        pytest.param(
            replace(REQUEST, ranks=((0, 2),)), ConflictError, "generation 2, but the current one is 1", id="generation"
        ),
        pytest.param(
            replace(REQUEST, ranks=((1, 1),)),
            NotFoundError,
            "rank 1: not registered",
            id="a rank that nobody speaks for",
        ),
        pytest.param(replace(REQUEST, ranks=((0, 1), (0, 1))), RequestError, "name one twice", id="a rank twice"),
        pytest.param(
            replace(REQUEST, model="x"), ConflictError, "model is registered as 'org/name'", id="another model"
        ),
        pytest.param(replace(REQUEST, topology=TP2), ConflictError, "topology is registered as", id="another topology"),
    ],
)
def test_create_refuses_a_target_that_is_not_what_it_says(
    fleet: Fleet, asked: TransferRequest, error: type[TransferError], words: str
) -> None:
    fleet.register("t", url=None)
    with pytest.raises(error) as caught:
        fleet.transfers.create(asked)
    assert words in str(caught.value)
    assert fleet.transfers.newest(limit=10) == []


def test_create_refuses_a_target_whose_lease_ran_out(fleet: Fleet, clock: Clock) -> None:
    fleet.register("t", url=None)
    clock.pass_(15)
    with pytest.raises(NotFoundError, match="its lease ran out"):
        fleet.transfers.create(REQUEST)


def test_create_prefers_sources_with_fewer_running_transfers(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s1")
    fleet.source("s2")
    first = grant(fleet, "t1", max_sources=1)
    second = grant(fleet, "t2", max_sources=1)
    assert first.source_instances == {"s1"}
    assert second.source_instances == {"s2"}
    fleet.transfers.cancel(first.transfer_id)
    assert grant(fleet, "t3", max_sources=1).source_instances == {"s1"}


def test_active_readers_are_running_transfers_of_targets_that_are_heard_of(fleet: Fleet, clock: Clock) -> None:
    fleet.register("s", lease_s=600)
    fleet.publish("s")
    grant(fleet, "t1")
    done = grant(fleet, "t2")
    assert fleet.transfers.active_readers() == {"s": 2}
    fleet.transfers.report(done.transfer_id, 0, receiving(32, state="ready"), generation=1)
    assert fleet.transfers.active_readers() == {"s": 1}
    clock.pass_(20)
    assert fleet.transfers.active_readers() == {}, "t1 is silent"
    fleet.register("t1", url=None)
    assert fleet.transfers.active_readers() == {"s": 1}
    clock.pass_(40)
    fleet.register("t1", url=None)
    assert fleet.transfers.active_readers() == {}, "the deadline has passed"


def test_same_key_and_request_give_the_same_transfer(fleet: Fleet) -> None:
    fleet.source("s")
    fleet.register("t", url=None)
    first, is_new = fleet.transfers.create(REQUEST, idempotency_key="k")
    again, is_new_again = fleet.transfers.create(REQUEST, idempotency_key="k")
    assert (is_new, is_new_again) == (True, False)
    assert again == first
    assert fleet.transfers.create(REQUEST, idempotency_key="other")[0].transfer_id != first.transfer_id


def test_same_key_gives_the_same_transfer_after_it_ended(fleet: Fleet) -> None:
    fleet.register("t", url=None)
    first, _ = fleet.transfers.create(REQUEST, idempotency_key="k")
    fleet.transfers.cancel(first.transfer_id)
    again, is_new = fleet.transfers.create(REQUEST, idempotency_key="k")
    assert (again.transfer_id, again.state, is_new) == (first.transfer_id, TransferState.CANCELLED, False)


def test_same_key_with_another_request_is_refused(fleet: Fleet) -> None:
    fleet.register("t", url=None)
    first, _ = fleet.transfers.create(REQUEST, idempotency_key="k")
    with pytest.raises(ConflictError, match="idempotency key 'k': was used for another request") as caught:
        fleet.transfers.create(replace(REQUEST, deadline_s=61.0), idempotency_key="k")
    assert caught.value.facts["transfer_id"] == first.transfer_id


def test_same_key_from_two_threads_at_once_gives_one_transfer(fleet: Fleet) -> None:
    fleet.register("t", url=None)
    barrier = threading.Barrier(2)
    made: list[tuple[str, bool]] = []

    def create() -> None:
        barrier.wait()
        transfer, is_new = fleet.transfers.create(REQUEST, idempotency_key="k")
        made.append((transfer.transfer_id, is_new))

    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({transfer_id for transfer_id, _ in made}) == 1
    assert sorted(is_new for _, is_new in made) == [False, True]
    assert len(fleet.transfers.newest(limit=10)) == 1


def test_tickets_open_their_source_and_no_other(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s1", topology=TP2)
    fleet.source("s2", topology=TP2)
    fleet.register("t", url=None, topology=TP2)
    transfer, _ = fleet.transfers.create(TP2_REQUEST)
    keys = {
        (name, rank): fleet.registry.source_key(name, fleet.registry.instance(name).ranks[rank])
        for name in ("s1", "s2")
        for rank in (0, 1)
    }
    for target in transfer.ranks:
        for source in transfer.sources_of(target.rank):
            text = fleet.registry.sign(transfer.ticket(target.rank, source))
            ticket = read_ticket(keys[source.instance_id, source.rank], text, now=clock())
            assert (ticket.transfer_id, ticket.target_instance, ticket.target_rank) == (
                transfer.transfer_id,
                "t",
                target.rank,
            )
            assert (ticket.source_instance, ticket.source_rank, ticket.source_generation) == (
                source.instance_id,
                source.rank,
                1,
            )
            assert ticket.expires_at >= transfer.deadline_at
            for other, key in keys.items():
                if other != (source.instance_id, source.rank):
                    with pytest.raises(TicketError):
                        read_ticket(key, text, now=clock())


def test_ticket_of_a_replaced_source_process_does_not_open_its_successor(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s")
    transfer = grant(fleet)
    text = fleet.registry.sign(transfer.ticket(0, *transfer.sources))
    successor = fleet.register("s", generation=2).ranks[0]
    with pytest.raises(TicketError):
        read_ticket(fleet.registry.source_key("s", successor), text, now=clock())


def test_b35_two_targets_at_once_get_tickets_of_their_own(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s")
    transfers = [grant(fleet, target) for target in ("t1", "t2")]
    key = fleet.registry.source_key("s", fleet.registry.instance("s").ranks[0])
    texts = {fleet.registry.sign(transfer.ticket(0, *transfer.sources)) for transfer in transfers}
    tickets = [read_ticket(key, text, now=clock()) for text in texts]
    assert {(ticket.transfer_id, ticket.target_instance) for ticket in tickets} == {
        (transfers[0].transfer_id, "t1"),
        (transfers[1].transfer_id, "t2"),
    }


def test_report_moves_the_transfer_from_planned_to_ready(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s")
    transfer_id = grant(fleet).transfer_id
    clock.pass_(2)
    states = [
        fleet.transfers.report(transfer_id, 0, progress, generation=1).state
        for progress in (receiving(), receiving(16), receiving(16, 16, state="verifying"), receiving(state="ready"))
    ]
    assert states == ["receiving", "receiving", "verifying", "ready"]
    transfer = fleet.transfers.get(transfer_id)
    assert (transfer.ended_at, transfer.seconds(clock() + 100)) == (clock(), 2)
    assert transfer.session.ranks[0].bytes_peer == 16, "late figures that are smaller change nothing"


def test_transfer_is_ready_when_all_its_ranks_are(fleet: Fleet) -> None:
    fleet.register("t", url=None, topology=TP2)
    transfer, _ = fleet.transfers.create(TP2_REQUEST)

    def report(rank: int) -> TransferState:
        return fleet.transfers.report(transfer.transfer_id, rank, receiving(state="ready"), generation=1).state

    assert [report(0), report(1)] == ["planned", "ready"]


def test_progress_is_kept_for_each_rank(fleet: Fleet) -> None:
    fleet.source("s", topology=Topology(tp=3))
    fleet.register("t", url=None, topology=TP2)
    transfer_id = fleet.transfers.create(TP2_REQUEST)[0].transfer_id
    for rank, peer, source_rank in ((0, 8, 1), (1, 12, 1), (1, 16, 2)):
        sources = [SourceBytes(instance_id="s", rank=source_rank, nbytes=peer)]
        fleet.transfers.report(transfer_id, rank, receiving(peer), generation=1, sources=sources)
    transfer = fleet.transfers.get(transfer_id)
    assert [transfer.session.ranks[rank].bytes_peer for rank in (0, 1)] == [8, 16]
    assert [rank.nbytes_read for rank in transfer.ranks] == [{"s": {1: 8}}, {"s": {1: 12, 2: 16}}]


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_one_rank_is_told_to_the_others(fleet: Fleet, failing: int) -> None:
    fleet.register("t", url=None, topology=TP2)
    transfer_id = fleet.transfers.create(TP2_REQUEST)[0].transfer_id
    other = 1 - failing
    assert fleet.transfers.report(transfer_id, other, receiving(8), generation=1).session.error_code is None
    failed = RankProgress(state=TransferState.FAILED, error_code="integrity_failed", error_detail=f"rank {failing}")
    fleet.transfers.report(transfer_id, failing, failed, generation=1)
    told = fleet.transfers.report(transfer_id, other, receiving(32, state="ready"), generation=1).session
    assert (told.state, told.error_code, told.error_detail) == ("failed", "integrity_failed", f"rank {failing}")
    assert told.ranks[other].bytes_peer == 8, "what has ended takes no more bytes"


def test_rank_that_is_ready_does_not_save_a_transfer_whose_other_rank_fails(fleet: Fleet) -> None:
    fleet.register("t", url=None, topology=TP2)
    transfer_id = fleet.transfers.create(TP2_REQUEST)[0].transfer_id
    fleet.transfers.report(transfer_id, 0, receiving(32, state="ready"), generation=1)
    failed = RankProgress(state=TransferState.FAILED, error_code="integrity_failed", error_detail="rank 1")
    session = fleet.transfers.report(transfer_id, 1, failed, generation=1).session
    assert (session.state, session.ranks[0].state) == ("failed", "ready")


def test_transfer_is_cancelled_when_one_of_its_processes_is_replaced(fleet: Fleet) -> None:
    fleet.register("t", url=None, topology=TP2)
    transfer_id = fleet.transfers.create(TP2_REQUEST)[0].transfer_id
    fleet.transfers.report(transfer_id, 0, receiving(8), generation=1)
    fleet.register("t", url=None, topology=TP2, ranks=(1,), generation=2)
    told = fleet.transfers.report(transfer_id, 0, receiving(16), generation=1).session
    assert (told.state, told.error_code) == ("cancelled", "cancelled")
    assert "rank 1 of target 't' left, or was replaced" in str(told.error_detail)
    with pytest.raises(ConflictError, match="generation 2, granted to 1"):
        fleet.transfers.report(transfer_id, 1, receiving(16), generation=2)


def test_transfer_to_some_ranks_does_not_wait_for_the_others(fleet: Fleet) -> None:
    fleet.source("s")
    fleet.register("t", url=None, topology=TP2)
    transfer, _ = fleet.transfers.create(replace(TP2_REQUEST, ranks=((1, 1),)))
    fleet.register("t", url=None, topology=TP2, ranks=(0,), generation=2)
    ready = fleet.transfers.report(transfer.transfer_id, 1, receiving(32, state="ready"), generation=1)
    assert ready.state is TransferState.READY


def test_restart_of_one_source_rank_fences_its_tickets_alone(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s", topology=Topology(tp=3))
    fleet.register("t", url=None, topology=TP2)
    transfer, _ = fleet.transfers.create(TP2_REQUEST)
    tickets = {
        (target.rank, source.rank): fleet.registry.sign(transfer.ticket(target.rank, source))
        for target in transfer.ranks
        for source in transfer.sources_of(target.rank)
    }
    restarted = fleet.register("s", topology=Topology(tp=3), ranks=(1,), generation=2)
    for (target_rank, source_rank), text in tickets.items():
        key = fleet.registry.source_key("s", restarted.ranks[source_rank])
        if source_rank == 1:
            with pytest.raises(TicketError):
                read_ticket(key, text, now=clock())
        else:
            ticket = read_ticket(key, text, now=clock())
            assert (ticket.source_rank, ticket.source_generation, ticket.target_rank) == (source_rank, 1, target_rank)
    # It goes on, and what was read from the process before counts.
    sources = [SourceBytes(instance_id="s", rank=rank, nbytes=8) for rank in range(3)]
    told = fleet.transfers.report(transfer.transfer_id, 0, receiving(24), generation=1, sources=sources)
    assert not told.state.is_final
    assert told.ranks[0].nbytes_read == {"s": {0: 8, 1: 8, 2: 8}}
    again, _ = fleet.transfers.create(TP2_REQUEST)
    assert [reason.reason for reason in again.reasons] == ["rank 1 has published nothing"]


def test_stored_transfer_does_not_grow_with_the_product_of_ranks(clock: Clock) -> None:
    """Sources are kept once, and tickets derived from them."""

    def stored_bytes(target: Topology) -> int:
        store = MemoryStore()
        fleet = Fleet(store, clock)
        for name in ("s1", "s2"):
            fleet.source(name, topology=Topology(tp=8))
        fleet.register("t", url=None, topology=target)
        ranks = tuple((rank, 1) for rank in range(target.world_size))
        fleet.transfers.create(replace(REQUEST, topology=target, ranks=ranks))
        with store.transaction() as transaction:
            [(_, value)] = transaction.scan("transfer")
        return len(value)

    few, many = stored_bytes(Topology()), stored_bytes(Topology(tp=16))
    assert many - few < few, "15 more target ranks of 16 sources each"


def test_failure_of_a_rank_fails_the_transfer_with_its_error(fleet: Fleet) -> None:
    transfer_id = grant(fleet).transfer_id
    failed = RankProgress(state=TransferState.FAILED, error_code="coverage_incomplete", error_detail="no 'a'")
    session = fleet.transfers.report(transfer_id, 0, failed, generation=1).session
    assert (session.state, session.error_code, session.error_detail) == ("failed", "coverage_incomplete", "no 'a'")


@pytest.mark.parametrize(
    ("report", "error", "words"),
    [
        pytest.param(
            lambda transfers, name: transfers.report(name, 0, receiving(), generation=2),
            ConflictError,
            "generation 2, granted to 1",
            id="another generation",
        ),
        pytest.param(
            lambda transfers, name: transfers.report(name, 1, receiving(), generation=1),
            ConflictError,
            "the transfer has ranks [0]",
            id="a rank that does not take",
        ),
        pytest.param(
            lambda transfers, name: transfers.report("x", 0, receiving(), generation=1),
            NotFoundError,
            "transfer 'x': not known",
            id="another transfer",
        ),
        pytest.param(
            lambda transfers, name: transfers.report(
                name, 0, receiving(), generation=1, sources=[SourceBytes(instance_id="x", rank=0, nbytes=1)]
            ),
            RequestError,
            "which it was not granted",
            id="a source that was not granted",
        ),
    ],
)
def test_report_is_refused_and_changes_nothing(
    fleet: Fleet, report: Callable[[Transfers, str], object], error: type[TransferError], words: str
) -> None:
    fleet.source("s")
    before = grant(fleet)
    with pytest.raises(error) as caught:
        report(fleet.transfers, before.transfer_id)
    assert words in str(caught.value)
    assert fleet.transfers.get(before.transfer_id) == before


def test_b60_bytes_of_each_source_are_counted_once(fleet: Fleet) -> None:
    fleet.source("s1")
    fleet.source("s2")
    transfer_id = grant(fleet).transfer_id

    def report(*nbytes: int) -> list[int]:
        sources = [SourceBytes(instance_id=f"s{n}", rank=0, nbytes=read) for n, read in enumerate(nbytes, 1)]
        after = fleet.transfers.report(transfer_id, 0, receiving(sum(nbytes)), generation=1, sources=sources)
        return [after.ranks[0].nbytes_from(source) for source in after.sources]

    assert [report(8, 0), report(8, 0), report(16, 8), report(8, 8)] == [[8, 0], [8, 0], [16, 8], [16, 8]]


def test_cancel_ends_the_transfer_and_the_target_learns_of_it(fleet: Fleet) -> None:
    transfer_id = grant(fleet).transfer_id
    fleet.transfers.report(transfer_id, 0, receiving(8), generation=1)
    assert fleet.transfers.cancel(transfer_id).state is TransferState.CANCELLED
    told = fleet.transfers.report(transfer_id, 0, receiving(32, state="ready"), generation=1)
    assert (told.state, told.session.error_code) == ("cancelled", "cancelled")
    assert told.session.ranks[0].bytes_peer == 8


def test_cancel_of_an_ended_transfer_leaves_it_as_it_is(fleet: Fleet) -> None:
    transfer_id = grant(fleet).transfer_id
    ended = fleet.transfers.report(transfer_id, 0, receiving(state="ready"), generation=1)
    assert fleet.transfers.cancel(transfer_id) == ended


def test_deadline_fails_the_transfer_and_the_target_learns_of_it(fleet: Fleet, clock: Clock) -> None:
    transfer = grant(fleet)
    clock.pass_(59.9)
    assert fleet.transfers.report(transfer.transfer_id, 0, receiving(8), generation=1).state == "receiving"
    clock.pass_(0.1)
    told = fleet.transfers.report(transfer.transfer_id, 0, receiving(32, state="ready"), generation=1)
    assert (told.state, told.session.error_code) == ("failed", "deadline_exceeded")
    assert told.ended_at == transfer.deadline_at


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda transfers, name: transfers.get(name), id="a look at it"),
        pytest.param(lambda transfers, name: transfers.newest(limit=1)[0], id="a look at all"),
        pytest.param(lambda transfers, name: transfers.settle() or transfers.get(name), id="the sweeper"),
        pytest.param(lambda transfers, name: transfers.cancel(name), id="a cancel that comes too late"),
    ],
)
def test_deadline_is_seen_by(fleet: Fleet, clock: Clock, look: Callable[[Transfers, str], Transfer]) -> None:
    transfer_id = grant(fleet).transfer_id
    clock.pass_(60)
    assert look(fleet.transfers, transfer_id).session.error_code == "deadline_exceeded"


@pytest.mark.parametrize(
    "go",
    [
        pytest.param(lambda fleet: fleet.register("t", url=None, revision=None, generation=2), id="a new process"),
        pytest.param(lambda fleet: fleet.register("t", url=None, epoch=2), id="a new epoch"),
        pytest.param(lambda fleet: fleet.registry.leave("t", epoch=1), id="its leave"),
    ],
)
def test_transfer_of_a_target_that_is_gone_is_cancelled(fleet: Fleet, go: Callable[[Fleet], object]) -> None:
    transfer_id = grant(fleet).transfer_id
    go(fleet)
    session = fleet.transfers.get(transfer_id).session
    assert session.state is TransferState.CANCELLED
    assert "left, or was replaced" in str(session.error_detail)


def test_transfer_of_a_silent_target_goes_on(fleet: Fleet, clock: Clock) -> None:
    transfer_id = grant(fleet).transfer_id
    clock.pass_(30)
    assert fleet.transfers.report(transfer_id, 0, receiving(8), generation=1).state is TransferState.RECEIVING


def test_transfer_goes_on_when_its_source_is_gone(fleet: Fleet) -> None:
    fleet.source("s")
    transfer = grant(fleet)
    fleet.registry.leave("s", epoch=1)
    told = fleet.transfers.report(
        transfer.transfer_id, 0, receiving(8), generation=1, sources=[SourceBytes(instance_id="s", rank=0, nbytes=8)]
    )
    assert told.ranks[0].nbytes_read == {"s": {0: 8}}


def test_transfers_go_on_in_another_service_over_the_same_store(clock: Clock) -> None:
    store = MemoryStore()
    before, after = Fleet(store, clock), Fleet(store, clock)
    before.source("s")
    transfer = grant(before)
    before.transfers.report(transfer.transfer_id, 0, receiving(8), generation=1)
    assert after.transfers.get(transfer.transfer_id).session.ranks[0].bytes_peer == 8
    assert after.transfers.report(transfer.transfer_id, 0, receiving(32, state="ready"), generation=1).state == "ready"
    [source] = transfer.sources
    assert after.registry.sign(transfer.ticket(0, source)) == before.registry.sign(transfer.ticket(0, source))


def test_newest_lists_the_newest_first(fleet: Fleet, clock: Clock) -> None:
    made = []
    for _ in range(3):
        made.append(grant(fleet).transfer_id)
        clock.pass_(1)
    fleet.transfers.cancel(made[1])
    assert [transfer.transfer_id for transfer in fleet.transfers.newest(limit=10)] == made[::-1]
    assert [transfer.transfer_id for transfer in fleet.transfers.newest(limit=2)] == made[:0:-1]


def test_forget_ended_drops_transfers_and_their_keys_after_their_time(fleet: Fleet, clock: Clock) -> None:
    fleet.register("t", url=None, lease_s=1000)
    ended, _ = fleet.transfers.create(REQUEST, idempotency_key="k")
    running, _ = fleet.transfers.create(replace(REQUEST, deadline_s=1000.0))
    fleet.transfers.cancel(ended.transfer_id)
    clock.pass_(99)
    fleet.transfers.forget_ended(keep_s=100)
    assert fleet.transfers.get(ended.transfer_id).state is TransferState.CANCELLED
    clock.pass_(1)
    fleet.transfers.forget_ended(keep_s=100)
    with pytest.raises(NotFoundError):
        fleet.transfers.get(ended.transfer_id)
    assert fleet.transfers.get(running.transfer_id).state is TransferState.PLANNED
    assert fleet.transfers.create(REQUEST, idempotency_key="k")[1] is True


def test_sequence_grows_with_changes_only(fleet: Fleet) -> None:
    fleet.source("s")
    transfer = grant(fleet)
    reports = [receiving(8), receiving(8), receiving(16), receiving(16, state="ready"), receiving(16, state="ready")]
    sequences = [fleet.transfers.report(transfer.transfer_id, 0, r, generation=1).sequence for r in reports]
    assert sequences == [2, 2, 3, 4, 4]
