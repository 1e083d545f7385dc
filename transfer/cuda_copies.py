"""Copies from and to a CUDA device, on streams beside the engine's. Holds no decision: see `transfer/staging.py`."""

from __future__ import annotations

import threading
import time

import torch

# Short against the copy of a chunk. A query costs a microsecond and holds nobody up; the driver's own wait would either
# burn the core that the socket needs, or have no deadline.
_POLL_S = 50e-6


class CudaDevice:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fenced: torch.cuda.Event | None = None
        self._fences = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def copier(self) -> CudaCopier:
        return CudaCopier(self)

    def fence(self) -> None:
        with self._lock:
            # By a stream of their own the fences add up: that of another thread's stream stays in force.
            self._fences.wait_stream(torch.cuda.current_stream(self.device))
            self.fenced = self._fences.record_event()


class CudaCopier:
    """A stream that does nothing but copies. What is strided torch packs on the device, in this stream too."""

    def __init__(self, owner: CudaDevice) -> None:
        self._owner = owner
        self._stream = torch.cuda.Stream(owner.device)  # type: ignore[no-untyped-call]
        self._fenced: torch.cuda.Event | None = None

    def pinned(self, nbytes: int) -> torch.Tensor:
        # A thread begins on device 0, and would take memory there.
        with torch.cuda.device(self._owner.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        fenced = self._owner.fenced
        if fenced is not None and fenced is not self._fenced:
            self._stream.wait_event(fenced)
            self._fenced = fenced
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream.record_event())


class CudaMark:
    """An event of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout_s: float) -> bool:
        ends_at = time.monotonic() + timeout_s
        while not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= ends_at:
                return False
            time.sleep(_POLL_S)
        return True
