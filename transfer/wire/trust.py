"""Which certificate is believed: an authority's, or exactly the one whose fingerprint is known."""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from pathlib import Path

from weightwire.transfer.errors import SettingsError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def parse_fingerprint(text: str) -> str:
    """The SHA-256 of a certificate in lower case hex, from what people and openssl write.

    Raises:
        SettingsError: If it is none.
    """
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if _SHA256.fullmatch(digits) is None:
        raise SettingsError(f"fingerprint {text!r:.100}: expected the SHA-256 of a certificate, 64 hex digits")
    return digits


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256, in hex, of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()


def read_fingerprint(chain: Path) -> str:
    """That of the first certificate of a PEM file: the one that a server of this chain shows.

    Raises:
        SettingsError: If there is none.
    """
    try:
        found = _CERTIFICATE.search(chain.read_text("ascii", "replace"))
        if found is not None:
            return fingerprint_of(ssl.PEM_cert_to_DER_cert(found[0]))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{chain}: {error}") from error
    raise SettingsError(f"{chain}: holds no certificate in PEM")


def check_pin(sock: ssl.SSLSocket, pin: str) -> None:
    """Compare the certificate that the handshake brought with the one that is expected.

    Raises:
        ssl.SSLCertVerificationError: If it is another one. Nothing has been sent by then.
    """
    actual = fingerprint_of(sock.getpeercert(binary_form=True) or b"")
    if not hmac.compare_digest(actual, pin):
        raise ssl.SSLCertVerificationError(f"certificate has fingerprint sha256:{actual}, expected sha256:{pin}")


def client_context(authority: Path | None = None, pin: str | None = None) -> ssl.SSLContext:
    """What a client trusts.

    Args:
        authority: PEM file of certificates to trust in place of the system's.
        pin: The fingerprint that the server's own certificate has to have. Without an authority nothing else of it
            counts, neither name nor dates: a fingerprint says more than both.

    Raises:
        SettingsError: If the file is no PEM file of certificates.
    """
    try:
        if pin is None:
            return ssl.create_default_context(cafile=authority)
        context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.pin = pin
        if authority is None:
            return believing(context)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{authority}: {error}") from error
    return context


def believing(context: ssl.SSLContext) -> ssl.SSLContext:
    """A context that takes any certificate: only for who compares its fingerprint afterwards."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def refused_certificate(error: BaseException | None) -> str | None:
    """Why a certificate was refused, if that is what an error, or one of its causes, tells."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {getattr(error, 'verify_message', '') or error}"
        error = error.__cause__ or error.__context__
    return None


class _PinnedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        context = self.context
        assert isinstance(context, _PinnedContext), "made by one"
        check_pin(self, context.pin)


class _PinnedContext(ssl.SSLContext):
    """Ends every handshake by comparing fingerprints, whoever opens the connection.

    Attributes:
        pin: As `parse_fingerprint` gives it.
    """

    pin: str
    sslsocket_class = _PinnedSocket
