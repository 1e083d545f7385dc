from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.base_loaders import CutLoader, CutsAxis, WholeLoader
from weightwire.transfer.loading.expert_loaders import ExpertLoader
from weightwire.transfer.loading.fused_loaders import MergedLoader, QkvGeometry, QkvLoader
from weightwire.transfer.loading.scale_loaders import (
    BlockScaleLoader,
    ExpertInputScaleLoader,
    ExpertScaleLoader,
    PartScaleLoader,
    block_scale_shape,
    expert_block_scales,
    expert_channel_scales,
)
from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName, ShellLoader, SlotId
from weightwire.transfer.ranks import ALONE, ExpertPlacement, GroupRank

NAN = float("nan")
QKV = PartScaleLoader(parts=("q", "k", "v"))
TWO = ExpertPlacement.equal(2, 1)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, NAN)


def expert_loader(intermediate: int, width: int, tensor: GroupRank = ALONE) -> ExpertLoader:
    return ExpertLoader(
        matrix="w13", placement=TWO, expert=ALONE, tensor=tensor, intermediate=intermediate, width=width
    )


# L88
@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [
        pytest.param(256, 256, (2, 2), id="whole blocks"),
        pytest.param(576, 7168, (5, 56), id="the last block is partial"),
        pytest.param(1, 129, (1, 2), id="hardly begun"),
    ],
)
def test_block_scale_shape(rows: int, cols: int, expected: tuple[int, int]) -> None:
    assert block_scale_shape(rows, cols, (128, 128)) == expected


# L88
def test_scale_shells_have_the_shape_their_loader_expects() -> None:
    placement = ExpertPlacement.equal(4, 2)
    of_w13 = ExpertScaleLoader(matrix="w13", placement=placement, expert=GroupRank(0, 2))
    assert QKV.shell_shape == (3,)
    assert of_w13.shell_shape == (2, 2)
    assert replace(of_w13, gated=False).shell_shape == (2, 1)
    assert replace(of_w13, matrix="w2").shell_shape == (2,)
    assert replace(of_w13, matrix="w2", everywhere=True).shell_shape == (4,)
    inputs = ExpertInputScaleLoader(matrix="w13", placement=placement, expert=GroupRank(0, 2))
    assert inputs.shell_shape == (2,)


# L104
@pytest.mark.parametrize("order", ["qkv", "vqk"])
def test_each_part_has_its_own_scale_on_every_rank(order: str) -> None:
    shell = poisoned(3)
    for part in order:
        scale = torch.tensor({"q": 1.0, "k": 2.0, "v": 3.0}[part])
        assert QKV.load(shell, scale, part, name="qkv_proj.weight_scale") == (part,)
    assert shell.tolist() == [1, 2, 3]


# L104
def test_scales_of_gate_and_up_are_numbered() -> None:
    shell, loader = poisoned(2), PartScaleLoader(parts=(0, 1))
    loader.load(shell, torch.tensor([7.0]), 1, name="s")
    loader.load(shell, torch.tensor([[5.0]]), 0, name="s")
    assert shell.tolist() == [5, 7]


# L103, L104
def test_b09_scalar_scale_of_a_fused_tensor_fills_every_part() -> None:
    shell = poisoned(3)
    assert QKV.load(shell, torch.tensor(2.0), None, name="s") == ("q", "k", "v")
    assert shell.tolist() == [2, 2, 2]
    QKV.load(shell, torch.tensor([1.0, 2.0, 3.0]), None, name="s")
    assert shell.tolist() == [1, 2, 3]
    scale = torch.tensor(1.5)
    alone = torch.tensor(NAN)
    WholeLoader().load(alone, scale, None, name="k_scale")
    assert (alone.item(), alone.shape) == (1.5, ())
    with pytest.raises(PlacementError, match=r"Attempted to load weight \[\] into parameter \[2\]"):
        WholeLoader().load(torch.zeros(2), scale, None, name="s")


