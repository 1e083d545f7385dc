"""Progress as server-sent events, from a server on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.service.conftest import Clock, Fleet, progress, registration, transfer_request
from weightwire.service.events import Changes
from weightwire.service.schemas import TransferBody
from weightwire.service.server import Server, running_service
from weightwire.service.settings import Settings

PATIENT = httpx.Timeout(30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event as it came."""

    sequence: int
    kind: str
    data: dict[str, object]


@pytest.fixture
def service(clock: Clock) -> Iterator[httpx.Client]:
    """A client of a running service whose sweeper looks often, since its clock is turned by hand."""
    settings = Settings(port=0, sweep_s=0.02)
    with running_service(settings, clock=clock) as url, httpx.Client(base_url=url, timeout=PATIENT) as client:
        yield client


def grant(client: httpx.Client, **fields: object) -> str:
    target = registration(ranks=[{"rank": 0, "generation": 1, "url": None}])
    client.put("/v1/instances/t1", json=target).raise_for_status()
    return str(client.post("/v1/transfers", json=transfer_request(**fields)).raise_for_status().json()["transfer_id"])


def report(client: httpx.Client, transfer_id: str, state: str = "receiving", peer: int = 0) -> None:
    body = progress(state, peer=peer)
    client.post(f"/v1/transfers/{transfer_id}/ranks/0/progress", json=body).raise_for_status()


def events_of(response: httpx.Response) -> Iterator[Event]:
    """The events of a stream, as they come; comments are passed over."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Event(sequence=int(fields["id"]), kind=fields["event"], data=json.loads(fields["data"]))
            fields = {}


def test_events_come_at_once_then_at_each_change_and_end_with_the_transfer(service: httpx.Client) -> None:
    transfer_id = grant(service)
    with service.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["weightwire-protocol"]
        events = events_of(response)
        seen = [next(events)]
        for state, peer in (("receiving", 8), ("verifying", 32), ("ready", 32)):
            report(service, transfer_id, state, peer)
            seen.append(next(events))
        assert list(events) == [], "the stream ends by itself"
    assert [event.data["state"] for event in seen] == ["planned", "receiving", "verifying", "ready"]
    assert [event.data["bytes_peer"] for event in seen] == [0, 8, 32, 32]
    assert {event.kind for event in seen} == {"progress"}
    assert [event.sequence for event in seen] == sorted({event.sequence for event in seen})
    assert seen[-1].data["transfer_id"] == transfer_id
    assert set(seen[-1].data) == set(service.get(f"/v1/transfers/{transfer_id}").json())


def test_listener_is_woken_from_another_thread(fleet: Fleet) -> None:
    fleet.register("t1", url=None)
    transfer, _ = fleet.transfers.create(TransferBody.model_validate(transfer_request()).to_request())
    changes = Changes()

    async def listen() -> None:
        with changes.listen(transfer.transfer_id) as listener:
            for _ in range(2):
                await asyncio.to_thread(changes.transfer_changed, transfer, transfer)
                await listener.wait()
            await asyncio.to_thread(changes.close)
            await listener.wait()

    # In debug mode a loop refuses what is not meant for other threads.
    asyncio.run(listen(), debug=True)
    assert changes.num_listeners == 0


def test_events_that_come_fast_are_merged_and_the_last_one_is_told(service: httpx.Client) -> None:
    transfer_id = grant(service)
    with service.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
        events = events_of(response)
        next(events)
        for peer in range(30):
            report(service, transfer_id, peer=peer)
        report(service, transfer_id, "ready", 32)
        rest = list(events)
    assert 1 <= len(rest) < 31
    assert (rest[-1].data["state"], rest[-1].data["bytes_peer"]) == ("ready", 32)


def test_every_listener_is_told(service: httpx.Client) -> None:
    transfer_id = grant(service)
    ends: list[str] = []
    listening = threading.Barrier(4)

    def listen() -> None:
        with service.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
            events = events_of(response)
            next(events)
            listening.wait()
            ends.extend(str(event.data["state"]) for event in events)

    threads = [threading.Thread(target=listen) for _ in range(3)]
    for thread in threads:
        thread.start()
    listening.wait()
    service.delete(f"/v1/transfers/{transfer_id}").raise_for_status()
    for thread in threads:
        thread.join()
    assert ends == ["cancelled"] * 3


def test_deadline_is_told_though_nobody_calls(service: httpx.Client, clock: Clock) -> None:
    transfer_id = grant(service, deadline_s=60)
    with service.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
        events = events_of(response)
        next(events)
        clock.pass_(60)
        (last,) = events
    assert last.data["state"] == "failed"
    assert isinstance(last.data["error"], dict)
    assert last.data["error"]["code"] == "deadline_exceeded"


def test_client_that_comes_back_is_told_what_it_has_not_seen(service: httpx.Client) -> None:
    transfer_id = grant(service)
    path = f"/v1/transfers/{transfer_id}/events"
    with service.stream("GET", path) as response:
        first = next(events_of(response))
    report(service, transfer_id, "receiving", 8)
    with service.stream("GET", path, headers={"Last-Event-ID": str(first.sequence)}) as response:
        events = events_of(response)
        second = next(events)
        assert (second.sequence > first.sequence, second.data["bytes_peer"]) == (True, 8)
    with service.stream("GET", path, headers={"Last-Event-ID": str(second.sequence)}) as response:
        report(service, transfer_id, "ready", 32)
        (last,) = events_of(response)
        assert last.data["state"] == "ready"
    ended = service.get(path, headers={"Last-Event-ID": str(last.sequence)})
    assert (ended.status_code, ended.content) == (204, b"")


@pytest.mark.parametrize("last_seen", ["", "x", "-1", "1e3", "9" * 10_000])
def test_last_event_id_that_makes_no_sense_does_no_harm(service: httpx.Client, last_seen: str) -> None:
    transfer_id = grant(service)
    service.delete(f"/v1/transfers/{transfer_id}").raise_for_status()
    response = service.get(f"/v1/transfers/{transfer_id}/events", headers={"Last-Event-ID": last_seen})
    assert response.status_code in (200, 204)
    assert len(list(events_of(response))) <= 1


def test_listener_that_goes_away_leaves_nothing_behind(clock: Clock) -> None:
    server = Server(Settings(port=0, sweep_s=0.02), clock=clock)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda url: ready.set(),))
    thread.start()
    ready.wait()
    with httpx.Client(base_url=server.url, timeout=PATIENT) as client:
        transfer_id = grant(client)
        for _ in range(3):
            with client.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
                next(events_of(response))
        report(client, transfer_id, "ready", 32)
        with client.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
            assert [event.data["state"] for event in events_of(response)] == ["ready"]
    server.stop()
    thread.join()
    assert server.components.changes.num_listeners == 0


def test_streams_end_when_the_service_stops(clock: Clock) -> None:
    server = Server(Settings(port=0), clock=clock)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda url: ready.set(),))
    thread.start()
    ready.wait()
    with httpx.Client(base_url=server.url, timeout=PATIENT) as client:
        transfer_id = grant(client)
        with client.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
            events = events_of(response)
            next(events)
            server.stop()
            assert list(events) == [], "a proper end, and no error"
    thread.join()
