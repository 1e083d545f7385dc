"""`weightwire pull`: a new instance takes its weights."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from weightwire.service.cli import flags, render
from weightwire.service.cli.flags import Connection, server_context
from weightwire.service.cli.output import byte_bar, fail, print_json, progress_bar, start_logging, stdout
from weightwire.service.cli.serving import DataPlane, serve_until_signal
from weightwire.service.cli.signals import on_signal
from weightwire.service.client.api import Grant
from weightwire.service.client.target import Pulled, PullEvents, PullRequest, Target
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, TransferError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Plan
from weightwire.transfer.saving import check_destination, save_rank
from weightwire.transfer.session import RankProgress
from weightwire.transfer.wire.puller import PullOptions


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
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for rank-0.safetensors, written once everything is verified.", show_default=False),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Be a source afterwards, until stopped.")] = False,
    revision: flags.Revision = None,
    instance_id: flags.InstanceId = None,
    streams: Annotated[
        int, typer.Option(envvar="WEIGHTWIRE_STREAMS", help="Connections to each source.", min=1, max=64)
    ] = 2,
    deadline_s: flags.DeadlineS = 3600.0,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 0,
    advertise: flags.Advertise = None,
    max_readers: flags.MaxReaders = 64,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Fill a new instance: from running ones what they hold, from the local checkpoint what is missing.

    Every chunk and every tensor is verified before the instance is ready.
    """
    start_logging(log_level)
    connection = Connection(service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http)
    plane = DataPlane(
        instance_id=instance_id or f"target-{uuid.uuid4().hex[:12]}",
        host=host,
        port=port,
        advertise=advertise,
        max_readers=max_readers,
        tls=server_context(tls_cert, tls_key),
        allow_plain_http=allow_plain_http,
    )
    run = _Run(control=Control(deadline_s=deadline_s), as_json=json)
    try:
        if save is not None:
            check_destination(save, checkpoint=checkpoint)
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(plane.open()) if serve else None
            client = stack.enter_context(connection.client())
            disk = stack.enter_context(Checkpoint.open(checkpoint)) if checkpoint else None
            binding = plane.binding(server)
            target = Target(client, plane.identity, source=server.source if server else None, url=binding.url)
            stack.callback(target.leave)
            request = PullRequest(
                model=model,
                revision=revision,
                checkpoint=disk,
                deadline_s=max(deadline_s, 1.0),
                options=PullOptions(streams=streams, tls=connection.trust()),
            )
            pulled = run.pull(target, request)
            if save is not None:
                run.save(pulled, save)
            if server is None:
                run.print_result(pulled)
                return 0
            membership = target.serve(pulled)
            if not json:
                run.print_result(pulled)
            facts: dict[str, object] = {"pull": run.result(pulled)}
            serve_until_signal(membership, what="ready", as_json=json, facts=facts)
            return 0
    except TransferError as error:
        return fail(error, as_json=json, facts=run.failure(error))


@dataclass(kw_only=True)
class _Run:
    """One run of the command: what happened so far, for the JSON that also a failure prints."""

    control: Control
    as_json: bool
    began: float = field(default_factory=time.monotonic)
    progress: RankProgress = field(default_factory=RankProgress)
    transfer_id: str | None = None
    moved: Callable[[RankProgress], None] = field(default=lambda _: None)

    def pull(self, target: Target, request: PullRequest) -> Pulled:
        with on_signal(lambda: self.control.cancel("stopped by a signal")), self._bar() as events:
            pulled = target.pull(request, self.control, events)
            self.transfer_id = pulled.transfer_id
            return pulled

    def save(self, pulled: Pulled, folder: Path) -> None:
        with byte_bar("saving", total=pulled.shells.manifest.total_bytes, enabled=not self.as_json) as saved:
            save_rank(pulled.shells, folder, saved)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[PullEvents]:
        with contextlib.ExitStack() as stack:

            def planned(plan: Plan, layout: Manifest) -> None:
                if self.as_json:
                    return
                stdout.print(render.plan_table(plan, layout))
                # The bar comes after the plan, or it would draw over it.
                self.moved = stack.enter_context(progress_bar("pulling", enabled=True, rank=layout.rank))

            yield PullEvents(on_grant=self._granted, on_plan=planned, on_progress=self._moved)

    def _granted(self, grant: Grant) -> None:
        self.transfer_id = grant.transfer_id

    def _moved(self, progress: RankProgress) -> None:
        self.progress = progress
        self.moved(progress)

    def print_result(self, pulled: Pulled) -> None:
        if self.as_json:
            print_json(self.result(pulled))
        else:
            stdout.print(render.result_table(pulled))

    def result(self, pulled: Pulled) -> dict[str, object]:
        result = pulled.result
        figures: dict[str, object] = {
            "state": "ready",
            "seconds": pulled.seconds,
            "verified": True,
            "transport": "http" if result.bytes_peer else None,
            "bytes_peer": result.bytes_peer,
            "bytes_disk": result.bytes_disk,
            "tensors": dict(result.tensors),
            "sources": [
                {"instance_id": source.instance_id, "rank": source.rank, "bytes": source.nbytes}
                for source in result.sources
            ],
        }
        failures = [
            {"instance_id": failure.instance_id, "rank": failure.rank, "code": failure.code, "detail": failure.detail}
            for failure in result.failures
        ]
        return {
            "transfer_id": pulled.transfer_id,
            **figures,
            "failures": failures,
            "reasons": dict(pulled.reasons),
            "ranks": [{"rank": pulled.shells.manifest.rank, **figures}],
            "error": None,
        }

    def failure(self, error: TransferError) -> dict[str, object]:
        return {
            "transfer_id": self.transfer_id,
            "state": "cancelled" if isinstance(error, CancelledError) else "failed",
            "seconds": time.monotonic() - self.began,
            "verified": False,
            "transport": None,
            "bytes_peer": self.progress.bytes_peer,
            "bytes_disk": self.progress.bytes_disk,
            "tensors": dict.fromkeys(("identical", "reshard", "disk", "constant"), 0),
            "sources": [],
            "ranks": [],
        }
