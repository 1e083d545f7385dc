"""Manifests in, plan out: which bytes of a target rank come from which source, which from disk, and why.

Pure. The service runs it for the dry run, every target rank runs it for itself, and runs it again with what is
already covered when a source is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_not

from weightwire.transfer.agreement import check_agreement, check_placement, holds_the_same, missing_elements
from weightwire.transfer.collector import collector_paused
from weightwire.transfer.demand import Demand
from weightwire.transfer.errors import CoverageError, ManifestError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest, TensorEntry, Topology
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.plan import Copy, DiskPiece, Plan, TensorWay, Way
from weightwire.transfer.regions import Region
from weightwire.transfer.resharding import PlacedSources, Portion, Shapes, shapes_of
from weightwire.transfer.sharing import Holders, Shares, even_shares, share_out
from weightwire.transfer.units import Unit, dealt, merged, missing_positions, run

_Holdings = list[tuple[int, TensorEntry]]
# Of one rank; each is a copy, or half a kilobyte of memory at least. The largest models have half a million.
_MOST_PARTS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What else a plan can count on.

    Attributes:
        lost: Indices of sources that do not deliver any more. They still decide where tensors are cut, so that what
            was fetched before one was lost is found again.
        capacities: How much the holders of each source manifest can send, against the others: how many processes they
            are, unless one is slower than another. One each unless told otherwise.
        rates: How fast the sources of each manifest were found to be, together, in any unit; more than 0. What this
            rank still needs is then shared out by these, whatever others need.
        on_disk: Checkpoint names that the local disk has; None where nobody has looked.
        covered: Flat bytes of the target that are filled and verified already.
    """

    lost: Container[int] = frozenset()
    capacities: Sequence[float] | None = None
    rates: Sequence[float] | None = None
    on_disk: Container[str] | None = None
    covered: IntervalSet | None = None


def plan_pull(target: Manifest, sources: Sequence[Manifest], supply: Supply | None = None) -> Plan:
    """Plan one target rank; see `Planner`.

    Args:
        target: Layout of the shells; digests in it are not looked at.
        sources: What the sources hold; several sources with one manifest are one entry.
        supply: See `Supply`; nothing covered, nothing lost unless told otherwise.
    """
    return Planner(sources).plan(target, supply)


class Planner:
    """Plans target ranks against the same sources.

    Each tensor comes in the best way that there is: from sources that have it in the same layout; else cut out of what
    sources hold by placement; else from disk, slot by slot. What several sources have in the best way is shared out
    among them. Memory that several names share comes once.
    """

    def __init__(self, sources: Sequence[Manifest]) -> None:
        """Args:
        sources: What the sources hold; several sources with one manifest are one entry.
        """
        self.sources = sources

    @cached_property
    def placed(self) -> PlacedSources:
        """What the sources hold by placement; most targets of a source's own topology never ask."""
        return PlacedSources(self.sources)

    @cached_property
    def by_shape(self) -> Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, TensorEntry]]]:
        """The sources that have a tensor of a name and shape, by number: in another topology the shapes differ."""
        found: defaultdict[tuple[str, tuple[int, ...]], list[tuple[int, TensorEntry]]] = defaultdict(list)
        for index, source in enumerate(self.sources):
            for tensor in source.tensors:
                found[tensor.name, tensor.shape].append((index, tensor))
        return dict(found)

    @cached_property
    def order(self) -> Sequence[int]:
        """The numbers of the sources, in an order that does not depend on how they are numbered."""
        ranks = [(source.topology.tp, source.topology.pp, source.topology.ep, source.rank) for source in self.sources]
        # A digest needs the text of the manifest, and two of one rank are rare.
        repeated = len(set(ranks)) < len(ranks)
        keys = [(*rank, source.digest if repeated else "") for rank, source in zip(ranks, self.sources, strict=True)]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def plan_all(self, targets: Iterable[Manifest]) -> list[Plan]:
        """Plan several target ranks, of one instance or of many; see `plan`."""
        with collector_paused():
            return [self.plan(target) for target in targets]

    def plan(self, target: Manifest, supply: Supply | None = None) -> Plan:
        """Plan one target rank.

        Args:
            target: Layout of the shells; digests in it are not looked at.
            supply: See `Supply`; nothing covered, nothing lost unless told otherwise.

        Raises:
            ManifestMismatchError: If the manifests are of two models or revisions, if a source holds a tensor of the
                target's name with another dtype or shape, or keeps apart and different what the target ties together.
            ManifestError: If a placement puts two things into one place, or a tensor has two shapes.
        """
        with collector_paused():
            check_agreement(target, self.sources)
            return _Planning(target, self, supply or Supply()).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPull:
    """A plan with the question that it answers, so that nobody has to ask it again."""

    planner: Planner
    target: Manifest
    supply: Supply
    plan: Plan

    @classmethod
    def of(cls, target: Manifest, sources: Sequence[Manifest], supply: Supply) -> PlannedPull:
        """As `Planner.plan`."""
        planner = Planner(sources)
        return cls(planner=planner, target=target, supply=supply, plan=planner.plan(target, supply))

    def planned(self, target: Manifest, sources: Sequence[Manifest], supply: Supply) -> PlannedPull:
        """The answer to another question: this one where it is the same, else with what is known of equal sources."""
        if len(sources) != len(self.planner.sources) or any(map(is_not, sources, self.planner.sources)):
            return PlannedPull.of(target, sources, supply)
        # What is covered grows in place: an equal question may have another answer by now.
        if target is self.target and not supply.covered and supply == self.supply:
            return self
        return replace(self, target=target, supply=supply, plan=self.planner.plan(target, supply))


