"""docs/protocol.md is what the code speaks: its requests are sent, its bytes compared, its tables held to constants."""

from __future__ import annotations

import hashlib
import http.client
import inspect
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.conftest import Json, blocks, differences, examples, page, table
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import TransferError
from weightwire.transfer.manifest import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, Manifest, Topology, chunk_bounds
from weightwire.transfer.problems import problem_of, status_for
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket, read_ticket
from weightwire.transfer.wire import framing, held
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.http_range import UnsatisfiableRangeError
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Access, Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Timeouts

ROOT = Path(__file__).parents[2]
PAGE = page("protocol.md")
REQUESTS = examples(PAGE)
TICKET = blocks(PAGE, "ticket")[0].strip()
KEY = bytes(range(32))
FRAMES = bytes.fromhex("".join(re.split(r"\s{3,}", line)[0] for line in blocks(PAGE, "hex")[0].splitlines()))


def answer(name: str) -> Json:
    match = re.search(rf"<!-- answer: {re.escape(name)} -->\s*```json\n(.*?)```", PAGE, re.DOTALL)
    assert match, name
    return cast(Json, json.loads(match[1]))


def granted(grant: dict[str, Json]) -> list[list[Json]]:
    """The sources of the only target rank, in order, without what is new in each run."""
    facts = ("instance_id", "epoch", "rank", "generation", "url", "weight_version")
    [rank] = cast("list[dict[str, Json]]", grant["ranks"])
    return [[source[fact] for fact in facts] for source in cast("list[dict[str, Json]]", rank["sources"])]


def manifest() -> Manifest:
    return Manifest.from_text(json.dumps(REQUESTS["manifest"]).encode())


@pytest.fixture(scope="module")
def service() -> Iterator[httpx.Client]:
    with running_service(Settings(port=0, token=None, read_token=None)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def source() -> Iterator[http.client.HTTPConnection]:
    """A connection to a source that holds what the page says."""
    shells = Shells.allocate(manifest())
    shells.tensor("scale").fill_(1.0)
    shells.tensor("weight").copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    shells.tensor("mask").copy_(torch.tensor([7, 8]))
    assert shells.seal() == manifest()
    served = Source(SourceIdentity(instance_id="source-1", generation=1000))
    served.grant_access(Access(ticket_key=KEY))
    served.publish(shells, weight_version=1)
    with SourceServer(served) as server:
        connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=20)
        yield connection
        connection.close()


# -- control plane --


def test_control_plane_answers_as_documented(service: httpx.Client) -> None:
    """The page's requests, word by word, in its order."""

    def send(name: str, *, status: int, body: Json = None, transfer_id: str = "") -> Json:
        method, path = name.replace("{transfer_id}", transfer_id).split(" ")
        got = service.request(method, path, json=REQUESTS[name] if body is None else body)
        assert got.status_code == status, got.text
        assert got.headers["Weightwire-Protocol"] == framing.PROTOCOL
        return cast(Json, got.json())

    name = "PUT /v1/instances/source-1"
    assert differences(answer(name), send(name, status=200)) == []
    send("PUT /v1/instances/source-2", status=200)
    send("PUT /v1/instances/target-1", status=200)

    name = "PUT /v1/instances/source-1/ranks/0/manifest"
    refused = send(name, status=404)
    assert isinstance(refused, dict)
    assert (refused["code"], refused["kind"]) == ("not_found", "manifest")
    announced = REQUESTS[name]
    assert isinstance(announced, dict)
    assert send(name, status=200, body={**announced, "manifest": REQUESTS["manifest"]}) == answer(name)
    for rank in (0, 1):
        half = replace(manifest(), topology=Topology(tp=2), rank=rank)
        publication: Json = {
            "epoch": 1500,
            "generation": 1500,
            "weight_version": 1,
            "digest": half.digest,
            "manifest": json.loads(half.text),
        }
        send(f"PUT /v1/instances/source-2/ranks/{rank}/manifest", status=200, body=publication)

    name = "POST /v1/transfers"
    grant = send(name, status=201)
    documented = answer(name)
    assert differences(documented, grant) == []
    assert isinstance(grant, dict)
    assert isinstance(documented, dict)
    assert [grant[key] for key in ("state", "revision", "weight_version", "reasons")] == [
        documented[key] for key in ("state", "revision", "weight_version", "reasons")
    ]
    assert granted(grant) == granted(documented)

    text = service.get(f"/v1/manifests/{manifest().digest}").content
    assert hashlib.sha256(text).hexdigest() == manifest().digest

    name = "POST /v1/transfers/{transfer_id}/ranks/0/progress"
    assert send(name, status=200, transfer_id=str(grant["transfer_id"])) == answer(name)
    left = service.delete("/v1/instances/source-1?epoch=1000")
    assert left.status_code == 204


