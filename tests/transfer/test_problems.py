"""Errors as problem documents, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer import errors
from weightwire.transfer.errors import (
    CancelledError,
    DeadlineError,
    FencedError,
    ForbiddenError,
    ManifestMismatchError,
    NamesError,
    NotFoundError,
    SourceBusyError,
    SourceRefusedError,
    TicketError,
    TooLargeError,
    TransferError,
)
from weightwire.transfer.problems import (
    MEDIA_TYPE,
    MOST_LISTED,
    error_of,
    listed_facts,
    problem_of,
    problem_text,
    refusal_of,
    status_for,
)


def tree(root: type[TransferError] = TransferError) -> Iterator[type[TransferError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


KINDS = [kind for kind in dict.fromkeys(tree()) if kind.__module__ == errors.__name__]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
FACTS: dict[str, errors.Fact] = {
    "missing": ["a", "b/ü"],
    "conflicts": [{"tensor": "a", "field": "dtype", "source": "x", "target": "y"}],
    "limit_bytes": 2**62,
    "ratio": 0.5,
    "path": "\ud800",
    "nothing": None,
}


@EACH
def test_error_comes_back_with_its_class_words_and_facts(kind: type[TransferError]) -> None:
    error = kind("tensor 'a': is, was expected", **FACTS)
    again = error_of(json.loads(problem_text(error)))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.facts == FACTS
    assert (again.code, again.retryable) == (error.code, error.retryable)


@pytest.mark.parametrize("length", [MOST_LISTED, MOST_LISTED + 1, 100_000])
def test_long_lists_are_told_in_short_with_their_length(length: int) -> None:
    error = NamesError("names", unexpected=[f"n{number}" for number in range(length)], rank=3)
    problem = problem_of(error)
    assert problem["unexpected"] == [f"n{number}" for number in range(min(length, MOST_LISTED))]
    assert problem.get("unexpected_total") == (length if length > MOST_LISTED else None)
    assert problem["rank"] == 3
    kept = error.facts["unexpected"]
    assert isinstance(kept, list)
    assert len(kept) == length
    assert error_of(problem).facts == listed_facts(error)


@EACH
def test_error_has_a_code_of_its_own_in_snake_case(kind: type[TransferError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    assert [other for other in KINDS if other.code == kind.code] == [kind]


@EACH
def test_error_is_drawn_in_the_tree_at_the_top_of_its_file(kind: type[TransferError]) -> None:
    assert errors.__doc__ is not None
    assert re.search(rf"\b{kind.__name__}\b", errors.__doc__)


@EACH
def test_status_is_one_of_http_and_stands_in_the_document(kind: type[TransferError]) -> None:
    problem = problem_of(kind("x"))
    status = status_for(kind("x"))
    assert 400 <= status < 600
    assert problem["status"] == status
    assert problem["title"] == HTTPStatus(status).phrase
    assert problem["type"] == f"urn:weightwire:error:{kind.code}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(ForbiddenError("x"), 403, id="a token that is not enough"),
        pytest.param(TicketError("x"), 403, id="a ticket that does not open"),
        pytest.param(errors.AccessError("x"), 401, id="no token"),
        pytest.param(errors.RequestError("x"), 422, id="a wrong request"),
        pytest.param(TooLargeError("x"), 413, id="a body over the limit"),
        pytest.param(errors.VersionSkewError("x"), 426, id="another major version"),
        pytest.param(NotFoundError("x"), 404, id="nothing of that name"),
        pytest.param(FencedError("x"), 409, id="another generation"),
        pytest.param(ManifestMismatchError("x"), 422, id="another manifest"),
        pytest.param(SourceBusyError("x"), 503, id="too many readers"),
        pytest.param(errors.SourceStalledError("x"), 502, id="a source that stalls"),
        pytest.param(errors.AdmissionError("x"), 507, id="too little memory"),
        pytest.param(TransferError("x"), 500, id="anything"),
    ],
)
def test_status_of(error: TransferError, status: int) -> None:
    assert status_for(error) == status


def test_status_that_a_caller_insists_on_is_the_one_in_the_document() -> None:
    problem = json.loads(problem_text(errors.RequestError("x"), status=416))
    assert (problem["status"], problem["title"]) == (416, HTTPStatus(416).phrase)
    assert problem["code"] == "request_invalid"


def test_facts_never_replace_a_member_of_the_standard() -> None:
    error = TransferError("detail", status=200, code="ok", type="x", title="x", kept=1)
    problem = problem_of(error)
    assert (problem["status"], problem["code"], problem["kept"]) == (500, "transfer_failed", 1)
    assert error_of(problem).facts == {"kept": 1}


def test_code_of_a_later_version_is_a_plain_error_that_keeps_its_words() -> None:
    error = error_of({"code": "something_new", "detail": "words", "more": 1})
    assert type(error) is TransferError
    assert str(error) == "words"
    assert error.facts == {"more": 1}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([k.code for k in KINDS]),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=2), children, max_size=2),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from(["code", "detail", "title", "status", "self", "x"]), JSON))
def test_any_object_is_some_error(problem: dict[str, object]) -> None:
    assert isinstance(error_of(problem), TransferError)


# Answers that are not ours

PAGE = b"<html><title>Sign in</title>s3cret</html>"
URL = "http://127.0.0.1:1/v1/read"


def refusal(body: bytes, *, content_type: str = MEDIA_TYPE, status: int = 403) -> TransferError:
    return refusal_of(status=status, body=body, content_type=content_type, url=URL)


@EACH
def test_refusal_that_is_a_problem_document_keeps_its_class(kind: type[TransferError]) -> None:
    found = refusal(problem_text(kind("words", kept=1)), content_type="Application/Problem+JSON; charset=utf-8")
    assert type(found) is kind
    assert str(found) == "words"
    assert found.facts == {"kept": 1}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        pytest.param(PAGE, "text/html", id="a page"),
        pytest.param(PAGE, "", id="a page without a type"),
        pytest.param(PAGE, MEDIA_TYPE, id="a page that claims to be a problem"),
        pytest.param(b"", MEDIA_TYPE, id="nothing"),
        pytest.param(b'"s3cret"', MEDIA_TYPE, id="JSON that is no object"),
        pytest.param(b'{"detail": "s3cret"}', MEDIA_TYPE, id="an object without a code"),
        pytest.param(b'{"detail": "s3cret", "code": "cancelled"}', "application/json", id="JSON of somebody else"),
        pytest.param(b"\xff\xfe", MEDIA_TYPE, id="bytes that are no text"),
        pytest.param(b"[" * 60_000, MEDIA_TYPE, id="JSON without an end"),
        pytest.param(b'{"code":' * 10_000, MEDIA_TYPE, id="objects without an end"),
    ],
)
def test_b44_page_of_somebody_else_is_named_by_status_and_url_and_never_quoted(body: bytes, content_type: str) -> None:
    found = refusal(body, content_type=content_type)
    assert type(found) is SourceRefusedError
    assert str(found).startswith(f"{URL}: answered 403")
    assert "s3cret" not in str(found)
    assert found.facts == {"status": 403, "url": URL}
    assert not found.retryable


def test_local_decisions_have_codes_that_differ_from_those_of_sources() -> None:
    assert not issubclass(CancelledError, errors.SourceError)
    assert not issubclass(DeadlineError, errors.SourceError)
