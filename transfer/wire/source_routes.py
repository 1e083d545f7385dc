"""The routes of a source's data plane: HTTP in, bytes of a publication out. docs/protocol.md specifies them."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Protocol, cast
from urllib.parse import SplitResult, unquote, urlsplit

import xxhash

from weightwire.transfer.device_shells import Departure
from weightwire.transfer.errors import (
    AccessError,
    DeviceError,
    FencedError,
    NotFoundError,
    RequestError,
    SourceBusyError,
    SourceError,
    TicketError,
    TooLargeError,
    TransferError,
    VersionSkewError,
)
from weightwire.transfer.export import export_layout
from weightwire.transfer.integrity import checksum, digest_at
from weightwire.transfer.manifest import TensorEntry
from weightwire.transfer.problems import MEDIA_TYPE as PROBLEM
from weightwire.transfer.problems import problem_text, status_for
from weightwire.transfer.regions import Region
from weightwire.transfer.tickets import Ticket
from weightwire.transfer.wire import framing
from weightwire.transfer.wire.framing import Frame, ReadRequest
from weightwire.transfer.wire.http_range import ByteRange, UnsatisfiableRangeError, parse_range
from weightwire.transfer.wire.served_ranks import ServedRanks
from weightwire.transfer.wire.sockets import SocketOptions, timeval, tune
from weightwire.transfer.wire.source import Publication, Source

logger = logging.getLogger(__name__)

# Source: Linux, include/uapi/linux/uio.h (UIO_MAXIOV).
_MAX_IOVECS = 1024
_OCTETS = "application/octet-stream"
# Between two calls every step misses the cache, so there are few: of whole chunks so much goes out in one.
_BATCH_BYTES = 8 << 20
# How much of a refused body, and how long its next piece, is waited for.
_LINGER_BYTES = 1 << 26
_LINGER_S = 1.0


# A rank in a query; no world has one of more digits.
_RANK_QUERY = re.compile(r"rank=([0-9]{1,9})", re.ASCII)


class _HasRanks(Protocol):
    ranks: ServedRanks


class _Listening(Protocol):
    sockets: SocketOptions


class _QueryError(Exception):
    """A query that is none of a route's: HTTP has a status of its own for it."""


@dataclass(frozen=True, slots=True)
class _Body:
    """What is sent of: `pieces(begin, end)` gives the bytes between two positions, of `nbytes`."""

    pieces: Callable[[int, int], Iterator[memoryview]]
    nbytes: int


@dataclass(slots=True, kw_only=True)
class _Unsent:
    """What is still to be sent of an answer in frames.

    Attributes:
        left: Of the bytes that were announced.
        waits: WAIT headers that there is room for; None for a reader that does not understand them.
        trailer: Of the last frame. It goes out with what comes next: a packet of its own for twelve bytes would cost a
            system call.
    """

    left: int
    waits: int | None
    trailer: bytes = b""


