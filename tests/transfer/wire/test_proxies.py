"""Which proxy leads where: by rule alone, without a socket."""

from __future__ import annotations

import pytest

from weightwire.transfer.address import Address
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.wire.proxies import Proxies, Proxy, travels_in_clear

PROXY = "http://proxy:3128"


def leads(rule: str, url: str, **variables: str) -> str | None:
    proxy = Proxies.parse(rule, variables).leading_to(Address.parse(url))
    return None if proxy is None else str(proxy.address)


def test_no_proxy_is_asked_by_default_whatever_the_environment_says() -> None:
    assert leads("none", "http://h:1", http_proxy=PROXY, ALL_PROXY=PROXY) is None
    assert Proxies().leading_to(Address.parse("https://h")) is None


def test_proxy_that_is_named_leads_everywhere_whatever_the_environment_says() -> None:
    for url in ("http://h:1", "https://h:1", "http://127.0.0.1:1"):
        assert leads("http://other:1", url, http_proxy=PROXY, no_proxy="*") == "http://other:1"


@pytest.mark.parametrize(
    ("variables", "http", "https"),
    [
        pytest.param({}, None, None, id="nothing"),
        pytest.param({"HTTP_PROXY": PROXY}, PROXY, None, id="of http"),
        pytest.param({"https_proxy": PROXY}, None, PROXY, id="of https"),
        pytest.param({"ALL_PROXY": PROXY}, PROXY, PROXY, id="of all"),
        pytest.param({"http_proxy": "http://low:1", "HTTP_PROXY": PROXY}, "http://low:1", None, id="lower case wins"),
        pytest.param({"http_proxy": "", "HTTP_PROXY": PROXY}, None, None, id="set to nothing in lower case"),
        pytest.param({"http_proxy": "proxy:3128"}, PROXY, None, id="without a scheme"),
    ],
)
def test_proxies_of_the_environment(variables: dict[str, str], http: str | None, https: str | None) -> None:
    assert leads("env", "http://h:1", **variables) == http
    assert leads("env", "https://h:1", **variables) == https


@pytest.mark.parametrize(
    ("entries", "host", "direct"),
    [
        pytest.param("*", "h", True, id="everything"),
        pytest.param("example.com", "example.com", True, id="a name"),
        pytest.param("example.com", "a.example.com", True, id="below a name"),
        pytest.param(".example.com", "a.example.com", True, id="below a name with a dot"),
        pytest.param("example.com", "badexample.com", False, id="a name that only ends like it"),
        pytest.param("EXAMPLE.com", "example.com", True, id="in capitals"),
        pytest.param("10.0.0.0/8", "10.1.2.3", True, id="in a network"),
        pytest.param("10.0.0.0/8", "11.1.2.3", False, id="outside a network"),
        pytest.param("10.0.0.0/8", "name", False, id="a name and a network"),
        pytest.param("10.1.2.3", "10.1.2.3", True, id="an address"),
        pytest.param("10.1.2.3:7", "10.1.2.3", True, id="an address with this port"),
        pytest.param("10.1.2.3:8", "10.1.2.3", False, id="an address with another port"),
        pytest.param("fd00::/8", "[fd00::1]", True, id="in a network of IPv6"),
        pytest.param("[fd00::1]:7", "[fd00::1]", True, id="an IPv6 address with this port"),
        pytest.param("fd00::1", "[fd00::1]", True, id="an IPv6 address"),
        pytest.param("fd00::/8", "10.1.2.3", False, id="another family"),
        pytest.param(" a , b,,h ", "h", True, id="one of several"),
        pytest.param("", "h", False, id="none"),
    ],
)
def test_no_proxy_says_where_none_is_asked(entries: str, host: str, direct: bool) -> None:
    found = leads("env", f"http://{host}:7", http_proxy=PROXY, no_proxy=entries)
    assert found == (None if direct else PROXY)


def test_proxy_keeps_its_password_to_itself() -> None:
    proxy = Proxy.parse("http://me:p%40ss@proxy:1")
    assert proxy.user == ("me", "p@ss")
    assert proxy.headers == {"Proxy-Authorization": "Basic bWU6cEBzcw=="}
    assert "p@ss" not in repr(proxy) + str(proxy)


@pytest.mark.parametrize(
    "url", ["https://proxy:1", "socks5://proxy:1", "http://me:s3cret@proxy:x", "http://", "http://p/x"]
)
def test_proxy_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Proxies.parse(url, {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "proxy", "in_clear"),
    [
        pytest.param("http://10.0.0.1:1", None, False, id="without a proxy, as its owner decided"),
        pytest.param("https://10.0.0.1:1", PROXY, False, id="encrypted all the way"),
        pytest.param("http://10.0.0.1:1", PROXY, True, id="to another machine"),
        pytest.param("http://127.0.0.1:1", PROXY, True, id="to this machine by way of another one"),
        pytest.param("http://10.0.0.1:1", "http://127.0.0.1:2", True, id="by way of this machine to another one"),
        pytest.param("http://127.0.0.1:1", "http://127.0.0.1:2", False, id="within this machine"),
    ],
)
def test_what_can_be_read_on_the_way(url: str, proxy: str | None, in_clear: bool) -> None:
    assert travels_in_clear(Address.parse(url), None if proxy is None else Proxy.parse(proxy)) is in_clear
