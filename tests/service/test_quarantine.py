"""Who is kept from targets, by what targets say: a pure judgement, and what the transfers of a store make of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import MODEL, Api, Clock, Fleet, MakeApi, make_manifest, progress
from tests.service.test_matching import choose, reasons, source, taken
from weightwire.service.matching import Want, choose_sources
from weightwire.service.quarantine import DamageReport, Record, judge
from weightwire.service.store import MemoryStore
from weightwire.service.transfers import ReportedFailure, SourceBytes, TransferRequest
from weightwire.transfer.errors import RequestError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress, TransferState

NOW, KEEP_S = 1000.0, 600.0
TARGETS = ("t1", "t2", "t3")


def report(accuser: str, **changes: object) -> DamageReport:
    made = DamageReport(
        accuser=accuser, rank=0, generation=1, weight_version=0, code="checksum_mismatch", detail="a chunk",
        reported_at=NOW - 1,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def record(instance_id: str, *reports: DamageReport, served: Iterable[str] = ()) -> Record:
    made = Record(instance_id=instance_id, served=frozenset(served))
    for each in reports:
        made = made.with_report(each)
    return made


def certain(*records: Record) -> dict[str, bool]:
    """Whether each source in quarantine is there for certain."""
    instances = [source(name) for name in ("a", "b", "c")]
    return {name: v.is_certain for name, v in judge(records, instances, now=NOW, keep_s=KEEP_S).items()}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([], {}, id="nothing was reported"),
        pytest.param([record("a", report("t1"), report("t2"))], {"a": True}, id="two targets agree"),
        pytest.param([record("a", report("t1"))], {"a": False}, id="one target alone"),
        pytest.param([record("a", report("t1"), report("t1"))], {"a": False}, id="one target says it twice"),
        pytest.param([record("a", report("t1"), report("t1", rank=1))], {"a": False}, id="of a rank that is not there"),
        pytest.param([record("a", report("t1"), served=["t2"])], {}, id="somebody else was served well"),
        pytest.param([record("a", report("t1"), served=["t1"])], {"a": False}, id="only the accuser was served well"),
        pytest.param(
            [record("a", report("t1"), report("t2"), served=["t3"])], {"a": True}, id="two agree against a third"
        ),
        pytest.param(
            [record(name, report("t1")) for name in ("a", "b", "c")], {}, id="a target that finds everybody damaged"
        ),
        pytest.param(
            [record("a", report("t1")), record("b", report("t1"), report("t2"))],
            {"b": True},
            id="the word of one that accuses two counts where another agrees",
        ),
        pytest.param([record("a", report("t1", generation=2))], {}, id="of another process"),
        pytest.param([record("a", report("t1", weight_version=4))], {}, id="of another version"),
        pytest.param([record("a", report("t1", reported_at=NOW - KEEP_S))], {}, id="so long ago that it is over"),
        pytest.param([record("gone", report("t1"), report("t2"))], {}, id="of an instance that left"),
    ],
)
def test_quarantine_follows_from_the_reports(records: list[Record], expected: dict[str, bool]) -> None:
    assert certain(*records) == expected


@given(st.lists(st.sampled_from("abc"), max_size=12), st.sets(st.sampled_from("abc")))
def test_one_target_whatever_it_says_takes_no_source_away_for_certain(names: list[str], served: set[str]) -> None:
    records = {name: record(name, served=["t2"] if name in served else ()) for name in "abc"}
    for name in names:
        records[name] = records[name].with_report(report("t1"))
    found = certain(*records.values())
    assert True not in found.values()
    assert len(found) <= 1
    verdicts = judge(records.values(), [source(name) for name in "abc"], now=NOW, keep_s=KEEP_S)
    want = Want(
        model="m", revision=None, weight_version=None, topology=Topology(), exclude_instance=None, max_sources=8
    )
    choice = choose_sources([source(name) for name in "abc"], want, readers={}, now=NOW, verdicts=verdicts)
    assert len(choice.sources) >= 2


def test_source_that_one_target_accuses_is_taken_as_long_as_nobody_else_holds_the_same() -> None:
    verdicts = judge([record("a", report("t1"))], [source("a")], now=NOW, keep_s=KEEP_S)
    want = Want(
        model="m", revision=None, weight_version=None, topology=Topology(), exclude_instance=None, max_sources=8
    )
    alone = choose_sources([source("a")], want, readers={}, now=NOW, verdicts=verdicts)
    assert taken(alone) == ["a"]
    beside_older = choose_sources(
        [source("a", version=0), source("b", revision="r2")], want, readers={}, now=NOW, verdicts=verdicts
    )
    assert taken(beside_older) == ["a"], "the other one holds something else"
    beside = choose_sources([source("a"), source("b")], want, readers={}, now=NOW, verdicts=verdicts)
    assert taken(beside) == ["b"]
    assert "in quarantine: one target had damaged bytes from it, last from rank 0: a chunk" in reasons(beside)["a"]


def test_source_that_takes_no_readers_is_not_matched() -> None:
    paused = source("a")
    paused = replace(paused, limits=replace(paused.limits, max_readers=0))
    assert reasons(choose(paused, source("b"))) == {"a": "takes no readers: its limit was set to 0"}


# In a store


def grant(fleet: Fleet, target: str) -> str:
    fleet.register(target, url=None)
    request = TransferRequest(
        model=MODEL, revision=None, weight_version=None, target_instance=target, target_epoch=1, ranks=((0, 1),),
        topology=Topology(), deadline_s=100.0, max_sources=8,
    )  # fmt: skip
    return fleet.transfers.create(request)[0].transfer_id


def accuse(fleet: Fleet, transfer_id: str, instance_id: str, *, generation: int = 1) -> None:
    failure = ReportedFailure(
        instance_id=instance_id, rank=0, generation=generation, code="checksum_mismatch", detail="a chunk"
    )
    receiving = RankProgress(state=TransferState.RECEIVING, bytes_total=32)
    fleet.transfers.report(transfer_id, 0, receiving, generation=1, failures=[failure])


def finish(fleet: Fleet, transfer_id: str, instance_id: str) -> None:
    ready = RankProgress(state=TransferState.READY, bytes_total=32, bytes_peer=32)
    given = [SourceBytes(instance_id=instance_id, rank=0, nbytes=32)]
    fleet.transfers.report(transfer_id, 0, ready, generation=1, sources=given)


def test_reports_of_two_targets_end_with_the_process_or_after_a_while(fleet: Fleet, clock: Clock) -> None:
    fleet.source("a")
    for target in ("t1", "t2"):
        accuse(fleet, grant(fleet, target), "a")
    assert {name: verdict.is_certain for name, verdict in fleet.transfers.verdicts().items()} == {"a": True}
    fleet.register("a", generation=2)
    fleet.publish("a", generation=2)
    assert fleet.transfers.verdicts() == {}
    fleet.source("b")
    for transfer_id in [grant(fleet, target) for target in ("t1", "t2")]:
        accuse(fleet, transfer_id, "b")
    fleet.transfers.forget_damage()
    assert set(fleet.transfers.verdicts()) == {"b"}
    clock.pass_(600.0)
    assert fleet.transfers.verdicts() == {}
    fleet.transfers.forget_damage()


def test_target_that_was_served_well_speaks_for_a_source_before_and_after_the_report(fleet: Fleet) -> None:
    fleet.source("a")
    finish(fleet, grant(fleet, "t1"), "a")
    accuse(fleet, grant(fleet, "t2"), "a")
    assert fleet.transfers.verdicts() == {}
    fleet.source("b")
    accuse(fleet, grant(fleet, "t3"), "b")
    assert set(fleet.transfers.verdicts()) == {"b"}
    other = grant(fleet, "t4")
    assert fleet.transfers.get(other).source_instances == {"a"}
    fleet.registry.leave("a", epoch=1)
    finish(fleet, grant(fleet, "t5"), "b")
    assert fleet.transfers.verdicts() == {}


def test_reports_of_one_machine_are_one_word_under_whatever_names(make_api: MakeApi) -> None:
    store = MemoryStore()
    apis = [make_api(store=store, peer=peer) for peer in ("10.0.0.1", "10.0.0.2")]
    url = [{"rank": 0, "generation": 1, "url": "http://10.0.0.9:7000"}]
    prepare(apis[0], ranks=url)
    assert accuse_over_http(apis[0], "t1") == accuse_over_http(apis[0], "t2") == "quarantined"
    assert "one target" in reason_of(apis[0])
    accuse_over_http(apis[1], "t3")
    assert "2 targets" in reason_of(apis[0])


def test_failures_of_sources_that_were_not_granted_are_refused(fleet: Fleet) -> None:
    fleet.source("a")
    with pytest.raises(RequestError, match=r"reports failures of sources \[\('x', 0\)\]"):
        accuse(fleet, grant(fleet, "t1"), "x")
    accuse(fleet, grant(fleet, "t2"), "a", generation=9)
    assert fleet.transfers.verdicts() == {}, "it is about a process that was not granted"


# Over HTTP


def prepare(api: Api, **fields: object) -> None:
    api.register("s1", **fields).raise_for_status()
    api.publish(make_manifest()).raise_for_status()


def accuse_over_http(api: Api, target: str) -> str:
    ranks = [{"rank": 0, "generation": 1}]
    api.register(target, ranks=[{"rank": 0, "generation": 1, "url": None}]).raise_for_status()
    granted = api(
        "POST", "/v1/transfers", body={"model": MODEL, "target": {"instance_id": target, "epoch": 1, "ranks": ranks}}
    ).json()
    failure = {
        "instance_id": "s1", "rank": 0, "generation": 1, "code": "checksum_mismatch", "detail": "a chunk",
    }  # fmt: skip
    path = f"/v1/transfers/{granted['transfer_id']}/ranks/0/progress"
    api("POST", path, body=progress(failures=[failure])).raise_for_status()
    return str(sources_of(api)["state"])


def sources_of(api: Api) -> dict[str, object]:
    found = {source["instance_id"]: source for source in api("GET", "/v1/models/org%2Fname/sources").json()}
    assert isinstance(found["s1"], dict)
    return found["s1"]


def reason_of(api: Api) -> str:
    return str(sources_of(api)["reason"])


def test_quarantine_shows_in_the_sources_in_the_instances_and_in_the_metrics(api: Api) -> None:
    prepare(api)
    assert sources_of(api)["state"] == "ready"
    for target in ("t1", "t2"):
        accuse_over_http(api, target)
    assert reason_of(api) == "in quarantine: 2 targets had damaged bytes from it, last from rank 0: a chunk"
    assert api("GET", "/v1/instances/s1").json()["state"] == "quarantined"
    text = api("GET", "/metrics").text
    assert 'weightwire_quarantined{code="checksum_mismatch",instance_id="s1"} 1.0' in text
    refused = api.grant().json()
    assert refused["ranks"][0]["sources"] == []
    assert "s1" in [reason["instance_id"] for reason in refused["reasons"]]
