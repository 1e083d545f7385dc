"""How connections to sources come to stand, or not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.forward_proxy import ForwardProxy
from tests.transfer.conftest import PATIENCE_S, Serve, Served, filled
from tests.transfer.wire.conftest import Model
from weightwire.transfer.address import Address
from weightwire.transfer.control import Control
from weightwire.transfer.errors import (
    SourceError,
    SourceRefusedError,
    SourceUnreachableError,
    SourceUntrustedError,
)
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.connecting import Network, SourceConnection
from weightwire.transfer.wire.proxies import Proxies
from weightwire.transfer.wire.puller import Puller, PullOptions
from weightwire.transfer.wire.source import SourceLimits
from weightwire.transfer.wire.stream import SourceStream
from weightwire.transfer.wire.trust import fingerprint_of, read_fingerprint

TLS = Path(__file__).parents[2] / "faults" / "tls"
NOWHERE = "http://127.0.0.1:9"


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    return context


def through(proxy: str, *, allow_plain_http: bool = False) -> Network:
    return Network(proxies=Proxies.parse(proxy, {}), allow_plain_http=allow_plain_http)


@pytest.fixture
def encrypted(serve: Serve, model: Model) -> Served:
    return serve(model.shells, tls=server_context())


# Certificates


def test_source_is_believed_by_its_fingerprint_alone(encrypted: Served, model: Model) -> None:
    endpoint = encrypted.endpoint(certificate_sha256=read_fingerprint(TLS / "server.pem"))
    stream = SourceStream(endpoint, model.manifest)
    assert len(list(stream.fetch(model.segments(), model.target()))) == 4
    stream.close()


def test_source_of_another_fingerprint_is_refused_even_by_an_authority(encrypted: Served, model: Model) -> None:
    wrong = fingerprint_of(b"another certificate")
    trust = ssl.create_default_context(cafile=TLS / "ca.pem")
    stream = SourceStream(encrypted.endpoint(certificate_sha256=wrong), model.manifest, tls=trust)
    with pytest.raises(SourceUntrustedError, match=wrong):
        stream.connect()


# Proxies


@pytest.fixture
def proxied() -> Iterator[Callable[..., ForwardProxy]]:
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(ForwardProxy(**how))


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        pytest.param("403 Forbidden", SourceRefusedError, id="lets nobody there"),
        pytest.param("407 Proxy Authentication Required", SourceRefusedError, id="wants to know who asks"),
        pytest.param("502 Bad Gateway", SourceUnreachableError, id="does not reach it"),
        pytest.param("504 Gateway Timeout", SourceUnreachableError, id="does not reach it in time"),
    ],
)
def test_proxy_that_opens_no_tunnel_is_named(
    encrypted: Served,
    model: Model,
    proxied: Callable[..., ForwardProxy],
    refusal: str,
    kind: type[SourceError],
) -> None:
    proxy = proxied(refusal=refusal)
    stream = SourceStream(encrypted.endpoint(), model.manifest, network=through(proxy.url))
    with pytest.raises(kind, match=f"proxy {proxy.url}: answered {refusal[:3]}"):
        stream.connect()
    assert b"Ticket" not in proxy.heard


def test_proxy_that_is_not_there_is_named(encrypted: Served, model: Model) -> None:
    stream = SourceStream(encrypted.endpoint(), model.manifest, network=through(NOWHERE))
    with pytest.raises(SourceUnreachableError, match=f"proxy {NOWHERE}: Connection refused"):
        stream.connect()


def test_ticket_travels_in_clear_through_no_proxy_unless_that_is_said(served: Served, model: Model) -> None:
    endpoint = served.endpoint(url="http://192.0.2.1:80")
    with pytest.raises(SourceUntrustedError, match="unencrypted through proxy"):
        SourceStream(endpoint, model.manifest, network=through(NOWHERE)).connect()
    with pytest.raises(SourceUnreachableError, match="refused"):
        SourceStream(endpoint, model.manifest, network=through(NOWHERE, allow_plain_http=True)).connect()


# Names of several addresses


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def named(*places: tuple[str, int]) -> Callable[..., list[tuple[object, ...]]]:
    """A resolver for which every name has these addresses."""
    found: list[tuple[object, ...]] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    return lambda *_args, **_kwargs: found


def connection_to(host: str) -> SourceConnection:
    return SourceConnection(Address(scheme="http", host=host, port=1), network=Network(), timeout_s=PATIENCE_S)


def test_name_of_two_addresses_is_reached_by_the_one_that_answers(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address swallows every packet: a listener whose queue is full."""
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", named(deaf.getsockname(), listener.getsockname()))
        connection = connection_to("two")
        connection.connect()
        assert connection.sock.getpeername() == listener.getsockname()
        connection.close()


def test_name_of_which_no_address_answers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(socket, "getaddrinfo", named(closed.getsockname(), closed.getsockname()))
        with pytest.raises(ConnectionRefusedError):
            connection_to("none").connect()


# Room for few


@pytest.mark.parametrize("encrypted", [False, True])
def test_source_without_room_for_all_streams_gives_everything_to_those_it_has(serve: Serve, encrypted: bool) -> None:
    """Beyond its limit a source closes connections at once: that is neither damage nor its death."""
    held = Shells.from_tensors({"a": filled("uint8", (4000,))}, chunk_bytes=16)
    manifest, target = held.seal(), Shells.allocate(held.manifest)
    full = serve(held, limits=SourceLimits(max_connections=1), tls=server_context() if encrypted else None)
    trust = ssl.create_default_context(cafile=TLS / "ca.pem") if encrypted else None
    plan = plan_pull(target.manifest, [manifest])
    options = PullOptions(streams=4, tls=trust)
    with Puller(target, [full.endpoint()], {manifest.digest: manifest}, options) as puller:
        puller.connect(plan)
        puller.pull(plan, Control(deadline_s=PATIENCE_S))
        failures = list(puller.failures)
    assert failures == []
    assert bytes(target.tensor("a").numpy()) == bytes(held.tensor("a").numpy())
