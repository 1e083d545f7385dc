"""What a soak does, from its seed alone: rounds of targets, each with a fault in its middle. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

MAX_TARGETS = 3
NUM_SOURCES = 3


class Mishap(StrEnum):
    """What happens in a round, to one source unless it says otherwise."""

    NOTHING = "nothing"
    KILL = "kill"
    STOP = "stop"
    FLIP = "flip"
    TRUNCATE = "truncate"
    REFUSE = "refuse"
    SLOW = "slow"
    NEW_VERSION = "new version"
    SERVICE_RESTART = "service restart"
    CANCEL = "cancel"
    KILL_TARGET = "kill target"
    STOP_TARGET = "stop target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round.

    Attributes:
        source: The one that it happens to.
        at: When, as a part of the model's bytes that sources have sent.
        serves: For each target, whether it is a source afterwards.
        where: Places in answers, as parts of them, for faults on the way.
    """

    number: int
    mishap: Mishap
    source: int
    at: float
    serves: tuple[bool, ...]
    where: tuple[float, ...]


def rounds(seed: int) -> Iterator[Round]:
    """Rounds without an end. Each mishap comes once before any comes again, so that short soaks see many."""
    dice = random.Random(seed)
    number = 0
    while True:
        deck = list(Mishap)
        dice.shuffle(deck)
        for mishap in deck:
            yield _round(dice, number, mishap)
            number += 1


def _round(dice: random.Random, number: int, mishap: Mishap) -> Round:
    # Whatever happens to a target, another one has to get through.
    least = 2 if mishap in (Mishap.CANCEL, Mishap.KILL_TARGET, Mishap.STOP_TARGET) else 1
    return Round(
        number=number,
        mishap=mishap,
        source=dice.randrange(NUM_SOURCES),
        at=dice.uniform(0.05, 0.6),
        serves=tuple(dice.random() < 0.5 for _ in range(dice.randint(least, MAX_TARGETS))),
        where=tuple(dice.uniform(0.0, 0.95) for _ in range(3)),
    )
