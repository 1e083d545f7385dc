"""The soak itself: its schedule follows from its seed, what it does to answers it does, and a few rounds of it pass."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import httpx
import pytest

from tests.faults.proxy import Fault, Proxy
from tests.soak.answers import cut_at, flipped_at, slowed
from tests.soak.leftovers import Holdings
from tests.soak.run import soak
from tests.soak.schedule import MAX_TARGETS, NUM_SOURCES, Mishap, rounds
from weightwire.service.server import running_service
from weightwire.service.settings import Settings


def test_schedule_is_that_of_its_seed() -> None:
    assert list(islice(rounds(7), 50)) == list(islice(rounds(7), 50))
    assert list(islice(rounds(7), 50)) != list(islice(rounds(8), 50))


def test_schedule_has_each_mishap_once_before_any_comes_again() -> None:
    mishaps = [each.mishap for each in islice(rounds(3), 3 * len(Mishap))]
    for begin in range(0, len(mishaps), len(Mishap)):
        assert sorted(mishaps[begin : begin + len(Mishap)]) == sorted(Mishap)


def test_schedule_leaves_a_target_that_nothing_happens_to() -> None:
    for each in islice(rounds(5), 200):
        spoiled = each.mishap in (Mishap.CANCEL, Mishap.KILL_TARGET, Mishap.STOP_TARGET)
        assert spoiled < len(each.serves) <= MAX_TARGETS
        assert 0 <= each.source < NUM_SOURCES


def page_through(fault: Fault) -> bytes:
    """The metrics of a service, by way of a proxy with a fault; as much of them as arrives."""
    with running_service(Settings(port=0)) as url, Proxy(upstream_port=int(url.rpartition(":")[2])) as proxy:
        proxy.other = fault
        arrived = b""
        try:
            with httpx.stream("GET", f"{proxy.url}/openapi.json", trust_env=False) as answer:
                for piece in answer.iter_raw():
                    arrived += piece
        except httpx.RemoteProtocolError:
            pass
        return arrived


def test_answers_are_flipped_cut_and_slowed_where_they_shall_be() -> None:
    whole = page_through(slowed)
    flipped = page_through(flipped_at(0.5))
    at = len(whole) // 2
    assert flipped == whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    assert page_through(cut_at(0.25)) == whole[: len(whole) // 4]


def test_holdings_of_a_process_count_its_sockets_and_threads() -> None:
    script = "import socket, sys; s = [socket.socket() for _ in range(3)]; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        holdings = Holdings.of(process.pid)
        process.stdin.close()
    assert (holdings.threads, holdings.sockets) == (1, 3)
    more = Holdings(threads=1, sockets=4, descriptors=holdings.descriptors + 1)
    assert holdings.is_within(more)
    assert not more.is_within(holdings)


@pytest.mark.parametrize("seed", [1061])
def test_soak_of_some_rounds_passes(seed: int) -> None:
    """The long form is `make soak`."""
    told: list[str] = []
    tally = soak(seed=seed, seconds=60, max_rounds=4, tell=told.append)
    assert (tally.rounds, len(told)) == (4, 4)
    assert tally.states["ready"] >= 4
