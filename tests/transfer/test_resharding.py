"""Plans between random shardings of random tensors, executed byte by byte, against a list of what lies where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer.conftest import filled
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.plan import Plan
from weightwire.transfer.planning import Planner, Supply, plan_pull
from weightwire.transfer.regions import Region
from weightwire.transfer.resharding import PlacedSources
from weightwire.transfer.shells import Shells

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
POISON = 0xAB
KINDS = ("fused", "stacked", "packed", "repeated")
ANY_TENSOR = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions]


def region_of(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


# Checkpoints, and ranks that hold parts of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint of random values."""

    tensors: dict[str, torch.Tensor]

    @property
    def specs(self) -> tuple[CheckpointSpec, ...]:
        return tuple(
            CheckpointSpec(name=name, dtype="int16", shape=tuple(tensor.shape)) for name, tensor in self.tensors.items()
        )


@dataclass(kw_only=True)
class Rank:
    """Shells of one rank, filled, and the content of each of their bytes."""

    shells: Shells
    manifest: Manifest

    @property
    def memory(self) -> bytes:
        return b"".join(self.shells.views(0, self.manifest.total_bytes))


@dataclass(kw_only=True)
class Slots:
    """The placement of one shell as it is built: views of the shell, and what belongs there."""

    pieces: list[PlacedPiece] = field(default_factory=list)
    constants: list[PlacedConstant] = field(default_factory=list)

    def copy(self, slot: torch.Tensor, name: str, part: torch.Tensor) -> None:
        slot.copy_(part)
        if part.numel():
            self.pieces.append(PlacedPiece.of(name, checkpoint=region_of(part), runtime=region_of(slot)))

    def fill(self, slot: torch.Tensor, value: float) -> None:
        slot.fill_(value)
        if slot.numel():
            self.constants.append(PlacedConstant(runtime=region_of(slot), value=value))

    @property
    def placement(self) -> ShellPlacement:
        return ShellPlacement(pieces=tuple(self.pieces), constants=tuple(self.constants))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Tensors of a few shapes, so that some can be fused and some stacked."""
    shapes = draw(st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=2))
    names = [f"w{number}" for number in range(draw(st.integers(1, 5)))]
    return Model(
        tensors={name: filled("int16", draw(st.sampled_from(shapes)), seed=number) for number, name in enumerate(names)}
    )


def allocated(draw: st.DrawFn, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A shell of this shape: row-major, turned, with gaps, or within something larger."""
    kind = draw(st.sampled_from(["plain", "plain", "turned", "gapped", "inside"]))
    if kind == "turned":
        return torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape) - 1, -1, -1))
    if kind == "gapped":
        return torch.zeros((*shape, 2), dtype=dtype).select(-1, 1)
    if kind == "inside":
        return torch.zeros(math.prod(shape) + 24, dtype=dtype)[17 : 17 + math.prod(shape)].view(shape)
    return torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a group of tensors is cut and laid out in all ranks of an instance.

    Attributes:
        names: Of the tensors that one shell is made of.
        kind: `fused` (one after the other along the first axis), `stacked` (along a new axis), `packed` (flat), or
            `repeated` (one of them, broadcast along a new axis).
        axis: That is dealt to the ranks; None where each has all of it.
        bounds: Where it is cut, as parts of 12.
        order: Of the axes in the shell.
        padding: Rows of one value behind the others.
    """

    names: tuple[str, ...]
    kind: str
    axis: int | None
    bounds: tuple[int, ...]
    order: tuple[int, ...]
    padding: int

    def part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a tensor, with its axes in the order of the shell; a view."""
        if self.axis is not None and tensor.ndim:
            size = tensor.shape[self.axis]
            begin, end = (bound * size // 12 for bound in self.bounds[rank : rank + 2])
            tensor = tensor.narrow(self.axis, begin, end - begin)
        return tensor.permute(self.order)


@st.composite
def cuts(draw: st.DrawFn, model: Model, world: int) -> list[Cut]:
    """A way to cut every tensor, in groups of equal shapes."""
    by_shape = sorted(model.tensors, key=lambda name: (tuple(model.tensors[name].shape), name))
    found = []
    for shape, group in itertools.groupby(by_shape, key=lambda name: tuple(model.tensors[name].shape)):
        names = draw(st.permutations(list(group)))
        while names:
            count = draw(st.integers(1, len(names)))
            bounds = sorted(draw(st.lists(st.integers(0, 12), min_size=world - 1, max_size=world - 1)))
            found.append(
                Cut(
                    names=tuple(names[:count]),
                    kind=draw(st.sampled_from(KINDS[not shape : 4 if count == 1 else 3])),
                    axis=draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None,
                    bounds=(0, *bounds, 12),
                    order=tuple(draw(st.permutations(range(len(shape))))),
                    padding=draw(st.sampled_from([0, 0, 2])),
                )
            )
            names = names[count:]
    if draw(st.booleans()):
        # Held twice: what is tied in one engine is copied in another.
        found.append(replace(draw(st.sampled_from(found)), axis=None))
    return found


def shell_of(draw: st.DrawFn, model: Model, cut: Cut, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, Slots]:
    parts = {name: cut.part(model.tensors[name], rank) for name in cut.names}
    shape = next(iter(parts.values())).shape
    slots = Slots()
    if cut.kind == "repeated":
        (part,) = parts.values()
        shell = allocated(draw, (3 + cut.padding, *shape), dtype)
        at = 3
        slots.copy(shell[:at], cut.names[0], part.expand(at, *shape))
    elif cut.kind == "packed":
        shell = torch.zeros(sum(part.numel() for part in parts.values()) + cut.padding, dtype=dtype)
        at = 0
        for name, part in parts.items():
            slots.copy(shell[at : at + part.numel()].view(part.shape), name, part)
            at += part.numel()
    elif cut.kind == "stacked":
        shell = allocated(draw, (len(parts) + cut.padding, *shape), dtype)
        for at, (name, part) in enumerate(parts.items()):
            slots.copy(shell[at], name, part)
        at = len(parts)
    else:
        shell = allocated(draw, (len(parts) * shape[0] + cut.padding, *shape[1:]), dtype)
        for number, (name, part) in enumerate(parts.items()):
            slots.copy(shell.narrow(0, number * shape[0], shape[0]), name, part)
        at = len(parts) * shape[0]
    if cut.padding:
        slots.fill(shell[at:], draw(st.sampled_from([0.0, 7.0])))
    return shell, slots


@st.composite
def instances(draw: st.DrawFn, model: Model, *, whole: bool = False) -> list[Rank]:
    """All ranks of one topology, or, unless it has to be `whole`, some of them with some of their shells."""
    world = draw(st.integers(1, 4))
    # Another dtype goes by other names: one name with two dtypes is a disagreement.
    dtype, prefix = draw(
        st.sampled_from([(torch.int16, "m"), (torch.int16, "n"), (torch.int32, "x")][: 2 + (not whole)])
    )
    cut = draw(cuts(model, world))
    ranks = []
    for rank in range(world):
        tensors: dict[str, torch.Tensor] = {}
        placements: dict[str, ShellPlacement] = {}
        for number, one in enumerate(cut):
            if whole or draw(st.integers(0, 7)):
                name = f"{prefix}{number}.weight"
                shell, slots = shell_of(draw, model, one, rank, dtype)
                if not shell.numel():
                    continue
                tensors[name], placements[name] = shell, slots.placement
                if draw(st.integers(0, 5)) == 0:
                    tensors[f"tied{name}"], placements[f"tied{name}"] = shell, slots.placement
        identity = ModelIdentity(model="m", checkpoint=model.specs, topology=Topology(tp=world), rank=rank)
        shells = Shells.from_layout(Layout.of(tensors, identity, placements))
        ranks.append(Rank(shells=shells, manifest=shells.seal()))
    return ranks if whole else [rank for rank in ranks if draw(st.integers(0, 5))]


# What lies where, element by element


def places(manifest: Manifest, tensor: TensorEntry) -> Iterator[tuple[int, tuple[str, int]]]:
    """For each placed element, its first flat byte, and which element of the checkpoint it is."""
    base = manifest.storage_bases[tensor.storage]
    for piece in tensor.placement:
        for here, there in zip(indices(piece.runtime), indices(piece.checkpoint), strict=True):
            yield base + here * tensor.itemsize, (piece.name, there)


def held_by(sources: Sequence[Rank], dtype: str) -> set[tuple[str, int]]:
    return {
        element
        for source in sources
        for tensor in source.manifest.tensors
        if tensor.dtype == dtype
        for _, element in places(source.manifest, tensor)
    }


def span(addresses: Iterator[int] | set[int], itemsize: int) -> set[int]:
    return {address + byte for address in addresses for byte in range(itemsize)}


def placed_bytes(manifest: Manifest) -> set[int]:
    return {
        address + byte
        for tensor in manifest.tensors
        for address, _ in places(manifest, tensor)
        for byte in range(tensor.itemsize)
    }


def execute(plan: Plan, memory: bytearray, sources: Sequence[Rank]) -> list[int]:
    """Do what a plan says, byte by byte; returns every flat address that was written, in order."""
    written: list[int] = []
    for source, copies in zip(sources, plan.copies, strict=True):
        held = source.memory
        for copy in copies:
            assert copy.source.numel == copy.target.numel == copy.nbytes > 0
            for origin, address in zip(indices(copy.source), indices(copy.target), strict=True):
                memory[address] = held[origin]
                written.append(address)
    return written


def check_plan(
    plan: Plan, target: Rank, sources: Sequence[Rank], *, lost: frozenset[int] = frozenset(), covered: IntervalSet
) -> None:
    """Execute a plan over poison; `covered` bytes are right already, and must not be touched."""
    manifest, right = target.manifest, target.memory
    live = [source for number, source in enumerate(sources) if number not in lost]
    done = {address for begin, end in covered for address in range(begin, end)}
    memory = bytearray(right[at] if at in done else POISON ^ right[at] ^ 0xFF for at in range(len(right)))
    written = execute(plan, memory, sources)
    assert len(written) == len(set(written))
    assert not done & set(written)
    assert all(plan.copies[number] == () for number in lost)
    assert {at for at in written if memory[at] != right[at]} == set()
    given_by = [{at for copy in copies for at in indices(copy.target)} for copies in plan.copies]
    for way in plan.ways:
        if "tied" not in way.reason:
            own = set(indices(manifest.flat_region(manifest.by_name[way.name])))
            assert way.sources == tuple(number for number, found in enumerate(given_by) if found & own)

    given: set[int] = set()
    lacking: set[int] = set()
    for tensor in manifest.tensors:
        held = held_by(live, tensor.dtype)
        for address, element in places(manifest, tensor):
            (given if element in held else lacking).update(range(address, address + tensor.itemsize))
    # Copied whole, an identical shell brings its constants along.
    identical = {way.name for way in plan.ways if "layout" in way.reason}
    extra = {at for name in identical for at in indices(manifest.flat_region(manifest.by_name[name]))}
    assert given - done <= set(written) <= given | extra
    assert sum(way.nbytes - way.disk_nbytes for way in plan.ways) == len(written)
    check_disk(plan, manifest, lacking - done, may_be=lacking)


def check_disk(plan: Plan, manifest: Manifest, needed: set[int], *, may_be: set[int]) -> None:
    """The disk is asked for all that no source has, and for nothing else; each element where it belongs."""
    expected = {
        address: element for tensor in manifest.tensors for address, element in places(manifest, tensor)
    }  # fmt: skip
    asked: list[int] = []
    for piece in plan.disk:
        tensor = manifest.by_name[piece.tensor]
        base = manifest.storage_bases[tensor.storage]
        assert piece.name is not None
        for here, there in zip(indices(piece.runtime), indices(piece.checkpoint), strict=True):
            address = base + here * tensor.itemsize
            assert expected[address] == (piece.name, there)
            asked += range(address, address + tensor.itemsize)
    assert len(asked) == len(set(asked))
    assert needed <= set(asked) <= may_be
    assert sum(way.disk_nbytes for way in plan.ways) == len(needed)
    assert {way.name for way in plan.ways if way.disk_nbytes} == {piece.tensor for piece in plan.disk}


@ANY_TENSOR
@given(st.data())
def test_plan_between_any_shardings_writes_every_byte_that_a_source_has_once(data: st.DataObject) -> None:
    model = data.draw(models())
    sources = data.draw(instances(model)) + data.draw(st.just([]) | instances(model))
    on_disk = frozenset(data.draw(st.sets(st.sampled_from(list(model.tensors)))))
    manifests = [source.manifest for source in sources]
    planner = Planner(manifests)
    for target in data.draw(instances(model, whole=True)):
        plan = planner.plan(target.manifest, Supply(on_disk=model.tensors.keys()))
        check_plan(plan, target, sources, covered=IntervalSet())
        assert plan.nowhere == ()
        # The same plan, whichever planner makes it, and whatever is on disk.
        assert plan_pull(target.manifest, manifests, Supply(on_disk=model.tensors.keys())) == plan
        found = planner.plan(target.manifest, Supply(on_disk=on_disk))
        assert set(found.disk) == set(plan.disk)
        assert set(found.nowhere) == {str(piece) for piece in plan.disk if piece.name not in on_disk}


@ANY_TENSOR
@given(st.data())
def test_portions_are_the_piece_and_name_each_source_that_has_all_of_it_once(data: st.DataObject) -> None:
    model = data.draw(models())
    sources = data.draw(instances(model)) + data.draw(instances(model))
    placed = PlacedSources([source.manifest for source in sources])
    target = data.draw(st.sampled_from(data.draw(instances(model, whole=True))))
    right = target.memory
    for tensor in target.manifest.tensors:
        for piece, portions in placed.portions(target.manifest, tensor, {}):
            if portions is None:
                assert piece.name not in {spec.name for source in sources for spec in source.manifest.checkpoint}
                continue
            base = target.manifest.storage_bases[tensor.storage]
            at = [base + here * tensor.itemsize for here in indices(piece.runtime)]
            assert sorted(address for portion in portions for address in indices(portion.target)) == sorted(
                address + byte for address in at for byte in range(tensor.itemsize)
            )
            for portion in portions:
                assert len({number for number, _ in portion.holders}) == len(portion.holders)
                for number, region in portion.holders:
                    held = sources[number].memory
                    assert [held[i] for i in indices(region)] == [right[i] for i in indices(portion.target)]


@ANY_TENSOR
@given(st.data())
def test_instance_of_one_topology_fills_any_other_without_the_disk(data: st.DataObject) -> None:
    model = data.draw(models())
    sources = data.draw(instances(model, whole=True))
    for target in data.draw(instances(model, whole=True)):
        plan = plan_pull(target.manifest, [source.manifest for source in sources], Supply(on_disk=frozenset()))
        check_plan(plan, target, sources, covered=IntervalSet())
        assert (plan.disk, plan.nowhere) == ((), ())
        for tensor, way in zip(target.manifest.tensors, plan.ways, strict=True):
            known = tensor.placement or not tensor.nbytes
            assert way.way in (("identical", "reshard", "disk") if known else ("constant", "identical", "reshard"))


@ANY_TENSOR
@given(st.data())
def test_plan_after_a_part_was_done_and_sources_were_lost_is_exactly_the_rest(data: st.DataObject) -> None:
    model = data.draw(models())
    sources = data.draw(instances(model)) + data.draw(instances(model, whole=True))
    manifests = [source.manifest for source in sources]
    target = data.draw(st.sampled_from(data.draw(instances(model, whole=True))))
    first = plan_pull(target.manifest, manifests)
    covered = IntervalSet()
    for copies in first.copies:
        for copy in copies:
            # A strided region counts when all of it is there, a contiguous one from chunk to chunk.
            begin = data.draw(st.integers(0, copy.nbytes)) if copy.target.is_contiguous else 0
            if not copy.target.is_contiguous:
                for part in copy.target.packed(begin, data.draw(st.sampled_from([0, copy.nbytes]))):
                    covered.add_region(part)
            else:
                covered.add(copy.target.offset + begin, copy.target.offset + data.draw(st.integers(begin, copy.nbytes)))
    lost = frozenset(data.draw(st.sets(st.integers(0, len(sources) - 1))))
    plan = plan_pull(target.manifest, manifests, Supply(lost=lost, covered=covered))
    check_plan(plan, target, sources, lost=lost, covered=covered)


@ANY_TENSOR
@given(st.data())
def test_plan_over_any_bytes_that_are_there_already_is_exactly_the_rest(data: st.DataObject) -> None:
    """Strided regions of which every other byte is covered, too."""
    model = data.draw(models())
    sources = data.draw(instances(model, whole=True))
    target = data.draw(st.sampled_from(data.draw(instances(model, whole=True))))
    bound = st.integers(0, target.manifest.total_bytes)
    covered = IntervalSet(data.draw(st.lists(st.tuples(bound, bound), max_size=6)))
    for at in range(0, target.manifest.total_bytes, data.draw(st.sampled_from([2, 3, 5, 1000]))):
        covered.add(at, at + 1)
    plan = plan_pull(target.manifest, [source.manifest for source in sources], Supply(covered=covered))
    check_plan(plan, target, sources, covered=covered)
    assert plan.disk == ()
