"""Plays a schedule against a fleet, until the time is over, and checks everything on the way and at the end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.processes import Json, wait_until
from tests.faults.proxy import answered
from tests.soak.answers import cut_at, flipped_at, slowed
from tests.soak.fleet import Fleet, FleetTarget
from tests.soak.leftovers import Holdings
from tests.soak.schedule import Mishap, Round, rounds

# Threads that answer requests are kept for a while; more than these never are.
# Source: anyio 4, to_thread: 40 worker threads by default.
_WORKER_THREADS = 40
# Idle connections are closed by then, and threads that served them have ended.
_QUIET_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a soak has seen.

    Attributes:
        states: How targets ended.
        hits: How often each mishap met a transfer that was still on its way.
        probes: Questions to targets that were not ready.
    """

    rounds: int
    states: Counter[str]
    hits: Counter[Mishap]
    probes: int


def soak(*, seed: int, seconds: float, max_rounds: int | None = None, tell: Callable[[str], None]) -> Tally:
    """Play rounds for so long, then look for leftovers.

    Raises:
        AssertionError: At the first thing that is not as it has to be.
    """
    before = Holdings.of(os.getpid())
    ends_at = time.monotonic() + seconds
    states, hits = Counter[str](), Counter[Mishap]()
    probes = number = 0
    with Fleet() as fleet:
        fresh = _calm_holdings(fleet)
        for each in rounds(seed):
            if time.monotonic() >= ends_at or number == max_rounds:
                break
            number += 1
            game = _Game(fleet, each)
            ended = game.play()
            states.update(ended.values())
            hits[each.mishap] += game.hit
            probes += game.probes
            told = ", ".join(f"{name} {state}" for name, state in ended.items())
            tell(f"{each.number:4} {each.mishap:16} {'' if game.hit else '(too late) '}{told}")
            fleet.heal()
        _check_leftovers(fleet, fresh)
    wait_until(lambda: Holdings.of(os.getpid()).is_within(before))
    return Tally(rounds=number, states=states, hits=hits, probes=probes)


