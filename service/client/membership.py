"""Keeps the ranks of one process registered: renews leases, and publishes again what the service has forgotten."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from weightwire.service.client.api import Lease, RankBinding, ServiceClient
from weightwire.transfer.errors import ConflictError, ServiceUnreachableError, TransferError
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.wire.limits import LimitOverrides
from weightwire.transfer.wire.source import RankSource

logger = logging.getLogger(__name__)

# A lease survives two renewals that were lost.
_RENEWALS_PER_LEASE = 3
_RETRY_S = 1.0


class Membership:
    """The places of one process's ranks in the service, from `join` to `leave`. A thread of its own renews them.

    An outage of the service does not end it: renewal goes on until the service is back. A newer process that speaks
    for one of the ranks does.

    Attributes:
        bindings: As registered, all of one instance and generation.
        lost: Set once a newer process took over.
    """

    def __init__(
        self,
        client: ServiceClient,
        bindings: RankBinding | Sequence[RankBinding],
        *,
        model: str,
        revision: str | None,
        topology: Topology | None = None,
        source: RankSource | Mapping[int, RankSource] | None = None,
    ) -> None:
        """Args:
        bindings: One, or one for each rank.
        source: Gets the keys that the service gives, or several by rank do; None for ranks that only take.

        Raises:
            ValueError: If there is no binding.
        """
        self.bindings = (bindings,) if isinstance(bindings, RankBinding) else tuple(bindings)
        if not self.bindings:
            raise ValueError("membership: no rank to speak for")
        self.lost = threading.Event()
        self._client = client
        self._model = model
        self._revision = revision
        self._topology = topology or Topology()
        by_rank = {} if source is None else source if isinstance(source, Mapping) else {source.identity.rank: source}
        self._sources: Mapping[int, RankSource] = dict(by_rank)
        # What each was started with; limits that the service takes back fall back to it.
        self._own_limits = {rank: each.limits for rank, each in self._sources.items()}
        self._told_limits = LimitOverrides()
        self._published = dict[int, tuple[Manifest, int]]()
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._renew_forever, name="weightwire-lease", daemon=True)
        self._lease_s = 0.0

    @property
    def binding(self) -> RankBinding:
        """The only one, or the first of several."""
        return self.bindings[0]

    def join(self) -> None:
        """Register, and keep it so.

        Raises:
            TransferError: As `ServiceClient.register_ranks`.
        """
        self._lease_s = self._register()[self.binding.rank].lease_s
        self._thread.start()

    def join_later(self, *manifests: Manifest, weight_version: int) -> None:
        """Register, and publish a manifest for each rank, as soon as the service can be reached; returns at once."""
        self._revision = manifests[0].revision
        self._published = {manifest.rank: (manifest, weight_version) for manifest in manifests}
        self._lease_s = _RETRY_S
        self._thread.start()

    def publish(self, manifest: Manifest, *, weight_version: int) -> None:
        """Say what the manifest's rank holds, now and whenever the service asks for it again.

        A service that is away for a moment is told when it is back.

        Raises:
            ValueError: If it is the manifest of a rank that this process does not speak for.
            TransferError: As `ServiceClient.publish`, but for `ServiceUnreachableError`.
        """
        binding = self._binding(manifest.rank)
        with self._lock:
            self._published[binding.rank] = (manifest, weight_version)
            try:
                if self._revision is None:
                    self._revision = manifest.revision
                    self._register()
                self._client.publish(binding, manifest, weight_version=weight_version)
            except ServiceUnreachableError as error:
                logger.warning("%s not published yet: %s", _name(binding), error)

    def leave(self) -> None:
        """Leave at once, as far as the service can be reached."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()
        # Who lost the place of its only rank has nothing to leave; of several ranks, the others go too.
        if self.lost.is_set() and len(self.bindings) == 1:
            return
        for binding in self.bindings:
            try:
                self._client.leave(binding)
            except ServiceUnreachableError as error:
                logger.info("%s could not say that it leaves: %s", _name(binding), error)
                return
            except TransferError as error:
                logger.info("%s has no place to leave: %s", _name(binding), error)

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _binding(self, rank: int) -> RankBinding:
        for binding in self.bindings:
            if binding.rank == rank:
                return binding
        ranks = [binding.rank for binding in self.bindings]
        raise ValueError(f"manifest of rank {rank}: this process speaks for ranks {ranks}")

    def _register(self) -> dict[int, Lease]:
        leases = self._client.register_ranks(
            self.bindings,
            model=self._model,
            revision=self._revision,
            topology=self._topology,
            limits=self._told_limits,
        )
        for rank, source in self._sources.items():
            source.grant_access(leases[rank].access)
        self._keep_limits(leases[self.binding.rank].limits)
        return leases

    def _keep_limits(self, limits: LimitOverrides) -> None:
        """Let the sources keep what the service says; what was set here since it said so stays until it says more."""
        if limits == self._told_limits:
            return
        self._told_limits = limits
        for rank, source in self._sources.items():
            source.set_limits(limits.over(self._own_limits[rank]))
        logger.info("instance %s keeps other limits: %s", self.binding.instance_id, limits)

    def _renew_forever(self) -> None:
        instance_id = self.binding.instance_id
        wait_s = self._lease_s / _RENEWALS_PER_LEASE
        while not self._leaving.wait(wait_s):
            try:
                leases = self._register()
                self._publish_again(leases)
                wait_s = leases[self.binding.rank].lease_s / _RENEWALS_PER_LEASE
            except ConflictError as error:
                logger.error("instance %s lost its place: %s", instance_id, error)
                self.lost.set()
                return
            except TransferError as error:
                logger.warning("lease of %s not renewed, trying again: %s", instance_id, error)
                wait_s = min(_RETRY_S, self._lease_s / _RENEWALS_PER_LEASE)

    def _publish_again(self, leases: Mapping[int, Lease]) -> None:
        with self._lock:
            for rank, (manifest, weight_version) in self._published.items():
                if leases[rank].published == manifest.digest:
                    continue
                binding = self._binding(rank)
                self._client.publish(binding, manifest, weight_version=weight_version)
                logger.info("published %s again: the service had lost it", _name(binding))


def _name(binding: RankBinding) -> str:
    return f"instance {binding.instance_id} rank {binding.rank}"
