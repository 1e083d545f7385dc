"""Loaders of quantisation scales: one for each part, each block or each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.base_loaders import AxisCuts, CutsAxis, Write, misfit, no_such_slot, write_all
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.expert_loaders import ExpertLoader, ExpertMatrix, ExpertSlots, parts_of
from weightwire.transfer.loading.padding import Cut
from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName, SlotId
from weightwire.transfer.ranks import ALONE, ExpertPlacement, GroupRank

# Input scales of gate and up that differ by more were measured apart: one value cannot stand for both (L114).
MAX_DISAGREEMENT = 1e-5


def block_scale_shape(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the block scales of a `[rows, cols]` shell; the last block of an axis may be partial (L88)."""
    return -(-rows // block[0]), -(-cols // block[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScaleLoader:
    """One scale for each part of a fused layer, the same on every rank (L104). The shell is `[parts]`.

    Attributes:
        parts: Slots of the layer, in order: `("q", "k", "v")`, or `(0, 1)` for gate and up.
        casts: Dtype changes allowed.
    """

    parts: tuple[SlotId, ...]
    casts: CastPolicy = SAME_DTYPE

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return self.parts

    @property
    def shell_shape(self) -> tuple[int]:
        return (len(self.parts),)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None is a fused tensor's one scale, which goes to every part, or all of them."""
        if shell.shape != self.shell_shape:
            raise misfit(name, tensor, shell, hint=f"the parameter was planned for the {len(self.parts)} parts")
        if slot is not None and slot not in self.parts:
            raise no_such_slot(name, slot, self.parts)
        if slot is None and tensor.numel() != 1:
            write_all([Write(shell, tensor)], name=name, casts=self.casts)
            return self.parts
        filled = self.parts if slot is None else (slot,)
        writes = [Write(shell[self.parts.index(part)], tensor) for part in filled]
        write_all(writes, name=name, casts=self.casts)
        return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaleLoader:
    """Scales of square blocks, cut like their weight, in units of blocks (L105).

    Attributes:
        weight: Loader of the weight's shell.
        block: Elements of one block on the axis that is cut.
        layer: Whose scales these are, for messages.
        casts: Dtype changes allowed.

    Raises:
        TopologyError: If a border of the cut lies inside a block.
    """

    weight: CutsAxis
    block: int
    layer: str
    casts: CastPolicy = SAME_DTYPE
    cuts: AxisCuts = field(init=False)

    def __post_init__(self) -> None:
        weight = self.weight.cuts
        last = len(weight.parts) - 1
        parts = tuple(
            (slot, self._in_blocks(cut, is_last=number == last)) for number, (slot, cut) in enumerate(weight.parts)
        )
        object.__setattr__(self, "cuts", AxisCuts(axis=weight.axis, parts=parts))

    def _in_blocks(self, cut: Cut, *, is_last: bool) -> Cut:
        self._check_aligned(cut, is_last=is_last)
        begin, end, size, width = (-(-count // self.block) for count in (cut.begin, cut.end, cut.size, cut.width))
        return Cut(at=cut.at // self.block, width=width, begin=begin, length=end - begin, size=size)

    def _check_aligned(self, cut: Cut, *, is_last: bool) -> None:
        # Only the end of the tensor may lie inside a block; and nothing may follow it, neither in shell nor in file.
        inner = [cut.at, *(border for border in (cut.begin, cut.end) if border != cut.size)]
        inner += [] if is_last else [cut.width, cut.size]
        unaligned = [border for border in inner if border % self.block]
        if unaligned:
            raise TopologyError(
                f"layer {self.layer!r}: takes [{cut.begin}, {cut.end}) of {cut.size} to {cut.at} of its shell, and "
                f"{unaligned[0]} lies inside a block, expected multiples of {self.block} (or weights without scales)",
                layer=self.layer,
                block=self.block,
            )

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return self.cuts.slots

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; tensor and shell hold one element for each block."""
        return self.cuts.load(shell, tensor, slot, name=name, casts=self.casts)


def expert_block_scales(weight: ExpertLoader, block: int, *, layer: str) -> ExpertLoader:
    """The loader of an expert weight's block scales: its cut in units of blocks (L114).

    Args:
        weight: Loader of the weight's shell.
        block: Elements of one block on the intermediate axis.
        layer: For the message.

    Raises:
        TopologyError: If a rank's border, or the one between the halves, lies inside a block.
    """
    ranks = weight.tensor.size
    borders = {"width": weight.width} if ranks > 1 or len(weight.parts) > 1 else {}
    if len(weight.parts) > 1:
        borders["intermediate size"] = weight.intermediate
    if weight.partition == "even" and ranks > 1:
        borders["share of a rank"] = weight.intermediate // ranks
    for what, border in borders.items():
        if border % block:
            raise TopologyError(
                f"layer {layer!r}: {what} of its experts is {border} over {ranks} ranks, "
                f"expected a multiple of the block size {block}",
                layer=layer,
                block=block,
            )
    return replace(weight, intermediate=-(-weight.intermediate // block), width=-(-weight.width // block))


def expert_channel_scales(weight: ExpertLoader) -> ExpertLoader:
    """The loader of scales for each output channel, `[slots, channels, 1]`: cut like w13, whole for w2 (L114)."""
    if weight.matrix == "w13":
        return replace(weight, transposed=False)
    return replace(weight, tensor=ALONE, intermediate=1, width=1, partition="even", transposed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScaleLoader:
    """One weight scale for each matrix of each expert (L114): the shell is `[slots, 2]` for w13, `[slots]` for w2.

    Attributes:
        matrix: Whose scales.
        placement: Which expert lies where.
        expert: The expert-parallel group.
        gated: Whether w13 has an up half; its shell is `[slots, 1]` otherwise.
        up_first: Only if the method wants scales, too, in the kernel's order; they are [gate, up] otherwise (L108).
        everywhere: Whether every rank holds the scales of all experts, by logical number (L63).
        casts: Dtype changes allowed.
    """

    matrix: ExpertMatrix
    placement: ExpertPlacement
    expert: GroupRank
    gated: bool = True
    up_first: bool = False
    everywhere: bool = False
    casts: CastPolicy = SAME_DTYPE

    @property
    def parts(self) -> tuple[ExpertPartName, ...]:
        return parts_of(self.matrix, gated=self.gated)

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return self._experts.slots(self.parts)

    @property
    def shell_shape(self) -> tuple[int, ...]:
        count = len(self._experts.logical)
        return (count,) if self.matrix == "w2" else (count, len(self.parts))

    @property
    def _experts(self) -> ExpertSlots:
        return ExpertSlots(placement=self.placement, expert=self.expert, everywhere=self.everywhere)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None takes `[E, 2]`, or `[E]` where gate and up share a scale."""
        if shell.shape != self.shell_shape:
            raise misfit(name, tensor, shell, hint=f"the parameter was planned as {list(self.shell_shape)}")
        if slot is None:
            write_all(self._fused_writes(shell, tensor, name=name), name=name, casts=self.casts)
            return self._experts.routed_slots(self.parts)
        if not isinstance(slot, ExpertPart) or slot.part not in self.parts:
            raise no_such_slot(name, slot, self.parts)
        indices = self._experts.indices(slot.expert, name=name)
        writes = [Write(self._entry(shell[index], slot.part), tensor) for index in indices]
        write_all(writes, name=name, casts=self.casts)
        return tuple(ExpertPart(index, slot.part) for index in indices)

    def _entry(self, row: torch.Tensor, part: ExpertPartName) -> torch.Tensor:
        order = self.parts[::-1] if self.up_first else self.parts
        return row[order.index(part)] if self.matrix == "w13" else row

    def _fused_writes(self, shell: torch.Tensor, tensor: torch.Tensor, *, name: str) -> Iterator[Write]:
        count = len(self.parts)
        if tensor.dim() > 1 and tensor.shape[1:] != (count,):
            raise misfit(name, tensor, shell, hint=f"expected one scale for each expert, or {count}")
        for index, piece in self._experts.pairs(tensor, shell, name=name):
            for number, part in enumerate(self.parts):
                yield Write(self._entry(shell[index], part), piece[number] if piece.dim() else piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInputScaleLoader:
    """One input scale for each expert; w1 and w3 read the same input and must agree (L114). The shell is `[slots]`.

    The value of w1 is the one that stays, whichever comes first. Reading values is what a run on meta tensors cannot
    do: there nothing is compared, and the loader declares itself not traceable.

    Attributes:
        matrix: `w13` for the input of gate and up, `w2` for that of down.
        placement: Which expert lies where.
        expert: The expert-parallel group.
        gated: Whether w3 exists.
        everywhere: Whether every rank holds the scales of all experts, by logical number (L63).
        casts: Dtype changes allowed.
    """

    matrix: ExpertMatrix
    placement: ExpertPlacement
    expert: GroupRank
    gated: bool = True
    everywhere: bool = False
    casts: CastPolicy = SAME_DTYPE
    # Of each shell and expert whose counterpart has not come yet: which part came, with which value.
    _waiting: dict[tuple[str, int], tuple[ExpertPartName, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    is_traceable: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[ExpertPartName, ...]:
        return parts_of(self.matrix, gated=self.gated)

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return self._experts.slots(self.parts)

    @property
    def shell_shape(self) -> tuple[int]:
        return (len(self._experts.logical),)

    @property
    def _experts(self) -> ExpertSlots:
        return ExpertSlots(placement=self.placement, expert=self.expert, everywhere=self.everywhere)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`; slot None takes `[E]`, one value for both matrices.

        Raises:
            PlacementError: Also if the other matrix' scale differs by more than `MAX_DISAGREEMENT`.
        """
        if shell.shape != self.shell_shape:
            raise misfit(name, tensor, shell, hint=f"the parameter was planned as {list(self.shell_shape)}")
        if slot is None:
            pairs = self._experts.pairs(tensor, shell, name=name)
            write_all([Write(shell[index], piece) for index, piece in pairs], name=name, casts=self.casts)
            return self._experts.routed_slots(self.parts)
        if not isinstance(slot, ExpertPart) or slot.part not in self.parts:
            raise no_such_slot(name, slot, self.parts)
        indices = self._experts.indices(slot.expert, name=name)
        if not indices:
            return ()
        self._check(shell, tensor, slot, name=name)
        # w3 has done its part by agreeing; were it written too, the last one to come would decide.
        if slot.part != "w3":
            write_all([Write(shell[index], tensor) for index in indices], name=name, casts=self.casts)
        return tuple(ExpertPart(index, slot.part) for index in indices)

    def _check(self, shell: torch.Tensor, tensor: torch.Tensor, slot: ExpertPart, *, name: str) -> None:
        if tensor.numel() != 1:
            raise misfit(name, tensor, shell, hint="expected one value for each expert")
        self.casts.check(name, tensor.dtype, shell.dtype)
        if len(self.parts) == 1 or tensor.is_meta:
            return
        mine, key = (slot.part, float(tensor)), (name, slot.expert)
        other = self._waiting.setdefault(key, mine)
        if other[0] == slot.part:
            self._waiting[key] = mine
            return
        del self._waiting[key]
        # Written so that NaN does not pass.
        if not abs(mine[1] - other[1]) <= MAX_DISAGREEMENT:
            raise _disagreement(name, slot.expert, dict((mine, other)))


def _disagreement(name: str, expert: int, values: Mapping[ExpertPartName, float]) -> PlacementError:
    layer = name.rpartition(".")[0]
    found = ", ".join(f"{part} {values[part]:g}" for part in sorted(values))
    return PlacementError(
        f"tensor {name!r}: expert {expert} of layer {layer!r} has input scales {found}, "
        f"expected ones that agree within {MAX_DISAGREEMENT:g}",
        tensor=name,
        layer=layer,
        expert=expert,
    )
