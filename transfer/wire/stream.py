"""One connection to one source: asks for segments, verifies every frame, writes into the shells."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import xxhash

from weightwire.transfer.address import Address
from weightwire.transfer.device_shells import Landing
from weightwire.transfer.errors import (
    CancelledError,
    ChecksumError,
    DeadlineError,
    DeviceError,
    ProtocolError,
    SourceBusyError,
    SourceLeavingError,
    SourceRefusedError,
    SourceStalledError,
    SourceUnreachableError,
    SourceUntrustedError,
    TooLargeError,
    TransferError,
)
from weightwire.transfer.integrity import digest_at
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.problems import error_of, refusal_of
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire import framing
from weightwire.transfer.wire.body import Body, body_of
from weightwire.transfer.wire.connecting import Network, SourceConnection
from weightwire.transfer.wire.portions import GATEWAY_STATUSES, Portions
from weightwire.transfer.wire.segments import Segment, merged_regions
from weightwire.transfer.wire.trust import refused_certificate
from weightwire.transfer.wire.watchdog import Meter

_MAX_ERROR_BODY_BYTES = 1 << 16
_PREPARED_FRAMES = 64
_MOST_WAIT_DIGITS = 5
# Come back later.
_BUSY_STATUSES = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where, and as whom, a source rank is read: the binding that the service granted.

    Attributes:
        url: Of the source's data plane.
        manifest: Digest of what it holds.
        target_instance: Whom the ticket was granted to.
        relay: It is still receiving what it serves.
        standby: Tier; of one manifest, a higher one is read only once every source of the lower ones is given up.
        certificate_sha256: Fingerprint of the certificate that has to be met at an https URL; None leaves that to
            authorities.
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
    relay: bool = False
    standby: int = 0
    certificate_sha256: str | None = None

    def __str__(self) -> str:
        return f"source {self.instance_id!r} rank {self.rank} at {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds.

    Attributes:
        connect_s: For a connection to stand.
        stall_s: Without a single byte.
        first_byte_s: For an answer to begin, if that may take longer: something on the way takes answers whole before
            it passes them on.
    """

    connect_s: float = 5.0
    stall_s: float = 10.0
    first_byte_s: float = 0.0


class Damage(NamedTuple):
    """A frame whose payload is not what it should be; what follows it can be read all the same."""

    frame: framing.Frame
    error: ChecksumError


