"""New weights into a model that is in use: written in place, finished once, and accounted for if it fails (L185)."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from weightwire.transfer.errors import FinishError, PlacementError
from weightwire.transfer.finishing.steps import Finisher, tensor_at
from weightwire.transfer.loading.landing import land_all
from weightwire.transfer.loading.ledger import required_slots
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.slots import slot_text
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.models.tree import ParameterTree


class UpdateTransaction:
    """Some tensors of a checkpoint again, in as many buckets as it takes; a context manager.

    At the end of the block the steps that read what was written run, once. A block that fails is not undone: the error
    says which slots have their new values, which their old ones, and what is torn between both.
    """

    def __init__(self, tree: ParameterTree, finisher: Finisher) -> None:
        """
        Args:
            tree: Filled, and finished by `finisher`.
            finisher: Of the same tree.
        """
        self._tree = tree
        self._finisher = finisher
        self._shells = shells_of(tree)
        self._new = dict[str, str]()
        self._writing: str | None = None

    def load(self, pairs: Iterable[Pair]) -> None:
        """Write one bucket into the shells.

        Raises:
            PlacementError: If a tensor does not fit; those before it are written.
            FinishError: If a name has no place.
        """
        resolver = self._tree.resolver()
        for name, tensor in pairs:
            outcomes = resolver.resolve_all(name)
            first = outcomes[0]
            if first.outcome is Outcome.UNEXPECTED:
                raise FinishError(f"tensor {name!r}: has no place in this model", tensor=name)
            target = first.target if first.outcome is Outcome.PLACED else None
            self._writing = None if target is None else slot_text(target, first.slot)
            landing = land_all(outcomes, tensor, self._shells.__getitem__)
            self._writing = None
            for written, slots in ((target, landing.filled), *landing.also):
                self._new.update({slot_text(written, slot): written for slot in slots} if written else {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finisher.run(self._new.values())
            except Exception as failure:
                raise self._failed(failure, torn=self._unfinished()) from failure
        elif isinstance(error, Exception):
            # A loader checks everything before it writes anything: what it refuses is as it was.
            torn = [self._writing] if self._writing and not isinstance(error, PlacementError) else []
            raise self._failed(error, torn=[*torn, *self._unfinished()]) from error

    def _unfinished(self) -> list[str]:
        """Derived tensors that no longer belong to what they were made of."""
        touched = set(self._new.values())
        return [
            name for step in self._finisher.steps if touched & set(step.inputs) for name in self._there(step.outputs)
        ]

    def _there(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if tensor_at(self._tree, name) is not None]

    def _failed(self, error: Exception, *, torn: list[str]) -> FinishError:
        every = [slot_text(name, slot) for name, slots in required_slots(self._shells).items() for slot in slots]
        new = [slot for slot in self._new if slot not in torn]
        old = [slot for slot in every if slot not in self._new and slot not in torn]
        return FinishError(
            f"update: ended half way with {len(new)} slots new, {len(old)} old and {len(torn)} torn, expected all of "
            f"its tensors to be written and finished: {error}",
            new=new,
            old=old,
            torn=torn,
        )
