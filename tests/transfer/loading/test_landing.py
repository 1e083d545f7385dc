"""What is looked at before it is left out."""

from __future__ import annotations

import pytest
import torch

from weightwire.transfer.loading.landing import is_all_zeros


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        pytest.param([0x00, 0x80, 0x08, 0x88], True, id="zeros of either sign"),
        pytest.param([0x00, 0x10], False, id="the smallest number in the high half"),
        pytest.param([0x00, 0x01], False, id="the smallest number in the low half"),
        pytest.param([], True, id="nothing"),
    ],
)
def test_packed_float4_numbers_are_compared_with_zero(bits: list[int], expected: bool) -> None:
    packed = torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert is_all_zeros(packed) is expected
