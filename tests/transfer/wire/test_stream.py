"""One connection to one source: right answers give the right bytes, wrong ones give a typed error and no bytes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash

from tests.transfer.conftest import (
    GENERATION,
    KEY,
    PATIENCE_S,
    SHORT,
    Fake,
    MakeFake,
    Serve,
    Served,
    bits,
    endpoint_of,
    filled,
    read_request,
    views_of,
)
from tests.transfer.wire.conftest import POISON, Answer, Answering, Closed, Held, Model, Spoil, answer_to, data, fail
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import (
    FencedError,
    NotFoundError,
    ProtocolError,
    RequestError,
    SourceBusyError,
    SourceError,
    SourceRefusedError,
    SourceStalledError,
    SourceUnreachableError,
    SourceUntrustedError,
    TicketError,
    TransferError,
)
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.planning import Supply, plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import Frame
from weightwire.transfer.wire.segments import Segment, cut_segments
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Damage, SourceStream, Timeouts

LONG = Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S)


def fetch(served: Served, target: Shells, *, covered: IntervalSet | None = None) -> list[Frame]:
    """Read into `target` all that a real source holds of it."""
    plan = plan_pull(target.manifest, [served.manifest], Supply(covered=covered))
    stream = SourceStream(served.endpoint(), served.manifest, timeouts=LONG)
    try:
        found = stream.fetch(list(cut_segments(served.manifest, plan.copies[0], num_streams=1)), target)
        return [each for each in found if isinstance(each, Frame)]
    finally:
        stream.close()


# Right answers


@pytest.mark.parametrize("dtype", sorted(BY_NAME))
def test_b10_every_dtype_and_stride_arrives_bit_for_bit(serve: Serve, dtype: str) -> None:
    tensors = views_of(dtype)
    served = serve(tensors)
    for layout in (tensors, {name: filled(dtype, tuple(t.shape)) for name, t in tensors.items()}):
        target = Shells.allocate(Shells.from_tensors(layout).manifest)
        target.fill(POISON)
        fetch(served, target)
        assert {name: bits(t) for name, t in target.tensors()} == {name: bits(t) for name, t in tensors.items()}


def test_strided_target_takes_from_a_contiguous_and_from_a_strided_source(serve: Serve) -> None:
    shape = (6, 7)
    sources = {"plain": filled("int16", shape), "strided": filled("int16", (12, 7), seed=1)[::2]}
    served = serve(sources, chunk_bytes=10)
    target = Shells.from_tensors({"plain": filled("int16", (7, 6)).T, "strided": filled("int16", (6, 9))[:, 1:8]})
    target.fill(POISON)
    fetch(served, target)
    assert {name: bits(t) for name, t in target.tensors()} == {name: bits(t) for name, t in sources.items()}


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 8, 64, 1 << 20])
def test_b08_b11_chunks_of_any_size_carry_empties_scalars_and_unaligned_ends(serve: Serve, chunk_bytes: int) -> None:
    tensors = {
        "g_idx": torch.empty(0, dtype=torch.int32),
        "w": torch.tensor([1.0, 2.0]),
        "scale": torch.tensor(1.5),
        "odd": filled("uint8", (13,)),
        "pad": torch.empty(2, 0, dtype=torch.float16),
        "wide": filled("bfloat16", (5, 9)).T,
        "last": torch.empty(0),
    }
    served = serve(tensors, chunk_bytes=chunk_bytes)
    target = Shells.allocate(served.manifest)
    target.fill(POISON)
    fetch(served, target)
    assert {name: bits(t) for name, t in target.tensors()} == {name: bits(t) for name, t in tensors.items()}
    assert target.tensor("w").tolist() == [1.0, 2.0]
    assert target.seal() == served.manifest


def test_many_small_tensors_arrive_in_one_answer(serve: Serve) -> None:
    tensors = {f"t{number}": torch.full((3,), number) for number in range(3000)}
    served = serve(tensors, chunk_bytes=256)
    target = Shells.allocate(served.manifest)
    fetch(served, target)
    assert target.seal() == served.manifest
    scattered = Shells.from_tensors({name: torch.empty_like(t) for name, t in reversed(tensors.items())})
    fetch(served, scattered)
    assert all(torch.equal(found, tensors[name]) for name, found in scattered.tensors())


def test_holes_are_filled_and_what_is_covered_is_not_touched(serve: Serve) -> None:
    source = filled("uint8", (200,))
    served = serve({"a": source}, chunk_bytes=32)
    target = Shells.allocate(served.manifest)
    target.fill(POISON)
    covered = IntervalSet([(0, 10), (40, 96), (150, 151)])
    frames = fetch(served, target, covered=covered)
    found = bits(target.tensor("a"))
    for at, byte in enumerate(bits(source)):
        assert found[at] == (POISON if covered.covers(at, at + 1) else byte)
    assert sum(frame.nbytes for frame in frames) == 200 - covered.total


def test_strided_holes_are_filled_in_the_order_of_the_target(serve: Serve) -> None:
    """A tensor that the source gathers is taken up where it broke off."""
    source = filled("int16", (10, 10)).T
    served = serve({"a": source}, chunk_bytes=32)
    target = Shells.from_tensors({"a": filled("int16", (10, 10))})
    target.fill(POISON)
    covered = IntervalSet([(0, 33), (100, 150)])
    frames = fetch(served, target, covered=covered)
    found = bits(target.tensor("a"))
    for at, byte in enumerate(bits(source)):
        assert found[at] == (POISON if covered.covers(at, at + 1) else byte)
    assert sum(frame.nbytes for frame in frames) == 200 - covered.total


def test_whole_chunks_are_told_apart_from_loose_bytes(serve: Serve) -> None:
    served = serve({"a": filled("uint8", (20,)), "b": filled("uint8", (4,))}, chunk_bytes=8)
    target = Shells.allocate(served.manifest)
    assert [frame.chunk for frame in fetch(served, target)] == [0, 1, 2, 3]
    assert [frame.chunk for frame in fetch(served, target, covered=IntervalSet([(0, 1)]))] == [None, 1, 2, 3]


@dataclass(kw_only=True)
class Reader:
    """A stream to a server that may answer wrongly, and the shells that it writes.

    Attributes:
        frames: How many were verified.
    """

    stream: SourceStream
    target: Shells
    segments: list[Segment]
    frames: int = 0

    def fetch(self) -> None:
        self.frames = 0
        for _ in self.stream.fetch(self.segments, self.target):
            self.frames += 1

    @property
    def memory(self) -> bytes:
        return b"".join(self.target.views(0, self.target.manifest.total_bytes))


class MakeReader:
    """Makes readers of servers that stand in for the real source."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.made: list[Reader] = []

    def __call__(self, url: str, *, timeouts: Timeouts = LONG) -> Reader:
        stream = SourceStream(endpoint_of(self._model.manifest, url=url), self._model.manifest, timeouts=timeouts)
        self.made.append(Reader(stream=stream, target=self._model.target(), segments=self._model.segments()))
        return self.made[-1]


