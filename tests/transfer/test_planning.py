"""Plans: executed on plain bytes they give exactly what was wanted, and what cannot be is refused whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.conftest import bits, filled
from weightwire.transfer.errors import CoverageError, ManifestMismatchError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.manifest import CheckpointSpec, Manifest, Topology
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.plan import Plan
from weightwire.transfer.planning import (
    PlannedPull,
    Planner,
    Supply,
    check_servable,
    entangled,
    missing_tensors,
    plan_pull,
)
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.shells import Shells

POISON = 0xAB
NO_DISK = Supply(on_disk=frozenset())
NAMES = ("a", "b", "c", "d", "e")
SHAPES = {"a": (2, 3), "b": (4,), "c": (), "d": (0, 2), "e": (2, 2, 2)}
DTYPES = {"a": "int16", "b": "uint8", "c": "float32", "d": "int32", "e": "uint8"}
CONTENT = {name: filled(DTYPES[name], SHAPES[name], seed=number) for number, name in enumerate(NAMES)}


# Layouts of one content, in every order and with every kind of gap


def permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values, without gaps, in another order in memory."""
    moved = torch.empty([tensor.shape[axis] for axis in order], dtype=tensor.dtype)
    view = moved.permute([order.index(axis) for axis in range(tensor.ndim)])
    return view.copy_(tensor)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, each element with a neighbour that is not part of the tensor."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    return wide.select(-1, 0).copy_(tensor)


@st.composite
def layouts(draw: st.DrawFn, *, whole: bool = False) -> Shells:
    """Shells that hold some, or all, of the content."""
    tensors: dict[str, torch.Tensor] = {}
    for name in draw(st.permutations(NAMES)):
        tensor = CONTENT[name]
        kind = draw(st.sampled_from(["plain", "permuted", "gapped"] + ([] if whole else ["missing"])))
        if kind == "permuted":
            tensors[name] = permuted(tensor, draw(st.permutations(range(tensor.ndim))))
        elif kind != "missing":
            tensors[name] = gapped(tensor) if kind == "gapped" else tensor.clone()
    neighbours = [name for name in tensors if DTYPES[name] == "uint8" and tensors[name].is_contiguous()]
    if draw(st.booleans()) and len(neighbours) == 2:
        pool = torch.cat([tensors[name].flatten() for name in neighbours])
        parts = torch.split(pool, [tensors[name].numel() for name in neighbours])
        tensors |= {name: part.view(SHAPES[name]) for name, part in zip(neighbours, parts, strict=True)}
    for number, name in enumerate(draw(st.lists(st.sampled_from(NAMES), max_size=2))):
        if name in tensors:
            apart = not whole and draw(st.booleans())
            tensors[f"tied-{number}-{name}"] = tensors[name].clone() if apart else tensors[name]
    return Shells.from_tensors(tensors, chunk_bytes=4)


def content_of(name: str) -> bytes:
    return bits(CONTENT[name.rpartition("-")[2]])


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions]


def execute(plan: Plan, target: Shells, sources: list[Shells]) -> list[int]:
    """Do what a plan says, byte by byte; returns every flat address that was written, in order."""
    memory = bytearray(b"".join(target.views(0, target.manifest.total_bytes)))
    written: list[int] = []
    for source, copies in zip(sources, plan.copies, strict=True):
        held = b"".join(source.views(0, source.manifest.total_bytes))
        for copy in copies:
            assert copy.source.numel == copy.target.numel == copy.nbytes > 0
            for origin, address in zip(indices(copy.source), indices(copy.target), strict=True):
                memory[address] = held[origin]
                written.append(address)
    target.scatter(memoryview(memory), Region(offset=0, shape=(len(memory),), strides=(1,)), 0)
    return written


