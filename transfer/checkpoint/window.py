"""A sliding window of worker threads over files: order kept, memory bounded, errors in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Job = TypeVar("Job")
Parsed = TypeVar("Parsed")

Parse = Callable[[Job, Callable[[], bool]], Parsed]


def slide(
    jobs: Sequence[Job],
    parse: Parse[Job, Parsed],
    *,
    workers: int,
    size_of: Callable[[Job], int] = lambda _: 0,
    max_buffered_bytes: int | None = None,
) -> Generator[Parsed, None, None]:
    """Parse `jobs` ahead of the consumer, at most `workers` at once, and yield the results in the order of `jobs`.

    At most `workers + 1` jobs are submitted and not yet yielded. With the one that the consumer holds, `workers + 2`
    results are alive, if it lets go of each before it asks for the next (L37).

    Args:
        jobs: What to parse, in order.
        parse: Called in a worker with a job and a function that says whether to give up. What it raises then is lost;
            what it raises otherwise surfaces when the job's turn comes, and nothing after it is parsed.
        workers: At least 1.
        size_of: Bytes that a job's result keeps.
        max_buffered_bytes: Bound on the bytes of all that is submitted and not yet let go of; a job that is larger
            alone is parsed alone.

    Yields:
        Results. Closing early drops what is queued, stops what runs, and returns when no worker is left.
    """
    if workers < 1:
        raise ValueError(f"window: {workers} workers, expected at least 1")
    window = _Window(jobs, parse, workers, size_of=size_of, limit=max_buffered_bytes)
    try:
        while window.submit_what_fits():
            # No name for it here: a frame that waits would keep it alive beside the next one.
            yield window.take()
            window.release()
    finally:
        window.close()


class _Window(Generic[Job, Parsed]):
    def __init__(
        self,
        jobs: Sequence[Job],
        parse: Parse[Job, Parsed],
        workers: int,
        *,
        size_of: Callable[[Job], int],
        limit: int | None,
    ) -> None:
        self._waiting = deque((job, size_of(job)) for job in jobs)
        self._parse = parse
        self._most_submitted = workers + 1
        self._limit = limit
        self._buffered = self._held = 0
        self._submitted = deque[tuple[Future[Parsed], int]]()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="weightwire-read")

    def submit_what_fits(self) -> bool:
        """Whether there is anything to take now."""
        while self._waiting and len(self._submitted) < self._most_submitted and self._fits(self._waiting[0][1]):
            job, size = self._waiting.popleft()
            self._buffered += size
            self._submitted.append((self._pool.submit(self._parse, job, self._stop.is_set), size))
        return bool(self._submitted)

    def take(self) -> Parsed:
        """Wait for the leftmost result, then submit the next job."""
        future, self._held = self._submitted.popleft()
        result = future.result()
        self.submit_what_fits()
        return result

    def release(self) -> None:
        """The consumer has let go of what it took."""
        self._buffered -= self._held
        self._held = 0

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fits(self, size: int) -> bool:
        return self._limit is None or self._buffered == 0 or self._buffered + size <= self._limit
