"""Plans: executed on plain bytes they give exactly what was wanted, and what cannot be is refused whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.conftest import bits, filled
from weightwire.transfer.errors import CoverageError, ManifestMismatchError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import CheckpointSpec, Manifest
from weightwire.transfer.planning import (
    Plan,
    check_agreement,
    check_same_specs,
    check_servable,
    check_specs,
    entangled,
    filled_region,
    missing_tensors,
    plan_pull,
)
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells

POISON = 0xAB
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
    assert len(written) == len(set(written)) == sum(way.nbytes for way in plan.ways if way.source is not None)
    assert [way.name for way in plan.ways] == [tensor.name for tensor in target.manifest.tensors]
    for tensor, way in zip(target.manifest.tensors, plan.ways, strict=True):
        holder = next((index for index, manifest in enumerate(held) if way.name in manifest.by_name), None)
        if holder is not None:
            assert way.source == holder
            assert way.way == ("identical" if held[holder].by_name[way.name].layout == tensor.layout else "reshard")
        if way.source is not None:
            assert bits(target.tensor(way.name)) == content_of(way.name)
        elif way.nbytes:
            assert set(bits(target.tensor(way.name))) == {POISON}
            assert way.nbytes == tensor.nbytes
    regions = [target.manifest.flat_region(target.manifest.by_name[w.name]) for w in plan.ways if w.source is not None]
    assert set(written) == {address for region in regions for address in indices(region)}


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
    plan = plan_pull(manifest, [source.seal()], covered=covered)
    written = set(execute(plan, target, [source]))
    for tensor in manifest.tensors:
        region = manifest.flat_region(tensor)
        if tensor.name in source.manifest.by_name:
            assert bits(target.tensor(tensor.name)) == content_of(tensor.name)
        if region.is_contiguous:
            assert not any(covered.covers(address, address + 1) for address in written & set(indices(region)))


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
    runs = IntervalSet(span for tensor in manifest.tensors for span in filled_region(manifest.flat_region(tensor)))
    dense = all(manifest.flat_region(t).end - manifest.flat_region(t).offset == t.nbytes for t in manifest.tensors)
    if dense:
        assert [(copy.source, copy.target) for copy in copies] == [(copy.source, copy.source) for copy in copies]
        assert [(copy.source.offset, copy.source.end) for copy in copies] == list(runs)
    assert sum(copy.nbytes for copy in copies) == runs.total


def test_plan_prefers_the_first_source_that_holds_a_tensor() -> None:
    target = shells(a=[1], b=[2], c=[3])
    plan = plan_pull(target, [shells(b=[2]), shells(a=[1], b=[2])])
    assert [(way.name, way.way, way.source) for way in plan.ways] == [
        ("a", "identical", 1),
        ("b", "identical", 0),
        ("c", "disk", None),
    ]
    assert plan.disk == ("c",)
    assert (plan.nbytes("identical"), plan.nbytes("disk"), plan.source_bytes(0), plan.source_bytes(1)) == (8, 4, 4, 4)
    assert "no source holds it" in plan.ways[2].reason


def test_plan_of_no_source_is_all_from_disk() -> None:
    plan = plan_pull(shells(a=[1], b=[2]), [])
    assert plan.disk == ("a", "b")
    assert plan.copies == ()
    assert plan.ways[0].reason == "no source"


def test_plan_for_other_strides_says_why_the_source_gathers() -> None:
    held = Shells.from_tensors({"a": filled("int8", (3, 4)).T}).seal()
    (way,) = plan_pull(Shells.from_tensors({"a": filled("int8", (4, 3))}).manifest, [held]).ways
    assert (way.way, way.nbytes) == ("reshard", 12)
    assert "strides" in way.reason


def test_b08_empty_tensor_needs_nothing_from_anybody() -> None:
    empty = Shells.from_tensors({"g_idx": torch.empty(0, dtype=torch.int32)})
    plan = plan_pull(empty.manifest, [])
    assert plan.ways[0].nbytes == 0
    check_servable(plan, ())
    assert plan_pull(empty.manifest, [empty.seal()]).copies == ((),)


# Tied tensors


def shells(**values: list[int]) -> Manifest:
    """A sealed manifest of int32 tensors."""
    return Shells.from_tensors({name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}).seal()


def tied(*names: str, value: int = 1) -> Manifest:
    tensor = torch.full((2,), value, dtype=torch.int32)
    return Shells.from_tensors(dict.fromkeys(names, tensor)).manifest


@pytest.mark.parametrize("names", [("embed", "head"), ("head", "embed")], ids=["owner first", "owner last"])
def test_b16_tie_comes_once_under_the_name_that_the_source_has(names: tuple[str, str]) -> None:
    plan = plan_pull(tied(*names), [shells(embed=[1, 1])])
    assert {way.name: (way.way, way.nbytes) for way in plan.ways} == {
        "embed": ("identical", 8),
        "head": ("identical", 0),
    }
    assert plan.ways[names.index("head")].reason == "tied to 'embed'"
    check_servable(plan, ())


@pytest.mark.parametrize("names", [("embed", "head"), ("head", "embed")], ids=["owner first", "owner last"])
def test_b16_tie_is_servable_from_disk_under_either_name(names: tuple[str, str]) -> None:
    plan = plan_pull(tied(*names), [], on_disk={"embed"})
    assert plan.nbytes("disk") == 8
    check_servable(plan, {"embed"})
    with pytest.raises(CoverageError, match="'embed'"):
        check_servable(plan, {"head"})


def test_b16_tie_that_nobody_has_is_missing() -> None:
    with pytest.raises(CoverageError):
        check_servable(plan_pull(tied("embed", "head"), [shells(other=[1])]), {"other"})


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


# Disagreement


def entries(**tensors: tuple[str, tuple[int, ...]]) -> Manifest:
    return Shells.from_tensors(
        {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in tensors.items()}
    ).seal()


B38_TARGET = entries(a=("float32", (4,)), b=("float32", (2,)), c=("float32", (2,)))


def test_b38_matching_tensors_come_from_the_source_and_missing_ones_from_disk() -> None:
    plan = plan_pull(B38_TARGET, [entries(a=("float32", (4,)), d=("float32", (9,)))])
    assert [(way.name, way.way) for way in plan.ways] == [("a", "identical"), ("b", "disk"), ("c", "disk")]


def test_b38_conflicts_are_refused_with_all_of_them() -> None:
    sources = [
        entries(a=("float16", (4,)), b=("float32", (3,)), d=("float32", (1,))),
        entries(c=("int8", (2, 1))),
    ]
    with pytest.raises(ManifestMismatchError) as caught:
        plan_pull(B38_TARGET, sources)
    assert caught.value.facts["conflicts"] == [
        {"tensor": "a", "field": "dtype", "source": "float16", "target": "float32"},
        {"tensor": "b", "field": "shape", "source": "[3]", "target": "[2]"},
        {"tensor": "c", "field": "dtype", "source": "int8", "target": "float32"},
        {"tensor": "c", "field": "shape", "source": "[2, 1]", "target": "[2]"},
    ]
    assert "tensor 'a': dtype is float16 on the source, float32 on the target" in str(caught.value)


def test_b38_source_of_another_size_is_refused_in_words_that_stay_short() -> None:
    names = [f"layer.{number}" for number in range(100)]
    with pytest.raises(ManifestMismatchError, match=r"and 95 more") as caught:
        check_agreement(
            entries(**dict.fromkeys(names, ("int8", (2,)))), [entries(**dict.fromkeys(names, ("int8", (3,))))]
        )
    conflicts = caught.value.facts["conflicts"]
    assert isinstance(conflicts, list)
    assert len(conflicts) == 100
    assert len(str(caught.value)) < 1000


def test_shape_that_only_counts_alike_is_a_conflict() -> None:
    with pytest.raises(ManifestMismatchError, match="shape"):
        check_agreement(entries(a=("int8", (4, 2))), [entries(a=("int8", (2, 4)))])
    with pytest.raises(ManifestMismatchError, match="shape"):
        check_agreement(entries(a=("int8", ())), [entries(a=("int8", (1,)))])


def spec(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> CheckpointSpec:
    return CheckpointSpec(name=name, dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("check", "conflicts"),
    [
        pytest.param(
            lambda: check_specs(B38_TARGET, {"a": spec("a", "float16"), "x": spec("x")}),
            [("a", "dtype"), ("a", "shape")],
            id="disk and shells",
        ),
        pytest.param(
            lambda: check_same_specs([spec("a"), spec("b")], [spec("b", "int8"), spec("c")]),
            [("a", "name"), ("b", "dtype"), ("c", "name")],
            id="disk and the checkpoint of a source",
        ),
    ],
)
def test_specs_that_disagree_are_refused(check: Callable[[], None], conflicts: list[tuple[str, str]]) -> None:
    with pytest.raises(ManifestMismatchError) as caught:
        check()
    found = caught.value.facts["conflicts"]
    assert isinstance(found, list)
    assert [(c["tensor"], c["field"]) for c in found if isinstance(c, Mapping)] == conflicts


def test_specs_that_agree_pass() -> None:
    check_specs(B38_TARGET, {"b": spec("b"), "unknown": spec("unknown")})
    check_same_specs([spec("a"), spec("b")], [spec("b"), spec("a")])


def test_missing_tensors_are_all_in_the_facts_and_some_in_the_words() -> None:
    names = [f"t{number}" for number in range(25)]
    error = missing_tensors(names)
    assert error.facts["missing"] == names
    assert "25 tensors" in str(error)
    assert "'t19' and 5 more" in str(error)


def test_words_name_everything_as_long_as_it_is_little() -> None:
    assert str(missing_tensors([f"t{number}" for number in range(20)])).endswith("'t19'")
    names = [f"layer.{number}" for number in range(5)]
    with pytest.raises(ManifestMismatchError, match=r"'layer\.4': shape is \[3\] on the source, \[2\] on the target$"):
        check_agreement(
            entries(**dict.fromkeys(names, ("int8", (2,)))), [entries(**dict.fromkeys(names, ("int8", (3,))))]
        )


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(0, 5))
def test_filled_region_is_what_a_region_covers(shape: list[int], offset: int) -> None:
    region = Region(offset=offset, shape=tuple(shape), strides=tuple(5**n for n in range(len(shape))))
    spans = filled_region(region)
    assert sorted(i for span in spans for i in range(*span)) == sorted(indices(region))
    assert math.prod(shape) == sum(end - begin for begin, end in spans)


def test_plan_does_not_look_at_the_targets_digests() -> None:
    source = shells(a=[1], b=[2])
    blank = replace(source, chunk_digests=b"", tensors=tuple(replace(t, digest="") for t in source.tensors))
    assert plan_pull(source, [source]) == plan_pull(blank, [source])
