"""The HTTP layer: names in paths, versions, bodies, errors, and what each route answers."""

from __future__ import annotations

import base64
import gzip
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
import pytest

from tests.service.conftest import MODEL, Api, Clock, MakeApi, make_manifest, progress, registration, transfer_request
from weightwire.service.store import MemoryStore, Transaction
from weightwire.transfer.errors import AdmissionError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.tickets import read_ticket
from weightwire.transfer.wire.framing import PROTOCOL

NAMES = [
    pytest.param("org/name", "org%2Fname", id="a slash"),
    pytest.param("org/name", "org%2fname", id="a slash in lower case"),
    pytest.param("a b", "a%20b", id="a blank"),
    pytest.param("modèle-日本", "mod%C3%A8le-%E6%97%A5%E6%9C%AC", id="unicode"),
    pytest.param("a%2Fb", "a%252Fb", id="a percent sign"),
    pytest.param("a?b#c&d=e+f", "a%3Fb%23c%26d%3De%2Bf", id="characters with a meaning in URLs"),
    pytest.param("plain.name_1-~", "pl%61in.name_1-~", id="letters that need no encoding"),
]


def register_source(api: Api, instance_id: str = "s1", model: str = MODEL) -> None:
    manifest = make_manifest(model=model)
    api.register(instance_id, model=model).raise_for_status()
    api.publish(manifest, instance_id).raise_for_status()


def code(response: httpx.Response) -> str:
    """The code of a problem document, which is what every error must be."""
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["weightwire-protocol"] == PROTOCOL
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["type"] == f"urn:weightwire:error:{problem['code']}"
    assert problem["title"]
    assert problem["detail"]
    return str(problem["code"])


# -- paths, versions, bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "segment"), NAMES)
def test_name_in_a_path_is_one_segment(api: Api, name: str, segment: str) -> None:
    register_source(api, segment, model=name)
    assert api("GET", f"/v1/instances/{segment}").json()["instance_id"] == name
    sources = api("GET", f"/v1/models/{segment}/sources").json()
    assert [source["instance_id"] for source in sources] == [name]
    assert api("DELETE", f"/v1/instances/{segment}?epoch=1").status_code == 204


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/v1/models/org/name/sources", id="a slash that is not encoded"),
        pytest.param("/v1/models//sources", id="no name"),
        pytest.param("/v1%2Fmodels", id="an encoded slash between segments"),
        pytest.param("/v1/models/", id="a slash at the end"),
    ],
)
def test_path_that_is_no_resource_is_not_found(api: Api, path: str) -> None:
    response = api("GET", path)
    assert (response.status_code, code(response)) == (404, "not_found")


@pytest.mark.parametrize("name", ["%00", "a%0Ab", "%7F", "..", "%2E%2E", "a" * 600])
def test_name_that_must_not_be_is_refused(api: Api, name: str) -> None:
    response = api.register(name)
    assert (response.status_code in (404, 422), code(response)) in ((True, "request_invalid"), (True, "not_found"))
    assert api("GET", "/v1/instances").json() == []


def test_path_that_is_not_utf8_is_refused(api: Api) -> None:
    response = api("GET", "/v1/instances/%FF")
    assert (response.status_code, code(response)) == (422, "request_invalid")


@pytest.mark.parametrize("version", [None, PROTOCOL, "1.7", " 1.0 "])
def test_client_of_the_same_major_version_is_heard(api: Api, version: str | None) -> None:
    headers = {} if version is None else {"Weightwire-Protocol": version}
    response = api("GET", "/v1/models", headers=headers)
    assert (response.status_code, response.headers["weightwire-protocol"]) == (200, PROTOCOL)


@pytest.mark.parametrize("version", ["2.0", "0.9", "1", "one", "", "1.0.0", "-1.0", "10.0", "1.x", "9" * 5000 + ".0"])
def test_client_of_another_major_version_is_refused(api: Api, version: str) -> None:
    response = api("PUT", "/v1/instances/s", body={}, headers={"Weightwire-Protocol": version})
    assert (response.status_code, code(response)) == (426, "version_skew")
    assert response.json()["supported"] == PROTOCOL
    assert response.headers["upgrade"] == f"weightwire/{PROTOCOL}"


