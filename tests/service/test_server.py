"""The service as a process: it binds once, drains, survives being killed, and answers while it works."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from tests.service.conftest import MODEL, make_manifest, progress, registration, transfer_request
from weightwire.service import plans
from weightwire.service.server import Server, bind_socket, running_service
from weightwire.service.settings import Settings
from weightwire.transfer.errors import NotFoundError, SettingsError
from weightwire.transfer.plan import Plan

PATIENT = httpx.Timeout(30)
SERVE = """
import sys
from weightwire.service.server import Server
from weightwire.service.settings import load_settings
settings = load_settings({"port": int(sys.argv[1]), "store": sys.argv[2], "lease_s": 300})
Server(settings).run_until_signal(lambda url: print(url, flush=True))
"""


@contextmanager
def service_process(store: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service in a process of its own, and its URL; killed at the end if it still runs."""
    command = [sys.executable, "-W", "error", "-c", SERVE, str(port), store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def register_source(client: httpx.Client) -> None:
    manifest = make_manifest()
    client.put("/v1/instances/s1", json=registration()).raise_for_status()
    body = {"epoch": 1, "generation": 1, "weight_version": 0, "digest": manifest.digest}
    content = {**body, "manifest": json.loads(manifest.text)}
    client.put("/v1/instances/s1/ranks/0/manifest", json=content).raise_for_status()


def test_killed_service_loses_nothing_and_transfers_go_on(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 's.db'}"
    target = registration(ranks=[{"rank": 0, "generation": 1, "url": None}])
    key = {"Idempotency-Key": "k"}
    looks = ("/v1/instances", "/v1/models/org%2Fname/sources", f"/v1/manifests/{make_manifest().digest}")
    with service_process(store) as (process, url), httpx.Client(base_url=url, timeout=PATIENT) as client:
        register_source(client)
        ticket_key = client.put("/v1/instances/s1", json=registration()).json()["ranks"][0]["ticket_key"]
        client.put("/v1/instances/t1", json=target).raise_for_status()
        grant = client.post("/v1/transfers", json=transfer_request(), headers=key).json()
        path = f"/v1/transfers/{grant['transfer_id']}"
        client.post(f"{path}/ranks/0/progress", json=progress(peer=8)).raise_for_status()
        before = [client.get(look).content for look in looks]
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with service_process(store, httpx.URL(url).port or 0) as (_, again):
        assert again == url, "the port can be bound again at once"
        with httpx.Client(base_url=url, timeout=PATIENT) as client:
            after = [client.get(look).content for look in looks]
            assert after[1:] == before[1:]
            assert client.get("/v1/instances").json()[0]["state"] == "ready"
            assert client.put("/v1/instances/s1", json=registration()).json()["ranks"][0]["ticket_key"] == ticket_key
            replayed = client.post("/v1/transfers", json=transfer_request(), headers=key)
            assert (replayed.status_code, replayed.json()["ranks"]) == (200, grant["ranks"])
            assert client.get(path).json()["bytes_peer"] == 8
            told = client.post(f"{path}/ranks/0/progress", json=progress("ready", peer=32)).json()
            assert told["state"] == "ready"


def test_second_service_on_the_same_file_is_refused(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 's.db'}"
    with (
        running_service(Settings(port=0, store=store)),
        pytest.raises(SettingsError, match="in use by another process"),
    ):
        Server(Settings(port=0, store=store))
    with running_service(Settings(port=0, store=store)) as url:
        assert httpx.get(f"{url}/readyz").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_drains_the_service_and_it_exits_with_zero(number: signal.Signals) -> None:
    with service_process("memory") as (process, url), httpx.Client(base_url=url, timeout=PATIENT) as client:
        client.put("/v1/instances/t1", json=registration()).raise_for_status()
        transfer_id = client.post("/v1/transfers", json=transfer_request()).json()["transfer_id"]
        with client.stream("GET", f"/v1/transfers/{transfer_id}/events") as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert all("error" not in line.partition(":")[0] for line in lines), "the stream ends properly"
        assert process.wait() == 0


def test_signal_handlers_are_those_of_before_when_the_server_has_ended() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    Server(Settings(port=0)).run_until_signal(lambda url: os.kill(os.getpid(), signal.SIGTERM))
    assert {number: signal.getsignal(number) for number in before} == before


def test_b33_port_that_is_taken_is_refused_by_name() -> None:
    with running_service(Settings(port=0)) as url:
        port = httpx.URL(url).port or 0
        with pytest.raises(SettingsError, match=f"port {port} on '127.0.0.1': taken by another process") as caught:
            Server(Settings(port=port))
        assert caught.value.facts["port"] == port


def test_b33_port_zero_gives_the_bound_port_and_nobody_else_gets_it() -> None:
    first, second = bind_socket("127.0.0.1", 0), bind_socket("127.0.0.1", 0)
    ports = {sock.getsockname()[1] for sock in (first, second)}
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(SettingsError, match="taken"):
            bind_socket("127.0.0.1", port)
    first.close()
    second.close()


def test_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"port 0 on '192\.0\.2\.1': cannot be bound"):
        bind_socket("192.0.2.1", 0)
    with pytest.raises(SettingsError, match="not an address of this machine"):
        bind_socket("no-such-host.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_b32_ipv6_service_is_reached_by_its_url() -> None:
    try:
        bind_socket("::1", 0).close()
    except SettingsError:
        pytest.skip("IPv6 loopback cannot be bound here")
    with running_service(Settings(host="::1", port=0)) as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/healthz").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"host": "0.0.0.0"}, id="open to all without a token"),
        pytest.param({"host": "0.0.0.0", "token": SecretStr("t")}, id="a token over plain HTTP"),
    ],
)
def test_server_that_would_lie_open_is_refused_before_it_binds(fields: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"host '0\.0\.0\.0'"):
        Server(Settings.model_validate({"port": 0} | fields))


