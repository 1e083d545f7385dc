"""How a quantised `kv_b_proj` becomes one matrix that can be split: one row of a table for each format and platform.

All of this happens while loading, so that no branch on a platform or format is left for the forward pass (L146).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

import torch

from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.latent_split import HeadRows, can_keep_blocks
from weightwire.transfer.finishing.normal_forms import (
    FP8,
    as_fnuz,
    as_scales,
    awq,
    by_blocks,
    by_channel,
    int8_by_channel,
    requantise,
)
from weightwire.transfer.loading.block_scales import Block

Quantisation: TypeAlias = Literal["none", "awq", "block_fp8", "channel_fp8", "tensor_fp8", "block_int8", "channel_int8"]
Parts: TypeAlias = Mapping[str, torch.Tensor]

_USUAL_BLOCK: Block = (128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What kernels of a platform take.

    Attributes:
        takes_blocks: Whether FP8 in blocks of 128 x 128 is known to them at all; it is de-quantised otherwise not to
            bfloat16 but to one scale.
        keeps_blocks: Whether a batched product multiplies FP8 blocks as they are. The caller says so: it depends on
            the device and on what was asked for.
        is_fnuz: Whether FP8 is the kind without negative zero.
        multiplies_out: Whether FP8 is multiplied out to bfloat16 after the split.
        is_row_major: Whether `w_vc` has to be in its logical order.
        quantises: Whether bfloat16 becomes FP8 with one scale, never the kind without negative zero.
        knows_awq: Whether there is something to de-quantise AWQ with.
    """

    takes_blocks: bool = False
    keeps_blocks: bool = False
    is_fnuz: bool = False
    multiplies_out: bool = False
    is_row_major: bool = False
    quantises: bool = False
    knows_awq: bool = True


# "gfx95, sparse": of models with an indexer that are not quantised.
PLATFORMS: Mapping[str, Platform] = {
    "cuda": Platform(takes_blocks=True),
    "cuda, batched FP8": Platform(takes_blocks=True, keeps_blocks=True),
    "musa": Platform(takes_blocks=True, multiplies_out=True),
    "xpu": Platform(takes_blocks=True),
    "rocm": Platform(),
    "rocm, fnuz": Platform(is_fnuz=True),
    "gfx95, sparse": Platform(quantises=True),
    "npu": Platform(is_row_major=True, knows_awq=False),
    "cpu": Platform(),
}


class Route(StrEnum):
    """The way to one matrix."""

    AS_IS = "as it is"
    QUANTISE = "bfloat16 to FP8 with one scale"
    AWQ = "AWQ de-quantised and transposed"
    KEEP_BLOCKS = "FP8 and its blocks kept"
    BLOCKS = "FP8 blocks de-quantised to bfloat16"
    BLOCKS_TO_ONE = "FP8 blocks to one scale"
    CHANNELS_TO_ONE = "FP8 channels to one scale"
    ONE_SCALE = "FP8 and its one scale kept"
    INT8_BLOCKS = "INT8 blocks de-quantised to bfloat16"
    INT8_CHANNELS = "INT8 channels multiplied out"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalForm:
    """A matrix that can be split, whatever it was.

    Attributes:
        weight: `[rows, cols]`: numbers, or float8 with what follows.
        scale: `[]`, of the whole matrix.
        block_scales: One for each block.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    block_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a matrix is made of.

    Attributes:
        quantisation: Its format.
        rows: Of one head.
        rank: Columns of the matrix.
        block: Rows and columns that share a scale, where the format has blocks.
    """

    quantisation: Quantisation
    rows: HeadRows
    rank: int
    block: Block = _USUAL_BLOCK


def choose_route(source: Source, platform: Platform) -> Route:
    """The row of the table (L141).

    Raises:
        FinishError: If the platform has no de-quantiser for the format.
    """
    match source.quantisation:
        case "none":
            return Route.QUANTISE if platform.quantises else Route.AS_IS
        case "awq" if not platform.knows_awq:
            raise FinishError("kv_b_proj: is AWQ, and this platform has nothing to de-quantise it with")
        case "awq":
            return Route.AWQ
        case "block_fp8":
            return _route_of_blocks(source, platform)
        case "channel_fp8":
            return Route.CHANNELS_TO_ONE
        case "tensor_fp8":
            return Route.ONE_SCALE
        case "block_int8":
            return Route.INT8_BLOCKS
        case "channel_int8":
            return Route.INT8_CHANNELS


