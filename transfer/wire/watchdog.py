"""Which sources do not deliver, although they were asked: decided from counters and the time. No I/O.

A connection tells nothing: a process that was stopped, or whose host was cut off, still has one. Bytes do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

# A header that says "wait" is a sign of life, and no progress.
_WAIT_BYTES = 8


class Meter:
    """What one stream has received; written by the thread that reads, looked at by others.

    Attributes:
        asking: Whether a request is on its way, its connection among it.
        received: Bytes of answers' bodies, counted as the kernel hands them over.
        waits: How often the source said, in the middle of an answer, that it has to wait.
        asked_with: `received` when the last request was sent; -1 before one was.
    """

    __slots__ = ("asked_with", "asking", "received", "waits")

    def __init__(self) -> None:
        self.asking = False
        self.received = 0
        self.waits = 0
        self.asked_with = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The counters of everything that one process sends, at one moment.

    Attributes:
        unanswered: Whether of all answers that are waited for not one has begun.
    """

    asking: bool
    received: int
    waits: int
    unanswered: bool = False

    @classmethod
    def of(cls, *meters: Meter) -> Reading:
        return cls(
            asking=any(meter.asking for meter in meters),
            received=sum(meter.received for meter in meters),
            waits=sum(meter.waits for meter in meters),
            unanswered=all(meter.asked_with == meter.received for meter in meters if meter.asking),
        )


@dataclass(slots=True, kw_only=True)
class _Record:
    """What is known of one process since it was asked.

    Attributes:
        seen: Moments and payload bytes, back to the beginning of the window.
        waits: As read last.
        slow_since: Since when it delivers too little, and does not say why; None if it does not.
        starved_at: When its payload last moved.
    """

    seen: deque[tuple[float, int]] = field(default_factory=deque)
    waits: int
    slow_since: float | None = None
    starved_at: float


class Watchdog:
    """Looks at readings again and again, some times in each window.

    A process is slow if it was asked for something all through the window, delivered less than the rate, and did not
    once say that it has to wait.
    """

    def __init__(self, *, min_rate: float, window_s: float, first_byte_s: float = 0.0) -> None:
        """Args:
        min_rate: Bytes per second.
        first_byte_s: For how long an answer may not even have begun, before its window begins.
        """
        self._min_rate = min_rate
        self._window_s = window_s
        self._first_byte_s = first_byte_s
        self._records: dict[Hashable, _Record] = {}
        self._looked_at: float | None = None

    def observe(self, now: float, readings: Mapping[Hashable, Reading]) -> None:
        """Take down what everybody has received by now, in seconds of any steady clock."""
        if self._looked_at is not None and now - self._looked_at > self._window_s / 2:
            # It was this process that stood still, and nobody else's fault.
            self._records.clear()
        self._looked_at = now
        for name, reading in readings.items():
            if reading.asking:
                self._take_down(name, now, reading)
            else:
                self._records.pop(name, None)

    def slow_s(self, name: Hashable, now: float) -> float:
        """For how long a process has delivered too little; 0 if it does well, or says that it waits."""
        record = self._records.get(name)
        return 0.0 if record is None or record.slow_since is None else now - record.slow_since

    def starved_s(self, name: Hashable, now: float) -> float:
        """For how long a process that is asked has delivered nothing at all, whatever it says."""
        record = self._records.get(name)
        return 0.0 if record is None else now - record.starved_at

    def forget(self, name: Hashable) -> None:
        """Begin anew with a process."""
        self._records.pop(name, None)

    def _take_down(self, name: Hashable, now: float, reading: Reading) -> None:
        payload = reading.received - _WAIT_BYTES * reading.waits
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record(waits=reading.waits, starved_at=now)
        if record.seen and payload > record.seen[-1][1]:
            record.starved_at = now
        if reading.waits > record.waits:
            record.waits, record.slow_since = reading.waits, None
            record.seen.clear()
        if reading.unanswered and now - record.starved_at < self._first_byte_s:
            record.slow_since = None
            record.seen.clear()
        record.seen.append((now, payload))
        while len(record.seen) > 1 and record.seen[1][0] <= now - self._window_s:
            record.seen.popleft()
        began, before = record.seen[0]
        if now - began < self._window_s:
            return
        if payload - before >= self._min_rate * (now - began):
            record.slow_since = None
        elif record.slow_since is None:
            record.slow_since = began
