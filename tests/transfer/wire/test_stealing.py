"""How long several sources take together, against what their rates add up to: in simulated time, so exactly."""

from __future__ import annotations

import random

import pytest

from tests.transfer.wire import simulation
from tests.transfer.wire.simulation import MIB, Simulation, Stream, flat, part, race, whole
from weightwire.transfer.sharing import even_shares
from weightwire.transfer.wire.claims import Reader
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.rounds import seconds_saved

MODEL_BYTES = 1024 * MIB
FULL_RATE = 25e6


def source(name: object, rate: float, *, stops_at: float = float("inf")) -> list[Stream]:
    """Two streams that share a link."""
    return [Stream(reader=Reader(name), rate=rate / 2, stops_at=stops_at) for _ in range(2)]


def sum_of_rates(sources: list[list[Stream]]) -> float:
    return sum(stream.rate for streams in sources for stream in streams)


@pytest.mark.parametrize("ratio", [1, 4, 10], ids=lambda ratio: f"one at 1/{ratio} of the rate")
@pytest.mark.parametrize("num_sources", range(2, 9), ids=lambda n: f"{n} sources")
@pytest.mark.parametrize("rate", [25e6, 125e6], ids=["200 Mbit/s", "1 Gbit/s"])
def test_slow_source_costs_a_tenth_at_most_and_nothing_comes_twice(num_sources: int, ratio: int, rate: float) -> None:
    sources = [source("slow", rate / ratio), *(source(number, rate) for number in range(num_sources - 1))]
    found, streams = race(MODEL_BYTES, sources)
    assert found.ended_at <= 1.1 * MODEL_BYTES / sum_of_rates(sources)
    assert set(found.fetched.values()) == {1}
    # A request for each quarter of a second of each stream, and some on the way there and at the end.
    assert sum(stream.requests for stream in streams) <= MODEL_BYTES / MIB * 0.65


@pytest.mark.parametrize("seed", range(20))
def test_sources_of_any_rates_are_through_within_a_tenth_of_the_ideal(seed: int) -> None:
    chance = random.Random(seed)
    sources = [source(number, 10 ** chance.uniform(6.5, 8)) for number in range(chance.randint(2, 8))]
    found, _ = race(MODEL_BYTES, sources)
    ideal = MODEL_BYTES / sum_of_rates(sources)
    # A frame that has begun is waited for, and a latency before each request shows where all is over in a moment.
    assert found.ended_at <= 1.1 * ideal + 0.1
    assert set(found.fetched.values()) == {1}


@pytest.mark.parametrize("num_sources", [2, 4, 8])
@pytest.mark.parametrize("part_of_time", [0.0, 0.5, 0.9])
def test_source_that_stops_costs_no_more_than_until_it_is_dropped(num_sources: int, part_of_time: float) -> None:
    stops_at = part_of_time * MODEL_BYTES / (num_sources * FULL_RATE)
    sources = [source(number, FULL_RATE) for number in range(num_sources - 1)]
    ideal = stops_at + (MODEL_BYTES - stops_at * num_sources * FULL_RATE) / sum_of_rates(sources)
    found, _ = race(MODEL_BYTES, [*sources, source("stops", FULL_RATE, stops_at=stops_at)])
    # Long before it is dropped the others have taken all but the frames that it is in.
    assert found.ended_at <= max(1.1 * ideal, ideal + simulation.DROPPED_S)
    assert set(found.fetched.values()) == {1}


def test_source_that_becomes_slow_in_the_middle_of_a_claim_loses_the_rest_of_it() -> None:
    fast, slowing = source("fast", FULL_RATE), source("slowing", FULL_RATE)
    for stream in slowing:
        stream.slows_at, stream.slow_rate = 1.0, FULL_RATE / 100
    found, _ = race(64 * MIB, [fast, slowing])
    # Two frames of a hundredth of the rate, which nobody may take: 8 seconds each.
    assert found.ended_at <= 1.0 + 2 * MIB / (FULL_RATE / 100)
    assert sum(stream.cut for stream in slowing) <= 2
    assert set(found.fetched.values()) == {1}


def test_far_source_mostly_sends_and_hardly_waits_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LATENCY_S", 0.1)
    sources = [source("near", FULL_RATE), source("far", FULL_RATE)]
    found, _ = race(MODEL_BYTES, sources)
    assert found.ended_at <= 1.15 * MODEL_BYTES / sum_of_rates(sources)


# Two manifests