def test_b46_body_over_the_limit_is_refused_with_the_limit(make_api: MakeApi) -> None:
    api = make_api(max_body_bytes=1000, max_manifest_bytes=5000)
    for path, method, limit in (
        ("/v1/instances/s1", "PUT", 1000),
        ("/v1/transfers", "POST", 1000),
        ("/v1/instances/s1/ranks/0/manifest", "PUT", 5000),
        ("/v1/plans", "POST", 5000),
    ):
        for size in (limit + 1, 2 * limit, 2 * limit + 1, 50 * limit):
            response = api(method, path, content=b"x" * size)
            assert (response.status_code, code(response)) == (413, "body_too_large")
            assert response.json()["limit_bytes"] == limit
        assert api(method, path, content=b"x" * limit).status_code == 422


def test_gzip_bomb_is_refused_without_being_unpacked(make_api: MakeApi) -> None:
    api = make_api(max_manifest_bytes=100_000)
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    response = api("PUT", "/v1/instances/s1/ranks/0/manifest", content=bomb, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, code(response)) == (413, "body_too_large")


PLAN = b'{"model": "m"}'


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        pytest.param(PLAN, "gzip", id="not gzip at all"),
        pytest.param(gzip.compress(PLAN)[:-4], "gzip", id="gzip that is cut off"),
        pytest.param(gzip.compress(PLAN) + b"x", "gzip", id="something after the gzip"),
        pytest.param(b"", "gzip", id="nothing"),
        pytest.param(PLAN, "br", id="another encoding"),
        pytest.param(gzip.compress(gzip.compress(PLAN)), "gzip, gzip", id="two encodings"),
    ],
)
def test_body_that_cannot_be_unpacked_is_refused(api: Api, content: bytes, encoding: str) -> None:
    response = api("POST", "/v1/plans", content=content, headers={"Content-Encoding": encoding})
    assert (response.status_code, code(response)) == (422, "request_invalid")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="JSON that is cut off"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b'{"model": "\\ud800"}', id="half of a surrogate pair"),
        pytest.param(b"[" * 100_000, id="brackets without end"),
        pytest.param(b'{"a":' * 100_000, id="objects without end"),
        pytest.param(b"9" * 5000, id="a number without end"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/transfers"), ("POST", "/v1/plans"), ("PUT", "/v1/instances/s")]
)
def test_body_that_is_no_request_is_refused(api: Api, method: str, path: str, content: bytes) -> None:
    response = api(method, path, content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, code(response)) == (422, "request_invalid")


# -- errors ----------------------------------------------------------------------------------------------------


def test_unknown_fields_are_refused_by_name(api: Api) -> None:
    for response, field in (
        (api.register("s", colour="red"), "body.colour"),
        (api.register("s", topology={"tp": 1, "dp": 2}), "body.topology.dp"),
        (api.register("s", ranks=[{"rank": 0, "generation": 1, "url": None, "x": 1}]), "body.ranks.0.x"),
        (api("POST", "/v1/transfers", body=transfer_request(sauce=1)), "body.sauce"),
        (api("POST", "/v1/plans", body={"model": "m", "x": 1}), "x"),
        (api("GET", "/v1/transfers?limits=1"), "query.limits"),
        (api("GET", "/v1/models/m/sources?rev=1"), "query.rev"),
    ):
        assert (response.status_code, code(response)) == (422, "request_invalid")
        assert field in [item["field"] for item in response.json()["fields"]]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"epoch": "1"}, id="an epoch in quotes"),
        pytest.param({"epoch": True}, id="a truth value for an epoch"),
        pytest.param({"epoch": 1.0}, id="a fraction for an epoch"),
        pytest.param({"epoch": -1}, id="an epoch below zero"),
        pytest.param({"epoch": 2**63}, id="an epoch beyond 64 bits"),
        pytest.param({"model": ""}, id="no model"),
        pytest.param({"model": None}, id="null for a model"),
        pytest.param({"ranks": []}, id="no ranks"),
        pytest.param({"lease_s": 0}, id="no lease"),
        pytest.param({"lease_s": float("inf")}, id="a lease without end"),
        pytest.param({"lease_s": float("nan")}, id="a lease that is no number"),
        pytest.param({"topology": {"tp": 0}}, id="no ranks in the topology"),
        pytest.param({"topology": {"tp": 4, "ep": 3}}, id="a topology that does not divide"),
        pytest.param({"ranks": [{"rank": 1, "generation": 1, "url": None}]}, id="a rank outside the world"),
        pytest.param({"ranks": [{"rank": 0, "generation": 1, "url": "fe80::1"}]}, id="a URL that is none"),
    ],
)
def test_values_that_cannot_be_are_refused(api: Api, fields: dict[str, object]) -> None:
    response = api.register("s", **fields)
    assert response.status_code == 422
    assert code(response) in ("request_invalid", "manifest_invalid")
    assert api("GET", "/v1/instances").json() == []


