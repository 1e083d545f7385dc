"""A source that is still receiving what it serves, over real sockets: readers wait, and hear that it lives."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tests.transfer.conftest import PATIENCE_S, VERSION, Serve, Served, endpoint_of, filled
from tests.transfer.wire.conftest import Answer, Answering, Model, data
from weightwire.transfer.errors import (
    FencedError,
    ProtocolError,
    SourceBusyError,
    SourceStalledError,
    TransferError,
)
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire import framing
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.stream import SourceStream, Timeouts

LONG = Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S)
WAIT = b"WAIT\0\0\0\0"


class Relay:
    """A source whose shells are empty at first; `receive` gives it a chunk."""

    def __init__(self, served: Served, model: Model, patience_s: float = PATIENCE_S) -> None:
        self.served = served
        self.manifest = model.manifest
        self.shells = model.target()
        self.held = Held(self.shells, model.manifest, patience_s=patience_s)
        self._model = model
        served.source.publish_partial(self.shells, self.held, weight_version=VERSION)

    @property
    def num_chunks(self) -> int:
        return len(self.manifest.chunk_bounds) - 1

    def receive(self, chunk: int) -> None:
        begin, end = list(pairwise(self.manifest.chunk_bounds))[chunk]
        run = Region(offset=begin, shape=(end - begin,), strides=(1,))
        self.shells.scatter(memoryview(self._model.memory[begin:end]), run, 0)
        self.held.add(self.manifest.digest, [(run, 0, run.numel)], [chunk])


@dataclass(kw_only=True)
class Reader:
    """A target that reads all of a source in one answer, in a thread of its own.

    Attributes:
        frames: As they are verified; None behind the last one, or the error that ended it.
    """

    shells: Shells
    stream: SourceStream
    frames: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)

    def run(self, model: Model) -> None:
        try:
            for frame in self.stream.fetch(model.segments(), self.shells):
                self.frames.put(frame)
            self.frames.put(None)
        except TransferError as error:
            self.frames.put(error)

    def next(self) -> object:
        return self.frames.get(timeout=PATIENCE_S)


@pytest.fixture
def relay(serve: Serve, model: Model) -> Relay:
    return Relay(serve(model.shells), model)


@pytest.fixture
def read(model: Model) -> Iterator[Callable[[Served], Reader]]:
    readers: list[tuple[Reader, threading.Thread]] = []

    def begin(served: Served, wanted: Model = model) -> Reader:
        stream = SourceStream(served.endpoint(), wanted.manifest, timeouts=LONG)
        reader = Reader(shells=wanted.target(), stream=stream)
        thread = threading.Thread(target=reader.run, args=(wanted,))
        readers.append((reader, thread))
        thread.start()
        return reader

    yield begin
    for reader, thread in readers:
        reader.stream.abort()
        thread.join(PATIENCE_S)
        reader.stream.close()


Read = Callable[..., Reader]


def test_reader_has_each_chunk_before_the_next_one_has_come(relay: Relay, read: Read, model: Model) -> None:
    reader = read(relay.served)
    for chunk in range(relay.num_chunks):
        relay.receive(chunk)
        frame = reader.next()
        assert isinstance(frame, framing.Frame)
        assert frame.chunk == chunk
    assert reader.next() is None
    assert b"".join(reader.shells.views(0, model.manifest.total_bytes)) == model.memory
    assert reader.stream.meter.waits >= 1


def test_several_readers_are_fed_from_one_relay(relay: Relay, read: Read, model: Model) -> None:
    readers = [read(relay.served) for _ in range(4)]
    for chunk in reversed(range(relay.num_chunks)):
        relay.receive(chunk)
    for reader in readers:
        assert [isinstance(reader.next(), framing.Frame) for _ in range(relay.num_chunks)] == [True] * relay.num_chunks
        assert reader.next() is None
        assert b"".join(reader.shells.views(0, model.manifest.total_bytes)) == model.memory


def test_relay_becomes_a_source_in_place(relay: Relay, read: Read, model: Model) -> None:
    reader = read(relay.served)
    relay.receive(0)
    assert isinstance(reader.next(), framing.Frame)
    for view, origin in zip(relay.shells.views(0, 56), model.shells.views(0, 56), strict=False):
        view[:] = origin
    relay.held.complete()
    rest = [reader.next() for _ in range(relay.num_chunks)]
    assert [frame.chunk for frame in rest[:-1] if isinstance(frame, framing.Frame)] == [1, 2, 3]
    assert rest[-1] is None
    # The room for WAIT headers is not kept by a source that has everything.
    again = read(relay.served)
    found = [again.next() for _ in range(relay.num_chunks + 1)]
    assert [type(each).__name__ for each in found] == ["Frame"] * relay.num_chunks + ["NoneType"], found
    assert again.stream.meter.waits == 0


def test_relay_that_fails_ends_its_readers_at_once_and_takes_none(relay: Relay, read: Read) -> None:
    reader = read(relay.served)
    relay.receive(0)
    assert isinstance(reader.next(), framing.Frame)
    relay.served.source.decline("its own transfer failed")
    relay.held.fail(FencedError("its own transfer failed"))
    error = reader.next()
    assert isinstance(error, FencedError)
    error = read(relay.served).next()
    assert isinstance(error, FencedError)
    assert "its own transfer failed" in str(error)


def test_relay_to_which_nothing_comes_sends_its_readers_elsewhere(serve: Serve, read: Read, model: Model) -> None:
    relay = Relay(serve(model.shells), model, patience_s=0.0)
    assert isinstance(read(relay.served).next(), SourceStalledError)


def test_relay_that_is_withdrawn_lets_nobody_wait(relay: Relay, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "WAIT_INTERVAL_S", 0.01)
    reader = read(relay.served)
    relay.receive(0)
    assert isinstance(reader.next(), framing.Frame)
    relay.served.source.withdraw(drain_s=0)
    assert isinstance(reader.next(), FencedError)


def test_reader_asks_again_when_there_is_no_room_to_say_more(
    serve: Serve, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "wait_room", lambda _: 1)
    monkeypatch.setattr(framing, "WAIT_INTERVAL_S", 0.01)
    # Large enough that the reason fits into what is left of the answer.
    shells = Shells.from_tensors({"a": filled("uint8", (4096,))}, chunk_bytes=1024)
    large = Model(shells=shells, manifest=shells.seal())
    relay = Relay(serve(shells), large)
    error = read(relay.served, large).next()
    assert isinstance(error, SourceBusyError)
    assert error.facts["retry_after_s"] == 0.05


def test_answer_is_as_long_as_it_says_however_often_it_waits(relay: Relay, model: Model) -> None:
    relay.receive(1)
    answer = ask(relay.served, model)
    body = answer.read(8)
    assert body == WAIT
    for chunk in (0, 2, 3):
        relay.receive(chunk)
    body += answer.read()
    room = framing.wait_room(relay.num_chunks)
    assert answer.getheader("Weightwire-Waits") == str(room)
    frames = [data(model.memory[begin:end]) for begin, end in pairwise(model.manifest.chunk_bounds)]
    assert len(body) == int(answer.getheader("Content-Length", "0")) == sum(map(len, frames)) + len(WAIT) * room
    assert body.replace(WAIT, b"") == b"".join(frames)


@pytest.mark.parametrize("spoken", ["1.0", "1", None])
def test_older_reader_waits_and_is_told_nothing(relay: Relay, model: Model, spoken: str | None) -> None:
    answer = ask(relay.served, model, spoken=spoken)
    for chunk in range(relay.num_chunks):
        relay.receive(chunk)
    body = answer.read()
    assert answer.getheader("Weightwire-Waits") is None
    assert body == b"".join(data(model.memory[begin:end]) for begin, end in pairwise(model.manifest.chunk_bounds))


def ask(served: Served, model: Model, *, spoken: str | None = "1.1") -> http.client.HTTPResponse:
    """Ask for everything, as a stranger would."""
    endpoint = served.endpoint()
    address = served.server.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE_S)
    request = framing.ReadRequest(
        generation=endpoint.generation,
        weight_version=endpoint.weight_version,
        manifest=endpoint.manifest,
        target_instance=endpoint.target_instance,
        target_rank=0,
        regions=(Region(offset=0, shape=(model.manifest.total_bytes,), strides=(1,)),),
    )
    headers = {"Authorization": f"Ticket {endpoint.ticket}", "Connection": "close"}
    connection.request(
        "POST", "/v1/read", request.to_bytes(), headers | ({"Weightwire-Protocol": spoken} if spoken else {})
    )
    return connection.getresponse()


def get(served: Served, path: str) -> tuple[int, dict[str, object]]:
    address = served.server.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE_S)
    connection.request("GET", path, headers={"Connection": "close"})
    answer = connection.getresponse()
    body = answer.read()
    return answer.status, json.loads(body) if answer.status != 200 or path == "/readyz" else {}


def test_relay_is_not_ready_and_gives_nothing_to_people(relay: Relay) -> None:
    for path in ("/readyz", "/v1/tensors/a", "/v1/export.safetensors"):
        status, problem = get(relay.served, path)
        assert (status, problem["code"]) == (503, "source_busy"), path
        assert "still receiving" in str(problem["detail"])
    relay.held.complete()
    for path in ("/readyz", "/v1/tensors/a", "/v1/export.safetensors"):
        assert get(relay.served, path)[0] == 200, path


# Before it is known whether there will be anything


def test_reader_comes_back_to_a_target_that_does_not_know_yet(serve: Serve, read: Read, model: Model) -> None:
    served = serve(model.shells)
    served.source.withdraw()
    served.source.expect()
    error = read(served).next()
    assert isinstance(error, SourceBusyError)
    assert error.facts["retry_after_s"] == 0.05
    served.source.decline("its layout is another one")
    error = read(served).next()
    assert isinstance(error, FencedError)
    assert "its layout is another one" in str(error)
    served.source.publish(model.shells, weight_version=VERSION)
    assert isinstance(read(served).next(), framing.Frame)


# Sources that do not keep to the page


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(
            lambda answer: answer.text(WAIT * 3 + answer.body, Weightwire_Waits="2"), "more often", id="too often"
        ),
        pytest.param(lambda answer: answer.text(WAIT + answer.body), "more often", id="unannounced"),
        pytest.param(
            lambda answer: answer.text(answer.body + b"DATA\0\0\0\0", Weightwire_Waits="1"),
            "something else than WAIT",
            id="room filled with something else",
        ),
        pytest.param(
            lambda answer: answer.text(b"WAIT\0\0\0\1" + answer.body, Weightwire_Waits="1"),
            "expected DATA",
            id="a WAIT with a length",
        ),
        pytest.param(
            lambda answer: answer.text(answer.body + WAIT, Weightwire_Waits="x"), "expected a number", id="no number"
        ),
        pytest.param(
            lambda answer: answer.text(answer.body + WAIT, Weightwire_Waits="9" * 40),
            "expected a number",
            id="a number without end",
        ),
    ],
)
def test_waiting_against_the_rules_is_a_violation(
    answering: Answering, model: Model, spoil: Callable[[Answer], bytes], why: str
) -> None:
    server = answering(spoil)
    with pytest.raises(ProtocolError, match=why):
        fetch_from(server.url, model)


@pytest.mark.parametrize("count", [1, 7])
def test_waits_may_stand_wherever_a_header_may(answering: Answering, model: Model, count: int) -> None:
    def waiting(answer: Answer) -> bytes:
        frames = [WAIT * count + data(payload) for payload in answer.payloads]
        room = count * (len(frames) + 1)
        return answer.text(b"".join(frames) + WAIT * count, Weightwire_Waits=str(room))

    assert fetch_from(answering(waiting).url, model) == model.memory


def fetch_from(url: str, model: Model) -> bytes:
    target = model.target()
    stream = SourceStream(endpoint_of(model.manifest, url=url), model.manifest, timeouts=LONG)
    try:
        list(stream.fetch(model.segments(), target))
    finally:
        stream.close()
    return b"".join(target.views(0, model.manifest.total_bytes))