@pytest.mark.parametrize(
    ("slot", "shape", "message"),
    [
        pytest.param("q", (2,), r"weight \[2\] into parameter \[\]", id="two values for one part"),
        pytest.param(None, (2,), r"weight \[2\] into parameter \[3\]", id="two values for three parts"),
        pytest.param(0, (), "slot 0 is not one of its slots", id="slot of gate and up"),
    ],
)
def test_part_scales_refuse_before_they_write(slot: SlotId, shape: tuple[int, ...], message: str) -> None:
    shell = torch.zeros(3)
    with pytest.raises(PlacementError, match=message):
        QKV.load(shell, torch.ones(shape), slot, name="s")
    assert not shell.any()
    with pytest.raises(PlacementError, match="planned for the 3 parts"):
        QKV.load(torch.zeros(4), torch.ones(()), "q", name="s")


# L105
def test_block_scales_are_cut_in_units_of_blocks() -> None:
    loader = BlockScaleLoader(weight=CutLoader.column(GroupRank(3, 8), 2048), block=128, layer="mlp.down_proj")
    scales = torch.arange(16.0 * 56).view(16, 56)
    assert scales.shape == block_scale_shape(2048, 7168, (128, 128))
    shell = poisoned(2, 56)
    assert loader.load(shell, scales, None, name="s") == (None,)
    assert torch.equal(shell, scales[6:8])
    with pytest.raises(TopologyError, match=r"layer 'mlp\.down_proj': takes \[192, 256\) of 2048.* 192 lies inside"):
        BlockScaleLoader(weight=CutLoader.column(GroupRank(3, 32), 2048), block=128, layer="mlp.down_proj")


# L105
def test_block_scales_of_inputs_are_cut_along_columns() -> None:
    loader = BlockScaleLoader(weight=CutLoader.row(GroupRank(1, 2), 512), block=128, layer="o_proj")
    shell, scales = poisoned(3, 2), torch.arange(12.0).view(3, 4)
    loader.load(shell, scales, None, name="s")
    assert torch.equal(shell, scales[:, 2:4])


# L105
def test_block_scales_of_qkv_follow_heads_and_replicas() -> None:
    geometry = QkvGeometry(num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, group=GroupRank(2, 4))
    loader = BlockScaleLoader(weight=QkvLoader(geometry=geometry), block=128, layer="qkv_proj")
    shell = poisoned(4, 1)
    loader.load(shell, torch.arange(12.0).view(12, 1), None, name="s")
    assert shell.flatten().tolist() == [4, 5, 9, 11]
    assert loader.slots == ("q", "k", "v")


# L105, C7
def test_block_scales_of_padded_shells_end_in_zeros() -> None:
    weight = CutLoader.column(GroupRank(1, 2), 300, widths=(256, 256), pad=True)
    loader = BlockScaleLoader(weight=weight, block=128, layer="x")
    shell = poisoned(2, 1)
    loader.load(shell, torch.tensor([[1.0], [2.0], [3.0]]), None, name="s")
    assert shell.flatten().tolist() == [3, 0]


def whole_of(*sizes: int) -> MergedLoader:
    return MergedLoader(sizes=sizes, group=ALONE)


# L105
def test_b23_block_scales_never_overwrite_a_row_of_another_part() -> None:
    loader = BlockScaleLoader(weight=whole_of(256, 128), block=128, layer="x")
    shell = poisoned(3, 1)
    loader.load(shell, torch.zeros(2, 1), 0, name="s")
    loader.load(shell, torch.ones(1, 1), 1, name="s")
    assert shell.flatten().tolist() == [0, 0, 1]
    # Only what comes last may end inside a block.
    loader = BlockScaleLoader(weight=whole_of(384, 64), block=128, layer="x")
    assert [(cut.at, cut.width) for _, cut in loader.cuts.parts] == [(0, 3), (3, 1)]


