"""Which HTTP proxy leads to an address: none, one that was named, or what the environment says. Pure."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from weightwire.transfer.address import Address
from weightwire.transfer.errors import RequestError, SettingsError

_Literal = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """An HTTP proxy, spoken to in the clear; what goes to https beyond it is encrypted all the way.

    Attributes:
        user: Name and password, if it wants them.
    """

    address: Address
    user: tuple[str, str] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"proxy {self.address}"

    @property
    def headers(self) -> dict[str, str]:
        """What it is told beside the request."""
        if self.user is None:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(":".join(self.user).encode()).decode()}

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """Parse `http://[USER:PASSWORD@]HOST:PORT`; the scheme may be left out.

        Raises:
            SettingsError: If it is something else. Credentials are not repeated.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            address = Address.parse(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        except (RequestError, ValueError) as error:
            raise SettingsError(f"proxy: {error}") from error
        if address.scheme != "http":
            raise SettingsError(f"proxy {address}: expected http, a proxy that is itself on https is not supported")
        user = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
        return cls(address=address, user=user)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """A rule for all connections of a process; by default there is no proxy, whatever the environment says.

    Attributes:
        http: For plain http.
        https: For https.
        direct: Where none is asked, as in NO_PROXY: `*`, names (with all names below them), addresses, networks such
            as 10.0.0.0/8, each with a port if only that one is meant.
    """

    http: Proxy | None = None
    https: Proxy | None = None
    direct: tuple[str, ...] = ()

    @classmethod
    def parse(cls, rule: str, variables: Mapping[str, str]) -> Proxies:
        """Parse `none`, `env`, or a proxy's URL.

        Args:
            variables: As `of_variables` takes them; looked at for `env` alone.

        Raises:
            SettingsError: If it is none of these, or the environment names what is no proxy.
        """
        if rule == "none":
            return cls()
        if rule == "env":
            return cls.of_variables(variables)
        proxy = Proxy.parse(rule)
        return cls(http=proxy, https=proxy)

    @classmethod
    def of_variables(cls, variables: Mapping[str, str]) -> Proxies:
        """From `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in lower or upper case; lower case wins.

        Raises:
            SettingsError: If one of them names what is no proxy.
        """

        def value(name: str) -> str:
            return variables.get(name, variables.get(name.upper(), "")).strip()

        found = {name: value(f"{name}_proxy") or value("all_proxy") for name in ("http", "https")}
        proxies = {name: Proxy.parse(url) if url else None for name, url in found.items()}
        direct = tuple(entry.strip().lower() for entry in value("no_proxy").split(",") if entry.strip())
        return cls(http=proxies["http"], https=proxies["https"], direct=direct)

    def leading_to(self, address: Address) -> Proxy | None:
        """The proxy to ask; None to go there directly."""
        proxy = self.https if address.scheme == "https" else self.http
        return None if proxy is None or any(_is_within(address, entry) for entry in self.direct) else proxy


def travels_in_clear(address: Address, proxy: Proxy | None) -> bool:
    """True if what is sent there could be read beyond this machine because of a proxy on the way."""
    if proxy is None or address.scheme == "https":
        return False
    return not (address.is_loopback and proxy.address.is_loopback)


def _is_within(address: Address, entry: str) -> bool:
    """True if NO_PROXY's entry means this address."""
    if entry == "*":
        return True
    host, port = _split_port(entry)
    if port is not None and port != address.port:
        return False
    literal = _literal(address.host)
    if literal is None:
        name = host.lstrip(".")
        return address.host == name or address.host.endswith(f".{name}")
    try:
        return literal in ipaddress.ip_network(host, strict=False)
    except ValueError:
        return False


def _split_port(entry: str) -> tuple[str, int | None]:
    if _literal(entry) is None:
        host, _, port = entry.rpartition(":")
        if host and port.isascii() and port.isdigit():
            return host.strip("[]"), int(port)
    return entry.strip("[]"), None


def _literal(host: str) -> _Literal | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
