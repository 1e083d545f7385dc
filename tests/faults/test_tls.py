"""Everything over https: whoever is trusted is talked to, and nobody else.

The files in tls/ are for tests alone, made once with `openssl ca`: an authority, a server's certificate for 127.0.0.1
and localhost that it signed, good until 2124, and an authority that signed nothing. Two more signed themselves: one of
another name, and one for 127.0.0.1 that expired in 2020.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, cast
from urllib.parse import urlsplit

import httpx
import pytest

from tests.faults.checkpoints import check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from weightwire.service.client import ServiceClient
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.wire.trust import read_fingerprint

TLS = Path(__file__).with_name("tls")
SERVER = ("--tls-cert", TLS / "server.pem", "--tls-key", TLS / "server.key")
TRUST = ("--tls-ca", TLS / "ca.pem")
MISTRUST = ("--tls-ca", TLS / "other-ca.pem")
# Of no name that anybody here is called by, and signed by nobody.
ELSEWHERE = ("--tls-cert", TLS / "elsewhere.pem", "--tls-key", TLS / "elsewhere.key")
EXPIRED = ("--tls-cert", TLS / "expired.pem", "--tls-key", TLS / "expired.key")


def fingerprint(name: str) -> str:
    return read_fingerprint(TLS / name)


def colons(digits: str) -> str:
    """As openssl writes it."""
    return ":".join(digits[at : at + 2] for at in range(0, 64, 2)).upper()


@pytest.fixture
def secured(lab: Lab) -> Lab:
    """A lab whose service speaks https."""
    lab.serve(*SERVER)
    assert lab.service.startswith("https://127.0.0.1:")
    return lab


def test_transfer_runs_over_https_from_end_to_end(secured: Lab, model: Model, tmp_path: Path) -> None:
    source = secured.source(model.folder, *SERVER, *TRUST, "--instance-id", "source")
    assert str(source.line()["url"]).startswith("https://")
    relay = secured.pull(*SERVER, *TRUST, "--serve", "--save", tmp_path / "first", "--instance-id", "relay")
    assert cast(Json, relay.line()["pull"])["bytes_peer"] == model.nbytes
    check_saved(tmp_path / "first", model.tensors)
    assert source.stop() == 0
    answer = secured.pull(*TRUST, "--save", tmp_path / "second").finish().check(0)
    assert answer["sources"] == [{"instance_id": "relay", "rank": 0, "bytes": model.nbytes}]
    check_saved(tmp_path / "second", model.tensors)
    assert relay.stop() == 0


@pytest.mark.parametrize("flags", [pytest.param(MISTRUST, id="another authority"), pytest.param((), id="the system's")])
def test_pull_does_not_trust_a_service_of_another_authority(
    secured: Lab, small: Model, flags: tuple[object, ...]
) -> None:
    outcome = secured.pull(*flags, "--token", "a-secret").finish()
    outcome.check(1)
    assert outcome.error["code"] == "service_untrusted"
    assert "certificate" in str(outcome.error["detail"])
    # With a disk it needs nobody.
    answer = secured.pull(*flags, "--checkpoint", small.folder).finish().check(0)
    assert (answer["transfer_id"], answer["bytes_disk"]) == (None, small.nbytes)


def test_pull_does_not_trust_a_source_of_another_authority(served: Lab, small: Model, tmp_path: Path) -> None:
    """The service is on loopback in the clear here, so that the source alone is the one who is not trusted."""
    served.ready_source(small.folder, *SERVER, *TRUST, "--instance-id", "stranger")
    answer = served.pull(*MISTRUST, "--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, small.nbytes)
    (failure,) = cast("list[dict[str, str]]", answer["failures"])
    assert (failure["instance_id"], failure["code"]) == ("stranger", "source_untrusted")
    assert "certificate" in failure["detail"].lower()
    check_saved(tmp_path / "out", small.tensors)


@pytest.mark.parametrize(
    "certificate", [pytest.param(ELSEWHERE, id="of another name"), pytest.param(EXPIRED, id="expired")]
)
def test_certificate_that_is_pinned_needs_no_authority_name_or_date(
    lab: Lab, small: Model, tmp_path: Path, certificate: tuple[object, ...]
) -> None:
    """The whole way without a file of authorities: the service by its pin, the sources by the service's word."""
    lab.serve(*certificate)
    pin = ("--service-pin", colons(read_fingerprint(Path(str(certificate[1])))))
    lab.ready_source(small.folder, *certificate, *pin, "--instance-id", "first")
    relay = lab.pull(*pin, *certificate, "--serve", "--instance-id", "relay")
    assert cast(Json, relay.line()["pull"])["bytes_peer"] == small.nbytes
    answer = lab.pull(*pin, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])
    check_saved(tmp_path / "out", small.tensors)
    assert lab.run("status", "--service", lab.service, *pin, "--json").code == 0


