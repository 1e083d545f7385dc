"""Quantised matrices back to numbers, against the definitions of their formats."""

from __future__ import annotations

import logging

import pytest
import torch

from weightwire.transfer.errors import FinishError, PlacementError
from weightwire.transfer.finishing.normal_forms import (
    FP8,
    as_fnuz,
    as_scales,
    awq,
    by_blocks,
    by_channel,
    exponents_to_scales,
    int8_by_channel,
    requantise,
)


# L145, D06
def test_exponents_are_no_numbers() -> None:
    stored = torch.tensor([126, 127, 128, 254, 1], dtype=torch.uint8)
    assert exponents_to_scales(stored).tolist() == [0.5, 1.0, 2.0, 2.0**127, 2.0**-126]
    assert exponents_to_scales(stored.view(torch.float8_e8m0fnu)).tolist() == [0.5, 1.0, 2.0, 2.0**127, 2.0**-126]
    assert as_scales(stored).equal(exponents_to_scales(stored))
    assert as_scales(stored).dtype == torch.float32


# L145
def test_edges_of_exponents() -> None:
    assert exponents_to_scales(torch.zeros(1, dtype=torch.uint8)).item() == 2.0**-127
    with pytest.raises(FinishError, match="255"):
        exponents_to_scales(torch.tensor([255], dtype=torch.uint8))


# L145
def test_second_load_gives_the_same_values_as_the_first() -> None:
    values, stored = torch.randn(4, 4).to(FP8), torch.tensor([[126, 130], [120, 127]], dtype=torch.uint8)
    first = by_blocks(values, stored, (2, 2))
    assert first.equal(by_blocks(values, stored, (2, 2)))
    assert first.equal(by_blocks(values, torch.tensor([[0.5, 8.0], [2.0**-7, 1.0]]), (2, 2)))
    assert stored.tolist() == [[126, 130], [120, 127]]


# L105, L128
def test_b24_block_is_the_configuration_s_and_not_inferred() -> None:
    # 576 rows and 5 scales: blocks of 128 with a partial one, not of 116.
    scales = torch.arange(1.0, 6.0).view(5, 1)
    found = by_blocks(torch.ones(576, 4).to(FP8), scales, (128, 4))[:, 0]
    assert found[[115, 127, 128, 511, 512]].tolist() == [1, 1, 2, 4, 5]
    with pytest.raises(PlacementError, match=r"expected \[8, 1\]"):
        by_blocks(torch.ones(1000, 4).to(FP8), torch.ones(7, 1), (128, 4))


# L144
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_channel_scales_are_those_of_rows(shape: tuple[int, ...]) -> None:
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(shape)
    for found in (
        by_channel(torch.ones(4, 4).to(FP8), scales),
        int8_by_channel(torch.ones(4, 4).to(torch.int8), scales),
    ):
        assert found[1].tolist() == [2.0] * 4
        assert found[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


# L144
def test_channel_scales_of_another_axis_are_refused() -> None:
    with pytest.raises(FinishError, match=r"are \[1, 4\], expected \[4\]"):
        by_channel(torch.ones(4, 4).to(FP8), torch.ones(1, 4))


# L143
@pytest.mark.parametrize(
    ("smaller", "lowest", "highest"), [(1e2, 0.030, 0.042), (1e5, 0.50, 0.64)], ids=["100 x", "100,000 x"]
)
def test_one_scale_loses_what_small_blocks_had(
    smaller: float, lowest: float, highest: float, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(256, 256, generator=generator)
    wide[:128, :128] /= smaller
    blocks = torch.stack([part.abs().max() for half in wide.chunk(2) for part in half.chunk(2, dim=1)]).view(2, 2) / 448
    values = (wide / blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(FP8)

    def error(found: torch.Tensor) -> float:
        part, true = found[:128, :128], wide[:128, :128]
        return float((part - true).norm() / true.norm())

    exact = by_blocks(values, blocks, (128, 128))
    assert 0.02 < error(exact) < 0.03
    with caplog.at_level(logging.INFO):
        one = requantise(exact, name="kv_b_proj")
    assert lowest < error(one.values.float() * one.scale) < highest
    assert "kv_b_proj" in caplog.text
    assert one.scale.shape == ()


# L143
def test_matrix_of_zeros_has_a_scale_too() -> None:
    found = requantise(torch.zeros(2, 2), name="x")
    assert found.scale.item() == 1
    assert not found.values.float().any()


# L146
def test_fnuz_has_no_negative_zero_and_half_the_value() -> None:
    values = torch.tensor([1.0, -0.0, 448.0, -2.0]).to(FP8)
    found, (scale,) = as_fnuz(values, [torch.tensor(1.0)])
    assert found.float().tolist() == [0.5, 0.0, 224.0, -1.0]
    assert (found.float() * scale).tolist() == [1.0, 0.0, 448.0, -2.0]
    assert scale.item() == 2
    # The parameter is as it was.
    assert values.view(torch.uint8).tolist() == [0x38, 0x80, 0x7E, 0xC0]


def packed(columns: torch.Tensor) -> torch.Tensor:
    """AWQ's words: nibble 0, 1, 2, ... is column 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    words = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= columns[:, column::8].to(torch.int64) << (4 * nibble)
    return words.to(torch.int32) if int(words.max()) < 1 << 31 else (words - ((words >> 31) << 32)).to(torch.int32)


# L141
def test_awq_is_value_less_zero_times_scale_transposed() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(16, (6, 16), generator=generator)
    zeros = torch.randint(16, (2, 16), generator=generator)
    scales = torch.rand(2, 16, generator=generator).half()
    found = awq(packed(values), scales, packed(zeros))
    assert found.shape == (16, 6)
    for output in range(16):
        for number in range(6):
            group = number // 3
            expected = scales[group, output] * (values[number, output] - zeros[group, output]).half()
            assert found[output, number] == expected


def test_awq_of_parts_that_do_not_go_together_is_refused() -> None:
    with pytest.raises(FinishError, match="do not go together"):
        awq(torch.zeros(6, 2, dtype=torch.int32), torch.ones(2, 8), torch.zeros(2, 2, dtype=torch.int32))