@pytest.fixture
def reading(model: Model) -> Iterator[MakeReader]:
    make = MakeReader(model)
    yield make
    for reader in make.made:
        reader.stream.close()


def chunked(answer: Answer, *, cut: int = 7, keep: int | None = None, more: bytes = b"") -> bytes:
    body = (answer.body if keep is None else answer.body[:keep]) + more
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return answer.text(coded, content_length=None, transfer_encoding="chunked")


RIGHT: dict[str, Spoil] = {
    "as it should be": lambda answer: answer.text(),
    "in chunked transfer coding": chunked,
    "on a connection that closes behind it": lambda answer: Closed(answer.text(connection="close")),
    "without a length, until the connection closes": lambda answer: Closed(
        answer.text(content_length=None, connection="close")
    ),
    "in HTTP/1.0": lambda answer: Closed(answer.text().replace(b"HTTP/1.1", b"HTTP/1.0", 1)),
    "after a 100 Continue": lambda answer: b"HTTP/1.1 100 Continue\r\n\r\n" + answer.text(),
    "with a media type in other words": lambda answer: answer.text(server="nginx", x_cache="MISS"),
}


@pytest.mark.parametrize("form", RIGHT)
def test_answer_is_taken(answering: Answering, reading: MakeReader, model: Model, form: str) -> None:
    reader = reading(answering(RIGHT[form]).url)
    reader.fetch()
    reader.target.fill(POISON)
    reader.fetch()
    assert all(bits(reader.target.tensor(name)) == bits(tensor) for name, tensor in model.shells.tensors())


