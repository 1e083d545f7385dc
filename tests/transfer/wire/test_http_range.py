"""One range of bytes, as RFC 9110, section 14, has it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.wire.http_range import ByteRange, UnsatisfiableRangeError, parse_range

N = 10_000


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param("bytes=0-499", (0, 500), id="the first 500 bytes"),
        pytest.param("bytes=500-999", (500, 1000), id="the second 500 bytes"),
        pytest.param("bytes=-500", (9500, N), id="the last 500 bytes"),
        pytest.param("bytes=9500-", (9500, N), id="all but the first 9500"),
        pytest.param("bytes=0-0", (0, 1), id="the first byte"),
        pytest.param("bytes=-1", (9999, N), id="the last byte"),
        pytest.param("bytes=0-", (0, N), id="all of them"),
        pytest.param("bytes=9999-20000", (9999, N), id="an end behind the end"),
        pytest.param("bytes=-20000", (0, N), id="more than there are, from the end"),
        pytest.param(" bytes=1-2 ", (1, 3), id="blanks around it"),
        pytest.param("bytes= 1-2", (1, 3), id="a blank within it"),
        pytest.param("bytes=00-01", (0, 2), id="leading zeros"),
    ],
)
def test_range_is_the_bytes_asked_for(header: str, expected: tuple[int, int]) -> None:
    assert parse_range(header, N) == ByteRange(begin=expected[0], end=expected[1])


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("bytes=0-0,-1", id="several ranges"),
        pytest.param("bytes=500-600,601-999", id="ranges that touch"),
        pytest.param("items=0-5", id="another unit"),
        pytest.param("bytes=5-4", id="last before first"),
        pytest.param("bytes=-", id="no number"),
        pytest.param("bytes= -", id="no number, but a blank"),
        pytest.param("bytes=", id="no range"),
        pytest.param("bytes", id="no equals sign"),
        pytest.param("", id="nothing"),
        pytest.param("bytes=a-b", id="letters"),
        pytest.param("bytes=+1-2", id="a sign"),
        pytest.param("bytes=1.5-2", id="a fraction"),
        pytest.param("bytes=\u0661-\u0662", id="digits of another script"),
        pytest.param("bytes=1-2;", id="something behind it"),
        pytest.param("bytes=" + "9" * 5000 + "-", id="a number of thousands of digits"),
        pytest.param("bytes=-" + "9" * 5000, id="a suffix of thousands of digits"),
    ],
)
def test_header_that_is_no_single_range_is_answered_with_the_whole(header: str) -> None:
    assert parse_range(header, N) is None


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        pytest.param("bytes=10000-", N, id="begins at the end"),
        pytest.param("bytes=10000-10005", N, id="lies behind the end"),
        pytest.param("bytes=-0", N, id="the last no bytes"),
        pytest.param("bytes=0-0", 0, id="the first byte of nothing"),
        pytest.param("bytes=0-", 0, id="all of nothing"),
        pytest.param("bytes=-0", 0, id="the last no bytes of nothing"),
    ],
)
def test_range_without_a_byte_cannot_be_satisfied(header: str, nbytes: int) -> None:
    with pytest.raises(UnsatisfiableRangeError, match=str(nbytes)) as caught:
        parse_range(header, nbytes)
    assert caught.value.code == "range_unsatisfiable"


def test_last_bytes_of_nothing_are_the_whole() -> None:
    """Satisfiable by the letter of the RFC, but no Content-Range could say so."""
    assert parse_range("bytes=-5", 0) is None


@given(st.from_regex(r"\A ?bytes= ?[0-9]{0,22}-[0-9]{0,22} ?\Z") | st.text(max_size=20), st.integers(0, 50))
@example("bytes=1-\n", 5)
@example("bytes=\x0b1-2", 5)
def test_any_header_is_a_range_inside_the_body_or_none(header: str, nbytes: int) -> None:
    try:
        found = parse_range(header, nbytes)
    except UnsatisfiableRangeError:
        return
    assert found is None or 0 <= found.begin < found.end <= nbytes


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_range_takes_what_a_slice_takes(first: int, last: int, nbytes: int) -> None:
    body = bytes(range(nbytes))

    def taken(header: str) -> bytes | None:
        try:
            found = parse_range(header, nbytes)
        except UnsatisfiableRangeError:
            return b""
        return None if found is None else body[found.begin : found.end]

    assert taken(f"bytes={first}-") == body[first:]
    assert taken(f"bytes=-{last}") == (body[-last:] if last else b"")
    assert taken(f"bytes={first}-{last}") == (body[first : last + 1] if first <= last else None)
