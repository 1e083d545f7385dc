"""SIGTERM and SIGINT: a long-running command drains and exits 0, a one-shot command is cancelled."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` at the first signal, in the main thread; a second one ends the process the usual way."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def react(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        callback()

    for number in _SIGNALS:
        signal.signal(number, react)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_signal(on_waiting: Callable[[], None], *, unless: Sequence[threading.Event] = ()) -> bool:
    """Wait for a signal, or for one of `unless` to be set; returns True if it was a signal.

    Args:
        on_waiting: Called once a signal is awaited: who is told that we are ready may send one at once.
    """
    ended = threading.Event()
    with on_signal(ended.set):
        on_waiting()
        # A wait without an end would not let the handler run.
        while not ended.wait(0.2):
            if any(event.is_set() for event in unless):
                return False
    return True
