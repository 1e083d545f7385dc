"""Loaders of whole and cut shells, and what all loaders share: fit everything first, then write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypedDict, Unpack

import torch

from weightwire.transfer.dtypes import is_packed
from weightwire.transfer.errors import Fact, PlacementError, TopologyError
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy
from weightwire.transfer.loading.padding import Cut, clipped, equal_share, in_elements, whole
from weightwire.transfer.loading.slots import ShellLoader, SlotId, attached_loader
from weightwire.transfer.ranks import GroupRank


@dataclass(frozen=True, slots=True)
class Write:
    """One piece of one load, decided and not yet done.

    Attributes:
        shell: View of the shell that is written.
        piece: View of the checkpoint tensor; None for zeros.
    """

    shell: torch.Tensor
    piece: torch.Tensor | None


def write_exact(shell_view: torch.Tensor, piece: torch.Tensor, *, name: str, casts: CastPolicy) -> None:
    """Copy `piece` into a view of a shell of the same shape.

    Raises:
        PlacementError: If the shapes differ, unless both sides have one element (L92, L93), or `casts` forbids it.
    """
    write_all([Write(shell_view, piece)], name=name, casts=casts)


def write_all(writes: Iterable[Write], *, name: str, casts: CastPolicy) -> None:
    """Do all writes of one load, or none.

    Raises:
        PlacementError: If one of them does not fit; nothing was written.
    """
    decided = list(writes)
    for write in decided:
        if write.piece is not None:
            _check_fits(write.shell, write.piece, name=name, casts=casts)
    with torch.no_grad():
        for write in decided:
            if write.piece is None:
                as_bytes_if_packed(write.shell).zero_()
            elif write.piece.numel():
                write.shell.copy_(_of_shape(write.piece, write.shell.shape))


def _check_fits(shell: torch.Tensor, piece: torch.Tensor, *, name: str, casts: CastPolicy) -> None:
    if shell.shape != piece.shape and not shell.numel() == piece.numel() == 1:
        raise misfit(name, piece, shell)
    casts.check(name, piece.dtype, shell.dtype)


def _of_shape(piece: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Only shapes of one element differ here, as () and (1,): a view, so the source stays known (L93).
    return piece if piece.shape == shape else piece.view(shape)


def as_bytes_if_packed(view: torch.Tensor) -> torch.Tensor:
    """A view to be filled with zeros: torch has no fill for the packed float4, whose zeros are zero bytes."""
    return view.view(torch.uint8) if is_packed(view.dtype) else view


def misfit(name: str, tensor: torch.Tensor, shell: torch.Tensor, *, hint: str = "") -> PlacementError:
    """The error for a tensor and a shell whose shapes do not go together (diagnostic D04).

    Args:
        name: Runtime name of the shell.
        tensor: What was to be loaded.
        shell: Where to.
        hint: What else is known, to end the message.
    """
    weight, parameter = list(tensor.shape), list(shell.shape)
    missing = _missing_cut(weight, parameter)
    facts: dict[str, Fact] = {"diagnostic": "D04", "tensor": name, "weight": str(weight), "parameter": str(parameter)}
    if missing is not None and not hint:
        axis, factor = missing
        facts |= {"axis": axis, "factor": factor}
        hint = f"axis {axis} is {factor} times as large, is it split over {factor} ranks and the loader does not cut?"
    elif not hint:
        hint = "equal shapes are expected, and neither a cut nor padding is declared"
    return PlacementError(
        f"tensor {name!r}: Attempted to load weight {weight} into parameter {parameter}: {hint}", **facts
    )


def _missing_cut(weight: Sequence[int], parameter: Sequence[int]) -> tuple[int, int] | None:
    """The one axis that is a multiple of the parameter's, and the factor: as if a rank's cut had been left out."""
    differing = [axis for axis, (size, local) in enumerate(zip(weight, parameter, strict=False)) if size != local]
    if len(weight) != len(parameter) or len(differing) != 1:
        return None
    axis = differing[0]
    size, local = weight[axis], parameter[axis]
    return (axis, size // local) if 0 < local < size and size % local == 0 else None


def no_such_slot(name: str, slot: SlotId, slots: Iterable[SlotId]) -> PlacementError:
    """The error for a slot that the shell does not have."""
    known = ", ".join(dict.fromkeys("the whole" if known is None else str(known) for known in slots))
    return PlacementError(f"tensor {name!r}: slot {slot!s} is not one of its slots ({known})", tensor=name)


@dataclass(frozen=True, slots=True)
class WholeLoader:
    """The shell takes the tensor as it is; the loader of shells that carry none (L91)."""

    casts: CastPolicy = SAME_DTYPE

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (None,)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`."""
        if slot is not None:
            raise no_such_slot(name, slot, self.slots)
        write_exact(shell, tensor, name=name, casts=self.casts)
        return (None,)


