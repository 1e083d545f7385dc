"""The control plane as a process: one bound socket, one server, and an end that drains."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from weightwire.service.app import create_app
from weightwire.service.components import Components
from weightwire.service.settings import Settings, check_settings
from weightwire.service.store import Store
from weightwire.transfer.address import Address
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.wire.sockets import serve_both_families
from weightwire.transfer.wire.trust import read_fingerprint

_START_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class Server:
    """One control plane that listens. Bound once made; serves when told to."""

    def __init__(
        self, settings: Settings, *, store: Store | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Bind the socket and open the store.

        Raises:
            SettingsError: If the settings contradict themselves, the port is taken, or the store cannot be opened.
        """
        check_settings(settings)
        self._socket = bind_socket(settings.host, settings.port)
        try:
            app = create_app(settings, store=store, clock=clock)
        except BaseException:
            self._socket.close()
            raise
        host, port = self._socket.getsockname()[:2]
        self._certificate = settings.tls_cert
        self.url = settings.advertise or str(Address(scheme=settings.scheme, host=host, port=port))
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # The peer's address decides about loopback URLs, so no header may change it.
            proxy_headers=False,
            timeout_graceful_shutdown=settings.drain_s,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self.components: Components = app.state.components
        self._uvicorn = _Uvicorn(config, self.components)

    def run_until_signal(self, on_ready: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT, drain, and return; a second signal ends it at once.

        Args:
            on_ready: Is called with the URL once requests are answered.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            self._uvicorn.force_exit = self._uvicorn.should_exit
            self._uvicorn.should_exit = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with _rare_collections():
                self.run(on_ready)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve in this thread until `stop`."""
        self._uvicorn.on_ready = lambda: on_ready(self.url)
        shown = f", certificate sha256:{read_fingerprint(self._certificate)}" if self._certificate else ""
        logger.info("serving on %s%s", self.url, shown)
        asyncio.run(self._uvicorn.serve([self._socket]))
        logger.info("stopped serving on %s", self.url)

    def stop(self) -> None:
        """Ask the server to drain and end; from any thread."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Uvicorn, with the two moments told that it tells nobody of."""

    def __init__(self, config: uvicorn.Config, parts: Components) -> None:
        super().__init__(config)
        self._parts = parts
        self.on_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams of events end first: uvicorn waits for open connections.
        self._parts.changes.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # `Server` has its own handlers; uvicorn's would raise the signal again after the drain, and exit with it.
        yield


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python's cycle collector look seldom.

    A manifest is a tree of some million small objects without cycles. Python's own thresholds walk through it again
    and again while it grows, and hold the interpreter each time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket's address, bound once and kept.

    Raises:
        SettingsError: If the address is not one of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingsError(f"host {host!r}: not an address of this machine: {error}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    serve_both_families(bound)
    try:
        bound.bind(address)
        # Listening already here: two sockets may be bound to one port as long as none of them listens.
        bound.listen()
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"port {port} on {host!r}: taken by another process (`ss -ltnp` shows which); "
                "expected a free one, or 0 for any",
                port=port,
            ) from error
        raise SettingsError(f"port {port} on {host!r}: cannot be bound: {error.strerror}", port=port) from error
    return bound


@contextmanager
def running_service(
    settings: Settings, *, store: Store | None = None, clock: Callable[[], float] = time.time
) -> Iterator[str]:
    """A control plane in a thread, drained at the end of the block; gives its URL.

    Raises:
        SettingsError: As `Server` does.
    """
    server = Server(settings, store=store, clock=clock)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda url: ready.set(),), name="weightwire-service")
    thread.start()
    try:
        if not ready.wait(_START_TIMEOUT_S):
            raise SettingsError(f"service at {server.url}: did not start within {_START_TIMEOUT_S:g} s")
        yield server.url
    finally:
        server.stop()
        thread.join()