def test_answer_that_comes_byte_by_byte_is_taken(fake: MakeFake, reading: MakeReader, model: Model) -> None:
    def dribble(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer_to(read_request(connection)[1], model.shells).text():
            connection.sendall(bytes([byte]))

    reader = reading(fake(dribble).url)
    reader.fetch()
    assert bits(reader.target.tensor("a")) == bits(model.shells.tensor("a"))


def test_connection_is_used_again(answering: Answering, reading: MakeReader) -> None:
    server = answering(lambda answer: answer.text())
    reader = reading(server.url)
    for _ in range(3):
        reader.fetch()
    assert server.connections == 1


def test_bytes_behind_the_answer_are_never_taken_for_the_next_one(
    answering: Answering, reading: MakeReader, model: Model
) -> None:
    """What a cache or a smuggler puts behind an answer is another answer at best, to another question."""
    stale = model.shells.manifest.digest.encode()
    reader = reading(answering(lambda answer: answer.text() + answer.text() + stale, lambda a: a.text()).url)
    reader.fetch()
    assert reader.memory == model.memory
    reader.target.fill(POISON)
    reader.segments = reader.segments[1:]
    try:
        reader.fetch()
        assert reader.memory[16:] == model.memory[16:]
    except SourceError:
        assert set(reader.memory) == {POISON}
    reader.fetch()
    assert reader.memory[16:] == model.memory[16:]


def test_connection_that_was_closed_while_it_was_idle_is_opened_again(
    answering: Answering, reading: MakeReader
) -> None:
    server = answering(lambda answer: Closed(answer.text()), lambda answer: answer.text())
    reader = reading(server.url)
    reader.fetch()
    reader.fetch()
    assert server.connections == 2


def test_connection_that_closes_again_and_again_before_its_answer_is_an_error(
    answering: Answering, reading: MakeReader
) -> None:
    server = answering(lambda answer: answer.text(), lambda _: Closed(b""))
    reader = reading(server.url)
    reader.fetch()
    with pytest.raises(SourceUnreachableError):
        reader.fetch()
    with pytest.raises(SourceUnreachableError):
        reader.fetch()
    # The idle one, the one opened in its place, and that of the second try.
    assert (server.connections, len(server.requests)) == (3, 4)


# Wrong answers, of which nothing at all may be kept


def page(answer: Answer, status: str = "403 Forbidden", **headers: str) -> bytes:
    return answer.text(b"<html>s3cret</html>", status=status, content_type="text/html", **headers)


def problem(answer: Answer, status: str, document: dict[str, object]) -> bytes:
    return answer.text(json.dumps(document).encode(), status=status, content_type="application/problem+json")


REFUSED: dict[str, tuple[Spoil, type[TransferError], str]] = {
    "b44: a page instead": (page, SourceRefusedError, "answered 403 with text/html"),
    "b44: a redirect to a login page": (
        lambda answer: page(answer, "302 Found", location="http://127.0.0.1:9/login"), SourceRefusedError, "302",
    ),
    "a page with the right status": (
        lambda answer: page(answer, "200 OK"), ProtocolError, "Content-Type 'text/html'",
    ),
    "206": (lambda answer: answer.text(status="206 Partial Content"), SourceRefusedError, "206"),
    "204": (lambda answer: answer.text(b"", status="204 No Content"), SourceRefusedError, "204"),
    "no content type": (lambda answer: answer.text(content_type=None), ProtocolError, "Content-Type None"),
    "another generation": (
        lambda answer: answer.text(weightwire_generation="8"), ProtocolError, "Weightwire-Generation '8', expected '7'",
    ),
    "no generation": (lambda answer: answer.text(weightwire_generation=None), ProtocolError, "Generation None"),
    "another version": (lambda answer: answer.text(weightwire_weight_version="4"), ProtocolError, "Version '4'"),
    "no version": (lambda answer: answer.text(weightwire_weight_version=None), ProtocolError, "Version None"),
    "another manifest": (lambda answer: answer.text(weightwire_manifest="0" * 64), ProtocolError, "Manifest '000"),
    "no manifest": (lambda answer: answer.text(weightwire_manifest=None), ProtocolError, "Manifest None"),
    "an answer to another question": (
        lambda answer: answer.text(weightwire_request="0" * 16), ProtocolError, "Request '0000",
    ),
    "no word of the question": (lambda answer: answer.text(weightwire_request=None), ProtocolError, "Request None"),
    "a header twice": (
        lambda answer: answer.text().replace(
            b"weightwire-generation: 7", b"weightwire-generation: 7\r\nweightwire-generation: 8"
        ),
        ProtocolError,
        "7, 8",
    ),
    "b42: 200 and nothing": (lambda answer: Closed(answer.text(b"")), SourceUnreachableError, "ended after 0"),
    "no answer at all": (lambda _: Closed(b""), SourceUnreachableError, "source 's'"),
    "half a head": (lambda answer: Closed(answer.text()[:40]), ProtocolError, "Content-Type 'applicati'"),
    "no HTTP": (lambda _: Closed(b"SSH-2.0-OpenSSH_9.6\r\n"), ProtocolError, "BadStatusLine"),
    "a head without end": (
        lambda _: Closed(b"HTTP/1.1 200 OK\r\n" + b"X-More: x\r\n" * 5000), ProtocolError, "more than 100 headers",
    ),
    "a line without end": (
        lambda _: Closed(b"HTTP/1.1 200 OK\r\nX-More: " + b"x" * 100_000), ProtocolError, "LineTooLong",
    ),
    "a length that is none": (
        lambda answer: Closed(answer.text(b"", content_length="12x")), SourceUnreachableError, "ended after 0",
    ),
    "a negative length": (
        lambda answer: Closed(answer.text(b"", content_length="-5")), SourceUnreachableError, "ended after 0",
    ),
    "chunks that are none": (
        lambda answer: Closed(answer.text(b"zz\r\n", content_length=None, transfer_encoding="chunked")),
        ProtocolError,
        "",
    ),
    "another tag": (lambda answer: Closed(answer.text(b"DATB" + answer.body[4:])), ProtocolError, "DATB"),
    "a frame that is longer": (
        lambda answer: Closed(answer.text(data(answer.payloads[0] + b"x"))), ProtocolError, "expected DATA 16",
    ),
    "a frame that is shorter": (
        lambda answer: Closed(answer.text(data(answer.payloads[0][:-1]))), ProtocolError, "expected DATA 16",
    ),
    "b05: a frame of 4 GiB": (
        lambda answer: Closed(answer.text(b"DATA\xff\xff\xff\xff" + answer.body)), ProtocolError, "4294967295",
    ),
    "an empty frame first": (
        lambda answer: Closed(answer.text(data(b"") + answer.body)), ProtocolError, "expected DATA 16",
    ),
    "an error of 4 GiB": (
        lambda answer: Closed(answer.text(b"FAIL\xff\xff\xff\xff" + answer.body)), ProtocolError, "FAIL' 4294967295",
    ),
    "an error that is no JSON": (lambda answer: Closed(answer.text(fail(b"<html>"))), ProtocolError, ""),
    "an error that is no object": (lambda answer: Closed(answer.text(fail(b"[]"))), ProtocolError, "tells nothing"),
    "an error that is nested without end": (
        lambda answer: Closed(answer.text(fail(b"[" * 60_000))), ProtocolError, "",
    ),
    "an error that is no text": (lambda answer: Closed(answer.text(fail(b"\xff\xfe\xfd"))), ProtocolError, ""),
    "an error that is cut": (
        lambda answer: Closed(answer.text(fail(b"{}" * 9)[:-1])), SourceUnreachableError, "ended after",
    ),
    "an error": (
        lambda answer: Closed(answer.text(fail(b'{"code": "source_fenced", "detail": "moved on"}'))),
        FencedError,
        "moved on",
    ),
    "an error with members of any name": (
        lambda answer: Closed(
            answer.text(fail(b'{"code": "not_found", "detail": "x", "self": 1, "args": [], "facts": {}}'))
        ),
        NotFoundError,
        "x",
    ),
    "an error that is ours to decide": (
        lambda answer: Closed(answer.text(fail(b'{"code": "cancelled", "detail": "stopped"}'))),
        SourceRefusedError,
        "stopped",
    ),
    "a refusal that is ours to decide": (
        lambda answer: problem(answer, "504 Gateway Timeout", {"code": "deadline_exceeded", "detail": "late"}),
        SourceRefusedError,
        "late",
    ),
    "a refusal of the ticket": (
        lambda answer: problem(answer, "403 Forbidden", {"code": "ticket_invalid", "detail": "expired"}),
        TicketError,
        "expired",
    ),
    "busy": (
        lambda answer: problem(
            answer, "503 Service Unavailable", {"code": "source_busy", "detail": "full", "retry_after_s": 7}
        ),
        SourceBusyError,
        "full",
    ),
    "busy by the word of a proxy": (
        lambda answer: page(answer, "503 Service Unavailable", retry_after="7"), SourceBusyError, "503",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_answer_is_refused_and_no_byte_of_it_is_kept(
    answering: Answering, reading: MakeReader, kind: str
) -> None:
    spoil, expected, words = REFUSED[kind]
    server = answering(spoil, lambda answer: answer.text())
    reader = reading(server.url)
    with pytest.raises(expected) as caught:
        reader.fetch()
    assert type(caught.value) is expected
    assert words in str(caught.value)
    assert server.url in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert reader.frames == 0
    assert set(reader.memory) == {POISON}
    assert server.connections == 1
    reader.fetch()
    assert reader.frames == 4


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1),
        ("-1", 1),
        ("", 1),
        ("1.5", 1),
        ("\u0664".encode().decode("latin-1"), 1),
    ],
)
def test_busy_proxy_says_when_to_come_back(
    answering: Answering, reading: MakeReader, header: str, expected: int
) -> None:
    server = answering(lambda answer: page(answer, "503 Service Unavailable", retry_after=header))
    with pytest.raises(SourceBusyError) as caught:
        reading(server.url).fetch()
    assert caught.value.facts["retry_after_s"] == expected