@settings(max_examples=200)
@given(layouts(whole=True), st.lists(layouts(), max_size=3))
def test_plan_executed_gives_each_tensor_of_any_source_and_writes_each_byte_once(
    target: Shells, sources: list[Shells]
) -> None:
    held = [source.seal() for source in sources]
    target.fill(POISON)
    plan = plan_pull(target.manifest, held)
    written = execute(plan, target, sources)
    assert len(written) == len(set(written)) == sum(way.nbytes - way.disk_nbytes for way in plan.ways)
    assert [way.name for way in plan.ways] == [tensor.name for tensor in target.manifest.tensors]
    for tensor, way in zip(target.manifest.tensors, plan.ways, strict=True):
        if "tied" not in way.reason:
            holders = {index: m.by_name[way.name] for index, m in enumerate(held) if way.name in m.by_name}
            best = {index for index, there in holders.items() if there.layout == tensor.layout} or set(holders)
            assert set(way.sources) <= best
            assert bool(way.sources) == bool(best and way.nbytes)
            if best:
                assert way.way == ("identical" if holders[min(best)].layout == tensor.layout else "reshard")
        if way.way != "disk":
            assert bits(target.tensor(way.name)) == content_of(way.name)
        elif tensor.nbytes:
            assert set(bits(target.tensor(way.name))) == {POISON}
            assert way.disk_nbytes == way.nbytes == (0 if "tied" in way.reason else tensor.nbytes)
    regions = [target.manifest.flat_region(target.manifest.by_name[w.name]) for w in plan.ways if w.way != "disk"]
    assert set(written) == {address for region in regions for address in indices(region)}
    assert {piece.tensor for piece in plan.disk} == {way.name for way in plan.ways if way.disk_nbytes}


@settings(max_examples=200)
@given(layouts(whole=True), layouts(), st.data())
def test_plan_leaves_what_is_covered_and_fetches_the_rest(target: Shells, source: Shells, data: st.DataObject) -> None:
    manifest, total = target.manifest, target.manifest.total_bytes
    bound = st.integers(0, total)
    covered = IntervalSet(data.draw(st.lists(st.tuples(bound, bound), max_size=3)))
    done = bytearray(b"".join(target.views(0, total)))
    for begin, end in covered.missing(0, total):
        done[begin:end] = bytes([POISON]) * (end - begin)
    if total:
        target.scatter(memoryview(done), Region(offset=0, shape=(total,), strides=(1,)), 0)
    plan = plan_pull(manifest, [source.seal()], Supply(covered=covered))
    written = set(execute(plan, target, [source]))
    for tensor in manifest.tensors:
        if tensor.name in source.manifest.by_name:
            assert bits(target.tensor(tensor.name)) == content_of(tensor.name)
    assert not any(covered.covers(address, address + 1) for address in written)


@given(layouts(whole=True), layouts())
def test_copies_come_in_the_order_of_the_source_and_none_continues_another(target: Shells, source: Shells) -> None:
    (copies,) = plan_pull(target.manifest, [source.seal()]).copies
    offsets = [copy.source.offset for copy in copies]
    assert offsets == sorted(offsets)
    for left, right in itertools.pairwise(copies):
        assert not (
            left.is_contiguous
            and right.is_contiguous
            and (left.source.end, left.target.end) == (right.source.offset, right.target.offset)
        )


@given(layouts(whole=True))
def test_plan_for_the_same_layout_is_as_few_copies_as_there_are_runs(target: Shells) -> None:
    manifest = target.seal()
    (copies,) = plan_pull(manifest, [manifest]).copies
    runs = IntervalSet()
    for tensor in manifest.tensors:
        runs.add_region(manifest.flat_region(tensor))
    dense = all(manifest.flat_region(t).end - manifest.flat_region(t).offset == t.nbytes for t in manifest.tensors)
    if dense:
        assert [(copy.source, copy.target) for copy in copies] == [(copy.source, copy.source) for copy in copies]
        assert [(copy.source.offset, copy.source.end) for copy in copies] == list(runs)
    assert sum(copy.nbytes for copy in copies) == runs.total


def test_plan_takes_from_whoever_has_least_to_give() -> None:
    target = shells(a=[1], b=[2], c=[3])
    plan = plan_pull(target, [shells(b=[2]), shells(a=[1], b=[2])], Supply(on_disk={"c"}))
    assert [(way.name, way.way, way.sources) for way in plan.ways] == [
        ("a", "identical", (1,)),
        ("b", "identical", (0,)),
        ("c", "disk", ()),
    ]
    assert [(piece.tensor, piece.name) for piece in plan.disk] == [("c", "c")]
    assert plan.nowhere == ()
    assert (plan.nbytes("identical"), plan.nbytes("disk"), plan.source_bytes(0), plan.source_bytes(1)) == (8, 4, 4, 4)
    assert "no source holds it" in plan.ways[2].reason


