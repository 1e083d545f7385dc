from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.base_loaders import CutLoader, WholeLoader, loader_of, write_exact
from weightwire.transfer.loading.casts import SAME_DTYPE, float_casts
from weightwire.transfer.loading.expert_loaders import ExpertLoader
from weightwire.transfer.loading.fused_loaders import MergedLoader, QkvGeometry, QkvLoader
from weightwire.transfer.loading.scale_loaders import (
    BlockScaleLoader,
    ExpertInputScaleLoader,
    ExpertScaleLoader,
    PartScaleLoader,
    expert_block_scales,
    expert_channel_scales,
)
from weightwire.transfer.loading.slots import (
    ExpertPart,
    ExpertPartName,
    ShellLoader,
    SlotId,
    attach_loader,
    is_traceable,
)
from weightwire.transfer.loading.vocabulary import VocabLoader
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.ranks import ALONE, ExpertPlacement, GroupRank
from weightwire.transfer.tracing import trace_placement

NAN = float("nan")
F4 = torch.float4_e2m1fn_x2


def load(loader: ShellLoader, shape: tuple[int, ...], tensor: torch.Tensor, slot: SlotId = None) -> torch.Tensor:
    """A poisoned shell, filled."""
    shell = torch.full(shape, NAN, dtype=tensor.dtype) if tensor.dtype.is_floating_point else tensor.new_zeros(shape)
    loader.load(shell, tensor, slot, name="w")
    return shell


# L91
def test_shell_carries_its_loader_or_uses_the_default_one() -> None:
    shell = torch.empty(2)
    assert loader_of(shell) == WholeLoader()
    loader = CutLoader.column(GroupRank(1, 2), 4)
    attach_loader(shell, loader)
    assert loader_of(shell) is loader


# L92, D04
@pytest.mark.parametrize(
    ("weight", "parameter"),
    [
        pytest.param((4,), (2,), id="a global tensor in a local shell"),
        pytest.param((1, 3), (2, 3), id="no broadcast along an axis"),
        pytest.param((), (3,), id="no broadcast of a scalar"),
        pytest.param((3,), (1, 3), id="no axis is added"),
        pytest.param((3, 1), (1, 3), id="no transpose"),
    ],
)
def test_default_loader_wants_equal_shapes(weight: tuple[int, ...], parameter: tuple[int, ...]) -> None:
    shell = torch.zeros(parameter)
    expected = f"tensor 'a.b': Attempted to load weight {list(weight)} into parameter {list(parameter)}"
    with pytest.raises(PlacementError) as caught:
        WholeLoader().load(shell, torch.ones(weight), None, name="a.b")
    assert str(caught.value).startswith(expected)
    assert caught.value.facts["diagnostic"] == "D04"
    assert caught.value.facts["tensor"] == "a.b"
    assert not shell.any()


# L92, D04
def test_misfit_names_axis_and_factor_of_a_missing_cut() -> None:
    with pytest.raises(PlacementError, match=r"\[8, 6\] into parameter \[8, 2\]: axis 1 is 3 times as large") as caught:
        WholeLoader().load(torch.zeros(8, 2), torch.ones(8, 6), None, name="w")
    assert (caught.value.facts["axis"], caught.value.facts["factor"]) == (1, 3)


# L93
@pytest.mark.parametrize("shape", [(1,), (1, 1), ()], ids=str)
def test_single_elements_fit_whatever_the_shape(shape: tuple[int, ...]) -> None:
    assert torch.equal(load(WholeLoader(), shape, torch.tensor(0.5)), torch.full(shape, 0.5))
    assert torch.equal(load(WholeLoader(), (), torch.full(shape, 0.5)), torch.tensor(0.5))


def test_write_exact_fills_a_view_only() -> None:
    shell = torch.zeros(4)
    write_exact(shell.narrow(0, 1, 2), torch.ones(2), name="w", casts=SAME_DTYPE)
    assert shell.tolist() == [0, 1, 1, 0]