# Wrong answers that begin well: what was verified stays, and is all that counts


BROKEN: dict[str, tuple[Spoil, type[TransferError], str, int]] = {
    "b42: a length of 100, and 40 bytes": (
        lambda answer: Closed(answer.text(answer.body[:40], content_length=str(len(answer.body)))),
        SourceUnreachableError, "ended after", 0,
    ),
    "cut in a trailer": (
        lambda answer: Closed(answer.text(answer.body[:30], content_length=str(len(answer.body)))),
        SourceUnreachableError, "ended", 0,
    ),
    "cut in a payload, and the length says so": (
        lambda answer: answer.text(answer.body[:50]), SourceUnreachableError, "ended", 1,
    ),
    "b42: chunked, ended early and legally": (
        lambda answer: chunked(answer, keep=36 + 8 + 5), SourceUnreachableError, "ended", 1,
    ),
    "ended behind a whole frame": (
        lambda answer: chunked(answer, keep=36), SourceUnreachableError, "ended", 0,
    ),
    "cut on a connection that closes": (
        lambda answer: Closed(answer.text(answer.body[:50], content_length=None, connection="close")),
        SourceUnreachableError, "ended", 1,
    ),
    "a bit of the second header flipped": (
        lambda answer: Closed(answer.text(flipped(answer.body, 36 + 1))), ProtocolError, "begins with", 1,
    ),
    "a bit of the second length flipped": (
        lambda answer: Closed(answer.text(flipped(answer.body, 36 + 7))), ProtocolError, "expected DATA 16", 1,
    ),
    "a bit of the second trailer flipped": (
        lambda answer: Closed(answer.text(flipped(answer.body, 36 + 8 + 16))), ProtocolError, "expected GOOD", 1,
    ),
    "taken back, with the reason": (
        lambda answer: Closed(
            answer.text(
                data(answer.payloads[0])
                + data(answer.payloads[1], digest=0, trailer=b"VOID")
                + fail(b'{"code": "source_fenced", "detail": "withdrawn"}')
            )
        ),
        FencedError, "withdrawn", 1,
    ),
    "the last one taken back, with the reason": (
        lambda answer: Closed(
            answer.text(
                b"".join(map(data, answer.payloads[:-1]))
                + data(answer.payloads[-1], digest=0, trailer=b"VOID")
                + fail(b'{"code": "source_fenced", "detail": "withdrawn"}')
            )
        ),
        FencedError, "withdrawn", 3,
    ),
    "taken back without a reason": (
        lambda answer: Closed(
            answer.text(data(answer.payloads[0]) + data(answer.payloads[1], digest=0, trailer=b"VOID"))
        ),
        SourceUnreachableError, "ended", 1,
    ),
    "taken back, and then goes on": (
        lambda answer: Closed(
            answer.text(data(answer.payloads[0]) + data(answer.payloads[1], trailer=b"VOID") + data(b"") * 9)
        ),
        ProtocolError, "VOID", 1,
    ),
    "an error behind a good frame": (
        lambda answer: Closed(
            answer.text(data(answer.payloads[0]) + fail(b'{"code": "source_fenced", "detail": "withdrawn"}'))
        ),
        FencedError, "withdrawn", 1,
    ),
    "goes on behind the last frame": (
        lambda answer: Closed(answer.text(answer.body + b"x")), ProtocolError, "goes on", 4,
    ),
    "goes on behind the last frame, chunked": (
        lambda answer: Closed(chunked(answer, more=b"x")), ProtocolError, "goes on", 4,
    ),
    "says that it would go on": (
        lambda answer: Closed(answer.text(content_length=str(len(answer.body) + 1))), ProtocolError, "goes on", 4,
    ),
}  # fmt: skip


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("kind", BROKEN)
def test_answer_that_breaks_keeps_what_was_verified(
    answering: Answering, reading: MakeReader, model: Model, kind: str
) -> None:
    spoil, expected, words, frames = BROKEN[kind]
    reader = reading(answering(spoil, lambda answer: answer.text()).url)
    with pytest.raises(expected) as caught:
        reader.fetch()
    assert type(caught.value) is expected
    assert words in str(caught.value)
    assert reader.frames == frames
    verified = min(16 * frames, model.manifest.total_bytes)
    assert reader.memory[:verified] == model.memory[:verified]
    # One chunk may have landed before it was found wrong; beyond it nothing was touched.
    assert set(reader.memory[16 * (frames + 1) :]) <= {POISON}
    reader.fetch()
    assert reader.memory == model.memory


