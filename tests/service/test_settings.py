"""Settings: read once, refused by name, and never such that the service lies open to the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from weightwire.service import cli
from weightwire.service.settings import Settings, check_environment, check_settings, load_settings
from weightwire.transfer.errors import SettingsError


def test_settings_come_from_the_environment_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_PORT", "8800")
    monkeypatch.setenv("WEIGHTWIRE_LEASE_S", "4.5")
    monkeypatch.setenv("WEIGHTWIRE_SERVICE", "http://127.0.0.1:1")
    settings = load_settings({"port": 8900, "store": None})
    assert (settings.port, settings.lease_s, settings.store) == (8900, 4.5, "memory")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("WEIGHTWIRE_TOKN", "did you mean WEIGHTWIRE_TOKEN?", id="misspelt, and the right one is named"),
        pytest.param("weightwire_tokn", "did you mean WEIGHTWIRE_TOKEN?", id="in lower case too"),
        pytest.param("WEIGHTWIRE_XYZZY", "expected one of", id="far from any, and all are listed"),
    ],
)
def test_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=rf"^variable {name}: unknown; ") as caught:
        load_settings()
    assert hint in str(caught.value)


def test_variables_without_our_prefix_are_not_looked_at() -> None:
    check_environment({"PATH": "/bin", "WEIGHTWIRE": "1", "WEIGHTWIRE_HOST": "::1"})


def test_value_that_cannot_be_read_names_its_variable_and_not_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_PORT", "70000s")
    with pytest.raises(SettingsError, match="WEIGHTWIRE_PORT: ") as caught:
        load_settings()
    assert "70000s" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"host": "0.0.0.0"}, "expected --token or WEIGHTWIRE_TOKEN", id="all addresses without a token"),
        pytest.param({"host": "::"}, "no token is set", id="all IPv6 addresses without a token"),
        pytest.param({"host": "node7"}, "no token is set", id="a name that is not localhost without a token"),
        pytest.param(
            {"host": "10.0.0.1", "token": "t"}, "--tls-key, or --allow-plain-http", id="a token over plain HTTP"
        ),
        pytest.param({"token": ""}, "token: empty", id="an empty token"),
        pytest.param({"token": "a b"}, "token: empty, or holds blanks", id="a token with a blank"),
        pytest.param({"token": "é"}, "outside ASCII", id="a token outside ASCII"),
        pytest.param({"read_token": "r"}, "set without token", id="a read token alone"),
        pytest.param({"token": "t", "read_token": "t"}, "equal to token", id="two equal tokens"),
        pytest.param({"store": "redis://x"}, "expected 'memory' or 'sqlite:PATH'", id="a store that does not exist"),
        pytest.param({"store": "sqlite:"}, "expected 'memory' or 'sqlite:PATH'", id="a store without a path"),
        pytest.param({"tls_cert": "cert.pem"}, "expected both or none", id="a certificate without a key"),
    ],
)
def test_settings_that_must_not_be_used_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_settings(Settings.model_validate(fields))
    assert words in str(caught.value)


def test_tls_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cert\.pem is not a file"):
        check_settings(Settings(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="nothing given"),
        pytest.param({"host": "::1"}, id="IPv6 loopback without a token"),
        pytest.param({"host": "0.0.0.0", "token": "t", "allow_plain_http": True}, id="plain HTTP that was asked for"),
        pytest.param({"token": "t", "read_token": "r"}, id="two tokens on loopback"),
    ],
)
def test_settings_that_are_safe_pass(fields: dict[str, object]) -> None:
    check_settings(Settings.model_validate(fields))


def test_tokens_do_not_show_in_text() -> None:
    settings = Settings(token=SecretStr("sesame"))
    assert "sesame" not in f"{settings} {settings!r}"


def test_variables_of_the_commands_are_known() -> None:
    sources = [path.read_text() for path in Path(cli.__path__[0]).glob("*.py")]
    read = {name: "" for text in sources for name in re.findall(r'envvar="(WEIGHTWIRE_\w+)"', text)}
    assert read
    check_environment(read)


def test_advertised_url_must_be_one() -> None:
    with pytest.raises(SettingsError, match=r"^advertise: "):
        check_settings(Settings(advertise="fe80::1"))
