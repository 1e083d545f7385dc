"""An HTTP proxy that does to answers what networks, gateways and caches do to them.

It reads a request whole, asks the source, and passes the answer on; a fault takes the place of the passing on. What
went through is counted, and can be held at a count, so that a test acts in the middle of a transfer without a clock.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, TypeAlias, cast

_PIECE_BYTES = 1 << 16
Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the client sent it."""

    method: str
    target: str
    headers: Headers
    body: bytes

    @property
    def is_read(self) -> bool:
        return self.target == "/v1/read"

    def without(self, header: str) -> Request:
        return replace(self, headers=tuple(pair for pair in self.headers if pair[0].lower() != header.lower()))

    def to_bytes(self) -> bytes:
        return _head(f"{self.method} {self.target} HTTP/1.1", self.headers) + self.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The beginning of an answer, and its body, unread."""

    status_line: str
    headers: Headers
    body: BinaryIO

    @property
    def length(self) -> int:
        return next((int(value) for name, value in self.headers if name.lower() == "content-length"), 0)

    def with_header(self, name: str, value: str | None) -> Answer:
        """With one header replaced; None takes it out."""
        kept = tuple(pair for pair in self.headers if pair[0].lower() != name.lower())
        return replace(self, headers=kept if value is None else (*kept, (name, value)))

    @property
    def head(self) -> bytes:
        return _head(self.status_line, self.headers)

    def pieces(self, begin: int = 0) -> Iterator[bytes]:
        """The body, which ends early if the source does."""
        left = self.length - begin
        while left and (piece := self.body.read(min(left, _PIECE_BYTES))):
            yield piece
            left -= len(piece)


class ResetWantedError(Exception):
    """The connection to the client shall be reset, not closed."""


class Exchange:
    """One request on its way: what a fault works with."""

    def __init__(self, proxy: Proxy, client: socket.socket, upstream: Upstream, request: Request) -> None:
        self.request = request
        self._proxy = proxy
        self._client = client
        self._upstream = upstream

    def ask(self, request: Request | None = None) -> Answer:
        """Ask the source."""
        return self._upstream.ask(request or self.request)

    def send(self, raw: bytes) -> None:
        self._client.sendall(raw)

    def send_body(self, raw: bytes) -> None:
        """Send bytes of a body: they count, and wait where the proxy holds."""
        self._proxy.take_turn(len(raw))
        self._client.sendall(raw)


# Passes one answer on; returns False to close the client's connection afterwards.
Fault: TypeAlias = Callable[[Exchange], bool]


def passed(exchange: Exchange) -> bool:
    """No fault."""
    answer = exchange.ask()
    exchange.send(answer.head)
    sent = 0
    for piece in answer.pieces():
        exchange.send_body(piece)
        sent += len(piece)
    return sent == answer.length


def cut(after: int, *, reset: bool = False) -> Fault:
    """`after` bytes of the body under the full Content-Length, then FIN, or RST."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        exchange.send(answer.head)
        exchange.send_body(answer.body.read(after))
        if reset:
            raise ResetWantedError
        return False

    return fault