def in_another_order(answer: Answer) -> bytes:
    first, second, *others = answer.payloads
    return b"".join(map(data, [second, first, *others]))


def under_its_own_checksum(answer: Answer) -> bytes:
    return data(answer.payloads[0]) + data(b"x" * 16) + b"".join(map(data, answer.payloads[2:]))


# What is wrong with a payload, its frame being sound: the words for it, and which frames it concerns.
DAMAGED: dict[str, tuple[Callable[[Answer], bytes], str, set[int]]] = {
    "a bit of the second payload flipped": (lambda answer: flipped(answer.body, 36 + 8 + 3), "sent as", {1}),
    "a bit of the second checksum flipped": (lambda answer: flipped(answer.body, 36 + 8 + 16 + 4), "sent as", {1}),
    "a bit of the last payload flipped": (lambda answer: flipped(answer.body, -13), "sent as", {3}),
    "other bytes under their own checksum": (under_its_own_checksum, "the manifest says", {1}),
    "frames in another order": (in_another_order, "the manifest says", {0, 1}),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_frame_is_told_and_the_ones_behind_it_are_read(
    answering: Answering, reading: MakeReader, model: Model, kind: str
) -> None:
    spoil, words, wrong = DAMAGED[kind]
    server = answering(lambda answer: answer.text(spoil(answer)), lambda answer: answer.text())
    reader = reading(server.url)
    found = list(reader.stream.fetch(reader.segments, reader.target))
    assert {number for number, each in enumerate(found) if isinstance(each, Damage)} == wrong
    assert [each.frame.nbytes if isinstance(each, Damage) else each.nbytes for each in found] == [16, 16, 16, 8]
    for each in found:
        if isinstance(each, Damage):
            assert words in str(each.error)
            assert server.url in str(each.error)
    for number in {0, 1, 2, 3} - wrong:
        assert reader.memory[16 * number : 16 * (number + 1)] == model.memory[16 * number : 16 * (number + 1)]
    reader.fetch()
    assert reader.memory == model.memory
    assert server.connections == 1


def test_damaged_frame_of_a_strided_target_is_not_written(answering: Answering) -> None:
    held = Shells.from_tensors({"a": filled("uint8", (4, 8))}, chunk_bytes=16)
    manifest = held.seal()
    target = Shells.from_tensors({"a": filled("uint8", (4, 9))[:, 1:]})
    target.fill(POISON)
    server = answering(lambda a: a.text(flipped(a.body, 10)), of=Model(shells=held, manifest=manifest))
    stream = SourceStream(endpoint_of(manifest, url=server.url), manifest, timeouts=LONG)
    copies = plan_pull(target.manifest, [manifest]).copies[0]
    found = list(stream.fetch(list(cut_segments(manifest, copies, num_streams=1)), target))
    stream.close()
    assert [isinstance(each, Damage) for each in found] == [True, False]
    assert bits(target.tensor("a")) == bytes([POISON]) * 16 + bits(held.tensor("a"))[16:]


def test_iterator_that_is_closed_early_closes_the_connection(
    answering: Answering, reading: MakeReader, model: Model
) -> None:
    server = answering(lambda answer: answer.text())
    reader = reading(server.url)
    frames = reader.stream.fetch(reader.segments, reader.target)
    next(frames)
    frames.close()
    assert not reader.stream.meter.asking
    # Not a byte of the second frame was written.
    assert reader.memory == model.memory[:16] + bytes([POISON]) * 40
    reader.fetch()
    assert reader.memory == model.memory
    assert server.connections == 2


@pytest.mark.parametrize("form", RIGHT)
def test_meter_counts_what_comes_and_whether_it_is_asked_for(
    answering: Answering, reading: MakeReader, model: Model, form: str
) -> None:
    reader = reading(answering(RIGHT[form]).url)
    asking = [reader.stream.meter.asking for _ in reader.stream.fetch(reader.segments, reader.target)]
    assert asking == [True] * 4
    assert not reader.stream.meter.asking
    assert reader.stream.meter.received == model.manifest.total_bytes + 4 * 20


SILENT: dict[str, Spoil] = {
    "before its head": lambda _: Held(b""),
    "within its head": lambda answer: Held(answer.text()[:30]),
    "behind its head": lambda answer: Held(answer.text()[: -len(answer.body)]),
    "within a frame": lambda answer: Held(answer.text()[: -len(answer.body) + 20]),
    "within a frame, chunked": lambda answer: Held(chunked(answer)[:-60]),
    "within an error page": lambda answer: Held(page(answer)[:-4]),
    "behind its frames, with more announced": lambda answer: Held(chunked(answer)[:-5]),
}


@pytest.mark.parametrize("where", SILENT)
def test_source_that_falls_silent_is_stalled(answering: Answering, reading: MakeReader, where: str) -> None:
    reader = reading(answering(SILENT[where]).url, timeouts=SHORT)
    with pytest.raises(SourceStalledError, match=r"no byte for 0\.3 s"):
        reader.fetch()


@pytest.mark.parametrize("where", ["before its head", "within its head", "within a frame"])
def test_source_that_falls_silent_on_a_connection_used_before_is_stalled(
    answering: Answering, reading: MakeReader, where: str
) -> None:
    reader = reading(answering(lambda answer: answer.text(), SILENT[where]).url, timeouts=SHORT)
    reader.fetch()
    with pytest.raises(SourceStalledError):
        reader.fetch()


def test_source_that_is_slow_but_never_silent_is_waited_for(fake: MakeFake, reading: MakeReader, model: Model) -> None:
    """A frame may take longer than a silence may last."""

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = answer_to(read_request(connection)[1], model.shells).text()
        cuts = [0, *(len(raw) - left for left in (60, 50, 41, 35, 30, 21, 12, 5)), len(raw)]
        for begin, end in pairwise(cuts):
            connection.sendall(raw[begin:end])
            server.over.wait(0.2)

    server = fake(answer)
    reader = reading(server.url, timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=1.5))
    reader.fetch()
    assert reader.memory == model.memory


