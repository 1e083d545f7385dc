"""Manifests in, plan out: which bytes of a target rank come from which source, which from disk, and why.

Pure. The service runs it for the dry run, every target rank runs it for itself, and runs it again with what is
already covered when a source is lost.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weightwire.transfer.errors import CoverageError, ManifestMismatchError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry
from weightwire.transfer.regions import Region

Way = Literal["identical", "reshard", "disk", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`target <- source`: flat regions in bytes, of equal `numel`, element for element in row-major order."""

    source: Region
    target: Region

    @property
    def nbytes(self) -> int:
        return self.target.numel

    @property
    def is_contiguous(self) -> bool:
        return self.source.is_contiguous and self.target.is_contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWay:
    """How one target tensor is filled, and why so.

    Attributes:
        source: Index of the source manifest; None for the disk.
        nbytes: Bytes that have to come this way; 0 for an alias of another tensor, or where all is covered.
    """

    name: str
    way: Way
    reason: str
    nbytes: int
    source: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The copies that a target rank needs.

    Attributes:
        ways: One for each target tensor, in the manifest's order.
        copies: For each source manifest, by index, its copies in the order of the source's flat space;
            contiguous ones that continue each other are merged.
    """

    ways: tuple[TensorWay, ...]
    copies: tuple[tuple[Copy, ...], ...]

    @property
    def disk(self) -> tuple[str, ...]:
        """Names of the tensors that have to come, in part or whole, from disk."""
        return tuple(way.name for way in self.ways if way.way == "disk")

    def nbytes(self, way: Way) -> int:
        return sum(item.nbytes for item in self.ways if item.way == way)

    def source_bytes(self, index: int) -> int:
        return sum(copy.nbytes for copy in self.copies[index])


def plan_pull(
    target: Manifest,
    sources: Sequence[Manifest],
    *,
    covered: IntervalSet | None = None,
    on_disk: Container[str] = (),
) -> Plan:
    """Plan one target rank.

    Each tensor comes from the first source that holds it; the caller orders the sources by preference. Memory that
    several names share comes once, under the name that can be had best: from a source, else from disk.

    Args:
        target: Layout of the shells; digests in it are not looked at.
        sources: What the sources hold; several sources with one manifest are one entry.
        covered: Flat bytes of the target that are filled and verified already.
        on_disk: Names in the local checkpoint.

    Raises:
        ManifestMismatchError: If a source holds a tensor of the target's name with another dtype or shape, or
            keeps apart and different what the target ties together. Lists every conflict.
    """
    check_agreement(target, sources)
    covered = covered or IntervalSet()
    planned = IntervalSet()
    ways: dict[str, TensorWay] = {}
    owners: dict[Region, TensorWay] = {}
    copies: list[list[Copy]] = [[] for _ in sources]
    for tensor, index in _by_origin(target, sources, on_disk):
        region = target.flat_region(tensor)
        needed = list(_uncovered(region, covered, planned))
        if index is not None:
            held = sources[index].by_name[tensor.name]
            new = list(_copies(region, sources[index].flat_region(held), needed))
            copies[index].extend(new)
            way = _from_source(tensor, held, nbytes=sum(copy.nbytes for copy in new), index=index)
        elif tensor.nbytes and (owner := owners.get(region)) is not None:
            way = replace(owner, name=tensor.name, reason=f"tied to {owner.name!r}", nbytes=0)
        else:
            way = _from_disk(tensor, region, needed, bool(sources))
        _mark(planned, region)
        owners.setdefault(region, way)
        ways[tensor.name] = way
    ordered = tuple(ways[tensor.name] for tensor in target.tensors)
    return Plan(ways=ordered, copies=tuple(tuple(_merged(found)) for found in copies))


def _by_origin(
    target: Manifest, sources: Sequence[Manifest], on_disk: Container[str]
) -> list[tuple[TensorEntry, int | None]]:
    """Every tensor with the index of its source: first those that have one, then those on disk."""
    found = [
        (tensor, next((i for i, source in enumerate(sources) if tensor.name in source.by_name), None))
        for tensor in target.tensors
    ]
    return sorted(found, key=lambda item: (item[1] is None, item[0].name not in on_disk))


def check_agreement(target: Manifest, others: Iterable[Manifest]) -> None:
    """Check that every tensor of the target that another manifest holds is the same tensor there.

    Raises:
        ManifestMismatchError: With all conflicts in `facts["conflicts"]`.
    """
    conflicts = [conflict for other in others for conflict in _conflicts(target, other)]
    if conflicts:
        raise mismatch(conflicts)


def disagreement(manifest: Manifest, others: Iterable[Manifest]) -> str | None:
    """Name of a tensor whose digest differs from that in one of the `others`, if there is one.

    A revision names a model's definition, not its values: two trainings of one model may go by one name.
    """
    for other in others:
        for tensor in manifest.tensors:
            held = other.by_name.get(tensor.name)
            # Another dtype or shape is no other training, but another model: `check_agreement` refuses that.
            if held is None or (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
                continue
            if held.digest and tensor.digest and held.digest != tensor.digest:
                return tensor.name
    return None


def check_specs(target: Manifest, specs: Mapping[str, CheckpointSpec]) -> None:
    """Check the target's tensors against the checkpoint on disk, where both know a name.

    Raises:
        ManifestMismatchError: With all conflicts in `facts["conflicts"]`.
    """
    conflicts: list[dict[str, str]] = []
    for tensor in target.tensors:
        spec = specs.get(tensor.name)
        if spec is not None:
            conflicts += _differences(tensor.name, (tensor.dtype, tensor.shape), (spec.dtype, spec.shape))
    if conflicts:
        raise mismatch(conflicts, there="in the checkpoint on disk")


def check_same_specs(ours: Iterable[CheckpointSpec], theirs: Iterable[CheckpointSpec]) -> None:
    """Check that the local checkpoint and the one that a source was loaded from name the same tensors alike.

    Raises:
        ManifestMismatchError: With every tensor that only one side has, or has otherwise.
    """
    local, remote = ({spec.name: spec for spec in specs} for specs in (ours, theirs))
    conflicts: list[dict[str, str]] = []
    for name in dict.fromkeys((*local, *remote)):
        if name in local and name in remote:
            a, b = local[name], remote[name]
            conflicts += _differences(name, (a.dtype, a.shape), (b.dtype, b.shape))
        else:
            there, here = ("absent", "present") if name in local else ("present", "absent")
            conflicts.append({"tensor": name, "field": "name", "source": there, "target": here})
    if conflicts:
        raise mismatch(conflicts)


def check_servable(plan: Plan, on_disk: Iterable[str]) -> None:
    """Check that everything that the sources do not hold is on disk.

    Raises:
        CoverageError: Naming each tensor that is nowhere.
    """
    available = set(on_disk)
    missing = [way.name for way in plan.ways if way.way == "disk" and way.nbytes and way.name not in available]
    if missing:
        raise missing_tensors(missing)


def missing_tensors(names: Sequence[str]) -> CoverageError:
    shown = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return CoverageError(
        f"{len(names)} tensors are held by no source that can be reached and are not on disk: {shown}",
        missing=list(names),
    )


def mismatch(conflicts: list[dict[str, str]], *, there: str = "on the source") -> ManifestMismatchError:
    """One error for all conflicts, the first few of them in words."""
    lines = [
        f"tensor {c['tensor']!r}: {c['field']} is {c['source']} {there}, {c['target']} on the target"
        for c in conflicts[:5]
    ]
    more = f" (and {len(conflicts) - 5} more)" if len(conflicts) > 5 else ""
    return ManifestMismatchError("; ".join(lines) + more, conflicts=conflicts)


def filled_region(region: Region) -> list[tuple[int, int]]:
    """The flat intervals that a filled region covers; one for a dense one, whatever its order."""
    if region.end - region.offset == region.numel:
        return [(region.offset, region.end)]
    return [(start, start + length) for start, length in region.runs()]


def entangled(manifest: Manifest) -> frozenset[str]:
    """The tensors that share some bytes, not the same box, with another: writing one may change the other."""
    spans = sorted(
        ((manifest.flat_region(tensor), tensor.name) for tensor in manifest.tensors if tensor.nbytes),
        key=lambda item: item[0].offset,
    )
    found: set[str] = set()
    group: list[str] = []
    first: Region | None = None
    is_mixed = False
    reach = 0
    for region, name in spans:
        if region.offset >= reach:
            group, first, is_mixed = [], region, False
        group.append(name)
        reach = max(reach, region.end)
        is_mixed = is_mixed or region != first
        if is_mixed:
            found.update(group)
            group.clear()
    return frozenset(found)


def _conflicts(target: Manifest, source: Manifest) -> Iterator[dict[str, str]]:
    tied: dict[Region, TensorEntry] = {}
    for tensor in target.tensors:
        held = source.by_name.get(tensor.name)
        if held is None:
            continue
        yield from _differences(tensor.name, (tensor.dtype, tensor.shape), (held.dtype, held.shape))
        if not tensor.nbytes:
            continue
        first = tied.setdefault(target.flat_region(tensor), held)
        if source.flat_region(first) != source.flat_region(held) and first.digest != held.digest:
            yield {
                "tensor": tensor.name,
                "field": "value",
                "source": f"not that of {first.name!r}",
                "target": f"tied to {first.name!r}",
            }


def _differences(
    name: str, target: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]
) -> Iterator[dict[str, str]]:
    if target[0] != other[0]:
        yield {"tensor": name, "field": "dtype", "source": other[0], "target": target[0]}
    if target[1] != other[1]:
        yield {"tensor": name, "field": "shape", "source": str(list(other[1])), "target": str(list(target[1]))}


def _uncovered(region: Region, *known: IntervalSet) -> Iterator[tuple[int, int]]:
    """The flat intervals of `region` that none of the sets covers."""
    for begin, end in filled_region(region):
        gaps = [(begin, end)]
        for covered in known:
            gaps = [gap for low, high in gaps for gap in covered.missing(low, high)]
        yield from gaps


def _mark(planned: IntervalSet, region: Region) -> None:
    for begin, end in filled_region(region):
        planned.add(begin, end)


def _copies(target: Region, source: Region, needed: list[tuple[int, int]]) -> Iterator[Copy]:
    """The copies for the `needed` intervals of one tensor; into a strided one it is the whole tensor or nothing."""
    dense = target.end - target.offset == target.numel
    if dense and source.coalesced() == target.shifted(source.offset - target.offset).coalesced():
        # Equal strides without gaps: whatever the order is, it is the same on both sides, byte by byte.
        for begin, end in needed:
            yield Copy(source=_run(begin - target.offset + source.offset, end - begin), target=_run(begin, end - begin))
    elif target.is_contiguous:
        # What is covered already must not be written again: it would count as verified while it is not.
        for begin, end in needed:
            at = begin
            for box in source.packed(begin - target.offset, end - target.offset):
                yield Copy(source=box, target=_run(at, box.numel))
                at += box.numel
    elif needed:
        yield Copy(source=source, target=target)


def _run(begin: int, nbytes: int) -> Region:
    return Region(offset=begin, shape=(nbytes,), strides=(1,))


def _merged(copies: list[Copy]) -> Iterator[Copy]:
    """Sorted by the source's flat space; contiguous copies that continue each other on both sides become one."""
    last: Copy | None = None
    for copy in sorted(copies, key=lambda copy: copy.source.offset):
        if last is not None and _continues(last, copy):
            nbytes = last.nbytes + copy.nbytes
            last = Copy(source=_run(last.source.offset, nbytes), target=_run(last.target.offset, nbytes))
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        last.is_contiguous
        and copy.is_contiguous
        and last.source.end == copy.source.offset
        and last.target.end == copy.target.offset
    )


def _from_source(tensor: TensorEntry, held: TensorEntry, *, nbytes: int, index: int) -> TensorWay:
    if tensor.layout == held.layout:
        return TensorWay(name=tensor.name, way="identical", reason="same layout", nbytes=nbytes, source=index)
    reason = "same elements, other strides: gathered by the source"
    return TensorWay(name=tensor.name, way="reshard", reason=reason, nbytes=nbytes, source=index)


def _from_disk(tensor: TensorEntry, region: Region, needed: list[tuple[int, int]], any_source: bool) -> TensorWay:
    reason = "no source holds it" if any_source else "no source"
    strided = not region.is_contiguous
    nbytes = region.numel if strided and needed else sum(end - begin for begin, end in needed)
    return TensorWay(name=tensor.name, way="disk", reason=reason, nbytes=nbytes)
