"""How fast a source gives: one token bucket for all readers of a process, who take turns.

`TokenBucket` decides and knows no clock; `Pacer` lets threads wait for what it decides.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

# Less is what a reader takes for a source that is dead, so nobody gains by it.
MIN_BYTES_PER_S = 1 << 16
# All who wait get something within this time, however many they are: a slow cap still trickles to each of them.
_ROUND_S = 0.1
# What may go at once after a pause. Longer than a thread of a busy machine oversleeps, or the rate would suffer.
_BURST_S = 0.2
_LEAST_QUANTUM_BYTES = 1 << 12
_MOST_QUANTUM_BYTES = 1 << 20
# How often a reader that waits looks whether it should go on doing so.
_LOOK_S = 0.5


class Turn:
    """A reader's place in the queue, for `nbytes`; one that is not attended keeps it, and holds nobody up."""

    __slots__ = ("called", "is_attended", "nbytes")

    def __init__(self, nbytes: int, called: threading.Condition | None = None) -> None:
        self.nbytes = nbytes
        self.called = called
        self.is_attended = True


class TokenBucket:
    """Bytes that may go, by a clock that is told: in any time t never more than rate x t and one burst.

    Turns are served in the order in which they were asked for, each of a size that leaves something for everybody: so
    readers that ask again and again get equal shares, and their sum is the rate.
    """

    def __init__(self, bytes_per_s: int | None, *, now: float) -> None:
        """Args:
        bytes_per_s: None is no limit.
        now: Seconds, of any clock that does not go back.
        """
        self.bytes_per_s = bytes_per_s
        self._level = self.burst_bytes
        self._filled_at = now
        self._queue: deque[Turn] = deque()

    @property
    def burst_bytes(self) -> float:
        return math.inf if self.bytes_per_s is None else max(self.bytes_per_s * _BURST_S, _LEAST_QUANTUM_BYTES)

    @property
    def head(self) -> Turn | None:
        """Whose turn is next."""
        return next((turn for turn in self._queue if turn.is_attended), None)

    @property
    def waiting(self) -> tuple[Turn, ...]:
        return tuple(self._queue)

    def set_rate(self, bytes_per_s: int | None, *, now: float) -> None:
        """Another rate from now on, for those who wait as well."""
        self._fill(now)
        was_unlimited, self.bytes_per_s = self.bytes_per_s is None, bytes_per_s
        # Who had no limit has saved nothing up.
        self._level = 0.0 if was_unlimited else min(self._level, self.burst_bytes)

    def quantum(self, at_most: int) -> int:
        """How much the next one to ask may ask for, of the `at_most` bytes that it has."""
        if self.bytes_per_s is None:
            return at_most
        share = int(self.bytes_per_s * _ROUND_S) // (len(self._queue) + 1)
        return min(at_most, max(_LEAST_QUANTUM_BYTES, min(share, _MOST_QUANTUM_BYTES)))

    def join(self, turn: Turn) -> None:
        self._queue.append(turn)

    def leave(self, turn: Turn) -> None:
        """Out of the queue, without having taken anything; no error if it is not there."""
        if turn in self._queue:
            self._queue.remove(turn)

    def poll(self, turn: Turn, *, now: float) -> float:
        """Take what the turn is for, if it may go now, and end the turn.

        Returns:
            0 if it was taken; else seconds until it is worth asking again, infinity as long as others come first.
        """
        self._fill(now)
        if self.bytes_per_s is None:
            self.leave(turn)
            return 0.0
        if self.head is not turn:
            return math.inf
        # What was asked for at a higher rate may be more than a burst is now; the next ones then wait for it.
        lacks = min(turn.nbytes, self.burst_bytes) - self._level
        # By more than rounding: a wait that is too short for the clock would be repeated for ever.
        if lacks > 1e-6 * turn.nbytes:
            return lacks / self.bytes_per_s
        self._level -= turn.nbytes
        self._queue.remove(turn)
        return 0.0

    def _fill(self, now: float) -> None:
        if self.bytes_per_s is not None:
            self._level = min(self.burst_bytes, self._level + max(0.0, now - self._filled_at) * self.bytes_per_s)
        self._filled_at = now


class Pacer:
    """A bucket that threads wait at. Looking at `bytes_per_s` is all that it costs where there is no limit."""

    def __init__(self, bytes_per_s: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bucket = TokenBucket(bytes_per_s, now=clock())

    @property
    def bytes_per_s(self) -> int | None:
        """None is no limit."""
        return self._bucket.bytes_per_s

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Another rate, at once, also for those who wait."""
        with self._lock:
            self._bucket.set_rate(bytes_per_s, now=self._clock())
            for turn in self._bucket.waiting:
                _call(turn)

    def take(self, at_most: int, *, while_waiting: Callable[[], None]) -> int:
        """Wait for one's turn.

        Args:
            at_most: Bytes that there are to send, at least one.
            while_waiting: Called about twice a second, without a lock; it may raise, to give the turn up.

        Returns:
            How many of them may be sent now, at least one.
        """
        turn = self._join(at_most)
        try:
            while not self._wait(turn, timeout_s=_LOOK_S):
                while_waiting()
        except BaseException:
            self._leave(turn)
            raise
        return turn.nbytes

    @contextlib.contextmanager
    def booking(self, nbytes: int) -> Iterator[Booking]:
        """Collect the turns for `nbytes`, which go in one piece then; whoever leaves the block leaves the queue."""
        booking = Booking(self, nbytes)
        try:
            yield booking
        finally:
            booking.leave()

    def _join(self, at_most: int) -> Turn:
        with self._lock:
            turn = Turn(self._bucket.quantum(at_most), threading.Condition(self._lock))
            self._bucket.join(turn)
        return turn

    def _leave(self, turn: Turn) -> None:
        with self._lock:
            self._bucket.leave(turn)
            _call(self._bucket.head)

    def _wait(self, turn: Turn, *, timeout_s: float) -> bool:
        """Wait until it is this one's turn, for so long at most; returns whether it was."""
        with self._lock:
            turn.is_attended = True
            ends_at = self._clock() + timeout_s
            while (wait_s := self._bucket.poll(turn, now=self._clock())) > 0:
                left_s = ends_at - self._clock()
                if left_s <= 0:
                    # Whatever this reader does until it is back, such as telling its peer, the others go on.
                    turn.is_attended = False
                    _call(self._bucket.head)
                    return False
                assert turn.called is not None
                turn.called.wait(min(wait_s, left_s))
            # One is called, not all: of a hundred readers ninety-nine would wake for nothing.
            _call(self._bucket.head)
            return True


class Booking:
    """Bytes that are to go in one piece, and the turns that they have had of it so far. For one thread."""

    def __init__(self, pacer: Pacer, nbytes: int) -> None:
        self._pacer = pacer
        self._left = nbytes
        self._turn: Turn | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for more turns, for so long at most; returns whether all of it may go."""
        ends_at = time.monotonic() + timeout_s
        while self._left > 0:
            self._turn = self._turn or self._pacer._join(self._left)
            if not self._pacer._wait(self._turn, timeout_s=max(0.0, ends_at - time.monotonic())):
                return False
            self._left -= self._turn.nbytes
            self._turn = None
        return True

    def leave(self) -> None:
        if self._turn is not None:
            self._pacer._leave(self._turn)


def _call(turn: Turn | None) -> None:
    if turn is not None and turn.called is not None:
        turn.called.notify()
