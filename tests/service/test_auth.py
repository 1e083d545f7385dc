"""Who may do what, for every route of the application."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from tests.service.conftest import Api, MakeApi
from weightwire.service.auth import Guard
from weightwire.service.settings import Settings
from weightwire.transfer.errors import AccessError, ForbiddenError

OPEN = {"/healthz", "/readyz"}


@pytest.fixture
def guarded(make_api: MakeApi) -> Api:
    return make_api(token="sesame", read_token="look")


def calls(api: Api) -> Iterator[tuple[str, str]]:
    """Every method and path of the application, with something in the place of each parameter."""
    paths = api.app.openapi()["paths"]
    for path, operations in paths.items():
        for method in operations:
            filled = path.replace("{rank}", "0").replace("{", "").replace("}", "")
            yield method.upper(), filled


def status(api: Api, method: str, path: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return api(method, path, headers=headers).status_code


def test_every_route_is_in_the_matrix(guarded: Api) -> None:
    assert {path for _, path in calls(guarded)} >= OPEN | {"/metrics", "/v1/transfers", "/v1/plans"}
    assert len(set(calls(guarded))) == 20


def test_without_a_token_only_probes_are_open(guarded: Api) -> None:
    for method, path in calls(guarded):
        expected = {200} if path in OPEN else {401}
        assert {status(guarded, method, path, None), status(guarded, method, path, "wrong")} == expected, (method, path)


def test_read_token_opens_what_only_reads(guarded: Api) -> None:
    for method, path in calls(guarded):
        found = status(guarded, method, path, "look")
        assert (found in (401, 403)) == (method != "GET"), (method, path, found)
        if method != "GET":
            assert found == 403


def test_admin_token_opens_everything(guarded: Api) -> None:
    for method, path in calls(guarded):
        assert status(guarded, method, path, "sesame") not in (401, 403), (method, path)


def test_paths_without_a_route_are_guarded_too(guarded: Api) -> None:
    assert status(guarded, "GET", "/v1/nothing", None) == 401
    assert status(guarded, "GET", "/openapi.json", None) == 401
    assert status(guarded, "GET", "/v1/nothing", "look") == 404
    assert status(guarded, "GET", "//healthz", None) == 401


def test_a_refusal_says_how_to_come_in_and_repeats_no_token(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        missing = guarded("GET", "/v1/models")
        wrong = guarded("GET", "/v1/models", headers={"Authorization": "Bearer s3cret"})
        forbidden = guarded("POST", "/v1/transfers", headers={"Authorization": "Bearer look"})
    assert missing.headers["www-authenticate"].startswith("Bearer")
    assert [r.json()["code"] for r in (missing, wrong, forbidden)] == ["unauthorized", "unauthorized", "forbidden"]
    seen = caplog.text + missing.text + wrong.text + forbidden.text
    assert not any(secret in seen for secret in ("s3cret", "sesame"))


def test_a_body_is_not_read_for_a_stranger(make_api: MakeApi) -> None:
    small = make_api(token="sesame", max_body_bytes=10)
    assert small("POST", "/v1/transfers", content=b"x" * 100).status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"Bearer", id="no token"),
        pytest.param(b"Bearer ", id="an empty token"),
        pytest.param(b"Basic sesame", id="another scheme"),
        pytest.param(b"sesame", id="no scheme"),
        pytest.param(b"Bearer sesam", id="a part of the token"),
        pytest.param(b"Bearer sesame ", id="a token and a blank"),
        pytest.param(b"Bearer \xff\xfe", id="bytes that are no text"),
    ],
)
def test_guard_refuses_other_headers(header: bytes) -> None:
    guard = Guard(Settings(token=SecretStr("sesame")))
    with pytest.raises(AccessError):
        guard.check(header, method="GET", path="/v1/models")


def test_guard_takes_the_scheme_in_any_case() -> None:
    Guard(Settings(token=SecretStr("sesame"))).check(b"bEARER sesame", method="PUT", path="/v1/models")


def test_guard_without_a_read_token_lets_nobody_read_with_nothing() -> None:
    guard = Guard(Settings(token=SecretStr("sesame")))
    with pytest.raises(AccessError) as caught:
        guard.check(b"Bearer ", method="GET", path="/v1/models")
    assert not isinstance(caught.value, ForbiddenError)


def test_guard_without_tokens_is_open() -> None:
    guard = Guard(Settings())
    guard.check(None, method="PUT", path="/v1/models")
    assert guard.token_digests == []


def test_guard_tells_sources_digests_only() -> None:
    guard = Guard(Settings(token=SecretStr("sesame"), read_token=SecretStr("look")))
    assert [len(digest) for digest in guard.token_digests] == [64, 64]
    assert not any("sesame" in digest or "look" in digest for digest in guard.token_digests)
