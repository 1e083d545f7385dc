"""Networks as they are: IPv6, proxies on the way out, and servers that stand in front of a source."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.faults.checkpoints import MIB, check_saved, content, write_checkpoint
from tests.faults.conftest import Model
from tests.faults.forward_proxy import ForwardProxy
from tests.faults.processes import Json, Lab
from tests.faults.proxy import Exchange, Fault, Proxy, answered, passed
from weightwire.service.client import PullRequest, ServiceClient, pull
from weightwire.transfer import Shells

TLS = Path(__file__).with_name("tls")
SERVER = ("--tls-cert", TLS / "server.pem", "--tls-key", TLS / "server.key")
TRUST = ("--tls-ca", TLS / "ca.pem")
PAGE = (b"<html>nobody is behind this door</html>", ("Content-Type", "text/html"))
# Nobody listens there. Source: IANA, "discard", port 9.
NOWHERE = "http://127.0.0.1:9"


def failures(answer: Json) -> list[dict[str, str]]:
    return cast("list[dict[str, str]]", answer["failures"])


# IPv6


@pytest.fixture
def ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.usefixtures("ipv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_service_source_and_relay_talk_ipv6(lab: Lab, small: Model, tmp_path: Path, host: str) -> None:
    lab.serve("--host", host)
    assert lab.service.startswith("http://[::1]:")
    source = lab.source(small.folder, "--host", host)
    assert str(source.line()["url"]).startswith("http://[::1]:")
    relay = lab.pull("--serve", "--host", host, "--instance-id", "relay")
    assert cast(Json, relay.line()["pull"])["bytes_peer"] == small.nbytes
    assert source.stop() == 0
    answer = lab.pull("--save", tmp_path / "out").finish().check(0)
    assert answer["sources"] == [{"instance_id": "relay", "rank": 0, "bytes": small.nbytes}]
    check_saved(tmp_path / "out", small.tensors)


@pytest.mark.usefixtures("ipv6")
def test_host_of_all_addresses_takes_both_families(lab: Lab, small: Model) -> None:
    lab.serve("--host", "::", "--token", "t", "--allow-plain-http")
    port = lab.service.rpartition(":")[2]
    for url in (f"http://[::1]:{port}", f"http://127.0.0.1:{port}"):
        assert lab.run("status", "--service", url, "--token", "t", "--json").code == 0
    lab.service = f"http://127.0.0.1:{port}"
    token = ("--token", "t")
    lab.ready_source(small.folder, *token, "--host", "::", "--allow-plain-http", "--port", 0, "--advertise", NOWHERE)
    assert failures(lab.pull(*token, "--checkpoint", small.folder).finish().check(0))[0]["code"] == "source_unreachable"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("status", "--service", "http://[fe80::1%25eth0]:8700"), "zone", id="in a URL"),
        pytest.param(("serve", "--host", "fe80::1%lo", "--port", 0), "zone", id="as an address to bind"),
    ],
)
def test_address_with_a_zone_is_refused_with_its_reason(lab: Lab, arguments: tuple[object, ...], said: str) -> None:
    outcome = lab.run(*arguments, "--json")
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert said in str(outcome.error["detail"])


# Proxies on the way out


@pytest.fixture
def forward() -> Iterator[ForwardProxy]:
    with ForwardProxy() as forward:
        yield forward


def test_pull_goes_through_the_proxy_that_is_named(
    served: Lab, small: Model, tmp_path: Path, forward: ForwardProxy
) -> None:
    url = served.source(small.folder, "--proxy", forward.url).line()["url"]
    answer = served.pull("--proxy", forward.url, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])
    check_saved(tmp_path / "out", small.tensors)
    # In absolute form, for both planes; and nobody went past it.
    assert f"POST {url}/v1/read" in forward.asked
    assert f"POST {served.service}/v1/transfers" in forward.asked


def test_proxy_sees_nothing_of_what_is_on_https(lab: Lab, small: Model, tmp_path: Path, forward: ForwardProxy) -> None:
    lab.serve(*SERVER, "--token", "a-secret")
    flags = (*TRUST, "--token", "a-secret", "--proxy", forward.url)
    url = str(lab.source(small.folder, *SERVER, *flags).line()["url"])
    answer = lab.pull(*flags, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])
    check_saved(tmp_path / "out", small.tensors)
    assert set(forward.asked) == {f"CONNECT {each.removeprefix('https://')}" for each in (url, lab.service)}
    for secret in (b"a-secret", b"Ticket", b"Bearer"):
        assert secret not in forward.heard


def test_pull_tells_the_proxy_who_it_is(served: Lab, small: Model) -> None:
    # Source: RFC 7617, section 2: "Aladdin" with the password "open sesame".
    with ForwardProxy(wanted="Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==") as forward:
        served.ready_source(small.folder)
        named = forward.url.replace("://", "://Aladdin:open%20sesame@")
        answer = served.pull("--proxy", named).finish().check(0)
        assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])
        outcome = served.pull("--proxy", forward.url).finish()
        outcome.check(1)
        assert "407" in str(outcome.error["detail"])


def test_pull_b45_asks_the_environment_when_it_is_told_to(served: Lab, small: Model) -> None:
    served.ready_source(small.folder)
    environment = {"HTTP_PROXY": NOWHERE, "no_proxy": ""}
    outcome = served.pull("--proxy", "env", env=environment).finish()
    outcome.check(1)
    assert outcome.error["code"] == "service_unreachable"
    assert f"proxy {NOWHERE}" in str(outcome.error["detail"])
    around = environment | {"no_proxy": "example.com, 127.0.0.0/8", "WEIGHTWIRE_PROXY": "env"}
    answer = served.pull(env=around).finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        pytest.param("https://proxy:1", "expected http", id="that is itself encrypted"),
        pytest.param("socks5://proxy:1", "expected scheme http", id="that is none"),
        pytest.param("http://me:s3cret@[::1", "Invalid IPv6", id="that is no address"),
    ],
)
def test_proxy_is_refused_with_its_reason(served: Lab, proxy: str, said: str) -> None:
    outcome = served.pull("--proxy", proxy).finish()
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert said in str(outcome.error["detail"])
    assert "s3cret" not in outcome.log + "".join(outcome.lines)


def test_nothing_travels_in_clear_through_a_proxy_unless_that_is_said(lab: Lab) -> None:
    outcome = lab.run("status", "--service", "http://192.0.2.1:8700", "--proxy", NOWHERE, "--json")
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert "unencrypted through proxy" in str(outcome.error["detail"])
    flags = ("--proxy", NOWHERE, "--allow-plain-http")
    assert lab.run("status", "--service", "http://192.0.2.1:8700", *flags, "--json").error["code"] == (
        "service_unreachable"
    )


# Servers in front of a source


def buffered(exchange: Exchange) -> bool:
    """Takes the whole answer before it passes on the first byte."""
    answer = exchange.ask()
    pieces = list(answer.pieces())
    exchange.send(answer.head)
    for piece in pieces:
        exchange.send_body(piece)
    return True


def rechunked(exchange: Exchange) -> bool:
    """Says no length, and cuts the body as it likes."""
    answer = exchange.ask()
    exchange.send(answer.with_header("Content-Length", None).with_header("Transfer-Encoding", "chunked").head)
    for piece in answer.pieces():
        exchange.send_body(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    exchange.send(b"0\r\n\r\n")
    return True


def without_keep_alive(exchange: Exchange) -> bool:
    answer = exchange.ask()
    exchange.send(answer.with_header("Connection", "close").head)
    for piece in answer.pieces():
        exchange.send_body(piece)
    return False


def closing_idle(exchange: Exchange) -> bool:
    """Says nothing about closing, and closes."""
    passed(exchange)
    return False


def without_our_headers(exchange: Exchange) -> bool:
    answer = exchange.ask()
    for name in ("Generation", "Weight-Version", "Manifest", "Request", "Protocol"):
        answer = answer.with_header(f"Weightwire-{name}", None)
    exchange.send(answer.head)
    for piece in answer.pieces():
        exchange.send_body(piece)
    return True


def requests_up_to(nbytes: int) -> Fault:
    def fault(exchange: Exchange) -> bool:
        if len(exchange.request.body) > nbytes:
            return answered("413 Request Entity Too Large", *PAGE)(exchange)
        return passed(exchange)

    return fault


def answers_up_to(nbytes: int, status: str) -> Fault:
    """Takes answers whole, and gives up those that are too long for it."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        if answer.length <= nbytes:
            exchange.send(answer.head)
            for piece in answer.pieces():
                exchange.send_body(piece)
            return True
        answered(status, *PAGE)(exchange)
        return False

    return fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(buffered, id="buffers whole answers"),
        pytest.param(rechunked, id="chunks answers"),
        pytest.param(without_keep_alive, id="turns keep-alive off"),
        pytest.param(closing_idle, id="closes idle connections"),
        pytest.param(answers_up_to(3 * MIB, "502 Bad Gateway"), id="gives up answers of more than 3 MiB"),
        pytest.param(answers_up_to(3 * MIB, "504 Gateway Timeout"), id="has no patience for more than 3 MiB"),
    ],
)
def test_pull_takes_everything_through_a_server_that(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, fault: Fault
) -> None:
    served.ready_source(model.folder, *proxy.flags)
    proxy.always = fault
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (model.nbytes, [])
    check_saved(tmp_path / "out", model.tensors)


