"""One round of a pull: who takes part, who is dropped because nothing comes, and when it is better to plan again."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.transfer.errors import SourceStalledError
from weightwire.transfer.wire.lanes import Lane, Work
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.watchdog import Reading, Watchdog

# How often it is looked in one window of the watchdog, and how rarely at most.
_LOOKS = 8
_LONGEST_LOOK_S = 0.25
# What has to be won for all to stop and to be planned again.
_WORTH_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a source may be slow.

    Attributes:
        min_rate: Bytes per second; less is slow.
        window_s: For how long, where others can deliver.
        alone_s: For how long, where nobody else can.
        waiting_s: For how long it may say that it waits.
        first_byte_s: For how long an answer may not have begun, before any of this counts.
    """

    min_rate: float
    window_s: float
    alone_s: float
    waiting_s: float
    first_byte_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Round:
    """Reads what ledgers hold, by the lanes of their manifests, until nothing more can come of it.

    Attributes:
        ledgers: By manifest digest.
        has_spare: Something beside the lanes, a disk, has what they have.
        may_end_early: Whether it may end to be planned again.
        ended_early: Whether it did.
    """

    lanes: Sequence[Lane]
    ledgers: Mapping[str, Ledger]
    work: Work
    patience: Patience
    has_spare: bool = False
    may_end_early: bool = False
    ended_early: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)
    _started: set[int] = field(default_factory=set)
    _running: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> None:
        """Returns when all threads that it started have ended."""
        look = _Look(self)
        control = self.work.control
        with control.on_cancel(self._abort):
            try:
                while self._start_due() and control.remaining_s:
                    with self._changed:
                        if self._running:
                            self._changed.wait(min(look.every_s, control.remaining_s))
                    look.take(time.monotonic())
            finally:
                if self._running:
                    self._abort()
                for thread in self._threads:
                    thread.join()

    def _start_due(self) -> bool:
        """Start the lanes whose turn it is: of each manifest the lowest tier of which any is left.

        Returns:
            Whether anybody is at work.
        """
        # Before anything is looked at: of those that have ended by now it is known why. Who ends meanwhile is looked at
        # in the next turn.
        goes_on = self._running > 0
        for digest, ledger in self.ledgers.items():
            live = [lane for lane in self.lanes if lane.endpoint.manifest == digest and lane.error is None]
            for lane in in_turn(live):
                if id(lane) not in self._started and not ledger.is_done:
                    self._start(lane, ledger)
                    goes_on = True
        return goes_on

    def _start(self, lane: Lane, ledger: Ledger) -> None:
        self._started.add(id(lane))
        threads = lane.threads(ledger, self.work, self._ended)
        with self._changed:
            self._running += len(threads)
        self._threads += threads
        for thread in threads:
            thread.start()

    def _ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _abort(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()
        for lane in self.lanes:
            lane.abort()

    def end_early(self) -> None:
        """Let everybody stop after the frame that is on its way."""
        self.ended_early = True
        for ledger in self.ledgers.values():
            ledger.end_soon()


class _Look:
    """What is seen of a round from one moment to the next."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        patience = round_.patience
        self.every_s = min(patience.window_s / _LOOKS, _LONGEST_LOOK_S)
        window_s, first_byte_s = patience.window_s, patience.first_byte_s
        self._processes = Watchdog(min_rate=patience.min_rate, window_s=window_s, first_byte_s=first_byte_s)
        # A single stream of a process that delivers is stuck when not one byte comes.
        self._streams = Watchdog(min_rate=1 / window_s, window_s=window_s, first_byte_s=first_byte_s)
        self._at = time.monotonic()
        self._received = {id(lane): _received(lane) for lane in round_.lanes}

    def take(self, now: float) -> None:
        if now - self._at < self.every_s:
            return
        self._rate(now - self._at)
        self._at = now
        lanes = defaultdict[Hashable, list[Lane]](list)
        for lane in self._round.lanes:
            if lane.error is None:
                lanes[lane.process].append(lane)
        self._watch(now, lanes)
        if self._round.may_end_early and not self._round.ended_early and self._is_worth_a_plan():
            self._round.end_early()

    def _rate(self, seconds: float) -> None:
        for lane in self._round.lanes:
            received = _received(lane)
            came = received - self._received[id(lane)]
            self._received[id(lane)] = received
            if any(stream.meter.asking for stream in lane.streams) or (came and not lane.rate):
                lane.rate = (lane.rate + came / seconds) / 2 if lane.rate else came / seconds

    def _watch(self, now: float, processes: Mapping[Hashable, Sequence[Lane]]) -> None:
        patience = self._round.patience
        meters = {
            name: [stream.meter for lane in lanes for stream in lane.streams] for name, lanes in processes.items()
        }
        self._processes.observe(now, {name: Reading.of(*found) for name, found in meters.items()})
        streams: dict[Hashable, Reading] = {
            id(meter): Reading.of(meter) for found in meters.values() for meter in found
        }
        self._streams.observe(now, streams)
        live = len(processes)
        for name, lanes in processes.items():
            slow_s, starved_s = self._processes.slow_s(name, now), self._processes.starved_s(name, now)
            allowed_s = patience.window_s if live > 1 or self._round.has_spare else patience.alone_s
            if slow_s >= allowed_s or starved_s >= patience.waiting_s:
                live -= 1
                _drop(lanes, max(slow_s, starved_s), patience)
            elif not slow_s:
                for stream in (stream for lane in lanes for stream in lane.streams):
                    if self._streams.slow_s(id(stream.meter), now) >= patience.window_s:
                        self._streams.forget(id(stream.meter))
                        stream.interrupt()

    def _is_worth_a_plan(self) -> bool:
        """Whether the sources of manifests that are through could save the others enough time."""
        idle = busy = 0.0
        left = 0
        for digest, ledger in self._round.ledgers.items():
            rate = sum(
                lane.rate for lane in self._round.lanes if lane.endpoint.manifest == digest and lane.error is None
            )
            if ledger.is_done:
                idle += rate
            else:
                busy += rate
                left += ledger.left_bytes
        return seconds_saved(left, busy=busy, idle=idle) > _WORTH_S


def _received(lane: Lane) -> int:
    return sum(stream.meter.received for stream in lane.streams)


def in_turn(live: Sequence[Lane]) -> list[Lane]:
    """Of lanes that hold one manifest, those of the lowest tier."""
    tier = min((lane.endpoint.standby for lane in live), default=0)
    return [lane for lane in live if lane.endpoint.standby == tier]


def seconds_saved(nbytes: int, *, busy: float, idle: float) -> float:
    """How much sooner `nbytes` are there if sources that are idle help those that are busy; rates in bytes/s."""
    if not nbytes or not idle:
        return 0.0
    return nbytes / busy - nbytes / (busy + idle) if busy else math.inf


def _drop(lanes: Sequence[Lane], seconds: float, patience: Patience) -> None:
    for lane in lanes:
        lane.give_up(
            SourceStalledError(
                f"{lane.endpoint}: asked, and delivered too little for {seconds:.1f} s, expected at least "
                f"{patience.min_rate:.0f} bytes/s"
            )
        )
