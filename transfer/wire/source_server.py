"""A source's data plane: a threaded HTTP/1.1 server that sends storages without copying them."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer

from weightwire.transfer.address import Address
from weightwire.transfer.wire.served_ranks import ServedRanks
from weightwire.transfer.wire.sockets import SocketOptions, listen
from weightwire.transfer.wire.source import Source
from weightwire.transfer.wire.source_routes import SourceRoutes

logger = logging.getLogger(__name__)

# How long streams that are cut off have for the frame that they are in, and for the one that says so.
_LAST_FRAMES_S = 1.0


class SourceServer:
    """Answers for one `Source`, or for several ranks of one process; one thread for each connection.

    A context manager starts and stops it.

    Attributes:
        ranks: What it serves.
    """

    def __init__(
        self,
        source: Source | Mapping[int, Source],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        sockets: SocketOptions | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """Bind the port, and keep it; nobody is answered before `start`.

        Args:
            source: One, or several by rank, as `Source.of_ranks` makes them.
            sockets: Of the connections that are accepted.
            listening: A socket that is bound already, in place of `port`; closed at the end.

        Raises:
            SettingsError: If the address cannot be bound.
            ValueError: If several are not ranks of one process.
        """
        self.ranks = ServedRanks(source)
        sockets = sockets or SocketOptions()
        self._listener = _Listener(listening or listen(host, port, sockets), self.ranks, sockets)
        if tls is not None:
            # The handshake waits for the connection's own thread: a silent client must not stop the others.
            self._listener.socket = tls.wrap_socket(
                self._listener.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = Address(scheme="https" if tls else "http", host=host, port=self._listener.server_port)
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, name="weightwire-source", daemon=True
        )

    def __enter__(self) -> SourceServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def source(self) -> Source:
        """The one that is served; of several that of the lowest rank."""
        return self.ranks.lowest

    @property
    def sources(self) -> Mapping[int, Source]:
        """All that are served, by rank."""
        return self.ranks.sources

    @property
    def url(self) -> str:
        return str(self.address)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, drain_s: float = 5.0) -> None:
        """Withdraw, let readers finish for up to `drain_s` seconds, cut off the rest, close the port.

        Until the port is closed, whoever comes is told to go elsewhere. Streams that are cut off end with a FAIL frame,
        as far as their readers take it.
        """
        self.ranks.withdraw(drain_s=drain_s)
        self.ranks.wait_for_readers(timeout_s=_LAST_FRAMES_S)
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self._listener.close_connections()


class _Listener(ThreadingHTTPServer):
    """Accepts connections, up to a limit, and can close them all."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, ranks: ServedRanks, sockets: SocketOptions) -> None:
        self.ranks = ranks
        self.sockets = sockets
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        # Bound already: the base class would ask DNS for its own name, which may take seconds and is never used.
        super().__init__(listening.getsockname(), SourceRoutes, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_port = listening.getsockname()[1]

    def verify_request(self, request: object, client_address: object) -> bool:
        with self._lock:
            if len(self._connections) >= self.ranks.limits.max_connections:
                return False
            if isinstance(request, socket.socket):
                self._connections.add(request)
            return True

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        logger.log(level, "connection from %s ended", client_address, exc_info=True)

    def close_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, which lets go of the encryption first, and a thread may be sending.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
