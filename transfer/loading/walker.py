"""Brings checkpoint tensors to the modules of a tree: part by part of their names, each module taking its own (L74).

Works on any `torch.nn.Module`. A module that knows its own names, such as an attention block with fused projections,
has a `load_weights` and is handed its tensors under relative names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import nn

from weightwire.transfer.errors import NamesError, PlacementError
from weightwire.transfer.loading.drops import is_rotary_cache
from weightwire.transfer.loading.landing import Landing, fill_slot, joined, land, look_at_optional
from weightwire.transfer.loading.module_shells import has_shell, own_shell, shell_at
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.stacked import OPTIONAL_SUFFIXES
from weightwire.transfer.loading.ties import FilledMemory

Pair: TypeAlias = tuple[str, torch.Tensor]

_RULE = "L74"


@runtime_checkable
class SelfLoading(Protocol):
    """A module that places its own tensors."""

    def load_weights(self, pairs: Iterable[Pair]) -> Iterable[Landing]:
        """Place tensors whose names are relative to this module.

        May be called several times in one load, each time with some of the tensors (L75).

        Returns:
            One landing for each pair, with relative names; also for names that are unknown here.
        """
        ...


class Absent(nn.Module):
    """Stands where a layer of another pipeline stage would: whatever is meant for it is accepted and discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkRules:
    """What a walk leaves out, by full checkpoint name.

    Attributes:
        skip_prefixes: Names that begin so are dropped.
        skip_substrs: Names that contain one of these are dropped, besides rotary caches.
        ignore_unexpected_prefixes: Names that begin so may lack a target.
        ignore_unexpected_suffixes: Names that end so may; a bias only if it is all zeros.
        drop_rule: The id of a further rule that drops a name, or None: layers of other stages.
        also: Checkpoint name -> a second parameter that the tensor fills, or the only one where the first is absent:
            a head tied to the embedding (L77).
    """

    skip_prefixes: tuple[str, ...] = ()
    skip_substrs: tuple[str, ...] = ()
    ignore_unexpected_prefixes: tuple[str, ...] = ()
    ignore_unexpected_suffixes: tuple[str, ...] = OPTIONAL_SUFFIXES
    drop_rule: Callable[[str], str | None] = lambda _: None
    also: Mapping[str, str] = field(default_factory=dict)

    def rule_against(self, name: str) -> str | None:
        """The rule that drops a name before its target is looked for; None if none does."""
        if name.startswith(self.skip_prefixes) or any(text in name for text in self.skip_substrs):
            return "L76"
        return self.drop_rule(name)

    def ignores(self, name: str) -> bool:
        """Whether a name may lack a target."""
        return name.startswith(self.ignore_unexpected_prefixes) or name.endswith(self.ignore_unexpected_suffixes)


EVERYTHING = WalkRules()


def walk(
    model: nn.Module, pairs: Iterable[Pair], rules: WalkRules = EVERYTHING, *, filled: FilledMemory | None = None
) -> Iterator[Landing]:
    """Place each pair as it arrives; nothing is kept beyond its turn.

    Args:
        model: Root of the tree; its own `load_weights`, if any, is not called.
        pairs: Checkpoint names, relative to the root, and global tensors, in any order.
        rules: What is left out.
        filled: What earlier walks of the same load filled.

    Yields:
        One landing for each pair, in order.

    Raises:
        PlacementError: If a tensor does not fit.
        SlotsError: If memory that the module has under two names is given two different values.
        NamesError: If a module does not account for each tensor that it was given.
    """
    filled = filled or FilledMemory()

    def rule_against(name: str) -> str | None:
        # A model may have such a table as a buffer of its own; it is then a tensor like others.
        return "L66" if is_rotary_cache(name) and not has_shell(model, name) else rules.rule_against(name)

    for rule, group in groupby(pairs, key=lambda pair: rule_against(pair[0])):
        if rule is None:
            yield from _Walk(model, rules, filled).visit(model, group, "")
        else:
            yield from (_dropped(name, rule) for name, _ in group)


