"""Python's cyclic garbage collector, held back while hundreds of thousands of small values are made.

Manifests and plans of large models are many tuples that point at each other in one direction only. The collector walks
through all of them again and again as they grow, and finds nothing: planning took four times as long with it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_paused = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in this process until the block ends; blocks of several threads may overlap.

    What has no cycles is freed as ever. A process that has switched the collector off keeps it so.
    """
    global _paused, _was_enabled
    with _lock:
        if not _paused:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_enabled:
                gc.enable()
