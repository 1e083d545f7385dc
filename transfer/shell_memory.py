"""Which shells lie where in their storages, and which of them a view touches.

Most shells have a storage to themselves. Others are aliases (tied parameters), or cuts of one flat buffer. Shells whose
extents overlap form a group: what is unknown of one of them is unknown of all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from weightwire.transfer.coverage import Coverage, count_coverage
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.regions import Region


@dataclass(slots=True, kw_only=True, eq=False)
class ShellGroup:
    """Shells of one storage whose extents overlap, with what is known about them so far.

    Attributes:
        begin: First byte of the storage that belongs to them.
        end: One past the last one.
        dtype: What their elements are; None if the shells see them differently.
        shells: By runtime name, in the order of the storage. Names of the same elements count once, under the first.
        opaque: Why it is not known what lies there; None if it is.
        is_written: Whether the loader does anything to them.
        fed: Checkpoint tensors that reach them, or in whose turn they were written.
        is_always_written: Whether they are written in nobody's turn, and so by every run of the loader.
    """

    begin: int
    end: int
    dtype: torch.dtype | None
    shells: dict[str, torch.Tensor] = field(default_factory=dict)
    opaque: str | None = None
    is_written: bool = False
    fed: set[str] = field(default_factory=set)
    is_always_written: bool = False
    _names: list[str] = field(default_factory=list)
    _begins: list[int] = field(default_factory=list)
    _seen: set[tuple[Region, torch.dtype]] = field(default_factory=set)

    def add(self, name: str, shell: torch.Tensor) -> None:
        """One more, unless it is another name of the same elements."""
        begin, end = extent(shell)
        elements = (distinct_region(shell).coalesced(), shell.dtype)
        self.end = max(self.end, end)
        self.dtype = self.dtype if self.dtype == shell.dtype else None
        if elements not in self._seen:
            self._seen.add(elements)
            self.shells[name] = shell
            self._names.append(name)
            self._begins.append(begin)

    def name_at(self, target: torch.Tensor) -> str:
        """The narrowest shell that a view lies in; else the first of all."""
        if len(self._names) > 1:
            for index in reversed(range(bisect_right(self._begins, extent(target)[0]))):
                if _lies_in(target, self.shells[self._names[index]]):
                    return self._names[index]
        return self._names[0]

    def run_of(self, view: torch.Tensor) -> Region:
        """The part of a contiguous view that reaches into this group."""
        begin = max(int(view.storage_offset()), self.begin // view.itemsize)
        end = min(int(view.storage_offset()) + view.numel(), self.end // view.itemsize)
        return Region(offset=begin, shape=(end - begin,), strides=(1,))

    def count(self, written: Sequence[Region]) -> Iterator[tuple[str, Coverage]]:
        """How often the elements of each shell are written, by regions of all that is written to the group."""
        begins = np.array([region.offset for region in written], dtype=np.int64)
        ends = np.array([region.end for region in written], dtype=np.int64)
        for name, shell in self.shells.items():
            region = distinct_region(shell)
            if len(self.shells) == 1:
                yield name, count_coverage(region, written)
                return
            touching = np.nonzero((begins < region.end) & (ends > region.offset))[0].tolist()
            near = [written[index] for index in touching]
            missing = count_coverage(region, near).missing
            # Writes to others of the group are neither outside nor repeated here.
            inside = sum(region.numel - count_coverage(region, [write]).missing for write in near)
            repeated = inside - (region.numel - missing)
            yield name, Coverage(elements=region.numel, missing=missing, repeated=repeated, outside=0)


class ShellMemory:
    """The shells' storages, kept alive: they are recognised by the addresses of their descriptors.

    Raises:
        PlacementError: If a shell is not a plain dense tensor: writes to its parts could not be seen.
    """

    def __init__(self, shells: Mapping[str, torch.Tensor]) -> None:
        for name, shell in shells.items():
            _check_plain(name, shell)
        # A parameter may let go of its storage, whose address would then be somebody else's.
        self._held = {name: shell.detach() for name, shell in shells.items()}
        self._places = {name: _place(shell) for name, shell in self._held.items()}
        by_storage: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, shell in self._held.items():
            by_storage[storage_key(shell)][name] = shell
        self._group_of: dict[str, ShellGroup] = {}
        self._groups = {key: self._grouped(members) for key, members in by_storage.items()}
        self._begins = {key: [group.begin for group in groups] for key, groups in self._groups.items()}
        self._alone = {key: groups[0] for key, groups in self._groups.items() if _fill_storage(groups)}

    def _grouped(self, members: Mapping[str, torch.Tensor]) -> list[ShellGroup]:
        """The groups of one storage in its order; shells without elements are touched by nothing."""
        groups: list[ShellGroup] = []
        for name, shell in sorted(members.items(), key=_wide_first):
            begin, end = extent(shell)
            if begin < end and groups and begin < groups[-1].end:
                groups[-1].add(name, shell)
                self._group_of[name] = groups[-1]
                continue
            group = self._group_of[name] = ShellGroup(begin=begin, end=end, dtype=shell.dtype)
            group.add(name, shell)
            if begin < end:
                groups.append(group)
        return groups

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the storage of a shell."""
        return storage_key(tensor) in self._groups

    def __contains__(self, key: int) -> bool:
        return key in self._groups

    def group_of(self, name: str) -> ShellGroup:
        return self._group_of[name]

    def groups(self) -> Iterable[ShellGroup]:
        return dict.fromkeys(self._group_of.values())

    def names(self) -> Iterator[tuple[str, ShellGroup]]:
        """Shells in their order with their groups; names of the same elements once, under the first."""
        found = ((name, self._group_of[name]) for name in self._places)
        return ((name, group) for name, group in found if name in group.shells)

    def touched(self, view: torch.Tensor) -> Sequence[ShellGroup]:
        """The groups that a view of one of the storages reaches into, in the order of the storage."""
        key = storage_key(view)
        alone = self._alone.get(key)
        if alone is not None:
            return (alone,)
        begin, end = extent(view)
        groups, first = self._groups[key], max(0, bisect_right(self._begins[key], begin) - 1)
        last = bisect_left(self._begins[key], end)
        return [group for group in groups[first:last] if begin < end and group.end > begin]

    def moved(self, shells: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """The shells that lie elsewhere now, or are another view of where they were."""
        return (name for name, place in self._places.items() if name not in shells or _place(shells[name]) != place)

    def restore(self, shells: Mapping[str, torch.Tensor]) -> None:
        """Bring the shells back to where they were, as far as torch lets them."""
        for name in self.moved(shells):
            if name in shells and shells[name].device == self._held[name].device:
                shells[name].data = self._held[name]


def storage_key(tensor: torch.Tensor) -> int:
    """What a storage is known by, as long as it is alive; tensors that have none (sparse ones) are all alike."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return -1


def region_of(tensor: torch.Tensor) -> Region:
    """The elements of its storage that a view has."""
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


def distinct_region(tensor: torch.Tensor) -> Region:
    """The same, where an expanded dimension counts once."""
    kept = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size]
    shape, strides = tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
    return Region(offset=int(tensor.storage_offset()), shape=shape, strides=strides)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From the first byte of a view to behind its last one, in its storage."""
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin * tensor.itemsize, begin * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _lies_in(view: torch.Tensor, shell: torch.Tensor) -> bool:
    """Whether the shell has all elements of a view that does not begin before it."""
    if extent(view)[1] > extent(shell)[1]:
        return False
    return shell.is_contiguous() or not count_coverage(distinct_region(shell), [region_of(view)]).outside


def _wide_first(item: tuple[str, torch.Tensor]) -> tuple[int, int]:
    begin, end = extent(item[1])
    return begin, -end


_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _place(shell: torch.Tensor) -> _Place:
    return (storage_key(shell), int(shell.storage_offset()), tuple(shell.shape), shell.stride(), shell.dtype)


def _fill_storage(groups: Sequence[ShellGroup]) -> bool:
    """Whether there is no other memory in the storage than that of one group."""
    if len(groups) != 1:
        return False
    shell = next(iter(groups[0].shells.values()))
    return (groups[0].begin, groups[0].end) == (0, shell.untyped_storage().nbytes())


def _check_plain(name: str, shell: torch.Tensor) -> None:
    # Wrappers, such as distributed or fake tensors, hand on to tensors inside of them; lazy ones have no storage.
    is_plain = type(shell).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not is_lazy(shell)
    if not is_plain or shell.layout != torch.strided or shell.is_quantized:
        raise PlacementError(
            f"shell {name!r}: is a {type(shell).__name__} of its own kind, expected a plain dense tensor, whose writes "
            "can be seen",
            tensor=name,
        )
