"""A source over real sockets: what it answers to readers, to strangers, and to what is no HTTP at all."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

import pytest
import torch
import xxhash
from safetensors.torch import load

from tests.transfer.conftest import (
    GENERATION,
    KEY,
    PATIENCE_S,
    TARGET,
    VERSION,
    Serve,
    Served,
    bits,
    endpoint_of,
    filled,
    views_of,
)
from tests.transfer.wire.conftest import MEDIA_TYPE, Model, data
from weightwire.transfer.errors import (
    FencedError,
    SettingsError,
    SourceLeavingError,
    SourceUnreachableError,
    TicketError,
)
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.problems import MEDIA_TYPE as PROBLEM
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.wire import source_routes
from weightwire.transfer.wire.framing import MAX_REQUEST_BYTES, PROTOCOL, Frame, ReadRequest
from weightwire.transfer.wire.segments import cut_segments
from weightwire.transfer.wire.source import Access, Publication, Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Damage, SourceStream, Timeouts

ODD_NAMES = ["a/b", "a b", "ü/ß", "a%2Fb", "a?b", "a#b", "..", ".", "", "a&b=c", "日本", "a\\b", "%", "//", "a;b"]
TICKET = Ticket(
    transfer_id="t",
    source_instance="s",
    source_rank=0,
    source_generation=GENERATION,
    target_instance=TARGET,
    target_rank=0,
    weight_version=VERSION,
    expires_at=time.time() + 3600,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer, read whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def problem(self) -> dict[str, object]:
        """The problem document, checked to be one about this answer."""
        assert self.headers["Content-Type"] == PROBLEM
        found = json.loads(self.body)
        assert found["status"] == self.status
        assert isinstance(found, dict)
        return found


class Client:
    """One connection, as a stranger would use it."""

    def __init__(self, served: Served) -> None:
        address = served.server.address
        self.connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE_S)

    def __call__(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body=body, headers=named)
        response = self.connection.getresponse()
        reply = Reply(status=response.status, headers=response.headers, body=response.read())
        assert reply.headers["Weightwire-Protocol"] == PROTOCOL
        assert reply.headers.get_all("Content-Length") == [reply.headers["Content-Length"]]
        if method != "HEAD":
            assert reply.headers["Content-Length"] == str(len(reply.body))
        return reply


Connect = Callable[[Served], Client]


@pytest.fixture
def client() -> Iterator[Connect]:
    made: list[Client] = []

    def connect(served: Served) -> Client:
        made.append(Client(served))
        return made[-1]

    yield connect
    for one in made:
        one.connection.close()


def drained(source: Source) -> bool:
    """Wait until nobody reads any more; the source serves nothing from then on."""
    source.withdraw(drain_s=PATIENCE_S)
    return source.active_readers == 0


# Health


def test_source_is_healthy_and_ready(served: Served, client: Connect) -> None:
    get = client(served)
    assert json.loads(get("GET", "/healthz").body) == {"status": "ok"}
    assert json.loads(get("GET", "/readyz").body) == {"status": "ready", "weight_version": VERSION, "ranks": [0]}
    assert get("HEAD", "/readyz").body == b""


def test_source_that_publishes_nothing_is_healthy_and_not_ready(served: Served, client: Connect) -> None:
    unpublished = Source(SourceIdentity(instance_id="s", generation=GENERATION))
    unpublished.grant_access(Access(ticket_key=KEY))
    with SourceServer(unpublished) as server:
        get = client(Served(server=server, manifest=served.manifest))
        assert get("GET", "/healthz").status == 200
        for path in ("/readyz", "/v1/tensors/a", "/v1/export.safetensors"):
            reply = get("GET", path)
            assert (reply.status, reply.problem["code"]) == (503, "source_busy")
            assert reply.headers["Retry-After"] == "1"


def test_source_that_withdrew_is_healthy_and_sends_its_readers_elsewhere(served: Served, client: Connect) -> None:
    served.source.withdraw()
    get = client(served)
    assert get("GET", "/healthz").status == 200
    assert get("GET", "/readyz").status == 503
    for path in ("/v1/tensors/a", "/v1/export.safetensors"):
        reply = get("GET", path)
        assert (reply.status, reply.problem["code"]) == (503, "source_leaving")
        assert "Retry-After" not in reply.headers


# One tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint8"])
def test_tensor_is_its_bytes_in_row_major_order_with_what_they_are(serve: Serve, client: Connect, dtype: str) -> None:
    tensors = views_of(dtype)
    served = serve(tensors, chunk_bytes=16)
    get = client(served)
    for name, tensor in tensors.items():
        for method in ("GET", "HEAD"):
            reply = get(method, f"/v1/tensors/{quote(name)}")
            assert reply.status == 200
            assert reply.body == (bits(tensor) if method == "GET" else b"")
            assert reply.headers["Content-Length"] == str(tensor.nbytes)
            assert reply.headers["Content-Type"] == "application/octet-stream"
            assert reply.headers["Accept-Ranges"] == "bytes"
            assert reply.headers["Weightwire-Dtype"] == dtype
            assert json.loads(reply.headers["Weightwire-Shape"]) == list(tensor.shape)
            assert reply.headers["Weightwire-Digest"] == xxhash.xxh3_64_hexdigest(bits(tensor))


def test_tensor_of_any_name_is_one_percent_encoded_segment(serve: Serve, client: Connect) -> None:
    tensors = {name: filled("uint8", (3,), seed=number) for number, name in enumerate(ODD_NAMES)}
    get = client(serve(tensors))
    for name, tensor in tensors.items():
        assert get("GET", f"/v1/tensors/{quote(name, safe='')}").body == bits(tensor), name


@pytest.mark.parametrize("path", ["x", "a/b", "%FF%FE", "a/", "A"])
def test_tensor_that_is_not_there_is_not_found(served: Served, client: Connect, path: str) -> None:
    reply = client(served)("GET", f"/v1/tensors/{path}")
    assert (reply.status, reply.problem["code"]) == (404, "not_found")


RANGES = [
    pytest.param("bytes=0-3", slice(0, 4), id="the first four bytes"),
    pytest.param("bytes=40-", slice(40, 48), id="from a place to the end"),
    pytest.param("bytes=-5", slice(43, 48), id="the last five"),
    pytest.param("bytes=10-1000", slice(10, 48), id="past the end"),
    pytest.param("bytes=17-17", slice(17, 18), id="one byte"),
]


@pytest.mark.parametrize(("header", "part"), RANGES)
@pytest.mark.parametrize("name", ["plain", "strided"])
def test_range_of_a_tensor_is_a_part(serve: Serve, client: Connect, name: str, header: str, part: slice) -> None:
    tensors = {"plain": filled("float32", (12,)), "strided": filled("float32", (4, 3), seed=1).T}
    reply = client(serve(tensors, chunk_bytes=7))("GET", f"/v1/tensors/{name}", Range=header)
    assert (reply.status, reply.body) == (206, bits(tensors[name])[part])
    assert reply.headers["Content-Range"] == f"bytes {part.start}-{part.stop - 1}/48"


def test_range_behind_the_end_is_416_with_the_length(served: Served, client: Connect) -> None:
    get = client(served)
    reply = get("GET", "/v1/tensors/a", Range="bytes=48-")
    assert (reply.status, reply.problem["code"]) == (416, "range_unsatisfiable")
    assert reply.headers["Content-Range"] == "bytes */48"
    assert get("GET", "/v1/tensors/none", Range="bytes=0-0").status == 416
    assert get("GET", "/v1/tensors/none", Range="bytes=-1").status == 200


@pytest.mark.parametrize("header", ["bytes=0-0,2-2", "items=0-1", "bytes=-", "bytes= -", "bytes=5-4", "x", ""])
def test_range_that_is_none_is_answered_with_the_whole(served: Served, client: Connect, header: str) -> None:
    reply = client(served)("GET", "/v1/tensors/a", Range=header)
    assert (reply.status, len(reply.body)) == (200, 48)
    assert "Content-Range" not in reply.headers


def test_range_of_a_head_is_ignored(served: Served, client: Connect) -> None:
    """RFC 9110, section 14.2: range handling is defined for GET alone."""
    reply = client(served)("HEAD", "/v1/tensors/a", Range="bytes=0-3")
    assert (reply.status, reply.headers["Content-Length"]) == (200, "48")


def test_range_counts_only_while_the_bytes_are_the_same(served: Served, client: Connect, model: Model) -> None:
    get = client(served)
    etag = get("GET", "/v1/tensors/a").headers["ETag"]
    assert get("GET", "/v1/tensors/a", Range="bytes=0-3", If_Range=etag).status == 206
    for other in ('"x"', f"W/{etag}", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert get("GET", "/v1/tensors/a", Range="bytes=0-3", If_Range=other).status == 200
    served.source.publish(model.shells, weight_version=VERSION + 1)
    assert get("GET", "/v1/tensors/a", Range="bytes=0-3", If_Range=etag).status == 200


# The whole rank


def test_export_is_a_file_that_the_library_reads(serve: Serve, client: Connect) -> None:
    weight = filled("bfloat16", (5, 3))
    tensors = {"embed": weight, "head": weight, "t": filled("float32", (4, 3)).T, "none": torch.empty(0, 2)}
    get = client(serve(tensors, chunk_bytes=16))
    reply = get("GET", "/v1/export.safetensors")
    found = load(reply.body)
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in tensors.items() if name != "head"
    }
    whole = reply.body
    for begin in range(0, len(whole), 37):
        part = get("GET", "/v1/export.safetensors", Range=f"bytes={begin}-{begin + 90}")
        assert part.body == whole[begin : begin + 91]
    assert get("HEAD", "/v1/export.safetensors").headers["Content-Length"] == str(len(whole))


def test_export_of_a_name_that_no_file_can_hold_is_a_problem(serve: Serve, client: Connect) -> None:
    reply = client(serve({"__metadata__": filled("uint8", (3,))}))("GET", "/v1/export.safetensors")
    assert (reply.status, reply.problem["code"]) == (500, "checkpoint_header_invalid")


# Tokens

TOKEN = "sesame-ü"
GUARDED = Access(ticket_key=KEY, read_token_sha256=frozenset({hashlib.sha256(TOKEN.encode()).hexdigest(), "0" * 64}))


def bearer(token: str) -> str:
    return f"Bearer {token}".encode().decode("latin-1")


@pytest.mark.parametrize("path", ["/v1/tensors/a", "/v1/tensors/x", "/v1/export.safetensors"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_token_opens_and_nothing_else_does(serve: Serve, client: Connect, method: str, path: str) -> None:
    get = client(serve({"a": filled("uint8", (3,))}, access=GUARDED))
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": bearer("wrong")},
        {"Authorization": bearer("")},
        {"Authorization": TOKEN.encode().decode("latin-1")},
        {"Authorization": f"Basic {TOKEN.encode().decode('latin-1')}"},
        {"Authorization": f"Ticket {issue_ticket(KEY, TICKET)}"},
        {"X-Token": TOKEN.encode().decode("latin-1")},
    ]
    for headers in wrong:
        reply = get(method, path, **headers)
        assert reply.status == 401
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert get(method, path, Authorization=bearer(TOKEN)).status == (404 if path.endswith("x") else 200)
    assert get(method, path, Authorization=bearer(TOKEN).replace("Bearer", "bearer")).status != 401
    assert get(method, "/healthz").status == 200


def test_source_that_no_service_knows_serves_nobody_yet(client: Connect, model: Model) -> None:
    source = Source(SourceIdentity(instance_id="s", generation=GENERATION))
    source.publish(model.shells, weight_version=VERSION)
    with SourceServer(source) as server:
        get = client(Served(server=server, manifest=model.manifest))
        assert get("GET", "/v1/tensors/a").status == 503
        assert get("POST", "/v1/read", b"{}", Authorization="Ticket x").status == 503
        get.connection.close()


# POST /v1/read


def request(model: Model, *regions: Region, **changes: str | int) -> bytes:
    fields: dict[str, str | int] = {
        "generation": GENERATION,
        "weight_version": VERSION,
        "manifest": model.manifest.digest,
        "target_instance": TARGET,
        "target_rank": 0,
    }
    return ReadRequest(**(fields | changes), regions=regions).to_bytes()  # type: ignore[arg-type]


def granted(**changes: str | int | float) -> str:
    return f"Ticket {issue_ticket(KEY, replace(TICKET, **changes))}"  # type: ignore[arg-type]


def test_read_answers_in_frames_with_the_echo_of_the_question(served: Served, client: Connect, model: Model) -> None:
    body = request(model, row_major((16,), offset=16), Region(offset=0, shape=(3, 2), strides=(16, 1)))
    reply = client(served)("POST", "/v1/read", body, Authorization=granted())
    strided = b"".join(model.memory[at : at + 2] for at in (0, 16, 32))
    assert reply.body == data(model.memory[16:32]) + data(strided)
    headers = {name: reply.headers[name] for name in reply.headers if name.startswith("Weightwire")}
    assert reply.headers["Content-Type"] == MEDIA_TYPE
    assert headers == {
        "Weightwire-Protocol": PROTOCOL,
        "Weightwire-Generation": str(GENERATION),
        "Weightwire-Weight-Version": str(VERSION),
        "Weightwire-Manifest": model.manifest.digest,
        "Weightwire-Request": xxhash.xxh3_64_hexdigest(body),
    }


def test_read_of_no_region_is_no_frame(served: Served, client: Connect, model: Model) -> None:
    post = client(served)
    assert post("POST", "/v1/read", request(model), Authorization=granted()).body == b""
    assert post("POST", "/v1/read", request(model, row_major((0,))), Authorization=granted()).body == b""
    assert post("POST", "/v1/read", request(model, row_major((4,))), Authorization=granted()).body != b""


REFUSALS = [
    pytest.param({"weight_version": VERSION + 1}, {}, 403, "ticket_invalid", id="another version than the ticket's"),
    pytest.param({"target_instance": "x"}, {}, 403, "ticket_invalid", id="another target than the ticket's"),
    pytest.param({"target_rank": 1}, {}, 403, "ticket_invalid", id="another target rank than the ticket's"),
    pytest.param({}, {"target_rank": 1}, 403, "ticket_invalid", id="a ticket of another target rank"),
    pytest.param({}, {"source_rank": 1}, 403, "ticket_invalid", id="a ticket for another source rank"),
    pytest.param({}, {"source_instance": "x"}, 403, "ticket_invalid", id="a ticket for another source"),
    pytest.param({}, {"source_generation": 6}, 403, "ticket_invalid", id="a ticket for an earlier process"),
    pytest.param({}, {"expires_at": 1.0}, 403, "ticket_invalid", id="an expired ticket"),
    pytest.param({"generation": 6}, {}, 409, "source_fenced", id="an earlier process"),
    pytest.param({"manifest": "0" * 64}, {}, 409, "source_fenced", id="another manifest"),
    pytest.param(
        {"weight_version": 9}, {"weight_version": 9}, 409, "source_fenced", id="a version that is not there yet"
    ),
]


@pytest.mark.parametrize(("asked", "ticket", "status", "code"), REFUSALS)
def test_b37_read_that_is_not_for_this_process_is_refused_before_anything_is_read(
    served: Served, client: Connect, model: Model, asked: dict[str, str | int], ticket: dict[str, str | int],
    status: int, code: str,
) -> None:  # fmt: skip
    post = client(served)
    body = request(model, row_major((10**9,)), **asked)
    reply = post("POST", "/v1/read", body, Authorization=granted(**ticket))
    assert (reply.status, reply.problem["code"]) == (status, code)
    assert post("POST", "/v1/read", request(model, row_major((4,))), Authorization=granted()).status == 200


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Ticket", "Ticket ", "Bearer x", f"Basic {issue_ticket(KEY, TICKET)}", issue_ticket(KEY, TICKET)],
)
def test_read_without_a_ticket_is_told_what_to_bring(
    served: Served, client: Connect, model: Model, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    reply = client(served)("POST", "/v1/read", request(model), **headers)
    assert (reply.status, reply.problem["code"]) == (401, "unauthorized")
    assert reply.headers["WWW-Authenticate"] == "Ticket"


@pytest.mark.parametrize("ticket", ["x", "x.y", "\xff\xfe", "." * 5000, issue_ticket(b"other", TICKET)])
def test_read_with_a_forged_ticket_is_refused(served: Served, client: Connect, model: Model, ticket: str) -> None:
    reply = client(served)("POST", "/v1/read", request(model), Authorization=f"Ticket {ticket}")
    assert (reply.status, reply.problem["code"]) == (403, "ticket_invalid")


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        pytest.param("[[57, 0]]", "ends at byte 57", id="behind the end"),
        pytest.param("[[0, 57]]", "asks for 57 bytes", id="past the end"),
        pytest.param("[[0, 56], [0, 1]]", "asks for 57 bytes", id="more than there is"),
        pytest.param("[[0, [4611686018427387904], [0]]]", "asks for", id="one byte again and again"),
        pytest.param("[[40, [2], [10]]]", "one storage", id="strided over two storages"),
        pytest.param("[[-1, 5]]", "negative", id="before the beginning"),
        pytest.param("[[0, true]]", "integers", id="a boolean"),
        pytest.param('["' + "x" * 100_000 + '"]', "integers", id="a very long word"),
    ],
)
def test_read_of_a_region_that_is_not_there_is_refused(
    served: Served, client: Connect, model: Model, regions: str, words: str
) -> None:
    body = request(model).replace(b'"regions":[]', f'"regions":{regions}'.encode())
    reply = client(served)("POST", "/v1/read", body, Authorization=granted())
    assert (reply.status, reply.problem["code"]) == (422, "region_invalid")
    assert words in str(reply.problem["detail"])
    assert len(reply.body) < 2000


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"regions": []}', b"null"])
def test_read_with_a_body_that_is_no_request_is_refused(served: Served, client: Connect, body: bytes) -> None:
    reply = client(served)("POST", "/v1/read", body, Authorization=granted())
    assert (reply.status, reply.problem["code"]) == (422, "request_invalid")


@pytest.mark.parametrize(
    ("version", "status"), [("1.0", 200), ("1.9", 200), ("2.0", 426), ("0", 426), ("", 426), ("x", 426)]
)
def test_another_major_version_is_refused(served: Served, client: Connect, version: str, status: int) -> None:
    get = client(served)
    assert get("GET", "/healthz", Weightwire_Protocol=version).status == status
    reply = get("POST", "/v1/read", b"{}", Weightwire_Protocol=version)
    assert reply.status == (401 if status == 200 else 426)


def test_thousands_of_small_regions_come_in_one_answer(serve: Serve, client: Connect) -> None:
    tensors = {f"t{number}": torch.tensor([number % 256, number % 7], dtype=torch.uint8) for number in range(5000)}
    shells = Shells.from_tensors(tensors, chunk_bytes=64)
    served = serve(shells)
    found = Model(shells=shells, manifest=served.manifest)
    body = request(found, *(row_major((1,), offset=at) for at in range(0, 10_000, 2)))
    reply = client(served)("POST", "/v1/read", body, Authorization=granted())
    wanted = found.memory[::2]
    assert reply.body == b"".join(data(wanted[at : at + 64]) for at in range(0, len(wanted), 64))


# What is no request


def talk(served: Served, raw: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes on a connection of their own, and read until the server closes it."""
    with socket.create_connection((served.server.address.host, served.server.address.port), PATIENCE_S) as connection:
        connection.sendall(raw)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
        return found


