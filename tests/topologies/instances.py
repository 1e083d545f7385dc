"""Ranks that are loaded from disk, served over real sockets, and pulled."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from weightwire.transfer.control import Control
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.models import BuildOptions
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, issue_ticket
from weightwire.transfer.tree_shells import build_rank
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Endpoint

KEY = b"k" * 32
VERSION = 1
POISON = 0xAB
PATIENCE_S = 60.0


def load_rank(folder: Path, topology: Topology, rank: int, build: BuildOptions | None = None) -> Shells:
    """One rank as the disk pipeline makes it."""
    request = TreeRequest(folder=folder, topology=topology, build=build or BuildOptions())
    with TreeLoader(request) as loader:
        load = loader.load(rank, Control(deadline_s=PATIENCE_S))
        return loader.shells(load, loader.identity(rank, model="m"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A source instance: one process, one port, all ranks."""

    server: SourceServer
    identity: SourceIdentity
    manifests: tuple[Manifest, ...]

    def origins(self, target_rank: int) -> Origins:
        """What a service would grant to a target rank: every rank of the instance."""
        endpoints = [self._endpoint(manifest, target_rank) for manifest in self.manifests]
        return Origins(endpoints=endpoints, manifests={manifest.digest: manifest for manifest in self.manifests})

    def _endpoint(self, manifest: Manifest, target_rank: int) -> Endpoint:
        ticket = Ticket(
            transfer_id="t",
            source_instance=self.identity.instance_id,
            source_rank=manifest.rank,
            source_generation=self.identity.generation,
            target_instance="target",
            target_rank=target_rank,
            weight_version=VERSION,
            expires_at=time.time() + 3600,
        )
        return Endpoint(
            instance_id=self.identity.instance_id,
            rank=manifest.rank,
            generation=self.identity.generation,
            weight_version=VERSION,
            url=self.server.url,
            manifest=manifest.digest,
            ticket=issue_ticket(KEY, ticket),
            target_instance="target",
            target_rank=target_rank,
        )


def serve_ranks(shells: dict[int, Shells], stack: contextlib.ExitStack) -> Instance:
    """Serve loaded ranks until the stack is left."""
    identity = SourceIdentity(instance_id="source", generation=7)
    sources = Source.of_ranks(identity, sorted(shells))
    manifests = []
    for rank, held in sorted(shells.items()):
        manifests.append(held.seal())
        sources[rank].grant_access(Access(ticket_key=KEY))
        sources[rank].publish(held, weight_version=VERSION)
    server = stack.enter_context(SourceServer(sources))
    return Instance(server=server, identity=identity, manifests=tuple(manifests))


def pull_rank(
    instance: Instance, topology: Topology, rank: int, build: BuildOptions | None = None
) -> tuple[Shells, FillResult]:
    """A target rank that knows of the model what the source tells, and has no disk."""
    told = instance.manifests[0]
    identity = ModelIdentity(
        model="m", revision=told.revision, config=told.config, checkpoint=told.checkpoint, topology=topology, rank=rank
    )
    _, layout = build_rank(identity, build)
    shells = Shells.from_layout(layout.layout)
    shells.fill(POISON)
    result = fill(
        shells,
        instance.origins(rank),
        control=Control(deadline_s=PATIENCE_S),
        options=PullOptions(streams=1),
    )
    return shells, result


def differing(pulled: Shells, loaded: Shells) -> list[str]:
    """Names of the tensors that are not, bit for bit, the same on both sides."""
    ours, theirs = dict(pulled.tensors()), dict(loaded.tensors())
    return [
        name
        for name in dict.fromkeys((*ours, *theirs))
        if name not in ours
        or name not in theirs
        or ours[name].shape != theirs[name].shape
        or not torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))
    ]