def test_parameters_that_want_gradients_are_filled() -> None:
    shell = torch.nn.Parameter(torch.full((2,), NAN))
    CutLoader.column(GroupRank(1, 2), 4).load(shell, torch.arange(4.0), None, name="w")
    assert shell.tolist() == [2, 3]


def test_default_loader_has_no_parts() -> None:
    with pytest.raises(PlacementError, match="tensor 'w': slot q is not one of its slots"):
        WholeLoader().load(torch.zeros(2), torch.ones(2), "q", name="w")


# L95
def test_column_and_row_cut_different_axes() -> None:
    tensor = torch.arange(64.0).view(8, 8)
    column, row = CutLoader.column(GroupRank(1, 2), 8), CutLoader.row(GroupRank(1, 2), 8)
    assert torch.equal(load(column, (4, 8), tensor), tensor[4:8])
    assert torch.equal(load(row, (8, 4), tensor), tensor[:, 4:8])


# L95
def test_column_cuts_biases_too() -> None:
    assert load(CutLoader.column(GroupRank(1, 2), 8), (4,), torch.arange(8.0)).tolist() == [4, 5, 6, 7]


# L96
def test_rank_is_frozen_when_the_loader_is_built() -> None:
    loader = CutLoader.column(GroupRank(1, 2), 4)
    shell = torch.zeros(2)
    attach_loader(shell, loader)
    CutLoader.column(GroupRank(0, 2), 4)
    with pytest.raises(FrozenInstanceError):
        loader.group = GroupRank(0, 2)  # type: ignore[misc]
    loader_of(shell).load(shell, torch.arange(4.0), None, name="w")
    assert shell.tolist() == [2, 3]


# L97
def test_uneven_widths_are_offset_by_the_lower_ranks() -> None:
    widths = (3, 3, 2, 2)
    loaders = [CutLoader.column(GroupRank(rank, 4), 10, widths=widths) for rank in range(4)]
    assert [loader.offset for loader in loaders] == [0, 3, 6, 8]
    taken = [load(loader, (loader.width,), torch.arange(10.0)).tolist() for loader in loaders]
    assert taken == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


# L97
@pytest.mark.parametrize("widths", [(3, 3, 2), (3, 3, 3, 2), (2, 2, 2, 2)], ids=str)
def test_widths_have_to_make_up_the_axis(widths: tuple[int, ...]) -> None:
    with pytest.raises(TopologyError, match="do not make up its size 10"):
        CutLoader.column(GroupRank(0, 4), 10, widths=widths)


# L97
def test_shell_of_another_width_than_planned_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"into parameter \[3\]: axis 0 of the parameter was planned as 2"):
        CutLoader.column(GroupRank(1, 2), 4).load(torch.zeros(3), torch.ones(4), None, name="w")


# L98
def test_each_shell_has_the_group_it_was_given() -> None:
    tensor = torch.arange(32.0).view(16, 2)
    for rank in range(4):
        geometry = QkvGeometry(num_heads=4, num_kv_heads=2, head_dim=2, v_head_dim=2, group=ALONE)
        assert torch.equal(load(QkvLoader(geometry=geometry), (16, 2), tensor), tensor)
        mlp = CutLoader.column(GroupRank(rank, 4), 16)
        assert torch.equal(load(mlp, (4, 2), tensor), tensor[4 * rank : 4 * rank + 4])


# L99, C7
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 0]], id="the last one is padded"),
        pytest.param(6, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 0], [0, 0, 0], [0, 0, 0]], id="two are all padding"),
    ],
)
def test_padded_cut_zeroes_what_the_tensor_does_not_have(ranks: int, expected: list[list[int]]) -> None:
    found = []
    for rank in range(ranks):
        loader = CutLoader.column(GroupRank(rank, ranks), 10, widths=(3,) * ranks, pad=True)
        found.append(load(loader, (3,), torch.arange(10.0)).tolist())
    assert found == expected


# L99
def test_default_padded_width_is_the_least_that_holds_the_tensor() -> None:
    assert [CutLoader.column(GroupRank(0, ranks), 10, pad=True).width for ranks in (1, 2, 3, 4)] == [10, 5, 4, 3]


