"""What `source` and `pull --serve` have in common: a data plane, its ready line, and its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weightwire.service.cli.flags import check_address, server_context
from weightwire.service.cli.output import print_json, stdout
from weightwire.service.cli.signals import wait_for_signal
from weightwire.service.client.api import RankBinding
from weightwire.service.client.membership import Membership
from weightwire.transfer.address import bare_host, check_zone, is_loopback
from weightwire.transfer.errors import ConflictError, SettingsError, SourceError
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.server_process import SourceProcess
from weightwire.transfer.wire.sockets import SocketOptions
from weightwire.transfer.wire.source import RankSource, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer


class DataServer(Protocol):
    """Serves ranks, from this process or from another one."""

    @property
    def url(self) -> str: ...

    @property
    def sources(self) -> Mapping[int, RankSource]: ...

    def start(self) -> None: ...

    def stop(self, *, drain_s: float = 5.0) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """How this process serves its ranks.

    Attributes:
        ranks: Of one instance, all on one port.
        limits: That it begins with.
        tls: PEM files with the certificate chain and its key, or neither.
        epoch: Of the instance; None is that of a process which holds all its ranks.
        pin: Fingerprint of the certificate that is met at the advertised URL.
        sockets: Of its connections.
        drain_s: What readers get to finish when it stops.
        server_process: Serve from a process of its own.
        identity: Of the process, with its first rank.
    """

    instance_id: str
    host: str
    port: int
    advertise: str | None
    limits: SourceLimits
    tls: tuple[Path | None, Path | None]
    allow_plain_http: bool
    ranks: Sequence[int] = (0,)
    epoch: int | None = None
    pin: str | None = None
    sockets: SocketOptions = field(default_factory=SocketOptions)
    drain_s: float = 10.0
    server_process: bool = False
    identity: SourceIdentity = field(init=False)

    def __post_init__(self) -> None:
        # Told before anything is bound or loaded.
        server_context(*self.tls)
        object.__setattr__(self, "host", bare_host(self.host))
        object.__setattr__(self, "identity", SourceIdentity(instance_id=self.instance_id, rank=self.ranks[0]))

    @contextlib.contextmanager
    def open(self) -> Iterator[DataServer]:
        """Bind and serve; nothing is published yet. Drains at the end of the block.

        Raises:
            SettingsError: If the port is taken, the certificate is none, or tickets would travel unencrypted beyond
                this machine.
            SourceError: If a process of its own does not start.
        """
        if self.tls == (None, None) and not is_loopback(self.host) and not self.allow_plain_http:
            raise SettingsError(
                f"--host {self.host}: tickets would travel unencrypted, expected --tls-cert and --tls-key, "
                "or --allow-plain-http"
            )
        if self.advertise is not None:
            check_address("--advertise", self.advertise)
        check_zone(self.host, advertise=self.advertise)
        server = self._server()
        server.start()
        try:
            yield server
        finally:
            server.stop(drain_s=self.drain_s)

    def _server(self) -> DataServer:
        if self.server_process:
            cert, key = self.tls
            tls = (cert, key) if cert is not None and key is not None else None
            return SourceProcess(
                self.identity, self.ranks, self.limits,
                host=self.host, port=self.port, tls=tls, sockets=self.sockets,
            )  # fmt: skip
        sources = Source.of_ranks(self.identity, self.ranks, self.limits)
        return SourceServer(
            sources, host=self.host, port=self.port, tls=server_context(*self.tls), sockets=self.sockets
        )

    def binding(self, server: DataServer | None) -> RankBinding:
        """What the first rank registers with."""
        return self.bindings(server)[0]

    def bindings(self, server: DataServer | None) -> list[RankBinding]:
        """What each rank registers with; without a server they only take."""
        url = (self.advertise or server.url) if server else None
        generation = self.identity.generation
        return [
            RankBinding(
                instance_id=self.instance_id, generation=generation, rank=rank, url=url, epoch=self.epoch,
                certificate_sha256=self.pin if server else None,
            )
            for rank in self.ranks
        ]  # fmt: skip


def serve_until_signal(
    membership: Membership,
    server: DataServer | None,
    *,
    what: str,
    as_json: bool,
    facts: dict[str, object] | None = None,
) -> None:
    """Print the ready line, then serve until SIGTERM or SIGINT.

    Raises:
        ConflictError: If a newer process took the place of a rank.
        SourceError: If the server's own process ended for good.
    """
    failed = server.failed if isinstance(server, SourceProcess) else threading.Event()
    binding = membership.binding

    def say_ready() -> None:
        if as_json:
            ranks = [{"rank": each.rank, "url": each.url} for each in membership.bindings]
            print_json(
                {"ready": True, "url": binding.url, "instance_id": binding.instance_id, "ranks": ranks, **(facts or {})}
            )
        else:
            stdout.print(f"{what}; serving as [bold]{binding.instance_id}[/] on {binding.url}; stop it with Ctrl-C")

    if wait_for_signal(say_ready, unless=(membership.lost, failed)):
        return
    if failed.is_set():
        raise SourceError(f"instance {binding.instance_id!r}: its server process ended twice")
    if membership.lost.is_set():
        raise ConflictError(f"instance {binding.instance_id!r}: a newer process took its place")
