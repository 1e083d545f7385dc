"""Results into memory that is known to others."""

from __future__ import annotations

import pytest
import torch

from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.binding import bind_or_assign


# L147, C10
def test_target_keeps_its_address_and_strides() -> None:
    target = torch.zeros(2, 4, 3).transpose(1, 2)
    source, before = torch.randn(2, 3, 4), (target.data_ptr(), target.stride())
    assert bind_or_assign(target, source, name="w_kc") is target
    assert (target.data_ptr(), target.stride()) == before == (target.data_ptr(), (12, 1, 3))
    assert target.equal(source)


# L147
def test_without_a_target_the_source_takes_its_place() -> None:
    source = torch.randn(2)
    assert bind_or_assign(None, source, name="w_kc") is source


# L147
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(torch.ones(1, 3, 4), id="a shape that would be repeated"),
        pytest.param(torch.ones(2, 3, 4, dtype=torch.float64), id="a dtype that would be cast"),
        pytest.param(torch.ones(2, 3, 4, device="meta"), id="another device"),
    ],
)
def test_what_a_plain_copy_would_hide_is_refused(source: torch.Tensor) -> None:
    target = torch.zeros(2, 3, 4)
    with pytest.raises(FinishError, match=r"'w_kc'.*expected \[2, 3, 4\] float32 on cpu"):
        bind_or_assign(target, source, name="w_kc")
    assert not target.any()
