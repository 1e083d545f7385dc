"""The two things that most programs want: serve these shells, fill those."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.client.target import Pulled, PullEvents, PullRequest, Target
from weightwire.transfer.control import Control
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.source import Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer


@contextlib.contextmanager
def serving(
    client: ServiceClient,
    shells: Shells,
    *,
    weight_version: int = 1,
    instance_id: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[Membership]:
    """Serve shells, under the model and revision of their manifest, until the block ends.

    Args:
        client: Of the service to register with.
        shells: Filled; they must not change while they are served.
        weight_version: Of the weights.
        instance_id: Random by default.
        host: Address to bind.
        port: Port to bind; 0 takes any free one.

    Raises:
        SettingsError: If the address cannot be bound.
        TransferError: As `Membership.join` and `Membership.publish`.
    """
    manifest = shells.seal()
    identity = SourceIdentity(instance_id=instance_id or f"source-{uuid.uuid4().hex[:12]}", rank=manifest.rank)
    source = Source(identity)
    with SourceServer(source, host=host, port=port) as server:
        binding = RankBinding(
            instance_id=identity.instance_id, generation=identity.generation, rank=identity.rank, url=server.url
        )
        source.publish(shells, weight_version=weight_version)
        with Membership(
            client,
            binding,
            model=manifest.model,
            revision=manifest.revision,
            topology=manifest.topology,
            source=source,
        ) as membership:
            membership.publish(manifest, weight_version=weight_version)
            yield membership


def pull(client: ServiceClient, request: PullRequest, *, instance_id: str | None = None,
         events: PullEvents | None = None) -> Pulled:  # fmt: skip
    """Fill a new instance once, and leave the service again.

    Raises:
        TransferError: As `Target.pull`.
    """
    identity = SourceIdentity(instance_id=instance_id or f"target-{uuid.uuid4().hex[:12]}")
    target = Target(client, identity)
    try:
        return target.pull(request, Control(deadline_s=request.deadline_s), events)
    finally:
        target.leave()
