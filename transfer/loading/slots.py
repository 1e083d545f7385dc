"""Slots of a shell, and the loaders that fill them.

A *shell* is an allocated parameter or buffer, local to one rank. Checkpoint tensors fill its *slots*: the whole of it,
or the parts of a fused one. Each shell carries its own loader, which knows the rank that it was built for; whoever
maps names only finds the shell and hands over the untouched global tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

ExpertPartName: TypeAlias = Literal["w1", "w2", "w3"]


@dataclass(frozen=True, slots=True, order=True)
class ExpertPart:
    """One matrix of one expert; `w1` is gate, `w3` up, `w2` down.

    Attributes:
        expert: Number of the expert: the checkpoint's (logical) one where a name was mapped, the index in the shell
            where a loader says what it filled.
        part: Which matrix.
    """

    expert: int
    part: ExpertPartName

    def __str__(self) -> str:
        return f"{self.expert}.{self.part}"


# None: the whole shell; "q", "k", "v"; 0 and 1 of gate and up.
SlotId: TypeAlias = str | int | ExpertPart | None


def slot_text(target: str, slot: SlotId) -> str:
    """`name[slot]`, or the name alone where the slot is the whole shell."""
    return target if slot is None else f"{target}[{slot}]"


class ShellLoader(Protocol):
    """Cuts a rank's piece out of a global checkpoint tensor and writes it into the shell.

    Implementations are frozen values that took rank and sizes when the shell was built. They use only views
    (`narrow`, `select`, `transpose`, `view`) of the checkpoint tensor, and `copy_`, `zero_` and `fill_` on views of
    the shell, so that a run on meta tensors shows where every element goes.
    """

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """The slots of this shell, each to be filled exactly once; every element lies in one of them."""
        ...

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """Fill a slot, padding included.

        Args:
            shell: Written in place.
            tensor: The whole checkpoint tensor, any device, also meta.
            slot: Which slot the name was mapped to; None for all of them (a tensor fused in the checkpoint).
            name: Runtime name of the shell, for messages.

        Returns:
            The local slots that are filled now; none if the piece belongs to other ranks.

        Raises:
            PlacementError: If shape, dtype or slot do not fit; nothing was written.
        """
        ...


def attach_loader(shell: torch.Tensor, loader: ShellLoader) -> None:
    """Give a shell its loader; it goes where the tensor object goes."""
    setattr(shell, _ATTRIBUTE, loader)


def attached_loader(shell: torch.Tensor) -> ShellLoader | None:
    """The loader that a shell was given, if any."""
    loader: ShellLoader | None = getattr(shell, _ATTRIBUTE, None)
    return loader


def is_traceable(loader: ShellLoader) -> bool:
    """Whether a run on meta tensors shows all that a loader does; one that compares values says so itself."""
    return bool(getattr(loader, "is_traceable", True))


_ATTRIBUTE = "weightwire_loader"
