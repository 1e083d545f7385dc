"""Shares against the best that there can be, over all sets of sources."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.transfer.sharing import Holders, Shares, even_shares, share_out

SIZES = st.integers(0, 10**6) | st.sampled_from([0, 1, 10**3, 10**9, 10**12])


def optimum(held: Mapping[Holders, int], rates: Sequence[int]) -> float:
    """Least load of the busiest source: what only some sources can send, they have to, together.

    So it is the largest, over all sets of sources, of what nobody else can send; by max-flow and min-cut it is reached.
    """
    best = 0.0
    for size in range(1, len(rates) + 1):
        for some in itertools.combinations(range(len(rates)), size):
            forced = sum(nbytes for holders, nbytes in held.items() if set(holders) <= set(some))
            best = max(best, forced / sum(rates[number] for number in some))
    return best


def busiest(held: Mapping[Holders, int], shares: Shares, rates: Sequence[int]) -> float:
    loads = [0.0] * len(rates)
    for holders, parts in shares.items():
        for number, part in parts.items():
            loads[number] += held[holders] * part
    return max((load / rate for load, rate in zip(loads, rates, strict=True)), default=0.0)


def check_shares(held: Mapping[Holders, int], shares: Shares) -> None:
    """Each set of holders sends all of it, and nobody else does."""
    assert shares.keys() == held.keys()
    for holders, parts in shares.items():
        assert set(parts) <= set(holders)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(1, abs=1e-3)


@st.composite
def supplies(draw: st.DrawFn) -> tuple[dict[Holders, int], list[int]]:
    """What sets of sources hold, and how many processes each source is."""
    count = draw(st.integers(1, 6))
    rates = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    sets = st.sets(st.integers(0, count - 1), min_size=1).map(sorted).map(tuple)
    return draw(st.dictionaries(sets, SIZES, max_size=14)), rates


@settings(max_examples=500)
@given(supplies())
def test_no_source_sends_much_more_than_the_best_shares_would_have_it_send(
    supply: tuple[dict[Holders, int], list[int]],
) -> None:
    held, rates = supply
    shares = even_shares(held, rates)
    check_shares(held, shares)
    assert busiest(held, shares, rates) <= 1.05 * optimum(held, rates)


@given(st.integers(2, 30), st.integers(2, 4), st.data())
def test_chain_of_neighbours_is_evened_out_from_end_to_end(count: int, width: int, data: st.DataObject) -> None:
    """Ranks of two topologies that do not divide each other: every few that follow each other have things in common."""
    size = st.integers(0, 10**9) | st.sampled_from([0, 10**9])
    held: dict[Holders, int] = {(number,): data.draw(size) for number in range(count)}
    held |= {tuple(range(low, min(low + width, count))): data.draw(size) for low in range(count - 1)}
    # What only a set of sources can send is, in a chain, the sum over its runs: a worst set is one run.
    best = max(
        sum(nbytes for holders, nbytes in held.items() if low <= holders[0] and holders[-1] < high) / (high - low)
        for low in range(count)
        for high in range(low + 1, count + 1)
    )
    shares = even_shares(held, [1] * count)
    check_shares(held, shares)
    assert busiest(held, shares, [1] * count) <= 1.05 * best


def test_equal_sources_send_equal_parts() -> None:
    assert even_shares({(0, 1, 2, 3): 4 << 30}, [1] * 4) == {(0, 1, 2, 3): dict.fromkeys(range(4), 0.25)}


def test_source_of_many_processes_sends_for_all_of_them() -> None:
    assert even_shares({(0, 1): 4000}, [3, 1]) == {(0, 1): {0: 0.75, 1: 0.25}}


def test_source_that_is_slow_sends_less() -> None:
    assert even_shares({(0, 1): 4000}, [0.25, 1.0]) == {(0, 1): {0: 0.2, 1: 0.8}}


def test_source_that_has_much_to_send_alone_is_asked_for_nothing_more() -> None:
    assert even_shares({(0,): 10_000, (0, 1, 2): 4000}, [1] * 3)[0, 1, 2] == {0: 0, 1: 0.5, 2: 0.5}


def test_source_that_is_lost_and_holds_nothing_is_in_nobodys_way() -> None:
    assert even_shares({(0, 2): 2000}, [1, 0, 1]) == {(0, 2): {0: 0.5, 2: 0.5}}


# One target


@given(supplies(), st.integers(0, 5))
def test_no_byte_is_lost_or_sent_by_somebody_who_does_not_hold_it(
    supply: tuple[dict[Holders, int], list[int]], first: int
) -> None:
    held, rates = supply
    alone = [held.get((number,), 0) for number in range(len(rates))]
    shared = {holders: nbytes for holders, nbytes in held.items() if len(holders) > 1}
    found = share_out(alone, shared, lambda: even_shares(held, rates), first=first)
    assert found.keys() == shared.keys()
    for holders, parts in found.items():
        assert sum(parts.values()) == shared[holders]
        assert set(parts) <= set(holders)
        assert shared[holders] == 0 or all(nbytes > 0 for nbytes in parts.values())
    sent = {(number,): nbytes for number, nbytes in enumerate(alone)} | shared
    ones = {holders: {number: nbytes / max(1, sent[holders]) for number, nbytes in parts.items()}
            for holders, parts in (found | {(n,): {n: nbytes} for n, nbytes in enumerate(alone)}).items()}  # fmt: skip
    assert busiest(sent, ones, rates) <= 1.1 * optimum(held, rates) + len(held)


def never() -> Shares:
    raise AssertionError("nothing here is large enough to be shared")


def test_what_is_small_comes_whole_from_the_one_that_is_asked_anyway() -> None:
    """Norms that every rank holds: no connection is opened for an even share of them, nor are shares worked out."""
    found = share_out([1 << 30, 0, 2 << 30], {(0, 1): 4096, (1, 2): 4096, (0, 1, 2): 4096}, never)
    assert found == {(0, 1): {0: 4096}, (1, 2): {2: 4096}, (0, 1, 2): {2: 4096}}


def test_small_things_that_all_hold_are_spread_over_the_targets() -> None:
    shared: dict[Holders, int] = {(0, 1, 2, 3): 8}
    found = [share_out([1 << 20] * 4, shared, never, first=rank)[0, 1, 2, 3] for rank in range(4)]
    assert found == [{rank: 8} for rank in range(4)]


def test_what_is_all_that_comes_is_shared_however_little_it_is() -> None:
    held: dict[Holders, int] = {(0, 1): 10}
    assert share_out([0, 0], held, lambda: even_shares(held, [1, 1])) == {(0, 1): {0: 5, 1: 5}}


@pytest.mark.parametrize("alone", [[], [0], [3, 0]])
def test_nothing_shared_is_nothing_to_decide(alone: list[int]) -> None:
    assert share_out(alone, {}, never) == {}


def test_targets_take_of_each_source_together_what_is_its_share() -> None:
    """None knows what the others need; what they take by one set of shares adds up."""
    held: dict[Holders, int] = {(0,): 600, (1,): 0, (0, 1): 1000, (1, 2): 400, (0, 1, 2): 100}
    shares = even_shares(held, [1] * 3)
    loads = [0] * 3
    for target in range(10):
        alone = [held.get((number,), 0) // 10 for number in range(3)]
        shared = {holders: nbytes // 10 for holders, nbytes in held.items() if len(holders) > 1}
        for number, nbytes in enumerate(alone):
            loads[number] += nbytes
        for parts in share_out(alone, shared, lambda: shares, first=target).values():
            for number, nbytes in parts.items():
                loads[number] += nbytes
    assert sum(loads) == 2100
    # Nobody but the first two can send 1600 of it.
    assert max(loads) <= 1.1 * 800