class SourceRoutes(BaseHTTPRequestHandler):
    """One connection. Every answer is an object of docs/protocol.md or a problem document."""

    protocol_version = "HTTP/1.1"
    server_version = "weightwire"
    sys_version = ""
    # Bytes of the answer so far, without its head.
    _sent = 0

    @property
    def ranks(self) -> ServedRanks:
        return cast("_HasRanks", self.server).ranks

    def setup(self) -> None:
        super().setup()
        limits = self.ranks.limits
        self.connection.settimeout(limits.idle_timeout_s)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(limits.write_timeout_s))
        tune(self.connection, cast("_Listening", self.server).sockets)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, route: Callable[[SplitResult], None]) -> None:
        """Run a route; an error before the first byte of the answer becomes a problem document."""
        self._answering = False
        self._sent = 0
        self.connection.settimeout(self.ranks.limits.write_timeout_s)
        try:
            # First, whatever is asked: what is left of a request would be taken for the next one.
            self._body = self._read_body()
            self._check_protocol()
            route(self._url())
        except _QueryError as error:
            self._send_problem(RequestError(str(error)), status=400)
        except TransferError as error:
            if self._answering:
                self.close_connection = True
                logger.info("answer to %s broken off: %s", self.client_address[0], error)
            else:
                self._send_problem(error)
                self._let_pass(error)
        except OSError as error:
            self.close_connection = True
            logger.info("reader %s is gone: %s", self.client_address[0], error)
        finally:
            self.ranks.capacity.count_sent(self._sent)
            self.connection.settimeout(self.ranks.limits.idle_timeout_s)

    def _check_protocol(self) -> None:
        spoken = self.headers.get("Weightwire-Protocol", framing.PROTOCOL)
        if spoken.partition(".")[0] != framing.PROTOCOL.partition(".")[0]:
            raise VersionSkewError(f"protocol {spoken!r}: this source speaks {framing.PROTOCOL}")

    def _get(self, url: SplitResult) -> None:
        match url.path.split("/")[1:]:
            case ["healthz"]:
                self._send_json({"status": "ok"})
            case ["readyz"]:
                self._ready(self._asked_rank(url))
            case ["v1", "tensors", name]:
                self._check_token()
                source = self.ranks.find(self._asked_rank(url))
                with source.reading() as publication:
                    _check_complete(source, publication)
                    self._send_tensor(source, publication, unquote(name))
            case ["v1", "export.safetensors"]:
                self._check_token()
                source = self.ranks.find(self._asked_rank(url))
                with source.reading() as publication:
                    _check_complete(source, publication)
                    self._send_export(source, publication)
            case _:
                raise NotFoundError(f"path {url.path!r}: no such resource on a source", kind="path", name=url.path)

    def _post(self, url: SplitResult) -> None:
        if url.path != "/v1/read":
            raise NotFoundError(f"path {url.path!r}: no such resource on a source", kind="path", name=url.path)
        if url.query:
            raise _QueryError(f"query {url.query!r:.200}: expected none, the ticket says which rank is read")
        source, ticket = self.ranks.check_ticket(self._ticket())
        with source.reading() as publication:
            self._read(source, publication, ticket)

    def _ready(self, rank: int | None) -> None:
        """One rank, or without one all of them."""
        published = self.ranks.publications(rank)
        version = min(publication.weight_version for publication in published.values())
        self._send_json({"status": "ready", "weight_version": version, "ranks": list(published)})

    # -- what a request brings ------------------------------------------------------------------------------------

    def _url(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError as error:
            raise RequestError(f"path {self.path!r:.200}: {error}") from error

    def _asked_rank(self, url: SplitResult) -> int | None:
        if not url.query:
            return None
        if (match := _RANK_QUERY.fullmatch(url.query)) is None:
            raise _QueryError(f"query {url.query!r:.200}: expected rank=N, or none")
        return int(match[1])

    def _read_body(self) -> bytes:
        if self.headers.defects:
            # The parser stops at a line that is no header, and whatever stands behind it is lost.
            self.close_connection = True
            raise RequestError("request: a line of its head is no header")
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths and self.command != "POST" and "Transfer-Encoding" not in self.headers:
            return b""
        length = lengths[0] if len(set(lengths)) == 1 else ""
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise RequestError("request: no Content-Length, or several, expected a body of one stated length")
        # By its digits first: Python refuses to read a number of thousands of them.
        if len(length) > len(str(framing.MAX_REQUEST_BYTES)) or int(length) > framing.MAX_REQUEST_BYTES:
            self.close_connection = True
            raise TooLargeError(
                f"request: body of {length:.20} bytes, at most {framing.MAX_REQUEST_BYTES} are taken",
                limit_bytes=framing.MAX_REQUEST_BYTES,
            )
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            self.close_connection = True
            raise RequestError(f"request: body ended after {len(body)} of {length} bytes")
        return body

    def _let_pass(self, error: TransferError) -> None:
        """Throw a body away that was too large: closing in the middle of it would reset the connection, and the
        reader would not see why.
        """
        if not isinstance(error, TooLargeError):
            return
        self.connection.settimeout(_LINGER_S)
        left = _LINGER_BYTES
        while left > 0 and (piece := self.rfile.read1(left)):
            left -= len(piece)

    def _ticket(self) -> str:
        kind, _, text = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "ticket" or not text:
            raise AccessError("read: no ticket, expected 'Authorization: Ticket …' as granted by the service")
        return text.strip()

    def _check_token(self) -> None:
        access = self.ranks.lowest.access
        if access is None:
            raise SourceBusyError("source: not registered with a service yet", retry_after_s=1)
        if not access.read_token_sha256:
            return
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        # The parser took the header's bytes for Latin-1; these are the bytes again.
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).hexdigest()
        known = [hmac.compare_digest(digest, accepted) for accepted in access.read_token_sha256]
        if kind.lower() != "bearer" or not any(known):
            raise AccessError("request: no read token, or a wrong one, expected 'Authorization: Bearer …'")

    # -- POST /v1/read --------------------------------------------------------------------------------------------

    def _read(self, source: Source, publication: Publication, ticket: Ticket) -> None:
        request = ReadRequest.from_bytes(self._body)
        _check_ticket(source, ticket, request)
        _check_fence(source, publication, request)
        framing.check_extent(publication.manifest, request)
        frames = list(framing.cut_frames(publication.manifest, request.regions))
        # Before it begins the answer says how long it is, so room for what may have to be said is part of it.
        has_to_wait = publication.is_partial or self.ranks.capacity.pacer.bytes_per_s is not None
        may_wait = has_to_wait and framing.understands_waits(self.headers.get("Weightwire-Protocol"))
        waits = framing.wait_room(len(frames)) if may_wait else None
        announced = sum(frame.nbytes + framing.FRAME_OVERHEAD_BYTES for frame in frames)
        announced += (waits or 0) * framing.HEADER.size
        self._begin(
            200,
            {
                "Content-Type": framing.MEDIA_TYPE,
                "Content-Length": str(announced),
                "Weightwire-Generation": str(source.identity.generation),
                "Weightwire-Weight-Version": str(publication.weight_version),
                "Weightwire-Manifest": publication.manifest.digest,
                # Names the question, so that an answer to another one, from a cache on the way, is noticed.
                "Weightwire-Request": f"{xxhash.xxh3_64_intdigest(self._body):016x}",
                **({"Weightwire-Waits": str(waits)} if waits else {}),
            },
        )
        with publication.shells.departure() as departure:
            self._send_frames(source, (publication, departure), frames, _Unsent(left=announced, waits=waits))

    def _send_frames(
        self, source: Source, held: tuple[Publication, Departure], frames: Sequence[Frame], unsent: _Unsent
    ) -> None:
        publication, departure = held
        # Of what is still being received each frame goes out as soon as it is there, and of what has to wait its turn.
        is_paced = self.ranks.capacity.pacer.bytes_per_s is not None
        whole = 0 if is_paced or publication.is_partial or publication.shells.devices else _BATCH_BYTES
        batches = list(_batches(frames, most_bytes=whole))
        for number, batch in enumerate(batches, 1):
            try:
                if publication.held is not None:
                    self._await_frame(source, publication, batch[0], unsent)
                source.check_stands(publication)
                is_paid = self._pay_ahead(source, publication, batch, unsent)
            except SourceError as error:
                self._fail(unsent.trailer, error, left=unsent.left)
                return
            try:
                views, last = _packed(publication, departure, batch, unsent.trailer)
                if number < len(batches) and not publication.is_partial:
                    departure.ahead(batches[number][0].parts)
                self._send_paced(views, None if is_paid else lambda: source.check_stands(publication))
            except (DeviceError, FencedError) as error:
                self._fail(unsent.trailer, _as_ours(source, error), left=unsent.left)
                return
            unsent.left -= sum(map(len, views))
            try:
                source.check_stands(publication)
            except FencedError as error:
                self._fail(framing.TRAILER.pack(framing.VOID, 0), error, left=unsent.left)
                return
            unsent.trailer = framing.TRAILER.pack(framing.GOOD, last)
        self._send([memoryview(unsent.trailer + framing.WAIT_HEADER * (unsent.waits or 0))])

    def _await_frame(self, source: Source, publication: Publication, frame: Frame, unsent: _Unsent) -> None:
        """Wait for bytes that the target which serves here has not received yet.

        Raises:
            SourceError: If they will not come, or nothing new has come for too long.
        """
        held = publication.held
        assert held is not None

        def is_there(timeout_s: float) -> bool:
            source.check_stands(publication)
            return held.wait_for_frame(frame, timeout_s)

        self._wait_until(is_there, unsent)

    def _pay_ahead(self, source: Source, publication: Publication, batch: Sequence[Frame], unsent: _Unsent) -> bool:
        """Wait until the pace lets frames go whole, where the reader can be told that this takes its time.

        Others get them piece by piece, which they see as a slow source.

        Returns:
            Whether they may go at once.

        Raises:
            SourceError: If they must not go any more, or nothing is left of the room to say that it waits.
        """
        pacer = self.ranks.capacity.pacer
        if pacer.bytes_per_s is None or not unsent.waits:
            return False
        nbytes = sum(frame.nbytes + framing.FRAME_OVERHEAD_BYTES for frame in batch)
        with pacer.booking(nbytes) as booking:

            def is_paid(timeout_s: float) -> bool:
                source.check_stands(publication)
                return booking.wait(timeout_s)

            self._wait_until(is_paid, unsent)
        return True

    def _wait_until(self, is_so: Callable[[float], bool], unsent: _Unsent) -> None:
        """Wait before a frame, in steps, and tell a reader that understands it between them that this goes on.

        Args:
            is_so: Waits for up to so many seconds itself.

        Raises:
            SourceBusyError: If no room is left to say so: the reader had better ask again.
        """
        waited = False
        while not is_so(framing.WAIT_INTERVAL_S if waited else 0.0):
            waited = True
            if unsent.waits is None:
                continue
            if not unsent.waits:
                raise SourceBusyError("source: has waited for as often as it said it might", retry_after_s=0.05)
            # With the trailer before it: what the reader has can be verified, and handed on, at once.
            self._send([memoryview(unsent.trailer + framing.WAIT_HEADER)])
            unsent.left -= len(unsent.trailer) + framing.HEADER.size
            unsent.waits -= 1
            unsent.trailer = b""

    # -- GET: one tensor, or the whole rank as a checkpoint file ------------------------------------------------------

    def _send_tensor(self, source: Source, publication: Publication, name: str) -> None:
        tensor = publication.manifest.by_name.get(name)
        if tensor is None:
            raise NotFoundError(f"tensor {name!r}: not held by this source", kind="tensor", name=name)
        headers = {
            "Weightwire-Dtype": tensor.dtype,
            "Weightwire-Shape": json.dumps(list(tensor.shape), separators=(",", ":")),
            "Weightwire-Digest": tensor.digest,
            "ETag": f'"{publication.weight_version}-{tensor.digest}"',
        }
        self._send_ranged(source, publication, _Body(_tensor_pieces(publication, tensor), tensor.nbytes), headers)

    def _send_export(self, source: Source, publication: Publication) -> None:
        layout = export_layout(publication.manifest)
        etag = f'"{publication.weight_version}-{publication.manifest.digest[:32]}"'

        def pieces(begin: int, end: int) -> Iterator[memoryview]:
            if begin < len(layout.prefix):
                yield memoryview(layout.prefix)[begin : min(end, len(layout.prefix))]
            at = len(layout.prefix)
            for tensor in layout.tensors:
                low, high = max(begin - at, 0), min(end - at, tensor.nbytes)
                if low < high:
                    yield from _tensor_pieces(publication, tensor)(low, high)
                at += tensor.nbytes

        self._send_ranged(source, publication, _Body(pieces, layout.nbytes), {"ETag": etag})

    def _send_ranged(self, source: Source, publication: Publication, body: _Body, headers: dict[str, str]) -> None:
        headers |= {"Content-Type": _OCTETS, "Accept-Ranges": "bytes"}
        wanted = self._range(body.nbytes, headers["ETag"])
        if isinstance(wanted, UnsatisfiableRangeError):
            self._send_problem(wanted, status=416, headers={"Content-Range": f"bytes */{body.nbytes}"})
            return
        begin, end = (wanted.begin, wanted.end) if wanted else (0, body.nbytes)
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{body.nbytes}"
        self._begin(206 if wanted else 200, {**headers, "Content-Length": str(end - begin)})
        if self.command == "HEAD":
            return
        for piece in body.pieces(begin, end):
            # No trailer can follow here: a body that ends early is how a reader learns of it.
            source.check_stands(publication)
            self._send_paced([piece], lambda: source.check_stands(publication))

    def _range(self, nbytes: int, etag: str) -> ByteRange | UnsatisfiableRangeError | None:
        header = self.headers.get("Range")
        if header is None or self.command != "GET" or self.headers.get("If-Range", etag) != etag:
            return None
        try:
            return parse_range(header, nbytes)
        except UnsatisfiableRangeError as error:
            return error

    # -- sending ----------------------------------------------------------------------------------------------------

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self._answering = True
        self.send_response(status)
        self.send_header("Weightwire-Protocol", framing.PROTOCOL)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_paced(self, views: list[memoryview], while_waiting: Callable[[], None] | None) -> None:
        """Send every byte of `views` at the pace that the process keeps.

        Args:
            while_waiting: Called now and then; None sends all at once. What it raises is passed on if nothing was sent
                yet; later it ends the waiting alone, for a frame that has begun has to come to its trailer, which says
                that it is torn.
        """
        pacer = self.ranks.capacity.pacer
        begun = False
        while views and while_waiting is not None and pacer.bytes_per_s is not None:
            try:
                # At each turn, for one that comes soon asks nothing itself.
                while_waiting()
                granted = pacer.take(sum(map(len, views)), while_waiting=while_waiting)
            except FencedError:
                if not begun:
                    raise
                break
            piece, views = _split(views, granted)
            self._send(piece)
            begun = True
        self._send(views)

    def _send(self, views: list[memoryview]) -> None:
        """Send every byte of `views`, in order; a reader that takes none for `write_timeout_s` is an OSError."""
        if isinstance(self.connection, ssl.SSLSocket):
            for view in views:
                self.connection.sendall(view)
                self._sent += len(view)
            return
        # The kernel takes all of it in one call, and its own clock (SO_SNDTIMEO) ends the wait.
        if self.connection.gettimeout() is not None:
            self.connection.settimeout(None)
        while views:
            sent = self.connection.sendmsg(views[:_MAX_IOVECS])
            self._sent += sent
            taken = 0
            while taken < len(views) and sent >= len(views[taken]):
                sent -= len(views[taken])
                taken += 1
            views = views[taken:]
            if sent:
                views[0] = views[0][sent:]

    def _fail(self, trailer: bytes, error: TransferError, *, left: int) -> None:
        """End a stream in the middle; the body stays shorter than announced, so the connection ends too.

        The reason is left out where it would make the body longer than announced: a reader would not see all of it,
        and a proxy would take the rest for the next answer.
        """
        self.close_connection = True
        problem = problem_text(error)
        reason = framing.HEADER.pack(framing.FAIL, len(problem)) + problem
        fits = len(trailer) + len(reason) <= left
        self._send([memoryview(trailer + reason if fits else trailer)])

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self._begin(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self._send([memoryview(body)])

    def _send_problem(
        self, error: TransferError, *, status: int | None = None, headers: dict[str, str] | None = None
    ) -> None:
        body = problem_text(error, status=status)
        headers = {"Content-Type": PROBLEM, "Content-Length": str(len(body)), **(headers or {})}
        if isinstance(error, SourceBusyError):
            # HTTP knows whole seconds only; the document beside it says it more exactly.
            headers["Retry-After"] = str(math.ceil(cast(float, error.facts.get("retry_after_s", 1))))
        if isinstance(error, AccessError) and status_for(error) == 401:
            headers["WWW-Authenticate"] = "Ticket" if self.command == "POST" else "Bearer"
        self._begin(status or status_for(error), headers)
        if self.command != "HEAD":
            self._send([memoryview(body)])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself, with a page: HTTP that is none, and methods without a route."""
        self.close_connection = True
        # Whatever the peer spoke, it gets a status line: to the base class a line that it cannot read is HTTP/0.9.
        self.request_version = self.protocol_version
        self._send_problem(RequestError(f"request: {explain or message or 'malformed'}"), status=code)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        logger.debug("%s %s", self.client_address[0], format % args)


def _batches(frames: Iterable[Frame], *, most_bytes: int) -> Iterator[list[Frame]]:
    """Frames that go out in one call: whole chunks together, any other alone, and so each that is copied first.

    A whole chunk is vouched for by the manifest, so one that changes while it is sent does not pass for good, whenever
    the fence is looked at. What is hashed here is looked at one by one.
    """
    batch: list[Frame] = []
    size = 0
    for frame in frames:
        if batch and (frame.chunk is None or batch[-1].chunk is None or size + frame.nbytes > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(frame)
        size += frame.nbytes
    if batch:
        yield batch


def _packed(
    publication: Publication, departure: Departure, batch: list[Frame], trailer: bytes
) -> tuple[list[memoryview], int]:
    """A batch as it goes out, behind the trailer of the frame before, and the digest of its last frame."""
    views: list[memoryview] = []
    digest = 0
    region: Region | None = None
    memory: memoryview | None = None
    for frame in batch:
        if views:
            trailer = framing.TRAILER.pack(framing.GOOD, digest)
        part = frame.parts[0]
        if frame.chunk is not None and part.region is not region:
            # Looked up once for all chunks of a region, as far as that is one piece of plain memory.
            region, memory = part.region, publication.shells.direct(part.region.offset, part.region.end)
        if frame.chunk is not None and memory is not None:
            payload = [memory[part.begin : part.end]]
        else:
            payload = departure.gather(frame.parts)
        digest = _digest(publication, frame, payload)
        views.append(memoryview(trailer + framing.HEADER.pack(framing.DATA, frame.nbytes)))
        views += payload
    return views, digest


def _digest(publication: Publication, frame: Frame, views: list[memoryview]) -> int:
    """A whole chunk's digest was computed once, by whoever loaded the weights: origin and transport in one."""
    if frame.chunk is not None:
        return digest_at(publication.manifest.chunk_digests, frame.chunk)
    return checksum(views)


def _as_ours(source: Source, error: TransferError) -> TransferError:
    """What a reader is told of an error: that our device fails must not look as if its own did."""
    return SourceError(f"{source}: {error}") if isinstance(error, DeviceError) else error


def _split(views: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `nbytes` of views, and what follows."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [*views[:index], view[:nbytes]], [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return views, []


def _check_ticket(source: Source, ticket: Ticket, request: ReadRequest) -> None:
    ours = source.identity
    facts = {
        "source": (
            (ticket.source_instance, ticket.source_rank, ticket.source_generation),
            (ours.instance_id, ours.rank, ours.generation),
        ),
        "target": (
            (ticket.target_instance, ticket.target_rank),
            (request.target_instance, request.target_rank),
        ),
        "weight version": (ticket.weight_version, request.weight_version),
    }
    for field, (granted, used) in facts.items():
        if granted != used:
            raise TicketError(f"ticket: {field} is {used} in this read, it was granted for {granted}")


def _check_fence(source: Source, publication: Publication, request: ReadRequest) -> None:
    facts = {
        "generation": (request.generation, source.identity.generation),
        "weight version": (request.weight_version, publication.weight_version),
        "manifest": (request.manifest, publication.manifest.digest),
    }
    for field, (asked, actual) in facts.items():
        if asked != actual:
            raise FencedError(f"{source}: {field} is {actual} here, {asked} was asked for")


def _check_complete(source: Source, publication: Publication) -> None:
    """Raises:
    SourceBusyError: If some of it is still to come: here nothing could say so in the middle.
    """
    if publication.is_partial:
        raise SourceBusyError(f"{source}: still receiving", retry_after_s=source.limits.retry_after_s)


def _tensor_pieces(publication: Publication, tensor: TensorEntry) -> Callable[[int, int], Iterator[memoryview]]:
    """The tensor's row-major bytes between two positions, in pieces of at most a chunk."""
    region = publication.manifest.flat_region(tensor)

    def pieces(begin: int, end: int) -> Iterator[memoryview]:
        for views in publication.shells.steps(region, begin, end):
            yield from views

    return pieces
