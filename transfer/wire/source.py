"""What a source serves: one publication at a time, to those who may, and to no more than it can bear."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from weightwire.transfer.errors import FencedError, SourceBusyError, SourceError, SourceLeavingError, TicketError
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, read_ticket
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.limits import Capacity
from weightwire.transfer.wire.limits import SourceLimits as SourceLimits

# When to come back to a target that will know in a moment whether it can serve while it receives.
_UNDECIDED_RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may read.

    Attributes:
        ticket_key: Checks the tickets of `POST /v1/read`.
        read_token_sha256: SHA-256, in hex, of each token that opens the other routes; empty opens them to all.
    """

    ticket_key: bytes
    read_token_sha256: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Sealed shells, under the version that tickets and reads name.

    Attributes:
        held: Which of it is there, while its owner still receives it; it becomes complete in place.
    """

    shells: Shells
    manifest: Manifest
    weight_version: int
    held: Held | None = None

    @property
    def is_partial(self) -> bool:
        return self.held is not None and not self.held.is_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """A rank of the process that serves; `generation` is new, and higher, for each process."""

    instance_id: str
    rank: int = 0
    generation: int = field(default_factory=lambda: time.time_ns() // 1_000_000)


class RankSource(Protocol):
    """What those who publish a rank ask of it, whichever process serves it."""

    identity: SourceIdentity

    @property
    def limits(self) -> SourceLimits: ...

    def set_limits(self, limits: SourceLimits) -> None: ...

    def grant_access(self, access: Access) -> None: ...

    def publish(self, shells: Shells, *, weight_version: int) -> None: ...

    def withdraw(self, *, drain_s: float = 5.0) -> None: ...


class Source:
    """The publication of one rank, and its readers. Knows no socket.

    Every reader holds the publication while it reads memory, and looks with `check_stands` before it vouches for
    bytes, so that a torn chunk is never passed off as good.
    """

    def __init__(
        self, identity: SourceIdentity, limits: SourceLimits | None = None, *, capacity: Capacity | None = None
    ) -> None:
        """Args:
        limits: At the start; `set_limits` changes them.
        capacity: In place of `limits`: what the ranks of one process share. By default its own.
        """
        self.identity = identity
        self.capacity = capacity or Capacity(limits)
        self.access: Access | None = None
        self._former_key: bytes | None = None
        self._gate = threading.Condition()
        self._publication: Publication | None = None
        self._withdrawing = False
        self._undecided = False
        self._declined: str | None = None
        self._readers = 0

    @classmethod
    def of_ranks(
        cls, identity: SourceIdentity, ranks: Iterable[int], limits: SourceLimits | None = None
    ) -> dict[int, Source]:
        """Several ranks of one process, by rank: of one generation, and with limits in common.

        Args:
            identity: Of any of them.
        """
        capacity = Capacity(limits)
        return {rank: cls(replace(identity, rank=rank), capacity=capacity) for rank in ranks}

    def __str__(self) -> str:
        return f"source {self.identity.instance_id!r} rank {self.identity.rank}"

    @property
    def publication(self) -> Publication | None:
        """What is served now, if anything."""
        return None if self._withdrawing else self._publication

    @property
    def active_readers(self) -> int:
        return self._readers

    @property
    def limits(self) -> SourceLimits:
        """As they are now, for all ranks of the process."""
        return self.capacity.limits

    def set_limits(self, limits: SourceLimits) -> None:
        """Take other limits, for all ranks of the process; a rate at once, also for those who read already."""
        self.capacity.set_limits(limits)

    def grant_access(self, access: Access) -> None:
        """Take the keys that the service gave; they replace the former ones.

        Tickets of the key before stay good until they expire: a service that keeps its state in memory comes back
        with another key, and the transfers that it granted before go on.
        """
        if self.access is not None and self.access.ticket_key != access.ticket_key:
            self._former_key = self.access.ticket_key
        self.access = access

    def read_ticket(self, text: str) -> Ticket:
        """Check a ticket's signature and expiry, now.

        Raises:
            SourceBusyError: If no service has given this source a key yet.
            TicketError: As `transfer.tickets.read_ticket`.
        """
        if self.access is None:
            raise self._busy("not registered with a service yet")
        now = time.time()
        try:
            return read_ticket(self.access.ticket_key, text, now=now)
        except TicketError:
            if self._former_key is None:
                raise
            return read_ticket(self._former_key, text, now=now)

    def publish(self, shells: Shells, *, weight_version: int) -> None:
        """Serve sealed shells from now on, in place of what was served before.

        Raises:
            ValueError: If the shells are not sealed.
        """
        if shells.manifest.total_bytes and not shells.manifest.chunk_digests:
            raise ValueError("shells have no digests: seal() comes before publish()")
        self._publish(Publication(shells=shells, manifest=shells.manifest, weight_version=weight_version))

    def publish_partial(self, shells: Shells, held: Held, *, weight_version: int) -> None:
        """Serve shells that are still being filled, under the manifest that they will have; readers wait for bytes.

        Args:
            held: Says what is there. Once it is complete this is a publication like any other.
        """
        self._publish(Publication(shells=shells, manifest=held.manifest, weight_version=weight_version, held=held))

    def expect(self) -> None:
        """Ask readers to come back in a moment: whether there will be something to serve is about to be known."""
        with self._gate:
            self._undecided, self._declined, self._withdrawing = True, None, False

    def decline(self, why: str) -> None:
        """Serve nothing, and say so at once, so that readers go elsewhere; until something is published again.

        A reader that is under way finds the publication gone, and ends its stream with a FAIL frame.
        """
        with self._gate:
            self._undecided, self._declined, self._publication = False, why, None
            self._gate.notify_all()

    def _publish(self, publication: Publication) -> None:
        # Once for all readers: none of them waits for the engine's stream, which goes on.
        publication.shells.fence()
        with self._gate:
            self._withdrawing = self._undecided = False
            self._declined = None
            self._publication = publication
            self._gate.notify_all()

    def refuse_readers(self) -> None:
        """Let nobody in any more, and send them elsewhere; who reads goes on."""
        with self._gate:
            self._withdrawing, self._undecided = True, False

    def wait_for_readers(self, *, timeout_s: float) -> bool:
        """Wait until nobody reads; returns whether that is so."""
        with self._gate:
            return self._gate.wait_for(lambda: not self._readers, timeout_s)

    def withdraw(self, *, drain_s: float = 5.0) -> None:
        """Serve nothing any more. Returns when no reader is left, or after `drain_s` seconds.

        A reader that is still sending by then finds the publication gone, and ends its stream with a FAIL frame.
        """
        ends_at = time.monotonic() + drain_s
        with self._gate:
            leaving = self._publication
            self._withdrawing, self._undecided = True, False
            while self._readers and self._publication is leaving and (left := ends_at - time.monotonic()) > 0:
                self._gate.wait(left)
            # What was published in the meantime stays.
            if self._publication is leaving:
                self._publication = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Publication]:
        """Hold the publication while its bytes are read.

        Raises:
            SourceBusyError: If there is none yet, or as many read it as may.
            SourceLeavingError: If it was withdrawn, or is about to be.
            FencedError: If there will be none, as `decline` was told.
        """
        self._published()
        # Without the gate: others finish, and free a seat, meanwhile.
        if not self.capacity.take_seat():
            raise self._busy(f"{self.limits.max_readers} readers are served by its process")
        try:
            with self._gate:
                publication = self._published()
                self._readers += 1
            try:
                yield publication
            finally:
                with self._gate:
                    self._readers -= 1
                    self._gate.notify_all()
        finally:
            self.capacity.leave_seat()

    def _published(self) -> Publication:
        """What may be read now; raises as `reading`."""
        with self._gate:
            # A target that withdrew may receive again, and has more to say.
            if self._withdrawing and not self._undecided and self._declined is None:
                raise SourceLeavingError(f"{self}: it takes its weights back, expected to be read no more")
            if self._publication is None:
                raise self._nothing_published()
            return self._publication

    def check_stands(self, publication: Publication) -> None:
        """Raises:
        FencedError: If `publication` is not what the shells hold any more.
        """
        if self._publication is not publication:
            raise FencedError(f"{self}: weight version {publication.weight_version} was withdrawn while it was read")

    def _nothing_published(self) -> SourceError:
        if self._declined is not None:
            return FencedError(f"{self}: {self._declined}")
        if self._undecided:
            return SourceBusyError(f"{self}: about to receive", retry_after_s=_UNDECIDED_RETRY_S)
        return self._busy("nothing is published")

    def _busy(self, why: str) -> SourceBusyError:
        return SourceBusyError(f"{self}: {why}", retry_after_s=self.limits.retry_after_s)