def pull_two(rates: tuple[float, float], *, common: int, alone: tuple[int, int]) -> tuple[float, int]:
    """Two sources, one of each manifest, that have `common` bytes both and some each alone; planned as `fill` does.

    Returns:
        When all is there, and how many rounds it took.
    """
    left_common, left, rounds, now = common, list(alone), 0, 0.0
    known: tuple[float, float] | None = None
    while left_common + sum(left):
        rounds += 1
        held = {(0, 1): left_common, (0,): left[0], (1,): left[1]}
        shares = even_shares(held, known or (1, 1))[0, 1]
        dealt = [int(left_common * shares[0]), left_common - int(left_common * shares[0])]
        wanted = [left[number] + dealt[number] for number in (0, 1)]
        seconds, done = one_round(rates, wanted)
        now += seconds
        known = rates
        for number in (0, 1):
            # Its own come first, in this model.
            own = min(left[number], done[number])
            left[number] -= own
            left_common -= done[number] - own
    return now, rounds


def one_round(rates: tuple[float, float], wanted: list[int]) -> tuple[float, list[int]]:
    """Both read until one is through so long before the other that it is worth another plan."""
    times = [nbytes / rate for nbytes, rate in zip(wanted, rates, strict=True)]
    first = 0 if times[0] <= times[1] else 1
    behind = wanted[1 - first] - rates[1 - first] * times[first]
    if seconds_saved(round(behind), busy=rates[1 - first], idle=rates[first]) <= 0.25:
        return max(times), wanted
    # Everybody stops at the end of the frame that is on its way.
    stopped = -(-int(rates[1 - first] * times[first]) // MIB) * MIB
    done = [0, 0]
    done[first], done[1 - first] = wanted[first], min(stopped, wanted[1 - first])
    return max(times[first], done[1 - first] / rates[1 - first]), done


@pytest.mark.parametrize("ratio", [1, 4, 10])
@pytest.mark.parametrize("alone", [(0, 0), (64 * MIB, 0), (0, 64 * MIB)], ids=str)
def test_sources_of_two_manifests_are_planned_again_by_their_rates(ratio: int, alone: tuple[int, int]) -> None:
    rates = (FULL_RATE / ratio, FULL_RATE)
    found, rounds = pull_two(rates, common=1024 * MIB, alone=alone)
    total = 1024 * MIB + sum(alone)
    assert found <= 1.1 * max(total / sum(rates), alone[0] / rates[0], alone[1] / rates[1])
    assert rounds <= 4


@pytest.mark.parametrize(
    ("nbytes", "busy", "idle", "saved"),
    [
        pytest.param(0, 1.0, 1.0, 0.0, id="nothing is left"),
        pytest.param(100, 10.0, 0.0, 0.0, id="nobody is idle"),
        pytest.param(100, 10.0, 10.0, 5.0, id="as fast: half of the time"),
        pytest.param(100, 10.0, 30.0, 7.5, id="three times as fast: three quarters"),
        pytest.param(100, 0.0, 1.0, float("inf"), id="nothing comes of the others"),
    ],
)
def test_seconds_that_idle_sources_could_save(nbytes: int, busy: float, idle: float, saved: float) -> None:
    assert seconds_saved(nbytes, busy=busy, idle=idle) == saved


def test_ledger_that_is_ended_early_keeps_what_is_verified_and_the_next_one_has_the_rest() -> None:
    """The two halves of a round that is planned again, with streams in the middle of their frames."""
    manifest = flat(64 * MIB)
    first = Simulation(manifest)
    ledger = Ledger(manifest, whole(64 * MIB), num_streams=2, num_sources=2, clock=first.clock)
    streams = [*source("x", FULL_RATE)[:1], *source("y", FULL_RATE / 3)[:1]]
    for stream in streams:
        first.at(0, lambda stream=stream: first.start(stream, ledger))  # type: ignore[misc]
    first.closes_at = 1.0
    first.at(first.closes_at, ledger.end_soon)
    first.run()
    left = sorted(set(range(64)) - set(first.fetched))
    assert ledger.left_bytes == len(left) * MIB
    second = Simulation(manifest)
    rest = Ledger(manifest, [part(at * MIB, MIB) for at in left], num_streams=2, num_sources=2, clock=second.clock)
    for stream in streams:
        second.at(0, lambda stream=stream: second.start(stream, rest))  # type: ignore[misc]
    second.run()
    assert (first.fetched + second.fetched) == dict.fromkeys(range(64), 1)
