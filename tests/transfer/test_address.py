"""Addresses of HTTP servers: what is taken, what is refused, and what is never shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.address import Address, is_loopback
from weightwire.transfer.errors import RequestError

HOSTS = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str) | st.from_regex(r"\A[a-z][a-z0-9-]{0,9}\Z")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        pytest.param("http://10.0.0.1:80", ("http", "10.0.0.1", 80), id="IPv4"),
        pytest.param("http://host", ("http", "host", 80), id="name with the default port"),
        pytest.param("https://host/", ("https", "host", 443), id="default port of https, and a slash"),
        pytest.param("HTTP://Host:8700", ("http", "host", 8700), id="capitals"),
        pytest.param("http://[fe80::1]:29500", ("http", "fe80::1", 29500), id="IPv6 in brackets"),
        pytest.param("http://[::1]", ("http", "::1", 80), id="IPv6 without a port"),
    ],
)
def test_b32_address_is_parsed(url: str, expected: tuple[str, str, int]) -> None:
    address = Address.parse(url)
    assert (address.scheme, address.host, address.port) == expected
    assert Address.parse(str(address)) == address


@given(st.sampled_from(["http", "https"]), HOSTS, st.integers(1, 65535))
def test_b32_address_is_rendered_so_that_it_can_be_parsed(scheme: str, host: str, port: int) -> None:
    address = Address(scheme=scheme, host=host, port=port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("http://fe80::1", id="IPv6 without brackets"),
        pytest.param("http://::1", id="IPv6 loopback without brackets"),
        pytest.param("http://fe80::1:29500", id="IPv6 without brackets, with a port"),
        pytest.param("http://[::1", id="half a bracket"),
        pytest.param("http://[]:1", id="empty brackets"),
        pytest.param("http://[fe80::1%25eth0]:1", id="IPv6 with a zone"),
        pytest.param("http://[fe80::1%eth0]:1", id="IPv6 with a zone that is not escaped"),
        pytest.param("10.0.0.1", id="no scheme"),
        pytest.param("host", id="only a name"),
        pytest.param("host:80", id="a name and a port"),
        pytest.param("tcp://host:80", id="another scheme"),
        pytest.param("file:///etc/passwd", id="a file"),
        pytest.param("http://", id="no host"),
        pytest.param("http://:80", id="only a port"),
        pytest.param("http://host:0", id="port 0"),
        pytest.param("http://host:65536", id="port too high"),
        pytest.param("http://host:-1", id="negative port"),
        pytest.param("http://host:8 0", id="a blank in the port"),
        pytest.param("http://ho st", id="a blank in the name"),
        pytest.param("http://host\n", id="a line end"),
        pytest.param("\thttp://host", id="a tab in front"),
        pytest.param("http://host/v1", id="a path"),
        pytest.param("http://host?x", id="a query"),
        pytest.param("http://host/?x", id="a query behind a slash"),
        pytest.param("http://host#x", id="a fragment"),
        pytest.param("http://a@host", id="a user"),
        pytest.param("http://a:b@host", id="a user and a password"),
        pytest.param("http://@host", id="an empty user"),
        pytest.param("", id="nothing"),
    ],
)
def test_b32_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="address"):
        Address.parse(url)


def test_b32_refusal_of_a_bare_ipv6_literal_says_how_it_is_written() -> None:
    with pytest.raises(RequestError, match="brackets"):
        Address.parse("http://fe80::1")


@given(st.text(max_size=30) | st.from_regex(r"\Ahttps?://[^\x00]{0,20}\Z"))
@example("http://[v1.x]")
@example("http://\u2100")
@example("http://[::1]x:80")
def test_any_text_is_an_address_that_round_trips_or_is_refused(url: str) -> None:
    try:
        address = Address.parse(url)
    except RequestError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("ftp://user:secret@host", id="of a wrong scheme"),
        pytest.param("http://user:secret@host", id="of a right scheme"),
        pytest.param("http://user:secret@host:99999", id="with a bad port"),
        pytest.param("http://user:sec/ret@host", id="with a slash in the password"),
        pytest.param("http://user:secret@[::1", id="with half a bracket"),
        pytest.param("http://host/v1?token=secret", id="in a query"),
        pytest.param("http://host#secret", id="in a fragment"),
        pytest.param("user:secret@host", id="without a scheme"),
        pytest.param("http://user:secret@host/ path", id="before a blank"),
        pytest.param("http://secret@", id="without a host"),
    ],
)
def test_b44_credentials_are_never_quoted(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        Address.parse(url)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.9.10", "localhost", "LocalHost", "localhost.", "::1", "::ffff:127.0.0.1", "::1%lo"],
)
def test_b32_host_is_loopback(host: str) -> None:
    assert is_loopback(host)
    assert Address(scheme="http", host=host, port=1).is_loopback


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "fe80::1", "::ffff:10.0.0.1", "host", "localhost.example", "127.1", ""],
)
def test_b32_host_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)
