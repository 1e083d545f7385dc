"""Which URLs sources may register: those that others can connect to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from weightwire.transfer.address import Address, is_loopback
from weightwire.transfer.errors import RequestError

_FORM = "expected http(s)://HOST:PORT, HOST a name, an IPv4 address or an IPv6 address in brackets"


def check_endpoint(url: str) -> Address:
    """Check the form of a source's URL: scheme, host and port, nothing else.

    Raises:
        RequestError: Naming what is wrong, and the right form.
    """
    try:
        address = Address.parse(url)
    except RequestError as error:
        raise RequestError(f"{error}; {_FORM}") from error
    literal = _literal(address.host)
    if literal is not None and literal.is_unspecified:
        raise RequestError(f"url {url!r}: {address.host} is for binding, nobody can connect to it; {_FORM}", url=url)
    return address


def check_dialable(address: Address, *, peer_host: str | None, resolve: Callable[[str], Iterable[str]]) -> None:
    """Refuse a URL that means this very machine to whoever reads it, unless its owner is on this machine.

    Args:
        address: What a source registers.
        peer_host: Address that the registering client connected from; None if unknown.
        resolve: The addresses of a name; none if the name is not known here.

    Raises:
        RequestError: If the host is, or resolves to, loopback only, and the peer is elsewhere.
    """
    if peer_host is None or is_loopback(peer_host):
        return
    is_name = _literal(address.host) is None and not address.is_loopback
    leads_to = list(resolve(address.host)) if is_name else [address.host]
    # One address that leads elsewhere is enough, and a name that only others can resolve is their business.
    if leads_to and all(map(is_loopback, leads_to)):
        raise RequestError(
            f"url '{address}': leads to loopback ({', '.join(sorted(set(leads_to)))}), but was registered from "
            f"{peer_host}; expected an address that other machines can connect to (--advertise)",
            url=str(address),
        )


def check_certificate(url: str | None, certificate_sha256: str | None) -> None:
    """Refuse a fingerprint of what shows no certificate.

    Raises:
        RequestError: If there is one without an https URL: whoever reads it would believe more than is checked.
    """
    if certificate_sha256 is not None and (url is None or not url.lower().startswith("https:")):
        raise RequestError(f"url {url!r}: has a certificate_sha256, which only https can show")


def resolve_name(host: str) -> list[str]:
    """The addresses of `host` as this machine sees them, of any family; none if it does not know the name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
