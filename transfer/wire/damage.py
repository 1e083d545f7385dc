"""When damaged chunks stop being bad luck: what decides that nothing of a source is believed any more. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Hashable

# Fewer frames say nothing about how often a source is wrong.
_FEW_FRAMES = 20
_MOST_DAMAGED = 0.1


class DamageRecord:
    """Counts the frames of one source. Thread-safe.

    A source is quarantined when the same frame is wrong for the second time, when more than a tenth of its frames are,
    of at least twenty, or when its answers lose their framing twice without one good frame in between.
    """

    def __init__(self) -> None:
        self.damaged = 0
        self._good = 0
        self._good_at_break: int | None = None
        self._seen: set[Hashable] = set()
        self._lock = threading.Lock()

    def count_good(self, frames: int) -> None:
        with self._lock:
            self._good += frames

    def is_last_straw(self, frame: Hashable) -> bool:
        """Count a frame whose bytes are wrong; `frame` is the same whenever these bytes are asked for."""
        with self._lock:
            again = frame in self._seen
            self._seen.add(frame)
            return self._count() or again

    def breaks_again(self) -> bool:
        """Count an answer that makes no sense from some byte on."""
        with self._lock:
            again = self._good_at_break == self._good
            self._good_at_break = self._good
            return self._count() or again

    def _count(self) -> bool:
        self.damaged += 1
        frames = self._good + self.damaged
        return frames >= _FEW_FRAMES and self.damaged > _MOST_DAMAGED * frames
