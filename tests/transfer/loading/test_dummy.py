"""Dummy values."""

from __future__ import annotations

import pytest
import torch

from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.loading.dummy import LIMIT, fill_dummy

FLOATS = [
    name
    for name, dtype in BY_NAME.items()
    if dtype.torch_dtype.is_floating_point and dtype.packing == 1 and name != "float8_e8m0fnu"
]


# L11
@pytest.mark.parametrize("dtype", FLOATS)
def test_two_ranks_with_as_many_elements_hold_equal_small_finite_values(dtype: str) -> None:
    kind = BY_NAME[dtype].torch_dtype
    one, other = torch.empty(12, dtype=kind), torch.empty(3, 4, dtype=kind)
    fill_dummy([torch.empty(5, dtype=kind), one])
    fill_dummy([other])
    assert one.view(torch.uint8).equal(other.view(-1).view(torch.uint8))
    assert one.float().abs().max().item() <= LIMIT
    assert one.float().isfinite().all()


# L11
def test_values_are_not_all_alike_and_depend_on_the_seed() -> None:
    one, other = torch.empty(100), torch.empty(100)
    fill_dummy([one])
    fill_dummy([other], seed=5)
    assert len(set(one.tolist())) > 50
    assert not one.equal(other)


@pytest.mark.parametrize("dtype", sorted(set(BY_NAME) - set(FLOATS)))
def test_what_is_no_float_number_gets_zero_bytes(dtype: str) -> None:
    shell = torch.full((2, 16), 255, dtype=torch.uint8).view(BY_NAME[dtype].torch_dtype)
    fill_dummy([shell])
    assert not shell.view(torch.uint8).any()
