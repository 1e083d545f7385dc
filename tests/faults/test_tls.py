"""Everything over https: whoever is trusted is talked to, and nobody else.

The files in tls/ are for tests alone, made once with `openssl ca`: an authority, a server's certificate for 127.0.0.1
and localhost that it signed, good until 2124, and an authority that signed nothing.
"""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
import pytest

from tests.faults.checkpoints import check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from weightwire.service.client import ServiceClient
from weightwire.transfer.errors import SettingsError

TLS = Path(__file__).with_name("tls")
SERVER = ("--tls-cert", TLS / "server.pem", "--tls-key", TLS / "server.key")
TRUST = ("--tls-ca", TLS / "ca.pem")
MISTRUST = ("--tls-ca", TLS / "other-ca.pem")


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
    assert outcome.error["code"] == "service_unreachable"
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
    assert (failure["instance_id"], failure["code"]) == ("stranger", "source_unreachable")
    assert "certificate" in failure["detail"].lower()
    check_saved(tmp_path / "out", small.tensors)


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