# L97, L99
def test_indivisible_size_without_padding_is_refused_when_building() -> None:
    with pytest.raises(TopologyError, match="axis 0: 10 over 4 ranks leaves 2"):
        CutLoader.column(GroupRank(0, 4), 10)
    with pytest.raises(TopologyError, match=r"takes \[8, 12\) of an axis of 10, and no padding is declared"):
        CutLoader(axis=0, group=GroupRank(2, 3), width=4, offset=8, size=10)


# L113
def test_presharded_tensors_are_not_cut_again() -> None:
    tensor = torch.arange(4.0).view(2, 2)
    for loader in (
        CutLoader.column(GroupRank(1, 2), 4, presharded=True),
        CutLoader.row(GroupRank(1, 2), 4, presharded=True),
    ):
        assert torch.equal(load(loader, (2, 2), tensor), tensor)
        with pytest.raises(PlacementError, match="is expected to be 2"):
            loader.load(torch.zeros(2, 2), torch.ones(4, 4), None, name="w")


@pytest.mark.parametrize(
    ("weight", "parameter"),
    [
        pytest.param((9, 2), (4, 2), id="another size on the cut axis"),
        pytest.param((8, 3), (4, 2), id="another size on the other axis"),
        pytest.param((8,), (4, 2), id="another number of axes"),
        pytest.param((), (), id="nothing to cut"),
    ],
)
def test_cut_loader_refuses_what_it_was_not_planned_for(weight: tuple[int, ...], parameter: tuple[int, ...]) -> None:
    shell = torch.zeros(parameter)
    with pytest.raises(PlacementError, match="Attempted to load weight"):
        CutLoader.column(GroupRank(1, 2), 8).load(shell, torch.ones(weight), None, name="w")
    assert not shell.any()


# L94
def test_cut_loader_checks_the_dtype_before_it_pads() -> None:
    shell = torch.ones(3)
    with pytest.raises(PlacementError, match="dtype is float16"):
        CutLoader.column(GroupRank(1, 2), 5, pad=True).load(shell, torch.ones(5).half(), None, name="w")
    assert shell.tolist() == [1, 1, 1]
    CutLoader.column(GroupRank(1, 2), 5, pad=True, casts=float_casts("float32")).load(
        shell, torch.ones(5).half(), None, name="w"
    )
    assert shell.tolist() == [1, 1, 0]


def test_b20_cut_loader_without_a_rank_is_an_error() -> None:
    with pytest.raises(TypeError, match="group"):
        CutLoader.column(size=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="group"):
        MergedLoader(sizes=(4, 4))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="group"):
        QkvGeometry(num_heads=8, num_kv_heads=2, head_dim=1, v_head_dim=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="group"):
        VocabLoader(vocab=4, padded=4)  # type: ignore[call-arg]


def test_b10_packed_values_are_cut_between_elements_only() -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(2, 4).view(F4)
    assert dtype_of(packed).logical_shape((2, 4)) == (2, 8)
    shell = torch.empty(2, 2, dtype=torch.uint8).view(F4)
    CutLoader.row(GroupRank(1, 2), 8, packing=2).load(shell, packed, None, name="w")
    assert shell.view(torch.uint8).tolist() == [[2, 3], [6, 7]]
    shell = torch.empty(1, 4, dtype=torch.uint8).view(F4)
    CutLoader.column(GroupRank(1, 2), 2).load(shell, packed, None, name="w")
    assert shell.view(torch.uint8).tolist() == [[4, 5, 6, 7]]
    for ranks, widths in ((8, None), (2, (3, 5))):
        with pytest.raises(TopologyError, match="lies inside a packed element"):
            CutLoader.row(GroupRank(1, ranks), 8, packing=2, widths=widths)


