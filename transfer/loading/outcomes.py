"""What became of each checkpoint tensor: every name ends in exactly one outcome, and the counts add up (L04)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from weightwire.transfer.errors import NamesError
from weightwire.transfer.loading.slots import SlotId

_MOST_SHOWN = 20


class Outcome(StrEnum):
    """The five ends of a checkpoint tensor."""

    PLACED = "placed"
    DROPPED = "dropped"
    SKIPPED_OPTIONAL = "skipped_optional"
    NOT_LOCAL = "not_local"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOutcome:
    """Where one checkpoint name goes.

    Attributes:
        name: Checkpoint name.
        outcome: Which of the five.
        rule: Id of the rule that decided, such as `L66`.
        target: Runtime name of the shell that was found, or would have been.
        slot: Slot of that shell; of a routed expert, with the checkpoint's number.
    """

    name: str
    outcome: Outcome
    rule: str
    target: str | None = None
    slot: SlotId = None

    @property
    def is_read(self) -> bool:
        """Whether the payload is needed: to be placed, or to see whether an optional tensor is all zeros."""
        return self.outcome in (Outcome.PLACED, Outcome.SKIPPED_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All outcomes of one load, in the order of the stream.

    Attributes:
        outcomes: One for each name.
        also_loaded: Runtime names of shells that were filled from a tensor besides the one that its outcome names.
    """

    outcomes: tuple[NameOutcome, ...]
    also_loaded: frozenset[str] = frozenset()

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """Number of names by outcome, zeros included; their sum is the number of names."""
        found = Counter(outcome.outcome for outcome in self.outcomes)
        return {outcome: found[outcome] for outcome in Outcome}

    @property
    def loaded(self) -> frozenset[str]:
        """Runtime names of the shells into which something was placed."""
        placed = (outcome.target for outcome in self.outcomes if outcome.outcome is Outcome.PLACED)
        return self.also_loaded.union(target for target in placed if target is not None)

    @property
    def unexpected(self) -> tuple[str, ...]:
        return tuple(outcome.name for outcome in self.outcomes if outcome.outcome is Outcome.UNEXPECTED)

    def check_names(self) -> None:
        """Raise for names that no rule knows.

        Raises:
            NamesError: Listing them.
        """
        if self.unexpected:
            raise unexpected_names(self.unexpected)


def unexpected_names(names: Iterable[str], *, hint: str = "") -> NamesError:
    """The error for checkpoint names without a place."""
    listed = list(names)
    shown = ", ".join(map(repr, listed[:_MOST_SHOWN]))
    more = f" and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else ""
    return NamesError(
        f"{len(listed)} checkpoint tensors have no place in this model: {shown}{more}{hint}", unexpected=listed
    )