def test_nobody_there_is_unreachable(reading: MakeReader) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(SourceUnreachableError, match="refused"):
        reading(url).stream.connect()


def test_name_that_nobody_has_is_unreachable(reading: MakeReader) -> None:
    with pytest.raises(SourceUnreachableError, match="source 's'"):
        reading("http://no-such-host.invalid:1").stream.connect()


@pytest.mark.parametrize("ticket", ["a\r\nX-Evil: 1", "\u0664", "\ud800"])
def test_ticket_that_fits_no_header_is_an_error_of_that_source(served: Served, model: Model, ticket: str) -> None:
    stream = SourceStream(served.endpoint(ticket=ticket), served.manifest, timeouts=LONG)
    with pytest.raises(ProtocolError):
        list(stream.fetch(model.segments(), model.target()))


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://u:s3cret@127.0.0.1:1", "", "http://fe80::1"])
def test_url_that_cannot_be_is_refused_at_once(reading: MakeReader, url: str) -> None:
    with pytest.raises(RequestError) as caught:
        reading(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"generation": 8}, FencedError, id="another generation"),
        pytest.param({"manifest": "0" * 64}, FencedError, id="another manifest"),
        pytest.param({"weight_version": 4}, TicketError, id="another version than the ticket's"),
        pytest.param({"target_instance": "x"}, TicketError, id="another target"),
        pytest.param({"target_rank": 1}, TicketError, id="another target rank"),
        pytest.param({"ticket": "x.y"}, TicketError, id="a forged ticket"),
    ],
)
def test_read_that_the_source_refuses_writes_nothing(
    served: Served, model: Model, change: dict[str, str | int], expected: type[TransferError]
) -> None:
    target = model.target()
    stream = SourceStream(served.endpoint(**change), served.manifest, timeouts=LONG)
    with pytest.raises(expected, match="source 's' rank 0 at http://"):
        list(stream.fetch(model.segments(), target))
    stream.close()
    assert set(b"".join(target.views(0, target.manifest.total_bytes))) == {POISON}


