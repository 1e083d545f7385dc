"""A clock that tests turn by hand, manifests, instances, and the application without a socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import httpx
import pytest

from weightwire.service.app import create_app
from weightwire.service.instances import Instance
from weightwire.service.manifests import Manifests
from weightwire.service.registry import Announcement, RankClaim, Registration, Registry
from weightwire.service.settings import Settings
from weightwire.service.store import MemoryStore, Store
from weightwire.service.transfers import Transfers
from weightwire.transfer.manifest import Manifest, TensorEntry, Topology

MODEL = "org/name"
REVISION = "r1"


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def make_manifest(
    *,
    model: str = MODEL,
    revision: str = REVISION,
    topology: Topology | None = None,
    rank: int = 0,
    names: tuple[str, ...] = ("a", "b"),
    dtype: str = "float32",
) -> Manifest:
    """A manifest of tensors of four elements, each in a storage of its own."""
    itemsize = {"float32": 4, "float16": 2}[dtype]
    return Manifest(
        model=model,
        revision=revision,
        topology=topology or Topology(),
        rank=rank,
        storages=(4 * itemsize,) * len(names),
        tensors=tuple(
            TensorEntry(name=name, dtype=dtype, shape=(4,), strides=(1,), storage=number, offset=0, layout="plain")
            for number, name in enumerate(names)
        ),
    )


class Fleet:
    """Instances of one model in a registry, in as few words as possible."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.clock = clock
        self.manifests = Manifests(store, clock=clock)
        self.registry = Registry(store, self.manifests, clock=clock, lease_s=15.0, resolve=lambda host: [])
        self.transfers = Transfers(store, clock=clock)

    def register(
        self,
        instance_id: str,
        *,
        epoch: int = 1,
        generation: int = 1,
        ranks: tuple[int, ...] | None = None,
        topology: Topology | None = None,
        url: str | None = "http://10.0.0.1:7000",
        model: str = MODEL,
        revision: str | None = REVISION,
        lease_s: float | None = None,
    ) -> Instance:
        topology = topology or Topology()
        numbers = tuple(range(topology.world_size)) if ranks is None else ranks
        return self.registry.register(
            Registration(
                instance_id=instance_id,
                model=model,
                revision=revision,
                epoch=epoch,
                topology=topology,
                ranks=tuple(RankClaim(rank=rank, generation=generation, url=url) for rank in numbers),
                lease_s=lease_s,
            )
        )

    def publish(
        self,
        instance_id: str,
        rank: int = 0,
        *,
        epoch: int = 1,
        generation: int = 1,
        weight_version: int = 0,
        manifest: Manifest | None = None,
    ) -> bool:
        manifest = manifest or make_manifest(topology=self.registry.instance(instance_id).topology, rank=rank)
        announcement = Announcement(
            epoch=epoch,
            generation=generation,
            weight_version=weight_version,
            digest=manifest.digest,
            manifest=manifest,
        )
        return self.registry.publish(instance_id, rank, announcement)

    def source(
        self,
        instance_id: str,
        *,
        topology: Topology | None = None,
        weight_version: int = 0,
        revision: str = REVISION,
        names: tuple[str, ...] = ("a", "b"),
    ) -> None:
        """A complete source."""
        instance = self.register(instance_id, topology=topology, revision=revision)
        for rank in range(instance.topology.world_size):
            manifest = make_manifest(revision=revision, topology=instance.topology, rank=rank, names=names)
            self.publish(instance_id, rank, weight_version=weight_version, manifest=manifest)


class Api:
    """The application, called without a socket; `peer` is the address that it sees."""

    def __init__(self, runner: asyncio.Runner, settings: Settings, *, store: Store, clock: Clock, peer: str) -> None:
        self._runner = runner
        self.app = create_app(settings, store=store, clock=clock)
        self._peer = peer

    def __call__(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        return self._runner.run(self._request(method, path, body=body, content=content, headers=headers))

    async def _request(
        self, method: str, path: str, *, body: object, content: bytes | None, headers: Mapping[str, str] | None
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, client=(self._peer, 40000))
        if body is not None:
            content = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.request(method, path, content=content, headers=headers)

    def register(self, instance_id: str = "s1", **fields: object) -> httpx.Response:
        return self("PUT", f"/v1/instances/{instance_id}", body=registration(**fields))

    def publish(self, manifest: Manifest, instance_id: str = "s1", **fields: object) -> httpx.Response:
        body = {
            "epoch": 1,
            "generation": 1,
            "weight_version": 0,
            "digest": manifest.digest,
            "manifest": json.loads(manifest.text),
        } | fields
        return self("PUT", f"/v1/instances/{instance_id}/ranks/{manifest.rank}/manifest", body=body)

    def grant(self, **fields: object) -> httpx.Response:
        """A transfer to `t1`, which is registered first."""
        self.register("t1", ranks=[{"rank": 0, "generation": 1, "url": None}]).raise_for_status()
        return self("POST", "/v1/transfers", body=transfer_request(**fields))


def registration(**fields: object) -> dict[str, object]:
    """The body that registers rank 0 of one, with some fields replaced."""
    return {
        "model": MODEL,
        "revision": REVISION,
        "epoch": 1,
        "topology": {},
        "ranks": [{"rank": 0, "generation": 1, "url": "http://127.0.0.1:7000"}],
        "lease_s": None,
    } | fields


def transfer_request(**fields: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "revision": None,
        "target": {"instance_id": "t1", "epoch": 1, "ranks": [{"rank": 0, "generation": 1}]},
        "topology": {},
    } | fields


def progress(state: str = "receiving", *, total: int = 32, peer: int = 0, disk: int = 0, **fields: object) -> object:
    """The body of a progress report."""
    return {
        "generation": 1,
        "state": state,
        "bytes_total": total,
        "bytes_peer": peer,
        "bytes_disk": disk,
    } | fields


MakeApi: TypeAlias = Callable[..., Api]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(MemoryStore(), clock)


@pytest.fixture
def make_api(clock: Clock) -> Iterator[MakeApi]:
    """Makes applications; settings are those of a test service, with some fields replaced."""
    with asyncio.Runner() as runner:

        def make(*, peer: str = "127.0.0.1", store: Store | None = None, **fields: object) -> Api:
            settings = Settings.model_validate({"port": 0} | fields)
            return Api(runner, settings, store=store or MemoryStore(), clock=clock, peer=peer)

        yield make


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests decides nothing."""
    for name in list(os.environ):
        if name.upper().startswith("WEIGHTWIRE_"):
            monkeypatch.delenv(name)
