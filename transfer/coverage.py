"""How often each element of a shell is written, counted without touching any element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.transfer.regions import Region

_Runs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts for one shell.

    Attributes:
        elements: Elements of the shell.
        missing: Elements that nothing writes.
        repeated: Writes beyond the first, summed over the elements.
        outside: Written elements that do not belong to the shell.
    """

    elements: int
    missing: int
    repeated: int
    outside: int

    @property
    def is_exact(self) -> bool:
        """Every element of the shell once, and nothing else."""
        return not (self.missing or self.repeated or self.outside)


def count_coverage(shell: Region, written: Iterable[Region]) -> Coverage:
    """Compare what is written with the elements that a shell has.

    Args:
        shell: Its elements in a storage; no element twice.
        written: Regions of the same storage, in any order.
    """
    regions = [region for region in written if region.numel]
    total = sum(region.numel for region in regions)
    union = _union(regions)
    covered = _total(union)
    inside = _common(union, _union([shell]) if shell.numel else (_NONE, _NONE))
    return Coverage(
        elements=shell.numel, missing=shell.numel - inside, repeated=total - covered, outside=covered - inside
    )


_NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


def _union(regions: Iterable[Region]) -> _Runs:
    """Disjoint sorted runs, as arrays of begins and ends."""
    pieces = [_runs(region) for region in regions]
    if not pieces:
        return _NONE, _NONE
    return _merged(np.concatenate([begins for begins, _ in pieces]), np.concatenate([ends for _, ends in pieces]))


def _merged(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> _Runs:
    """Runs in any order, made disjoint and sorted."""
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    # A run begins anew where it lies behind everything before it.
    is_first = np.concatenate(([True], begins[1:] > reach[:-1]))[: len(begins)]
    is_last = np.concatenate((is_first[1:], [True]))[: len(begins)]
    return begins[is_first], reach[is_last]


def _runs(region: Region) -> _Runs:
    flat = region.coalesced()
    starts = np.full(1, flat.offset, dtype=np.int64)
    sizes = list(zip(flat.shape, flat.strides, strict=True))
    length = sizes.pop()[0] if sizes and sizes[-1][1] == 1 else 1
    for size, stride in sizes:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, starts + length


def _common(one: _Runs, other: _Runs) -> int:
    """Elements that lie in both unions: what their sum has more than their union."""
    begins, ends = (np.concatenate((one[side], other[side])) for side in (0, 1))
    return _total((begins, ends)) - _total(_merged(begins, ends))


def _total(runs: _Runs) -> int:
    return int((runs[1] - runs[0]).sum())