@pytest.mark.parametrize(
    "name", ["PUT /v1/instances/source-1", "PUT /v1/instances/source-1/ranks/0/manifest", "POST /v1/transfers",
             "POST /v1/transfers/{transfer_id}/ranks/0/progress"],
)  # fmt: skip
def test_request_example_shows_every_field(name: str, service: httpx.Client) -> None:
    method, path = name.split(" ")
    path = re.sub(r"/(source-1)", "/{instance_id}", path).replace("ranks/0", "ranks/{rank}")
    schema = service.get("/openapi.json").json()
    body = schema["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]] if "$ref" in body else body
    example = REQUESTS[name]
    assert isinstance(example, dict)
    assert example.keys() == fields["properties"].keys()


@pytest.mark.parametrize("stated", ["2.0", "0.9"])
def test_another_major_version_is_refused_by_both_servers(
    stated: str, service: httpx.Client, source: http.client.HTTPConnection
) -> None:
    assert service.get("/healthz", headers={"Weightwire-Protocol": stated}).status_code == 426
    source.request("GET", "/healthz", headers={"Weightwire-Protocol": stated})
    refused = source.getresponse()
    assert (refused.status, json.loads(refused.read())["code"]) == (426, "version_skew")


# -- manifests, chunks, tickets --


def test_manifest_example_has_the_digest_of_the_examples() -> None:
    digests = set(re.findall(r"\b[0-9a-f]{64}\b", PAGE)) - {manifest().chunk_digests.hex()}
    assert digests == {manifest().digest}
    assert manifest().chunk_bounds == (0, 4, 12, 16, 18)


def test_manifest_table_names_every_member() -> None:
    rows = {
        name for cell, _ in table(PAGE, "Manifests") for name in re.findall(r"[a-z_]+", cell.replace("tensors[].", ""))
    }
    value = json.loads(manifest().text)
    assert rows == value.keys() - {"tensors"} | value["tensors"][0].keys() | {"strides", "constants"}


def test_canonical_text_escapes_what_the_page_says() -> None:
    name = "".join(map(chr, range(0x100))) + "日本\U0001f600"
    entry = Manifest(model=name, revision="", storages=(), tensors=())
    escaped = "".join(f"\\u{code:04x}" for code in range(8)) + "\\b\\t\\n\\u000b\\f\\r"
    escaped += "".join(f"\\u{code:04x}" for code in range(14, 32))
    plain = name[32:].replace("\\", "\\\\").replace('"', '\\"')
    assert f'"model":"{escaped}{plain}"'.encode() in entry.text


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 16))
def test_documented_chunk_rule_is_the_one_of_the_code(storages: list[int], chunk_bytes: int) -> None:
    names: dict[str, Callable[[list[int], int], list[int]]] = {}
    exec(blocks(PAGE, "python")[0], names)
    assert names["chunk_bounds"](storages, chunk_bytes) == list(chunk_bounds(storages, chunk_bytes=chunk_bytes))


def test_dtype_table_is_that_of_the_code() -> None:
    rows = [(name, int(size), tag) for name, size, tag in table(PAGE, "Dtypes")]
    assert rows == [(dtype.name, dtype.itemsize, dtype.tag) for dtype in BY_NAME.values()]


def test_ticket_example_is_signed_with_the_documented_key() -> None:
    claims = cast("dict[str, object]", REQUESTS["ticket"])
    assert claims.keys() == inspect.signature(Ticket).parameters.keys()
    ticket = read_ticket(KEY, TICKET, now=time.time())
    assert {name: getattr(ticket, name) for name in claims} == claims
    assert issue_ticket(KEY, ticket) == TICKET


# -- data plane --


def test_source_answers_the_documented_read_with_the_documented_bytes(source: http.client.HTTPConnection) -> None:
    body = json.dumps(REQUESTS["POST /v1/read"]).encode()
    source.request("POST", "/v1/read", body, {"Authorization": f"Ticket {TICKET}", "Weightwire-Protocol": "1.0"})
    got = source.getresponse()
    assert got.status == 200
    documented = {name for name, _ in table(PAGE, "POST /v1/read", "answer header")}
    values = {
        "Content-Type": framing.MEDIA_TYPE,
        "Content-Length": str(len(FRAMES)),
        "Weightwire-Protocol": framing.PROTOCOL,
        "Weightwire-Generation": "1000",
        "Weightwire-Weight-Version": "1",
        "Weightwire-Manifest": manifest().digest,
        "Weightwire-Request": f"{xxhash.xxh3_64_intdigest(body):016x}",
    }
    # Only a relay that has not everything yet has something to wait for.
    assert documented == values.keys() | {"Weightwire-Waits"}
    assert got.getheader("Weightwire-Waits") is None
    assert {name: got.getheader(name) for name in values} == values
    assert got.read() == FRAMES


