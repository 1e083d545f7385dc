"""The table of dtypes against torch and against the safetensors library."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from weightwire.transfer.dtypes import BY_NAME, BY_TAG, Dtype, dtype_named, dtype_of, dtype_tagged, is_packed
from weightwire.transfer.errors import DtypeError

ALL = pytest.mark.parametrize("dtype", [pytest.param(dtype, id=dtype.name) for dtype in BY_NAME.values()])
PACKED = BY_NAME["float4_e2m1fn_x2"]


@ALL
def test_dtype_is_the_one_of_torch_with_its_size(dtype: Dtype) -> None:
    assert dtype.torch_dtype is getattr(torch, dtype.name)
    assert dtype.torch_dtype.itemsize == dtype.itemsize
    assert dtype_of(torch.empty(0, dtype=dtype.torch_dtype)) is dtype
    assert dtype_named(dtype.name) is dtype
    assert dtype_tagged(dtype.tag) is dtype


@ALL
def test_b10_tag_and_shape_are_those_that_safetensors_writes(dtype: Dtype) -> None:
    raw = save({"t": torch.zeros(3, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype.torch_dtype)})
    (entry,) = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).values()
    assert entry["dtype"] == dtype.tag
    assert tuple(entry["shape"]) == dtype.logical_shape((3, 2))
    assert dtype.element_shape(tuple(entry["shape"])) == (3, 2)


def test_table_names_and_tags_are_unique() -> None:
    assert len(BY_NAME) == len(BY_TAG)


def test_b10_every_dtype_of_torch_may_travel_or_is_refused_by_name() -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        if name not in BY_NAME:
            with pytest.raises(DtypeError, match=name):
                dtype_named(name)


def test_tensor_of_a_dtype_that_may_not_travel_is_refused() -> None:
    with pytest.raises(DtypeError, match="complex128") as caught:
        dtype_of(torch.empty(1, dtype=torch.complex128))
    assert caught.value.facts["dtype"] == "complex128"


@pytest.mark.parametrize("tag", ["", "f32", "BF32", "F32 ", "Ŧ32"])
def test_b10_unknown_tag_is_named(tag: str) -> None:
    with pytest.raises(DtypeError) as caught:
        dtype_tagged(tag)
    assert repr(tag) in str(caught.value)
    assert caught.value.facts["dtype"] == tag


def test_dtype_that_this_torch_lacks_is_refused() -> None:
    with pytest.raises(DtypeError, match="does not have it"):
        _ = Dtype(name="float3", tag="F3", itemsize=1).torch_dtype
    with pytest.raises(DtypeError):
        _ = Dtype(name="nn", tag="NN", itemsize=1).torch_dtype


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
def test_packed_shapes_are_inverse_to_each_other(shape: tuple[int, ...]) -> None:
    assert PACKED.element_shape(PACKED.logical_shape(shape)) == shape


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_b10_packed_shape_that_ends_inside_an_element_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DtypeError, match="packed element"):
        PACKED.element_shape(shape)


def test_packed_scalar_has_no_logical_shape() -> None:
    with pytest.raises(DtypeError, match="pack"):
        PACKED.logical_shape(())


def test_only_dtypes_of_several_values_are_packed() -> None:
    packed = [name for name, dtype in BY_NAME.items() if is_packed(dtype.torch_dtype)]
    assert packed == ["float4_e2m1fn_x2"]
    assert not is_packed(torch.complex128)
