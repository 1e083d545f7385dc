"""Ranks of one process in a real service: registered together, published each, lost and left together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import cast

import pytest

from tests.service.conftest import MODEL, REVISION, make_manifest
from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.errors import ConflictError, ManifestError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.wire.source import Source, SourceIdentity

TP4 = Topology(tp=4)
PATIENCE_S = 30.0
URL = "http://127.0.0.1:9"


def settings(port: int = 0) -> Settings:
    return Settings(port=port, lease_s=0.3, token=None, read_token=None)


@pytest.fixture
def client() -> Iterator[ServiceClient]:
    with running_service(settings()) as url, ServiceClient(url) as client:
        yield client


def bindings(*ranks: int, generation: int = 5, epoch: int | None = None) -> list[RankBinding]:
    return [RankBinding(instance_id="s", generation=generation, rank=rank, url=URL, epoch=epoch) for rank in ranks]


def member(
    client: ServiceClient, spoken_for: list[RankBinding], source: dict[int, Source] | None = None
) -> AbstractContextManager[Membership]:
    return Membership(client, spoken_for, model=MODEL, revision=REVISION, topology=TP4, source=source)


def ranks_of(client: ServiceClient) -> dict[int, tuple[object, bool]]:
    """Generation of each rank that is known, and whether it has published."""
    found = [cast("list[dict[str, object]]", instance["ranks"]) for instance in client.instances()]
    return {
        cast(int, rank["rank"]): (rank["generation"], rank["published"] is not None)
        for ranks in found
        for rank in ranks
    }


def wait_until(true: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if true():
            return
        waiting.wait(0.02)
    pytest.fail("it did not come true")


def test_ranks_of_a_process_register_in_one_call_and_each_source_gets_its_own_key(client: ServiceClient) -> None:
    sources = Source.of_ranks(SourceIdentity(instance_id="s", generation=5), (0, 2))
    with member(client, bindings(0, 2), sources):
        assert ranks_of(client) == {0: (5, False), 2: (5, False)}
        keys = {source.access.ticket_key for source in sources.values() if source.access}
        assert len(keys) == 2
    assert ranks_of(client) == {}


def test_each_rank_publishes_its_own_manifest_and_the_last_makes_the_instance_a_source(client: ServiceClient) -> None:
    with member(client, bindings(0, 1, 2, 3)) as membership:
        for rank in (3, 0, 1, 2):
            assert [source["state"] for source in client.sources(MODEL)] != ["ready"]
            membership.publish(make_manifest(topology=TP4, rank=rank), weight_version=1)
        assert [source["state"] for source in client.sources(MODEL)] == ["ready"]


def test_manifest_of_a_rank_that_is_somebody_elses_is_not_published(client: ServiceClient) -> None:
    with member(client, bindings(0, 1)) as membership:
        with pytest.raises(ValueError, match=r"rank 2: this process speaks for ranks \[0, 1\]"):
            membership.publish(make_manifest(topology=TP4, rank=2), weight_version=1)
        with pytest.raises(ManifestError, match="topology"):
            membership.publish(make_manifest(rank=0), weight_version=1)


def test_service_that_forgot_is_told_of_every_rank_again() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        url = first.enter_context(running_service(settings()))
        client = stack.enter_context(ServiceClient(url))
        membership = stack.enter_context(member(client, bindings(0, 1, 3)))
        for rank in (0, 1, 3):
            membership.publish(make_manifest(topology=TP4, rank=rank), weight_version=2)
        first.close()
        stack.enter_context(running_service(settings(int(url.rpartition(":")[2]))))
        wait_until(lambda: ranks_of(client) == dict.fromkeys((0, 1, 3), (5, True)))
        membership.leave()
        assert ranks_of(client) == {}


def test_newer_process_for_one_rank_ends_the_membership_of_all(client: ServiceClient) -> None:
    with member(client, bindings(0, 1, epoch=1)) as older:
        with member(client, bindings(1, generation=6, epoch=1)):
            assert older.lost.wait(PATIENCE_S)
            older.leave()
            # The rank that was taken is the newer one's; the one that nobody speaks for now is gone.
            assert ranks_of(client) == {1: (6, False)}
        assert ranks_of(client) == {}


def test_older_process_cannot_take_a_rank_back_and_leaves_its_neighbours_alone(client: ServiceClient) -> None:
    with (
        member(client, bindings(1, generation=6, epoch=1)),
        pytest.raises(ConflictError, match="rank 1: generation 5 is stale"),
        member(client, bindings(0, 1, epoch=1)),
    ):
        pass
    assert ranks_of(client) == {}


def test_processes_of_one_epoch_make_one_instance_whatever_their_generations(client: ServiceClient) -> None:
    with ExitStack() as stack:
        for generation, ranks in ((9, (0, 1)), (5, (2,)), (7, (3,))):
            membership = stack.enter_context(member(client, bindings(*ranks, generation=generation, epoch=1)))
            for rank in ranks:
                membership.publish(make_manifest(topology=TP4, rank=rank), weight_version=1)
        assert [source["state"] for source in client.sources(MODEL)] == ["ready"]
        assert {rank: generation for rank, (generation, _) in ranks_of(client).items()} == {0: 9, 1: 9, 2: 5, 3: 7}


def test_several_ranks_join_later_with_what_they_hold(client: ServiceClient) -> None:
    membership = Membership(client, bindings(0, 1), model=MODEL, revision=None, topology=TP4)
    membership.join_later(*(make_manifest(topology=TP4, rank=rank) for rank in (0, 1)), weight_version=4)
    wait_until(lambda: ranks_of(client) == {0: (5, True), 1: (5, True)})
    membership.leave()


def test_membership_of_nobody_is_refused() -> None:
    with ServiceClient(URL) as client, pytest.raises(ValueError, match="no rank"):
        Membership(client, [], model=MODEL, revision=None)
