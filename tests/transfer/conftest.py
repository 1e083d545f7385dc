"""Tensors of every dtype and stride, sources that serve them over a socket, and servers that answer wrongly."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire.source import Access, Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Endpoint, Timeouts

KEY = b"k" * 32
TARGET = "target"
GENERATION = 7
VERSION = 3
# A guard for waits that end by themselves, not a measure of anything.
PATIENCE_S = 30.0
# Short enough to be waited for in a test, long enough for two threads on a busy machine.
SHORT = Timeouts(connect_s=5.0, stall_s=0.3)


class _Faults(logging.Handler):
    """Keeps what our own code logs as a fault of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def sound() -> Iterator[None]:
    """No test of the library may make it log a fault, or leave a thread of ours behind."""
    faults, ours = _Faults(), logging.getLogger("weightwire")
    ours.addHandler(faults)
    yield
    ours.removeHandler(faults)
    assert [record.getMessage() for record in faults.records] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire")] == []


def filled(dtype: str, shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of any dtype whose bytes are random, NaN and all."""
    itemsize = BY_NAME[dtype].itemsize
    raw = torch.randint(0, 256, (*shape, itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype == "bool":
        raw = raw % 2
    return raw.view(BY_NAME[dtype].torch_dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order, by torch alone, for dtypes that it cannot copy too."""
    size = tensor.itemsize
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    steps = (*(stride * size for stride in tensor.stride()), 1)
    box = memory.as_strided((*tensor.shape, size), steps, int(tensor.storage_offset()) * size)
    return box.contiguous().numpy().tobytes()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.permute(2, 1, 0),
    "a column": lambda t: t[:, :, 1],
    "every second row": lambda t: t[::2],
    "every second element": lambda t: t[1, 2, ::2],
    "an inner part": lambda t: t[:, 1:3, 1:],
    "an inner part, transposed": lambda t: t[:, 1:3, 1:].transpose(0, 2),
    "a scalar": lambda t: t[1, 2, 3],
    "no rows": lambda t: t[1:1],
    "no columns": lambda t: t[:, :, 4:],
    "a row": lambda t: t[2, 1],
}


def views_of(dtype: str) -> dict[str, torch.Tensor]:
    """Every kind of view, each of a tensor of its own."""
    return {name: view(filled(dtype, (3, 4, 5), seed=seed)) for seed, (name, view) in enumerate(VIEWS.items())}


def endpoint_of(held: Manifest, /, **changes: str | int) -> Endpoint:
    """What the service would grant for a source of `serve`; each fact can be made wrong."""
    facts: dict[str, str | int] = {
        "instance_id": "s",
        "rank": 0,
        "generation": GENERATION,
        "weight_version": VERSION,
        "url": "http://127.0.0.1:9",
        "manifest": held.digest,
        "target_instance": TARGET,
    }
    facts |= changes
    ticket = Ticket(
        transfer_id="t",
        source_instance=str(facts["instance_id"]),
        source_rank=0,
        source_generation=GENERATION,
        target_instance=TARGET,
        target_rank=0,
        weight_version=VERSION,
        expires_at=time.time() + 3600,
    )
    return Endpoint(**({"ticket": issue_ticket(KEY, ticket)} | facts))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A source that runs, and what a reader has to know of it."""

    server: SourceServer
    manifest: Manifest

    @property
    def source(self) -> Source:
        return self.server.source

    def endpoint(self, **changes: str | int) -> Endpoint:
        facts: dict[str, str | int] = {"url": self.server.url, "instance_id": self.source.identity.instance_id}
        return endpoint_of(self.manifest, **(facts | changes))


class Serve:
    """Starts sources, and stops them when the test is over."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor] | Shells,
        *,
        chunk_bytes: int = 64,
        limits: SourceLimits | None = None,
        instance_id: str = "s",
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Served:
        if isinstance(tensors, Shells):
            shells = tensors
        else:
            shells = Shells.from_tensors(tensors, ModelIdentity(model="m"), chunk_bytes=chunk_bytes)
        manifest = shells.seal()
        source = Source(SourceIdentity(instance_id=instance_id, generation=GENERATION), limits)
        source.grant_access(access or Access(ticket_key=KEY))
        source.publish(shells, weight_version=VERSION)
        server = self._stack.enter_context(SourceServer(source, tls=tls))
        return Served(server=server, manifest=manifest)


@pytest.fixture
def serve() -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:
        yield Serve(stack)
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread


@dataclass(kw_only=True)
class Fake:
    """A server of one's own making on 127.0.0.1: `answer` gets each connection, in a thread.

    Attributes:
        url: Where it listens.
        connections: How many were accepted.
        requests: Bodies of the requests, where `answer` keeps them.
        over: Set when the test is over, for answers that wait.
    """

    answer: Callable[[socket.socket], object]
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept)

    def close(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for connection in self._open:
            connection.close()

    def _spawn(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(PATIENCE_S)
                self._open.append(connection)
                self.connections += 1
                self._spawn(lambda connection=connection: self._serve(connection))  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        # The client may close at any time: that is what is tested.
        with contextlib.suppress(OSError):
            self.answer(connection)
            connection.shutdown(socket.SHUT_RDWR)


MakeFake = Callable[[Callable[[socket.socket], object]], Fake]


@pytest.fixture
def fake() -> Iterator[MakeFake]:
    """Makes a server from a function that gets each of its connections."""
    made: list[Fake] = []

    def make(answer: Callable[[socket.socket], object]) -> Fake:
        made.append(Fake(answer=answer))
        return made[-1]

    yield make
    for server in made:
        server.close()


def read_request(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one HTTP request; empty if the peer is gone before its end."""
    raw, wanted = b"", None
    while wanted is None or len(raw) < wanted:
        piece = connection.recv(1 << 16)
        if not piece:
            return b"", b""
        raw += piece
        head, end, _ = raw.partition(b"\r\n\r\n")
        if wanted is None and end:
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            wanted = len(head) + len(end) + int(fields.get(b"content-length", b"0"))
    found, _, body = raw.partition(b"\r\n\r\n")
    return found, body