def test_long_list_of_wrong_fields_makes_a_short_answer(api: Api) -> None:
    response = api.register("s", ranks=[{"rank": -1, "generation": -1, "url": 1}] * 1000)
    assert response.status_code == 422
    assert len(response.json()["fields"]) == 20
    assert "and 2980 more" in response.json()["detail"]


def test_method_that_a_path_does_not_have_is_refused(api: Api) -> None:
    response = api("PATCH", "/v1/transfers")
    assert (response.status_code, code(response)) == (405, "request_invalid")
    assert set(response.headers["allow"].split(", ")) >= {"POST"}


class Broken:
    """A store that fails when it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._store = MemoryStore()

    def transaction(self) -> AbstractContextManager[Transaction]:
        if self.error is not None:
            raise self.error
        return self._store.transaction()

    def close(self) -> None:
        return


def test_failure_inside_says_nothing_of_the_inside(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    store = Broken()
    api = make_api(store=store)
    store.error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        response = api("GET", "/v1/instances")
    assert (response.status_code, code(response)) == (500, "transfer_failed")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text, "the log has it"


def test_error_of_ours_keeps_its_code_and_facts(make_api: MakeApi) -> None:
    store = Broken()
    api = make_api(store=store)
    store.error = AdmissionError("too little memory", needed_bytes=2, available_bytes=1)
    response = api("GET", "/v1/instances")
    assert (response.status_code, code(response)) == (507, "memory_insufficient")
    assert (response.json()["needed_bytes"], response.json()["available_bytes"]) == (2, 1)


def stale_epoch(api: Api) -> httpx.Response:
    api.register("s1", epoch=5)
    return api.register("s1", epoch=4)


def other_key_use(api: Api) -> httpx.Response:
    api.grant()
    key = {"Idempotency-Key": "k"}
    api("POST", "/v1/transfers", body=transfer_request(), headers=key).raise_for_status()
    return api("POST", "/v1/transfers", body=transfer_request(max_sources=1), headers=key)


def lying_digest(api: Api) -> httpx.Response:
    api.register("s1")
    return api.publish(make_manifest(), digest="0" * 64)


def not_a_manifest(api: Api) -> httpx.Response:
    api.register("s1")
    body = {"epoch": 1, "generation": 1, "weight_version": 0, "digest": "0" * 64, "manifest": {"format": 1}}
    return api("PUT", "/v1/instances/s1/ranks/0/manifest", body=body)


def other_dtype(api: Api) -> httpx.Response:
    register_source(api)
    target = json.loads(make_manifest(dtype="float16").text)
    return api("POST", "/v1/plans", body={"model": MODEL, "manifest": [target]})


@pytest.mark.parametrize(
    ("provoke", "status", "expected"),
    [
        pytest.param(stale_epoch, 409, "conflict", id="a stale epoch"),
        pytest.param(other_key_use, 409, "conflict", id="a key that was used for something else"),
        pytest.param(lying_digest, 422, "manifest_invalid", id="a digest of something else"),
        pytest.param(not_a_manifest, 422, "manifest_invalid", id="an object that is no manifest"),
        pytest.param(other_dtype, 422, "manifest_mismatch", id="a plan for another dtype"),
        pytest.param(lambda api: api("GET", "/v1/instances/x"), 404, "not_found", id="an unknown instance"),
        pytest.param(lambda api: api("GET", "/v1/transfers/x"), 404, "not_found", id="an unknown transfer"),
        pytest.param(lambda api: api("DELETE", "/v1/transfers/x"), 404, "not_found", id="an unknown cancel"),
        pytest.param(lambda api: api("GET", "/v1/transfers/x/events"), 404, "not_found", id="unknown events"),
        pytest.param(lambda api: api("GET", "/v1/manifests/x"), 404, "not_found", id="an unknown manifest"),
        pytest.param(lambda api: api("POST", "/v1/plans", body={"model": "m"}), 404, "not_found", id="no source"),
    ],
)
def test_errors_have_the_codes_that_are_documented(
    api: Api, provoke: Callable[[Api], httpx.Response], status: int, expected: str
) -> None:
    response = provoke(api)
    assert (response.status_code, code(response)) == (status, expected)


# -- routes ----------------------------------------------------------------------------------------------------


def test_register_answers_with_lease_and_keys(make_api: MakeApi, clock: Clock) -> None:
    api = make_api(token="sesame", read_token="look", lease_s=7)
    answer = api("PUT", "/v1/instances/s1", body=registration(), headers={"Authorization": "Bearer sesame"}).json()
    assert (answer["instance_id"], answer["epoch"], answer["lease_s"]) == ("s1", 1, 7)
    assert answer["expires_at"] == "2027-01-15T08:00:07Z"
    assert len(base64.urlsafe_b64decode(answer["ranks"][0]["ticket_key"] + "=")) == 32
    assert answer["ranks"][0]["published"] is None
    assert len(answer["read_token_sha256"]) == 2
    assert answer["service_version"]


def test_register_answers_for_the_callers_ranks_only(api: Api) -> None:
    tp2 = {"tp": 2}
    api.register("s1", topology=tp2)
    answer = api.register("s1", topology=tp2, ranks=[{"rank": 1, "generation": 3, "url": None}]).json()
    assert [(rank["rank"], rank["generation"]) for rank in answer["ranks"]] == [(1, 3)]


def test_renewal_says_what_is_published(api: Api) -> None:
    register_source(api)
    published = api.register("s1").json()["ranks"][0]["published"]
    assert published == {"weight_version": 0, "manifest_digest": make_manifest().digest}
    assert api.register("s1", epoch=2).json()["ranks"][0]["published"] is None


def test_b32_loopback_url_from_elsewhere_is_refused(make_api: MakeApi) -> None:
    response = make_api(peer="10.0.0.9").register("s1")
    assert (response.status_code, code(response)) == (422, "request_invalid")
    assert "leads to loopback" in response.json()["detail"]
    assert make_api(peer="::1").register("s1").status_code == 200


def test_instances_show_no_keys(api: Api, clock: Clock) -> None:
    register_source(api)
    listed = api("GET", "/v1/instances")
    assert "key" not in listed.text
    assert listed.json() == [api("GET", "/v1/instances/s1").json()]
    assert (listed.json()[0]["state"], listed.json()[0]["reason"]) == ("ready", None)
    clock.pass_(15)
    assert api("GET", "/v1/instances/s1").json()["state"] == "expired"


def test_leave_needs_the_epoch(api: Api) -> None:
    register_source(api)
    assert code(api("DELETE", "/v1/instances/s1")) == "request_invalid"
    assert code(api("DELETE", "/v1/instances/s1?epoch=2")) == "conflict"
    assert code(api("DELETE", "/v1/instances/s1?epoch=1&rank=0&generation=9")) == "conflict"
    assert api("DELETE", "/v1/instances/s1?epoch=1&rank=0&generation=1").status_code == 204
    assert code(api("DELETE", "/v1/instances/s1?epoch=1")) == "not_found"


def test_publish_takes_gzip_and_says_whether_it_was_new(api: Api) -> None:
    manifest = make_manifest()
    api.register("s1")
    body = {"epoch": 1, "generation": 1, "weight_version": 0, "digest": manifest.digest}
    path = "/v1/instances/s1/ranks/0/manifest"
    missing = api("PUT", path, body=body)
    assert (missing.status_code, code(missing), missing.json()["kind"]) == (404, "not_found", "manifest")
    content = gzip.compress(json.dumps(body | {"manifest": json.loads(manifest.text)}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert api("PUT", path, content=content, headers=headers).json() == {"digest": manifest.digest, "stored": True}
    assert api("PUT", path, body=body).json() == {"digest": manifest.digest, "stored": False}


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("br;q=1.0, gzip;q=0.5", "gzip"),
        ("*", "gzip"),
        ("identity", None),
        ("gzip;q=0", None),
        ("gzip; q=0.0", None),
        ("", None),
    ],
)
def test_manifest_comes_back_byte_for_byte(api: Api, accept: str, encoding: str | None) -> None:
    manifest = make_manifest(names=("a/b", "weights ü"))
    api.register("s1")
    api.publish(manifest).raise_for_status()
    response = api("GET", f"/v1/manifests/{manifest.digest}", headers={"Accept-Encoding": accept})
    assert response.content == manifest.text
    assert response.headers.get("content-encoding") == encoding
    assert response.headers["content-type"] == "application/json"
    assert response.headers["vary"] == "Accept-Encoding"
    again = {"If-None-Match": response.headers["etag"]}
    unchanged = api("GET", f"/v1/manifests/{manifest.digest}", headers=again)
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_models_and_sources_say_who_can_serve(api: Api, clock: Clock) -> None:
    register_source(api, "s1")
    api.register("s2")
    assert api("GET", "/v1/models").json() == [{"model": MODEL, "instances": 2, "ready": 1}]
    sources = api("GET", "/v1/models/org%2Fname/sources").json()
    assert [(source["instance_id"], source["state"], source["reason"]) for source in sources] == [
        ("s1", "ready", None),
        ("s2", "incomplete", "rank 0 has published nothing"),
    ]
    assert sources[0]["ranks"] == [
        {
            "rank": 0,
            "url": "http://127.0.0.1:7000",
            "generation": 1,
            "manifest_digest": make_manifest().digest,
            "bytes": 32,
        }
    ]
    assert api("GET", "/v1/models/org%2Fname/sources?revision=r1").json() == sources
    assert api("GET", "/v1/models/org%2Fname/sources?revision=r2").json() == []
    assert api("GET", "/v1/models/unknown/sources").json() == []


def test_grant_carries_tickets_that_open_the_source(api: Api, clock: Clock) -> None:
    register_source(api)
    key = base64.urlsafe_b64decode(api.register("s1").json()["ranks"][0]["ticket_key"] + "=")
    response = api.grant(deadline_s=100)
    grant = response.json()
    assert (response.status_code, response.headers["location"]) == (201, f"/v1/transfers/{grant['transfer_id']}")
    assert (grant["state"], grant["revision"], grant["weight_version"]) == ("planned", "r1", 0)
    assert (grant["created_at"], grant["deadline_at"]) == ("2027-01-15T08:00:00Z", "2027-01-15T08:01:40Z")
    (source,) = grant["ranks"][0]["sources"]
    assert (source["url"], source["manifest_digest"]) == ("http://127.0.0.1:7000", make_manifest().digest)
    ticket = read_ticket(key, source["ticket"], now=clock())
    assert (ticket.transfer_id, ticket.target_instance) == (grant["transfer_id"], "t1")
    sources = api("GET", "/v1/models/org%2Fname/sources").json()
    assert [(s["instance_id"], s["active_readers"]) for s in sources] == [("s1", 1), ("t1", 0)]
    assert source["ticket"] not in api("GET", f"/v1/transfers/{grant['transfer_id']}").text


def test_grant_is_repeated_for_the_same_key(api: Api) -> None:
    register_source(api)
    api.grant()
    key = {"Idempotency-Key": "k"}
    first, again = (api("POST", "/v1/transfers", body=transfer_request(), headers=key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.headers["location"] == again.headers["location"]


def test_grant_across_topologies_shows_each_source_rank_once(api: Api) -> None:
    sizes = {"tp": 2}
    claims = [{"rank": rank, "generation": 1, "url": "http://127.0.0.1:7000"} for rank in (0, 1)]
    api.register("s1", topology=sizes, ranks=claims).raise_for_status()
    for rank in (0, 1):
        api.publish(make_manifest(topology=Topology(tp=2), rank=rank)).raise_for_status()
    targets = [{"rank": rank, "generation": 1} for rank in (0, 1, 2)]
    api.register("t1", topology={"tp": 3}, ranks=[{**rank, "url": None} for rank in targets]).raise_for_status()
    target = {"instance_id": "t1", "epoch": 1, "ranks": targets}
    grant = api("POST", "/v1/transfers", body=transfer_request(target=target, topology={"tp": 3})).json()
    assert [[source["rank"] for source in rank["sources"]] for rank in grant["ranks"]] == [[0, 1]] * 3
    assert len({source["ticket"] for rank in grant["ranks"] for source in rank["sources"]}) == 6
    path = f"/v1/transfers/{grant['transfer_id']}"
    for rank, nbytes in ((0, 8), (2, 16)):
        report = progress(peer=nbytes, sources=[{"instance_id": "s1", "rank": 1, "bytes": nbytes}])
        api("POST", f"{path}/ranks/{rank}/progress", body=report).raise_for_status()
    transfer = api("GET", path).json()
    assert [rank["bytes_peer"] for rank in transfer["ranks"]] == [8, 0, 16]
    assert [(source["rank"], source["bytes"], source["bytes_per_target_rank"]) for source in transfer["sources"]] == [
        (0, 0, {}),
        (1, 24, {"0": 8, "2": 16}),
    ]


@pytest.mark.parametrize("deadline_s", [0, 0.5, 86401, -1])
def test_grant_bounds_the_deadline(api: Api, deadline_s: float) -> None:
    assert code(api.grant(deadline_s=deadline_s)) == "request_invalid"


def test_progress_shows_in_the_transfer(api: Api, clock: Clock) -> None:
    register_source(api)
    transfer_id = api.grant().json()["transfer_id"]
    path = f"/v1/transfers/{transfer_id}"
    clock.pass_(4)
    sources = [{"instance_id": "s1", "rank": 0, "bytes": 8}]
    told = api("POST", f"{path}/ranks/0/progress", body=progress(peer=8, disk=8, sources=sources))
    assert told.json() == {"state": "receiving", "error": None}
    transfer = api("GET", path).json()
    assert (transfer["bytes_total"], transfer["bytes_peer"], transfer["bytes_disk"]) == (32, 8, 8)
    assert (transfer["seconds"], transfer["rate_bytes_per_s"], transfer["eta_s"]) == (4, 4, 4)
    assert transfer["ranks"][0]["rate_bytes_per_s"] == 4
    assert [(source["instance_id"], source["bytes"]) for source in transfer["sources"]] == [("s1", 8)]
    assert transfer["sources"][0]["bytes_per_target_rank"] == {"0": 8}
    assert (transfer["target_instance_id"], transfer["ended_at"], transfer["error"]) == ("t1", None, None)
    assert api("GET", "/v1/transfers?limit=1").json() == [transfer]


def test_cancel_is_told_to_the_target(api: Api) -> None:
    transfer_id = api.grant().json()["transfer_id"]
    cancelled = api("DELETE", f"/v1/transfers/{transfer_id}")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    told = api("POST", f"/v1/transfers/{transfer_id}/ranks/0/progress", body=progress()).json()
    assert (told["state"], told["error"]["code"]) == ("cancelled", "cancelled")
    assert api("DELETE", f"/v1/transfers/{transfer_id}").json()["state"] == "cancelled"


def test_error_of_a_rank_shows_in_the_transfer(api: Api) -> None:
    transfer_id = api.grant().json()["transfer_id"]
    error = {"code": "coverage_incomplete", "detail": "tensor 'a'"}
    told = api("POST", f"/v1/transfers/{transfer_id}/ranks/0/progress", body=progress("failed", error=error)).json()
    assert told == {"state": "failed", "error": error}
    transfer = api("GET", f"/v1/transfers/{transfer_id}").json()
    assert (transfer["error"], transfer["ranks"][0]["error"]) == (error, error)


def test_plan_without_a_target_is_that_of_the_source(api: Api) -> None:
    register_source(api)
    plan = api("POST", "/v1/plans", body={"model": MODEL}).json()
    assert plan["ways"] == {"identical": 2, "reshard": 0, "disk": 0, "constant": 0}
    assert (plan["bytes"], plan["copies"], plan["segments"]) == (32, 1, 1)
    assert (plan["bytes_per_source_rank"], plan["bytes_per_target_rank"]) == ({"0": 32}, {"0": 32})
    assert [(tensor["name"], tensor["way"], tensor["sources"]) for tensor in plan["tensors"]] == [
        ("a", "identical", [{"instance_id": "s1", "rank": 0}]),
        ("b", "identical", [{"instance_id": "s1", "rank": 0}]),
    ]
    [source] = plan["sources"]
    assert (source["instance_id"], source["rank"], source["bytes"]) == ("s1", 0, 32)
    assert (plan["uncovered"], plan["opaque"], plan["error"]) == ([], [], None)
    assert api("GET", "/v1/transfers").json() == [], "nothing was granted"


def test_plan_names_what_has_to_come_from_disk(api: Api) -> None:
    api.register("s1")
    api.publish(make_manifest(names=("a",))).raise_for_status()
    target = json.loads(make_manifest(names=("a", "b")).text)
    plan = api("POST", "/v1/plans", body={"model": MODEL, "manifest": [target]}).json()
    tensors = [(tensor["name"], tensor["way"], tensor["bytes"], tensor["sources"]) for tensor in plan["tensors"]]
    assert tensors == [("a", "identical", 16, [{"instance_id": "s1", "rank": 0}]), ("b", "disk", 16, [])]
    assert plan["tensors"][1]["reason"]
    assert (plan["bytes_per_source_rank"], plan["bytes_per_target_rank"]) == ({"0": 16}, {"0": 32})


def test_plan_for_another_topology_needs_its_manifests(api: Api) -> None:
    register_source(api)
    refused = api("POST", "/v1/plans", body={"model": MODEL, "topology": {"tp": 2}})
    assert (refused.status_code, code(refused), refused.json()["instance_id"]) == (422, "request_invalid", "s1")
    targets = [json.loads(make_manifest(topology=Topology(tp=2), rank=rank).text) for rank in (0, 1)]
    plan = api("POST", "/v1/plans", body={"model": MODEL, "topology": {"tp": 2}, "manifest": targets}).json()
    assert [source["instance_id"] for source in plan["sources"]] == ["s1"]
    assert plan["bytes_per_target_rank"] == {"0": 32, "1": 32}
    assert {uncovered["rank"] for uncovered in plan["uncovered"]} <= {0, 1}


def test_openapi_describes_errors_and_large_bodies(api: Api) -> None:
    document = api("GET", "/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            assert operation["tags"]
            if path.startswith("/v1/"):
                assert "Problem" in json.dumps(operation["responses"]["default"])
    assert "requestBody" in document["paths"]["/v1/plans"]["post"]
    assert api("GET", "/docs").status_code == 404, "the page would fetch scripts from elsewhere"