def test_plan_of_no_source_is_all_from_disk() -> None:
    target = shells(a=[1], b=[2])
    plan = plan_pull(target, [])
    assert list(map(str, plan.disk)) == ["a", "b"]
    assert plan.copies == ()
    assert plan.ways[0].reason == "no source"
    # Nobody has looked at the disk; once somebody has, it is known what is nowhere.
    assert plan.nowhere == ()
    assert plan_pull(target, [], Supply(on_disk={"b"})).nowhere == ("a",)


def test_plan_for_another_layout_says_why_the_source_gathers() -> None:
    held = Shells.from_tensors({"a": filled("int8", (3, 4)).T}).seal()
    (way,) = plan_pull(Shells.from_tensors({"a": filled("int8", (4, 3))}).manifest, [held]).ways
    assert (way.way, way.nbytes) == ("reshard", 12)
    assert way.reason == "same elements, another layout: gathered by the source"


def test_b08_empty_tensor_needs_nothing_from_anybody() -> None:
    empty = Shells.from_tensors({"g_idx": torch.empty(0, dtype=torch.int32)})
    plan = plan_pull(empty.manifest, [], NO_DISK)
    assert plan.ways[0].nbytes == 0
    check_servable(plan)
    assert plan_pull(empty.manifest, [empty.seal()], NO_DISK).copies == ((),)


# Tied tensors


def shells(**values: list[int]) -> Manifest:
    """A sealed manifest of int32 tensors."""
    return Shells.from_tensors({name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}).seal()


def tied(*names: str, value: int = 1) -> Manifest:
    tensor = torch.full((2,), value, dtype=torch.int32)
    return Shells.from_tensors(dict.fromkeys(names, tensor)).manifest


@pytest.mark.parametrize("names", [("embed", "head"), ("head", "embed")], ids=["owner first", "owner last"])
def test_b16_tie_comes_once_under_the_name_that_the_source_has(names: tuple[str, str]) -> None:
    plan = plan_pull(tied(*names), [shells(embed=[1, 1])], NO_DISK)
    assert {way.name: (way.way, way.nbytes) for way in plan.ways} == {
        "embed": ("identical", 8),
        "head": ("identical", 0),
    }
    assert plan.ways[names.index("head")].reason == "tied to 'embed'"
    check_servable(plan)


@pytest.mark.parametrize("names", [("embed", "head"), ("head", "embed")], ids=["owner first", "owner last"])
def test_b16_tie_is_servable_from_disk_under_either_name(names: tuple[str, str]) -> None:
    for name in names:
        plan = plan_pull(tied(*names), [], Supply(on_disk={name}))
        assert plan.nbytes("disk") == 8
        assert [piece.name for piece in plan.disk] == [name]
        check_servable(plan)


def test_b16_tie_that_nobody_has_is_missing() -> None:
    with pytest.raises(CoverageError):
        check_servable(plan_pull(tied("embed", "head"), [shells(other=[1])], Supply(on_disk={"other"})))


def test_b16_tie_that_the_source_keeps_apart_but_equal_comes_once() -> None:
    plan = plan_pull(tied("embed", "head"), [shells(embed=[1, 1], head=[1, 1])])
    assert plan.source_bytes(0) == 8


def test_b16_tie_that_differs_on_the_source_is_refused() -> None:
    with pytest.raises(ManifestMismatchError, match="'head'") as caught:
        plan_pull(tied("embed", "head"), [shells(embed=[1, 1], head=[5, 6])])
    assert caught.value.facts["conflicts"] == [
        {"tensor": "head", "field": "value", "source": "not that of 'embed'", "target": "tied to 'embed'"}
    ]


def test_tie_on_the_source_alone_is_read_twice() -> None:
    plan = plan_pull(shells(embed=[1, 1], head=[1, 1]), [tied("embed", "head")])
    assert plan.source_bytes(0) == 16


def test_tensors_that_share_some_bytes_are_entangled() -> None:
    pool = filled("int8", (10,))
    tensors = {
        "whole": pool[:6],
        "part": pool[4:8],
        "beyond": pool[8:],
        "tied": pool[8:],
        "apart": filled("int8", (4,)),
        "none": pool[5:5],
    }
    assert entangled(Shells.from_tensors(tensors).manifest) == {"whole", "part"}
    square = filled("int8", (2, 2))
    assert entangled(Shells.from_tensors({"a": square, "t": square.T}).manifest) == {"a", "t"}


