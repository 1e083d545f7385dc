"""A new instance: asks the service for sources, fills its shells, proves them, and may serve them on."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weightwire.service.client.api import Grant, RankBinding, ReportedFailure, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.client.pulls import Pulled, PulledRank, PullEvents, PullRequest
from weightwire.service.client.relaying import Relay
from weightwire.service.client.reporter import Reporter
from weightwire.service.client.side_by_side import for_each_rank
from weightwire.service.client.target_shells import RankShells, check_locally, define_model, prepare_shells
from weightwire.transfer.agreement import check_world
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.disk_pieces import names_on_disk
from weightwire.transfer.errors import (
    CancelledError,
    IntegrityError,
    NotFoundError,
    ServiceUnreachableError,
    TransferError,
)
from weightwire.transfer.filling import FillResult, Origins, SourceBytes, fill
from weightwire.transfer.layouts import identified
from weightwire.transfer.manifest import CheckpointSpec, Manifest, Topology
from weightwire.transfer.planning import PlannedPull, Supply, check_servable
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.puller import SourceFailure
from weightwire.transfer.wire.source import RankSource, Source, SourceIdentity
from weightwire.transfer.wire.stream import Endpoint

logger = logging.getLogger(__name__)

_SERVICE_RESTART_S = 10.0
_RETRY_S = 0.2


class Target:
    """The ranks of one process that take weights. `pull` once, then `serve` if they are to be sources too."""

    def __init__(
        self,
        client: ServiceClient,
        identity: SourceIdentity,
        *,
        ranks: Sequence[int] | None = None,
        epoch: int | None = None,
        sources: Mapping[int, RankSource] | None = None,
        url: str | None = None,
        certificate_sha256: str | None = None,
    ) -> None:
        """Args:
        identity: Of this process.
        ranks: Those of this process; by default that of the identity.
        epoch: Common to all processes of the instance; by default the generation, as for an instance of one process.
        sources: What its own data plane serves, by rank, if it has one; `url` says where.
        certificate_sha256: Fingerprint of the certificate that is met at an https `url`.
        """
        self.bindings = tuple(
            RankBinding(
                instance_id=identity.instance_id,
                generation=identity.generation,
                rank=rank,
                url=url,
                epoch=epoch,
                certificate_sha256=certificate_sha256,
            )
            for rank in sorted(ranks or (identity.rank,))
        )
        self.membership: Membership | None = None
        self._client = client
        self._sources = sources
        self._relay: Relay | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(binding.rank for binding in self.bindings)

    def pull(self, request: PullRequest, control: Control, events: PullEvents | None = None) -> Pulled:
        """Fill the shells of all ranks, in one transfer; they are ready when all of them are.

        A service that cannot be reached is no error if the local checkpoint has everything.

        Args:
            request: What is asked for.
            control: Of this transfer alone: a rank that fails stops the others by it.
            events: What to tell on the way.

        Raises:
            ValueError: If the request is about other ranks than those of this target.
            NotFoundError: If neither a source nor a checkpoint says which tensors there are.
            ManifestMismatchError: If sources, or a source and the local checkpoint, are of two models.
            LoadError: If the model cannot be laid out as asked for.
            TransferError: As `fill`, `ServiceClient.create_transfer` and `check_memory` do.
        """
        request.check_ranks(self.ranks)
        check_locally(request, self.ranks)
        events = events or PullEvents()
        began = time.monotonic()
        # A process of its own serves what is complete: what is still received is this one's.
        here = {rank: source for rank, source in (self._sources or {}).items() if isinstance(source, Source)}
        if request.relay and here:
            self._relay = Relay(here)
        try:
            filled = self._pull(request, control, events)
        except BaseException as error:
            if self._relay is not None:
                self._relay.decline(f"its own transfer has ended: {str(error) or type(error).__name__}")
            raise
        return replace(filled, seconds=time.monotonic() - began)

    def _pull(self, request: PullRequest, control: Control, events: PullEvents) -> Pulled:
        try:
            grant = self._ask(request, control)
        except ServiceUnreachableError as error:
            if request.checkpoint is None:
                raise
            logger.warning("no service, loading from disk: %s", error)
            if self._relay is not None:
                self._relay.decline("it is filled from disk: it serves once it is filled")
            return _Filling(request, control, events).run(self.ranks, {})
        events.on_grant(grant)
        return self._fill(request, grant, control, events)

    def serve(self, pulled: Pulled, *, hash_again: bool = False) -> Membership:
        """Serve what was pulled, to whoever the service sends; if it is away, as soon as it is back.

        Args:
            hash_again: Look at the memory of ranks that are served already once more, too.

        Raises:
            IntegrityError: If the memory does not hold what was verified any more.
        """
        if self._sources is None:
            raise ValueError("target: it has no data plane to serve from")
        manifests = []
        for rank in pulled.ranks:
            # What is served already had each of its digests compared as it came.
            kept = self._relay.adopted(rank.rank) if self._relay else None
            manifests.append(_sealed(rank.shells) if kept is None or hash_again else kept)
            if kept is None:
                self._sources[rank.rank].publish(rank.shells, weight_version=pulled.weight_version)
        first = manifests[0]
        if self.membership is None:
            self.membership = self._member(first.model, first.revision, first.topology)
            self.membership.join_later(*manifests, weight_version=pulled.weight_version)
        else:
            for manifest in manifests:
                self.membership.publish(manifest, weight_version=pulled.weight_version)
        return self.membership

    def leave(self) -> None:
        if self.membership is not None:
            self.membership.leave()

    def _ask(self, request: PullRequest, control: Control) -> Grant:
        revision = request.wanted_revision
        membership = self._member(request.model, revision, request.world)
        membership.join()
        self.membership = membership
        control.check()
        return self._client.create_transfer(
            self.bindings,
            model=request.model,
            revision=revision,
            topology=request.world,
            deadline_s=request.deadline_s,
            relay=self._relay is not None,
            idempotency_key=request.idempotency_key,
        )

    def _member(self, model: str, revision: str | None, topology: Topology) -> Membership:
        return Membership(
            self._client, self.bindings, model=model, revision=revision, topology=topology, source=self._sources
        )

    def _fill(self, request: PullRequest, grant: Grant, control: Control, events: PullEvents) -> Pulled:
        """Fill under a grant, and report to the service until it is over, whichever way."""
        with Reporter(self._client, grant.transfer_id, self.bindings, control) as reporter:
            filling = _Filling(request, control, events, grant=grant, reporter=reporter, relay=self._relay)
            try:
                return filling.run(self.ranks, self._manifests(grant, control))
            except BaseException as error:
                for rank in reporter.unfinished:
                    reporter.finish(rank, _ended(reporter.newest(rank), error), sources=[])
                raise

    def _manifests(self, grant: Grant, control: Control) -> dict[str, Manifest]:
        """What the sources hold, by digest, best first; waits a while for a service that is just restarting."""
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

    def __init__(
        self,
        request: PullRequest,
        control: Control,
        events: PullEvents,
        *,
        grant: Grant | None = None,
        reporter: Reporter | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._request = request
        self._control = control
        self._events = events
        self._grant = grant
        self._reporter = reporter
        self._relay = relay
        self._telling = threading.Lock()
        self._planned: dict[int, PlannedPull] = {}

    def run(self, ranks: Sequence[int], manifests: Mapping[str, Manifest]) -> Pulled:
        request, grant = self._request, self._grant
        held = list(manifests.values())
        self._check_there(held)
        self._check_worlds(manifests)
        prepared = {each.rank: each for each in prepare_shells(request, ranks, held, self._control)}
        self._plan(list(prepared.values()), manifests)
        relayed = {rank: self._begin_relay(prepared[rank].shells, held) for rank in ranks}
        results = for_each_rank(ranks, lambda rank: self._fill(prepared[rank], manifests, relayed[rank]), self._control)
        if request.shells is not None:
            # Put model, revision, config and specs into the manifest of shells that the caller built.
            request.shells.identify(define_model(request, held))
        for rank in ranks:
            if (kept := self._relay.adopted(rank) if self._relay else None) is not None:
                prepared[rank].shells.manifest = kept
        return Pulled(
            ranks=tuple(
                PulledRank(rank=rank, shells=prepared[rank].shells, result=result, tree=prepared[rank].tree)
                for rank, result in zip(ranks, results, strict=True)
            ),
            transfer_id=grant.transfer_id if grant else None,
            weight_version=self._weight_version,
            seconds=max(result.seconds for result in results),
            reasons=grant.reasons if grant else {},
        )

    def _check_there(self, held: Sequence[Manifest]) -> None:
        request = self._request
        if held or request.checkpoint is not None or request.shells is not None:
            return
        given = self._grant.reasons if self._grant else {}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in given.items())
        raise NotFoundError(
            f"model {request.model!r}: no source and no checkpoint to take it from; {reasons or 'no instance has it'}",
            kind="source",
            name=request.model,
        )

    def _check_worlds(self, manifests: Mapping[str, Manifest]) -> None:
        """Of each instance all ranks have to be there: what one of them holds may be needed by any target rank."""
        instances: defaultdict[str, dict[int, Manifest]] = defaultdict(dict)
        for source in self._grant.sources if self._grant else ():
            if source.relay:
                # It gives each rank to its twin alone, and is as whole as what it takes from.
                continue
            instances[source.instance_id][source.rank] = manifests[source.manifest]
        for ranks in instances.values():
            check_world(list(ranks.values()))

    def _plan(self, prepared: Sequence[RankShells], manifests: Mapping[str, Manifest]) -> None:
        """Tell how each rank will be filled, and see that everything is somewhere before any of them begins."""
        checkpoint = self._request.checkpoint
        specs: dict[str, CheckpointSpec] = {spec.name: spec for spec in specs_of(checkpoint)} if checkpoint else {}
        for each in prepared:
            self._control.check()
            layout = each.shells.manifest
            endpoints = self._endpoints(each.rank)
            sources = {endpoint.manifest: manifests[endpoint.manifest] for endpoint in endpoints}
            supply = Supply(capacities=_capacities(endpoints), on_disk=names_on_disk(layout, specs))
            planned = self._planned[each.rank] = PlannedPull.of(layout, list(sources.values()), supply)
            if len(prepared) > 1:
                check_servable(planned.plan)
            self._events.on_plan(planned.plan, layout)

    def _begin_relay(self, shells: Shells, held: Sequence[Manifest]) -> Held | None:
        if self._relay is None:
            return None
        layout = shells.manifest
        if self._request.shells is not None:
            layout = identified(layout, define_model(self._request, held))
        return self._relay.begin(shells, layout, held, weight_version=self._weight_version)

    @property
    def _weight_version(self) -> int:
        return max((source.weight_version for source in self._grant.sources), default=0) if self._grant else 0

    def _fill(self, prepared: RankShells, manifests: Mapping[str, Manifest], held: Held | None) -> FillResult:
        rank = prepared.rank
        newest = RankProgress()

        def tell(progress: RankProgress) -> None:
            nonlocal newest
            newest = progress
            if self._reporter is not None:
                self._reporter.update(rank, progress)
            with self._telling:
                self._events.on_progress(rank, progress)

        def tell_sources(given: Sequence[SourceBytes]) -> None:
            if self._reporter is not None:
                self._reporter.update_sources(rank, _as_reported(given))

        result = fill(
            prepared.shells,
            Origins(
                endpoints=self._endpoints(rank),
                manifests=manifests,
                checkpoint=self._request.checkpoint,
                planned=self._planned.pop(rank),
            ),
            control=self._control,
            options=self._request.options,
            on_progress=tell,
            on_sources=tell_sources,
            on_failure=lambda failure: self._tell_failure(rank, failure),
            held=held,
        )
        if self._reporter is not None:
            self._reporter.finish(rank, _final(newest, result), sources=_as_reported(result.sources))
        return result

    def _tell_failure(self, rank: int, failure: SourceFailure) -> None:
        source = (failure.instance_id, failure.rank)
        for endpoint in self._endpoints(rank):
            if self._reporter is not None and (endpoint.instance_id, endpoint.rank) == source:
                self._reporter.failed(
                    rank,
                    ReportedFailure(
                        instance_id=failure.instance_id,
                        rank=failure.rank,
                        generation=endpoint.generation,
                        code=failure.code,
                        detail=failure.detail,
                    ),
                )

    def _endpoints(self, rank: int) -> tuple[Endpoint, ...]:
        return self._grant.ranks[rank] if self._grant else ()


def _as_reported(given: Sequence[SourceBytes]) -> list[tuple[str, int, int]]:
    return [(source.instance_id, source.rank, source.nbytes) for source in given]


def _capacities(endpoints: Sequence[Endpoint]) -> list[float]:
    """For each manifest, how many sources are asked for it first: those of its lowest tier."""
    tiers: defaultdict[str, list[int]] = defaultdict(list)
    for endpoint in endpoints:
        tiers[endpoint.manifest].append(endpoint.standby)
    return [standby.count(min(standby)) for standby in tiers.values()]


def _sealed(shells: Shells) -> Manifest:
    """The manifest with digests of what lies in the shells now.

    Raises:
        IntegrityError: If that is not what was promised for them.
    """
    promised = {tensor.name: tensor.digest for tensor in shells.manifest.tensors if tensor.digest}
    manifest = shells.seal()
    for tensor in manifest.tensors:
        if tensor.digest != promised.get(tensor.name, tensor.digest):
            raise IntegrityError(f"tensor {tensor.name!r}: changed in memory after it was verified")
    return manifest


def _final(progress: RankProgress, result: FillResult) -> RankProgress:
    """The last report of a rank that is ready: what has been counted, not what was foreseen."""
    return replace(
        progress,
        bytes_total=max(progress.bytes_total, result.bytes_peer + result.bytes_disk),
        bytes_peer=result.bytes_peer,
        bytes_disk=result.bytes_disk,
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