# L105
@pytest.mark.parametrize(
    ("weight", "border"),
    [
        pytest.param(whole_of(192, 192), 192, id="192 and 192"),
        pytest.param(whole_of(64, 64, 64, 64), 64, id="four times 64"),
        pytest.param(whole_of(384, 64, 64), 64, id="384, 64 and 64"),
        pytest.param(CutLoader.column(GroupRank(0, 2), 258), 129, id="first half of 258"),
        pytest.param(CutLoader.column(GroupRank(1, 2), 258), 129, id="second half of 258"),
        pytest.param(
            MergedLoader(sizes=(256, 256), group=ALONE, real_sizes=(192, 192)), 192, id="unpadded parts in the file"
        ),
    ],
)
def test_b23_block_scales_with_borders_inside_a_block_are_refused(weight: CutsAxis, border: int) -> None:
    with pytest.raises(TopologyError, match=rf"layer 'layers\.3\.mlp': .*\b{border} lies inside a block.*\b128\b"):
        BlockScaleLoader(weight=weight, block=128, layer="layers.3.mlp")


# L114, L63
def test_expert_weight_scales_have_an_entry_for_each_matrix() -> None:
    w13 = ExpertScaleLoader(matrix="w13", placement=ExpertPlacement.equal(4, 2), expert=GroupRank(1, 2))
    shell = poisoned(2, 2)
    for expert in range(4):
        for part, value in (("w3", 10.0), ("w1", 0.0)):
            w13.load(shell, torch.tensor(expert + value), ExpertPart(expert, as_part(part)), name="s")
    assert shell.tolist() == [[2, 12], [3, 13]]
    w2, shell = replace(w13, matrix="w2"), poisoned(2)
    for expert in range(4):
        w2.load(shell, torch.tensor([float(expert)]), ExpertPart(expert, "w2"), name="s")
    assert shell.tolist() == [2, 3]


def as_part(name: str) -> ExpertPartName:
    parts: dict[str, ExpertPartName] = {"w1": "w1", "w2": "w2", "w3": "w3"}
    return parts[name]


# L108
def test_expert_scales_stay_in_logical_order_unless_the_method_says_otherwise() -> None:
    plain = ExpertScaleLoader(matrix="w13", placement=TWO, expert=ALONE)
    for loader, expected in ((plain, [1, 3]), (replace(plain, up_first=True), [3, 1])):
        shell = poisoned(2, 2)
        loader.load(shell, torch.tensor(1.0), ExpertPart(1, "w1"), name="s")
        loader.load(shell, torch.tensor(3.0), ExpertPart(1, "w3"), name="s")
        assert shell[1].tolist() == expected


# L103, L114
@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        pytest.param(torch.tensor([5.0, 6.0]), [[5, 5], [6, 6]], id="one for gate and up"),
        pytest.param(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1, 2], [3, 4]], id="one for each"),
    ],
)
def test_fused_expert_scales(tensor: torch.Tensor, expected: list[list[int]]) -> None:
    shell, loader = poisoned(2, 2), ExpertScaleLoader(matrix="w13", placement=TWO, expert=ALONE)
    assert loader.load(shell, tensor, None, name="s") == loader.slots
    assert shell.tolist() == expected


# L64
def test_expert_scales_reach_every_replica() -> None:
    placement = ExpertPlacement.from_map(2, [[0, 1, 0]])
    shell, loader = poisoned(3), ExpertScaleLoader(matrix="w2", placement=placement, expert=ALONE)
    both = (ExpertPart(0, "w2"), ExpertPart(2, "w2"))
    assert loader.load(shell, torch.tensor(4.0), ExpertPart(0, "w2"), name="s") == both
    assert shell[[0, 2]].tolist() == [4, 4]


# L63
@pytest.mark.parametrize("kind", [ExpertScaleLoader, ExpertInputScaleLoader], ids=["weight scale", "input scale"])
def test_global_scales_are_stored_by_global_number(
    kind: type[ExpertScaleLoader] | type[ExpertInputScaleLoader],
) -> None:
    loader = kind(matrix="w2", placement=ExpertPlacement.equal(8, 4), expert=GroupRank(2, 4), everywhere=True)
    shell = torch.zeros(8)
    assert loader.load(shell, torch.tensor(1.0), ExpertPart(3, "w2"), name="s") == (ExpertPart(3, "w2"),)
    assert shell.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert loader.slots == tuple(ExpertPart(expert, "w2") for expert in range(8))