_WHOLE = WholeLoader()


def loader_of(shell: torch.Tensor) -> ShellLoader:
    """The loader that the shell carries, or the default one."""
    return attached_loader(shell) or _WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCuts:
    """All parts of a shell that lie one behind the other on one axis.

    Attributes:
        axis: Counted from the first dimension, in shell and tensor alike.
        parts: Slot and cut of each, in the order in which a checkpoint that fuses them has them.
    """

    axis: int
    parts: tuple[tuple[SlotId, Cut], ...]

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return tuple(slot for slot, _ in self.parts)

    def presharded(self) -> AxisCuts:
        """The same shell, filled from tensors that were cut for this rank before."""
        parts = tuple((slot, whole(cut.width, at=cut.at)) for slot, cut in self.parts)
        return AxisCuts(axis=self.axis, parts=parts)

    def writes(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> list[Write]:
        """What fills one slot, or all of them from a tensor that fuses the parts.

        A fused tensor is split by the parts' global sizes before a rank's piece is taken of each (L103).

        Raises:
            PlacementError: If there is no such slot, or shapes do not fit.
        """
        chosen = self._chosen(slot, name)
        self._check_shapes(shell, tensor, sum(cut.size for cut in chosen), name=name)
        found, begin = list[Write](), 0
        for cut in chosen:
            piece = tensor.narrow(self.axis, begin + cut.begin, cut.length)
            found.append(Write(shell.narrow(self.axis, cut.at, cut.length), piece))
            if cut.length < cut.width:
                rest = shell.narrow(self.axis, cut.at + cut.length, cut.width - cut.length)
                found.append(Write(rest, None))
            begin += cut.size
        return found

    def load(
        self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str, casts: CastPolicy
    ) -> tuple[SlotId, ...]:
        """Write what `writes` decides; the slots that are filled now."""
        write_all(self.writes(shell, tensor, slot, name=name), name=name, casts=casts)
        return self.slots if slot is None else (slot,)

    def _chosen(self, slot: SlotId, name: str) -> list[Cut]:
        chosen = [cut for known, cut in self.parts if slot is None or known == slot]
        if not chosen:
            raise no_such_slot(name, slot, self.slots)
        return chosen

    def _check_shapes(self, shell: torch.Tensor, tensor: torch.Tensor, size: int, *, name: str) -> None:
        width = sum(cut.width for _, cut in self.parts)
        if not self.axis < shell.dim() == tensor.dim():
            raise misfit(name, tensor, shell)
        if shell.shape[self.axis] != width:
            raise misfit(name, tensor, shell, hint=f"axis {self.axis} of the parameter was planned as {width}")
        if tensor.shape[self.axis] != size:
            raise misfit(name, tensor, shell, hint=f"axis {self.axis} of the weight is expected to be {size}")
        others = [axis for axis in range(shell.dim()) if axis != self.axis]
        differing = [axis for axis in others if shell.shape[axis] != tensor.shape[axis]]
        if differing:
            raise misfit(name, tensor, shell, hint=f"axis {differing[0]} differs, and only axis {self.axis} is cut")


class CutsAxis(Protocol):
    """A loader whose shell is cut along one axis."""

    @property
    def cuts(self) -> AxisCuts: ...


class CutOptions(TypedDict, total=False):
    """What `CutLoader.column` and `CutLoader.row` may be told besides group and size.

    Attributes:
        casts: Dtype changes allowed; none by default.
        widths: Width of every rank, in rank order, where they differ (L97).
        pad: Whether the shells together may be larger than the tensor, the rest being zero (L99).
        packing: Logical values in one element along the axis; sizes and widths count values.
        presharded: Whether the tensors that come were cut for this rank before (L113).
    """

    casts: CastPolicy
    widths: Sequence[int] | None
    pad: bool
    packing: int
    presharded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLoader:
    """One rank's slice of one axis.

    The group has no default: a rank that nobody named would silently be the first one. Rank and size are those of
    the group that the shell was built for, whatever is built later (L96).

    Attributes:
        axis: 0 cuts outputs (column parallel), 1 inputs (row parallel).
        group: The group over which the tensor is split, and the place in it.
        width: Elements of the shell on the axis.
        offset: Where the slice begins in the tensor: the sum of the widths of the lower ranks.
        size: Elements of the tensor on the axis.
        casts: Dtype changes allowed.
        pad: Whether elements beyond the tensor's end are zero instead of an error.
        length: Elements taken; None for all `width`, or with `pad` for as many as the tensor has.
        presharded: Whether tensors come cut already.
    """

    axis: int
    group: GroupRank
    width: int
    offset: int
    size: int
    casts: CastPolicy = SAME_DTYPE
    pad: bool = False
    length: int | None = None
    presharded: bool = False

    def __post_init__(self) -> None:
        if not self.pad and self.length is None and self.offset + self.width > self.size:
            raise TopologyError(
                f"rank {self.group.rank} of {self.group.size}: takes [{self.offset}, {self.offset + self.width}) "
                f"of an axis of {self.size}, and no padding is declared"
            )

    @classmethod
    def column(cls, group: GroupRank, size: int, **options: Unpack[CutOptions]) -> Self:
        """A slice of the outputs: axis 0, also of a bias.

        Raises:
            TopologyError: If `size` cannot be dealt to the ranks as asked.
        """
        return cls._along(0, group, size, options)

    @classmethod
    def row(cls, group: GroupRank, size: int, **options: Unpack[CutOptions]) -> Self:
        """A slice of the inputs: axis 1.

        Raises:
            TopologyError: If `size` cannot be dealt to the ranks as asked.
        """
        return cls._along(1, group, size, options)

    @classmethod
    def _along(cls, axis: int, group: GroupRank, size: int, options: CutOptions) -> Self:
        pad, packing = options.get("pad", False), options.get("packing", 1)
        widths = _dealt(axis, group, size, options)
        offset = sum(widths[: group.rank])
        border = f"axis {axis}, rank {group.rank} of {group.size}"
        return cls(
            axis=axis,
            group=group,
            width=in_elements(widths[group.rank], packing, of=border),
            offset=in_elements(offset, packing, of=border),
            size=in_elements(size, packing, of=f"axis {axis}"),
            casts=options.get("casts", SAME_DTYPE),
            pad=pad,
            presharded=options.get("presharded", False),
        )

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (None,)

    @property
    def cuts(self) -> AxisCuts:
        cut = clipped(self.offset, self.width, size=self.size)
        if self.length is not None:
            cut = Cut(width=self.width, begin=cut.begin, length=self.length, size=self.size)
        cuts = AxisCuts(axis=self.axis, parts=((None, cut),))
        return cuts.presharded() if self.presharded else cuts

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        """See `ShellLoader.load`."""
        return self.cuts.load(shell, tensor, slot, name=name, casts=self.casts)


def _dealt(axis: int, group: GroupRank, size: int, options: CutOptions) -> tuple[int, ...]:
    """Width of every rank, in the order of ranks."""
    pad, widths = options.get("pad", False), options.get("widths")
    if widths is None:
        each = -(-size // group.size) if pad else equal_share(size, group.size, of=f"axis {axis}")
        return (each,) * group.size
    total = sum(widths)
    if len(widths) != group.size or total < size or (total > size and not pad):
        raise TopologyError(
            f"axis {axis}: widths {list(widths)} of {group.size} ranks do not make up its size {size}"
            f"{' with padding' if pad else ''}"
        )
    return tuple(widths)