POST = b"POST /v1/read HTTP/1.1\r\nAuthorization: Ticket x\r\n"
MALFORMED = [
    pytest.param(b"hello\r\n\r\n", 400, id="one word"),
    pytest.param(b"GET / / HTTP/1.1\r\n\r\n", 400, id="too many words"),
    pytest.param(b"GET / HTTP/x\r\n\r\n", 400, id="a version that is none"),
    pytest.param(b"GET / HTTP/2.0\r\n\r\n", 505, id="a version of the future"),
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="the beginning of TLS"),
    pytest.param(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414, id="a path without end"),
    pytest.param(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431, id="too many headers"),
    pytest.param(b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431, id="a header without end"),
    pytest.param(b"PUT /v1/read HTTP/1.1\r\n\r\n", 501, id="a method without a route"),
    pytest.param(b"DELETE / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 501, id="another such method, with a body"),
    pytest.param(POST + b"\r\n", 422, id="no length"),
    pytest.param(POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 422, id="two lengths"),
    pytest.param(POST + b"Content-Length: 1, 1\r\n\r\na", 422, id="two lengths in one"),
    pytest.param(POST + b"Content-Length: -1\r\n\r\n", 422, id="a negative length"),
    pytest.param(POST + b"Content-Length: +1\r\n\r\na", 422, id="a signed length"),
    pytest.param(POST + b"Content-Length: 1_0\r\n\r\n", 422, id="a length as Python writes it"),
    pytest.param(POST + b"Content-Length: \xb2\r\n\r\n", 422, id="a length in other digits"),
    pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 422, id="chunked"),
    pytest.param(
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 422, id="chunked, and a length"
    ),
    pytest.param(
        b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 422, id="a chunked body of a GET"
    ),
    pytest.param(POST + b"Content-Length: 4194305\r\n\r\n", 413, id="a length over the limit"),
    pytest.param(POST + b"Content-Length: " + b"9" * 6000 + b"\r\n\r\n", 413, id="a length of thousands of digits"),
    pytest.param(
        b"GET /healthz HTTP/1.1\r\nContent-Length : 26\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n",
        422,
        id="a blank in a header",
    ),
    pytest.param(b"GET /healthz HTTP/1.1\r\nnonsense\r\nX: y\r\n\r\n", 422, id="a header that is none"),
    pytest.param(b"GET http://[ HTTP/1.1\r\nConnection: close\r\n\r\n", 422, id="a URL that is none"),
]


