"""What `source` and `pull --serve` have in common: a data plane, its ready line, and its end."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightwire.service.cli.flags import check_address
from weightwire.service.cli.output import print_json, stdout
from weightwire.service.cli.signals import wait_for_signal
from weightwire.service.client.api import RankBinding
from weightwire.service.client.membership import Membership
from weightwire.transfer.address import is_loopback
from weightwire.transfer.errors import ConflictError, SettingsError
from weightwire.transfer.wire.source import Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer

_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """How this process serves its rank."""

    instance_id: str
    host: str
    port: int
    advertise: str | None
    max_readers: int
    tls: ssl.SSLContext | None
    allow_plain_http: bool
    identity: SourceIdentity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", SourceIdentity(instance_id=self.instance_id))

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
        server = SourceServer(
            Source(self.identity, SourceLimits(max_readers=self.max_readers)),
            host=self.host,
            port=self.port,
            tls=self.tls,
        )
        server.start()
        try:
            yield server
        finally:
            server.stop(drain_s=_DRAIN_S)

    def binding(self, server: SourceServer | None) -> RankBinding:
        return RankBinding(
            instance_id=self.instance_id,
            generation=self.identity.generation,
            rank=self.identity.rank,
            url=(self.advertise or server.url) if server else None,
        )


def serve_until_signal(
    membership: Membership, *, what: str, as_json: bool, facts: dict[str, object] | None = None
) -> None:
    """Print the ready line, then serve until SIGTERM or SIGINT.

    Raises:
        ConflictError: If a newer process took this instance's place.
    """
    binding = membership.binding

    def say_ready() -> None:
        if as_json:
            ranks = [{"rank": binding.rank, "url": binding.url}]
            print_json(
                {"ready": True, "url": binding.url, "instance_id": binding.instance_id, "ranks": ranks, **(facts or {})}
            )
        else:
            stdout.print(f"{what}; serving as [bold]{binding.instance_id}[/] on {binding.url}; stop it with Ctrl-C")

    if not wait_for_signal(say_ready, unless=membership.lost):
        raise ConflictError(f"instance {binding.instance_id!r}: a newer process took its place")
