"""Quantised matrices back to numbers, each format in one small function; nothing here knows what a matrix is for.

Every function returns new memory: a scale that a later step multiplies must never be a parameter's own (L148).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightwire.transfer.errors import FinishError
from weightwire.transfer.loading.block_scales import Block, scale_blocks

_LOG = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
# The largest value of float8_e4m3fn.
FP8_MAX = 448.0
# Eight 4-bit values in each word: nibble i belongs to the column that stands here. Source: AutoAWQ, pack order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_BITS = 4
_NOT_A_NUMBER = 255
# Of an exponent byte: where a float32 keeps its own, and what the smallest one means, which the shift would lose.
_EXPONENT_AT = 23
_SMALLEST_EXPONENT = 2.0**-127
_NEGATIVE_ZERO = 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A matrix that is its values times one scale.

    Attributes:
        values: `[rows, cols]`, float8.
        scale: `[]`, float32.
    """

    values: torch.Tensor
    scale: torch.Tensor


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes are exponents, 2^(u - 127), and not numbers (L145).

    Args:
        exponents: uint8, or float8_e8m0fnu; any shape.

    Raises:
        FinishError: If one of them is the byte that stands for NaN.
    """
    stored = exponents if exponents.dtype == torch.uint8 else exponents.view(torch.uint8)
    if bool((stored == _NOT_A_NUMBER).any()):
        raise FinishError("UE8M0 scales: one of them is 255, which is NaN, expected an exponent of at most 254")
    shifted = (stored.to(torch.int32) << _EXPONENT_AT).view(torch.float32)
    return torch.where(stored == 0, torch.full_like(shifted, _SMALLEST_EXPONENT), shifted)


def as_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32, exponents or not; a copy."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return exponents_to_scales(scales)
    return scales.to(torch.float32, copy=True)


def by_blocks(values: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """FP8 or INT8 in blocks, as float32; see `expanded_scales`."""
    return scale_blocks(values, as_scales(scales), block)


def by_channel(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One scale for each row, as float32.

    Args:
        values: `[rows, cols]`.
        scales: `[rows]` or `[rows, 1]`. Of a square matrix the wrong broadcast would raise nothing (L144).

    Raises:
        FinishError: If there is not one for each row.
    """
    return values.to(torch.float32) * _column(values, as_scales(scales))


def int8_by_channel(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """INT8 with one scale for each row: bfloat16 times bfloat16, as kernels do it (L141)."""
    return values.to(torch.bfloat16) * _column(values, scales).to(torch.bfloat16)


def _column(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = values.shape[0]
    if tuple(scales.shape) not in ((rows,), (rows, 1)):
        raise FinishError(f"channel scales: are {list(scales.shape)}, expected [{rows}] for a matrix of {rows} rows")
    return scales.view(rows, 1)


def awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    """AWQ's 4-bit values, as `[outputs, inputs]` in the scales' dtype.

    Args:
        qweight: int32 `[inputs, outputs / 8]`.
        scales: `[groups of inputs, outputs]`.
        qzeros: int32 `[groups of inputs, outputs / 8]`.

    Raises:
        FinishError: If the shapes do not go together.
    """
    inputs, words = qweight.shape
    groups, outputs = scales.shape
    if outputs != len(_AWQ_ORDER) * words or tuple(qzeros.shape) != (groups, words) or inputs % groups:
        raise FinishError(
            f"AWQ: qweight {list(qweight.shape)}, scales {list(scales.shape)} and qzeros {list(qzeros.shape)} do not "
            "go together, expected [in, out/8], [groups, out] and [groups, out/8]"
        )
    each = inputs // groups
    zeros, wide = (table.repeat_interleave(each, dim=0) for table in (_nibbles(qzeros), scales))
    return ((_nibbles(qweight) - zeros).to(scales.dtype) * wide).transpose(0, 1).contiguous()


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The columns that each word holds, in order."""
    shifts = [_AWQ_BITS * _AWQ_ORDER.index(column) for column in range(len(_AWQ_ORDER))]
    return torch.stack([(words >> shift) & 0xF for shift in shifts], dim=-1).flatten(1)


def requantise(matrix: torch.Tensor, *, name: str) -> Scaled:
    """One scale for the whole matrix (L143). Blocks that are much smaller than the largest lose most.

    Args:
        matrix: float32.
        name: For the log.
    """
    _LOG.info("tensor %r: block scales become one, which loses precision where blocks differ in size", name)
    largest = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest)).to(torch.float32)
    return Scaled(values=(matrix / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale=scale)


def as_fnuz(values: torch.Tensor, scales: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Values in the other FP8 of some targets (L146).

    The same bits are half the value there, so scales double; and the bits of -0.0 are NaN.

    Args:
        values: float8_e4m3fn.
        scales: Of the values.
    """
    stored = values.view(torch.uint8)
    zeroed = torch.where(stored == _NEGATIVE_ZERO, torch.zeros_like(stored), stored)
    return zeroed.view(FNUZ), tuple(scale * 2 for scale in scales)