@pytest.mark.parametrize(("raw", "status"), MALFORMED)
def test_what_is_no_request_is_answered_with_a_problem_and_the_connection_closed(
    served: Served, raw: bytes, status: int
) -> None:
    head, _, body = talk(served, raw, half_close=status == 413).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0].split()[1] == str(status).encode()
    assert b"Content-Type: application/problem+json" in head
    assert b"Connection: close" in head
    assert json.loads(body)["status"] == status
    assert b"<html" not in body.lower()
    assert drained(served.source)


def test_body_that_ends_early_is_refused(served: Served) -> None:
    found = talk(served, POST + b"Content-Length: 10\r\n\r\nabc", half_close=True)
    assert b"ended after 3 of 10 bytes" in found


def test_length_twice_the_same_is_one_length(served: Served) -> None:
    raw = b"POST /v1/read HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    assert b"401" in talk(served, raw).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(("POST", "/v1/else", b"GET /healthz HTTP/1.1\r\n\r\n", {}), id="a path that is not there"),
        pytest.param(("POST", "/v1/read", b"GET /healthz HTTP/1.1\r\n\r\n", {}), id="no ticket"),
        pytest.param(
            ("POST", "/v1/read", b"GET /healthz HTTP/1.1\r\n\r\n", {"Weightwire_Protocol": "9"}), id="another version"
        ),
        pytest.param(("GET", "/v1/tensors/x", b"GET /healthz HTTP/1.1\r\n\r\n", {}), id="a GET with a body"),
        pytest.param(("HEAD", "/healthz", b"GET /healthz HTTP/1.1\r\n\r\n", {}), id="a HEAD with a body"),
    ],
)
def test_body_of_a_refused_request_is_never_taken_for_the_next_one(
    served: Served, client: Connect, first: tuple[str, str, bytes, dict[str, str]]
) -> None:
    method, path, body, headers = first
    get = client(served)
    get(method, path, body, **headers)
    reply = get("GET", "/v1/tensors/a")
    assert (reply.status, len(reply.body)) == (200, 48)