def test_missing_tensors_are_all_in_the_facts_and_some_in_the_words() -> None:
    names = [f"t{number}" for number in range(25)]
    error = missing_tensors(names)
    assert error.facts["missing"] == names
    assert "25 tensors" in str(error)
    assert "'t19' and 5 more" in str(error)


def test_words_name_every_tensor_as_long_as_there_are_few() -> None:
    assert str(missing_tensors([f"t{number}" for number in range(20)])).endswith("'t19'")


def test_plan_does_not_look_at_the_targets_digests() -> None:
    source = shells(a=[1], b=[2])
    blank = replace(source, chunk_digests=b"", tensors=tuple(replace(t, digest="") for t in source.tensors))
    assert plan_pull(source, [source]) == plan_pull(blank, [source])


# Placements of ranks


def rank_of(
    rank: int, tensors: Mapping[str, torch.Tensor], tp: int = 2, /, **placements: Iterable[PlacedPiece | PlacedConstant]
) -> Manifest:
    """A rank's shells and what lies in them, by runtime name with `_` for `.`; shells of no placement are not known."""
    found = {
        name.replace("_", "."): ShellPlacement(
            pieces=tuple(item for item in placement if isinstance(item, PlacedPiece)),
            constants=tuple(item for item in placement if isinstance(item, PlacedConstant)),
        )
        for name, placement in ((name, list(items)) for name, items in placements.items())
    }
    identity = ModelIdentity(model="m", checkpoint=SPECS, topology=Topology(tp=tp), rank=rank)
    return Layout.of(tensors, identity, found).manifest


SPECS = tuple(
    CheckpointSpec(name=name, dtype="float32", shape=(rows, 4))
    for name, rows in {"q": 4, "k": 2, "v": 2, "o": 4}.items()
)


def rows(name: str, begin: int, count: int, *, at: int = 0) -> PlacedPiece:
    """Rows of a checkpoint tensor, from row `at` of a shell on."""
    there, here = row_major((count, 4), offset=begin * 4), row_major((count, 4), offset=at * 4)
    return PlacedPiece.of(name, checkpoint=there, runtime=here)


def padding(at: int, count: int) -> PlacedConstant:
    return PlacedConstant(runtime=row_major((count * 4,), offset=at * 4), value=0.0)


def shell(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, 4, dtype=dtype, device="meta")


# One rank that has all, fused, and behind it rows of padding.
FUSED = rank_of(
    0,
    {"attn.qkv": shell(10), "attn.o": shell(4)},
    1,
    attn_qkv=[rows("q", 0, 4), rows("k", 0, 2, at=4), rows("v", 0, 2, at=6), padding(8, 2)],
    attn_o=[rows("o", 0, 4)],
)


def half(rank: int, dtype: torch.dtype = torch.float32, *, state: str = "placed", v: bool = True) -> Manifest:
    """One of two ranks: half of each part."""
    pieces = [rows("q", rank * 2, 2), rows("k", rank, 1, at=2), rows("v", rank, 1, at=3)]
    manifest = rank_of(
        rank,
        {"attn.qkv": shell(4, dtype), "attn.o": shell(2, dtype)},
        attn_qkv=pieces[: 3 if v else 2],
        attn_o=[rows("o", rank * 2, 2)],
    )
    return replace(manifest, tensors=tuple(replace(tensor, state=state) for tensor in manifest.tensors))


