"""The ranks that one process serves on one port, and whom of them a request means."""

from __future__ import annotations

import time
from collections.abc import Mapping

from weightwire.transfer.errors import NotFoundError, SourceBusyError, TicketError
from weightwire.transfer.tickets import Ticket, claimed_rank
from weightwire.transfer.wire.limits import Capacity, SourceLimits
from weightwire.transfer.wire.source import Publication, Source

# As many of a rank are quoted as a 64-bit number has.
_MOST_DIGITS = 20


class ServedRanks:
    """Sources by rank: one instance, one generation, one count of readers.

    Attributes:
        sources: At least one, lowest rank first.
        lowest: The source that a request without a rank is about.
    """

    def __init__(self, sources: Source | Mapping[int, Source]) -> None:
        """Raises:
        ValueError: If they are not ranks of one process, as `Source.of_ranks` makes them.
        """
        by_rank = {sources.identity.rank: sources} if isinstance(sources, Source) else dict(sources)
        if not by_rank:
            raise ValueError("served ranks: none, expected at least one")
        self.sources: Mapping[int, Source] = dict(sorted(by_rank.items()))
        self.lowest = next(iter(self.sources.values()))
        first = self.lowest.identity
        for rank, source in self.sources.items():
            found = source.identity
            if (found.instance_id, found.generation, found.rank) != (first.instance_id, first.generation, rank):
                raise ValueError(f"served ranks: {found} stands for rank {rank} beside {first}")
            if source.capacity is not self.lowest.capacity:
                raise ValueError(f"{source}: counts its readers apart from the others, expected Source.of_ranks")

    @property
    def limits(self) -> SourceLimits:
        return self.lowest.limits

    @property
    def capacity(self) -> Capacity:
        """What all of them share."""
        return self.lowest.capacity

    def find(self, rank: int | None) -> Source:
        """The source of a rank; None takes the lowest.

        Raises:
            NotFoundError: If it is not served here.
        """
        if rank is None:
            return self.lowest
        if rank not in self.sources:
            raise NotFoundError(f"rank {rank}: {self._here()}", kind="rank", name=str(rank))
        return self.sources[rank]

    def publications(self, rank: int | None) -> dict[int, Publication]:
        """What one rank serves now, or without one each of them, by rank.

        Raises:
            NotFoundError: If the rank is not served here.
            SourceBusyError: If one of those asked for serves nothing, or is still receiving it.
        """
        asked = self.sources if rank is None else {rank: self.find(rank)}
        found = {rank: source.publication for rank, source in asked.items()}
        if partial := [str(rank) for rank, publication in found.items() if publication and publication.is_partial]:
            raise SourceBusyError(
                f"source: not ready, still receiving rank {', '.join(partial)}",
                retry_after_s=self.limits.retry_after_s,
            )
        if waiting := [str(rank) for rank, publication in found.items() if publication is None]:
            raise SourceBusyError(
                f"source: not ready, nothing is published for rank {', '.join(waiting)}",
                retry_after_s=self.limits.retry_after_s,
            )
        return {rank: publication for rank, publication in found.items() if publication is not None}

    def check_ticket(self, text: str) -> tuple[Source, Ticket]:
        """Check a ticket with the key of the rank that it speaks of: that of another rank does not open it.

        Raises:
            SourceBusyError: If no service has given that rank a key yet.
            TicketError: If the rank is not served here, or as `Source.read_ticket`.
        """
        claimed = claimed_rank(text)
        if claimed is not None and claimed not in self.sources:
            raise TicketError(f"ticket: granted for rank {str(claimed)[:_MOST_DIGITS]}; {self._here()}")
        source = self.find(claimed)
        return source, source.read_ticket(text)

    def withdraw(self, *, drain_s: float) -> None:
        """Withdraw every rank, in `drain_s` seconds altogether; nobody is let in meanwhile."""
        ends_at = time.monotonic() + drain_s
        for source in self.sources.values():
            source.refuse_readers()
        for source in self.sources.values():
            source.withdraw(drain_s=max(0.0, ends_at - time.monotonic()))

    def wait_for_readers(self, *, timeout_s: float) -> None:
        """Wait until nobody reads any rank."""
        ends_at = time.monotonic() + timeout_s
        for source in self.sources.values():
            source.wait_for_readers(timeout_s=max(0.0, ends_at - time.monotonic()))

    def _here(self) -> str:
        ranks = ", ".join(map(str, self.sources))
        return f"instance {self.lowest.identity.instance_id!r} serves {ranks} here"