@dataclass(frozen=True, slots=True)
class _Walk:
    model: nn.Module
    rules: WalkRules
    filled: FilledMemory

    def visit(self, module: nn.Module, pairs: Iterable[Pair], path: str) -> Iterator[Landing]:
        """Deal consecutive pairs with the same first part to the child of that name."""
        for part, group in groupby(pairs, key=lambda pair: _first_part(module, pair[0])):
            relative = ((name[len(part) + 1 :], tensor) for name, tensor in group)
            child, here = module._modules.get(part), joined(path, part)
            if isinstance(child, Absent):
                yield from (_dropped(joined(here, rest), _RULE) for rest, _ in relative)
            elif _loads_itself(child):
                yield from _ask(child, relative, here)
            elif child is not None:
                yield from self.visit(child, relative, here)
            else:
                shell = own_shell(module, part)
                yield from (self._place(shell, joined(here, rest), rest, tensor) for rest, tensor in relative)

    def _place(self, shell: torch.Tensor | None, name: str, rest: str, tensor: torch.Tensor) -> Landing:
        second = self.rules.also.get(name)
        if shell is not None and not rest:
            outcome = NameOutcome(name=name, outcome=Outcome.PLACED, rule=_RULE, target=name)
            landing = self._land(outcome, shell, tensor)
            return landing if second is None else self._also(landing, second, tensor)
        if second is not None:
            outcome = NameOutcome(name=name, outcome=Outcome.PLACED, rule="L77", target=second)
            return land(outcome, shell_at(self.model, second), tensor)
        # Something that lies below a parameter is no optional tensor of a module.
        if shell is None and self.rules.ignores(name):
            outcome = NameOutcome(name=name, outcome=Outcome.SKIPPED_OPTIONAL, rule="L76", target=name)
            return look_at_optional(outcome, tensor)
        return Landing(outcome=NameOutcome(name=name, outcome=Outcome.UNEXPECTED, rule=_RULE))

    def _land(self, outcome: NameOutcome, shell: torch.Tensor, tensor: torch.Tensor) -> Landing:
        if tensor.is_meta:
            others = self.filled.others(outcome.name, shell)
            landing = replace(land(outcome, shell, tensor), shared_with=others)
            self.filled.note(outcome.name, shell)
            return landing
        with self.filled.filling(outcome.name, shell):
            return land(outcome, shell, tensor)

    def _also(self, landing: Landing, second: str, tensor: torch.Tensor) -> Landing:
        filled = fill_slot(shell_at(self.model, second), tensor, landing.outcome.slot, name=second)
        return Landing(outcome=landing.outcome, filled=landing.filled, also=((second, filled),))


def _loads_itself(child: nn.Module | None) -> TypeGuard[SelfLoading]:
    return isinstance(child, SelfLoading)


def _first_part(module: nn.Module, name: str) -> str:
    # A flat tree has names with dots. And a name with an empty part leads nowhere: left out, `norm.weight.` would be
    # `norm.weight`.
    is_whole = name in module._parameters or name in module._buffers or "" in name.split(".")
    return name if is_whole else name.partition(".")[0]


def _dropped(name: str, rule: str) -> Landing:
    return Landing(outcome=NameOutcome(name=name, outcome=Outcome.DROPPED, rule=rule))


def _ask(child: SelfLoading, pairs: Iterable[Pair], path: str) -> Iterator[Landing]:
    """Let a module load its own, and see to it that it answers for all of it (L04, L76)."""
    given, answered = 0, 0

    def counted() -> Iterator[Pair]:
        nonlocal given
        for pair in pairs:
            given += 1
            yield pair

    source = counted()
    with _inside(path):
        for landing in child.load_weights(source):
            answered += 1
            yield landing.below(path)
    left = [joined(path, name) for name, _ in source]
    if left or answered != given:
        raise NamesError(
            f"module {path!r}: load_weights answered for {answered} of {given} tensors, expected one outcome for each",
            unexpected=left,
        )


@contextmanager
def _inside(path: str) -> Iterator[None]:
    """A module knows only the ends of its names: without its path an error would not say in which layer it was."""
    try:
        yield
    except PlacementError as error:
        raise PlacementError(f"module {path!r}: {error}", **{**error.facts, "module": path}) from error