def test_fused_shell_is_cut_out_of_the_halves_and_its_padding_comes_from_nobody() -> None:
    plan = plan_pull(FUSED, [half(0), half(1)], NO_DISK)
    assert [(way.name, way.way, way.nbytes, way.disk_nbytes, way.sources) for way in plan.ways] == [
        ("attn.qkv", "reshard", 8 * 16, 0, (0, 1)),
        ("attn.o", "reshard", 4 * 16, 0, (0, 1)),
    ]
    assert (plan.nbytes("reshard"), plan.disk, plan.nowhere) == (12 * 16, (), ())
    targets = [(copy.target.offset // 16, copy.target.end // 16) for copies in plan.copies for copy in copies]
    assert sorted(targets) == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (10, 12), (12, 14)]


def test_halves_are_cut_out_of_the_fused_shell() -> None:
    for rank in range(2):
        plan = plan_pull(half(rank), [FUSED], NO_DISK)
        assert [way.way for way in plan.ways] == ["reshard", "reshard"]
        assert [(copy.source.offset // 16, copy.source.numel // 16) for copy in plan.copies[0]] == [
            (rank * 2, 2), (4 + rank, 1), (6 + rank, 1), (10 + rank * 2, 2),
        ]  # fmt: skip


def test_shell_of_constants_alone_needs_nobody() -> None:
    target = rank_of(0, {"pad": shell(2)}, pad=[padding(0, 2)])
    plan = plan_pull(target, [half(0)], NO_DISK)
    assert [(way.way, way.nbytes, way.sources) for way in plan.ways] == [("constant", 0, ())]
    assert plan_pull(target, []).ways[0].way == "constant"


def test_slot_that_the_sources_lack_comes_from_disk_alone_of_its_shell() -> None:
    plan = plan_pull(FUSED, [half(0, v=False), half(1)], Supply(on_disk={"v"}))
    way = plan.ways[0]
    assert (way.way, way.nbytes, way.disk_nbytes, way.sources) == ("disk", 8 * 16, 16, (0, 1))
    assert way.reason == "v: a part of it is held by no source"
    assert [
        (str(piece), piece.checkpoint.offset, piece.runtime.offset, piece.runtime.numel) for piece in plan.disk
    ] == [("attn.qkv[v]", 0, 24, 4)]
    assert (plan.nbytes("disk"), plan.nbytes("reshard"), plan.nowhere) == (16, 4 * 16, ())


@pytest.mark.parametrize("on_disk", [frozenset[str](), frozenset({"q", "k", "o"})], ids=["no disk", "disk lacks it"])
def test_siblings_of_a_slot_that_is_nowhere_come_from_nobody(on_disk: frozenset[str]) -> None:
    """L181: half of a fused layer, or a weight without its bias, is of no use."""
    other = rank_of(0, {"mlp.o": shell(4)}, 1, mlp_o=[rows("o", 0, 4)])
    target = replace(
        FUSED,
        storages=(*FUSED.storages, *other.storages),
        tensors=(*FUSED.tensors, *(replace(tensor, storage=2) for tensor in other.tensors)),
    )
    plan = plan_pull(target, [half(0, v=False), half(1)], Supply(on_disk=on_disk))
    assert plan.nowhere == ("attn.qkv[v]",)
    assert [(way.way, way.sources, "attn.qkv[v]" in way.reason) for way in plan.ways] == [
        ("disk", (), True), ("disk", (), True), ("reshard", (0, 1), False),
    ]  # fmt: skip
    assert plan.nbytes("reshard") == sum(map(plan.source_bytes, range(2))) == 4 * 16
    with pytest.raises(CoverageError, match=r"attn\.qkv\[v\]"):
        check_servable(plan)


def test_element_that_nothing_is_placed_in_makes_its_shell_missing() -> None:
    target = rank_of(0, {"attn.qkv": shell(10)}, 1, attn_qkv=[rows("q", 0, 4), rows("k", 0, 2, at=4), padding(8, 2)])
    plan = plan_pull(target, [half(0), half(1)], Supply(on_disk={"q", "k", "v"}))
    assert plan.nowhere == ("attn.qkv",)
    assert sum(map(plan.source_bytes, range(2))) == 0


def test_elements_of_another_dtype_are_not_taken_and_the_reason_says_both() -> None:
    plan = plan_pull(FUSED, [half(0, torch.float16), half(1, torch.bfloat16)], Supply(on_disk=frozenset("qkvo")))
    assert plan.copies == ((), ())
    assert plan.ways[1].reason == "o: sources hold it as bfloat16, float16, the shell is float32"
    assert "sources hold it as bfloat16, float16, the shell is float32" in plan.ways[0].reason
    assert plan.nbytes("disk") == 12 * 16
    # What one of them has in the right dtype is taken.
    plan = plan_pull(FUSED, [half(0, torch.float16), half(1)], Supply(on_disk=frozenset("qkvo")))
    assert (plan.source_bytes(0), plan.source_bytes(1), plan.nbytes("disk")) == (0, 6 * 16, 6 * 16)


def test_bytes_after_post_processing_are_copied_as_they_are_or_not_at_all() -> None:
    final = half(0, state="final")
    assert [way.way for way in plan_pull(final, [final], NO_DISK).ways] == ["identical", "identical"]
    for target, sources in [(FUSED, [final, half(1, state="final")]), (half(0), [final])]:
        plan = plan_pull(target, sources, Supply(on_disk=frozenset("qkvo")))
        assert set(plan.copies) == {()}
        assert [way.way for way in plan.ways] == ["disk", "disk"]
    # Neither a source nor the disk has what is in a target after post-processing, unless it is there in this layout.
    other = replace(final, tensors=tuple(replace(tensor, layout="k") for tensor in final.tensors))
    for sources in ([half(0)], [other], [FUSED]):
        plan = plan_pull(final, sources, Supply(on_disk=frozenset("qkvo")))
        assert set(plan.copies) == {()}
        assert plan.nowhere == ("attn.qkv", "attn.o")


def test_views_of_one_allocation_are_written_once_under_whatever_name() -> None:
    """An engine names a fused parameter and its parts."""
    fused = shell(8)
    pieces = [rows("q", 0, 4), rows("k", 0, 2, at=4), rows("v", 0, 2, at=6)]
    views = {"attn.q": fused[:4], "attn.qkv": fused, "attn.kv": fused[4:], "attn.v": fused[6:]}
    target = rank_of(
        0, views, 1, attn_q=pieces[:1], attn_qkv=pieces, attn_kv=pieces[1:], attn_v=pieces[2:]
    )  # fmt: skip
    plan = plan_pull(target, [half(0), half(1)], NO_DISK)
    assert (plan.disk, plan.nowhere) == ((), ())
    written = sorted(address for copies in plan.copies for copy in copies for address in indices(copy.target))
    assert written == list(range(8 * 16))
    assert sum(way.nbytes for way in plan.ways) == 8 * 16


def test_tie_of_two_names_comes_by_the_placement_that_somebody_has() -> None:
    """The head is the embedding; the checkpoint of one side has only one of them."""
    memory = shell(4)
    names = {"embed": memory, "head": memory}
    target = rank_of(0, names, 1, embed=[rows("q", 0, 4)], head=[rows("o", 0, 4)])
    only_head = rank_of(0, {"x": shell(4)}, x=[rows("o", 0, 4)])
    plan = plan_pull(target, [only_head], NO_DISK)
    assert {way.name: (way.way, way.nbytes) for way in plan.ways} == {"embed": ("reshard", 0), "head": ("reshard", 64)}
    assert plan.nowhere == ()
    assert plan_pull(target, [], Supply(on_disk={"o"})).nowhere == ()
    assert plan_pull(target, [], Supply(on_disk={"k"})).nowhere in (("embed[q]",), ("head[o]",))


def test_lost_source_is_not_planned_for_and_what_only_it_had_is_nowhere() -> None:
    sources = [half(0), half(1)]
    plan = plan_pull(FUSED, sources, Supply(lost={0}, on_disk=frozenset()))
    assert plan.copies == ((), ())
    assert set(plan.nowhere) == {f"attn.qkv[{name}]" for name in "qkv"} | {"attn.o[o]"}
    spare = half(0)
    plan = plan_pull(FUSED, [*sources, spare], Supply(lost={0}, on_disk=frozenset()))
    assert [plan.source_bytes(number) for number in range(3)] == [0, 6 * 16, 6 * 16]


def test_disk_is_asked_for_what_was_not_there_when_the_last_source_was_lost_and_for_no_more() -> None:
    base = FUSED.storage_bases[1]
    covered = IntervalSet([(base, base + 2 * 16)])
    plan = plan_pull(FUSED, [half(0), half(1)], Supply(lost={0, 1}, on_disk=frozenset("qkvo"), covered=covered))
    (piece,) = (piece for piece in plan.disk if piece.tensor == "attn.o")
    assert (piece.checkpoint, piece.runtime.coalesced()) == (
        Region(offset=8, shape=(2, 4), strides=(4, 1)), row_major((8,), offset=8),
    )  # fmt: skip
    assert plan.ways[1].disk_nbytes == 2 * 16
    assert plan.ways[0].disk_nbytes == sum(p.runtime.numel for p in plan.disk if p.tensor == "attn.qkv") * 4 == 8 * 16


# Several targets


def test_question_that_was_answered_is_not_planned_again() -> None:
    sources = [half(0), half(1)]
    planned = PlannedPull.of(FUSED, sources, Supply(capacities=[1, 1], on_disk={"q"}))
    assert planned.plan == plan_pull(FUSED, sources, Supply(on_disk={"q"}))
    assert planned.planned(FUSED, list(sources), Supply(capacities=[1, 1], on_disk={"q"})) is planned


def test_coverage_that_has_grown_in_place_is_another_question() -> None:
    sources, covered = [half(0), half(1)], IntervalSet([(0, 16)])
    supply = Supply(on_disk=frozenset(), covered=covered)
    planned = PlannedPull.of(FUSED, sources, supply)
    covered.add(16, 64)
    again = planned.planned(FUSED, sources, supply)
    assert again.plan == plan_pull(FUSED, sources, supply) != planned.plan


def test_other_question_is_planned_with_what_is_known_of_the_same_sources() -> None:
    sources = [half(0), half(1)]
    planned = PlannedPull.of(FUSED, sources, NO_DISK)
    other = replace(FUSED, model=FUSED.model)
    for target, supply in [(FUSED, Supply(lost={0}, on_disk=frozenset())), (other, NO_DISK)]:
        again = planned.planned(target, sources, supply)
        assert again.planner is planned.planner
        assert again.plan == plan_pull(target, sources, supply)
    for changed in (sources[:1], sources[::-1], [*sources, half(1)]):
        again = planned.planned(FUSED, changed, NO_DISK)
        assert again.planner is not planned.planner
        assert again.plan == plan_pull(FUSED, changed, NO_DISK)


def test_planner_plans_several_targets_as_it_plans_each_of_them() -> None:
    source = Shells.from_tensors({"a": filled("int8", (3, 4)), "b": filled("int8", (5,))}).seal()
    targets = [
        Shells.from_tensors({"a": filled("int8", (4, 3)).T, "c": filled("int8", (2,))}).manifest,
        Shells.from_tensors({"b": filled("int8", (5,))}).manifest,
    ]
    plans = Planner([source]).plan_all(targets)
    assert plans == [plan_pull(target, [source]) for target in targets]
    assert [[way.way for way in plan.ways] for plan in plans] == [["reshard", "disk"], ["identical"]]


# By measured rates


@pytest.mark.parametrize(("rates", "part"), [([1.0, 1.0], 0.5), ([1.0, 0.25], 0.8), ([0.01, 1.0], 0.01)], ids=str)
def test_what_is_left_is_shared_out_by_the_rates_that_were_seen(rates: list[float], part: float) -> None:
    tensors = {f"t{number}": torch.empty(1000, dtype=torch.uint8) for number in range(100)}
    one = Shells.from_tensors(tensors).manifest
    other = Shells.from_tensors(tensors | {"more": torch.empty(1)}).manifest
    covered = IntervalSet([(0, 50_000)])
    plan = plan_pull(one, [one, other], Supply(rates=rates, covered=covered))
    assert plan.source_bytes(0) + plan.source_bytes(1) == 50_000
    assert plan.source_bytes(0) == pytest.approx(50_000 * part, abs=1000)
    again = plan_pull(one, [one, other], Supply(rates=rates, covered=covered))
    assert again == plan


def test_source_that_alone_has_much_is_asked_for_no_more_when_the_rates_say_so() -> None:
    tensors = {"shared": torch.empty(10_000, dtype=torch.uint8), "alone": torch.empty(10_000, dtype=torch.uint8)}
    both = Shells.from_tensors(tensors).manifest
    part = Shells.from_tensors({"shared": tensors["shared"]}).manifest
    plan = plan_pull(both, [both, part], Supply(rates=[1.0, 1.0]))
    assert (plan.source_bytes(0), plan.source_bytes(1)) == (10_000, 10_000)


def test_plan_is_made_anew_when_more_is_covered_although_the_question_looks_the_same() -> None:
    """The intervals that are covered are one object all through a transfer, and grow."""
    shells = Shells.from_tensors({"a": torch.empty(100, dtype=torch.uint8)})
    sources, covered = [shells.manifest], IntervalSet([(0, 10)])
    first = PlannedPull.of(shells.manifest, sources, Supply(covered=covered))
    covered.add(10, 100)
    again = first.planned(shells.manifest, sources, Supply(covered=covered))
    assert (first.plan.source_bytes(0), again.plan.source_bytes(0)) == (90, 0)