class SourceStream:
    """Reads from one endpoint, one request at a time, over a connection that stays open.

    Attributes:
        meter: What has come so far, for those who watch.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        manifest: Manifest,
        *,
        timeouts: Timeouts | None = None,
        tls: ssl.SSLContext | None = None,
        network: Network | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.manifest = manifest
        self.meter = Meter()
        self._timeouts = timeouts or Timeouts()
        self._connection = SourceConnection(
            Address.parse(endpoint.url),
            network=network or Network(),
            tls=tls,
            pin=endpoint.certificate_sha256,
            timeout_s=self._timeouts.connect_s,
        )
        # Kept beside the connection, which forgets the socket of an answer that ends with it.
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._is_aborted = False
        self._landing: Landing | None = None
        self._waits_left = 0
        self._portions = Portions(manifest, empty_request_bytes=len(self._request(())))
        # True between two answers: whoever closes idle connections may do it then.
        self._is_idle = False

    def connect(self) -> None:
        """Open the connection now, not with the first request.

        Raises:
            SourceUnreachableError: If nobody answers there.
            SourceUntrustedError: If it has not the certificate that it should have.
        """
        with self._as_source_errors():
            if self._connection.sock is None:
                self._open()

    def _open(self) -> None:
        try:
            self._connection.connect()
        except TimeoutError as error:
            raise SourceUnreachableError(f"no connection within {self._timeouts.connect_s:g} s") from error
        self._is_idle = False
        self._sock = cast(socket.socket, self._connection.sock)
        self._sock.settimeout(self._timeouts.stall_s)
        if self._is_aborted:
            raise SourceUnreachableError("given up while it was connected")

    def close(self) -> None:
        """Close the connection; the next request opens another. Only for the thread that reads."""
        self._shut_down()
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def abort(self) -> None:
        """End for good, from any thread, what is under way, be it only a connection that is being made.

        The socket is shut down, not closed: its number could become another's while a thread reads from it.
        """
        self._is_aborted = True
        self._shut_down()

    def interrupt(self) -> None:
        """End what is under way, from any thread, as if the connection broke; the next request opens another."""
        self._shut_down()

    def _shut_down(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, which lets go of the encryption first.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def fetch(self, segments: Sequence[Segment], shells: Shells) -> Generator[framing.Frame | Damage, None, None]:
        """Read segments into the shells.

        Contiguous bytes land in the shell before their checksum is known; until then they are this stream's. To stop
        early, close the iterator: that closes the connection. No byte of a frame is written before the one in front
        of it was yielded and the next one is asked for.

        Args:
            segments: As claimed.
            shells: Written.

        Yields:
            Each frame, in order, after it was verified and written; or that its bytes are not what the source, or the
            manifest, says they are.

        Raises:
            SourceError: As its subclasses say; what was yielded before stays good.
            TicketError: If the source does not take the ticket.
            DeviceError: If the shells cannot be written, which is no fault of the source's.
        """
        self.meter.asking = True
        waiting = deque(segments)
        try:
            while waiting:
                portion = self._portions.take(waiting)
                try:
                    yield from self._fetch(portion, shells)
                except (SourceRefusedError, TooLargeError) as error:
                    # It came in place of an answer, so nothing of the portion has been delivered.
                    if self._portions.learn(error, portion, request_bytes=len(self._request(portion))):
                        waiting.extendleft(reversed(portion))
                    elif error.facts.get("status") in GATEWAY_STATUSES:
                        raise SourceUnreachableError(str(error)) from error
                    else:
                        raise
        finally:
            self.meter.asking = False
            self.meter.asked_with = -1

    def _fetch(self, segments: Sequence[Segment], shells: Shells) -> Generator[framing.Frame | Damage, None, None]:
        """Read what one request may ask for."""
        self.connect()
        if self._landing is None or self._landing.memory is not shells:
            self._landing = shells.landing(self.manifest.chunk_bytes, self._not_asking)
        with contextlib.closing(self._landing.landed(self._receive(segments, shells))) as landed:
            for receipt in landed:
                yield receipt.frame if receipt.damage is None else Damage(receipt.frame, receipt.damage)

    @contextlib.contextmanager
    def _not_asking(self) -> Iterator[None]:
        """While our own device is waited for the source has nothing to answer for."""
        self.meter.asking = False
        try:
            yield
        finally:
            self.meter.asking = True

    def _receive(self, segments: Sequence[Segment], shells: Shells) -> Generator[_Receipt, None, None]:
        """Read and verify a frame whenever it is asked for one."""
        with self._as_source_errors():
            body = self._ask(segments)
            first = memoryview(bytearray(framing.HEADER.size))
            body.read(first)
            header: memoryview | None = first
            for wanted in self._receipts(segments, shells):
                receipt = wanted
                if header is not None:
                    self._check_header(body, header, receipt.frame.nbytes)
                body.read(receipt.payload, receipt.tail)
                actual = xxhash.xxh3_64_intdigest(receipt.payload)
                if receipt.tail == receipt.expected and actual == receipt.origin:
                    header = None
                else:
                    header, damage = self._judge(body, receipt, actual)
                    if damage is not None:
                        # Nothing of it goes into the shells, and its turn comes behind what is on its way there.
                        receipt = receipt._replace(scattered=[], damage=damage)
                yield receipt
            if self._waits_left:
                self._read_room(body)
            if not body.finish():
                raise ProtocolError("the body goes on after its last frame")
            self._is_idle = True

    def _receipts(self, segments: Sequence[Segment], shells: Shells) -> Iterator[_Receipt]:
        """Where each frame is to be read to, and what has to follow it.

        Prepared for some frames at a time: between two chunks every step misses the cache.
        """
        destination = _Destination(segments, shells)
        frames = list(framing.cut_frames(self.manifest, merged_regions(segments)))
        tail = memoryview(bytearray(framing.FRAME_OVERHEAD_BYTES))
        for begin in range(0, len(frames), _PREPARED_FRAMES):
            batch = frames[begin : begin + _PREPARED_FRAMES]
            following = [*frames[begin + 1 : begin + 1 + len(batch)], None]
            yield from [
                self._receipt(frame, after, tail, destination.take(frame.nbytes))
                for frame, after in zip(batch, following, strict=False)
            ]

    def _receipt(
        self,
        frame: framing.Frame,
        after: framing.Frame | None,
        tail: memoryview,
        landing: tuple[memoryview | None, list[Place]],
    ) -> _Receipt:
        direct, scattered = landing
        payload = self._buffer(frame.nbytes) if direct is None else direct
        origin = None if frame.chunk is None else digest_at(self.manifest.chunk_digests, frame.chunk)
        if after is None:
            expected = b"" if origin is None else framing.TRAILER.pack(framing.GOOD, origin)
            return _Receipt(frame, payload, tail[: framing.TRAILER.size], expected, origin, scattered)
        # The next frame's header comes along with this one's trailer.
        expected = b"" if origin is None else framing.TAIL.pack(framing.GOOD, origin, framing.DATA, after.nbytes)
        return _Receipt(frame, payload, tail, expected, origin, scattered)

    def _ask(self, segments: Sequence[Segment]) -> Body:
        """Send the request; an answer that is not the frames that were asked for is an error."""
        endpoint = self.endpoint
        request = self._request(segments)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Ticket {endpoint.ticket}",
            "Weightwire-Protocol": framing.PROTOCOL,
        }
        self._response = response = self._exchange(request, headers)
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
                hint = "" if actual else "; something on the way drops headers that it does not know"
                raise ProtocolError(f"answered with {name} {actual!r}, expected {value!r}{hint}")
        self._waits_left = _announced_waits(response)
        return body_of(response, self._connection.sock, self.meter, stall_s=self._timeouts.stall_s)

    def _request(self, segments: Sequence[Segment]) -> bytes:
        endpoint = self.endpoint
        return framing.ReadRequest(
            generation=endpoint.generation,
            weight_version=endpoint.weight_version,
            manifest=endpoint.manifest,
            target_instance=endpoint.target_instance,
            target_rank=endpoint.target_rank,
            regions=tuple(merged_regions(segments)),
        ).to_bytes()

    def _exchange(self, request: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request, and wait for the head of the answer.

        A connection that was closed while it was idle is opened again: the source, or what stands before it, did not
        see the request.
        """
        was_idle, self._is_idle = self._is_idle, False
        try:
            return self._answer(request, headers)
        except ConnectionError:
            if not was_idle or self._is_aborted:
                raise
        self._connection.close()
        self._open()
        return self._answer(request, headers)

    def _answer(self, request: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        sock, timeouts = cast(socket.socket, self._sock), self._timeouts
        sock.settimeout(max(timeouts.stall_s, timeouts.first_byte_s))
        self.meter.asked_with = self.meter.received
        # Who refuses a large body may close while it is still being sent; the refusal tells why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.request("POST", "/v1/read", body=request, headers=headers)
        response = self._connection.getresponse()
        sock.settimeout(timeouts.stall_s)
        return response

    def _refusal(self, response: http.client.HTTPResponse) -> TransferError:
        error = refusal_of(
            status=response.status,
            body=response.read(_MAX_ERROR_BODY_BYTES),
            content_type=response.getheader("Content-Type", ""),
            url=f"{self.endpoint.url}/v1/read{self._connection.way}",
        )
        if response.status in _BUSY_STATUSES and not isinstance(error, (SourceBusyError, SourceLeavingError)):
            return SourceBusyError(str(error), retry_after_s=_retry_after(response))
        return error

    def _judge(self, body: Body, receipt: _Receipt, actual: int) -> tuple[memoryview | None, ChecksumError | None]:
        """Look at a frame that is not, to the last byte, what was expected.

        Returns:
            The header of the next frame, not looked at yet, None behind the last one; and what is wrong, if the payload
            is not what the trailer, or the manifest, says.

        Raises:
            TransferError: What a FAIL frame behind a VOID trailer tells.
            ProtocolError: If it ends in neither way.
        """
        status, promised = framing.TRAILER.unpack_from(receipt.tail)
        if status == framing.VOID:
            self._check_header(body, self._next_header(body, receipt.tail), 0)
        if status != framing.GOOD:
            raise ProtocolError(f"a frame ends with {status!r}, expected GOOD or VOID")
        return receipt.tail[framing.TRAILER.size :] or None, self._damage(receipt.frame, actual, promised)

    def _damage(self, frame: framing.Frame, actual: int, promised: int) -> ChecksumError | None:
        told = f"{self.endpoint}: chunk {frame.chunk}" if frame.chunk is not None else f"{self.endpoint}: a chunk"
        if actual != promised:
            return ChecksumError(f"{told} of {frame.nbytes} bytes hashes to {actual:016x}, sent as {promised:016x}")
        if frame.chunk is not None and actual != (origin := digest_at(self.manifest.chunk_digests, frame.chunk)):
            return ChecksumError(f"{told} hashes to {actual:016x}, the manifest says {origin:016x}")
        return None

    def _check_header(self, body: Body, header: memoryview, nbytes: int) -> None:
        """Check that a frame of `nbytes` begins, once the source waits no more; raise what a FAIL frame tells."""
        self._skip_waits(body, header)
        kind, length = framing.HEADER.unpack(header)
        if kind == framing.FAIL and length <= framing.MAX_PROBLEM_BYTES:
            text = bytearray(length)
            body.read(memoryview(text))
            problem = json.loads(text)
            raise error_of(problem) if isinstance(problem, dict) else ProtocolError("a FAIL frame tells nothing")
        if kind != framing.DATA or length != nbytes:
            raise ProtocolError(f"a frame begins with {kind!r} {length}, expected DATA {nbytes}")

    def _skip_waits(self, body: Body, header: memoryview) -> None:
        """Read headers, into the place of this one, until one says something else than that the source waits."""
        while header == framing.WAIT_HEADER:
            if not self._waits_left:
                raise ProtocolError("the source waits more often than it said it might")
            self._waits_left -= 1
            self.meter.waits += 1
            body.read(header)

    def _read_room(self, body: Body) -> None:
        """Read past what was kept free for WAIT headers and is filled with them behind the last frame."""
        rest = bytearray(self._waits_left * framing.HEADER.size)
        body.read(memoryview(rest))
        if rest != framing.WAIT_HEADER * self._waits_left:
            raise ProtocolError("behind the last frame stands something else than WAIT headers")
        self._waits_left = 0

    @staticmethod
    def _next_header(body: Body, tail: memoryview) -> memoryview:
        """The header behind a trailer, read already unless the trailer was to be the last."""
        header = tail[framing.TRAILER.size :]
        if not header:
            header = memoryview(bytearray(framing.HEADER.size))
            body.read(header)
        return header

    def _buffer(self, nbytes: int) -> memoryview:
        assert self._landing is not None
        return self._landing.buffer(nbytes)

    @contextlib.contextmanager
    def _as_source_errors(self) -> Iterator[None]:
        """What sockets and HTTP raise, as our errors. Any error leaves the connection closed."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, TransferError):
                # Whoever raised it below does not know whom it spoke to.
                raise _told_by(self.endpoint, error) from error
            if reason := refused_certificate(error):
                raise SourceUntrustedError(f"{self.endpoint}: {reason}") from error
            if isinstance(error, TimeoutError):
                raise SourceStalledError(f"{self.endpoint}: no byte for {self._timeouts.stall_s:g} s") from error
            # First, since a connection that ends before an answer is both this and an HTTPException.
            if isinstance(error, OSError):
                raise SourceUnreachableError(f"{self.endpoint}: {error.strerror or error}") from error
            if isinstance(error, (http.client.HTTPException, ValueError, RecursionError)):
                raise ProtocolError(f"{self.endpoint}: {type(error).__name__}: {error}") from error
            raise


def _told_by(endpoint: Endpoint, error: TransferError) -> TransferError:
    # When a source says that it was stopped, is out of time, or has a broken device, the transfer is and has not.
    theirs = isinstance(error, (CancelledError, DeadlineError, DeviceError))
    kind = SourceRefusedError if theirs else type(error)
    told = kind(f"{endpoint}: {error}")
    told.facts = error.facts
    return told


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


class _Receipt(NamedTuple):
    """One frame that is to be received.

    Attributes:
        payload: Where it is read to: the shell itself, or staging.
        tail: Where its trailer is read to, and the next frame's header unless it is the last.
        expected: What `tail` holds if all is well; not the whole of it where `origin` is None.
        origin: Digest of the payload by the manifest, if it is a whole chunk.
        scattered: Where a staged payload goes once it is verified.
        damage: Why it is not what it should be.
    """

    frame: framing.Frame
    payload: memoryview
    tail: memoryview
    expected: bytes
    origin: int | None
    scattered: list[Place]
    damage: ChecksumError | None = None


class Places:
    """Walks the packed stream of a claim, and says where its bytes go."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = iter(segments)
        self._target: Region | None = None
        self._at = self._end = 0

    def take(self, nbytes: int) -> list[Place]:
        """The places of the next `nbytes` of the stream."""
        places: list[Place] = []
        while nbytes:
            if self._at == self._end:
                segment = next(self._segments)
                self._target, self._at, self._end = segment.target, segment.begin, segment.begin + segment.nbytes
            assert self._target is not None
            stop = min(self._end, self._at + nbytes)
            places.append(Place(self._target, self._at, stop))
            nbytes -= stop - self._at
            self._at = stop
        return places

    def rest(self) -> Place | None:
        """What is left of the segment that the stream is in, or of the next one; not taken yet."""
        if self._at == self._end:
            segment = next(self._segments, None)
            if segment is None:
                return None
            self._target, self._at, self._end = segment.target, segment.begin, segment.begin + segment.nbytes
        assert self._target is not None
        return Place(self._target, self._at, self._end)

    def skip(self, nbytes: int) -> None:
        """Take bytes that are known to lie in `rest`."""
        self._at += nbytes


class _Destination:
    """Where the frames of a claim go: looked up once for a segment, as far as that lies in one piece of memory."""

    def __init__(self, segments: Sequence[Segment], shells: Shells) -> None:
        self._places = Places(segments)
        self._shells = shells
        self._ahead: memoryview | None = None

    def take(self, nbytes: int) -> tuple[memoryview | None, list[Place]]:
        """The memory that the next `nbytes` are read to, or else the places that they are scattered to."""
        if not self._ahead and (rest := self._places.rest()) is not None and rest.is_contiguous:
            self._ahead = self._shells.direct(*rest.flat)
        if self._ahead and nbytes <= len(self._ahead):
            payload, self._ahead = self._ahead[:nbytes], self._ahead[nbytes:]
            self._places.skip(nbytes)
            return payload, []
        self._ahead = None
        places = self._places.take(nbytes)
        direct = self._shells.direct(*places[0].flat) if len(places) == 1 and places[0].is_contiguous else None
        return direct, places if direct is None else []


def _announced_waits(response: http.client.HTTPResponse) -> int:
    text = response.getheader("Weightwire-Waits", "0")
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_WAIT_DIGITS:
        raise ProtocolError(f"answered with Weightwire-Waits {text!r:.80}, expected a number below 100000")
    return int(text)


def _retry_after(response: http.client.HTTPResponse) -> int:
    text = response.getheader("Retry-After", "")
    return int(text) if text.isascii() and text.isdigit() else 1
