"""How often each element of a shell is written, counted without touching any element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from weightwire.transfer.regions import Region
from weightwire.transfer.runs import NO_RUNS, Runs, check_countable, merged_runs, runs_of


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

    Raises:
        RegionError: If there are far more runs than any cut of a tensor gives.
    """
    regions = [region.in_memory_order() for region in written if region.numel]
    check_countable(regions)
    total = sum(region.numel for region in regions)
    union = _union(regions)
    covered = _total(union)
    inside = _common(union, _union([shell]) if shell.numel else NO_RUNS)
    return Coverage(
        elements=shell.numel, missing=shell.numel - inside, repeated=total - covered, outside=covered - inside
    )


def _union(regions: Iterable[Region]) -> Runs:
    """Disjoint sorted runs."""
    pieces = [runs_of(region) for region in regions]
    if not pieces:
        return NO_RUNS
    return merged_runs((np.concatenate([begins for begins, _ in pieces]), np.concatenate([ends for _, ends in pieces])))


def _common(one: Runs, other: Runs) -> int:
    """Elements that lie in both unions: what their sum has more than their union."""
    begins, ends = (np.concatenate((one[side], other[side])) for side in (0, 1))
    return _total((begins, ends)) - _total(merged_runs((begins, ends)))


def _total(runs: Runs) -> int:
    return int((runs[1] - runs[0]).sum())