def _route_of_blocks(source: Source, platform: Platform) -> Route:
    if source.block != _USUAL_BLOCK or not platform.takes_blocks:
        return Route.BLOCKS_TO_ONE
    keeps = platform.keeps_blocks and can_keep_blocks(source.rows, source.rank, source.block)
    return Route.KEEP_BLOCKS if keeps else Route.BLOCKS


# Names of the parts of each format, as the shells of a linear layer are called.
PARTS: Mapping[Quantisation, tuple[str, ...]] = {
    "none": ("weight",),
    "awq": ("qweight", "scales", "qzeros"),
    "block_fp8": ("weight", "weight_scale_inv"),
    "channel_fp8": ("weight", "weight_scale"),
    "tensor_fp8": ("weight", "weight_scale"),
    "block_int8": ("weight", "weight_scale_inv"),
    "channel_int8": ("weight", "weight_scale"),
}


def normal_form(parts: Parts, source: Source, platform: Platform, *, name: str = "kv_b_proj") -> NormalForm:
    """Take a matrix along its route.

    Args:
        parts: By the names in `PARTS`; they stay as they are.
        source: What they are.
        platform: What they are for.
        name: Of the matrix, for messages.

    Raises:
        FinishError: If there is no route, or the parts do not go together.
    """
    form = _WAYS[choose_route(source, platform)](parts, source.block, name)
    if platform.is_fnuz and form.weight.dtype == FP8 and form.scale is not None:
        values, (scale,) = as_fnuz(form.weight, [form.scale])
        form = replace(form, weight=values, scale=scale)
    return form


def _as_is(parts: Parts, _block: Block, _name: str) -> NormalForm:
    return NormalForm(weight=parts["weight"])


def _quantise(parts: Parts, _block: Block, name: str) -> NormalForm:
    found = requantise(parts["weight"].to(torch.float32), name=name)
    return NormalForm(weight=found.values, scale=found.scale)


def _awq(parts: Parts, _block: Block, _name: str) -> NormalForm:
    return NormalForm(weight=awq(parts["qweight"], parts["scales"], parts["qzeros"]))


def _keep_blocks(parts: Parts, _block: Block, _name: str) -> NormalForm:
    return NormalForm(weight=parts["weight"], block_scales=as_scales(parts["weight_scale_inv"]))


def _blocks(parts: Parts, block: Block, _name: str) -> NormalForm:
    return NormalForm(weight=by_blocks(parts["weight"], parts["weight_scale_inv"], block).to(torch.bfloat16))


def _blocks_to_one(parts: Parts, block: Block, name: str) -> NormalForm:
    found = requantise(by_blocks(parts["weight"], parts["weight_scale_inv"], block), name=name)
    return NormalForm(weight=found.values, scale=found.scale)


def _channels_to_one(parts: Parts, _block: Block, name: str) -> NormalForm:
    found = requantise(by_channel(parts["weight"], parts["weight_scale"]), name=name)
    return NormalForm(weight=found.values, scale=found.scale)


def _one_scale(parts: Parts, _block: Block, name: str) -> NormalForm:
    scale = as_scales(parts["weight_scale"])
    if scale.numel() != 1:
        raise FinishError(f"tensor {name!r}: has {scale.numel()} scales, expected one for the whole matrix")
    return NormalForm(weight=parts["weight"], scale=scale.view(()))


def _int8_channels(parts: Parts, _block: Block, _name: str) -> NormalForm:
    return NormalForm(weight=int8_by_channel(parts["weight"], parts["weight_scale"]))


_WAYS: Mapping[Route, Callable[[Parts, Block, str], NormalForm]] = {
    Route.AS_IS: _as_is,
    Route.QUANTISE: _quantise,
    Route.AWQ: _awq,
    Route.KEEP_BLOCKS: _keep_blocks,
    Route.BLOCKS: _blocks,
    Route.BLOCKS_TO_ONE: _blocks_to_one,
    Route.CHANNELS_TO_ONE: _channels_to_one,
    Route.ONE_SCALE: _one_scale,
    Route.INT8_BLOCKS: _blocks,
    Route.INT8_CHANNELS: _int8_channels,
}
