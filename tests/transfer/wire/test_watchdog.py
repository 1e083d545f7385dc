"""The watchdog sees who does not deliver, by counters and a clock that the test turns."""

from __future__ import annotations

import pytest

from weightwire.transfer.wire.watchdog import Meter, Reading, Watchdog

RATE = 100.0
WINDOW_S = 1.5
TICK_S = 0.25


class Watched:
    """One process, looked at every quarter of a second."""

    def __init__(self) -> None:
        self.dog = Watchdog(min_rate=RATE, window_s=WINDOW_S)
        self.meter = Meter()
        self.now = 100.0
        self.meter.asking = True
        self._look()

    def _look(self) -> None:
        self.dog.observe(self.now, {"x": Reading.of(self.meter)})

    def passes(self, seconds: float, *, bytes_per_s: float = 0.0, waits: bool = False) -> Watched:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.meter.received += int(bytes_per_s * TICK_S)
            if waits:
                self.meter.received += 8
                self.meter.waits += 1
            self._look()
        return self

    @property
    def slow_s(self) -> float:
        return self.dog.slow_s("x", self.now)

    @property
    def starved_s(self) -> float:
        return self.dog.starved_s("x", self.now)


@pytest.mark.parametrize("bytes_per_s", [0.0, 4.0, 96.0], ids=["silent", "a byte now and then", "just below the rate"])
def test_process_that_delivers_too_little_is_slow_once_a_window_is_over(bytes_per_s: float) -> None:
    watched = Watched()
    assert watched.passes(WINDOW_S - TICK_S, bytes_per_s=bytes_per_s).slow_s == 0
    assert watched.passes(TICK_S, bytes_per_s=bytes_per_s).slow_s == WINDOW_S
    assert watched.passes(10, bytes_per_s=bytes_per_s).slow_s == WINDOW_S + 10


def test_process_that_delivers_is_never_slow() -> None:
    assert Watched().passes(60, bytes_per_s=RATE).slow_s == 0


def test_process_that_stops_is_noticed_within_two_seconds_however_fast_it_was() -> None:
    watched = Watched().passes(30, bytes_per_s=1e9)
    assert watched.passes(WINDOW_S - TICK_S).slow_s == 0
    assert watched.passes(TICK_S).slow_s >= WINDOW_S


def test_process_that_delivers_again_has_never_been_slow() -> None:
    watched = Watched().passes(5)
    assert watched.passes(TICK_S, bytes_per_s=1e6).slow_s == 0
    assert watched.passes(WINDOW_S - TICK_S).slow_s == 0


def test_process_that_is_not_asked_owes_nothing() -> None:
    watched = Watched().passes(WINDOW_S - TICK_S)
    watched.meter.asking = False
    assert watched.passes(60).slow_s == 0
    assert watched.starved_s == 0
    watched.meter.asking = True
    assert watched.passes(WINDOW_S).slow_s == 0
    assert watched.passes(TICK_S).slow_s == WINDOW_S


def test_process_that_says_that_it_waits_is_not_slow_but_starves() -> None:
    watched = Watched().passes(30, waits=True)
    assert watched.slow_s == 0
    assert watched.starved_s == 30
    # Once it says nothing any more it has a window.
    assert watched.passes(WINDOW_S - TICK_S).slow_s == 0
    assert watched.passes(TICK_S).slow_s == WINDOW_S


def test_process_that_waits_between_its_frames_does_not_starve() -> None:
    watched = Watched()
    for _ in range(10):
        watched.passes(5, waits=True).passes(TICK_S, bytes_per_s=1000)
    assert (watched.slow_s, watched.starved_s) == (0, 0)


def test_time_in_which_nobody_looked_is_held_against_nobody() -> None:
    """The target itself was stopped, or its interpreter was held: what has not come meanwhile lies in its sockets."""
    watched = Watched().passes(WINDOW_S - TICK_S)
    watched.now += 60
    assert watched.passes(TICK_S).slow_s == 0
    assert watched.passes(WINDOW_S - TICK_S).slow_s == 0
    assert watched.passes(TICK_S).slow_s == WINDOW_S


def test_streams_of_one_process_count_together() -> None:
    busy, silent, idle = Meter(), Meter(), Meter()
    busy.asking = silent.asking = True
    busy.received, busy.waits, silent.received = 5, 1, 7
    assert Reading.of(busy, silent, idle) == Reading(asking=True, received=12, waits=1)
    assert Reading.of(idle) == Reading(asking=False, received=0, waits=0, unanswered=True)


def test_processes_are_judged_apart_and_can_be_forgotten() -> None:
    dog = Watchdog(min_rate=RATE, window_s=WINDOW_S)
    now = 0.0
    for tick in range(20):
        now = tick * TICK_S
        dog.observe(
            now,
            {
                "good": Reading(asking=True, received=tick * 1000, waits=0),
                "bad": Reading(asking=True, received=0, waits=0),
            },
        )
    assert dog.slow_s("good", now) == 0
    assert dog.slow_s("bad", now) == now
    dog.forget("bad")
    assert dog.slow_s("bad", now) == 0
    assert dog.slow_s("nobody", now) == dog.starved_s("nobody", now) == 0
