"""A device whose copies are as late as they may be: none is made before a mark behind it is waited for.

Until then its target holds poison. So whoever reads a buffer, or the shells, too early finds wrong bytes, and whoever
writes into a buffer too early has the wrong bytes copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightwire.transfer.staging import Staging

POISON = 0xDB


@dataclass(kw_only=True, eq=False)
class LateDevice:
    """Stands in for a device, of plain memory, and keeps count.

    Attributes:
        fails_at: Number of the copy that fails when it is made, from 1.
        is_stuck: No copy is ever made.
        copiers: All queues that were opened.
        log: What happened, in order: `copy`, `wait`, `fence`, and whatever a test adds.
    """

    fails_at: int | None = None
    is_stuck: bool = False
    copiers: list[LateCopier] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def staging(self) -> Staging:
        return Staging(mode="always", open=lambda _: self)

    @property
    def in_flight(self) -> int:
        """Copies that were queued and not made."""
        return sum(len(copier.queue) for copier in self.copiers)

    @property
    def pinned_bytes(self) -> int:
        """Of all queues."""
        return sum(copier.pinned_bytes for copier in self.copiers)

    @property
    def most_pinned_bytes(self) -> int:
        """Of one queue."""
        return max((copier.pinned_bytes for copier in self.copiers), default=0)

    def copier(self) -> LateCopier:
        with self._lock:
            self.copiers.append(LateCopier(self))
            return self.copiers[-1]

    def fence(self) -> None:
        self.log.append("fence")

    def make(self, copy: Callable[[], object]) -> None:
        with self._lock:
            self.made += 1
            if self.made == self.fails_at:
                raise RuntimeError("an illegal memory access was encountered\nhow to debug torch")
            copy()


class LateCopier:
    """One queue, of one thread at a time."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.pinned_bytes = 0
        self._queued = 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self.device.log.append("copy")
        target.fill_(POISON % 2 if target.dtype == torch.bool else POISON)
        self._queued += 1
        self.queue.append((self._queued, target, source))

    def mark(self) -> LateMark:
        return LateMark(self, self._queued)


class LateMark:
    def __init__(self, copier: LateCopier, until: int) -> None:
        self._copier = copier
        self._until = until

    def wait(self, timeout_s: float) -> bool:
        copier = self._copier
        copier.device.log.append("wait")
        if copier.device.is_stuck:
            return False
        while copier.queue and copier.queue[0][0] <= self._until:
            _, target, source = copier.queue.popleft()
            copier.device.make(lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
        return True
