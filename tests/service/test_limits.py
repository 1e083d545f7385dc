"""Limits that are set at run time: kept by the service, told at each renewal, kept by the sources."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.conftest import MODEL, REVISION, Api, Clock, Fleet, MakeApi, make_manifest
from tests.service.test_membership import URL, settings, wait_until
from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.server import running_service
from weightwire.service.sqlite_store import SqliteStore
from weightwire.service.store import MemoryStore, Store
from weightwire.transfer.errors import NotFoundError, RequestError
from weightwire.transfer.wire.limits import LimitOverrides, SourceLimits
from weightwire.transfer.wire.source import Source, SourceIdentity

PATH = "/v1/instances/s1/limits"
OWN = SourceLimits(max_readers=5, max_bytes_per_s=100_000)
NONE = {"max_readers": None, "max_bytes_per_s": None}


def test_limits_are_shown_and_come_with_each_registration(api: Api) -> None:
    assert api.register().json()["limits"] == NONE
    assert api("GET", PATH).json() == NONE
    body = {"max_readers": 3, "max_bytes_per_s": 1_000_000}
    assert api("PUT", PATH, body=body).json() == body
    assert api("GET", PATH).json() == api.register().json()["limits"] == body
    assert api("GET", "/v1/instances/s1").json()["limits"] == body
    (source,) = api("GET", "/v1/models/org%2Fname/sources").json()
    assert source["limits"] == body
    assert api("PUT", PATH, body={"max_bytes_per_s": "unlimited"}).json() == {**NONE, "max_bytes_per_s": "unlimited"}
    assert api("PUT", PATH, body={}).json() == NONE


@pytest.mark.parametrize(
    "body",
    [
        {"max_bytes_per_s": 0},
        {"max_bytes_per_s": 65535},
        {"max_bytes_per_s": 1e6},
        {"max_bytes_per_s": "fast"},
        {"max_readers": -1},
        {"max_readers": True},
        {"max_writers": 1},
    ],
)
def test_limits_that_make_no_sense_are_refused(api: Api, body: object) -> None:
    api.register()
    answer = api("PUT", PATH, body=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    assert api("GET", PATH).json() == NONE


def test_limits_of_nobody_are_not_found(api: Api) -> None:
    assert api("GET", PATH).status_code == api("PUT", PATH, body={}).status_code == 404


def test_instance_that_takes_no_readers_is_paused(api: Api) -> None:
    api.register()
    api.publish(make_manifest()).raise_for_status()
    api("PUT", PATH, body={"max_readers": 0}).raise_for_status()
    source = api("GET", "/v1/models/org%2Fname/sources").json()[0]
    assert (source["state"], source["reason"]) == ("paused", "takes no readers: its limit was set to 0")
    assert api.grant().json()["ranks"][0]["sources"] == []
    api("PUT", PATH, body={"max_readers": 1}).raise_for_status()
    source = api("GET", "/v1/models/org%2Fname/sources").json()[0]
    assert (source["state"], source["reason"]) == ("ready", None)


@pytest.mark.parametrize("make", [lambda _: MemoryStore(), lambda path: SqliteStore(path)], ids=["memory", "sqlite"])
def test_limits_survive_a_restart_of_the_service_over_its_store_and_one_of_the_source(
    make: Callable[[Path], Store], tmp_path: Path, clock: Clock
) -> None:
    store = make(tmp_path / "state.db")
    fleet = Fleet(store, clock)
    fleet.register("s")
    fleet.registry.set_limits("s", LimitOverrides(max_readers=2, max_bytes_per_s="unlimited"))
    if isinstance(store, SqliteStore):
        store.close()
        store = SqliteStore(tmp_path / "state.db")
    fleet = Fleet(store, clock)
    assert fleet.register("s").limits == LimitOverrides(max_readers=2, max_bytes_per_s="unlimited")
    assert fleet.register("s", epoch=2, generation=2).limits.max_readers == 2, "it is set for the name"
    fleet.registry.leave("s", epoch=2)
    assert fleet.register("s", epoch=2, generation=2).limits == LimitOverrides()
    store.close()


def test_service_that_forgot_hears_from_the_source_what_was_set(make_api: MakeApi) -> None:
    told = {"max_readers": 2, "max_bytes_per_s": None}
    api = make_api()
    assert api.register(limits=told).json()["limits"] == told
    api("PUT", PATH, body={"max_readers": 7}).raise_for_status()
    assert api.register(limits=told).json()["limits"]["max_readers"] == 7, "one that knows better says so"


def member(client: ServiceClient, source: Source) -> Membership:
    binding = RankBinding(instance_id="s", generation=5, url=URL)
    return Membership(client, binding, model=MODEL, revision=REVISION, source=source)


def test_running_source_keeps_what_is_set_until_it_is_taken_back() -> None:
    source = Source(SourceIdentity(instance_id="s", generation=5), OWN)
    with running_service(settings()) as url, ServiceClient(url) as client, member(client, source):
        assert client.limits("s") == LimitOverrides()
        assert source.limits == OWN
        given = LimitOverrides(max_readers=9, max_bytes_per_s="unlimited")
        assert client.set_limits("s", given) == client.limits("s") == given
        wait_until(lambda: (source.limits.max_readers, source.limits.max_bytes_per_s) == (9, None))
        assert source.capacity.pacer.bytes_per_s is None
        client.set_limits("s", LimitOverrides(max_bytes_per_s=70_000))
        wait_until(lambda: (source.limits.max_readers, source.limits.max_bytes_per_s) == (5, 70_000))
        client.set_limits("s", LimitOverrides())
        wait_until(lambda: source.limits == OWN)
        with pytest.raises(RequestError):
            client.set_limits("s", LimitOverrides(max_bytes_per_s=1))
        with pytest.raises(NotFoundError):
            client.set_limits("nobody", LimitOverrides())


def test_limits_outlive_a_service_that_keeps_nothing() -> None:
    source = Source(SourceIdentity(instance_id="s", generation=5), OWN)
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        url = first.enter_context(running_service(settings()))
        client = stack.enter_context(ServiceClient(url))
        membership = stack.enter_context(member(client, source))
        client.set_limits("s", LimitOverrides(max_readers=1))
        wait_until(lambda: source.limits.max_readers == 1)
        first.close()
        stack.enter_context(running_service(settings(int(url.rpartition(":")[2]))))
        wait_until(lambda: bool(client.instances()))
        assert client.limits("s") == LimitOverrides(max_readers=1)
        assert source.limits.max_readers == 1
        membership.leave()
