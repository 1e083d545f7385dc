"""Contiguous runs of elements as arrays: begins and ends, for regions of more runs than one wants to walk through."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from weightwire.transfer.errors import RegionError
from weightwire.transfer.regions import Region

Runs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

NO_RUNS: Runs = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

# A gigabyte of memory while they are counted; weights are cut along rows or columns, not element by element.
_MOST_RUNS = 1 << 24


def check_countable(regions: Iterable[Region]) -> None:
    """Check that regions have no more runs, taken together, than there is memory to count them.

    Args:
        regions: Coalesced, as `in_memory_order` gives them.

    Raises:
        RegionError: If there are far more than any cut of a tensor gives.
    """
    count = 0
    for region in regions:
        is_run = bool(region.strides) and region.strides[-1] == 1
        count += math.prod(region.shape[:-1] if is_run else region.shape)
        if count > _MOST_RUNS:
            raise RegionError(
                f"region {region.to_json()}: has more than {_MOST_RUNS} runs, alone or with others, expected fewer to "
                "be counted"
            )


def runs_of(region: Region) -> Runs:
    """The runs of a region, ascending unless it overlaps itself.

    Raises:
        RegionError: If there are far more than any cut of a tensor gives.
    """
    flat = region.in_memory_order()
    if not flat.numel:
        return NO_RUNS
    check_countable([flat])
    sizes = list(zip(flat.shape, flat.strides, strict=True))
    length = sizes.pop()[0] if sizes and sizes[-1][1] == 1 else 1
    starts = np.full(1, flat.offset, dtype=np.int64)
    for size, stride in sizes:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, starts + length


def merged_runs(runs: Runs) -> Runs:
    """Runs in any order, made disjoint and sorted; those that touch become one."""
    begins, ends = runs
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    # A run begins anew where it lies behind everything before it.
    is_first = np.concatenate(([True], begins[1:] > reach[:-1]))[: len(begins)]
    is_last = np.concatenate((is_first[1:], [True]))[: len(begins)]
    return begins[is_first], reach[is_last]
