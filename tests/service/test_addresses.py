"""URLs of sources: one form, and none that leads somewhere else for others (B32)."""

from __future__ import annotations

import pytest

from weightwire.service.addresses import check_dialable, check_endpoint
from weightwire.transfer.errors import RequestError


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:7000",
        "https://node-7.example.org:443",
        "http://host:1",
        "http://[fe80::1]:29500",
        "http://[::1]:29500/",
        "HTTP://10.0.0.1:7000",
    ],
)
def test_check_endpoint_takes_the_right_form(url: str) -> None:
    check_endpoint(url)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("fe80::1", id="an IPv6 address alone"),
        pytest.param("::1", id="IPv6 loopback alone"),
        pytest.param("http://fe80::1:29500", id="an IPv6 address and a port in one"),
        pytest.param("http://fe80::1", id="an IPv6 address in a URL"),
        pytest.param("http://[fe80::1:29500", id="a bracket that does not close"),
        pytest.param("10.0.0.1", id="an address alone"),
        pytest.param("10.0.0.1:7000", id="an address and a port"),
        pytest.param("host", id="a name alone"),
        pytest.param("tcp://10.0.0.1:7000", id="another scheme"),
        pytest.param("file:///etc/passwd", id="a file"),
        pytest.param("http://10.0.0.1:0", id="port zero"),
        pytest.param("http://10.0.0.1:70000", id="a port out of range"),
        pytest.param("http://:7000", id="no host"),
        pytest.param("http://10.0.0.1:7000/x", id="a path"),
        pytest.param("http://10.0.0.1:7000?x=1", id="a query"),
        pytest.param("http://10.0.0.1:7000#x", id="a fragment"),
        pytest.param("http://0.0.0.0:7000", id="the address of all interfaces"),
        pytest.param("http://[::]:7000", id="the IPv6 address of all interfaces"),
        pytest.param("http://h ost:7000", id="a blank in the host"),
        pytest.param("http://host\n:7000", id="a line break in the host"),
        pytest.param("", id="nothing"),
    ],
)
def test_b32_check_endpoint_refuses_other_forms_and_says_the_right_one(url: str) -> None:
    with pytest.raises(RequestError, match=r"expected http\(s\)://HOST:PORT, .* IPv6 address in brackets"):
        check_endpoint(url)


def test_check_endpoint_does_not_repeat_a_password() -> None:
    with pytest.raises(RequestError, match="holds credentials") as caught:
        check_endpoint("http://user:sesame@10.0.0.1:7000")
    assert "sesame" not in f"{caught.value} {caught.value.facts}"


@pytest.mark.parametrize(
    ("url", "peer", "addresses"),
    [
        pytest.param("http://127.0.0.1:1", "10.0.0.9", [], id="loopback from elsewhere"),
        pytest.param("http://[::1]:1", "10.0.0.9", [], id="IPv6 loopback from elsewhere"),
        pytest.param("http://localhost:1", "2001:db8::9", [], id="localhost from elsewhere"),
        pytest.param("http://[::ffff:127.0.0.1]:1", "10.0.0.9", [], id="mapped loopback from elsewhere"),
        pytest.param("http://host:1", "10.0.0.9", ["127.0.1.1"], id="a name that resolves to loopback"),
        pytest.param("http://host:1", "10.0.0.9", ["::1", "127.0.0.1"], id="a name with loopback addresses only"),
    ],
)
def test_b32_check_dialable_refuses_loopback_from_elsewhere(url: str, peer: str, addresses: list[str]) -> None:
    with pytest.raises(RequestError, match=f"leads to loopback .* registered from {peer}"):
        check_dialable(check_endpoint(url), peer_host=peer, resolve=lambda host: addresses)


@pytest.mark.parametrize(
    ("url", "peer", "addresses"),
    [
        pytest.param("http://127.0.0.1:1", "127.0.0.1", [], id="loopback from loopback"),
        pytest.param("http://127.0.0.1:1", "::ffff:127.0.0.1", [], id="loopback from mapped loopback"),
        pytest.param("http://127.0.0.1:1", None, [], id="loopback from an unknown peer"),
        pytest.param("http://host:1", "10.0.0.9", ["fd00::7"], id="a name with an IPv6 address only"),
        pytest.param("http://host:1", "10.0.0.9", ["127.0.1.1", "10.0.0.9"], id="a name with another address too"),
        pytest.param("http://host:1", "10.0.0.9", [], id="a name that is not known here"),
    ],
)
def test_check_dialable_takes_what_others_can_reach(url: str, peer: str | None, addresses: list[str]) -> None:
    check_dialable(check_endpoint(url), peer_host=peer, resolve=lambda host: addresses)


def test_check_dialable_looks_up_names_only() -> None:
    def resolve(host: str) -> list[str]:
        raise AssertionError(f"looked up {host}")

    check_dialable(check_endpoint("http://10.0.0.1:1"), peer_host="10.0.0.9", resolve=resolve)
    check_dialable(check_endpoint("http://[fe80::1]:1"), peer_host="10.0.0.9", resolve=resolve)
