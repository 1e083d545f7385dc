"""Progress as server-sent events: whoever listens is woken by a change, and nobody polls the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import anyio.to_thread
from sse_starlette import ServerSentEvent

from weightwire.service.grants import Transfer

# At most five events a second for each listener: what changes in between comes with the next one.
_INTERVAL_S = 0.2


class Changes:
    """Wakes the listeners of a transfer, from any thread, and all of them when the service stops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, set[Listener]] = {}
        self.closed = False

    @property
    def num_listeners(self) -> int:
        with self._lock:
            return sum(map(len, self._listeners.values()))

    def transfer_changed(self, before: Transfer, after: Transfer) -> None:
        with self._lock:
            for listener in self._listeners.get(after.transfer_id, ()):
                listener.wake()

    def close(self) -> None:
        """End every stream: listeners wake up, and see that it is over."""
        with self._lock:
            self.closed = True
            for listeners in self._listeners.values():
                for listener in listeners:
                    listener.wake()

    @contextmanager
    def listen(self, transfer_id: str) -> Iterator[Listener]:
        """Listen to a transfer, from the running event loop; what has changed before is not told."""
        listener = Listener()
        with self._lock:
            self._listeners.setdefault(transfer_id, set()).add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners[transfer_id].discard(listener)
                if not self._listeners[transfer_id]:
                    del self._listeners[transfer_id]


class Listener:
    """One listener, of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Wake the listener; from any thread."""
        self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self) -> None:
        """Wait for a change since the last `wait`."""
        await self._changed.wait()
        self._changed.clear()


async def progress_events(
    changes: Changes,
    transfer_id: str,
    *,
    read: Callable[[], Transfer],
    render: Callable[[Transfer], str],
    last_sequence: int = 0,
) -> AsyncIterator[ServerSentEvent]:
    """The events of one transfer: the present one at once, then one for each change, until it has ended.

    Args:
        read: Reads the transfer; may block.
        render: The data of an event.
        last_sequence: What the client has seen already.
    """
    # Listening begins before the first read, so that no change falls between the two.
    with changes.listen(transfer_id) as listener:
        while not changes.closed:
            transfer = await anyio.to_thread.run_sync(read)
            if transfer.sequence > last_sequence:
                last_sequence = transfer.sequence
                yield ServerSentEvent(data=render(transfer), event="progress", id=str(transfer.sequence))
            if transfer.state.is_final:
                return
            await listener.wait()
            if not changes.closed:
                await asyncio.sleep(_INTERVAL_S)
