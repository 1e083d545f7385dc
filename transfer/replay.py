"""Does again what a trace recorded, with real bytes, and proves that it is what the loader itself would have done.

A new version of an engine, or of a model, is admitted by `check_trace` on a tiny checkpoint: what a replay and the
ordinary loader make together has to equal, byte for byte, what the ordinary loader makes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import Region
from weightwire.transfer.shell_memory import distinct_region
from weightwire.transfer.tracing import LoadWeights, Trace, TracedCopy, TracedFill, trace_placement

Tensors = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]
Build = Callable[[], tuple[LoadWeights, Mapping[str, torch.Tensor]]]

_MOST_SHOWN = 20


def replay(trace: Trace, shells: Mapping[str, torch.Tensor], tensors: Tensors) -> None:
    """Make the copies and fills of a trace, in their order; what they do not reach keeps its bytes.

    Opaque shells are not touched: `trace.ordinary` names the tensors to give to the loader afterwards.

    Args:
        trace: Of a loader whose shells lay in their storages as `shells` do.
        shells: Tensors with memory by runtime name; written in place.
        tensors: Checkpoint tensors by name, whole; a function is asked once for each run of copies from one tensor.

    Raises:
        PlacementError: If a shell or tensor of the trace is not there, is too small, or has another dtype than when
            it was traced. What came before it in the trace has been written.
    """
    source = _Source(tensors)
    for event in trace.events:
        if event.shell not in shells:
            raise PlacementError(
                f"shell {event.shell!r}: the trace writes to it, expected it among the {len(shells)} shells given",
                tensor=event.shell,
            )
        target = _view(shells[event.shell].detach(), event.target, event.shell)
        if isinstance(event, TracedFill):
            _fill(target, event.value)
        else:
            target.copy_(source.elements(event, target.dtype))


class _Source:
    """The checkpoint tensors; the last one is kept, since a loader makes its copies tensor by tensor."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._name: str | None = None
        self._flat = torch.empty(0)

    def elements(self, copy: TracedCopy, dtype: torch.dtype) -> torch.Tensor:
        """The elements that a copy takes, as a view."""
        if copy.name != self._name:
            self._flat, self._name = self._read(copy.name).detach().reshape(-1), copy.name
        if (self._flat.dtype != dtype) != copy.is_cast:
            raise PlacementError(
                f"checkpoint tensor {copy.name!r}: dtype is {self._flat.dtype}, of the shell {copy.shell!r} {dtype}, "
                f"expected {'another one' if copy.is_cast else 'the same'}, as in the trace",
                tensor=copy.name,
            )
        if copy.source.end > self._flat.numel():
            raise PlacementError(
                f"checkpoint tensor {copy.name!r}: has {self._flat.numel()} elements, the trace reads up to element "
                f"{copy.source.end}",
                tensor=copy.name,
            )
        offset = self._flat.storage_offset() + copy.source.offset
        return self._flat.as_strided(copy.source.shape, copy.source.strides, offset)

    def _read(self, name: str) -> torch.Tensor:
        if callable(self._tensors):
            return self._tensors(name)
        if name not in self._tensors:
            raise PlacementError(
                f"checkpoint tensor {name!r}: the trace reads it, expected it among the {len(self._tensors)} given",
                tensor=name,
            )
        return self._tensors[name]


def _view(shell: torch.Tensor, region: Region, name: str) -> torch.Tensor:
    held = shell.untyped_storage().nbytes() // shell.itemsize
    if region.end > held:
        raise PlacementError(
            f"shell {name!r}: its storage has {held} elements, the trace writes up to element {region.end}", tensor=name
        )
    return shell.as_strided(region.shape, region.strides, region.offset)