class _Game:
    """One round.

    Attributes:
        hit: Whether its mishap came in time.
    """

    def __init__(self, fleet: Fleet, order: Round) -> None:
        self.hit = False
        self._fleet = fleet
        self._order = order
        self._targets: list[FleetTarget] = []
        self._spoiled: FleetTarget | None = None
        self._ends: dict[str, str] = {}

    @property
    def probes(self) -> int:
        return sum(target.probes for target in self._targets)

    def play(self) -> dict[str, str]:
        """Play it; returns how each target ended."""
        fleet, order = self._fleet, self._order
        for source in fleet.sources:
            source.proxy.hold_after(int(order.at * fleet.nbytes / len(fleet.sources)), further=True)
        self._lay_traps()
        self._targets = [
            fleet.start_target(f"target-{order.number}-{number}", serves=serves)
            for number, serves in enumerate(order.serves)
        ]
        self._wait_for_the_middle()
        self._strike()
        for source in fleet.sources:
            source.proxy.release()
        for target in self._targets:
            if target.instance_id not in self._ends:
                self._ends[target.instance_id] = self._end(target)
        for target in self._targets:
            if target.serves and self._ends[target.instance_id] == "ready":
                assert target.process.stop() == 0, target.process.log
            target.process.close()
        return dict(sorted(self._ends.items()))

    def _lay_traps(self) -> None:
        """Faults on the way are there from the beginning; the places where they are differ."""
        order, proxy = self._order, self._fleet.sources[self._order.source].proxy
        match order.mishap:
            case Mishap.FLIP:
                proxy.faults.extend(map(flipped_at, order.where))
            case Mishap.TRUNCATE:
                proxy.faults.extend(map(cut_at, order.where))
            case Mishap.REFUSE:
                proxy.always = answered("503 Service Unavailable", b"", ("Retry-After", "1"))
            case Mishap.SLOW:
                proxy.always = slowed
            case _:
                return
        self.hit = True

    def _wait_for_the_middle(self) -> None:
        """Until a source is held, or nothing is left to wait for; targets are asked meanwhile what they serve."""

        def is_there() -> bool:
            for target in self._targets:
                if target.serves:
                    self._fleet.probe(target)
            return any(source.proxy.is_held for source in self._fleet.sources) or self._all_ended()

        wait_until(is_there)

    def _all_ended(self) -> bool:
        known = {item["target_instance_id"]: item["state"] for item in self._fleet.client.transfers()}
        states = [known.get(target.instance_id) for target in self._targets]
        return all(state in ("ready", "failed", "cancelled") for state in states)

    def _strike(self) -> None:
        fleet, victim = self._fleet, self._fleet.sources[self._order.source]
        if self._order.mishap in (Mishap.CANCEL, Mishap.KILL_TARGET, Mishap.STOP_TARGET):
            self._spoiled = self._targets[0]
        self.hit = self.hit or not self._all_ended()
        match self._order.mishap:
            case Mishap.KILL:
                fleet.kill_source(victim)
            case Mishap.STOP:
                victim.process.send_signal(signal.SIGSTOP)
            case Mishap.NEW_VERSION:
                fleet.renew_source(victim)
            case Mishap.SERVICE_RESTART:
                fleet.restart_service()
            case Mishap.CANCEL:
                self._cancel(self._targets[0])
            case Mishap.KILL_TARGET:
                self._targets[0].process.kill()
            case Mishap.STOP_TARGET:
                self._targets[0].process.send_signal(signal.SIGSTOP)
            case _:
                pass

    def _cancel(self, target: FleetTarget) -> None:
        for item in self._fleet.client.transfers():
            if item["target_instance_id"] == target.instance_id:
                self._fleet.client.cancel(str(item["transfer_id"]))
                # It hears of it while it is held, or it would be ready before.
                self._ends[target.instance_id] = self._end(target)

    def _end(self, target: FleetTarget) -> str:
        """Wait for the end of a target, and check it; returns its state."""
        mishap = self._order.mishap
        if target is self._spoiled and mishap is not Mishap.CANCEL:
            target.process.kill()
            return "killed"
        said = target.process.line()
        answer = said["pull"] if said.get("ready") else said
        assert isinstance(answer, dict)
        state = str(answer["state"])
        if target is self._spoiled:
            assert state in ("cancelled", "ready"), f"{target.instance_id}: {answer} {target.process.log}"
        else:
            # Whatever happens to one source, two others have everything.
            assert state == "ready", f"{target.instance_id}: {answer} {target.process.log}"
        if state == "ready":
            self._check(target, answer)
        return state

    def _check(self, target: FleetTarget, answer: Json) -> None:
        version = self._fleet.client.transfer(str(answer["transfer_id"]))["weight_version"]
        assert isinstance(version, int)
        self._fleet.check_saved(target, version)
        if target.serves:
            self._fleet.check_served(target, version)


def _calm_holdings(fleet: Fleet) -> dict[str, Holdings]:
    """What the long-lived processes hold when nobody reads any more."""
    quiet = Round(number=-1, mishap=Mishap.NOTHING, source=0, at=0.5, serves=(True, False, True), where=())
    _Game(fleet, quiet).play()
    return {name: Holdings.of(pid) for name, pid in fleet.long_lived.items()}


def _check_leftovers(fleet: Fleet, fresh: dict[str, Holdings]) -> None:
    """After everything, a quiet round once more: nobody holds more than when they were fresh."""
    _calm_holdings(fleet)
    for name, pid in fleet.long_lived.items():
        allowed = fresh[name]
        if name == "service":
            allowed = Holdings(
                threads=allowed.threads + _WORKER_THREADS, sockets=allowed.sockets, descriptors=allowed.descriptors
            )
        ends_at = time.monotonic() + _QUIET_S
        while not (holds := Holdings.of(pid)).is_within(allowed):
            assert time.monotonic() < ends_at, f"{name} holds {holds}, fresh it held {fresh[name]}"
            time.sleep(0.1)
