"""How bytes that several sources hold are shared out among them, so that none sends much more than its part.

Sources differ in what only they can give. What several can give fills up whoever has least to do, like water; done in
turn for every set of holders until nothing moves, that makes the busiest source as little busy as can be.

Each target rank plans for itself, and none knows what the others need. So the shares are found for the target as a
whole, out of what the sources hold and how often it is needed (`demand`), which is much the same for all of them; what
the ranks take by these shares adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# Each round brings the loads closer to even; a handful is enough for the few sets of holders that there are.
_ROUNDS = 64
_CLOSE_ENOUGH = 1e-4
# All sets that are too small to matter, taken together, may unbalance the loads by this part.
_NEGLIGIBLE = 0.03

Holders = tuple[int, ...]
Shares = dict[Holders, dict[int, float]]


def even_shares(held: Mapping[Holders, float], rates: Sequence[float]) -> Shares:
    """Which part each holder sends, for each set of sources that hold the same.

    Args:
        held: For each set of sources (by number, ascending) the bytes that are wanted of what exactly these hold.
        rates: How fast each source is against the others, such as the number of processes behind it; more than 0 for
            each that holds anything.

    Returns:
        For each set the part of each of its holders; together they are 1. The busiest source, in bytes by its rate, is
        as little busy as can be.
    """
    loads = [0.0] * len(rates)
    given = {holders: dict.fromkeys(holders, 0.0) for holders in held}
    shared = {holders: nbytes for holders, nbytes in held.items() if nbytes and len(holders) > 1}
    for holders, nbytes in held.items():
        if len(holders) == 1:
            given[holders] = {holders[0]: float(nbytes)}
            loads[holders[0]] += nbytes
    for _ in range(_ROUNDS):
        moved = 0.0
        for holders, nbytes in shared.items():
            before = given[holders]
            for holder in holders:
                loads[holder] -= before[holder]
            after = given[holders] = _filled_up(nbytes, holders, loads, rates)
            for holder in holders:
                loads[holder] += after[holder]
            moved += sum(abs(after[holder] - before[holder]) for holder in holders)
        if moved <= _CLOSE_ENOUGH * sum(shared.values()):
            break
    return {
        holders: {holder: part / nbytes if nbytes else 1 / len(holders) for holder, part in given[holders].items()}
        for holders, nbytes in held.items()
    }


def share_out(
    given: Sequence[int], shared: Mapping[Holders, int], shares: Callable[[], Shares], *, first: int = 0
) -> dict[Holders, dict[int, int]]:
    """Decide who sends how much to one target rank, of what several hold.

    Sets of few bytes go to one holder, the one that is asked for most anyway: a connection more would cost more than an
    even share of them saves.

    Args:
        given: For each source the bytes that it has to send in any case.
        shared: For each set of sources the bytes that any of them can send.
        shares: Gives what `even_shares` gives, for every set; asked only if anything is large enough to be shared.
        first: Which holder of each set is asked first where all are equal; targets that take different ones spread
            what is too small to be shared, or to be cut.

    Returns:
        For each set, the bytes of each of its holders that sends any, in the order in which they are to be asked.
    """
    parts: Shares = {}
    limit = _NEGLIGIBLE * max(given, default=0)
    if sum(shared.values()) > limit:
        parts, loads = shares(), [float(load) for load in given]
        for holders, nbytes in shared.items():
            for holder, part in parts[holders].items():
                loads[holder] += nbytes * part
        limit = _NEGLIGIBLE * max(loads) / len(shared)
    found: dict[Holders, dict[int, int]] = {}
    for holders, nbytes in shared.items():
        turn = first % len(holders)
        asked = holders[turn:] + holders[:turn]
        if nbytes <= limit:
            found[holders] = {max(asked, key=lambda holder: given[holder]): nbytes}
        else:
            found[holders] = _whole({holder: nbytes * parts[holders].get(holder, 0.0) for holder in asked}, nbytes)
    return found


def _filled_up(nbytes: float, holders: Holders, loads: Sequence[float], rates: Sequence[float]) -> dict[int, float]:
    """Pour `nbytes` over the holders until the lower ones stand at one level."""
    order = sorted(holders, key=lambda holder: loads[holder] / rates[holder])
    level = width = poured = 0.0
    for position, holder in enumerate(order):
        width += rates[holder]
        poured += loads[holder]
        level = (nbytes + poured) / width
        if position + 1 == len(order) or level <= loads[order[position + 1]] / rates[order[position + 1]]:
            break
    return {holder: max(0.0, level * rates[holder] - loads[holder]) for holder in holders}


def _whole(parts: Mapping[int, float], nbytes: int) -> dict[int, int]:
    """The parts in whole bytes, none of them lost."""
    found = {holder: int(part) for holder, part in parts.items()}
    largest = max(found, key=lambda holder: found[holder])
    found[largest] += nbytes - sum(found.values())
    return {holder: part for holder, part in found.items() if part}
