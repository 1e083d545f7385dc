"""Who may do what: an admin token opens everything, a read token what only reads."""

from __future__ import annotations

import hashlib
import hmac

from pydantic import SecretStr

from weightwire.service.settings import Settings
from weightwire.transfer.errors import AccessError, ForbiddenError

_READING = frozenset({"GET", "HEAD"})
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """Checks bearer tokens. Without tokens in the settings everything is open (on loopback only, see settings)."""

    def __init__(self, settings: Settings) -> None:
        self._admin = _secret(settings.token)
        self._read = _secret(settings.read_token)

    @property
    def token_digests(self) -> list[str]:
        """SHA-256, in hex, of the tokens that may read: what sources check their readers' tokens against."""
        return [hashlib.sha256(token).hexdigest() for token in (self._admin, self._read) if token is not None]

    def check(self, authorization: bytes | None, *, method: str, path: str) -> None:
        """Check one request.

        Args:
            authorization: The header as it came.

        Raises:
            AccessError: If the token is missing or wrong.
            ForbiddenError: If it is the read token, and the request is more than reading.
        """
        if self._admin is None or path in _OPEN_PATHS:
            return
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise AccessError("authorization: no bearer token, expected one of this service")
        # Both comparisons are always made, so that the time tells nothing.
        is_admin = hmac.compare_digest(token, self._admin)
        is_reader = hmac.compare_digest(token, self._admin if self._read is None else self._read)
        if is_admin or (is_reader and method in _READING):
            return
        if is_reader:
            raise ForbiddenError(f"authorization: a read token does not open {method}, expected the admin token")
        raise AccessError("authorization: the bearer token is not one of this service")


def _secret(value: SecretStr | None) -> bytes | None:
    return None if value is None else value.get_secret_value().encode()
