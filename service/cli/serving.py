"""What `source` and `pull --serve` have in common: a data plane, its ready line, and its end."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weightwire.service.cli.flags import check_address
from weightwire.service.cli.output import print_json, stdout
from weightwire.service.cli.signals import wait_for_signal
from weightwire.service.client.api import RankBinding
from weightwire.service.client.membership import Membership
from weightwire.transfer.address import bare_host, check_zone, is_loopback
from weightwire.transfer.errors import ConflictError, SettingsError
from weightwire.transfer.wire.sockets import SocketOptions
from weightwire.transfer.wire.source import Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer

_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """How this process serves its ranks.

    Attributes:
        ranks: Of one instance, all on one port.
        epoch: Of the instance; None is that of a process which holds all its ranks.
        pin: Fingerprint of the certificate that is met at the advertised URL.
        sockets: Of its connections.
        identity: Of the process, with its first rank.
    """

    instance_id: str
    host: str
    port: int
    advertise: str | None
    max_readers: int
    tls: ssl.SSLContext | None
    allow_plain_http: bool
    ranks: Sequence[int] = (0,)
    epoch: int | None = None
    pin: str | None = None
    sockets: SocketOptions = field(default_factory=SocketOptions)
    identity: SourceIdentity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", bare_host(self.host))
        object.__setattr__(self, "identity", SourceIdentity(instance_id=self.instance_id, rank=self.ranks[0]))

    @contextlib.contextmanager
    def open(self) -> Iterator[SourceServer]:
        """Bind and serve; nothing is published yet. Drains at the end of the block.

        Raises:
            SettingsError: If the port is taken, or tickets would travel unencrypted beyond this machine.
        """
        if self.tls is None and not is_loopback(self.host) and not self.allow_plain_http:
            raise SettingsError(
                f"--host {self.host}: tickets would travel unencrypted, expected --tls-cert and --tls-key, "
                "or --allow-plain-http"
            )
        if self.advertise is not None:
            check_address("--advertise", self.advertise)
        check_zone(self.host, advertise=self.advertise)
        server = SourceServer(
            Source.of_ranks(self.identity, self.ranks, SourceLimits(max_readers=self.max_readers)),
            host=self.host,
            port=self.port,
            tls=self.tls,
            sockets=self.sockets,
        )
        server.start()
        try:
            yield server
        finally:
            server.stop(drain_s=_DRAIN_S)

    def binding(self, server: SourceServer | None) -> RankBinding:
        """What the first rank registers with."""
        return self.bindings(server)[0]

    def bindings(self, server: SourceServer | None) -> list[RankBinding]:
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
    membership: Membership, *, what: str, as_json: bool, facts: dict[str, object] | None = None
) -> None:
    """Print the ready line, then serve until SIGTERM or SIGINT.

    Raises:
        ConflictError: If a newer process took the place of a rank.
    """
    binding = membership.binding

    def say_ready() -> None:
        if as_json:
            ranks = [{"rank": each.rank, "url": each.url} for each in membership.bindings]
            print_json(
                {"ready": True, "url": binding.url, "instance_id": binding.instance_id, "ranks": ranks, **(facts or {})}
            )
        else:
            stdout.print(f"{what}; serving as [bold]{binding.instance_id}[/] on {binding.url}; stop it with Ctrl-C")

    if not wait_for_signal(say_ready, unless=membership.lost):
        raise ConflictError(f"instance {binding.instance_id!r}: a newer process took its place")