# Ending a read from outside


ENDLESS: dict[str, Spoil] = {
    "that waits for its head": lambda _: Held(b""),
    "in a frame": lambda answer: Held(answer.text()[:-50]),
    "in a chunked frame": lambda answer: Held(chunked(answer)[:-60]),
    "on a connection that closes": lambda answer: Held(answer.text(connection="close")[:-50]),
    "in an error page": lambda answer: Held(page(answer)[:-4]),
}


def ended_by_abort(reader: Reader, server: Fake, reached: threading.Event) -> Exception | None:
    """Fetch in a thread, abort once the server has sent what it sends, and return what the fetch raised."""
    caught: list[Exception] = []

    def read() -> None:
        try:
            reader.fetch()
        except TransferError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    reached.wait(PATIENCE_S)
    reader.stream.abort()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert server.connections == 1
    return caught[0] if caught else None


@pytest.mark.parametrize("where", ENDLESS)
def test_abort_ends_a_read(answering: Answering, reading: MakeReader, where: str) -> None:
    reached = threading.Event()

    def spoil(answer: Answer) -> bytes:
        reached.set()
        return ENDLESS[where](answer)

    server = answering(spoil)
    reader = reading(server.url)
    assert isinstance(ended_by_abort(reader, server, reached), SourceError)
    with pytest.raises(SourceUnreachableError, match="given up"):
        reader.fetch()