def test_b46_body_over_the_limit_is_answered_while_it_is_still_sent(served: Served, client: Connect) -> None:
    reply = client(served)("POST", "/v1/read", bytes(MAX_REQUEST_BYTES * 3), Authorization=granted())
    assert (reply.status, reply.problem["code"]) == (413, "body_too_large")
    assert reply.problem["limit_bytes"] == MAX_REQUEST_BYTES


def test_connection_serves_many_requests(served: Served, client: Connect, model: Model) -> None:
    get = client(served)
    for _ in range(3):
        assert get("GET", "/v1/tensors/a").status == 200
        assert get("POST", "/v1/read", request(model, row_major((4,))), Authorization=granted()).status == 200
        assert get("GET", "/nothing").status == 404
    assert get.connection.sock is not None


# Limits


def test_readers_beyond_the_limit_are_turned_away_and_come_back(serve: Serve, client: Connect, model: Model) -> None:
    served = serve(model.shells, limits=SourceLimits(max_readers=1, retry_after_s=5))
    get = client(served)
    with served.source.reading():
        for reply in (
            get("GET", "/v1/tensors/a"),
            get("POST", "/v1/read", request(model, row_major((4,))), Authorization=granted()),
        ):
            assert (reply.status, reply.problem["code"]) == (503, "source_busy")
            assert reply.headers["Retry-After"] == "5"
        assert get("GET", "/healthz").status == 200
        assert get("GET", "/readyz").status == 200
    assert get("GET", "/v1/tensors/a").status == 200