@pytest.mark.parametrize(
    ("slot", "shape", "message"),
    [
        pytest.param(ExpertPart(0, "w1"), (2,), "Attempted to load weight", id="two values for one matrix"),
        pytest.param(ExpertPart(2, "w1"), (), "expert 2 is none of the model's 2", id="no such expert"),
        pytest.param(ExpertPart(0, "w2"), (), r"slot 0\.w2 is not one of", id="other matrix"),
        pytest.param(None, (2, 3), "expected one scale for each expert, or 2", id="three for gate and up"),
        pytest.param(None, (3,), "count 2 experts", id="three experts"),
    ],
)
def test_expert_scales_refuse_before_they_write(slot: SlotId, shape: tuple[int, ...], message: str) -> None:
    shell, loader = torch.zeros(2, 2), ExpertScaleLoader(matrix="w13", placement=TWO, expert=ALONE)
    with pytest.raises(PlacementError, match=message):
        loader.load(shell, torch.ones(shape), slot, name="s")
    assert not shell.any()


def loaded_inputs(first: tuple[str, float], second: tuple[str, float]) -> float:
    loader = ExpertInputScaleLoader(matrix="w13", placement=TWO, expert=ALONE)
    shell = poisoned(2)
    for part, value in (first, second):
        slot = ExpertPart(1, as_part(part))
        assert loader.load(shell, torch.tensor(value), slot, name="layers.4.experts.w13_input_scale") == (slot,)
    return shell[1].item()


# L114
def test_input_scales_of_gate_and_up_agree() -> None:
    assert loaded_inputs(("w1", 0.5), ("w3", 0.5)) == 0.5
    assert loaded_inputs(("w3", 0.5), ("w1", 0.5)) == 0.5


# L114
@pytest.mark.parametrize("other", [0.6, NAN], ids=["another value", "not a number"])
@pytest.mark.parametrize("order", [("w1", "w3"), ("w3", "w1")], ids=["gate first", "up first"])
def test_input_scales_that_disagree_name_expert_and_layer(order: tuple[str, str], other: float) -> None:
    with pytest.raises(PlacementError, match=r"expert 1 of layer 'layers\.4\.experts' has input scales w1 ") as caught:
        loaded_inputs((order[0], 0.5), (order[1], other))
    assert (caught.value.facts["expert"], caught.value.facts["layer"]) == (1, "layers.4.experts")


# L114
def test_input_scale_does_not_depend_on_the_order_of_arrival() -> None:
    near = 0.5 + 2**-18
    assert loaded_inputs(("w1", 0.5), ("w3", near)) == loaded_inputs(("w3", near), ("w1", 0.5)) == 0.5


# L114
def test_input_scales_can_be_loaded_again() -> None:
    loader, shell = ExpertInputScaleLoader(matrix="w13", placement=TWO, expert=ALONE), poisoned(2)
    for value, order in ((0.5, ("w1", "w3")), (0.75, ("w3", "w1"))):
        for part in order:
            loader.load(shell, torch.tensor(value), ExpertPart(0, as_part(part)), name="s")
        assert shell[0].item() == value


def test_input_scales_of_other_ranks_are_not_compared() -> None:
    placement = ExpertPlacement.equal(2, 2)
    loader = ExpertInputScaleLoader(matrix="w13", placement=placement, expert=GroupRank(1, 2))
    shell = poisoned(1)
    for part, value in (("w1", 0.5), ("w3", 0.6)):
        assert loader.load(shell, torch.tensor(value), ExpertPart(0, as_part(part)), name="s") == ()
    assert shell.isnan().all()


