"""Who feeds whom: targets that join while others still receive take from those, so that a source sends one copy.

A source that feeds nobody takes a joiner itself. Otherwise the joiner takes from a target that serves what it receives
(a relay), and behind it stand that relay's own feeders, nearest first, and the complete sources: a chain that loses
a member closes by itself, without a question to anybody. A pure choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Instances by id: those of a tier are read together, and only once all before it are given up.
Tiers: TypeAlias = tuple[tuple[str, ...], ...]

# Feeders that a joiner can fall back on before it comes to the sources. More only matter if as many die at once.
_MOST_ANCESTORS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A target that is receiving.

    Attributes:
        tiers: What it was granted, without those who are gone.
        relays: Whether it serves what the joiner wants, as far as it has come.
    """

    instance_id: str
    tiers: Tiers
    relays: bool
    joined_at: float

    @property
    def feeders(self) -> tuple[str, ...]:
        """Those that it takes from now."""
        return next(filter(None, self.tiers), ())


def count_readers(members: Collection[Member]) -> Counter[str]:
    """How many targets each instance feeds now, by id."""
    return Counter(feeder for member in members for feeder in member.feeders)


def arrange(joiner: str, sources: Sequence[str], members: Collection[Member]) -> Tiers:
    """What a joiner may take from, tier by tier.

    Args:
        joiner: Its instance id.
        sources: Complete ones, best first.
        members: All targets that are receiving from anybody.

    Returns:
        Every source once; relays of the joiner's own before them. Nothing if there is no source: then nobody could say
        that all of the model will come.
    """
    if not sources:
        return ()
    others = [member for member in members if member.instance_id != joiner]
    readers = count_readers(others)
    idle = tuple(source for source in sources if not readers[source])
    if idle:
        busy = tuple(source for source in sources if readers[source])
        return (idle, busy) if busy else (idle,)
    by_name = {member.instance_id: member for member in others}
    lines = [_line(member, by_name, sources) for member in others if _can_feed(member, joiner, by_name)]
    # Whoever stands at the head without a source may never have everything.
    lines = [line for line in lines if by_name[line[-1]].feeders]
    line = min(lines, key=lambda line: (readers[line[0]], len(line), by_name[line[0]].joined_at, line[0]), default=())
    # Those at the head of the line before other sources, or each loss would bring them one more reader.
    head = tuple(name for name in by_name[line[-1]].feeders if name in sources) if line else ()
    rest = tuple(source for source in sources if source not in head)
    return tuple(filter(None, (*((name,) for name in line[: _MOST_ANCESTORS + 1]), head, rest)))


def _can_feed(member: Member, joiner: str, members: Mapping[str, Member]) -> bool:
    return member.relays and not _may_take_from(member, joiner, members)


def _line(relay: Member, members: Mapping[str, Member], sources: Collection[str]) -> tuple[str, ...]:
    """A relay and those that feed it now, nearest first, up to the sources."""
    line = [relay.instance_id]
    at = relay
    while above := [name for name in at.feeders if name in members and name not in sources and name not in line]:
        at = members[above[0]]
        line.append(at.instance_id)
    return tuple(line)


def _may_take_from(member: Member, joiner: str, members: Mapping[str, Member]) -> bool:
    """Whether a member takes from the joiner, or may fall back on it, directly or through others."""
    seen, ahead = {member.instance_id}, [member]
    while ahead:
        for feeder in {name for tier in ahead.pop().tiers for name in tier} - seen:
            if feeder == joiner:
                return True
            seen.add(feeder)
            if feeder in members:
                ahead.append(members[feeder])
    return False