def test_connections_beyond_the_limit_are_closed_and_others_are_served(
    serve: Serve, client: Connect, model: Model
) -> None:
    served = serve(model.shells, limits=SourceLimits(max_connections=2))
    inside = [client(served), client(served)]
    for one in inside:
        assert one("GET", "/healthz").status == 200
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        client(served)("GET", "/healthz")
    assert inside[0]("GET", "/healthz").status == 200
    inside[1].connection.close()
    for _ in range(1000):
        try:
            assert client(served)("GET", "/healthz").status == 200
            break
        except (http.client.RemoteDisconnected, ConnectionError):
            continue
    else:
        pytest.fail("nobody was let in again")


def large(serve: Serve, **limits: float) -> Served:
    """A source of 64 MiB, more than any socket buffers."""
    shells = Shells.from_tensors({"a": torch.ones(1 << 26, dtype=torch.uint8)})
    return serve(shells, limits=SourceLimits(**limits))  # type: ignore[arg-type]


def test_b46_reader_that_takes_nothing_is_cut_off(serve: Serve) -> None:
    served = large(serve, write_timeout_s=0.2)
    address = (served.server.address.host, served.server.address.port)
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(b"GET /v1/tensors/a HTTP/1.1\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert drained(served.source)
        got = 0
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                got += len(piece)
    assert got < 1 << 26


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_b46_slow_readers_cost_a_source_a_chunk_each(serve: Serve) -> None:
    """Also where it gathers: the answer to each reader is 64 MiB, and never lies in memory as a whole."""
    allocation = torch.ones((2, 1 << 13, 1 << 13), dtype=torch.uint8)
    served = serve(Shells.from_tensors({"t": allocation[0].T, "a": allocation[1]}))
    before = resident_bytes()
    with contextlib.ExitStack() as stack:
        for name in ("t", "a") * 4:
            address = (served.server.address.host, served.server.address.port)
            connection = stack.enter_context(socket.create_connection(address, PATIENCE_S))
            connection.sendall(f"GET /v1/tensors/{name} HTTP/1.1\r\n\r\n".encode())
            assert len(stack.enter_context(connection.makefile("rb")).read(1 << 20)) == 1 << 20
        assert served.source.active_readers == 8
        assert resident_bytes() - before < 1 << 26
    assert drained(served.source)


def test_connection_without_a_request_is_closed(serve: Serve, model: Model) -> None:
    served = serve(model.shells, limits=SourceLimits(idle_timeout_s=0.1))
    assert talk(served, b"") == b""
    assert talk(served, b"GET /heal") == b""
    assert talk(served, b"GET /healthz HTTP/1.1\r\n\r\n").endswith(b'{"status": "ok"}')


def test_body_that_never_comes_is_not_waited_for(serve: Serve, model: Model) -> None:
    served = serve(model.shells, limits=SourceLimits(write_timeout_s=0.1))
    assert talk(served, POST + b"Content-Length: 10\r\n\r\nabc") == b""


# Versions that change under a read


def reading(served: Served) -> tuple[SourceStream, Iterator[object]]:
    stream = SourceStream(
        served.endpoint(), served.manifest, timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S)
    )
    target = Shells.allocate(served.manifest)
    (copies,) = plan_pull(served.manifest, [served.manifest]).copies
    return stream, stream.fetch(list(cut_segments(served.manifest, copies, num_streams=1)), target)


