"""A new instance: asks the service for sources, fills its shells, proves them, and may serve them on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from weightwire.service.client.api import Grant, RankBinding, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.client.reporter import Reporter
from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import (
    CancelledError,
    IntegrityError,
    NotFoundError,
    ServiceUnreachableError,
    TransferError,
)
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.layouts import ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.local_disk import identity_of
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Plan, check_same_specs, plan_pull
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Source, SourceIdentity

logger = logging.getLogger(__name__)

_SERVICE_RESTART_S = 10.0
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What a target asks for.

    Attributes:
        model: Model id.
        revision: None takes the local checkpoint's, or without one the service's choice.
        checkpoint: The local disk, for what no source holds; its headers fix the shapes.
        shells: Filled in place; None allocates plain ones by checkpoint name.
        deadline_s: For the whole transfer.
        idempotency_key: Asking again with the same key gives the same transfer.
    """

    model: str
    revision: str | None = None
    checkpoint: Checkpoint | None = None
    shells: Shells | None = None
    deadline_s: float = 3600.0
    options: PullOptions = field(default_factory=PullOptions)
    idempotency_key: str | None = None

    @property
    def wanted_revision(self) -> str | None:
        return self.revision or (self.checkpoint.revision if self.checkpoint else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A filled rank, and how it was filled.

    Attributes:
        transfer_id: None if the service could not be reached and the disk had everything.
        weight_version: Of the sources; 0 without one.
        reasons: Why instances of the model were not taken as sources.
    """

    shells: Shells
    result: FillResult
    transfer_id: str | None
    weight_version: int
    seconds: float
    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullEvents:
    """What a caller may want to see on the way."""

    on_grant: Callable[[Grant], None] = lambda _: None
    on_plan: Callable[[Plan, Manifest], None] = lambda _plan, _layout: None
    on_progress: Callable[[RankProgress], None] = lambda _: None


class Target:
    """One rank that takes weights. `join` once, `pull` once, then `serve` if it is to be a source too."""

    def __init__(
        self,
        client: ServiceClient,
        identity: SourceIdentity,
        *,
        source: Source | None = None,
        url: str | None = None,
    ) -> None:
        """Args:
        identity: Of this process.
        source: What its own data plane serves, if it has one; `url` says where.
        """
        self.binding = RankBinding(
            instance_id=identity.instance_id, rank=identity.rank, generation=identity.generation, url=url
        )
        self.membership: Membership | None = None
        self._client = client
        self._source = source

    def pull(self, request: PullRequest, control: Control, events: PullEvents | None = None) -> Pulled:
        """Fill the shells.

        A service that cannot be reached is no error if the local checkpoint has everything.

        Raises:
            NotFoundError: If neither a source nor a checkpoint says which tensors there are.
            TransferError: As `fill`, `ServiceClient.create_transfer` and `check_memory` do.
        """
        events = events or PullEvents()
        began = time.monotonic()
        try:
            grant = self._ask(request, control)
        except ServiceUnreachableError as error:
            if request.checkpoint is None:
                raise
            logger.warning("no service, loading from disk: %s", error)
            filled = _Filling(request, control, events).run({})
        else:
            events.on_grant(grant)
            filled = self._fill(request, grant, control, events)
        return replace(filled, seconds=time.monotonic() - began)

    def serve(self, pulled: Pulled) -> Membership:
        """Serve what was pulled, to whoever the service sends; if it is away, as soon as it is back.

        Raises:
            IntegrityError: If the memory does not hold what was verified any more.
        """
        if self._source is None:
            raise ValueError("target: it has no data plane to serve from")
        promised = {tensor.name: tensor.digest for tensor in pulled.shells.manifest.tensors if tensor.digest}
        manifest = pulled.shells.seal()
        for tensor in manifest.tensors:
            if tensor.digest != promised.get(tensor.name, tensor.digest):
                raise IntegrityError(f"tensor {tensor.name!r}: changed in memory after it was verified")
        self._source.publish(pulled.shells, weight_version=pulled.weight_version)
        if self.membership is not None:
            self.membership.publish(manifest, weight_version=pulled.weight_version)
        else:
            self.membership = self._member(manifest.model, manifest.revision)
            self.membership.join_later(manifest, weight_version=pulled.weight_version)
        return self.membership

    def leave(self) -> None:
        if self.membership is not None:
            self.membership.leave()

    def _ask(self, request: PullRequest, control: Control) -> Grant:
        revision = request.wanted_revision
        membership = self._member(request.model, revision)
        membership.join()
        self.membership = membership
        control.check()
        return self._client.create_transfer(
            self.binding,
            model=request.model,
            revision=revision,
            deadline_s=request.deadline_s,
            idempotency_key=request.idempotency_key,
        )

    def _member(self, model: str, revision: str | None) -> Membership:
        return Membership(self._client, self.binding, model=model, revision=revision, source=self._source)

    def _fill(self, request: PullRequest, grant: Grant, control: Control, events: PullEvents) -> Pulled:
        """Fill under a grant, and report to the service until it is over, whichever way."""
        with Reporter(self._client, grant.transfer_id, self.binding, control) as reporter:

            def report(progress: RankProgress) -> None:
                reporter.update(progress)
                events.on_progress(progress)

            filling = _Filling(request, control, replace(events, on_progress=report), grant)
            try:
                pulled = filling.run(self._manifests(grant, control))
            except BaseException as error:
                reporter.finish(_ended(reporter.newest, error), sources=[])
                raise
            given = [(source.instance_id, source.rank, source.nbytes) for source in pulled.result.sources]
            reporter.finish(reporter.newest, sources=given)
            return pulled

    def _manifests(self, grant: Grant, control: Control) -> dict[str, Manifest]:
        """What the sources hold; waits a while for a service that is just restarting."""
        manifests: dict[str, Manifest] = {}
        ends_at = time.monotonic() + _SERVICE_RESTART_S
        for digest in dict.fromkeys(source.manifest for source in grant.sources):
            while digest not in manifests:
                try:
                    manifests[digest] = self._client.manifest(digest)
                except ServiceUnreachableError:
                    if time.monotonic() >= ends_at:
                        raise
                    control.pause(_RETRY_S)
        return manifests


class _Filling:
    """One request on its way from manifests to filled shells."""

    def __init__(self, request: PullRequest, control: Control, events: PullEvents, grant: Grant | None = None) -> None:
        self._request = request
        self._control = control
        self._events = events
        self._grant = grant

    def run(self, manifests: Mapping[str, Manifest]) -> Pulled:
        request, grant = self._request, self._grant
        sources = grant.sources if grant else ()
        held = list(manifests.values())
        shells = request.shells or _allocate(request, held, grant)
        self._events.on_plan(plan_pull(shells.manifest, held), shells.manifest)
        result = fill(
            shells,
            Origins(endpoints=sources, manifests=manifests, checkpoint=request.checkpoint),
            control=self._control,
            options=request.options,
            on_progress=self._events.on_progress,
        )
        _identify(shells, request, held)
        return Pulled(
            shells=shells,
            result=result,
            transfer_id=grant.transfer_id if grant else None,
            weight_version=max((source.weight_version for source in sources), default=0),
            seconds=result.seconds,
            reasons=grant.reasons if grant else {},
        )


def _allocate(request: PullRequest, manifests: list[Manifest], grant: Grant | None) -> Shells:
    """Plain shells for every tensor that the sources or the local checkpoint know of."""
    checkpoint = request.checkpoint
    specs = specs_of(checkpoint) if checkpoint else ()
    for manifest in manifests:
        if checkpoint and manifest.checkpoint:
            check_same_specs(specs, manifest.checkpoint)
    if manifests:
        layout = extended_layout(manifests[0], specs or manifests[0].checkpoint)
    elif checkpoint:
        layout = plain_layout(specs, identity_of(checkpoint, model=request.model, revision=request.revision))
    else:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in (grant.reasons if grant else {}).items())
        raise NotFoundError(
            f"model {request.model!r}: no source and no checkpoint to take it from; {reasons or 'no instance has it'}",
            kind="source",
            name=request.model,
        )
    check_memory(layout.total_bytes, purpose=f"shells of {request.model!r}")
    return Shells.allocate(layout)


def _identify(shells: Shells, request: PullRequest, manifests: list[Manifest]) -> None:
    """Put model, revision, config and specs into the manifest of shells that the caller built."""
    if request.shells is None:
        return
    known = manifests[0] if manifests else None
    checkpoint = request.checkpoint
    shells.identify(
        ModelIdentity(
            model=request.model,
            revision=request.wanted_revision or (known.revision if known else ""),
            config=known.config if known else checkpoint.config if checkpoint else None,
            checkpoint=known.checkpoint if known else specs_of(checkpoint) if checkpoint else (),
        )
    )


def _ended(progress: RankProgress, error: BaseException) -> RankProgress:
    """The last report of a rank that did not become ready."""
    stopped = isinstance(error, (CancelledError, KeyboardInterrupt))
    code = error.code if isinstance(error, TransferError) else "cancelled" if stopped else "transfer_failed"
    return replace(
        progress,
        state=TransferState.CANCELLED if stopped else TransferState.FAILED,
        error_code=code,
        error_detail=str(error) or type(error).__name__,
    )