def check_servable(plan: Plan) -> None:
    """Check that everything that the sources do not hold is on disk.

    Raises:
        CoverageError: Naming each tensor that is nowhere.
    """
    if plan.nowhere:
        raise missing_tensors(plan.nowhere)


def missing_tensors(names: Sequence[str]) -> CoverageError:
    shown = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return CoverageError(
        f"{len(names)} tensors are held by no source that can be reached and are not on disk: {shown}",
        missing=list(names),
    )


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


class _Draft:
    """What has been found out for one tensor."""

    def __init__(self, way: Way, reason: str) -> None:
        self.way = way
        self.reason = reason
        self.units: list[Unit] = []
        self.disk: list[DiskPiece] = []
        self.disk_nbytes = 0
        self.nowhere: list[str] = []
        self.sources: set[int] = set()

    @property
    def nbytes(self) -> int:
        return self.disk_nbytes + sum(unit.nbytes for unit in self.units)


class _Planning:
    def __init__(self, target: Manifest, planner: Planner, supply: Supply) -> None:
        sources = planner.sources
        self._target = target
        self._planner = planner
        self._sources = sources
        self._supply = supply
        self._covered = supply.covered or IntervalSet()
        # Writing to a tensor that overlaps another one has to leave out what the other one writes.
        self._entangled = entangled(target)
        self._planned = IntervalSet()
        self._num_parts = 0
        self._is_complete = not any(index in supply.lost for index in range(len(sources)))

    def run(self) -> Plan:
        drafts = self._drafts()
        self._close_over_siblings(drafts)
        copies = self._share_out(drafts)
        return Plan(
            ways=tuple(self._ways(drafts)),
            copies=tuple(tuple(merged(found)) for found in copies),
            disk=tuple(piece for draft in drafts.values() for piece in draft.disk),
            nowhere=tuple(name for draft in drafts.values() for name in draft.nowhere),
        )

    def _ways(self, drafts: Mapping[str, _Draft]) -> Iterator[TensorWay]:
        owners: dict[Region, str] = {}
        if len(drafts) < len(self._target.tensors):
            # What is filled under another name has that one's way.
            owners = {self._target.flat_region(self._target.by_name[name]): name for name in drafts}
        for tensor in self._target.tensors:
            if tensor.name in drafts:
                yield _way_of(tensor.name, drafts[tensor.name])
            else:
                owner = owners[self._target.flat_region(tensor)]
                way = _way_of(owner, drafts[owner])
                yield replace(way, name=tensor.name, reason=f"tied to {owner!r}", nbytes=0, disk_nbytes=0)

    def _drafts(self) -> dict[str, _Draft]:
        """What is found out for each tensor; of those that share a box of memory only for the one had best."""
        groups: defaultdict[Region, list[TensorEntry]] = defaultdict(list)
        drafts: dict[str, _Draft] = {}
        later: list[TensorEntry] = []
        for tensor in self._target.tensors:
            if not tensor.nbytes:
                drafts[tensor.name] = self._draft(tensor)
            else:
                groups[self._target.flat_region(tensor)].append(tensor)
        for names in groups.values():
            if len(names) == 1 and names[0].name not in self._entangled:
                drafts[names[0].name] = self._draft(names[0])
            else:
                later.extend(names)
        owned: set[Region] = set()
        # Those that have a source come first, so that the disk is asked for nothing that a source can give.
        for tensor in sorted(later, key=self._cost):
            region = self._target.flat_region(tensor)
            if region not in owned:
                owned.add(region)
                drafts[tensor.name] = self._draft(tensor)
                self._planned.add_region(region)
        return drafts

    def _cost(self, tensor: TensorEntry) -> tuple[bool, int]:
        draft = self._draft(tensor)
        return bool(draft.nowhere), draft.disk_nbytes

    def _draft(self, tensor: TensorEntry) -> _Draft:
        if (found := self._from_the_same(tensor)) is not None:
            return found
        if not tensor.nbytes:
            return _Draft("disk", self._absent())
        if not tensor.is_placed or tensor.state == "final":
            draft = _Draft("disk", f"{self._absent()}, and it is not known which checkpoint elements lie in it")
            self._leave_to_disk(draft, tensor, None)
            return draft
        return self._from_placements(tensor)

    def _absent(self) -> str:
        return "no source holds it" if self._sources else "no source"

    def _from_the_same(self, tensor: TensorEntry) -> _Draft | None:
        """From sources that hold the same elements under the same name: as they lie there, if layouts agree."""
        alike, others = self._same(tensor, self._supply.lost)
        if not alike and not others:
            return None
        draft = _Draft("identical", "same layout")
        if not alike:
            draft = _Draft("reshard", "same elements, another layout: gathered by the source")
        region = self._target.flat_region(tensor)
        holders = [(index, self._sources[index].flat_region(held)) for index, held in alike or others]
        is_run = len(region.shape) == 1 and region.strides == (1,)
        if not is_run and region.is_dense and all(_line_up(region, there) for _, there in holders):
            # Equal strides without gaps: whatever the order is, it is the same on both sides, byte by byte.
            region, holders = _run_of(region), [(index, _run_of(there)) for index, there in holders]
        self._add_units(draft, tensor.name, region, tuple(holders))
        return draft

    def _same(self, tensor: TensorEntry, lost: Container[int] = ()) -> tuple[_Holdings, _Holdings]:
        """The sources that hold the same elements under the same name: in the same layout, and in others."""
        alike, others = _Holdings(), _Holdings()
        ours, sources = (self._target, tensor), self._sources
        for index, held in self._planner.by_shape.get((tensor.name, tensor.shape), ()):
            if index not in lost and holds_the_same(ours, (sources[index], held)):
                (alike if held.layout == tensor.layout else others).append((index, held))
        return alike, others

    def _from_placements(self, tensor: TensorEntry) -> _Draft:
        if tensor.name not in self._target.whole:
            check_placement(self._target, tensor)
        if not tensor.placement:
            return _Draft("constant", "holds one value")
        draft = _Draft("reshard", "")
        absent: dict[str, str] = {}
        for piece, portions in self._planner.placed.portions(self._target, tensor, self._shapes):
            if portions is None:
                absent.setdefault(piece.name, "its part of the tensor is no box")
                self._leave_to_disk(draft, tensor, piece)
                continue
            self._count_parts(len(portions))
            given = portions if self._is_complete else [self._live_part(portion) for portion in portions]
            if given and not any(portion.holders for portion in given):
                absent.setdefault(piece.name, self._why_absent(piece.name, tensor.dtype))
                # In one read, unless parts of it are there already.
                for part in given if self._covered else [None]:
                    self._leave_to_disk(draft, tensor, piece, part)
                continue
            for portion in given:
                if portion.holders:
                    self._add_units(draft, tensor.name, portion.target, portion.holders)
                else:
                    absent.setdefault(piece.name, "a part of it is held by no source")
                    self._leave_to_disk(draft, tensor, piece, portion)
        if missing_elements(tensor):
            draft.nowhere.append(tensor.name)
        draft.reason = _reason(tensor.name, absent, self._absent())
        if absent:
            draft.way = "disk"
        return draft

    def _count_parts(self, count: int) -> None:
        self._num_parts += count
        if self._num_parts > _MOST_PARTS:
            raise ManifestError(
                f"model {self._target.model!r} rank {self._target.rank}: its pieces are cut into more than "
                f"{_MOST_PARTS} parts, expected far fewer"
            )

    @cached_property
    def _shapes(self) -> Shapes:
        return shapes_of((self._target,))

    def _live_part(self, portion: Portion) -> Portion:
        return portion._replace(holders=tuple(held for held in portion.holders if held[0] not in self._supply.lost))

    def _why_absent(self, name: str, dtype: str) -> str:
        others = [other for other in self._planner.placed.dtypes_of(name) if other != dtype]
        return f"sources hold it as {', '.join(others)}, the shell is {dtype}" if others else self._absent()

    def _leave_to_disk(
        self, draft: _Draft, tensor: TensorEntry, piece: PlacedPiece | None, portion: Portion | None = None
    ) -> None:
        """Take down that a tensor, or a piece of it, or a part of a piece, has no source."""
        name, checkpoint, runtime = None, tensor.region, tensor.region
        if piece is not None:
            name, checkpoint, runtime = piece.name, piece.checkpoint, piece.runtime
            if portion is not None:
                checkpoint, runtime = portion.checkpoint, portion.runtime.shifted(piece.runtime_offset)
        flat = runtime.in_bytes(tensor.itemsize).shifted(self._target.storage_bases[tensor.storage])
        needed = sum(end - begin for begin, end in self._needed(flat, tensor.name))
        if not needed:
            return
        found = DiskPiece(tensor=tensor.name, name=name, checkpoint=checkpoint, runtime=runtime)
        draft.disk_nbytes += needed
        draft.disk.append(found)
        on_disk = self._supply.on_disk
        if name is None or (on_disk is not None and name not in on_disk):
            draft.nowhere.append(str(found))

    def _add_units(self, draft: _Draft, name: str, region: Region, holders: tuple[tuple[int, Region], ...]) -> None:
        for begin, end in self._needed(region, name):
            draft.units.append(Unit(name, region, begin, end, holders))

    def _needed(self, region: Region, name: str) -> list[tuple[int, int]]:
        """Positions in a flat region's row-major order, as intervals, that are neither covered nor planned."""
        numel = region.numel
        needed = [(0, numel)] if numel else []
        if not self._covered and name not in self._entangled:
            return needed
        for intervals in [self._covered, self._planned] if name in self._entangled else [self._covered]:
            needed = [gap for begin, end in needed for gap in missing_positions(region, begin, end, intervals)]
        return needed

    def _close_over_siblings(self, drafts: Mapping[str, _Draft]) -> None:
        """The tensors of one module are filled together or not at all: half of a fused layer is of no use."""
        broken: dict[str, str] = {}
        for name, draft in drafts.items():
            if draft.nowhere:
                broken.setdefault(_module(name), draft.nowhere[0])
        for name, draft in drafts.items() if broken else ():
            lacking = broken.get(_module(name))
            if lacking is not None and draft.units:
                draft.units.clear()
                draft.way = "disk"
                draft.reason = f"{lacking!r} of the same module is nowhere"

    def _share_out(self, drafts: Mapping[str, _Draft]) -> list[list[Copy]]:
        """Decide for each unit which of its holders sends it."""
        copies: list[list[Copy]] = [[] for _ in self._sources]
        given = [0] * len(self._sources)
        shared: defaultdict[Holders, list[Unit]] = defaultdict(list)
        for draft in drafts.values():
            for unit in draft.units:
                holders = unit.holders
                if len(holders) == 1:
                    index, source = holders[0]
                    given[index] += unit.end - unit.begin
                    draft.sources.add(index)
                    copies[index].extend(unit.copies(source))
                else:
                    shared[tuple([index for index, _ in holders])].append(unit)
        if not shared:
            return copies
        needed = {holders: sum(unit.nbytes for unit in units) for holders, units in shared.items()}
        shares = share_out(given, needed, lambda: self._shares(needed, given), first=self._target.rank)
        for numbers, units in shared.items():
            for unit, index in dealt(units, shares[numbers]):
                copies[index].extend(unit.copies(dict(unit.holders)[index]))
                drafts[unit.tensor].sources.add(index)
        return copies

    def _shares(self, needed: Mapping[Holders, int], given: Sequence[int]) -> Shares:
        """Parts of the sets of holders that are needed here, by what all ranks of the target need of the sources.

        Each rank may count the sources in another order, and has to find the same shares: they are found in the order
        that follows from the sources alone.
        """
        if self._supply.rates is not None:
            alone = {(number,): nbytes for number, nbytes in enumerate(given)}
            return even_shares(alone | dict(needed), self._supply.rates)
        order = self._planner.order
        place = {number: at for at, number in enumerate(order)}
        rates = [self._supply.capacities[n] or 1 if self._supply.capacities else 1 for n in order]
        wanted: defaultdict[Holders, float] = defaultdict(float)
        for holders, nbytes in self._demanded().items():
            wanted[tuple(sorted(place[n] for n in holders if n not in self._supply.lost))] += nbytes
        wanted.pop((), None)
        here = {tuple(sorted(place[n] for n in holders)): holders for holders in needed}
        # What is shared as it is, without a placement, is not among them.
        others = {places: float(needed[holders]) for places, holders in here.items() if places not in wanted}
        shares = even_shares(dict(sorted(wanted.items())), rates) | even_shares(others, rates)
        return {holders: {order[at]: part for at, part in shares[places].items()} for places, holders in here.items()}

    def _demanded(self) -> Mapping[Holders, float]:
        placed = self._planner.placed
        return Demand(self._target, placed.shapes, self._topologies_alike).nbytes(placed.held_kinds, self._sources)

    def _topologies_alike(self, tensor: TensorEntry) -> frozenset[Topology]:
        """Of the sources, lost ones too, that have a tensor of this rank just as it is: other ranks have theirs so."""
        alike, others = self._same(tensor)
        return frozenset(self._sources[index].topology for index, _ in alike or others)


def _way_of(name: str, draft: _Draft) -> TensorWay:
    return TensorWay(
        name=name,
        way=draft.way,
        reason=draft.reason,
        nbytes=draft.nbytes,
        disk_nbytes=draft.disk_nbytes,
        sources=tuple(sorted(draft.sources)),
    )


def _reason(name: str, absent: Mapping[str, str], nothing: str) -> str:
    if not absent:
        return "cut out of what the sources hold, by placement"
    first, why = next(iter(absent.items()))
    if why == nothing and (first == name or len(absent) == 1):
        return why if first == name else f"{why}: {first}"
    more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{first}: {why}{more}"


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _line_up(target: Region, source: Region) -> bool:
    if (target.shape, target.strides) == (source.shape, source.strides):
        return True
    return source.coalesced() == target.shifted(source.offset - target.offset).coalesced()


def _run_of(region: Region) -> Region:
    return run(region.offset, region.numel)
