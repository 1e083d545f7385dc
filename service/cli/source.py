"""`weightwire source`: loads a checkpoint and serves it, whole or as ranks of a topology."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection, advertised_pin, unexpected_policy
from weightwire.service.cli.output import byte_bar, human_bytes, progress_bar, start_logging
from weightwire.service.cli.rates import own_rate
from weightwire.service.cli.serving import DataPlane, DataServer, serve_until_signal
from weightwire.service.cli.topology import (
    build_options,
    check_can_be_found,
    check_unused,
    chosen_epoch,
    chosen_ranks,
    chosen_topology,
)
from weightwire.service.client.membership import Membership
from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CheckpointNotFoundError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_disk import identity_of, load_checkpoint
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models.registry import plan_memory
from weightwire.transfer.shells import Shells
from weightwire.transfer.staging import Staging
from weightwire.transfer.wire.limits import SourceLimits

_LOAD_DEADLINE_S = 24 * 3600.0


def source(
    checkpoint_dir: Annotated[
        Path, typer.Argument(help="Folder with safetensors files and config.json, or one .safetensors file.")
    ],
    *,
    model: flags.Model,
    service: flags.Service = flags.DEFAULT_SERVICE,
    tp: flags.Tp = None,
    pp: flags.Pp = None,
    ep: flags.Ep = None,
    rank: flags.Rank = "all",
    vocab_multiple: flags.VocabMultiple = None,
    pad_heads: flags.PadHeads = False,
    expert_map: flags.ExpertMap = None,
    unexpected: flags.Unexpected = "refuse",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out tensors whose checkpoint name matches this pattern (*, ?). May be repeated."),
    ] = None,
    revision: flags.Revision = None,
    weight_version: Annotated[
        int, typer.Option(help="Version of the weights; the highest one that is served wins.", min=0)
    ] = 1,
    instance_id: flags.InstanceId = None,
    epoch: flags.Epoch = None,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 0,
    advertise: flags.Advertise = None,
    advertise_pin: flags.AdvertisePin = None,
    max_readers: flags.MaxReaders = 64,
    staging: flags.StagingName = "auto",
    max_rate: flags.MaxRate = None,
    server_process: flags.ServerProcess = False,
    drain_s: flags.DrainS = 10.0,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    socket_buffer: flags.SocketBuffer = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> None:
    """Load a checkpoint into memory and serve it to new instances, until stopped.

    Without a topology: every tensor whole, by its checkpoint name. With --tp, --pp or --ep: the parameters of one rank
    or of all, by the names that engines give them, cut, fused and padded; ranks of one process share its port.
    """
    start_logging(log_level)
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy, socket_buffer=socket_buffer,
    )  # fmt: skip
    topology = chosen_topology(tp=tp, pp=pp, ep=ep)
    world = topology or Topology()
    options = build_options(vocab_multiple=vocab_multiple, pad_heads=pad_heads, expert_map=expert_map)
    if topology is None:
        check_unused(rank=rank, options=options)
    ranks = chosen_ranks(rank, world)
    check_can_be_found(instance_id, ranks=ranks, topology=world)
    plane = DataPlane(
        instance_id=instance_id or f"source-{uuid.uuid4().hex[:12]}", ranks=ranks,
        epoch=chosen_epoch(epoch, ranks=ranks, topology=world), host=host, port=port, advertise=advertise,
        limits=SourceLimits(max_readers=max_readers, max_bytes_per_s=own_rate(max_rate)), tls=(tls_cert, tls_key),
        allow_plain_http=allow_plain_http, server_process=server_process, drain_s=drain_s,
        pin=advertised_pin(advertise_pin, advertise=advertise, tls_cert=tls_cert), sockets=connection.sockets,
    )  # fmt: skip
    policy = unexpected_policy(unexpected)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(checkpoint_dir))
        identity = identity_of(checkpoint, model=model, revision=revision)
        work = _Work(
            identity=identity,
            control=Control(deadline_s=_LOAD_DEADLINE_S),
            shows_progress=not json,
            staging=flags.staging_of(staging),
            shared=server_process,
        )
        if topology is None:
            loads = work.plain(checkpoint, exclude or ())
        else:
            request = TreeRequest(
                folder=checkpoint_dir, topology=topology, build=options, unexpected=policy, exclude=exclude or ()
            )
            loads = work.ranks(stack.enter_context(_checked(request, ranks)), ranks)
        client = stack.enter_context(connection.client())
        server = stack.enter_context(plane.open())
        membership = Membership(
            client, plane.bindings(server), model=model, revision=identity.revision, topology=world,
            source=server.sources,
        )  # fmt: skip
        # First, so that a name or address that the service does not take is told before anything is loaded.
        with membership:
            what = work.publish(loads, server, membership, weight_version=weight_version)
            serve_until_signal(membership, server, what=what, as_json=json)


def _checked(request: TreeRequest, ranks: Sequence[int]) -> TreeLoader:
    """A loader of ranks that the model can have, and that fit into memory together.

    Raises:
        LoadError: If there is no known model, or not in this topology.
        AdmissionError: If there is not enough memory.
    """
    loader = TreeLoader(request)
    needed = sum(plan_memory(loader.config, request.topology, rank, request.build).shells_bytes for rank in ranks)
    check_memory(needed, purpose=f"{len(ranks)} ranks of {request.topology}")
    return loader


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """From a checkpoint to what is served.

    Attributes:
        identity: What the shells are a copy of.
        control: Of the loading.
        shows_progress: Whether bars are drawn.
        staging: How the shells are reached.
        shared: Whether another process is to serve it.
    """

    identity: ModelIdentity
    control: Control
    shows_progress: bool
    staging: Staging
    shared: bool = False

    def plain(self, checkpoint: Checkpoint, exclude: Sequence[str]) -> Iterator[Shells]:
        """Every tensor whole, by its checkpoint name."""
        with progress_bar("loading", enabled=self.shows_progress) as moved:
            shells, _ = load_checkpoint(
                checkpoint, self.identity, control=self.control, exclude=exclude, on_progress=moved, shared=self.shared
            )
        yield shells

    def ranks(self, loader: TreeLoader, ranks: Sequence[int]) -> Iterator[Shells]:
        """One rank after the other, each when it is asked for."""
        for rank in ranks:
            with progress_bar("loading", enabled=self.shows_progress, rank=rank) as moved:
                found = loader.load(rank, self.control, on_progress=moved)
            model, revision = self.identity.model, self.identity.revision
            yield loader.shells(found, loader.identity(rank, model=model, revision=revision))

    def publish(
        self, loads: Iterator[Shells], server: DataServer, membership: Membership, *, weight_version: int
    ) -> str:
        """Serve each rank as soon as it is loaded; returns in words what is served.

        Raises:
            CheckpointNotFoundError: If no rank holds anything.
        """
        began = time.monotonic()
        tensors, nbytes = 0, 0
        for loaded in loads:
            shells = loaded.through(self.staging)
            total, rank = shells.manifest.total_bytes, shells.manifest.rank
            with byte_bar("hashing", total=total, enabled=self.shows_progress, rank=rank) as hashed:
                manifest = shells.seal(hashed)
            server.sources[rank].publish(shells, weight_version=weight_version)
            membership.publish(manifest, weight_version=weight_version)
            tensors, nbytes = tensors + len(manifest.tensors), nbytes + total
        if not tensors:
            raise CheckpointNotFoundError(f"model {self.identity.model!r}: no tensor is left to serve")
        ranks = f" as {len(server.sources)} ranks" if len(server.sources) > 1 else ""
        return (
            f"{tensors} tensors, {human_bytes(nbytes)} of [bold]{escape(self.identity.model)}[/] "
            f"loaded{ranks} in {time.monotonic() - began:.1f} s"
        )
