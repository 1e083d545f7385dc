"""Runs the ranks of one process side by side: all of them succeed, or the first failure ends them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, DeadlineError, TransferError

Result = TypeVar("Result")

# More at once would only share the same network card and disk, with more connections to each source.
MOST_AT_ONCE = 4


def for_each_rank(ranks: Sequence[int], work: Callable[[int], Result], control: Control) -> list[Result]:
    """Do the work of each rank, a few at a time, each in a thread of its own; one rank alone in the caller's.

    Args:
        ranks: Their numbers.
        work: Given a rank's number; stops when `control` says so.
        control: Of the transfer. Of several ranks, the failure of one stops it for the others.

    Returns:
        The results, in the order of the ranks.

    Raises:
        TransferError: The first failure, with the number of its rank in front.
    """
    if len(ranks) == 1:
        return [work(ranks[0])]
    return _Crew(work, control).run(ranks)


class _Crew(Generic[Result]):
    def __init__(self, work: Callable[[int], Result], control: Control) -> None:
        self._work = work
        self._control = control
        self._lock = threading.Lock()
        self._first: BaseException | None = None

    def run(self, ranks: Sequence[int]) -> list[Result]:
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(ranks)), thread_name_prefix="weightwire-rank") as pool:
            futures = [pool.submit(self._attempt, rank) for rank in ranks]
            try:
                wait(futures)
            except BaseException:
                # Ctrl-C where nobody handles it: the threads have to hear of it.
                self._control.cancel("interrupted")
                raise
        if self._first is not None:
            raise self._first
        return [future.result() for future in futures]

    def _attempt(self, rank: int) -> Result:
        try:
            # Those whose turn comes after a failure do not begin.
            self._control.check()
            return self._work(rank)
        except BaseException as error:
            self._stop_others(rank, error)
            raise

    def _stop_others(self, rank: int, error: BaseException) -> None:
        with self._lock:
            if self._first is not None:
                return
            self._first = error if self._came_from_outside(error) else _named(error, rank)
        stopped = self._first
        self._control.stop(
            stopped if isinstance(stopped, TransferError) else CancelledError(f"rank {rank}: failed: {error!r}")
        )

    def _came_from_outside(self, error: BaseException) -> bool:
        """Whether the whole transfer was ended by it, and not a rank."""
        try:
            self._control.check()
        except TransferError as ended:
            return ended is error or isinstance(error, (CancelledError, DeadlineError))
        return False


def _named(error: BaseException, rank: int) -> BaseException:
    """The same error with the rank in front."""
    if not isinstance(error, TransferError):
        return error
    named = type(error)(f"rank {rank}: {error}", **{**error.facts, "target_rank": rank})
    named.__cause__ = error
    return named
