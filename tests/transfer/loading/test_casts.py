from __future__ import annotations

import pytest
import torch

from weightwire.transfer.errors import PlacementError
from weightwire.transfer.loading.base_loaders import WholeLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy, float_casts

BF16 = float_casts("bfloat16")
FP8 = torch.float8_e4m3fn


def load(tensor: torch.Tensor, dtype: torch.dtype, casts: CastPolicy) -> torch.Tensor:
    shell = torch.zeros(tensor.shape, dtype=dtype)
    WholeLoader(casts=casts).load(shell, tensor, None, name="w")
    return shell


# L94
@pytest.mark.parametrize(
    ("source", "shell", "casts"),
    [
        pytest.param(torch.float32, torch.int8, BF16, id="float to integer"),
        pytest.param(torch.float32, torch.bfloat16, SAME_DTYPE, id="narrowing that nobody declared"),
        pytest.param(torch.bfloat16, torch.float32, SAME_DTYPE, id="widening that nobody declared"),
        pytest.param(torch.float32, torch.float16, BF16, id="declared to another dtype"),
        pytest.param(torch.float32, FP8, BF16, id="narrowing to fp8"),
        pytest.param(FP8, torch.bfloat16, BF16, id="fp8 without its scale"),
        pytest.param(torch.int8, torch.bfloat16, BF16, id="integer to float"),
        pytest.param(torch.uint8, torch.int8, BF16, id="unsigned to signed"),
    ],
)
def test_cast_policy_refuses(source: torch.dtype, shell: torch.dtype, casts: CastPolicy) -> None:
    target = torch.zeros(3, dtype=shell)
    with pytest.raises(PlacementError, match="tensor 'w': dtype is ") as caught:
        WholeLoader(casts=casts).load(target, torch.ones(3).to(source), None, name="w")
    assert caught.value.facts["source_dtype"] == str(source).removeprefix("torch.")
    assert caught.value.facts["shell_dtype"] == str(shell).removeprefix("torch.")
    assert not target.view(torch.uint8).any()


# L94
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_declared_cast_is_done(source: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -2.5, 0.1], dtype=source)
    assert torch.equal(load(tensor, torch.bfloat16, BF16), tensor.to(torch.bfloat16))


# L94
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float8_e8m0fnu, torch.int32, torch.bool], ids=str)
def test_equal_dtypes_need_no_permission_and_keep_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    tensor = tensor.ne(0) if dtype is torch.bool else tensor.view(dtype)
    assert torch.equal(load(tensor, dtype, SAME_DTYPE).view(torch.uint8), tensor.view(torch.uint8))


def test_quantisation_method_can_ask_for_a_cast() -> None:
    asked = SAME_DTYPE.extended([("float32", "float8_e4m3fn")])
    assert torch.equal(load(torch.tensor([2.0]), FP8, asked).float(), torch.tensor([2.0]))


def test_float_casts_know_three_dtypes() -> None:
    assert float_casts("float32").allowed == {("bfloat16", "float32"), ("float16", "float32")}
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        float_casts("float8_e4m3fn")


# L94
def test_b53_dtype_on_the_wire_differs_from_the_shell() -> None:
    values = torch.tensor([0.1001, 0.1002, 0.1003])
    assert torch.equal(load(values, torch.bfloat16, BF16), values.bfloat16())
    assert torch.equal(load(values, torch.float32, SAME_DTYPE), values)
    with pytest.raises(PlacementError, match=r"dtype is bfloat16, expected float32 \(casts declared to it: none\)"):
        load(values.bfloat16(), torch.float32, SAME_DTYPE)
    with pytest.raises(PlacementError, match="expected float8_e4m3fn"):
        load(torch.tensor([500.0]), FP8, BF16)
