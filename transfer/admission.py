"""Is there memory for it? Asked before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from weightwire.transfer.errors import AdmissionError

_MEMINFO = Path("/proc/meminfo")
# Source: Linux, Documentation/admin-guide/cgroup-v2.rst.
_CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")
_CGROUP_CURRENT = Path("/sys/fs/cgroup/memory.current")
_CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")


def available_bytes() -> int | None:
    """Memory that this process may still take, by the kernel's own estimate; None where it gives none."""
    found = [value for value in (_machine_bytes(), _cgroup_bytes()) if value is not None]
    return min(found, default=None)


def check_memory(needed_bytes: int, *, purpose: str) -> None:
    """Raises:
    AdmissionError: If `needed_bytes` are more than there are.
    """
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise AdmissionError(
            f"{purpose}: needs {needed_bytes} bytes of memory, {available} are available",
            needed_bytes=needed_bytes,
            available_bytes=available,
            diagnostic="D12",
        )


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _cgroup_bytes() -> int | None:
    try:
        limit = _CGROUP_MAX.read_text().strip()
        used = int(_CGROUP_CURRENT.read_text())
    except (OSError, ValueError):
        return None
    # The page cache counts as used, and is given back before anybody is killed: a checkpoint that was read fills it.
    return None if limit == "max" else max(0, int(limit) - max(0, used - _inactive_cache_bytes()))


def _inactive_cache_bytes() -> int:
    try:
        lines = _CGROUP_STAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
