"""Grants of waves: which targets that are receiving are granted as relays, and with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.conftest import MODEL, Api, Clock, Fleet, MakeApi, make_manifest, progress, transfer_request
from weightwire.service.grants import Transfer
from weightwire.service.store import MemoryStore
from weightwire.service.transfers import SourceBytes, TransferRequest
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
    relay=True,
    takes_relays=True,
)


def join(
    fleet: Fleet, name: str, *, generation: int = 1, topology: Topology | None = None, **fields: object
) -> Transfer:
    """A target that serves what it receives, registered first."""
    topology = topology or Topology()
    url = f"http://10.0.0.9:{7000 + len(name)}"
    fleet.register(name, url=url, revision=None, generation=generation, epoch=generation, topology=topology)
    request = replace(
        REQUEST,
        target_instance=name,
        target_epoch=generation,
        topology=topology,
        ranks=tuple((rank, generation) for rank in range(topology.world_size)),
    )
    return fleet.transfers.create(replace(request, **fields))[0]  # type: ignore[arg-type]


def tiers(transfer: Transfer) -> list[tuple[int, str, bool]]:
    return [(instance.standby, instance.instance_id, instance.relay) for instance in transfer.instances]


def end(fleet: Fleet, transfer: Transfer, state: str) -> None:
    event = RankProgress(state=TransferState(state), error_code="x" if state == "failed" else None)
    fleet.transfers.report(transfer.transfer_id, 0, event, generation=transfer.ranks[0].generation)


def test_joiners_form_a_chain_with_the_source_behind(fleet: Fleet) -> None:
    fleet.source("s")
    assert tiers(join(fleet, "a")) == [(0, "s", False)]
    assert tiers(join(fleet, "b")) == [(0, "a", True), (1, "s", False)]
    assert tiers(join(fleet, "c")) == [(0, "b", True), (1, "a", True), (2, "s", False)]


def test_relay_is_granted_as_the_process_that_it_is(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s", topology=TP2, weight_version=4)
    join(fleet, "a", generation=3, topology=TP2)
    transfer = join(fleet, "b", topology=TP2)
    for rank in (0, 1):
        relay, *others = transfer.sources_of(rank)
        assert (relay.key, relay.generation, relay.epoch, relay.weight_version) == (("a", rank), 3, 3, 4)
        assert relay.url == "http://10.0.0.9:7001"
        assert relay.manifest_digest == make_manifest(topology=TP2, rank=rank).digest
        # It is only its twin that a rank takes from a relay.
        assert [source.key for source in others] == [("s", rank), ("s", 1 - rank)]
        text = fleet.registry.sign(transfer.ticket(rank, relay))
        key = fleet.registry.source_key("a", fleet.registry.instance("a").ranks[rank])
        assert read_ticket(key, text, now=clock()).source_instance == "a"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"relay": False}, "it does not serve meanwhile", id="one that does not relay"),
        pytest.param({"weight_version": 1}, "another version", id="one of another version"),
        pytest.param({"revision": "r0"}, "another revision", id="one of another revision"),
        pytest.param({"ranks": ((0, 1),), "topology": TP2}, "another topology", id="one of another topology"),
    ],
)
def test_only_what_will_hold_the_same_is_a_relay(fleet: Fleet, fields: dict[str, object], why: str) -> None:
    fleet.source("s", weight_version=2)
    fleet.source("old", weight_version=1)
    fleet.source("other", revision="r0", weight_version=1)
    topology = fields.get("topology")
    assert topology is None or isinstance(topology, Topology)
    join(fleet, "a", **{"topology": topology} | {key: fields[key] for key in fields if key != "topology"})  # type: ignore[arg-type]
    assert ("a", True) not in [(name, relay) for _, name, relay in tiers(join(fleet, "b", weight_version=2))], why


def test_target_without_a_url_is_no_relay(fleet: Fleet) -> None:
    fleet.source("s")
    fleet.register("a", url=None, revision=None)
    fleet.transfers.create(replace(REQUEST, target_instance="a"))
    assert tiers(join(fleet, "b")) == [(0, "s", False)]


def test_target_without_a_source_of_its_topology_is_no_relay(fleet: Fleet) -> None:
    """What it will hold is nobody's manifest, so that nothing could be asked of it yet."""
    fleet.source("s", topology=TP2)
    join(fleet, "a")
    assert tiers(join(fleet, "b")) == [(0, "s", False)]


def test_relay_of_some_ranks_is_one_for_these(fleet: Fleet) -> None:
    fleet.source("s", topology=TP2)
    fleet.register("a", url="http://10.0.0.9:7001", topology=TP2)
    fleet.transfers.create(replace(REQUEST, target_instance="a", topology=TP2, ranks=((1, 1),)))
    assert tiers(join(fleet, "b", topology=TP2, ranks=((1, 1),))) == [(0, "a", True), (1, "s", False)]
    assert tiers(join(fleet, "c", topology=TP2)) == [(0, "s", False)]


def test_dead_relay_is_not_granted_and_its_reader_takes_its_place(fleet: Fleet, clock: Clock) -> None:
    fleet.source("s")
    fleet.register("a", url="http://10.0.0.9:7001", revision=None, lease_s=5.0)
    fleet.transfers.create(replace(REQUEST, target_instance="a"))
    join(fleet, "b")
    clock.pass_(6.0)
    assert tiers(join(fleet, "c")) == [(0, "b", True), (1, "s", False)]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_relay_whose_transfer_failed_is_not_granted(fleet: Fleet, state: str) -> None:
    fleet.source("s")
    a = join(fleet, "a")
    join(fleet, "b")
    end(fleet, a, state)
    assert tiers(join(fleet, "c")) == [(0, "b", True), (1, "s", False)]


