"""The deadline and the stop button."""

from __future__ import annotations

import threading

import pytest

from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, DeadlineError


def test_control_says_nothing_while_there_is_time() -> None:
    control = Control(deadline_s=60)
    control.check()
    control.pause(0)
    assert 0 < control.remaining_s <= 60


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_control_whose_time_is_over_says_so(deadline_s: float) -> None:
    control = Control(deadline_s=deadline_s)
    assert control.remaining_s == 0
    with pytest.raises(DeadlineError, match="deadline"):
        control.check()
    with pytest.raises(DeadlineError):
        control.pause(60)


def test_control_without_an_end_can_be_waited_on() -> None:
    """Or a deadline of infinity would end in an OverflowError deep inside a thread."""
    control = Control(deadline_s=float("inf"))
    threading.Thread(target=control.cancel).start()
    with pytest.raises(CancelledError):
        control.pause(float("inf"))
    finished = threading.Thread(target=int)
    finished.start()
    finished.join(control.remaining_s)


def test_cancel_keeps_its_first_reason_and_wins_over_the_deadline() -> None:
    control = Control(deadline_s=0)
    control.cancel("because")
    control.cancel("too late")
    with pytest.raises(CancelledError, match="because"):
        control.check()


def test_cancel_wakes_who_pauses() -> None:
    control = Control(deadline_s=60)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            control.pause(60)
        except CancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    control.cancel()
    thread.join(30)
    assert len(caught) == 1


def test_callback_is_called_once_while_its_block_runs() -> None:
    control = Control(deadline_s=60)
    calls: list[str] = []
    with control.on_cancel(lambda: calls.append("before")):
        pass
    with control.on_cancel(lambda: calls.append("outer")), control.on_cancel(lambda: calls.append("inner")):
        control.cancel()
        control.cancel()
    assert calls == ["outer", "inner"]


def test_callback_is_called_at_once_if_it_is_too_late() -> None:
    control = Control(deadline_s=60)
    control.cancel()
    calls: list[str] = []
    with control.on_cancel(lambda: calls.append("now")):
        assert calls == ["now"]
    assert calls == ["now"]


def test_callback_is_dropped_although_its_block_raised() -> None:
    control = Control(deadline_s=60)
    calls: list[str] = []
    with pytest.raises(KeyError), control.on_cancel(lambda: calls.append("gone")):
        raise KeyError
    control.cancel()
    assert calls == []


def test_cancel_from_many_threads_calls_back_once() -> None:
    control = Control(deadline_s=60)
    calls: list[int] = []
    start = threading.Barrier(8)

    def cancel() -> None:
        start.wait(30)
        control.cancel()

    with control.on_cancel(lambda: calls.append(1)):
        threads = [threading.Thread(target=cancel) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert calls == [1]
