"""The dtypes that may travel: torch's names, safetensors' tags and sizes in one table.

Source: safetensors 0.8, `Dtype` in its format description; torch 2.13, `torch.dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightwire.transfer.errors import DtypeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One dtype.

    Attributes:
        name: Torch's name without the `torch.` prefix.
        tag: The tag in a safetensors header.
        itemsize: Bytes of one torch element.
        packing: Logical values in one torch element, along the last dimension. A safetensors header counts
            logical values, torch counts elements.
    """

    name: str
    tag: str
    itemsize: int
    packing: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            DtypeError: If this build of torch is too old to have it.
        """
        found = getattr(torch, self.name, None)
        if not isinstance(found, torch.dtype):
            raise DtypeError(f"dtype {self.name!r}: torch {torch.__version__} does not have it", dtype=self.name)
        return found

    def element_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in torch elements of a tensor whose header says `logical`.

        Raises:
            DtypeError: If the last dimension ends inside a packed element.
        """
        if self.packing == 1:
            return logical
        if not logical or logical[-1] % self.packing:
            raise DtypeError(
                f"dtype {self.name!r}: shape {list(logical)} ends inside a packed element, "
                f"expected a last dimension that {self.packing} divides",
                dtype=self.name,
            )
        return (*logical[:-1], logical[-1] // self.packing)

    def logical_shape(self, elements: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that a safetensors header states for `elements`; the inverse of `element_shape`.

        Raises:
            DtypeError: If a packed dtype has no dimension that it can be packed along.
        """
        if self.packing == 1:
            return elements
        if not elements:
            raise DtypeError(f"dtype {self.name!r}: shape is [], expected a dimension to pack along", dtype=self.name)
        return (*elements[:-1], elements[-1] * self.packing)


_TABLE = (
    Dtype(name="bool", tag="BOOL", itemsize=1),
    Dtype(name="uint8", tag="U8", itemsize=1),
    Dtype(name="int8", tag="I8", itemsize=1),
    Dtype(name="float4_e2m1fn_x2", tag="F4", itemsize=1, packing=2),
    Dtype(name="float8_e4m3fn", tag="F8_E4M3", itemsize=1),
    Dtype(name="float8_e4m3fnuz", tag="F8_E4M3FNUZ", itemsize=1),
    Dtype(name="float8_e5m2", tag="F8_E5M2", itemsize=1),
    Dtype(name="float8_e5m2fnuz", tag="F8_E5M2FNUZ", itemsize=1),
    Dtype(name="float8_e8m0fnu", tag="F8_E8M0", itemsize=1),
    Dtype(name="int16", tag="I16", itemsize=2),
    Dtype(name="uint16", tag="U16", itemsize=2),
    Dtype(name="float16", tag="F16", itemsize=2),
    Dtype(name="bfloat16", tag="BF16", itemsize=2),
    Dtype(name="int32", tag="I32", itemsize=4),
    Dtype(name="uint32", tag="U32", itemsize=4),
    Dtype(name="float32", tag="F32", itemsize=4),
    Dtype(name="int64", tag="I64", itemsize=8),
    Dtype(name="uint64", tag="U64", itemsize=8),
    Dtype(name="float64", tag="F64", itemsize=8),
    Dtype(name="complex64", tag="C64", itemsize=8),
)
BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_TAG = {dtype.tag: dtype for dtype in _TABLE}


def is_packed(dtype: torch.dtype) -> bool:
    """Whether one element holds several values, so that torch converts, compares and fills none of them.

    Asked by name: builds of torch that are too old for such a dtype have no attribute to compare with.
    """
    known = BY_NAME.get(str(dtype).removeprefix("torch."))
    return known is not None and known.packing > 1


def dtype_named(name: str) -> Dtype:
    """The dtype with torch's `name`.

    Raises:
        DtypeError: If no dtype that may travel has that name.
    """
    if name not in BY_NAME:
        raise DtypeError(f"dtype {name!r} is not one of {sorted(BY_NAME)}", dtype=name)
    return BY_NAME[name]


def dtype_tagged(tag: str) -> Dtype:
    """The dtype with safetensors' `tag`.

    Raises:
        DtypeError: If the tag is unknown.
    """
    if tag not in BY_TAG:
        raise DtypeError(f"safetensors dtype tag {tag!r} is not one of {sorted(BY_TAG)}", dtype=tag)
    return BY_TAG[tag]


def dtype_of(tensor: torch.Tensor) -> Dtype:
    """The dtype of `tensor`.

    Raises:
        DtypeError: If it is one that may not travel (complex128, quantised torch dtypes).
    """
    return dtype_named(str(tensor.dtype).removeprefix("torch."))
