"""Ranks of one process side by side: in which threads, in which order, and what a failure does to the others."""

from __future__ import annotations

import threading

import pytest

from weightwire.service.client.side_by_side import MOST_AT_ONCE, for_each_rank
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, CoverageError, DeadlineError, IntegrityError, TransferError

PATIENCE_S = 30.0


@pytest.fixture
def control() -> Control:
    return Control(deadline_s=PATIENCE_S)


class Stalled:
    """Work that ends when it is told to stop, or when all that may run at once have begun."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.begun: list[int] = []
        self.all_began = threading.Barrier(MOST_AT_ONCE, timeout=PATIENCE_S)

    def __call__(self, rank: int) -> int:
        self.begun.append(rank)
        self.all_began.wait()
        self._control.pause(PATIENCE_S)
        return rank


def test_one_rank_runs_in_the_thread_of_the_caller(control: Control) -> None:
    assert for_each_rank([3], lambda rank: (rank, threading.current_thread()), control) == [
        (3, threading.current_thread())
    ]


def test_several_run_at_the_same_time_and_results_come_in_order(control: Control) -> None:
    together = threading.Barrier(MOST_AT_ONCE, timeout=PATIENCE_S)

    def work(rank: int) -> int:
        together.wait()
        return rank * rank

    assert for_each_rank(range(2 * MOST_AT_ONCE), work, control) == [rank**2 for rank in range(2 * MOST_AT_ONCE)]


def test_first_failure_stops_those_that_run_and_those_that_wait(control: Control) -> None:
    stalled = Stalled(control)

    def work(rank: int) -> int:
        if rank:
            return stalled(rank)
        stalled.begun.append(rank)
        stalled.all_began.wait()
        raise CoverageError("1 tensors are held by no source", missing=["w"])

    with pytest.raises(CoverageError) as failure:
        for_each_rank(range(2 * MOST_AT_ONCE), work, control)
    assert str(failure.value) == "rank 0: 1 tensors are held by no source"
    assert failure.value.facts == {"missing": ["w"], "target_rank": 0}
    assert sorted(stalled.begun) == list(range(MOST_AT_ONCE))


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(CancelledError("transfer: stopped"), id="somebody said stop"),
        pytest.param(DeadlineError("transfer: too late"), id="the time is over"),
        pytest.param(IntegrityError("what the service said"), id="the service ended it"),
    ],
)
def test_what_ends_the_whole_transfer_is_told_as_it_is(control: Control, error: TransferError) -> None:
    stalled = Stalled(control)
    stalled.all_began = threading.Barrier(MOST_AT_ONCE + 1, timeout=PATIENCE_S)

    def stop() -> None:
        stalled.all_began.wait()
        control.stop(error)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(type(error)) as failure:
        for_each_rank(range(MOST_AT_ONCE), stalled, control)
    stopper.join()
    assert str(failure.value) == str(error)


def test_bug_in_one_rank_ends_the_others_too(control: Control) -> None:
    stalled = Stalled(control)

    def work(rank: int) -> int:
        if rank == 1:
            stalled.all_began.wait()
            raise KeyError("a bug")
        return stalled(rank)

    with pytest.raises(KeyError):
        for_each_rank(range(MOST_AT_ONCE), work, control)
    with pytest.raises(CancelledError, match="rank 1: failed"):
        control.check()
