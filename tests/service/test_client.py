"""The client's calls for several ranks, against a real service on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from tests.service.conftest import MODEL, REVISION, make_manifest
from weightwire.service.client.api import Grant, RankBinding, ServiceClient
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.errors import ConflictError, NotFoundError, RequestError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, TransferState

TP2, TP3 = Topology(tp=2), Topology(tp=3)


@pytest.fixture
def client() -> Iterator[ServiceClient]:
    with running_service(Settings(port=0)) as url, ServiceClient(url) as client:
        yield client


def bindings(instance_id: str, topology: Topology, *, url: str | None = "http://127.0.0.1:7000") -> list[RankBinding]:
    """All ranks of a process, on one URL."""
    return [
        RankBinding(instance_id=instance_id, generation=1, rank=rank, url=url) for rank in range(topology.world_size)
    ]


def serve(client: ServiceClient, instance_id: str, topology: Topology) -> None:
    ranks = bindings(instance_id, topology)
    client.register_ranks(ranks, model=MODEL, revision=REVISION, topology=topology)
    for binding in ranks:
        client.publish(binding, make_manifest(topology=topology, rank=binding.rank), weight_version=0)


def targets(client: ServiceClient, topology: Topology) -> list[RankBinding]:
    ranks = bindings("t", topology, url=None)
    client.register_ranks(ranks, model=MODEL, revision=None, topology=topology)
    return ranks


def keys(grant: Grant, rank: int) -> list[tuple[str, int]]:
    return [(source.instance_id, source.rank) for source in grant.ranks[rank]]


def test_ranks_of_one_process_are_registered_in_one_call(client: ServiceClient) -> None:
    leases = client.register_ranks(bindings("s", TP3), model=MODEL, revision=REVISION, topology=TP3)
    assert list(leases) == [0, 1, 2]
    assert len({lease.access.ticket_key for lease in leases.values()}) == 3
    client.publish(bindings("s", TP3)[1], make_manifest(topology=TP3, rank=1), weight_version=0)
    again = client.register_ranks(bindings("s", TP3), model=MODEL, revision=REVISION, topology=TP3)
    assert [lease.published for lease in again.values()] == [None, make_manifest(topology=TP3, rank=1).digest, None]


def test_one_rank_is_registered_as_before(client: ServiceClient) -> None:
    [binding] = bindings("s", Topology())
    lease = client.register(binding, model=MODEL, revision=REVISION, topology=Topology(), lease_s=7)
    assert (lease.lease_s, lease.published) == (7, None)


def test_stale_rank_renews_no_lease_of_its_neighbours(client: ServiceClient) -> None:
    first, second = bindings("s", TP2)
    client.register(replace(second, generation=2, epoch=1), model=MODEL, revision=REVISION, topology=TP2)
    with pytest.raises(ConflictError, match="rank 1: generation 1 is stale"):
        client.register_ranks([first, second], model=MODEL, revision=REVISION, topology=TP2)
    [instance] = client.instances()
    assert [rank["rank"] for rank in cast("list[dict[str, object]]", instance["ranks"])] == [1]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="nobody"),
        pytest.param(
            [RankBinding(instance_id="a", generation=1), RankBinding(instance_id="b", generation=1, rank=1)],
            id="two instances",
        ),
        pytest.param(
            [RankBinding(instance_id="a", generation=1), RankBinding(instance_id="a", generation=2, rank=1)],
            id="two epochs",
        ),
    ],
)
def test_bindings_speak_of_one_instance(client: ServiceClient, ranks: list[RankBinding]) -> None:
    with pytest.raises(ValueError, match="expected exactly one"):
        client.register_ranks(ranks, model=MODEL, revision=None, topology=TP2)
    with pytest.raises(ValueError, match="expected exactly one"):
        client.create_transfer(ranks, model=MODEL, revision=None, topology=TP2, deadline_s=60)


def test_grant_across_topologies_has_the_sources_of_each_rank(client: ServiceClient) -> None:
    serve(client, "other", TP3)
    serve(client, "same", TP2)
    grant = client.create_transfer(targets(client, TP2), model=MODEL, revision=None, topology=TP2, deadline_s=60)
    others = [("other", 0), ("other", 1), ("other", 2)]
    assert list(grant.ranks) == [0, 1]
    assert keys(grant, 0) == [("same", 0), ("same", 1), *others]
    assert keys(grant, 1) == [("same", 1), ("same", 0), *others]
    assert grant.sources == (*grant.ranks[0], *grant.ranks[1])
    assert len({source.ticket for source in grant.sources}) == 10
    assert {(source.target_instance, source.target_rank) for source in grant.ranks[1]} == {("t", 1)}


def test_grant_to_one_rank_has_its_sources(client: ServiceClient) -> None:
    serve(client, "s", TP2)
    [target] = targets(client, Topology())
    grant = client.create_transfer(target, model=MODEL, revision=None, deadline_s=60, idempotency_key="k")
    assert grant.sources == grant.ranks[0]
    assert keys(grant, 0) == [("s", 0), ("s", 1)]
    again = client.create_transfer([target], model=MODEL, revision=None, deadline_s=60, idempotency_key="k")
    assert again == grant
    with pytest.raises(ConflictError, match="was used for another request"):
        client.create_transfer(target, model=MODEL, revision=None, weight_version=0, deadline_s=60, idempotency_key="k")


def test_transfer_needs_the_topology_that_its_target_is_registered_with(client: ServiceClient) -> None:
    ranks = targets(client, TP2)
    with pytest.raises(ConflictError, match="topology is registered as"):
        client.create_transfer(ranks, model=MODEL, revision=None, deadline_s=60)


def test_failure_of_one_rank_is_told_to_the_other(client: ServiceClient) -> None:
    first, second = targets(client, TP2)
    grant = client.create_transfer([first, second], model=MODEL, revision=None, topology=TP2, deadline_s=60)
    receiving = RankProgress(state=TransferState.RECEIVING)
    assert client.report(grant.transfer_id, first, receiving) is None
    failed = RankProgress(state=TransferState.FAILED, error_code="memory_insufficient", error_detail="rank 1")
    client.report(grant.transfer_id, second, failed)
    told = client.report(grant.transfer_id, first, receiving)
    assert told is not None
    assert (told.code, str(told)) == ("memory_insufficient", "rank 1")


def test_plan_is_for_the_topology_of_its_manifests(client: ServiceClient) -> None:
    serve(client, "s", TP2)
    planned = client.plan(MODEL, manifests=[make_manifest(topology=TP2, rank=1)])
    assert planned["bytes_per_target_rank"] == {"1": 32}
    assert client.plan(MODEL, topology=TP2)["bytes_per_target_rank"] == {"0": 32, "1": 32}


def test_plan_without_manifests_needs_a_source_of_the_topology(client: ServiceClient) -> None:
    serve(client, "s", TP2)
    with pytest.raises(RequestError, match="source 's' has tp=2 pp=1 ep=1, asked for tp=1 pp=1 ep=1"):
        client.plan(MODEL)
    with pytest.raises(NotFoundError, match="no instance can serve it"):
        client.plan("org/unknown")
