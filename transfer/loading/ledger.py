"""The account of slots: each one filled exactly once, or the load has failed and says which were not (L05)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Self

import torch
from torch import nn

from weightwire.transfer.errors import SlotsError
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.slots import SlotId, attached_loader, slot_text

_MOST_SHOWN = 20
_EXEMPT = "weightwire_exempt"
_WHOLE: tuple[SlotId, ...] = (None,)


def exempt_slots(shell: torch.Tensor, reason: str) -> None:
    """Declare that no checkpoint tensor has to fill a shell.

    Args:
        shell: A parameter or buffer; the mark goes where the object goes.
        reason: `derived` (computed from other shells afterwards) or `owned by init` (has its value from construction).
    """
    setattr(shell, _EXEMPT, reason)


def exemption(shell: torch.Tensor) -> str | None:
    """Why no checkpoint tensor has to fill a shell; None if one has to."""
    reason: str | None = getattr(shell, _EXEMPT, None)
    return reason


def slots_of(model: nn.Module) -> dict[str, tuple[SlotId, ...]]:
    """The slots of every parameter and persistent buffer that a checkpoint has to fill.

    A tensor with several names (a tied head) counts once, under its first name.
    """
    return required_slots(shells_of(model))


def required_slots(shells: Mapping[str, torch.Tensor]) -> dict[str, tuple[SlotId, ...]]:
    """The slots of these shells, those without a loader of their own being one slot each; exempt shells have none."""
    loaders = {name: attached_loader(shell) for name, shell in shells.items() if exemption(shell) is None}
    return {name: _WHOLE if loader is None else loader.slots for name, loader in loaders.items()}


class SlotLedger:
    """Counts how often each slot was filled during one load."""

    def __init__(self, required: Mapping[str, Iterable[SlotId]]) -> None:
        """Args:
        required: The slots that have to be filled, by runtime name of the shell.
        """
        self._required = {name: tuple(slots) for name, slots in required.items()}
        self._filled = Counter[tuple[str, SlotId]]()

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """An empty account of `slots_of(model)`."""
        return cls(slots_of(model))

    def record(self, target: str, slots: Iterable[SlotId]) -> None:
        """Note that these slots of the shell `target` were filled now."""
        self._filled.update((target, slot) for slot in slots)

    def without(self, targets: Collection[str]) -> SlotLedger:
        """The same account without some shells, which are to be filled later."""
        rest = SlotLedger({name: slots for name, slots in self._required.items() if name not in targets})
        rest._filled.update({key: times for key, times in self._filled.items() if key[0] not in targets})
        return rest

    @property
    def unfilled(self) -> tuple[str, ...]:
        """Required slots that nothing filled, as `name[slot]`, in the order of the model."""
        return tuple(
            slot_text(name, slot)
            for name, slots in self._required.items()
            for slot in slots
            if not self._filled[name, slot]
        )

    @property
    def refilled(self) -> tuple[str, ...]:
        """Slots that were filled more than once, as `name[slot]`, exempt shells included."""
        return tuple(slot_text(name, slot) for (name, slot), times in self._filled.items() if times > 1)

    def check(self) -> None:
        """Raises:
        SlotsError: If a required slot is empty, or any was filled twice; it lists them.
        """
        unfilled, refilled = list(self.unfilled), list(self.refilled)
        if not unfilled and not refilled:
            return
        raise SlotsError(
            "; ".join(
                f"{len(slots)} slots {verdict}: {_listed(slots)}"
                for slots, verdict in ((unfilled, "were filled by nothing"), (refilled, "were filled more than once"))
                if slots
            )
            + ", expected each to be filled exactly once",
            unfilled=unfilled,
            refilled=refilled,
            diagnostic="D03" if unfilled else "D02",
        )


def _listed(slots: Collection[str]) -> str:
    more = f" and {len(slots) - _MOST_SHOWN} more" if len(slots) > _MOST_SHOWN else ""
    return ", ".join(list(slots)[:_MOST_SHOWN]) + more
