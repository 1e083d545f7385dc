"""The body of an answer, read straight into memory that waits for it."""

from __future__ import annotations

import http.client
import math
import socket
import ssl
from typing import Protocol, cast

from weightwire.transfer.errors import SourceStalledError, SourceUnreachableError
from weightwire.transfer.wire.sockets import timeval
from weightwire.transfer.wire.watchdog import Meter

# How often a silent source is looked at before it counts as stalled, at least, and how long a look lasts at most.
_LOOKS = 4
_LOOK_S = 0.2
# So much of an answer that has to be decoded is asked for at once.
_PIECE_BYTES = 64 << 10


class Body(Protocol):
    """Reads a body in order. Every call fills all of its buffers, or raises."""

    def read(self, *buffers: memoryview) -> None:
        """Raises:
        SourceUnreachableError: If the body ends before the buffers are full.
        SourceStalledError: If no byte comes within the time allowed.
        """

    def finish(self) -> bool:
        """True if the body ends here; the connection can then be used again."""


def body_of(response: http.client.HTTPResponse, sock: socket.socket | None, meter: Meter, *, stall_s: float) -> Body:
    """The fastest reader that the answer allows; it counts what comes."""
    if sock is None or isinstance(sock, ssl.SSLSocket) or response.length is None or not response.length:
        return ResponseBody(response, meter)
    return SocketBody(response, sock, meter, stall_s=stall_s)


class ResponseBody:
    """Any answer: encrypted, chunked by a proxy, or on a connection that closes behind it."""

    def __init__(self, response: http.client.HTTPResponse, meter: Meter) -> None:
        self._response = response
        self._meter = meter

    def read(self, *buffers: memoryview) -> None:
        for buffer in buffers:
            got = 0
            while got < len(buffer):
                # In pieces, since it returns when all is there, and a slow source has to be seen to send.
                count = self._response.readinto(buffer[got : got + _PIECE_BYTES])
                if not count:
                    raise _ended_early(got, len(buffer))
                got += count
                self._meter.received += count

    def finish(self) -> bool:
        return not self._response.read(1)


class SocketBody:
    """A body of known length on a plain socket.

    The kernel fills each buffer in one call (MSG_WAITALL), and its own clock ends a wait: Python's way to time out
    would cost a poll and a call for every few packets.
    """

    def __init__(
        self, response: http.client.HTTPResponse, sock: socket.socket, meter: Meter, *, stall_s: float
    ) -> None:
        self._response = response
        self._meter = meter
        self._sock = sock
        self._stall_s = stall_s
        self._left = cast(int, response.length)
        # What the header's reader took too much.
        self._ahead = memoryview(response.fp.read(min(len(response.fp.peek()), self._left)))
        # A wait that ends with a few bytes does not tell when they came, and what came is counted only then: so the
        # kernel wakes us more often than that.
        self._looks = max(_LOOKS, math.ceil(stall_s / _LOOK_S))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(stall_s / self._looks))
        sock.settimeout(None)

    def read(self, *buffers: memoryview) -> None:
        wanted = sum(map(len, buffers))
        if wanted > self._left:
            raise _ended_early(self._left, wanted)
        self._left -= wanted
        rest = list(buffers)
        if self._ahead:
            rest = [left for buffer in buffers if len(left := self._take_ahead(buffer))]
        silent = 0
        while rest:
            try:
                got = self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                silent += 1
                if silent == self._looks:
                    raise SourceStalledError(f"no byte for {self._stall_s:g} s") from error
                continue
            silent = 0
            if not got:
                raise _ended_early(wanted - sum(map(len, rest)), wanted)
            self._meter.received += got
            if got == wanted:
                return
            while rest and got >= len(rest[0]):
                got -= len(rest.pop(0))
            if got:
                rest[0] = rest[0][got:]

    def finish(self) -> bool:
        self._sock.settimeout(self._stall_s)
        self._response.close()
        return not self._left

    def _take_ahead(self, buffer: memoryview) -> memoryview:
        """Fill from what was read ahead; returns the part of `buffer` that is still to be filled."""
        size = min(len(self._ahead), len(buffer))
        if size:
            buffer[:size] = self._ahead[:size]
            self._ahead = self._ahead[size:]
            self._meter.received += size
        return buffer[size:]


def _ended_early(got: int, wanted: int) -> SourceUnreachableError:
    return SourceUnreachableError(f"the body ended after {got} of {wanted} bytes of a frame")