def test_abort_ends_a_read_that_dribbles_for_ever(fake: MakeFake, reading: MakeReader, model: Model) -> None:
    """It never stalls, and a frame of it would take days."""
    reached = threading.Event()

    def dribble(connection: socket.socket) -> None:
        raw = answer_to(read_request(connection)[1], model.shells).text(connection="close")
        connection.sendall(raw[:-50])
        reached.set()
        while not server.over.wait(0.01):
            connection.sendall(b"")

    server = fake(dribble)
    assert isinstance(ended_by_abort(reading(server.url), server, reached), SourceUnreachableError)


def test_reader_that_stops_in_the_middle_closes_its_connection(answering: Answering, reading: MakeReader) -> None:
    server = answering(lambda answer: answer.text())
    reader = reading(server.url)
    frames = reader.stream.fetch(reader.segments, reader.target)
    next(frames)
    frames.close()
    reader.fetch()
    assert (reader.frames, server.connections) == (4, 2)


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path / "tls.pem"
    made = {"-keyout": os.fspath(path), "-out": os.fspath(tmp_path / "certificate.pem"), "-days": "2"}
    names = {"-subj": "/CN=test", "-addext": "subjectAltName=IP:127.0.0.1"}
    options = [word for option in (made | names).items() for word in option]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(["openssl", "req", "-x509", *curve, *options], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (tmp_path / "certificate.pem").read_bytes())
    return path


@pytest.fixture
def encrypted(certificate: Path, model: Model) -> Iterator[Served]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    source = Source(SourceIdentity(instance_id="s", generation=GENERATION))
    source.grant_access(Access(ticket_key=KEY))
    source.publish(model.shells, weight_version=3)
    with SourceServer(source, tls=context) as server:
        yield Served(server=server, manifest=model.manifest)


def test_encrypted_read_gives_the_same_bytes(encrypted: Served, certificate: Path, model: Model) -> None:
    trust = ssl.create_default_context(cafile=os.fspath(certificate))
    stream = SourceStream(encrypted.endpoint(), encrypted.manifest, timeouts=LONG, tls=trust)
    target = model.target()
    assert encrypted.server.url.startswith("https://")
    for _ in range(2):
        assert len(list(stream.fetch(model.segments(), target))) == 4
    stream.close()
    assert b"".join(target.views(0, target.manifest.total_bytes)) == model.memory


def test_certificate_that_nobody_vouches_for_is_refused(encrypted: Served) -> None:
    stream = SourceStream(encrypted.endpoint(), encrypted.manifest, timeouts=LONG)
    with pytest.raises(SourceUntrustedError, match="certificate is refused: self-signed certificate"):
        stream.connect()


def test_client_that_never_shakes_hands_stops_nobody(encrypted: Served, certificate: Path, model: Model) -> None:
    with socket.create_connection((encrypted.server.address.host, encrypted.server.address.port)) as silent:
        test_encrypted_read_gives_the_same_bytes(encrypted, certificate, model)
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")


def test_checksum_of_the_helper_is_the_one_of_the_protocol() -> None:
    assert data(b"x")[-8:] == struct.pack("!Q", xxhash.xxh3_64_intdigest(b"x"))
