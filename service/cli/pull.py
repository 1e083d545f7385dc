"""`weightwire pull`: a new instance takes its weights, whole or as ranks of a topology."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weightwire.service.cli import flags, render
from weightwire.service.cli.flags import Connection, advertised_pin, unexpected_policy
from weightwire.service.cli.output import byte_bar, fail, print_json, rank_bars, start_logging, stdout
from weightwire.service.cli.pull_json import failed_json, pulled_json
from weightwire.service.cli.rates import own_rate
from weightwire.service.cli.serving import DataPlane, DataServer, serve_until_signal
from weightwire.service.cli.signals import on_signal
from weightwire.service.cli.topology import (
    build_options,
    check_can_be_found,
    check_unused,
    chosen_epoch,
    chosen_ranks,
    chosen_topology,
)
from weightwire.service.client.api import Grant
from weightwire.service.client.pulls import Pulled, PullEvents, PullRequest
from weightwire.service.client.target import Target
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import TransferError
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.plan import Plan
from weightwire.transfer.saving import check_destination, save_rank
from weightwire.transfer.session import RankProgress
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.stream import Timeouts


def pull(
    *,
    model: flags.Model,
    service: flags.Service = flags.DEFAULT_SERVICE,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTWIRE_CHECKPOINT", help="Local checkpoint for what no source holds.", show_default=False
        ),
    ] = None,
    tp: flags.Tp = None,
    pp: flags.Pp = None,
    ep: flags.Ep = None,
    rank: flags.Rank = "all",
    vocab_multiple: flags.VocabMultiple = None,
    pad_heads: flags.PadHeads = False,
    expert_map: flags.ExpertMap = None,
    unexpected: flags.Unexpected = "refuse",
    save: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rank-<global rank>.safetensors, written once everything is verified.", show_default=False
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Be a source afterwards, until stopped.")] = False,
    no_relay: Annotated[
        bool, typer.Option("--no-relay", help="With --serve: serve nothing before everything is there.")
    ] = False,
    revision: flags.RevisionWanted = None,
    instance_id: flags.InstanceId = None,
    epoch: flags.Epoch = None,
    streams: Annotated[
        int, typer.Option(envvar="WEIGHTWIRE_STREAMS", help="Connections of each rank to each source.", min=1, max=64)
    ] = 2,
    min_rate: flags.MinRate = 65536,
    stall_window_s: flags.StallWindowS = 1.5,
    staging: flags.StagingName = "auto",
    deadline_s: flags.DeadlineS = 3600.0,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 0,
    advertise: flags.Advertise = None,
    advertise_pin: flags.AdvertisePin = None,
    max_readers: flags.MaxReaders = 64,
    max_rate: flags.MaxRate = None,
    server_process: flags.ServerProcess = False,
    drain_s: flags.DrainS = 10.0,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    socket_buffer: flags.SocketBuffer = None,
    first_byte_s: flags.FirstByteS = 0.0,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Fill a new instance: from running ones what they hold, from the local checkpoint what is missing.

    Without a topology: every tensor whole, by its checkpoint name. With --tp, --pp or --ep: the parameters of one rank
    or of all, by the names that engines give them; sources may have any other topology, or none. Every chunk and every
    tensor is verified before the instance is ready.
    """
    start_logging(log_level)
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy, socket_buffer=socket_buffer,
    )  # fmt: skip
    run = _Run(control=Control(deadline_s=deadline_s), as_json=json)
    try:
        topology = chosen_topology(tp=tp, pp=pp, ep=ep)
        build = build_options(vocab_multiple=vocab_multiple, pad_heads=pad_heads, expert_map=expert_map)
        if topology is None:
            check_unused(rank=rank, options=build)
        world = topology or Topology()
        ranks = chosen_ranks(rank, world)
        check_can_be_found(instance_id, ranks=ranks, topology=world)
        plane = DataPlane(
            instance_id=instance_id or f"target-{uuid.uuid4().hex[:12]}", ranks=ranks,
            epoch=chosen_epoch(epoch, ranks=ranks, topology=world), host=host, port=port, advertise=advertise,
            limits=SourceLimits(max_readers=max_readers, max_bytes_per_s=own_rate(max_rate)),
            tls=(tls_cert, tls_key), allow_plain_http=allow_plain_http, drain_s=drain_s, server_process=server_process,
            pin=advertised_pin(advertise_pin, advertise=advertise, tls_cert=tls_cert), sockets=connection.sockets,
        )  # fmt: skip
        policy = unexpected_policy(unexpected)
        if save is not None:
            check_destination(save, checkpoint=checkpoint)
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(plane.open()) if serve else None
            client = stack.enter_context(connection.client())
            disk = stack.enter_context(Checkpoint.open(checkpoint)) if checkpoint else None
            target = Target(
                client, plane.identity, ranks=plane.ranks, epoch=plane.epoch,
                sources=server.sources if server else None, url=plane.binding(server).url,
                certificate_sha256=plane.binding(server).certificate_sha256,
            )  # fmt: skip
            stack.callback(target.leave)
            options = PullOptions(
                streams=streams, min_rate_bytes_per_s=min_rate, stall_window_s=stall_window_s, tls=connection.trust(),
                network=connection.network(), timeouts=Timeouts(first_byte_s=first_byte_s),
            )  # fmt: skip
            request = PullRequest(
                model=model, revision=revision, checkpoint=disk, topology=topology, build=build, unexpected=policy,
                deadline_s=max(deadline_s, 1.0), options=options, relay=not no_relay,
                staging=flags.staging_of(staging),
            )  # fmt: skip
            pulled = run.pull(target, request)
            if save is not None:
                run.save(pulled, save)
            run.end(target, pulled, server)
            return 0
    except TransferError as error:
        return fail(error, as_json=json, facts=run.failure(error))