def flipped(at: int) -> Fault:
    """The lowest bit of one byte of the body, the wrong way round."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        exchange.send(answer.head)
        exchange.send_body(answer.body.read(at))
        exchange.send_body(bytes([answer.body.read(1)[0] ^ 1]))
        for piece in answer.pieces(at + 1):
            exchange.send_body(piece)
        return True

    return fault


def shortened(nbytes: int, *, chunked: bool = False) -> Fault:
    """A body that ends after `nbytes`, by the rules of HTTP: a Content-Length of as many, or a last chunk."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        body = answer.body.read(nbytes)
        if chunked:
            exchange.send(answer.with_header("Content-Length", None).with_header("Transfer-Encoding", "chunked").head)
            exchange.send(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n" if body else b"0\r\n\r\n")
        else:
            exchange.send(answer.with_header("Content-Length", str(len(body))).head + body)
        return False

    return fault


def answered(status: str, body: bytes, *headers: tuple[str, str]) -> Fault:
    """An answer of the proxy's own; the source is not asked."""

    def fault(exchange: Exchange) -> bool:
        everything = (*headers, ("Content-Length", str(len(body))))
        exchange.send(_head(f"HTTP/1.1 {status}", everything) + body)
        return True

    return fault


def without_range(exchange: Exchange) -> bool:
    """The source never learns that only a range was asked for."""
    answer = exchange.ask(exchange.request.without("Range"))
    exchange.send(answer.head)
    for piece in answer.pieces():
        exchange.send_body(piece)
    return True


@dataclass(kw_only=True)
class Replayed:
    """A cache that looks at the path alone: every request after the first gets the first one's answer."""

    _stored: bytes = field(default=b"", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __call__(self, exchange: Exchange) -> bool:
        with self._lock:
            if not self._stored:
                answer = exchange.ask()
                self._stored = answer.head + b"".join(answer.pieces())
        exchange.send_body(self._stored)
        return True


class Upstream:
    """The proxy's connection to the source, opened with the first request."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._sock: socket.socket | None = None
        self._file: BinaryIO | None = None

    def ask(self, request: Request) -> Answer:
        if self._sock is None or self._file is None:
            self._sock = self._connect()
            self._file = self._sock.makefile("rb")
        self._sock.sendall(request.to_bytes())
        status_line, headers = _read_head(self._file)
        return Answer(status_line=status_line, headers=headers, body=self._file)

    def close(self) -> set[socket.socket]:
        """Close the connection, if there is one, and give it back."""
        for each in (self._file, self._sock):
            if each is not None:
                each.close()
        return set() if self._sock is None else {self._sock}


class Proxy:
    """Stands between the targets and one source.

    Attributes:
        url: What the source advertises.
        requests: Every request that came, in order.
        faults: What becomes of reads, each used once; `always` of those after them, and `other` of other requests.
    """

    def __init__(self, *, upstream_port: int) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.always: Fault = passed
        self.other: Fault = passed
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._passed = 0
        self._limit: int | None = None
        self._held = False
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the source that stands behind this proxy."""
        return ("--advertise", self.url, "--port", str(self._upstream_port))

    @property
    def reads(self) -> list[Request]:
        return [request for request in self.requests if request.is_read]

    @property
    def passed_bytes(self) -> int:
        """Bytes of bodies that went to targets."""
        return self._passed

    @property
    def is_held(self) -> bool:
        """Whether somebody waits for `release`."""
        return self._held

    def hold_after(self, nbytes: int, *, further: bool = False) -> None:
        """Let `nbytes` of bodies pass, and nothing after them until `release`.

        Args:
            further: Counted from now on, not from the beginning.
        """
        with self._changed:
            self._limit = self._passed + nbytes if further else nbytes
            self._held = False

    def wait_until_held(self, *, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._held, timeout_s), f"only {self._passed} bytes came by"

    def wait_for_reads(self, *, from_targets: int, timeout_s: float = 60.0) -> None:
        """Wait until so many targets have asked for something."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._targets()) >= from_targets, timeout_s), self._targets()

    def release(self) -> None:
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    def take_turn(self, nbytes: int) -> None:
        """Wait while it holds, and count what passes then; at once, or two might pass where there is room for one."""
        with self._changed:
            while self._limit is not None and self._passed >= self._limit:
                self._held = True
                self._changed.notify_all()
                self._changed.wait()
            self._passed += nbytes
            self._changed.notify_all()

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.release()
        with self._changed:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _targets(self) -> set[str]:
        return {str(json.loads(request.body)["target"]["instance_id"]) for request in self.reads}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            with self._changed:
                self._open.add(client)
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        upstream = Upstream(self._connect)
        # Whoever went away in the middle, on either side, ends the exchange; that is not the proxy's error.
        with client, client.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
            try:
                while (request := _read_request(file)) is not None:
                    if not self._fault_for(request)(Exchange(self, client, upstream, request)):
                        break
            except ResetWantedError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            finally:
                with self._changed:
                    self._open -= {client, *upstream.close()}

    def _connect(self) -> socket.socket:
        upstream = socket.create_connection(("127.0.0.1", self._upstream_port))
        with self._changed:
            self._open.add(upstream)
        return upstream

    def _fault_for(self, request: Request) -> Fault:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
            if not request.is_read:
                return self.other
            return self.faults.pop(0) if self.faults else self.always


def _read_request(file: BinaryIO) -> Request | None:
    """The next request, body and all; None at the end of the connection."""
    try:
        first, headers = _read_head(file)
    except ConnectionError:
        return None
    method, target, _ = first.split(" ")
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Request(method=method, target=target, headers=headers, body=file.read(length))


def _read_head(file: BinaryIO) -> tuple[str, Headers]:
    lines = []
    while (line := file.readline()) not in (b"\r\n", b""):
        lines.append(line.decode("latin-1").rstrip("\r\n"))
    if not lines:
        raise ConnectionError("the other side closed the connection")
    headers = (tuple(part.strip() for part in line.split(":", 1)) for line in lines[1:])
    return lines[0], cast(Headers, tuple(headers))


def _head(first: str, headers: Headers) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
