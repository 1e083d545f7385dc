"""Targets that serve what they receive, as a library: what they take over, what they refuse, and what is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.faults.checkpoints import DECODER, decoder, write_checkpoint
from tests.faults.conftest import reserve
from tests.faults.processes import wait_until
from tests.faults.proxy import Proxy
from tests.transfer.conftest import PATIENCE_S, filled
from weightwire.service.client import PullEvents, PullRequest, ServiceClient
from weightwire.service.client.api import RankBinding
from weightwire.service.client.membership import Membership
from weightwire.service.client.pulls import Pulled
from weightwire.service.client.target import Target
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, FencedError, IntegrityError, SourceBusyError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Topology
from weightwire.transfer.session import RankProgress
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Timeouts

__all__ = ["reserve"]

CHUNK_BYTES = 1 << 14
IDENTITY = ModelIdentity(model="org/model", revision="r1")
TENSORS = {f"layers.{number}": filled("int16", (64, 512), seed=number) for number in range(16)}
# One stream, so that what the proxy holds back is the end; patient, since it may hold it for long.
OPTIONS = PullOptions(streams=1, timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S), stall_window_s=PATIENCE_S)
TP2 = Topology(tp=2)


@pytest.fixture
def client() -> Iterator[ServiceClient]:
    with running_service(Settings(port=0)) as url, ServiceClient(url) as client:
        yield client


@pytest.fixture
def proxy(reserve: Callable[[], int]) -> Iterator[Proxy]:
    with Proxy(upstream_port=reserve()) as proxy:
        yield proxy


@contextlib.contextmanager
def serving_behind(proxy: Proxy, client: ServiceClient, *ranks: Shells) -> Iterator[None]:
    """A source `s` of these shells, which targets reach through the proxy."""
    manifests = [shells.seal() for shells in ranks]
    first = manifests[0]
    sources = Source.of_ranks(SourceIdentity(instance_id="s"), [manifest.rank for manifest in manifests])
    for shells, source in zip(ranks, sources.values(), strict=True):
        source.publish(shells, weight_version=3)
    bindings = [
        RankBinding(instance_id="s", generation=source.identity.generation, rank=rank, url=proxy.url)
        for rank, source in sources.items()
    ]
    with (
        SourceServer(sources, port=int(proxy.flags[-1])),
        Membership(
            client, bindings, model=first.model, revision=first.revision, topology=first.topology, source=sources
        ) as membership,
    ):
        for manifest in manifests:
            membership.publish(manifest, weight_version=3)
        yield


@pytest.fixture
def origin(client: ServiceClient, proxy: Proxy) -> Iterator[Shells]:
    """What a source of one rank holds."""
    shells = Shells.from_tensors(TENSORS, IDENTITY, chunk_bytes=CHUNK_BYTES)
    with serving_behind(proxy, client, shells):
        yield shells


class Joiner:
    """A target in this process, with a data plane."""

    def __init__(self, client: ServiceClient, name: str, ranks: Sequence[int] = (0,)) -> None:
        identity = SourceIdentity(instance_id=name, rank=ranks[0])
        self.control = Control(deadline_s=PATIENCE_S)
        self.server = SourceServer(Source.of_ranks(identity, ranks))
        self.server.start()
        self.target = Target(client, identity, ranks=ranks, epoch=1, sources=self.server.sources, url=self.server.url)
        self.granted = False
        self.bytes_peer = 0
        self._pool = ThreadPoolExecutor(1)

    def pull(self, request: PullRequest) -> Future[Pulled]:
        events = PullEvents(on_grant=lambda _: setattr(self, "granted", True), on_progress=self._moved)
        pulling = self._pool.submit(self.target.pull, request, self.control, events)
        wait_until(lambda: self.granted or pulling.done())
        return pulling

    def _moved(self, _: int, progress: RankProgress) -> None:
        self.bytes_peer = progress.bytes_peer

    def is_ready(self) -> bool:
        return httpx.get(f"{self.server.url}/readyz").status_code == 200

    def close(self) -> None:
        self.control.cancel("the test is over")
        self._pool.shutdown()
        self.target.leave()
        self.server.stop(drain_s=0)


Join = Callable[..., Joiner]


@pytest.fixture
def join(client: ServiceClient, proxy: Proxy) -> Iterator[Join]:
    with contextlib.ExitStack() as stack:

        def make(name: str, **facts: Sequence[int]) -> Joiner:
            joiner = Joiner(client, name, **facts)
            stack.callback(joiner.close)
            # First of all, or a joiner waits for what is held back.
            stack.callback(proxy.release)
            return joiner

        yield make


def shells_like(origin: Shells) -> Shells:
    """Shells that a caller built, whose memory a test can reach."""
    shells = Shells.allocate(origin.manifest)
    shells.fill(0xAB)
    return shells


def memory_of(shells: Shells) -> bytes:
    return b"".join(bytes(view) for view in shells.views(0, shells.manifest.total_bytes))


def given(pulled: Pulled) -> dict[str, int]:
    return {source.instance_id: source.nbytes for source in pulled.sources}


def test_relay_serves_under_the_manifest_of_its_source_and_is_ready_when_it_has_everything(
    origin: Shells, proxy: Proxy, join: Join
) -> None:
    proxy.hold_after(origin.manifest.total_bytes // 2)
    a, b = join("a"), join("b")
    request = PullRequest(model="org/model", options=OPTIONS)
    first = a.pull(request)
    proxy.wait_until_held()
    second = b.pull(request)
    wait_until(lambda: b.bytes_peer > 0)
    assert not a.is_ready()
    proxy.release()
    pulled = first.result(PATIENCE_S)
    assert given(second.result(PATIENCE_S)) == {"a": origin.manifest.total_bytes}
    # In place: no digest was computed again.
    assert a.is_ready()
    assert pulled.shells.manifest == origin.manifest
    a.target.serve(pulled)
    assert a.is_ready()
    assert memory_of(second.result().shells) == memory_of(origin)


def test_damage_in_the_memory_of_a_relay_is_caught_by_the_digests_of_the_origin(
    origin: Shells, proxy: Proxy, join: Join
) -> None:
    proxy.hold_after(origin.manifest.total_bytes // 2)
    a, b = join("a"), join("b")
    broken = shells_like(origin)
    first = a.pull(PullRequest(model="org/model", shells=broken, options=OPTIONS))
    proxy.wait_until_held()
    wait_until(lambda: bytes(broken.views(0, 2 * CHUNK_BYTES)[0]) == memory_of(origin)[: 2 * CHUNK_BYTES])
    broken.views(0, CHUNK_BYTES)[0][7] ^= 1
    second = b.pull(PullRequest(model="org/model", options=OPTIONS))
    proxy.release()
    pulled = second.result(PATIENCE_S)
    assert memory_of(pulled.shells) == memory_of(origin)
    assert [(failure.instance_id, failure.code) for failure in pulled.failures] == [("a", "checksum_mismatch")]
    assert given(pulled)["s"] >= CHUNK_BYTES
    # Whoever wants to know looks again before serving.
    with pytest.raises(IntegrityError, match="changed in memory after it was verified"):
        a.target.serve(first.result(PATIENCE_S), hash_again=True)


def test_target_that_will_hold_something_else_refuses_and_serves_when_it_is_filled(
    origin: Shells, proxy: Proxy, join: Join
) -> None:
    proxy.hold_after(CHUNK_BYTES)
    a, b = join("a"), join("b")
    turned = {name: torch.empty_like(tensor) for name, tensor in reversed(TENSORS.items())}
    first = a.pull(PullRequest(model="org/model", shells=Shells.from_tensors(turned, IDENTITY), options=OPTIONS))
    wait_until(lambda: refuses(a))
    second = b.pull(PullRequest(model="org/model", options=OPTIONS))
    proxy.wait_until_held()
    proxy.release()
    pulled = second.result(PATIENCE_S)
    assert [(failure.instance_id, failure.code) for failure in pulled.failures] == [("a", "source_fenced")]
    assert given(pulled) == {"s": origin.manifest.total_bytes}
    assert not a.is_ready()
    a.target.serve(first.result(PATIENCE_S))
    assert a.is_ready()


def refuses(joiner: Joiner) -> bool:
    """Whether it says for good that it serves nobody now."""
    try:
        with joiner.server.source.reading():
            return False
    except FencedError:
        return True
    except SourceBusyError:
        return False


def test_target_that_is_stopped_refuses_from_then_on(origin: Shells, proxy: Proxy, join: Join) -> None:
    proxy.hold_after(CHUNK_BYTES)
    a = join("a")
    pulling = a.pull(PullRequest(model="org/model", options=OPTIONS))
    proxy.wait_until_held()
    a.control.cancel()
    with pytest.raises(CancelledError):
        pulling.result(PATIENCE_S)
    assert refuses(a)
    with pytest.raises(FencedError, match="its own transfer has ended"), a.server.source.reading():
        pass


def test_target_that_is_told_not_to_relay_publishes_nothing_before_the_end(
    origin: Shells, proxy: Proxy, join: Join
) -> None:
    proxy.hold_after(CHUNK_BYTES)
    a = join("a")
    pulling = a.pull(PullRequest(model="org/model", options=OPTIONS, relay=False))
    proxy.wait_until_held()
    assert a.server.source.publication is None
    proxy.release()
    pulled = pulling.result(PATIENCE_S)
    assert a.server.source.publication is None
    a.target.serve(pulled)
    assert a.is_ready()


def test_sources_of_a_transfer_are_told_of_while_it_runs(
    client: ServiceClient, origin: Shells, proxy: Proxy, join: Join
) -> None:
    proxy.hold_after(origin.manifest.total_bytes // 2)
    a, b = join("a"), join("b")
    request = PullRequest(model="org/model", options=OPTIONS)
    for joiner in (a, b):
        joiner.pull(request)

    def told() -> bool:
        [shown] = [each for each in client.transfers() if each["target_instance_id"] == "b"]
        sources = shown["sources"]
        assert isinstance(sources, list)
        return shown["state"] == "receiving" and [(each["instance_id"], each["bytes"] > 0) for each in sources] == [
            ("a", True),
            ("s", False),
        ]

    wait_until(told)


def test_ranks_relay_to_their_twins(client: ServiceClient, proxy: Proxy, join: Join, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder(), DECODER)
    with TreeLoader(TreeRequest(folder=folder, topology=TP2)) as loader:
        shells = [
            loader.shells(loader.load(rank, Control(deadline_s=60)), loader.identity(rank, model="org/ranks"))
            for rank in range(2)
        ]
    with serving_behind(proxy, client, *shells):
        proxy.hold_after(1)
        request = PullRequest(model="org/ranks", topology=TP2, options=OPTIONS)
        a, b = join("a", ranks=(0, 1)), join("b", ranks=(0, 1))
        first = a.pull(request)
        proxy.wait_until_held()
        second = b.pull(request)
        proxy.release()
        for pulled in (first.result(PATIENCE_S), second.result(PATIENCE_S)):
            for rank, expected in zip(pulled.ranks, shells, strict=True):
                assert rank.shells.manifest == expected.manifest
                assert memory_of(rank.shells) == memory_of(expected)
    taken = {
        (source.instance_id, source.rank, rank.rank) for rank in second.result().ranks for source in rank.result.sources
    }
    assert taken == {("a", 0, 0), ("a", 1, 1)}