def test_wrong_pin_ends_before_the_token_is_sent(secured: Lab, small: Model) -> None:
    pin = ("--service-pin", fingerprint("elsewhere.pem"))
    outcome = secured.pull(*pin, "--token", "a-secret").finish()
    outcome.check(1)
    assert outcome.error["code"] == "service_untrusted"
    for said in (fingerprint("server.pem"), fingerprint("elsewhere.pem")):
        assert said in str(outcome.error["detail"])
    assert "a-secret" not in outcome.log + "".join(outcome.lines)


def test_pin_does_not_replace_an_authority_that_is_named(secured: Lab) -> None:
    pin = ("--service-pin", fingerprint("server.pem"))
    assert secured.run("status", "--service", secured.service, *pin, *TRUST, "--json").code == 0
    outcome = secured.run("status", "--service", secured.service, *pin, *MISTRUST, "--json")
    assert outcome.error["code"] == "service_untrusted"


class Ears:
    """A server on https that answers nothing, and remembers what it was sent."""

    def __init__(self, certificate: str) -> None:
        self.heard = b""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(TLS / f"{certificate}.pem", TLS / f"{certificate}.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            with (
                connection,
                contextlib.suppress(OSError),
                self._context.wrap_socket(connection, server_side=True) as tls,
            ):
                self.heard += tls.recv(1 << 16)


def test_source_with_another_certificate_than_registered_gets_no_ticket(
    served: Lab, small: Model, tmp_path: Path
) -> None:
    """Somebody took the source's address over: the certificate is good by itself, but not the one vouched for."""
    with Ears("server") as ears:
        advertised = ("--advertise", ears.url, "--advertise-pin", fingerprint("elsewhere.pem"))
        served.ready_source(small.folder, *ELSEWHERE, *advertised)
        answer = served.pull(*TRUST, "--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    (failure,) = cast("list[dict[str, str]]", answer["failures"])
    assert failure["code"] == "source_untrusted"
    assert fingerprint("server.pem") in failure["detail"]
    assert ears.heard == b""
    assert answer["bytes_disk"] == small.nbytes
    check_saved(tmp_path / "out", small.tensors)


@pytest.mark.parametrize(
    ("certificate", "authority", "said"),
    [
        pytest.param(EXPIRED, "expired.pem", "expired", id="expired"),
        pytest.param(ELSEWHERE, "elsewhere.pem", "not valid for '127.0.0.1'", id="of another name"),
        pytest.param(ELSEWHERE, "ca.pem", "self-signed certificate", id="signed by itself"),
    ],
)
def test_certificate_that_is_no_good_is_refused_with_its_reason(
    lab: Lab, served: Lab, small: Model, certificate: tuple[object, ...], authority: str, said: str
) -> None:
    served.ready_source(small.folder, *certificate, "--advertise-pin", "none")
    trust = ("--tls-ca", TLS / authority)
    answer = served.pull(*trust, "--checkpoint", small.folder).finish().check(0)
    (failure,) = cast("list[dict[str, str]]", answer["failures"])
    assert failure["code"] == "source_untrusted"
    assert said in failure["detail"]
    lab.serve(*certificate)
    error = lab.run("status", "--service", lab.service, *trust, "--json").error
    assert error["code"] == "service_untrusted"
    assert said in str(error["detail"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(("--service-pin", "abc"), "64 hex digits", id="that is no fingerprint"),
        pytest.param(("--service-pin", "0" * 64), "expected https", id="of a service in the clear"),
    ],
)
def test_service_pin_is_refused(served: Lab, flags: tuple[object, ...], said: str) -> None:
    outcome = served.pull(*flags).finish()
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert said in str(outcome.error["detail"])


def test_service_takes_no_fingerprint_of_a_source_in_the_clear(served: Lab, small: Model) -> None:
    outcome = served.source(small.folder, "--advertise-pin", "0" * 64).finish()
    outcome.check(1)
    assert outcome.error["code"] == "request_invalid"
    assert "certificate_sha256" in str(outcome.error["detail"])


def test_source_speaks_no_http_where_it_speaks_https(served: Lab, small: Model) -> None:
    url = str(served.source(small.folder, *SERVER).line()["url"])
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https:", "http:") + "/healthz")
    context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    assert httpx.get(f"{url}/healthz", verify=context).status_code == 200


def test_source_answers_others_while_a_client_keeps_silent_in_its_handshake(served: Lab, small: Model) -> None:
    url = str(served.source(small.folder, *SERVER).line()["url"])
    context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 0))
    with socket.create_connection(address), ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: httpx.get(f"{url}/readyz", verify=context).status_code, range(4))
        assert list(answers) == [200] * 4