def test_relay_waits_as_documented() -> None:
    """The same request at a target that has chunks 0 and 1, and receives the others while it is read."""
    origin = Shells.allocate(manifest())
    origin.tensor("scale").fill_(1.0)
    origin.tensor("weight").copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    origin.tensor("mask").copy_(torch.tensor([7, 8]))
    shells = Shells.allocate(manifest())
    partial = Held(shells, manifest())

    def receive(chunk: int) -> None:
        begin, end = manifest().chunk_bounds[chunk : chunk + 2]
        run = Region(offset=begin, shape=(end - begin,), strides=(1,))
        shells.scatter(memoryview(b"".join(origin.views(begin, end))), run, 0)
        partial.add(manifest().digest, [(run, 0, run.numel)], [chunk])

    relay = Source(SourceIdentity(instance_id="source-1", generation=1000))
    relay.grant_access(Access(ticket_key=KEY))
    relay.publish_partial(shells, partial, weight_version=1)
    for chunk in (0, 1):
        receive(chunk)
    body = json.dumps(REQUESTS["POST /v1/read"])
    with SourceServer(relay) as server:
        connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=20)
        connection.request(
            "POST", "/v1/read", body, {"Authorization": f"Ticket {TICKET}", "Weightwire-Protocol": "1.1"}
        )
        got = connection.getresponse()
        waits = int(got.getheader("Weightwire-Waits", "0"))
        assert got.getheader("Content-Length") == str(len(FRAMES) + 8 * waits)
        first = FRAMES[: FRAMES.index(b"DATA", 4)]
        answered = got.read(len(first) + 8)
        assert answered == first + b"WAIT\0\0\0\0"
        for chunk in (2, 3):
            receive(chunk)
        answered += got.read()
        connection.close()
    assert answered.count(b"WAIT\0\0\0\0") == waits
    assert answered.replace(b"WAIT\0\0\0\0", b"") == FRAMES


def test_framing_module_reads_the_documented_bytes() -> None:
    request = framing.ReadRequest.from_bytes(json.dumps(REQUESTS["POST /v1/read"]).encode())
    at, packed = 0, b""
    for frame in framing.cut_frames(manifest(), request.regions):
        kind, length = framing.HEADER.unpack_from(FRAMES, at)
        payload = FRAMES[at + framing.HEADER.size : at + framing.HEADER.size + length]
        verdict, digest = framing.TRAILER.unpack_from(FRAMES, at + framing.HEADER.size + length)
        assert (kind, length, verdict) == (framing.DATA, frame.nbytes, framing.GOOD)
        assert digest == xxhash.xxh3_64_intdigest(payload)
        if frame.chunk is not None:
            assert digest.to_bytes(8, "big") == manifest().chunk_digests[8 * frame.chunk : 8 * frame.chunk + 8]
        packed += payload
        at += length + framing.FRAME_OVERHEAD_BYTES
    assert at == len(FRAMES)
    assert packed == bytes.fromhex("010002000300040005000600 01000400 07")


def test_region_forms_are_those_of_the_code() -> None:
    request = framing.ReadRequest.from_bytes(json.dumps(REQUESTS["POST /v1/read"]).encode())
    run, column, byte = request.regions
    weight = manifest().flat_region(manifest().by_name["weight"])
    assert run == weight
    assert column == Region(offset=4, shape=(2, 2), strides=(6, 1))
    assert byte == Region(offset=16, shape=(1,), strides=(1,))


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        pytest.param({"generation": 999}, 409, "source_fenced", id="another generation"),
        pytest.param({"manifest": "0" * 64}, 409, "source_fenced", id="another manifest"),
        pytest.param({"weight_version": 2}, 403, "ticket_invalid", id="another version than the ticket's"),
        pytest.param({"target": {"instance_id": "x", "rank": 0}}, 403, "ticket_invalid", id="another target"),
        pytest.param({"regions": [[17, 2]]}, 422, "region_invalid", id="a region past the end"),
        pytest.param({"regions": [[0, [2, 2], [8, 1]]]}, 422, "region_invalid", id="strided over two storages"),
        pytest.param({"regions": [[0, 10], [0, 10]]}, 422, "region_invalid", id="more than the flat space"),
        pytest.param({"regions": [[-1, 1]]}, 422, "region_invalid", id="a negative offset"),
        pytest.param({"extra": 1}, 422, "request_invalid", id="an unknown field"),
    ],
)
def test_source_refuses_as_documented(
    change: dict[str, Json], status: int, code: str, source: http.client.HTTPConnection
) -> None:
    example = cast("dict[str, Json]", REQUESTS["POST /v1/read"])
    source.request("POST", "/v1/read", json.dumps({**example, **change}), {"Authorization": f"Ticket {TICKET}"})
    refused = source.getresponse()
    assert (refused.status, json.loads(refused.read())["code"]) == (status, code)
    assert refused.getheader("Content-Type") == "application/problem+json"


