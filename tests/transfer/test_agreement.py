"""Whether manifests speak of one model, and of one tensor alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.agreement import (
    check_agreement,
    check_placement,
    check_same_specs,
    check_specs,
    check_world,
    disagreement,
    holds_the_same,
    missing_elements,
)
from weightwire.transfer.coverage import count_coverage
from weightwire.transfer.errors import ManifestError, ManifestMismatchError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, place_whole
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.shells import Shells


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


def test_disk_has_to_be_the_checkpoint_that_a_shell_is_laid_out_for() -> None:
    """Half of `w` fills a shell whatever shape the rest has; the elements would be others."""
    target = rank_of(0, entry("half", 2, rows_of_w(0, 2)))
    check_specs(target, {"w": spec("w", shape=(4, 2)), "half": spec("half", shape=(9,))})
    for other, field in ((spec("w", shape=(2, 4)), "shape"), (spec("w", "int8", (4, 2)), "dtype")):
        with pytest.raises(ManifestMismatchError, match=rf"'w': {field} is .* in the checkpoint on disk"):
            check_specs(target, {"w": other})


def test_specs_that_agree_pass() -> None:
    check_specs(B38_TARGET, {"b": spec("b"), "unknown": spec("unknown")})
    check_same_specs([spec("a"), spec("b")], [spec("b"), spec("a")])


def test_words_name_everything_as_long_as_it_is_little() -> None:
    names = [f"layer.{number}" for number in range(5)]
    with pytest.raises(ManifestMismatchError, match=r"'layer\.4': shape is \[3\] on the source, \[2\] on the target$"):
        check_agreement(
            entries(**dict.fromkeys(names, ("int8", (2,)))), [entries(**dict.fromkeys(names, ("int8", (3,))))]
        )


# One model, one revision, all ranks


def rank_of(rank: int, *tensors: TensorEntry, tp: int = 2, **changes: object) -> Manifest:
    """A rank of a model whose checkpoint has `w` of 4 x 2 float32."""
    base = ModelIdentity(
        model="org/m",
        revision="r1",
        topology=Topology(tp=tp),
        rank=rank,
        checkpoint=(CheckpointSpec(name="w", dtype="float32", shape=(4, 2)),),
    ).manifest((32,), tensors)
    return replace(base, **changes)  # type: ignore[arg-type]


def entry(name: str = "w", rows: int = 2, *pieces: PlacedPiece, **changes: object) -> TensorEntry:
    base = TensorEntry(
        name=name, dtype="float32", shape=(rows, 2), strides=(2, 1), storage=0, offset=0, layout="l", placement=pieces
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def rows_of_w(begin: int, count: int, *, at: int = 0) -> PlacedPiece:
    """So many rows of `w`, in row `at` of a shell and following."""
    checkpoint = row_major((count, 2), offset=begin * 2)
    return PlacedPiece.of("w", checkpoint=checkpoint, runtime=row_major((count, 2), offset=at * 2))


HALVES = [entry("w", 2, rows_of_w(0, 2)), entry("w", 2, rows_of_w(2, 2))]
TARGET = rank_of(0, entry("w", 4, rows_of_w(0, 4)), tp=1)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        pytest.param("revision", "r2", "revision is 'r2' on the source, 'r1' on rank 0 of the target", id="revision"),
        pytest.param("model", "org/n", "model is 'org/n' on the source, 'org/m' on rank 0", id="model"),
    ],
)
def test_manifests_of_two_models_are_refused_with_rank_and_both_values(field: str, value: str, words: str) -> None:
    sources = [rank_of(0, HALVES[0]), replace(rank_of(1, HALVES[1]), **{field: value})]  # type: ignore[arg-type]
    with pytest.raises(ManifestMismatchError, match=words) as caught:
        plan_pull(TARGET, sources)
    assert (caught.value.facts["rank"], caught.value.facts["field"]) == (1, field)
    assert "rank 1" in str(caught.value)


def test_shells_that_have_no_name_yet_may_take_from_any_model() -> None:
    check_agreement(replace(TARGET, model="", revision=""), [rank_of(0, HALVES[0])])
    check_agreement(TARGET, [replace(rank_of(0, HALVES[0]), revision="")])


def test_all_ranks_of_one_instance_are_a_world_in_any_order() -> None:
    check_world([])
    check_world([rank_of(1, HALVES[1]), rank_of(0, HALVES[0])])


@pytest.mark.parametrize(
    ("ranks", "words", "rank"),
    [
        pytest.param([rank_of(0)], "rank 1: 0 manifests, expected one for each of the 2 ranks", 1, id="one is missing"),
        pytest.param([rank_of(0), rank_of(1), rank_of(1)], "rank 1: 2 manifests", 1, id="one is there twice"),
        pytest.param([rank_of(0), rank_of(1, tp=4)], "rank 1: topology is .*tp=4.*tp=2.* on rank 0", 1, id="topology"),
        pytest.param([rank_of(0), rank_of(1, revision="r2")], "rank 1: revision is 'r2'", 1, id="revision"),
    ],
)
def test_ranks_that_are_no_world_are_refused_by_rank(ranks: list[Manifest], words: str, rank: int) -> None:
    with pytest.raises(ManifestMismatchError, match=f"model 'org/m' {words}") as caught:
        check_world(ranks)
    assert caught.value.facts["rank"] == rank


# Placements


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(
            entry("w", 3, rows_of_w(0, 2), rows_of_w(2, 2, at=1)),
            "2 elements are placed more than once, expected each of its 6 once",
            id="two pieces in one place",
        ),
        pytest.param(
            entry("w", 2, rows_of_w(0, 2), rows_of_w(0, 2)), "4 elements are placed more than once", id="one twice"
        ),
        pytest.param(
            entry("w", 3, rows_of_w(0, 3), rows_of_w(1, 1, at=1)),
            "2 elements are placed more than once",
            id="one piece within another",
        ),
        pytest.param(
            entry("w", 2, rows_of_w(0, 2), constants=(PlacedConstant(runtime=row_major((1,), offset=3), value=0.0),)),
            "1 elements are placed more than once",
            id="a constant over a piece",
        ),
        pytest.param(
            entry("w", 2, rows_of_w(0, 3)), "2 elements are placed outside of it", id="behind it"
        ),
        pytest.param(
            entry("w", 1, rows_of_w(0, 2), offset=2), "2 elements are placed outside of it", id="before it"
        ),
        pytest.param(
            entry(
                "w", 2,
                PlacedPiece.of("w", checkpoint=row_major((2,)), runtime=Region(offset=0, shape=(2,), strides=(0,))),
            ),
            "1 elements are placed more than once",
            id="a piece over itself",
        ),
    ],
)  # fmt: skip
def test_placement_that_is_no_placement_is_refused_with_model_rank_and_tensor(
    side: str, bad: TensorEntry, words: str
) -> None:
    good = TARGET if side == "source" else rank_of(0, HALVES[0])
    wrong = rank_of(1, bad)
    with pytest.raises(ManifestError, match=f"model 'org/m' rank 1 tensor 'w': {words}") as caught:
        plan_pull(*((good, [wrong]) if side == "source" else (wrong, [good])))
    facts = caught.value.facts
    assert (facts["model"], facts["rank"], facts["tensor"]) == ("org/m", 1, "w")


def test_placement_outside_its_checkpoint_tensor_is_no_manifest() -> None:
    words = r"model 'org/m' rank 1 tensor 'x': its placement ends at element 10 of checkpoint tensor 'w', which has 8"
    with pytest.raises(ManifestError, match=words) as caught:
        rank_of(1, entry("x", 2, rows_of_w(3, 2)))
    assert (caught.value.facts["rank"], caught.value.facts["tensor"]) == (1, "x")


@pytest.mark.parametrize("who", ["two sources", "source and target"])
def test_checkpoint_tensor_of_two_shapes_is_refused_with_both_of_them(who: str) -> None:
    other = (CheckpointSpec(name="w", dtype="float32", shape=(2, 4)),)
    wrong = rank_of(1, HALVES[1], checkpoint=other)
    target, sources = (TARGET, [rank_of(0, HALVES[0]), wrong])
    if who == "source and target":
        target, sources = replace(TARGET, checkpoint=other), [rank_of(0, HALVES[0])]
        target = replace(target, tensors=(replace(target.tensors[0], name="x"),))
    with pytest.raises(ManifestError, match=r"tensor 'w': has shape \[4, 2\] .* model 'org/m', \[2, 4\]") as caught:
        plan_pull(target, sources)
    assert (caught.value.facts["tensor"], caught.value.facts["model"]) == ("w", "org/m")
    assert caught.value.facts["rank"] == (1 if who == "two sources" else 0)


@st.composite
def placements(draw: st.DrawFn) -> TensorEntry:
    """Pieces and constants anywhere in a shell of 6 x 4, or over its edges."""
    boxes = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), st.booleans())
    pieces, constants = list[PlacedPiece](), list[PlacedConstant]()
    for row, column, rows, columns, is_constant in draw(st.lists(boxes, max_size=5)):
        runtime = Region(offset=2 + row * 4 + column, shape=(rows, columns), strides=(4, 1))
        if is_constant:
            constants.append(PlacedConstant(runtime=runtime, value=0.0))
        else:
            pieces.append(PlacedPiece.of("w", checkpoint=row_major((rows, columns)), runtime=runtime))
    return TensorEntry(
        name="t", dtype="int8", shape=(6, 4), strides=draw(st.sampled_from([(4, 1), (1, 6)])), storage=0, offset=2,
        layout="l", placement=tuple(pieces), constants=tuple(constants),
    )  # fmt: skip


@given(placements())
def test_placement_is_refused_exactly_if_counting_says_so(tensor: TensorEntry) -> None:
    written = [*(piece.runtime for piece in tensor.placement), *(c.runtime for c in tensor.constants)]
    found = count_coverage(tensor.region, written)
    if found.repeated or found.outside:
        with pytest.raises(ManifestError, match="tensor 't'"):
            check_placement(rank_of(0), tensor)
        return
    check_placement(rank_of(0), tensor)
    assert missing_elements(tensor) == found.missing


# The same elements


def same(
    one: TensorEntry, other: TensorEntry, *, ranks: tuple[int, int] = (0, 0), tp: tuple[int, int] = (2, 2)
) -> bool:
    manifests = [rank_of(rank, tensor, tp=size) for rank, tensor, size in zip(ranks, (one, other), tp, strict=True)]
    return holds_the_same((manifests[0], one), (manifests[1], other))


def test_tensors_hold_the_same_if_their_placements_say_so_whatever_their_ranks() -> None:
    first, second = HALVES
    assert same(first, first)
    assert same(first, first, ranks=(0, 1))
    assert same(first, first, tp=(2, 4))
    assert not same(first, second)
    assert not same(first, replace(first, dtype="int32"))
    assert not same(first, replace(first, shape=(4, 1), strides=(1, 1)))
    assert not same(first, replace(first, placement=(rows_of_w(0, 1), rows_of_w(2, 1, at=1))))
    apart = replace(first, placement=(rows_of_w(0, 1), rows_of_w(2, 1, at=1)))
    assert same(apart, apart)
    assert not same(apart, replace(first, placement=(rows_of_w(0, 1, at=1), rows_of_w(2, 1))))


def test_tensors_hold_the_same_wherever_in_their_storages_they_lie() -> None:
    first = HALVES[0]
    shifted = replace(first, offset=2, placement=(rows_of_w(0, 2, at=1),))
    assert same(first, shifted)
    assert not same(first, replace(first, offset=2, placement=(rows_of_w(1, 2, at=1),)))
    zero = PlacedConstant(runtime=row_major((2,), offset=2), value=0.0)
    padded = replace(first, placement=(rows_of_w(0, 1),), constants=(zero,))
    assert same(padded, padded)
    assert not same(padded, replace(padded, constants=(replace(zero, value=1.0),)))
    assert not same(padded, replace(padded, constants=(replace(zero, value=-0.0),)))
    assert not same(padded, first)


def test_whole_tensors_hold_the_same_in_any_strides() -> None:
    whole = entry("w", 4, *place_whole("w", row_major((4, 2))))
    turned = Region(offset=0, shape=(4, 2), strides=(1, 4))
    other = replace(whole, strides=(1, 4), placement=place_whole("w", turned))
    assert same(whole, other, tp=(1, 1))
    assert not same(whole, replace(whole, placement=(rows_of_w(2, 2), rows_of_w(0, 2, at=2))))


def test_tensors_without_placements_hold_the_same_on_one_rank_of_one_topology() -> None:
    unknown = entry("cache", 2)
    assert same(unknown, unknown)
    assert not same(unknown, unknown, ranks=(0, 1))
    assert not same(unknown, unknown, tp=(1, 2))
    assert same(HALVES[0], entry("w", 2))


def test_tensors_after_post_processing_hold_the_same_in_one_layout_alone() -> None:
    final = replace(HALVES[0], state="final")
    assert same(final, final)
    assert not same(final, replace(final, layout="k"))
    assert not same(final, HALVES[0])
    assert not same(HALVES[0], final)


def test_tensor_of_another_state_contradicts_nobody() -> None:
    kernel = replace(entry("w", 4), state="final", shape=(8,), strides=(1,))
    check_agreement(TARGET, [rank_of(0, kernel, tp=1)])
    with pytest.raises(ManifestMismatchError, match=r"shape is \[8\] on the source, \[4, 2\] on the target"):
        check_agreement(TARGET, [rank_of(0, replace(kernel, state="placed"), tp=1)])


def test_disagreement_is_a_value_of_two_digests_where_both_mean_the_same() -> None:
    first, second = (replace(tensor, digest=f"{number:016x}") for number, tensor in enumerate(HALVES))
    one, other = rank_of(0, first), rank_of(1, second)
    assert disagreement(one, [other]) is None
    assert disagreement(one, [other, rank_of(0, replace(first, digest="f" * 16))]) == "w"
    assert disagreement(one, [rank_of(0, HALVES[0])]) is None
