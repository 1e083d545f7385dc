"""The two things that most programs want: serve these shells, fill those."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence

from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.client.pulls import Pulled, PullEvents, PullRequest
from weightwire.service.client.target import Target
from weightwire.transfer.control import Control
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.source import Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer


@contextlib.contextmanager
def serving(
    client: ServiceClient,
    shells: Shells | Sequence[Shells],
    *,
    weight_version: int = 1,
    instance_id: str | None = None,
    epoch: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[Membership]:
    """Serve shells, under the model and revision of their manifest, until the block ends.

    Args:
        client: Of the service to register with.
        shells: Filled, of one rank or of several of one topology; they must not change while they are served.
        weight_version: Of the weights.
        instance_id: Random by default.
        epoch: Common to all processes of the instance, where its ranks are in several.
        host: Address to bind.
        port: Port to bind; 0 takes any free one.

    Raises:
        SettingsError: If the address cannot be bound.
        TransferError: As `Membership.join` and `Membership.publish`.
    """
    by_rank = {each.manifest.rank: each for each in ([shells] if isinstance(shells, Shells) else shells)}
    if not by_rank:
        raise ValueError("serving: no shells, expected those of one rank at least")
    manifests = {rank: each.seal() for rank, each in by_rank.items()}
    first = next(iter(manifests.values()))
    identity = SourceIdentity(instance_id=instance_id or f"source-{uuid.uuid4().hex[:12]}", rank=first.rank)
    sources = Source.of_ranks(identity, by_rank)
    with SourceServer(sources, host=host, port=port) as server:
        for rank, source in sources.items():
            source.publish(by_rank[rank], weight_version=weight_version)
        with Membership(
            client,
            _bindings(identity, sources, epoch, server.url),
            model=first.model,
            revision=first.revision,
            topology=first.topology,
            source=sources,
        ) as membership:
            for manifest in manifests.values():
                membership.publish(manifest, weight_version=weight_version)
            yield membership


def pull(
    client: ServiceClient,
    request: PullRequest,
    *,
    instance_id: str | None = None,
    ranks: Sequence[int] | None = None,
    epoch: int | None = None,
    events: PullEvents | None = None,
) -> Pulled:
    """Fill a new instance, or some ranks of one, and leave the service again.

    Args:
        client: Of the service.
        request: What is asked for.
        instance_id: Random by default.
        ranks: Those of this process; by default all that the request can be about.
        epoch: Common to all processes of the instance, where its ranks are in several.
        events: What to tell on the way.

    Raises:
        TransferError: As `Target.pull`.
    """
    ranks = ranks or request.all_ranks
    identity = SourceIdentity(instance_id=instance_id or f"target-{uuid.uuid4().hex[:12]}", rank=ranks[0])
    target = Target(client, identity, ranks=ranks, epoch=epoch)
    try:
        return target.pull(request, Control(deadline_s=request.deadline_s), events)
    finally:
        target.leave()


def _bindings(identity: SourceIdentity, ranks: Iterable[int], epoch: int | None, url: str) -> list[RankBinding]:
    return [
        RankBinding(instance_id=identity.instance_id, generation=identity.generation, rank=rank, url=url, epoch=epoch)
        for rank in ranks
    ]
