"""Where an HTTP server is: one type for every address that is bound, registered or dialled."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from weightwire.transfer.errors import RequestError, SettingsError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_BRACKETS = "an IPv6 literal needs brackets: http://[::1]:8700"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An HTTP origin.

    Attributes:
        scheme: `http` or `https`.
        host: A name or an IP literal, without brackets.
        port: 1 to 65535.
    """

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if the host says by itself that it is this machine."""
        return is_loopback(self.host)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse `http://host:port`, `https://[v6]:port`.

        Raises:
            RequestError: If it is another scheme, has a path, query or credentials, no host, a bad port, or an IPv6
                literal without brackets, or with a zone.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RequestError(f"address {_shown(url)}: host or port cannot be; {_BRACKETS}") from error
        if parts.scheme not in _DEFAULT_PORTS:
            raise RequestError(f"address {_shown(url)}: expected scheme http or https")
        if parts.username is not None or parts.password is not None:
            raise RequestError("address: holds credentials, expected them in a header")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise RequestError(f"address {_shown(url)}: has more than a scheme, a host and a port")
        if not parts.hostname or (parts.netloc.count(":") > 1 and "[" not in parts.netloc):
            raise RequestError(f"address {_shown(url)}: no host; {_BRACKETS}")
        if "%" in parts.hostname:
            raise RequestError(
                f"address {_shown(url)}: the zone behind % means something on one machine alone, expected a name or an "
                "address without one"
            )
        if port == 0 or any(character.isspace() or ord(character) < 32 for character in url):
            raise RequestError(f"address {_shown(url)}: expected a port of 1 to 65535 and no blanks")
        return cls(scheme=parts.scheme, host=parts.hostname, port=port or _DEFAULT_PORTS[parts.scheme])


def _shown(url: str) -> str:
    """The URL for a message, without what may be a secret: errors end up in logs and in other people's screens."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    return repr(scheme + separator + rest.rpartition("@")[2].partition("?")[0].partition("#")[0])


def bare_host(text: str) -> str:
    """An address to bind, without the brackets that people write around IPv6 literals."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def check_zone(host: str, *, advertise: str | None) -> None:
    """Refuse to serve on an address that only this machine can write, unless another one is told to the others.

    Raises:
        SettingsError: If `host` has a zone, as fe80::1%eth0 has, and nothing is advertised.
    """
    if "%" in host and advertise is None:
        raise SettingsError(f"host {host!r}: its zone means nothing to other machines, expected --advertise with a URL")


def is_loopback(host: str) -> bool:
    """True for `localhost` and the IP literals that never leave the machine, IPv4 in IPv6 included."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