class Careless(Source):
    """A source whose memory is written right after somebody looked whether it stands."""

    memory = torch.empty(0)

    def check_stands(self, publication: Publication) -> None:
        super().check_stands(publication)
        self.memory[40] ^= 1


def test_chunks_that_change_while_they_are_sent_together_do_not_pass_for_good() -> None:
    shells = Shells.from_tensors({"a": filled("uint8", (16 * 4,))}, chunk_bytes=16)
    manifest = shells.seal()
    source = Careless(SourceIdentity(instance_id="s", generation=GENERATION))
    source.memory = shells.tensor("a")
    source.grant_access(Access(ticket_key=KEY))
    source.publish(shells, weight_version=VERSION)
    with SourceServer(source) as server:
        stream, frames = reading(Served(server=server, manifest=manifest))
        assert [type(frame) for frame in frames] == [Frame, Frame, Damage, Frame]
        stream.close()


class Fickle(Source):
    """A source whose weights change at a moment of the test's choosing: when it is asked for the nth time."""

    def __init__(self, moment: int) -> None:
        super().__init__(SourceIdentity(instance_id="s", generation=GENERATION))
        self._moment = moment

    def check_stands(self, publication: Publication) -> None:
        self._moment -= 1
        if not self._moment:
            self.withdraw(drain_s=0)
        super().check_stands(publication)


