"""One connection to one source: asks for segments, verifies every frame, writes into the shells."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import xxhash

from weightwire.transfer.address import Address
from weightwire.transfer.errors import (
    ChecksumError,
    ProtocolError,
    SourceBusyError,
    SourceStalledError,
    SourceUnreachableError,
    TransferError,
)
from weightwire.transfer.integrity import digest_at
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.problems import error_of, refusal_of
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire import framing
from weightwire.transfer.wire.ledger import Segment

_MAX_ERROR_BODY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where, and as whom, a source rank is read: the binding that the service granted.

    Attributes:
        url: Of the source's data plane.
        manifest: Digest of what it holds.
        target_instance: Whom the ticket was granted to.
    """

    instance_id: str
    rank: int
    generation: int
    weight_version: int
    url: str
    manifest: str
    ticket: str
    target_instance: str
    target_rank: int = 0

    def __str__(self) -> str:
        return f"source {self.instance_id!r} rank {self.rank} at {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. `stall_s`: without a single byte; `connect_s`: for a connection to stand."""

    connect_s: float = 5.0
    stall_s: float = 10.0


class SourceStream:
    """Reads from one endpoint, one request at a time, over a connection that stays open."""

    def __init__(
        self,
        endpoint: Endpoint,
        manifest: Manifest,
        *,
        timeouts: Timeouts | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.manifest = manifest
        self._timeouts = timeouts or Timeouts()
        address = Address.parse(endpoint.url)
        if address.scheme == "https":
            context = tls or ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=self._timeouts.connect_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=self._timeouts.connect_s)
        self._staging = memoryview(bytearray())

    def connect(self) -> None:
        """Open the connection now, not with the first request.

        Raises:
            SourceUnreachableError: If nobody answers there.
        """
        with self._as_source_errors():
            if self._connection.sock is None:
                self._connection.connect()
                sock = cast(socket.socket, self._connection.sock)
                sock.settimeout(self._timeouts.stall_s)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection; from another thread, end a read that is under way."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def fetch(self, segments: Sequence[Segment], shells: Shells) -> Iterator[Verified]:
        """Read segments into the shells.

        Contiguous bytes land in the shell before their checksum is known; until then they are this stream's.

        Args:
            segments: As claimed.
            shells: Written.

        Yields:
            What one more frame brought, after it was verified and written.

        Raises:
            SourceError: As its subclasses say; what was yielded before stays good.
            ChecksumError: If bytes are not what the source, or the manifest, says they are.
            TicketError: If the source does not take the ticket.
        """
        self.connect()
        with self._as_source_errors():
            body = self._ask(segments)
            waiting = deque(segments)
            for frame in framing.cut_frames(self.manifest, _merged(segments)):
                places = list(_take(waiting, frame.nbytes))
                self._receive(body, frame, places, shells)
                yield Verified(places=tuple(places), chunk=frame.chunk)
            if body.read(1):
                raise ProtocolError(f"{self.endpoint}: the body goes on after its last frame")

    def _ask(self, segments: Sequence[Segment]) -> http.client.HTTPResponse:
        """Send the request; an answer that is not the frames that were asked for is an error."""
        endpoint = self.endpoint
        request = framing.ReadRequest(
            generation=endpoint.generation,
            weight_version=endpoint.weight_version,
            manifest=endpoint.manifest,
            target_instance=endpoint.target_instance,
            target_rank=endpoint.target_rank,
            regions=tuple(_merged(segments)),
        ).to_bytes()
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Ticket {endpoint.ticket}",
            "Weightwire-Protocol": framing.PROTOCOL,
        }
        self._connection.request("POST", "/v1/read", body=request, headers=headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise self._refusal(response)
        expected = {
            "Content-Type": framing.MEDIA_TYPE,
            "Weightwire-Generation": str(endpoint.generation),
            "Weightwire-Weight-Version": str(endpoint.weight_version),
            "Weightwire-Manifest": endpoint.manifest,
            "Weightwire-Request": f"{xxhash.xxh3_64_intdigest(request):016x}",
        }
        for name, value in expected.items():
            if (actual := response.getheader(name)) != value:
                raise ProtocolError(f"{endpoint}: answered with {name} {actual!r}, expected {value!r}")
        return response

    def _refusal(self, response: http.client.HTTPResponse) -> TransferError:
        error = refusal_of(
            status=response.status,
            body=response.read(_MAX_ERROR_BODY_BYTES),
            content_type=response.getheader("Content-Type", ""),
            url=f"{self.endpoint.url}/v1/read",
        )
        if response.status == 503 and not isinstance(error, SourceBusyError):
            return SourceBusyError(str(error), retry_after_s=_retry_after(response))
        return error

    def _receive(
        self, body: http.client.HTTPResponse, frame: framing.Frame, places: list[Place], shells: Shells
    ) -> None:
        """Read one frame, verify it, and leave its payload in the shells."""
        self._read_header(body, frame.nbytes)
        views = shells.views(*places[0].flat) if len(places) == 1 and places[0].is_contiguous else []
        payload = views[0] if len(views) == 1 else self._stage(frame.nbytes)
        self._read_exactly(body, payload)
        actual = xxhash.xxh3_64_intdigest(payload)
        status, promised = framing.TRAILER.unpack(self._read_small(body, framing.TRAILER.size))
        if status == framing.VOID:
            self._read_header(body, 0)
        if status != framing.GOOD:
            raise ProtocolError(f"{self.endpoint}: a frame ends with {status!r}, expected GOOD or VOID")
        self._check(frame, actual=actual, promised=promised)
        if len(views) != 1:
            taken = 0
            for place in places:
                shells.scatter(payload[taken : taken + place.nbytes], place.target, place.begin)
                taken += place.nbytes

    def _check(self, frame: framing.Frame, *, actual: int, promised: int) -> None:
        if actual != promised:
            raise ChecksumError(
                f"{self.endpoint}: a chunk of {frame.nbytes} bytes hashes to {actual:016x}, sent as {promised:016x}"
            )
        if frame.chunk is not None and actual != (origin := digest_at(self.manifest.chunk_digests, frame.chunk)):
            raise ChecksumError(
                f"{self.endpoint}: chunk {frame.chunk} hashes to {actual:016x}, the manifest says {origin:016x}"
            )

    def _read_header(self, body: http.client.HTTPResponse, nbytes: int) -> None:
        kind, length = framing.HEADER.unpack(self._read_small(body, framing.HEADER.size))
        if kind == framing.FAIL and length <= framing.MAX_PROBLEM_BYTES:
            problem = json.loads(bytes(self._read_small(body, length)))
            raise error_of(problem) if isinstance(problem, dict) else ProtocolError(f"{self.endpoint}: no problem")
        if kind != framing.DATA or length != nbytes:
            raise ProtocolError(f"{self.endpoint}: a frame begins with {kind!r} {length}, expected DATA {nbytes}")

    def _read_small(self, body: http.client.HTTPResponse, nbytes: int) -> memoryview:
        small = memoryview(bytearray(nbytes))
        self._read_exactly(body, small)
        return small

    def _read_exactly(self, body: http.client.HTTPResponse, buffer: memoryview) -> None:
        got = 0
        while got < len(buffer):
            count = body.readinto(buffer[got:] if got else buffer)
            if not count:
                raise SourceUnreachableError(
                    f"{self.endpoint}: the body ended after {got} of {len(buffer)} bytes of a frame"
                )
            got += count

    def _stage(self, nbytes: int) -> memoryview:
        if len(self._staging) < nbytes:
            self._staging = memoryview(bytearray(self.manifest.chunk_bytes))
        return self._staging[:nbytes]

    @contextlib.contextmanager
    def _as_source_errors(self) -> Iterator[None]:
        """What sockets and HTTP raise, as our errors. Any error leaves the connection closed."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise SourceStalledError(f"{self.endpoint}: no byte for {self._timeouts.stall_s:g} s") from error
            if isinstance(error, (http.client.HTTPException, ValueError)):
                raise ProtocolError(f"{self.endpoint}: {type(error).__name__}: {error}") from error
            if isinstance(error, OSError):
                raise SourceUnreachableError(f"{self.endpoint}: {error.strerror or error}") from error
            raise


class Place(NamedTuple):
    """Bytes `begin` to `end` of a target region, in its row-major order."""

    target: Region
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def is_contiguous(self) -> bool:
        return self.target.is_contiguous

    @property
    def flat(self) -> tuple[int, int]:
        """The flat interval, where the region is contiguous."""
        return self.target.offset + self.begin, self.target.offset + self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one frame brought.

    Attributes:
        places: Where its payload lies now.
        chunk: Number of the source's chunk that it was, whose digest is the manifest's.
    """

    places: tuple[Place, ...]
    chunk: int | None


def _take(waiting: deque[Segment], nbytes: int) -> Iterator[Place]:
    """The places of the next `nbytes` of the packed stream; a segment that is cut stays in front."""
    while nbytes:
        segment = waiting.popleft()
        size = min(nbytes, segment.nbytes)
        yield Place(segment.target, segment.begin, segment.begin + size)
        nbytes -= size
        if size < segment.nbytes:
            # Only the positions count from here on; the source region was sent with the request.
            waiting.appendleft(replace(segment, begin=segment.begin + size, nbytes=segment.nbytes - size))


def _merged(segments: Iterable[Segment]) -> Iterator[Region]:
    """The regions to ask for: contiguous segments that continue each other are one."""
    last: Region | None = None
    for segment in segments:
        region = segment.source
        if last is not None and last.is_contiguous and region.is_contiguous and last.end == region.offset:
            last = Region(offset=last.offset, shape=(last.numel + region.numel,), strides=(1,))
            continue
        if last is not None:
            yield last
        last = region
    if last is not None:
        yield last


def _retry_after(response: http.client.HTTPResponse) -> int:
    text = response.getheader("Retry-After", "")
    return int(text) if text.isascii() and text.isdigit() else 1
