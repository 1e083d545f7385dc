"""Facts that tell layouts of one shape apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightwire.transfer.loading.base_loaders import CutLoader, WholeLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, float_casts
from weightwire.transfer.loading.expert_loaders import ExpertLoader
from weightwire.transfer.loading.layout_facts import layout_facts
from weightwire.transfer.loading.scale_loaders import ExpertInputScaleLoader
from weightwire.transfer.loading.slots import ExpertPart, ShellLoader
from weightwire.transfer.ranks import ExpertPlacement, GroupRank

EXPERTS = ExpertLoader(
    matrix="w13",
    placement=ExpertPlacement.equal(4, 2),
    expert=GroupRank(0, 2),
    tensor=GroupRank(0, 2),
    intermediate=6,
    width=4,
)


# L108, L183
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(EXPERTS, up_first=True), id="w13 order"),
        pytest.param(replace(EXPERTS, partition="stride"), id="partition rule"),
        pytest.param(replace(EXPERTS, expert=GroupRank(1, 2)), id="expert rank"),
        pytest.param(replace(EXPERTS, placement=ExpertPlacement.from_map(4, [[1, 0], [2, 3]])), id="placement map"),
        pytest.param(replace(EXPERTS, transposed=True), id="transposition"),
    ],
)
def test_layouts_of_one_shape_differ_in_their_facts(other: ShellLoader) -> None:
    assert layout_facts(EXPERTS) != layout_facts(other)


def test_ranks_and_axes_are_facts_and_accepted_dtypes_are_none() -> None:
    cut = CutLoader.column(GroupRank(0, 2), 8)
    assert layout_facts(cut) != layout_facts(CutLoader.column(GroupRank(1, 2), 8))
    assert layout_facts(cut) != layout_facts(CutLoader.row(GroupRank(0, 2), 8))
    assert layout_facts(WholeLoader(casts=SAME_DTYPE)) == layout_facts(WholeLoader(casts=float_casts("bfloat16")))


def test_what_a_load_has_left_behind_is_no_fact() -> None:
    scales = ExpertInputScaleLoader(matrix="w13", placement=ExpertPlacement.equal(2, 1), expert=GroupRank(0, 1))
    before = layout_facts(scales)
    scales.load(torch.zeros(2), torch.tensor(0.5), ExpertPart(0, "w1"), name="w13_input_scale")
    assert layout_facts(scales) == before