@pytest.mark.parametrize("command", ["pull", "source", "status"])
def test_token_does_not_travel_in_clear_beyond_this_machine(lab: Lab, small: Model, command: str) -> None:
    arguments: tuple[object, ...] = {
        "pull": ("pull", "--model", "m"),
        "source": ("source", small.folder, "--model", "m"),
        "status": ("status",),
    }[command]
    outcome = lab.run(*arguments, "--service", "http://192.0.2.1:8700", "--token", "a-secret", "--json")
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert "unencrypted" in str(outcome.error["detail"])
    assert "a-secret" not in outcome.log + "".join(outcome.lines)


def test_client_sends_a_token_in_clear_only_when_told_to() -> None:
    for url in ("http://192.0.2.1:8700", "http://service.example:8700", "http://[2001:db8::1]:8700"):
        with pytest.raises(SettingsError, match="unencrypted"):
            ServiceClient(url, token="a-secret")
        ServiceClient(url, token="a-secret", allow_plain_http=True).close()
    for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "https://service.example"):
        ServiceClient(url, token="a-secret").close()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--tls-cert", TLS / "server.pem"), id="a certificate without a key"),
        pytest.param(("--tls-key", TLS / "server.key"), id="a key without a certificate"),
        pytest.param(("--tls-cert", TLS / "ca.pem", "--tls-key", TLS / "server.key"), id="a key of another one"),
        pytest.param(("--tls-cert", "/nowhere.pem", "--tls-key", TLS / "server.key"), id="no such file"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "source"])
def test_server_refuses_certificate_and_key_that_do_not_belong_together(
    served: Lab, small: Model, command: str, flags: tuple[object, ...]
) -> None:
    if command == "serve":
        outcome = served.run("serve", "--port", 0, "--json", *flags)
    else:
        outcome = served.source(small.folder, *flags).finish()
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"


def test_authority_that_is_no_file_is_refused(served: Lab) -> None:
    outcome = served.pull("--tls-ca", "/nowhere.pem").finish()
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert "/nowhere.pem" in str(outcome.error["detail"])


def test_service_beyond_this_machine_wants_https_for_its_tokens(lab: Lab) -> None:
    outcome = lab.run("serve", "--host", "0.0.0.0", "--port", 0, "--token", "a-secret", "--json")
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    running = lab.start("serve", "--host", "0.0.0.0", "--port", 0, "--token", "a-secret", "--json", *SERVER)
    assert running.line()["ready"] is True