def _fill(target: torch.Tensor, value: float) -> None:
    """Torch has no fill for some dtypes of one byte, whose zeros are zero bytes, as those of all others are."""
    if target.itemsize == 1 and str(value) == "0.0":
        target.view(torch.uint8).zero_()
    elif value.is_integer() and not (target.is_floating_point() or target.is_complex()):
        target.fill_(int(value))
    else:
        target.fill_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A shell that a replay and an ordinary load leave unlike.

    Attributes:
        name: Runtime name.
        elements: How many differ.
        index: Of the first that does, in the shell.
        ordinary: Bytes of that element after an ordinary load, in hexadecimal.
        replayed: The same after the replay.
        reason: Where the two cannot be compared: which dtypes, shapes or devices they have.
    """

    name: str
    elements: int
    index: tuple[int, ...] = ()
    ordinary: str = ""
    replayed: str = ""
    reason: str = ""

    def __str__(self) -> str:
        what = self.reason or f"first at {list(self.index)}: {self.ordinary} loaded, {self.replayed} replayed"
        return f"{self.name} ({self.elements} elements, {what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCheck:
    """What the comparison of a replay with an ordinary load found.

    Attributes:
        trace: Of the loader.
        given: Checkpoint names that went through the ordinary loader after the replay, in the checkpoint's order.
        num_shells: How many were compared.
        differences: In the order of the shells.
    """

    trace: Trace
    given: tuple[str, ...]
    num_shells: int
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Every byte of every shell."""
        return not self.differences

    @property
    def opaque(self) -> Mapping[str, str]:
        """By runtime name, why the shell went through the ordinary loader."""
        return self.trace.opaque

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Elements that kept their initial values, by runtime name."""
        return self.trace.uncovered

    @property
    def overwritten(self) -> Mapping[str, int]:
        """Writes beyond the first, by runtime name; the last one counts."""
        return self.trace.overwritten

    def check_equal(self) -> None:
        """Raises:
        PlacementError: If any byte differs.
        """
        if self.is_equal:
            return
        shown = ", ".join(str(difference) for difference in self.differences[:_MOST_SHOWN])
        more = f" and {len(self.differences) - _MOST_SHOWN} more" if len(self.differences) > _MOST_SHOWN else ""
        raise PlacementError(
            f"{len(self.differences)} of {self.num_shells} shells: replayed otherwise than loaded, expected equal "
            f"bytes: {shown}{more}",
            tensor=self.differences[0].name,
            differences=[difference.name for difference in self.differences],
        )


def check_trace(build: Build, tensors: Mapping[str, torch.Tensor]) -> TraceCheck:
    """Compare a replay, with the opaque shells' tensors through the ordinary loader, with an ordinary load.

    Two instances are built, and hold the same bytes before anything is loaded, so that what nothing writes is equal,
    be it a default or never initialised.

    Args:
        build: Makes a fresh instance: its loader and its shells, which have memory. A mapping that looks its tensors
            up anew also shows parameters that the loader replaces.
        tensors: The checkpoint, in its order. Loaders get copies.

    Raises:
        PlacementError: If the loader asks for values, a shell has no memory, or the trace changed a shell.
        LoadError: What the loader itself raises.
    """
    (load, expected), (replayed_load, shells) = build(), build()
    _equalise(expected, shells)
    trace = trace_placement(replayed_load, shells, _specs(tensors))
    changed = [name for name in expected if name not in trace.opaque and _difference(name, expected, shells)]
    if changed:
        raise PlacementError(f"shell {changed[0]!r}: its bytes changed while it was traced", tensor=changed[0])
    load(_copies(tensors))
    replay(trace, shells, tensors)
    given = tuple(name for name in tensors if name in trace.ordinary)
    if trace.opaque:
        replayed_load(_copies({name: tensors[name] for name in given}))
    found = (_difference(name, expected, shells) for name in expected)
    return TraceCheck(
        trace=trace, given=given, num_shells=len(expected), differences=tuple(item for item in found if item)
    )


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[CheckpointSpec]:
    return [
        CheckpointSpec(name=name, dtype=dtype_of(tensor).name, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _copies(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Loaders may write to what they are given, and may keep it."""
    return ((name, tensor.detach().clone(memory_format=torch.contiguous_format)) for name, tensor in tensors.items())


def _equalise(expected: Mapping[str, torch.Tensor], shells: Mapping[str, torch.Tensor]) -> None:
    """Give the second instance the initial bytes of the first."""
    if list(expected) != list(shells):
        raise PlacementError(f"shells: {len(expected)} and {len(shells)} of two instances, expected the same names")
    for name, shell in expected.items():
        other = shells[name]
        for tensor in (shell, other):
            if tensor.is_meta:
                raise PlacementError(f"shell {name!r}: lies on device meta, expected memory", tensor=name)
        if (shell.shape, shell.dtype) != (other.shape, other.dtype):
            raise PlacementError(
                f"shell {name!r}: {shell.dtype} {list(shell.shape)} in one instance, {other.dtype} "
                f"{list(other.shape)} in another, expected the same",
                tensor=name,
            )
        _elements(other).copy_(_elements(shell))


def _elements(shell: torch.Tensor) -> torch.Tensor:
    """What can be written of a shell: an expanded dimension is one element."""
    region = distinct_region(shell)
    return shell.detach().as_strided(region.shape, region.strides, region.offset)


def _difference(
    name: str, expected: Mapping[str, torch.Tensor], shells: Mapping[str, torch.Tensor]
) -> Difference | None:
    """Compare one shell, bytes with bytes: NaN equals itself, and zeros have signs."""
    one, other = expected[name].detach(), shells[name].detach()
    for what in ("shape", "dtype", "is_meta"):
        loaded, replayed = getattr(one, what), getattr(other, what)
        if loaded != replayed:
            return Difference(name=name, elements=one.numel(), reason=f"{what} is {loaded} loaded, {replayed} replayed")
    if not one.numel() or one.is_meta:
        return None
    rows, other_rows = _bytes(one), _bytes(other)
    if torch.equal(rows, other_rows):
        return None
    unlike = (rows != other_rows).any(dim=1).nonzero().flatten().tolist()
    return Difference(
        name=name,
        elements=len(unlike),
        index=_index(unlike[0], one.shape),
        ordinary=bytes(rows[unlike[0]].tolist()).hex(),
        replayed=bytes(other_rows[unlike[0]].tolist()).hex(),
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes for each element, on the CPU."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(-1, tensor.itemsize)


def _index(position: int, shape: Iterable[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(tuple(shape)):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))