def body_of(connection: http.client.HTTPConnection) -> bytes:
    """What arrives of the body, as far as it was announced."""
    response = connection.getresponse()
    try:
        return response.read()
    except http.client.IncompleteRead as error:
        return error.partial


@pytest.mark.parametrize("chunks", [2, 20], ids=["reason does not fit", "reason fits"])
@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_frame_during_which_the_weights_change_is_taken_back(
    client: Connect, moment: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_routes, "_BATCH_BYTES", 16)
    shells = Shells.from_tensors({"a": filled("uint8", (16 * chunks,))}, chunk_bytes=16)
    found = Model(shells=shells, manifest=shells.seal())
    source = Fickle(moment)
    source.grant_access(Access(ticket_key=KEY))
    source.publish(shells, weight_version=VERSION)
    with SourceServer(source) as server:
        connection = client(Served(server=server, manifest=found.manifest)).connection
        headers = {"Authorization": granted()}
        connection.request("POST", "/v1/read", body=request(found, row_major((16 * chunks,))), headers=headers)
        body, tag, problem = body_of(connection).partition(b"FAIL")
        assert connection.sock is None or connection.sock.recv(1) == b""
    first, second = found.memory[:16], found.memory[16:32]
    sent = [b"", data(first, digest=0, trailer=b"VOID"), data(first)]
    sent.append(data(first) + data(second, digest=0, trailer=b"VOID"))
    assert body == sent[moment - 1]
    if chunks == 20:
        assert tag == b"FAIL"
        assert int.from_bytes(problem[:4], "big") == len(problem) - 4
        assert json.loads(problem[4:])["code"] == "source_fenced"
    else:
        assert tag + problem == b""


def test_version_that_is_withdrawn_ends_the_stream_with_the_reason(serve: Serve) -> None:
    served = large(serve)
    stream, frames = reading(served)
    next(frames)
    served.source.withdraw(drain_s=0)
    with pytest.raises(FencedError, match="weight version 3 was withdrawn while it was read"):
        list(frames)
    stream.close()
    assert drained(served.source)


