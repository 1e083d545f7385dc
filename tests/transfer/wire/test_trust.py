"""Fingerprints: how they are written, and whose they are."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import pytest

from weightwire.transfer.errors import SettingsError
from weightwire.transfer.wire.trust import (
    client_context,
    fingerprint_of,
    parse_fingerprint,
    read_fingerprint,
    refused_certificate,
)

TLS = Path(__file__).parents[2] / "faults" / "tls"
DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DIGITS, id="plain"),
        pytest.param(DIGITS.upper(), id="capitals"),
        pytest.param(f"sha256:{DIGITS}", id="named"),
        pytest.param(":".join(DIGITS[at : at + 2] for at in range(0, 64, 2)).upper(), id="as openssl writes it"),
        pytest.param(f" {DIGITS}\n", id="with a line end"),
    ],
)
def test_fingerprint_is_read_as_people_write_it(text: str) -> None:
    assert parse_fingerprint(text) == DIGITS


@pytest.mark.parametrize("text", ["", DIGITS[1:], DIGITS + "0", "g" + DIGITS[1:], "sha1:" + DIGITS, "none"])
def test_fingerprint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="64 hex digits"):
        parse_fingerprint(text)


def test_fingerprint_is_that_of_the_first_certificate(tmp_path: Path) -> None:
    first, second = (TLS / f"{name}.pem" for name in ("server", "ca"))
    chain = tmp_path / "chain.pem"
    chain.write_text("a comment\n" + first.read_text() + second.read_text())
    text = first.read_text()
    der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN") :])
    assert read_fingerprint(chain) == read_fingerprint(first) == hashlib.sha256(der).hexdigest() == fingerprint_of(der)


@pytest.mark.parametrize("name", ["server.key", "nothing.pem"])
def test_file_without_a_certificate_has_no_fingerprint(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        read_fingerprint(TLS / name)


def test_authority_stays_in_force_beside_a_pin() -> None:
    assert client_context(TLS / "ca.pem", DIGITS).verify_mode is ssl.CERT_REQUIRED
    assert client_context(TLS / "ca.pem", DIGITS).check_hostname
    assert client_context(None, DIGITS).verify_mode is ssl.CERT_NONE


def test_refused_certificate_is_found_among_the_causes() -> None:
    error = RuntimeError("wrapped")
    error.__cause__ = ssl.SSLCertVerificationError("it is blue")
    assert "it is blue" in (refused_certificate(error) or "")
    assert refused_certificate(OSError("else")) is None
