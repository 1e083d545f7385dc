"""The sliding window of workers: order, bounds, errors in turn, and no thread left."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from weightwire.transfer.checkpoint.window import slide

# A guard for waits that end by themselves, not a measure of anything.
PATIENCE_S = 30.0


class Shard:
    """Stands for a parsed file."""

    def __init__(self, number: int) -> None:
        self.number = number


class Parser:
    """Parses numbers to shards; knows which were begun, how many are alive, and how many there were at most."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun: list[int] = []
        self.alive: weakref.WeakSet[Shard] = weakref.WeakSet()

    def __call__(self, job: int, _: Callable[[], bool]) -> Shard:
        with self.lock:
            self.begun.append(job)
            shard = Shard(job)
            self.alive.add(shard)
            return shard

    def settle(self, expected: int) -> int:
        """The number of shards alive once `expected` jobs have been parsed; workers have nothing to do then."""
        waiting = threading.Event()
        for _ in range(int(PATIENCE_S * 1000)):
            with self.lock:
                if len(self.begun) >= expected:
                    break
            waiting.wait(0.001)
        return len(self.alive)


# L36
def test_window_has_submitted_four_files_at_the_first_pause_of_two_workers() -> None:
    parser = Parser()
    window = slide(range(10), parser, workers=2)
    assert next(window).number == 0
    parser.settle(4)
    window.close()
    assert sorted(parser.begun) == [0, 1, 2, 3]


# L36, C8
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_window_keeps_the_order_of_files(workers: int) -> None:
    # The earlier the file, the longer its worker waits for others.
    turn = threading.Barrier(min(workers, 8), timeout=PATIENCE_S)

    def parse(job: int, _: Callable[[], bool]) -> int:
        if job < workers:
            turn.wait()
        return job

    assert list(slide(range(20), parse, workers=workers)) == list(range(20))


# L37, C12
@pytest.mark.parametrize(("workers", "most"), [(1, 3), (2, 4), (4, 6), (8, 10)])
def test_window_keeps_at_most_two_shards_more_than_workers_alive(workers: int, most: int) -> None:
    parser, seen = Parser(), list[int]()
    for taken, shard in enumerate(slide(range(30), parser, workers=workers), start=1):
        assert shard.number == taken - 1
        seen.append(parser.settle(min(30, taken + workers + 1)))
        del shard
    assert max(seen) == most


# L37
@pytest.mark.parametrize(
    ("sizes", "limit", "most_alive"),
    [
        pytest.param([10] * 9, 25, 2, id="two of three fit"),
        pytest.param([10] * 9, 30, 3, id="three fit exactly"),
        pytest.param([40, 40, 40], 25, 1, id="a file above the bound goes alone"),
        pytest.param([10, 40, 10, 10], 25, 2, id="a large file waits until it is alone"),
    ],
)
def test_window_is_bounded_in_bytes(sizes: list[int], limit: int, most_alive: int) -> None:
    parser, order, seen = Parser(), list[int](), list[int]()
    window = slide(range(len(sizes)), parser, workers=8, size_of=sizes.__getitem__, max_buffered_bytes=limit)
    for shard in window:
        order.append(shard.number)
        # Nothing more is parsed while this one is held, so what has begun is all there will be.
        seen.append(parser.settle(_begun_when_held(sizes, shard.number, limit)))
        del shard
    assert order == list(range(len(sizes)))
    assert max(seen) == most_alive


def _begun_when_held(sizes: list[int], held: int, limit: int) -> int:
    """Jobs that are submitted while `held` is with the consumer: as many after it as fit beside it."""
    count, buffered = held + 1, sizes[held]
    while count < len(sizes) and buffered + sizes[count] <= limit:
        buffered += sizes[count]
        count += 1
    return count


def workers_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-read")]


# L39
def test_error_of_the_third_file_comes_after_the_first_two_and_leaves_no_thread() -> None:
    begun = list[int]()

    def parse(job: int, _: Callable[[], bool]) -> int:
        begun.append(job)
        if job == 2:
            raise OSError("file 3 is corrupt")
        return job

    window, got = slide(range(50), parse, workers=2), list[int]()
    with pytest.raises(OSError, match="file 3 is corrupt"):
        got.extend(window)
    assert got == [0, 1]
    assert workers_left() == []
    assert len(begun) <= 6


# L39
def test_closing_early_stops_what_runs_and_drops_what_is_queued() -> None:
    stopped, running = list[int](), threading.Event()

    def parse(job: int, is_stopped: Callable[[], bool]) -> int:
        if job == 0:
            return job
        running.set()
        pause = threading.Event()
        while not is_stopped():
            pause.wait(0.001)
        stopped.append(job)
        return job

    window = slide(range(9), parse, workers=1)
    assert next(window) == 0
    assert running.wait(PATIENCE_S)
    window.close()
    assert workers_left() == []
    assert stopped == [1]


def test_window_without_jobs_is_empty() -> None:
    assert list(slide([], Parser(), workers=2)) == []


def test_window_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        next(slide([1], Parser(), workers=0))
