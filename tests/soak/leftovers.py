"""What a process holds: threads, sockets and other descriptors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Counts of one process."""

    threads: int
    sockets: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Those of a process now."""
        links = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return cls(
            threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
            sockets=sum(link.startswith("socket:") for link in links),
            # A thread that writes a log, or reads a setting, may hold a file for a moment.
            descriptors=sum(link != "" for link in links),
        )

    def is_within(self, other: Holdings) -> bool:
        return self.threads <= other.threads and self.sockets <= other.sockets and self.descriptors <= other.descriptors


def _target(link: Path) -> str:
    """Where a descriptor leads; nowhere if it was closed meanwhile."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""
