"""What is set on sockets, as the kernel says it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.transfer.conftest import Serve, filled
from weightwire.transfer.address import Address
from weightwire.transfer.wire.connecting import Network, SourceConnection
from weightwire.transfer.wire.sockets import SocketOptions


def keep_alive(sock: socket.socket) -> tuple[int, ...]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NODELAY")
    values = (sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
    return (sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connected(listener: socket.socket, options: SocketOptions) -> socket.socket:
    port = listener.getsockname()[1]
    address = Address(scheme="http", host="127.0.0.1", port=port)
    connection = SourceConnection(address, network=Network(sockets=options), timeout_s=20.0)
    connection.connect()
    assert isinstance(connection.sock, socket.socket)
    return connection.sock


def test_peer_that_is_gone_is_noticed_by_the_kernel(listener: socket.socket) -> None:
    with connected(listener, SocketOptions()) as sock:
        assert keep_alive(sock) == (1, 10, 5, 3, 30_000, 1)
    options = SocketOptions(idle_s=7, probe_interval_s=2, probes=4, unacknowledged_s=9)
    with connected(listener, options) as sock:
        assert keep_alive(sock) == (1, 7, 2, 4, 9_000, 1)


@pytest.mark.parametrize("nbytes", [32 << 10, 128 << 10])
def test_window_is_what_was_asked_for(listener: socket.socket, nbytes: int) -> None:
    with connected(listener, SocketOptions(buffer_bytes=nbytes)) as sock:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            # Linux tells twice the size: the other half is for its own books. Source: socket(7).
            assert sock.getsockopt(socket.SOL_SOCKET, option) in (nbytes, 2 * nbytes)


def test_source_watches_its_readers_too(serve: Serve) -> None:
    server = serve({"a": filled("uint8", (8,))}).server
    with socket.create_connection((server.address.host, server.address.port)) as reader:
        reader.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reader.recv(12) == b"HTTP/1.1 200"
        ours = reader.getsockname()
        (theirs,) = [each for each in server._listener._connections if each.getpeername() == ours]
        assert keep_alive(theirs) == (1, 10, 5, 3, 30_000, 1)
