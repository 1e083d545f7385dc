"""The deadline and the stop button of one transfer, shared by all its threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from weightwire.transfer.errors import CancelledError, DeadlineError, TransferError

# A thread cannot be told to wait for longer; reached from "no deadline", which callers write as infinity.
_LONGEST_WAIT_S = threading.TIMEOUT_MAX


class Control:
    """Says how long a transfer may take, and whether somebody stopped it."""

    def __init__(self, *, deadline_s: float) -> None:
        """Args:
        deadline_s: Seconds from now.
        """
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + min(deadline_s, _LONGEST_WAIT_S)
        self._lock = threading.Lock()
        self._error: TransferError | None = None
        self._stopped = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, 0 when it is over."""
        return max(0.0, self._ends_at - time.monotonic())

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """Stop the transfer. From any thread, more than once."""
        self.stop(CancelledError(f"transfer: {reason}"))

    def stop(self, error: TransferError) -> None:
        """End the transfer with `error`; the first one stands. From any thread."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            callbacks = list(self._callbacks)
        self._stopped.set()
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Raises:
        TransferError: With which somebody stopped it: `CancelledError` after `cancel`.
        DeadlineError: If its time is over.
        """
        if self._error is not None:
            raise self._error
        if not self.remaining_s:
            raise DeadlineError(f"transfer: not done within its deadline of {self._deadline_s:g} s")

    def pause(self, seconds: float) -> None:
        """Wait, but not past the deadline nor once stopped.

        Raises:
            CancelledError: As `check`.
            DeadlineError: As `check`.
        """
        self._stopped.wait(min(seconds, self.remaining_s))
        self.check()

    @contextlib.contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` from the cancelling thread while the block runs; at once if stopped already."""
        with self._lock:
            self._callbacks.append(callback)
            stopped = self._error is not None
        if stopped:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)
