"""What happens to one tensor once its name is resolved: it lands in a shell, or is looked at and left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weightwire.transfer.dtypes import is_packed
from weightwire.transfer.loading.base_loaders import loader_of
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.slots import SlotId

_BIAS = ".bias"
# Of two packed numbers in a byte, the bits that are not signs. Source: OCP Microscaling Formats, E2M1.
_FLOAT4_MAGNITUDES = 0x77


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The end of one checkpoint tensor.

    Attributes:
        outcome: Of its name; the one outcome that counts.
        filled: Slots of the shell `outcome.target` that are filled now, as the shell numbers them.
        also: Other shells that the same tensor filled, by runtime name: a head tied to the embedding.
        shared_with: Names that may have filled memory of the same shell before, where nobody could compare: on meta.
    """

    outcome: NameOutcome
    filled: tuple[SlotId, ...] = ()
    also: tuple[tuple[str, tuple[SlotId, ...]], ...] = ()
    shared_with: tuple[str, ...] = ()

    def below(self, path: str) -> Landing:
        """The same, as the parent of the module `path` says it: with full names."""
        outcome = self.outcome
        target = None if outcome.target is None else joined(path, outcome.target)
        return Landing(
            outcome=replace(outcome, name=joined(path, outcome.name), target=target),
            filled=self.filled,
            also=tuple((joined(path, name), slots) for name, slots in self.also),
            shared_with=tuple(joined(path, name) for name in self.shared_with),
        )


def joined(path: str, rest: str) -> str:
    """Two pieces of a dotted name as one; either may be empty."""
    return f"{path}.{rest}" if path and rest else path or rest


def fill_slot(shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
    """Call the shell's own loader, or the default one (L91); arguments as of `ShellLoader.load`."""
    return loader_of(shell).load(shell, tensor, slot, name=name)


def land_all(
    outcomes: Sequence[NameOutcome], tensor: torch.Tensor, shell_named: Callable[[str], torch.Tensor]
) -> Landing:
    """Do what was decided about one tensor.

    Args:
        outcomes: As `Resolver.resolve_all` gives them: the one that counts first.
        tensor: The whole checkpoint tensor.
        shell_named: From a runtime name to the shell.

    Raises:
        PlacementError: If the tensor does not fit; see `land`.
    """
    first, *others = outcomes
    if first.outcome is Outcome.SKIPPED_OPTIONAL:
        return look_at_optional(first, tensor)
    if first.outcome is not Outcome.PLACED or first.target is None:
        return Landing(outcome=first)
    landing = land(first, shell_named(first.target), tensor)
    return replace(landing, also=tuple(_also(other, tensor, shell_named) for other in others))


def _also(
    other: NameOutcome, tensor: torch.Tensor, shell_named: Callable[[str], torch.Tensor]
) -> tuple[str, tuple[SlotId, ...]]:
    target = other.target or other.name
    return target, fill_slot(shell_named(target), tensor, other.slot, name=target)


def land(outcome: NameOutcome, shell: torch.Tensor, tensor: torch.Tensor) -> Landing:
    """Write a tensor into the shell that its name was resolved to.

    Raises:
        PlacementError: If it does not fit; the shell is as before.
    """
    filled = fill_slot(shell, tensor, outcome.slot, name=outcome.target or outcome.name)
    if not filled:
        # A tensor of all experts, of which this rank has none.
        return Landing(outcome=replace(outcome, outcome=Outcome.NOT_LOCAL))
    return Landing(outcome=outcome, filled=filled)


def look_at_optional(outcome: NameOutcome, tensor: torch.Tensor) -> Landing:
    """Leave out a tensor that the model has no place for: a bias only if it changes nothing, being all zeros.

    On meta there is nothing to look at: the caller has to, where the values are.
    """
    if outcome.name.endswith(_BIAS) and not tensor.is_meta and not is_all_zeros(tensor):
        return Landing(outcome=replace(outcome, outcome=Outcome.UNEXPECTED))
    return Landing(outcome=outcome)


def is_all_zeros(tensor: torch.Tensor) -> bool:
    """Whether every element equals zero, of either sign; NaN does not."""
    if is_packed(tensor.dtype):
        return not bool((tensor.view(torch.uint8) & _FLOAT4_MAGNITUDES).any())
    # Not every operator knows the small float dtypes.
    small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return not bool((tensor.to(torch.float32) if small else tensor).any())