def test_relay_that_restarted_is_another(fleet: Fleet) -> None:
    fleet.source("s")
    join(fleet, "a")
    join(fleet, "b")
    assert tiers(join(fleet, "a", generation=2)) == [(0, "b", True), (1, "s", False)]
    # The new "a" reads from "b", whose old "a" is gone: no circle.
    assert tiers(join(fleet, "c")) == [(0, "a", True), (1, "b", True), (2, "s", False)]


def test_relay_that_is_ready_becomes_a_source(fleet: Fleet) -> None:
    fleet.source("s")
    a = join(fleet, "a")
    b = join(fleet, "b")
    end(fleet, a, "ready")
    fleet.publish("a")
    c = join(fleet, "c")
    assert tiers(c) == [(0, "s", False), (1, "a", False)]
    assert fleet.transfers.active_readers() == {"s": 1, "a": 1}
    end(fleet, b, "ready")
    assert fleet.transfers.active_readers() == {"s": 1}


def test_readers_are_counted_where_they_read_now(fleet: Fleet) -> None:
    fleet.source("s")
    a = join(fleet, "a")
    join(fleet, "b")
    assert fleet.transfers.active_readers() == {"s": 1, "a": 1}
    end(fleet, a, "failed")
    assert fleet.transfers.active_readers() == {"s": 1}


def test_target_that_asks_again_is_not_sent_to_those_that_it_feeds(fleet: Fleet) -> None:
    fleet.source("s")
    join(fleet, "a")
    join(fleet, "b")
    assert tiers(join(fleet, "a")) == [(0, "s", False)]


def test_target_that_knows_no_relays_gets_every_source_at_once(fleet: Fleet) -> None:
    fleet.source("s")
    fleet.source("z")
    join(fleet, "a")
    assert tiers(join(fleet, "b", takes_relays=False)) == [(0, "s", False), (0, "z", False)]


def test_relays_are_no_instances_that_were_not_taken(fleet: Fleet) -> None:
    fleet.source("s")
    join(fleet, "a")
    join(fleet, "b")
    assert [reason.instance_id for reason in join(fleet, "c").reasons] == []


def test_wave_outlives_the_service(clock: Clock) -> None:
    store = MemoryStore()
    before = Fleet(store, clock)
    before.source("s")
    join(before, "a")
    assert tiers(join(Fleet(store, clock), "b")) == [(0, "a", True), (1, "s", False)]


def test_bytes_of_a_relay_are_counted_as_its_own(fleet: Fleet) -> None:
    fleet.source("s")
    join(fleet, "a")
    b = join(fleet, "b")
    event = RankProgress(state=TransferState.RECEIVING, bytes_total=32, bytes_peer=30)
    sources = [SourceBytes(instance_id="a", rank=0, nbytes=20), SourceBytes(instance_id="s", rank=0, nbytes=10)]
    after = fleet.transfers.report(b.transfer_id, 0, event, generation=1, sources=sources)
    assert after.ranks[0].nbytes_read == {"a": {0: 20}, "s": {0: 10}}


# Over HTTP


@pytest.fixture
def waves(make_api: MakeApi) -> Api:
    """A source, and a target `t0` that receives from it and relays."""
    api = make_api()
    api.register("s1").raise_for_status()
    api.publish(make_manifest()).raise_for_status()
    api.register("t0", ranks=[{"rank": 0, "generation": 1, "url": "http://127.0.0.1:7001"}]).raise_for_status()
    target = {"instance_id": "t0", "epoch": 1, "ranks": [{"rank": 0, "generation": 1}]}
    api("POST", "/v1/transfers", body=transfer_request(target=target, relay=True)).raise_for_status()
    return api


@pytest.mark.parametrize(
    ("spoken", "expected"),
    [
        pytest.param("1.1", [("t0", True, 0), ("s1", False, 1)], id="one that knows relays"),
        pytest.param("1.2", [("t0", True, 0), ("s1", False, 1)], id="a newer one"),
        pytest.param("1.0", [("s1", False, 0)], id="an older one"),
        pytest.param(None, [("s1", False, 0)], id="one that says nothing"),
    ],
)
def test_grant_has_relays_for_those_who_know_them(
    waves: Api, spoken: str | None, expected: list[tuple[str, bool, int]]
) -> None:
    waves.register("t1", ranks=[{"rank": 0, "generation": 1, "url": None}]).raise_for_status()
    headers = {"Weightwire-Protocol": spoken} if spoken else {}
    grant = waves("POST", "/v1/transfers", body=transfer_request(), headers=headers).json()
    sources = grant["ranks"][0]["sources"]
    assert [(source["instance_id"], source["relay"], source["standby"]) for source in sources] == expected


def test_transfer_shows_who_feeds_it(waves: Api) -> None:
    waves.register("t1", ranks=[{"rank": 0, "generation": 1, "url": None}]).raise_for_status()
    headers = {"Weightwire-Protocol": "1.1"}
    grant = waves("POST", "/v1/transfers", body=transfer_request(), headers=headers).json()
    body = progress(peer=8, sources=[{"instance_id": "t0", "rank": 0, "bytes": 8}])
    waves("POST", f"/v1/transfers/{grant['transfer_id']}/ranks/0/progress", body=body).raise_for_status()
    shown = waves("GET", f"/v1/transfers/{grant['transfer_id']}").json()
    assert [(each["instance_id"], each["relay"], each["standby"], each["bytes"]) for each in shown["sources"]] == [
        ("t0", True, 0, 8),
        ("s1", False, 1, 0),
    ]