def test_next_version_ends_the_streams_of_the_former(serve: Serve) -> None:
    served = large(serve)
    stream, frames = reading(served)
    next(frames)
    served.source.publish(served.source.publication.shells, weight_version=VERSION + 1)  # type: ignore[union-attr]
    with pytest.raises(FencedError, match="weight version 3"):
        list(frames)
    with pytest.raises(FencedError, match="weight version is 4 here, 3 was asked for"):
        list(reading(served)[1])
    stream.close()


def test_tensor_that_changes_while_it_is_read_ends_early(serve: Serve, client: Connect) -> None:
    served = large(serve)
    get = client(served)
    get.connection.request("GET", "/v1/tensors/a")
    response = get.connection.getresponse()
    response.read(1)
    served.source.withdraw(drain_s=0)
    with pytest.raises(http.client.IncompleteRead):
        response.read()


# Starting and stopping


def test_stop_lets_a_reader_finish(serve: Serve) -> None:
    served = large(serve)
    stream, frames = reading(served)
    next(frames)
    stopping = threading.Thread(target=served.server.stop, kwargs={"drain_s": PATIENCE_S})
    stopping.start()
    assert len(list(frames)) == 63
    stream.close()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()


def test_stop_cuts_off_a_reader_that_does_not_finish(serve: Serve) -> None:
    served = large(serve)
    stream, frames = reading(served)
    next(frames)
    served.server.stop(drain_s=0.05)
    with pytest.raises((FencedError, SourceUnreachableError)):
        list(frames)
    stream.close()
    with pytest.raises(OSError, match="refused"):
        talk(served, b"")
    assert drained(served.source)


def test_stop_closes_connections_that_ask_nothing(served: Served, client: Connect) -> None:
    get = client(served)
    assert get("GET", "/healthz").status == 200
    served.server.stop()
    assert get.connection.sock.recv(1) == b""
    served.server.stop()


def test_server_that_was_never_started_can_be_stopped(model: Model) -> None:
    source = Source(SourceIdentity(instance_id="s"))
    SourceServer(source).stop()


def test_b33_port_is_bound_once_and_its_number_is_told(served: Served) -> None:
    address = served.server.address
    assert address.port
    with pytest.raises(SettingsError, match=f"127.0.0.1:{address.port} cannot be bound") as caught:
        SourceServer(served.source, port=address.port)
    assert "another process may hold the port" in str(caught.value)
    assert caught.value.facts == {"host": "127.0.0.1", "port": address.port}


def test_b37_port_can_be_had_again_while_old_connections_linger(serve: Serve, client: Connect, model: Model) -> None:
    served = serve(model.shells)
    get = client(served)
    assert get("GET", "/healthz").status == 200
    served.server.stop()
    again = Source(SourceIdentity(instance_id="s", generation=GENERATION + 1))
    again.grant_access(Access(ticket_key=KEY))
    again.publish(model.shells, weight_version=VERSION)
    with SourceServer(again, port=served.server.address.port) as server:
        found = Served(server=server, manifest=model.manifest)
        stream = SourceStream(found.endpoint(), model.manifest)
        with pytest.raises(TicketError, match=r"source is \('s', 0, 8\) in this read"):
            list(stream.fetch(model.segments(), model.target()))
        stream.close()


@pytest.mark.parametrize(
    ("host", "port"), [("no-such-host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000), ("127.0.0.1", -1)]
)
def test_address_that_cannot_be_bound_is_refused(host: str, port: int) -> None:
    with pytest.raises(SettingsError, match="cannot be bound"):
        SourceServer(Source(SourceIdentity(instance_id="s")), host=host, port=port)


def test_b32_source_listens_on_ipv6(model: Model) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    source = Source(SourceIdentity(instance_id="s", generation=GENERATION))
    source.grant_access(Access(ticket_key=KEY))
    source.publish(model.shells, weight_version=VERSION)
    with SourceServer(source, host="::1") as server:
        assert server.url == f"http://[::1]:{server.address.port}"
        stream = SourceStream(endpoint_of(model.manifest, url=server.url), model.manifest)
        assert len(list(stream.fetch(model.segments(), model.target()))) == 4
        stream.close()


def test_many_readers_at_once_get_the_same_bytes(serve: Serve, model: Model) -> None:
    served = serve(model.shells, limits=SourceLimits(max_readers=8))
    found: list[bytes] = []
    start = threading.Barrier(8)

    def read() -> None:
        stream = SourceStream(served.endpoint(), model.manifest)
        target = model.target()
        start.wait(PATIENCE_S)
        for _ in range(10):
            list(stream.fetch(model.segments(), target))
        stream.close()
        found.append(b"".join(target.views(0, target.manifest.total_bytes)))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [model.memory] * 8
    assert drained(served.source)
    with pytest.raises(SourceLeavingError), served.source.reading():
        pass