# L99, C7
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, F4, torch.int32], ids=str)
def test_padding_is_zero_bytes_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.full((3, 4), 17, dtype=torch.uint8).view(dtype)
    shell = torch.full((2, 4), 255, dtype=torch.uint8).view(dtype)
    CutLoader.column(GroupRank(1, 2), 3, pad=True).load(shell, tensor, None, name="w")
    assert shell.view(torch.uint8).tolist() == [[17] * 4, [0] * 4]


@st.composite
def dealt(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Widths of some ranks, and a size that they hold."""
    widths = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
    return widths, draw(st.integers(0, sum(widths)))


# L95, L97, L99, C4
@given(dealt(), st.sampled_from([0, 1]))
def test_slices_of_all_ranks_are_the_tensor_once(case: tuple[tuple[int, ...], int], axis: int) -> None:
    widths, size = case
    shape = (size, 3) if axis == 0 else (3, size)
    tensor = torch.arange(1.0, 1 + 3 * size).view(shape)
    shells = []
    for rank, width in enumerate(widths):
        cut = CutLoader.column if axis == 0 else CutLoader.row
        loader = cut(GroupRank(rank, len(widths)), size, widths=widths, pad=True)
        shells.append(load(loader, (width, 3) if axis == 0 else (3, width), tensor))
    joined = torch.cat(shells, axis)
    assert torch.equal(joined.narrow(axis, 0, size), tensor)
    assert not joined.narrow(axis, size, sum(widths) - size).any()


# C4
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_column_slices_are_the_tensor_once(ranks: int) -> None:
    shells = []
    for rank in range(ranks):
        loader = CutLoader.column(GroupRank(rank, ranks), 10, pad=True)
        shells.append(load(loader, (loader.width,), torch.arange(1.0, 11.0)))
    joined = torch.cat(shells)
    assert joined[joined != 0].tolist() == list(range(1, 11))


EXPERTS = ExpertPlacement.from_map(4, [[0, 1, 3], [2, 3, 0]])
GEOMETRY = QkvGeometry(num_heads=7, num_kv_heads=1, head_dim=2, v_head_dim=3, group=GroupRank(1, 2), pad_heads=True)
W13 = ExpertLoader(
    matrix="w13", placement=EXPERTS, expert=GroupRank(1, 2), tensor=GroupRank(1, 2), intermediate=6, width=4
)
MERGED = MergedLoader(sizes=(8, 8), group=GroupRank(1, 2))
INPUT_SCALES = ExpertInputScaleLoader(matrix="w13", placement=EXPERTS, expert=GroupRank(1, 2))


def of_experts(**shapes: tuple[int, ...]) -> list[tuple[SlotId, tuple[int, ...]]]:
    parts: dict[str, ExpertPartName] = {"w1": "w1", "w2": "w2", "w3": "w3"}
    return [(ExpertPart(expert, parts[part]), shape) for expert in range(4) for part, shape in shapes.items()]


# Each loader with the shape of its shell, and the tensors of a checkpoint that fill it.
SECTION_8: dict[str, tuple[ShellLoader, tuple[int, ...], list[tuple[SlotId, tuple[int, ...]]]]] = {
    "whole": (WholeLoader(), (2, 2), [(None, (2, 2))]),
    "scalar": (WholeLoader(), (1,), [(None, ())]),
    "column": (CutLoader.column(GroupRank(1, 2), 7, pad=True), (4, 2), [(None, (7, 2))]),
    "row": (CutLoader.row(GroupRank(1, 2), 8), (2, 4), [(None, (2, 8))]),
    "o_proj": (GEOMETRY.o_proj_loader(), (5, 12), [(None, (5, 21))]),
    "qkv": (QkvLoader(geometry=GEOMETRY), (13, 5), [("q", (14, 5)), ("k", (2, 5)), ("v", (3, 5))]),
    "qkv_fused": (QkvLoader(geometry=GEOMETRY), (13, 5), [(None, (19, 5))]),
    "gate_up": (MERGED, (8, 5), [(0, (8, 5)), (1, (8, 5))]),
    "gate_up_fused": (MERGED, (8, 5), [(None, (16, 5))]),
    "gate_up_padded": (MergedLoader.proportional((8, 8), 12, group=GroupRank(1, 2)), (8, 5), [(None, (12, 5))]),
    "vocab": (VocabLoader(vocab=5, padded=6, group=GroupRank(1, 2)), (3, 2), [(None, (5, 2))]),
    "w13": (W13, (3, 8, 2), of_experts(w1=(6, 2), w3=(6, 2))),
    "w13_fused": (W13, (3, 8, 2), [(None, (4, 12, 2))]),
    "w13_bias": (W13, (3, 8), of_experts(w1=(6,), w3=(6,))),
    "w13_turned": (replace(W13, transposed=True, up_first=True), (3, 2, 8), of_experts(w1=(6, 2), w3=(6, 2))),
    "w2": (W13.for_matrix("w2"), (3, 2, 4), of_experts(w2=(2, 6))),
    "w2_fused": (replace(W13.for_matrix("w2"), transposed=True), (3, 4, 2), [(None, (4, 2, 6))]),
    "w2_stride": (replace(W13.for_matrix("w2"), partition="stride"), (3, 2, 4), of_experts(w2=(2, 6))),
    "part_scales": (PartScaleLoader(parts=("q", "k", "v")), (3,), [("q", ()), ("k", (1,)), ("v", ())]),
    "part_scales_fused": (PartScaleLoader(parts=(0, 1)), (2,), [(None, ())]),
    "block_scales": (BlockScaleLoader(weight=MERGED, block=2, layer="mlp"), (4, 3), [(0, (4, 3)), (1, (4, 3))]),
    "expert_blocks": (expert_block_scales(replace(W13, intermediate=8), 2, layer="x"), (3, 4, 1), [(None, (4, 8, 1))]),
    "channel_scales": (expert_channel_scales(W13.for_matrix("w2")), (3, 5, 1), of_experts(w2=(5, 1))),
    "expert_scales": (
        ExpertScaleLoader(matrix="w13", placement=EXPERTS, expert=GroupRank(1, 2)),
        (3, 2),
        of_experts(w1=(), w3=()),
    ),
    "global_scales": (
        ExpertScaleLoader(matrix="w2", placement=EXPERTS, expert=GroupRank(1, 2), everywhere=True),
        (4,),
        of_experts(w2=()),
    ),
    "input_scales": (INPUT_SCALES, (3,), of_experts(w1=(), w3=())),
}


# L191
def test_loaders_of_all_shells_are_learnt_on_meta_tensors() -> None:
    shells = {name: torch.empty(shape, device="meta") for name, (_, shape, _) in SECTION_8.items()}
    tensors = [
        (f"{name}@{number}", slot, shape)
        for name, (_, _, pieces) in SECTION_8.items()
        for number, (slot, shape) in enumerate(pieces)
    ]
    slots = {label: slot for label, slot, _ in tensors}

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for label, tensor in weights:
            name = label.partition("@")[0]
            SECTION_8[name][0].load(shells[name], tensor, slots[label], name=name)

    specs = [CheckpointSpec(name=label, dtype="float32", shape=shape) for label, _, shape in tensors]
    trace = trace_placement(load_weights, shells, specs)
    assert (trace.opaque, trace.uncovered, trace.overwritten) == ({}, {}, {})


# L191
def test_only_the_loader_that_compares_values_is_not_traceable() -> None:
    assert [name for name, (loader, _, _) in SECTION_8.items() if not is_traceable(loader)] == ["input_scales"]


# L191
@pytest.mark.parametrize("name", SECTION_8)
def test_loader_on_meta_leaves_the_same_slots_filled(name: str) -> None:
    loader, shape, pieces = SECTION_8[name]
    for device in ("meta", "cpu"):
        shell = torch.full(shape, NAN, device=device)
        filled = [
            slot
            for given, size in pieces
            for slot in loader.load(shell, torch.ones(size, device=device), given, name=name)
        ]
        assert sorted(map(str, filled)) == sorted(map(str, loader.slots))
        assert shell.is_meta or not shell.isnan().any()
