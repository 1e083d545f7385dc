"""How a connection to a source is opened: by name or address, through a proxy or not, encrypted or not."""

from __future__ import annotations

import errno
import http.client
import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

from weightwire.transfer.address import Address
from weightwire.transfer.errors import SourceRefusedError, SourceUnreachableError, SourceUntrustedError
from weightwire.transfer.wire.proxies import Proxies, Proxy, travels_in_clear
from weightwire.transfer.wire.sockets import SocketOptions, set_buffers, tune
from weightwire.transfer.wire.trust import believing, check_pin

# How long an address is tried alone before the next one of the same name joins in.
# Source: RFC 8305, section 8.
_HEAD_START_S = 0.25
_GATEWAY_STATUSES = (502, 503, 504)

_Place: TypeAlias = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between this process and the sources.

    Attributes:
        allow_plain_http: Let tickets travel in the clear through a proxy.
    """

    proxies: Proxies = field(default_factory=Proxies)
    sockets: SocketOptions = field(default_factory=SocketOptions)
    allow_plain_http: bool = False


class SourceConnection(http.client.HTTPConnection):
    """One HTTP connection, opened by `connect` and by nothing else.

    Attributes:
        way: In words, what stands between; empty if nothing does.
    """

    def __init__(
        self,
        address: Address,
        *,
        network: Network,
        tls: ssl.SSLContext | None = None,
        pin: str | None = None,
        timeout_s: float,
    ) -> None:
        """Args:
        tls: Trust for https; by default the system's, or with a pin nothing but that.
        pin: Fingerprint of the certificate that has to be met there, also if `tls` would take another one.
        timeout_s: For the connection to stand, handshakes included.
        """
        super().__init__(address.host, address.port, timeout=timeout_s)
        # Or a request would quietly open a connection that nobody can abort.
        self.auto_open = 0
        self._address = address
        self._network = network
        self._proxy = network.proxies.leading_to(address)
        self.way = f" through {self._proxy}" if self._proxy else ""
        self._pin = pin if address.scheme == "https" else None
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            self._tls = tls or (believing(ssl.create_default_context()) if pin else ssl.create_default_context())

    def connect(self) -> None:
        """Open it; `sock` is set once everything stands.

        Raises:
            SourceUntrustedError: If a ticket would be readable on the way.
            SourceRefusedError: If the proxy does not lead there.
            SourceUnreachableError: If it says that nobody is behind it.
            ssl.SSLCertVerificationError: If the certificate is not one that is trusted.
            OSError: If nobody answers, or not in time.
        """
        if travels_in_clear(self._address, self._proxy) and not self._network.allow_plain_http:
            raise SourceUntrustedError(
                f"the ticket would travel unencrypted{self.way}, expected https or --allow-plain-http"
            )
        sock = self._dial()
        try:
            tune(sock, self._network.sockets)
            if self._tls is not None:
                sock = self._encrypt(sock, self._tls)
        except BaseException:
            sock.close()
            raise
        self.sock = sock

    def putrequest(self, method: str, url: str, skip_host: bool = False, skip_accept_encoding: bool = False) -> None:
        # A proxy that is to pass on plain http has to be told where to.
        relayed = self._proxy if self._tls is None else None
        super().putrequest(method, f"{self._address}{url}" if relayed else url, skip_host, skip_accept_encoding)
        for name, value in (relayed.headers if relayed else {}).items():
            self.putheader(name, value)

    def _dial(self) -> socket.socket:
        assert isinstance(self.timeout, float)
        if self._proxy is None:
            return dial(self._address, timeout_s=self.timeout, options=self._network.sockets)
        try:
            return dial(self._proxy.address, timeout_s=self.timeout, options=self._network.sockets)
        except OSError as error:
            raise SourceUnreachableError(f"{self._proxy}: {error.strerror or error}") from error

    def _encrypt(self, sock: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        if self._proxy is not None:
            _open_tunnel(sock, self._proxy, self._address)
        encrypted = tls.wrap_socket(sock, server_hostname=self._address.host)
        if self._pin is not None:
            try:
                check_pin(encrypted, self._pin)
            except BaseException:
                encrypted.close()
                raise
        return encrypted


def dial(address: Address, *, timeout_s: float, options: SocketOptions | None = None) -> socket.socket:
    """A TCP connection, by whichever of the name's addresses answers first.

    Each further address joins in a moment after the one before it, so that one that swallows everything costs that
    moment and not the whole time.

    Raises:
        OSError: What the last address that failed said; TimeoutError if time was over first.
    """
    ends_at = time.monotonic() + timeout_s
    waiting = deque(_addresses_of(address))
    failed: OSError | None = None
    with selectors.DefaultSelector() as under_way:
        try:
            while waiting or under_way.get_map():
                if (left_s := ends_at - time.monotonic()) <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                if waiting:
                    failed = _begin(under_way, waiting.popleft(), options or SocketOptions()) or failed
                if not under_way.get_map():
                    continue
                for key, _ in under_way.select(min(left_s, _HEAD_START_S) if waiting else left_s):
                    sock = _take(under_way, key)
                    if not (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                        sock.settimeout(left_s)
                        return sock
                    sock.close()
                    failed = OSError(code, os.strerror(code))
        finally:
            for key in list(under_way.get_map().values()):
                _take(under_way, key).close()
    raise failed or OSError(f"{address.host} has no address")


def _addresses_of(address: Address) -> Iterator[_Place]:
    """What the name stands for, families in turn, beginning with the one that the resolver prefers."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    places = list(dict.fromkeys((family, place) for family, *_, place in found))
    preferred = [place for place in places if place[0] == places[0][0]]
    others = [place for place in places if place[0] != places[0][0]]
    pairs = zip_longest(preferred, others)
    return (place for pair in pairs for place in pair if place is not None)


def _begin(under_way: selectors.BaseSelector, place: _Place, options: SocketOptions) -> OSError | None:
    """Begin to connect; returns what is wrong if it cannot even begin."""
    family, target = place
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return error
    set_buffers(sock, options)
    sock.setblocking(False)
    code = sock.connect_ex(target)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        return OSError(code, os.strerror(code))
    under_way.register(sock, selectors.EVENT_WRITE)
    return None


def _take(under_way: selectors.BaseSelector, key: selectors.SelectorKey) -> socket.socket:
    under_way.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _open_tunnel(sock: socket.socket, proxy: Proxy, address: Address) -> None:
    """Have the proxy connect this socket with an address; what comes after is between the two ends.

    Raises:
        SourceUnreachableError: If nobody answers behind the proxy.
        SourceRefusedError: If the proxy does not let us through.
    """
    place = str(address).partition("://")[2]
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    lines += [f"{name}: {value}" for name, value in proxy.headers.items()]
    sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    # The other end of a tunnel says nothing before it is spoken to, so nothing of its bytes is read ahead.
    with http.client.HTTPResponse(sock, method="CONNECT") as response:
        response.begin()
        status = response.status
    if status in _GATEWAY_STATUSES:
        raise SourceUnreachableError(f"{proxy}: answered {status}, it does not reach {place}")
    if status // 100 != 2:
        raise SourceRefusedError(
            f"{proxy}: answered {status} to CONNECT {place}", status=status, url=str(proxy.address)
        )
