"""Keeps one rank registered: renews its lease, and publishes again what the service may have forgotten."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from weightwire.service.client.api import Lease, RankBinding, ServiceClient
from weightwire.transfer.errors import ConflictError, ServiceUnreachableError, TransferError
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.wire.source import Source

logger = logging.getLogger(__name__)

# A lease survives two renewals that were lost.
_RENEWALS_PER_LEASE = 3
_RETRY_S = 1.0


class Membership:
    """A rank's place in the service, from `join` to `leave`. A thread of its own renews it.

    An outage of the service does not end it: renewal goes on until the service is back. A newer process under the
    same name does.

    Attributes:
        binding: As registered.
        lost: Set once a newer process of the instance took over.
    """

    def __init__(
        self,
        client: ServiceClient,
        binding: RankBinding,
        *,
        model: str,
        revision: str | None,
        topology: Topology | None = None,
        source: Source | None = None,
    ) -> None:
        """Args:
        source: Gets the keys that the service gives; None for a rank that only takes.
        """
        self.binding = binding
        self.lost = threading.Event()
        self._client = client
        self._model = model
        self._revision = revision
        self._topology = topology or Topology()
        self._source = source
        self._published: tuple[Manifest, int] | None = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._renew_forever, name="weightwire-lease", daemon=True)
        self._lease_s = 0.0

    def join(self) -> None:
        """Register, and keep it so.

        Raises:
            TransferError: As `ServiceClient.register`.
        """
        self._lease_s = self._register().lease_s
        self._thread.start()

    def join_later(self, manifest: Manifest, *, weight_version: int) -> None:
        """Register and publish as soon as the service can be reached; returns at once."""
        self._revision = manifest.revision
        self._published = (manifest, weight_version)
        self._lease_s = _RETRY_S
        self._thread.start()

    def publish(self, manifest: Manifest, *, weight_version: int) -> None:
        """Say what this rank holds, now and whenever the service asks for it again.

        A service that is away for a moment is told when it is back.

        Raises:
            TransferError: As `ServiceClient.publish`, but for `ServiceUnreachableError`.
        """
        with self._lock:
            self._published = (manifest, weight_version)
            try:
                if self._revision is None:
                    self._revision = manifest.revision
                    self._register()
                self._client.publish(self.binding, manifest, weight_version=weight_version)
            except ServiceUnreachableError as error:
                logger.warning("instance %s not published yet: %s", self.binding.instance_id, error)

    def leave(self) -> None:
        """Leave at once, as far as the service can be reached."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.lost.is_set():
            return
        try:
            self._client.leave(self.binding)
        except TransferError as error:
            logger.info("instance %s could not say that it leaves: %s", self.binding.instance_id, error)

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _register(self) -> Lease:
        lease = self._client.register(self.binding, model=self._model, revision=self._revision, topology=self._topology)
        if self._source is not None:
            self._source.grant_access(lease.access)
        return lease

    def _renew_forever(self) -> None:
        wait_s = self._lease_s / _RENEWALS_PER_LEASE
        while not self._leaving.wait(wait_s):
            try:
                lease = self._register()
                self._publish_again(lease)
                wait_s = lease.lease_s / _RENEWALS_PER_LEASE
            except ConflictError as error:
                logger.error("instance %s lost its place: %s", self.binding.instance_id, error)
                self.lost.set()
                return
            except TransferError as error:
                logger.warning("lease of %s not renewed, trying again: %s", self.binding.instance_id, error)
                wait_s = min(_RETRY_S, self._lease_s / _RENEWALS_PER_LEASE)

    def _publish_again(self, lease: Lease) -> None:
        with self._lock:
            if self._published is None or lease.published == self._published[0].digest:
                return
            manifest, weight_version = self._published
            self._client.publish(self.binding, manifest, weight_version=weight_version)
            logger.info("published %s again: the service had lost it", self.binding.instance_id)