@dataclass(kw_only=True)
class _Run:
    """One run of the command: what happened so far, for the JSON that also a failure prints."""

    control: Control
    as_json: bool
    began: float = field(default_factory=time.monotonic)
    progress: dict[int, RankProgress] = field(default_factory=dict)
    transfer_id: str | None = None
    moved: Callable[[int, RankProgress], None] = field(default=lambda _rank, _progress: None)

    def pull(self, target: Target, request: PullRequest) -> Pulled:
        with on_signal(lambda: self.control.cancel("stopped by a signal")), self._bars(len(target.ranks)) as events:
            pulled = target.pull(request, self.control, events)
            self.transfer_id = pulled.transfer_id
            return pulled

    def save(self, pulled: Pulled, folder: Path) -> None:
        """Write a file for each rank; a signal stops it, the deadline of the transfer does not."""
        stop = Control(deadline_s=math.inf)
        with on_signal(lambda: stop.cancel("stopped by a signal")):
            for each in pulled.ranks:
                total = each.shells.manifest.total_bytes
                with byte_bar("saving", total=total, enabled=not self.as_json, rank=each.rank) as saved:
                    save_rank(each.shells, folder, partial(_advance, stop, saved))

    def end(self, target: Target, pulled: Pulled, server: DataServer | None) -> None:
        """Tell how it went, and serve if there is a server."""
        if server is None:
            self._tell(pulled)
            return
        membership = target.serve(pulled)
        if not self.as_json:
            self._tell(pulled)
        facts: dict[str, object] = {"pull": pulled_json(pulled)}
        serve_until_signal(membership, server, what="ready", as_json=self.as_json, facts=facts)

    def failure(self, error: TransferError) -> dict[str, object]:
        seconds = time.monotonic() - self.began
        return failed_json(error, self.progress, transfer_id=self.transfer_id, seconds=seconds)

    @contextlib.contextmanager
    def _bars(self, num_ranks: int) -> Iterator[PullEvents]:
        with contextlib.ExitStack() as stack:
            plans = list[tuple[Plan, Manifest]]()

            def planned(plan: Plan, layout: Manifest) -> None:
                plans.append((plan, layout))
                if self.as_json or len(plans) < num_ranks:
                    return
                stdout.print(render.plan_table(plans))
                # The bars come after the plan, or they would draw over it.
                self.moved = stack.enter_context(rank_bars("pulling", enabled=True))

            yield PullEvents(on_grant=self._granted, on_plan=planned, on_progress=self._moved)

    def _granted(self, grant: Grant) -> None:
        self.transfer_id = grant.transfer_id

    def _moved(self, rank: int, progress: RankProgress) -> None:
        self.progress[rank] = progress
        self.moved(rank, progress)

    def _tell(self, pulled: Pulled) -> None:
        if self.as_json:
            print_json(pulled_json(pulled))
        else:
            stdout.print(render.result_table(pulled))


def _advance(stop: Control, saved: Callable[[int], None], nbytes: int) -> None:
    stop.check()
    saved(nbytes)