def test_advertised_url_is_the_one_that_is_told() -> None:
    with running_service(Settings(port=0, advertise="https://wire.example")) as url:
        assert url == "https://wire.example"


def test_failure_to_start_leaves_no_socket_bound(tmp_path: Path) -> None:
    held = bind_socket("127.0.0.1", 0)
    port = held.getsockname()[1]
    held.close()
    with pytest.raises(SettingsError, match="cannot be opened"):
        Server(Settings(port=port, store=f"sqlite:{tmp_path / 'missing' / 's.db'}"))
    bind_socket("127.0.0.1", port).close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_service_with_a_certificate_speaks_https_and_may_leave_loopback(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    settings = Settings(host="0.0.0.0", port=0, token=SecretStr("sesame"), tls_cert=cert, tls_key=key)
    with running_service(settings) as url:
        assert url.startswith("https://0.0.0.0:")
        reachable = url.replace("0.0.0.0", "127.0.0.1")
        trust = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=reachable, verify=trust, headers={"Authorization": "Bearer sesame"}) as client:
            assert client.get("/v1/instances").json() == []


def test_b46_body_over_the_limit_is_refused_while_the_client_still_sends() -> None:
    with running_service(Settings(port=0, max_body_bytes=1000)) as url:
        for size in (1001, 2000, 10_000_000):
            response = httpx.post(f"{url}/v1/transfers", content=bytes(size), timeout=PATIENT)
            assert (response.status_code, response.json()["limit_bytes"]) == (413, 1000)


def test_body_that_stalls_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with running_service(Settings(port=0, body_timeout_s=0.05)) as url:
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)
        with socket.create_connection(address, timeout=30) as stalled:
            stalled.sendall(b"POST /v1/transfers HTTP/1.1\r\nHost: s\r\nContent-Length: 9\r\n\r\n{")
            assert stalled.recv(100).startswith(b"HTTP/1.1 504")
        with socket.create_connection(address, timeout=30) as gone:
            gone.sendall(b"POST /v1/plans HTTP/1.1\r\nHost: s\r\nContent-Length: 9\r\n\r\n{")
        assert httpx.get(f"{url}/healthz").status_code == 200
    assert not [record for record in caplog.records if record.exc_info], "a client that goes away is no failure of ours"


def test_b45_proxy_headers_do_not_move_the_peer() -> None:
    body = registration()
    with running_service(Settings(port=0)) as url:
        response = httpx.put(f"{url}/v1/instances/s1", json=body, headers={"X-Forwarded-For": "10.0.0.9"})
        assert response.status_code == 200, "the peer is loopback, whatever a header says"


def test_healthz_answers_while_plans_and_an_upload_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    planning, go_on = threading.Event(), threading.Event()

    def plan_slowly(*_: object, **__: object) -> Plan:
        planning.set()
        go_on.wait()
        raise NotFoundError("nothing to plan")

    monkeypatch.setattr(plans, "plan_pull", plan_slowly)
    order: list[str] = []

    def plan() -> None:
        assert httpx.post(f"{url}/v1/plans", json={"model": MODEL}, timeout=PATIENT).status_code == 404
        order.append("plan")

    with running_service(Settings(port=0)) as url, httpx.Client(base_url=url, timeout=PATIENT) as client:
        register_source(client)
        planners = [threading.Thread(target=plan) for _ in range(50)]
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)
        with socket.create_connection(address, timeout=30) as upload:
            try:
                for thread in planners:
                    thread.start()
                planning.wait()
                head = b"PUT /v1/instances/s1/ranks/0/manifest HTTP/1.1\r\nHost: s\r\nContent-Length: 2000\r\n\r\n"
                upload.sendall(head + b"{")
                for path in ("/healthz", "/readyz", "/v1/instances", "/metrics"):
                    assert client.get(path).status_code == 200
                    order.append(path)
                client.put("/v1/instances/s1", json=registration()).raise_for_status()
                order.append("renewal")
            finally:
                go_on.set()
            for thread in planners:
                thread.join()
            upload.sendall(b" " * 1998 + b"}")
            assert upload.recv(100).startswith(b"HTTP/1.1 422")
    assert order == ["/healthz", "/readyz", "/v1/instances", "/metrics", "renewal", *["plan"] * 50]


def test_large_manifest_is_published_while_healthz_answers() -> None:
    manifest = make_manifest(names=tuple(f"model.layers.{number}.weight" for number in range(20_000)))
    body = {"epoch": 1, "generation": 1, "weight_version": 0, "digest": manifest.digest}
    content = json.dumps({**body, "manifest": json.loads(manifest.text)}).encode()
    with running_service(Settings(port=0)) as url, httpx.Client(base_url=url, timeout=PATIENT) as client:
        client.put("/v1/instances/s1", json=registration()).raise_for_status()
        answers: list[int] = []
        published = threading.Event()

        def publish() -> None:
            headers = {"Content-Encoding": "gzip"}
            path = f"{url}/v1/instances/s1/ranks/0/manifest"
            answers.append(httpx.put(path, content=gzip.compress(content), headers=headers, timeout=120).status_code)
            published.set()

        thread = threading.Thread(target=publish)
        thread.start()
        answered = 0
        while not published.is_set():
            assert client.get("/healthz").status_code == 200
            answered += not published.is_set()
        thread.join()
        assert answers == [200]
        assert answered > 1
        assert client.get(f"/v1/manifests/{manifest.digest}").content == manifest.text
