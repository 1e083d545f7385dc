"""Quantised parts in a shell that is not quantised: a weight waits for its scale, or the scale for the weight (L128).

A weight waits in its own shell, and takes no memory beside it: bfloat16 holds every float8 value exactly. What is kept
is scales alone, one number for each block, and only those that come before their weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from weightwire.transfer.checkpoint.reused_buffers import own
from weightwire.transfer.errors import SlotsError
from weightwire.transfer.loading.base_loaders import AxisCuts, misfit, no_such_slot, write_all
from weightwire.transfer.loading.block_scales import Block, num_blocks, scale_blocks
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.padding import Cut, whole
from weightwire.transfer.loading.slots import SlotId, attached_loader

_MEETING = threading.Lock()

SCALE_LEAF = "weight_scale_inv"
FP8 = torch.float8_e4m3fn
_EXACT = ((f"{FP8}".removeprefix("torch."), "bfloat16"),)


def scale_slot(part: str) -> str:
    """The slot of a part's scale: the end of the checkpoint's name for it."""
    return f"{part}.{SCALE_LEAF}"


@runtime_checkable
class HoldsHalves(Protocol):
    """A loader that may be left with one half of a pair."""

    def missing_halves(self) -> tuple[str, ...]:
        """Ends of the checkpoint names that are still awaited."""
        ...

    def forget_halves(self) -> None:
        """Let go of what an earlier load left."""
        ...


def forget_halves(shells: Mapping[str, torch.Tensor]) -> None:
    """Begin a load with nothing left over from one that failed."""
    for shell in shells.values():
        loader: object = attached_loader(shell)
        if isinstance(loader, HoldsHalves):
            loader.forget_halves()


def check_halves(shells: Mapping[str, torch.Tensor]) -> None:
    """Nothing may stay pending when a stream has ended (L129).

    Raises:
        SlotsError: Naming the counterpart of each half that came alone (diagnostic D13).
    """
    missing = list(_missing(shells.items()))
    if missing:
        raise SlotsError(
            f"{len(missing)} tensors came without their other halves: missing are {', '.join(missing)}, expected a "
            "weight and its scale",
            unfilled=missing,
            refilled=[],
            diagnostic="D13",
        )


def _missing(shells: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
    for name, shell in shells:
        loader: object = attached_loader(shell)
        if isinstance(loader, HoldsHalves):
            path = name.rpartition(".")[0].rpartition(".")[0]
            yield from (f"{path}.{end}" for end in loader.missing_halves())


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesLoader:
    """Whole parts one behind the other in a bfloat16 shell, of which some may come as FP8 with block scales (L127).

    Each shell has a loader of its own, so that halves of two layers never meet.

    Attributes:
        parts: Each part and its rows, in the order of the shell.
        quantised: Parts that come as FP8. One that comes in another dtype after all is placed at once.
        cols: Columns of the shell.
        block: Rows and columns that share a scale.
        casts: Dtype changes allowed for parts that are not quantised.
    """

    parts: tuple[tuple[str, int], ...]
    quantised: tuple[str, ...]
    cols: int
    block: Block = (128, 128)
    casts: CastPolicy = SAME_DTYPE
    # By part: a scale that came before its weight; None while the weight waits in the shell.
    _waiting: dict[str, torch.Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_traceable(self) -> bool:
        """A product with a scale is computed: the shell is opaque (L191)."""
        return not self.quantised

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (*dict(self.parts), *map(scale_slot, self.quantised))

    @property
    def rows(self) -> int:
        """Of the shell."""
        return sum(dict(self.parts).values())

    @property
    def held_bytes(self) -> int:
        """Of what waits for its other half."""
        return sum(scale.nbytes for scale in self._waiting.values() if scale is not None)

    def checkpoint_spec(self, slot: SlotId) -> tuple[torch.dtype | None, tuple[int, int]]:
        """Dtype, None for the shell's own, and shape of the checkpoint tensor that fills a slot."""
        rows = dict(self.parts)
        if slot in rows:
            return (FP8 if slot in self.quantised else None), (rows[str(slot)], self.cols)
        part = str(slot).removesuffix(f".{SCALE_LEAF}")
        return torch.float32, num_blocks(rows[part], self.cols, self.block)

    def fingerprint_facts(self) -> dict[str, str]:
        """How the values came leaves no trace in the shell."""
        return {"quantised": "", "block": ""}

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None is a tensor of all parts, none of them quantised."""
        if slot is None:
            self._cuts.load(shell, tensor, None, name=name, casts=self.casts)
            return self.slots
        if slot not in self.slots:
            raise no_such_slot(name, slot, self.slots)
        # Workers may bring both halves at once.
        with _MEETING:
            return self._take(shell, tensor, str(slot), name=name)

    def _take(self, shell: torch.Tensor, tensor: torch.Tensor, slot: str, *, name: str) -> tuple[SlotId, ...]:
        scaled = next((part for part in self.quantised if slot == scale_slot(part)), None)
        if scaled is not None:
            self._take_scale(shell, tensor, scaled, name=name)
            return (slot,)
        return self._take_weight(shell, tensor, slot, name=name)

    def _take_weight(self, shell: torch.Tensor, tensor: torch.Tensor, part: str, *, name: str) -> tuple[SlotId, ...]:
        is_half = part in self.quantised and tensor.dtype == FP8
        casts = self.casts.extended(_EXACT) if is_half else self.casts
        scale = self._waiting.get(part)
        if is_half and scale is not None:
            self._check_scale(shell, scale, part, name=name)
        write_all(self._cuts.writes(shell, tensor, part, name=name), name=name, casts=casts)
        if not is_half:
            return (part, scale_slot(part)) if part in self.quantised else (part,)
        if scale is None:
            self._waiting[part] = None
        else:
            del self._waiting[part]
            self._multiply(shell, scale, part)
        return (part,)

    def _take_scale(self, shell: torch.Tensor, tensor: torch.Tensor, part: str, *, name: str) -> None:
        self._check_scale(shell, tensor, part, name=name)
        if self._waiting.get(part, tensor) is not None:
            self._waiting[part] = own(tensor)
            return
        del self._waiting[part]
        self._multiply(shell, tensor, part)

    def _check_scale(self, shell: torch.Tensor, scale: torch.Tensor, part: str, *, name: str) -> None:
        _, expected = self.checkpoint_spec(scale_slot(part))
        if tuple(scale.shape) != expected or not scale.dtype.is_floating_point:
            hint = f"expected the scales of {part!r} as floats {list(expected)} for blocks of {list(self.block)}"
            raise misfit(name, scale, shell, hint=hint)

    def _multiply(self, shell: torch.Tensor, scale: torch.Tensor, part: str) -> None:
        cut = dict(self._cuts.parts)[part]
        with torch.no_grad():
            rows = shell.narrow(0, cut.at, cut.width)
            rows.copy_(scale_blocks(rows, scale, self.block))

    def missing_halves(self) -> tuple[str, ...]:
        """See `HoldsHalves`."""
        return tuple(scale_slot(part) if scale is None else f"{part}.weight" for part, scale in self._waiting.items())

    def forget_halves(self) -> None:
        """See `HoldsHalves`."""
        self._waiting.clear()

    @property
    def _cuts(self) -> AxisCuts:
        parts, at = list[tuple[SlotId, Cut]](), 0
        for part, rows in self.parts:
            parts.append((part, whole(rows, at=at)))
            at += rows
        return AxisCuts(axis=0, parts=tuple(parts))