@pytest.mark.parametrize("status", ["429 Too Many Requests", "502 Bad Gateway", "504 Gateway Timeout"])
def test_pull_comes_back_after_one_page(served: Lab, proxy: Proxy, small: Model, status: str) -> None:
    served.ready_source(small.folder, *proxy.flags)
    proxy.faults = [answered(status, *PAGE, ("Retry-After", "0"))]
    answer = served.pull().finish().check(0)
    assert (answer["bytes_peer"], answer["failures"]) == (small.nbytes, [])


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        pytest.param(without_our_headers, "protocol_violation", "drops headers", id="drops headers"),
        pytest.param(answered("502 Bad Gateway", *PAGE), "source_unreachable", "502", id="reaches nobody"),
        pytest.param(answered("504 Gateway Timeout", *PAGE), "source_unreachable", "504", id="has no patience"),
        pytest.param(answered("413 Request Entity Too Large", *PAGE), "source_refused", "413", id="takes no body"),
    ],
)
def test_pull_turns_to_disk_with_the_reason_when_a_server_in_between(
    served: Lab, proxy: Proxy, small: Model, tmp_path: Path, fault: Fault, code: str, said: str
) -> None:
    served.ready_source(small.folder, *proxy.flags)
    proxy.always = fault
    answer = served.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, small.nbytes)
    (failure,) = failures(answer)
    assert failure["code"] == code
    assert said in failure["detail"]
    check_saved(tmp_path / "out", small.tensors)


def test_pull_asks_for_less_at_once_where_a_server_takes_only_small_requests(
    served: Lab, proxy: Proxy, tmp_path: Path
) -> None:
    """Every second one of four thousand tensors: as many regions, which no server of 8 KiB takes at once."""
    whole = {f"t{number:04}": content("U8", 256, seed=number) for number in range(4000)}
    wanted = {name: tensor for number, (name, tensor) in enumerate(whole.items()) if number % 2}
    target = Shells.from_tensors({name: torch.zeros(256, dtype=torch.uint8) for name in wanted})
    proxy.always = requests_up_to(8192)
    served.model = "many"
    served.ready_source(write_checkpoint(tmp_path / "many", whole), *proxy.flags)
    with ServiceClient(served.service) as client:
        pulled = pull(client, PullRequest(model="many", shells=target))
    assert pulled.result.failures == ()
    assert all(target.tensor(name).numpy().tobytes() == tensor.data for name, tensor in wanted.items())
    sizes = [len(read.body) for read in proxy.reads]
    # What it has learnt, each stream remembers: two find the limit out, and then nothing is too large any more.
    assert max(sizes) > 8192
    assert all(size <= 8192 for size in sizes[-4:])
    assert sum(size > 8192 for size in sizes) <= 2 * 3