def test_one_tensor_is_answered_as_documented(source: http.client.HTTPConnection) -> None:
    source.request("GET", "/v1/tensors/weight", headers={"Range": "bytes=2-5"})
    part = source.getresponse()
    assert (part.status, part.read(), part.getheader("Content-Range")) == (206, b"\x02\x00\x03\x00", "bytes 2-5/12")
    values = {"Weightwire-Dtype": "int16", "Weightwire-Shape": "[2,3]", "Weightwire-Digest": "7033f496e0fe2752"}
    assert {name: part.getheader(name) for name in values} == values
    assert {name for name, _ in table(PAGE, "GET /v1/tensors/{name}")} == values.keys() | {"ETag"}
    source.request("GET", "/v1/tensors/weight", headers={"Range": "bytes=12-"})
    refused = source.getresponse()
    assert (refused.status, refused.getheader("Content-Range")) == (416, "bytes */12")
    assert json.loads(refused.read())["code"] == "range_unsatisfiable"


def test_every_header_of_ours_is_in_the_code_and_on_the_page() -> None:
    header = re.compile(r"Weightwire-[A-Z][A-Za-z-]*")
    files = itertools.chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("transfer", "service"))
    spoken = {name for file in files for name in header.findall(file.read_text("utf-8"))}
    assert spoken == set(header.findall(PAGE))


# -- tables --


def all_errors(root: type[TransferError] = TransferError) -> list[type[TransferError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in all_errors(child))]


def test_error_table_is_that_of_the_code() -> None:
    rows = {code: (int(status), again == "yes") for code, status, again, _ in table(PAGE, "Errors")}
    real = {kind.code: (status_for(kind("x")), kind.retryable) for kind in all_errors() if _is_ours(kind)}
    # Answered with the status that HTTP has for it; the table of statuses knows its parent.
    real[UnsatisfiableRangeError.code] = (416, False)
    assert rows == real


def _is_ours(kind: type[TransferError]) -> bool:
    return kind.__module__.startswith("weightwire.")


def test_problem_example_is_what_an_error_becomes() -> None:
    example = cast("dict[str, Json]", REQUESTS["problem"])
    kind = next(kind for kind in all_errors() if kind.code == example["code"])
    assert problem_of(kind(str(example["detail"]))) == example


def test_get_routes_take_a_rank_as_documented(source: http.client.HTTPConnection) -> None:
    def ask(path: str) -> tuple[int, Json]:
        source.request("GET", path)
        got = source.getresponse()
        body = got.read()
        return got.status, cast(Json, json.loads(body)) if got.getheader("Content-Type", "").endswith("json") else None

    for query in ("", "?rank=0"):
        assert ask(f"/readyz{query}") == (200, answer("GET /readyz"))
    for path in ("/readyz", "/v1/tensors/weight", "/v1/export.safetensors"):
        assert ask(f"{path}?rank=0")[0] == 200
        status, problem = ask(f"{path}?rank=1")
        assert isinstance(problem, dict)
        assert (status, problem["code"], problem["kind"]) == (404, "not_found", "rank")
        status, problem = ask(f"{path}?tensor=1")
        assert isinstance(problem, dict)
        assert (status, problem["code"]) == (400, "request_invalid")


def test_limits_are_those_of_the_code() -> None:
    settings, limits, options = Settings(), SourceLimits(), PullOptions()
    real = [
        framing.MAX_REQUEST_BYTES, MAX_CHUNK_BYTES, framing.MAX_PROBLEM_BYTES,
        framing.MAX_WAITS, framing.WAIT_INTERVAL_S, held.PATIENCE_S,
        settings.max_manifest_bytes, settings.max_body_bytes, settings.body_timeout_s,
        limits.max_readers, limits.seat_wait_s, limits.max_connections, limits.retry_after_s, limits.write_timeout_s,
        limits.idle_timeout_s,
        Timeouts().connect_s, Timeouts().stall_s, options.stall_window_s, options.min_rate_bytes_per_s,
        options.busy_patience_s,
    ]  # fmt: skip
    assert [float(cell.split()[0]) for _, cell in table(PAGE, "Limits")] == real
    assert f"by default {DEFAULT_CHUNK_BYTES} " in PAGE
