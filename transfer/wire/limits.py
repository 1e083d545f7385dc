"""What a serving process gives at most, all its ranks together: seats for readers, bytes per second."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from weightwire.transfer.wire.pacing import MIN_BYTES_PER_S, Pacer

Unlimited: TypeAlias = Literal["unlimited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """How much a source gives before serving traffic suffers.

    Attributes:
        max_readers: Reads at the same time, of all ranks of the process; beyond it 503 with `Retry-After`. With 0
            nobody is let in any more, and who reads goes on.
        max_bytes_per_s: To all readers together; None is no limit.
        max_connections: Open connections; beyond it new ones are closed at once.
        seat_wait_s: How long a reader waits in line for a seat before it is turned away.
        retry_after_s: What a reader that is turned away is told.
        write_timeout_s: A reader that takes no byte for so long is cut off.
        idle_timeout_s: A connection that sends no request for so long is closed.
    """

    max_readers: int = 64
    max_bytes_per_s: int | None = None
    max_connections: int = 512
    seat_wait_s: float = 0.5
    retry_after_s: int = 1
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_readers < 0:
            raise ValueError(f"max_readers: is {self.max_readers}, expected 0 or more")
        if self.max_bytes_per_s is not None and self.max_bytes_per_s < MIN_BYTES_PER_S:
            raise ValueError(
                f"max_bytes_per_s: is {self.max_bytes_per_s}, expected {MIN_BYTES_PER_S} at least, since less looks "
                "like a dead source; max_readers=0 lets nobody in"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOverrides:
    """What the service sets in place of the limits that a source was started with; None leaves one as it was."""

    max_readers: int | None = None
    max_bytes_per_s: int | Unlimited | None = None

    def over(self, limits: SourceLimits) -> SourceLimits:
        if self.max_readers is not None:
            limits = replace(limits, max_readers=self.max_readers)
        if self.max_bytes_per_s is not None:
            rate = None if self.max_bytes_per_s == "unlimited" else self.max_bytes_per_s
            limits = replace(limits, max_bytes_per_s=rate)
        return limits


class Capacity:
    """The limits of one process, and what is taken of them; shared by its ranks. Thread-safe.

    Attributes:
        limits: As they are now.
        pacer: Paces all readers.
    """

    def __init__(self, limits: SourceLimits | None = None) -> None:
        self.limits = limits or SourceLimits()
        self.pacer = Pacer(self.limits.max_bytes_per_s)
        self._seats = threading.Condition()
        self._line: deque[object] = deque()
        self._readers = 0
        self._bytes_sent = 0

    @property
    def readers(self) -> int:
        return self._readers

    @property
    def in_line(self) -> int:
        """Readers that wait for a seat."""
        return len(self._line)

    @property
    def bytes_sent(self) -> int:
        """Of all answers that are over, heads left out."""
        return self._bytes_sent

    def set_limits(self, limits: SourceLimits) -> None:
        """Take other limits, at once: a rate also for those who read now, seats for those who come."""
        with self._seats:
            self.limits = limits
            self._seats.notify_all()
        self.pacer.set_rate(limits.max_bytes_per_s)

    def take_seat(self) -> bool:
        """Take a seat, in the order of coming; returns False if none is free for `seat_wait_s`.

        Without a line a reader that asks again as soon as it was served would have the seat for ever, and those that
        come back after a second would never find it free.
        """
        place = object()
        with self._seats:
            self._line.append(place)
            try:
                if not self._seats.wait_for(lambda: self._may_sit(place), self._wait_s()):
                    return False
                self._readers += 1
                return True
            finally:
                self._line.remove(place)
                self._seats.notify_all()

    def leave_seat(self) -> None:
        with self._seats:
            self._readers -= 1
            self._seats.notify_all()

    def _may_sit(self, place: object) -> bool:
        return self._line[0] is place and self._readers < self.limits.max_readers

    def _wait_s(self) -> float:
        # Where nobody is let in, nobody has to wait to hear it.
        return self.limits.seat_wait_s if self.limits.max_readers else 0.0

    def count_sent(self, nbytes: int) -> None:
        with self._seats:
            self._bytes_sent += nbytes
