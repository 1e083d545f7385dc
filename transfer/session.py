"""One transfer as a state machine without I/O: an event goes in, the next session comes out.

planned ──> receiving ──> verifying ──> ready
   └────────────┴─────────────┴──> failed | cancelled
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from weightwire.transfer.errors import ConflictError


class TransferState(StrEnum):
    """The states of docs/protocol.md; the last three are final."""

    PLANNED = "planned"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (TransferState.READY, TransferState.FAILED, TransferState.CANCELLED)


_ORDER = (TransferState.PLANNED, TransferState.RECEIVING, TransferState.VERIFYING, TransferState.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one target rank is. Bytes are shell bytes; they only grow.

    Attributes:
        state: The rank's own state.
        bytes_total: What its shells hold.
        bytes_peer: Verified bytes that came from sources.
        bytes_disk: Bytes that came from the local checkpoint.
        error_code: Of a rank that failed.
        error_detail: Of a rank that failed.
    """

    state: TransferState = TransferState.PLANNED
    bytes_total: int = 0
    bytes_peer: int = 0
    bytes_disk: int = 0
    error_code: str | None = None
    error_detail: str | None = None

    def advance(self, event: RankProgress) -> RankProgress:
        """The progress after a report; reports may come late, twice or out of order.

        Raises:
            ConflictError: If this rank ended already and the report says otherwise.
        """
        if self.state.is_final:
            if event.state.is_final and event.state is not self.state:
                raise ConflictError(f"rank: reported {event.state}, but it ended as {self.state}")
            return self
        state = event.state
        if state in _ORDER and _ORDER.index(state) < _ORDER.index(self.state):
            state = self.state
        return replace(
            event,
            state=state,
            bytes_total=max(self.bytes_total, event.bytes_total),
            bytes_peer=max(self.bytes_peer, event.bytes_peer),
            bytes_disk=max(self.bytes_disk, event.bytes_disk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The job that fills one target instance: its ranks, and an outcome that was set from outside.

    Attributes:
        ranks: Progress of each rank, by number.
        verdict: `failed` or `cancelled` once the service, a user or the deadline decided so.
        error_code: Why, as a stable code.
        error_detail: Why, in words.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    verdict: TransferState | None = None
    error_code: str | None = None
    error_detail: str | None = None

    @classmethod
    def of(cls, num_ranks: int) -> Session:
        return cls(ranks={rank: RankProgress() for rank in range(num_ranks)})

    @property
    def state(self) -> TransferState:
        """The verdict, or the failure of any rank, or the state of the rank that is furthest behind."""
        if self.verdict is not None:
            return self.verdict
        states = [progress.state for progress in self.ranks.values()]
        for final in (TransferState.FAILED, TransferState.CANCELLED):
            if final in states:
                return final
        return min(states, key=_ORDER.index)

    def state_of(self, rank: int) -> TransferState:
        """The state of one rank. Once the session has ended, a rank that was still on its way shares its end."""
        state = self.ranks[rank].state
        return self.state if self.state.is_final and not state.is_final else state

    def rank_reported(self, rank: int, event: RankProgress) -> Session:
        """Record a rank's report; once the session has ended, reports change nothing.

        Raises:
            ConflictError: If there is no such rank, or the rank contradicts its own end.
        """
        if rank not in self.ranks:
            raise ConflictError(f"rank {rank}: the transfer has ranks {sorted(self.ranks)}")
        if self.state.is_final:
            return self
        progress = self.ranks[rank].advance(event)
        after = replace(self, ranks={**self.ranks, rank: progress})
        if progress.state in (TransferState.FAILED, TransferState.CANCELLED):
            return replace(after, error_code=progress.error_code, error_detail=progress.error_detail)
        return after

    def cancelled(self, detail: str) -> Session:
        """End it at somebody's request; a session that ended already stays as it is."""
        return self._ended(TransferState.CANCELLED, "cancelled", detail)

    def expired(self, detail: str) -> Session:
        """End it because its deadline passed."""
        return self._ended(TransferState.FAILED, "deadline_exceeded", detail)

    def _ended(self, verdict: TransferState, code: str, detail: str) -> Session:
        if self.state.is_final:
            return self
        return replace(self, verdict=verdict, error_code=code, error_detail=detail)
