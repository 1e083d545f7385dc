"""Who feeds whom: a chain for each idle source, closed again when a member is lost, and never a circle."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightwire.service.waves import Member, Tiers, arrange, count_readers


def member(name: str, *tiers: str, relays: bool = True, joined_at: float = 0.0) -> Member:
    """A member with its tiers as words: `"a b"` is one tier of two."""
    return Member(
        instance_id=name, tiers=tuple(tuple(tier.split()) for tier in tiers), relays=relays, joined_at=joined_at
    )


A, B, C = member("a", "s"), member("b", "a", "s"), member("c", "b", "a", "s")


@pytest.mark.parametrize(
    ("sources", "members", "expected"),
    [
        pytest.param([], [A], (), id="no source, nothing"),
        pytest.param(["s"], [], (("s",),), id="an idle source"),
        pytest.param(["s", "z"], [], (("s", "z"),), id="idle sources together"),
        pytest.param(["s", "z"], [A], (("z",), ("s",)), id="the idle source first, the busy one behind it"),
        pytest.param(["s"], [A], (("a",), ("s",)), id="the second behind the first"),
        pytest.param(["s"], [A, B], (("b",), ("a",), ("s",)), id="the third behind the second"),
        pytest.param(["s"], [B, C, A], (("c",), ("b",), ("a",), ("s",)), id="the fourth behind the third"),
        pytest.param(["s"], [member("a", "s", relays=False)], (("s",),), id="nobody relays, so the source again"),
        pytest.param(
            ["s"],
            [A, member("b", "a", "s", relays=False)],
            (("a",), ("s",)),
            id="a second one behind a relay whose only reader does not relay",
        ),
        pytest.param(
            ["s"], [A, member("c", "", "a", "s")], (("c",), ("a",), ("s",)), id="a chain without its middle is closed"
        ),
        pytest.param(
            ["s", "z"],
            [A, B, member("d", "z", "s")],
            (("d",), ("z",), ("s",)),
            id="the shorter of two chains",
        ),
        pytest.param(
            ["s"],
            [member("a", "s", joined_at=2), member("b", "s", joined_at=1)],
            (("b",), ("s",)),
            id="the older of two that are as deep",
        ),
        pytest.param(
            ["s", "x"], [member("b", "s"), member("a", "x", "s")], (("a",), ("x",), ("s",)), id="its own source first"
        ),
    ],
)
def test_arrange_gives_tiers(sources: list[str], members: list[Member], expected: Tiers) -> None:
    assert arrange("joiner", sources, members) == expected


def test_arrange_never_gives_a_joiner_to_those_who_may_take_from_it() -> None:
    """Its earlier transfer still runs, and feeds others."""
    assert arrange("a", ["s"], [A, B, C]) == (("s",),)
    standby_only = [member("x", "s"), member("y", "x", "a", "s"), A]
    assert arrange("a", ["s"], standby_only) == (("x",), ("s",))


def test_arrange_keeps_eight_ancestors_and_every_source() -> None:
    names = [f"m{number:02}" for number in range(20)]
    chain = [member("m00", "s")] + [member(name, before, "s") for before, name in pairwise(names)]
    tiers = arrange("joiner", ["s"], chain)
    assert tiers == (*((name,) for name in reversed(names[-9:])), ("s",))


def test_readers_are_counted_where_they_read() -> None:
    assert count_readers([A, B, C, member("d", "", "s z")]) == {"s": 2, "a": 1, "b": 1, "z": 1}


@dataclass
class Joined:
    """What the model keeps of a joiner.

    Attributes:
        tiers: As granted, the dead included.
    """

    tiers: Tiers
    relays: bool
    number: int


@dataclass
class Wave:
    sources: set[str] = field(default_factory=set)
    joined: dict[str, Joined] = field(default_factory=dict)

    def alive(self, name: str) -> bool:
        return name in self.sources or (name in self.joined and self.joined[name].relays)

    def members(self) -> list[Member]:
        return [
            Member(
                instance_id=name,
                tiers=tuple(tuple(filter(self.alive, tier)) for tier in joined.tiers),
                relays=joined.relays,
                joined_at=joined.number,
            )
            for name, joined in self.joined.items()
        ]


class Waves(RuleBasedStateMachine):
    """Joins, deaths and completions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = Wave()
        self.number = 0
        # Whether everybody so far came to a source that was there from the start, served, and is still at it.
        self.is_steady = True

    def _name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number:03}"

    @rule()
    def source_comes(self) -> None:
        self.wave.sources.add(self._name("s"))

    @precondition(lambda self: len(self.wave.sources) > 1)
    @rule(data=st.data())
    def source_goes(self, data: st.DataObject) -> None:
        self.wave.sources.discard(data.draw(st.sampled_from(sorted(self.wave.sources))))
        self.is_steady = False

    @rule(relays=st.sampled_from([True, True, True, False]))
    def join(self, relays: bool) -> None:
        name = self._name("j")
        self._join(name, relays=relays)

    @precondition(lambda self: bool(self.wave.joined))
    @rule(data=st.data())
    def join_again(self, data: st.DataObject) -> None:
        """A target asks for another transfer while its own runs, or in place of it."""
        self._join(data.draw(st.sampled_from(sorted(self.wave.joined))), relays=True)
        self.is_steady = False

    def _join(self, name: str, *, relays: bool) -> None:
        tiers = arrange(name, sorted(self.wave.sources), self.wave.members())
        named = [feeder for tier in tiers for feeder in tier]
        assert len(set(named)) == len(named)
        assert name not in named
        assert set(named) >= self.wave.sources
        assert all(map(self.wave.alive, named))
        assert all(tiers)
        self.is_steady &= relays
        self.wave.joined[name] = Joined(tiers=tiers, relays=relays, number=self.number)

    @precondition(lambda self: bool(self.wave.joined))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        del self.wave.joined[data.draw(st.sampled_from(sorted(self.wave.joined)))]

    @precondition(lambda self: bool(self.wave.joined))
    @rule(data=st.data(), serves=st.booleans())
    def complete(self, data: st.DataObject, serves: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.wave.joined)))
        del self.wave.joined[name]
        if serves:
            self.wave.sources.add(name)

    @invariant()
    def nobody_waits_for_itself(self) -> None:
        """Whoever may be read by anybody, now or when others die, never leads back."""
        for start in self.wave.joined:
            seen, ahead = set[str](), [start]
            while ahead:
                joined = self.wave.joined.get(ahead.pop())
                for feeder in {name for tier in joined.tiers for name in tier} - seen if joined else ():
                    assert feeder != start
                    seen.add(feeder)
                    ahead.append(feeder)

    @invariant()
    def everybody_comes_to_a_source(self) -> None:
        for name in self.wave.joined:
            at, steps = name, 0
            while at not in self.wave.sources:
                feeders = next(m for m in self.wave.members() if m.instance_id == at).feeders
                # Sources that were all replaced since the grant are for whoever asks next.
                if not feeders:
                    assert not self.is_steady or not self.wave.sources or not self.wave.joined[at].tiers
                    break
                at, steps = feeders[0], steps + 1
                assert steps <= len(self.wave.joined)

    @invariant()
    def sources_feed_one_each(self) -> None:
        """As long as nobody but relays joins, and every loss is closed by the one behind it."""
        if self.is_steady:
            readers = count_readers(self.wave.members())
            assert all(readers[source] <= 1 for source in self.wave.sources), readers


Waves.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestWaves = Waves.TestCase