def test_fused_input_scales_are_one_for_each_expert() -> None:
    placement = ExpertPlacement.from_map(2, [[1, 0, 1]])
    loader = ExpertInputScaleLoader(matrix="w13", placement=placement, expert=ALONE)
    shell = poisoned(3)
    assert loader.load(shell, torch.tensor([1.0, 2.0]), None, name="s") == loader.slots
    assert shell.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("slot", "tensor", "message"),
    [
        pytest.param(ExpertPart(0, "w1"), torch.ones(2), "expected one value", id="two values"),
        pytest.param(ExpertPart(0, "w3"), torch.ones(()).half(), "dtype is float16", id="another dtype"),
        pytest.param(None, torch.ones(2, 2), "Attempted to load weight", id="two values for each expert"),
        pytest.param("q", torch.ones(()), "slot q is not one of", id="slot of another loader"),
    ],
)
def test_input_scales_refuse_before_they_write(slot: SlotId, tensor: torch.Tensor, message: str) -> None:
    shell = torch.zeros(2)
    with pytest.raises(PlacementError, match=message):
        ExpertInputScaleLoader(matrix="w13", placement=TWO, expert=ALONE).load(shell, tensor, slot, name="s")
    assert not shell.any()


# L114
def test_channel_scales_follow_w13_and_stay_whole_for_w2() -> None:
    weight = replace(expert_loader(4, 3, GroupRank(1, 2)), transposed=True)
    channels, shell = expert_channel_scales(weight), poisoned(2, 6, 1)
    for part in ("w1", "w3"):
        channels.load(shell, torch.arange(1.0, 5.0).view(4, 1), ExpertPart(0, as_part(part)), name="s")
    assert shell[0].flatten().tolist() == [3, 4, 0, 3, 4, 0]
    channels, shell = expert_channel_scales(weight.for_matrix("w2")), poisoned(2, 5, 1)
    channels.load(shell, torch.arange(5.0).view(5, 1), ExpertPart(0, "w2"), name="s")
    assert shell[0].flatten().tolist() == [0, 1, 2, 3, 4]


# L105, L114
def test_block_scales_of_experts_follow_the_cut_of_the_weight() -> None:
    weight = expert_loader(512, 256, GroupRank(1, 2))
    blocks, shell = expert_block_scales(weight, 128, layer="x"), poisoned(2, 4, 1)
    for part, first in (("w1", 0.0), ("w3", 10.0)):
        blocks.load(shell, torch.arange(first, first + 4).view(4, 1), ExpertPart(0, as_part(part)), name="s")
    assert shell[0].flatten().tolist() == [2, 3, 12, 13]
    blocks, shell = expert_block_scales(weight.for_matrix("w2"), 128, layer="x"), poisoned(2, 1, 2)
    blocks.load(shell, torch.arange(4.0).view(1, 4), ExpertPart(0, "w2"), name="s")
    assert shell[0].flatten().tolist() == [2, 3]


# L105, L110
@pytest.mark.parametrize(
    ("weight", "what"),
    [
        pytest.param(expert_loader(192, 128, GroupRank(0, 2)), "intermediate size of its experts is 192", id="size"),
        pytest.param(expert_loader(256, 192, GroupRank(0, 2)), "width of its experts is 192", id="width"),
        pytest.param(
            expert_loader(384, 256, GroupRank(0, 2)).for_matrix("w2"),
            "share of a rank of its experts is 192",
            id="share",
        ),
    ],
)
def test_block_scales_of_experts_with_borders_inside_a_block_are_refused(weight: ExpertLoader, what: str) -> None:
    with pytest.raises(TopologyError, match=rf"layer 'layers\.1': {what}.* expected a multiple of the block size 128"):
        expert_block_scales(weight, 128, layer="layers.1")


def test_block_scales_of_a_lone_down_matrix_may_end_inside_a_block() -> None:
    blocks = expert_block_scales(expert_loader(192, 192).for_matrix("w2"), 128, layer="x")
    assert blocks.shell_shape(3) == (2, 3, 2)


def test_scale_loaders_are_shell_loaders() -> None:
    loaders: list[ShellLoader] = [
        QKV,
        BlockScaleLoader(weight=whole_of(128), block=128, layer="x"),
        ExpertScaleLoader(matrix="w2", placement=TWO, expert=ALONE),
        ExpertInputScaleLoader(matrix="w2", placement=TWO, expert=ALONE),
    ]
    assert all(loader.slots for loader in loaders)
