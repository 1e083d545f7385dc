from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import TopologyError
from weightwire.transfer.loading.fused_loaders import MergedLoader
from weightwire.transfer.loading.padding import Cut, clipped, equal_share, in_elements, proportional_parts, round_up
from weightwire.transfer.ranks import ALONE, GroupRank

NAN = float("nan")


# L116
@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [
        pytest.param((6, 6), 8, (4, 4), id="two equal parts"),
        pytest.param((2, 36, 52), 45, (1, 18, 26), id="integers where floats would say 25"),
        pytest.param((6, 6), 12, (6, 6), id="nothing padded"),
        pytest.param((4, 4), 12, (4, 4), id="smaller than the tensor: unchanged"),
    ],
)
def test_proportional_parts(sizes: tuple[int, ...], rows: int, expected: tuple[int, ...]) -> None:
    assert proportional_parts(sizes, rows) == expected


# L116
@pytest.mark.parametrize(("sizes", "rows"), [((6, 6, 6), 16), ((66, 12, 12), 80)], ids=str)
def test_proportional_parts_refuse_fractions(sizes: tuple[int, ...], rows: int) -> None:
    with pytest.raises(TopologyError, match=f"{rows} rows do not split in these proportions"):
        proportional_parts(sizes, rows)


# L116, C7
def test_proportional_padding_follows_each_part() -> None:
    shell = torch.full((12,), NAN)
    MergedLoader.proportional((6, 6), 8, group=ALONE).load(shell, torch.arange(8.0), None, name="w")
    assert shell.tolist() == [0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0, 0]


# L116
def test_real_part_sizes_take_the_place_of_proportions() -> None:
    shell = torch.full((90,), NAN)
    loader = MergedLoader(sizes=(66, 12, 12), group=ALONE, real_sizes=(64, 8, 8))
    loader.load(shell, torch.arange(1.0, 81.0), None, name="w")
    assert shell[:64].tolist() == list(range(1, 65))
    assert shell[66:74].tolist() == list(range(65, 73))
    assert shell[78:86].tolist() == list(range(73, 81))
    assert shell.count_nonzero() == 80


# L116, C7
@pytest.mark.parametrize("slot", [None, 0, 1], ids=["fused", "first part", "second part"])
def test_proportional_padding_is_cut_by_rank(slot: int | None) -> None:
    tensor = torch.arange(1.0, 9.0)
    tensor = tensor if slot is None else tensor.chunk(2)[slot]
    shells = []
    for rank in range(2):
        shell = torch.full((6,), NAN)
        MergedLoader.proportional((6, 6), 8, group=GroupRank(rank, 2)).load(shell, tensor, slot, name="w")
        shells.append(shell.tolist() if slot is None else shell[slot * 3 : slot * 3 + 3].tolist())
    first, second = [[1, 2, 3], [4, 0, 0]], [[5, 6, 7], [8, 0, 0]]
    assert shells == ([[*first[0], *second[0]], [*first[1], *second[1]]] if slot is None else [first, second][slot])


@given(st.integers(0, 40), st.integers(0, 10), st.integers(0, 30))
def test_clipped_takes_what_the_tensor_has(offset: int, width: int, size: int) -> None:
    cut = clipped(offset, width, size=size)
    expected = [index for index in range(offset, offset + width) if index < size]
    assert list(range(cut.begin, cut.end)) == expected
    assert cut.width == width


def test_cut_stays_inside() -> None:
    with pytest.raises(ValueError, match="reaches outside"):
        Cut(width=2, begin=0, length=3, size=4)
    with pytest.raises(ValueError, match="reaches outside"):
        Cut(width=4, begin=3, length=2, size=4)


def test_shares_are_integers() -> None:
    assert equal_share(12, 4, of="rows") == 3
    with pytest.raises(TopologyError, match="rows: 10 over 4 ranks leaves 2"):
        equal_share(10, 4, of="rows")
    assert in_elements(8, 2, of="axis 1") == 4
    assert (round_up(9, 4), round_up(8, 4), round_up(0, 4)) == (12, 8, 0)
