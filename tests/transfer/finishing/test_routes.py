"""One matrix along every route to a form that can be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import pytest
import torch

from tests.transfer.finishing.test_normal_forms import packed
from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.latent_split import HeadRows
from weightwire.transfer.finishing.latent_steps import split_form
from weightwire.transfer.finishing.normal_forms import FP8
from weightwire.transfer.finishing.routes import (
    PARTS,
    PLATFORMS,
    Platform,
    Quantisation,
    Route,
    Source,
    choose_route,
    normal_form,
)

# Two heads whose keys and values are whole blocks.
ROWS, RANK, HEADS = HeadRows(key=128, value=128), 256, 2
BLOCK = (128, 128)


def matrix() -> torch.Tensor:
    return torch.randn(HEADS * ROWS.total, RANK, generator=torch.Generator().manual_seed(2)).bfloat16()


def largest_of_blocks(wide: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, cols = wide.shape[0] // block[0], wide.shape[1] // block[1]
    return wide.abs().view(rows, block[0], cols, block[1]).amax(dim=(1, 3))


def of_blocks(scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def parts(quantisation: Quantisation, block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """The matrix as a checkpoint of each format has it, by the definition of the format."""
    wide = matrix().float()
    if quantisation == "none":
        return {"weight": matrix()}
    if quantisation == "awq":
        grouped = wide.T.reshape(-1, 32, wide.shape[0])
        low, high = grouped.amin(1), grouped.amax(1)
        scales = (high - low) / 15
        zeros = (-low / scales).round().clamp(0, 15)
        values = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15).flatten(0, 1)
        return {"qweight": packed(values), "scales": scales.half(), "qzeros": packed(zeros)}
    most, dtype = (448, FP8) if quantisation.endswith("fp8") else (127, torch.int8)
    if quantisation.startswith("block"):
        scales = largest_of_blocks(wide, block) / most
        values = wide / of_blocks(scales, block)
        leaf = "weight_scale_inv"
    else:
        scales = (
            wide.abs().amax(1, keepdim=True) / most if quantisation.startswith("channel") else wide.abs().max() / most
        )
        values, leaf = wide / scales, "weight_scale"
        scales = scales.flatten() if quantisation.startswith("channel") else scales
    return {"weight": (values if dtype == FP8 else values.round()).to(dtype), leaf: scales}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table: the route, and how far the result may be from the matrix, which FP8 twice makes worse."""

    quantisation: Quantisation
    platform: str
    route: Route
    error: float
    outputs: tuple[str, ...] = ("w_kc", "w_vc")
    block: tuple[int, int] = BLOCK


ONE = ("w_kc", "w_scale", "w_vc")
BLOCKS = ("w_kc", "w_scale_k", "w_scale_v", "w_vc")
CASES = {
    "bfloat16": Case(quantisation="none", platform="cuda", route=Route.AS_IS, error=0),
    "bfloat16 on gfx95": Case(
        quantisation="none", platform="gfx95, sparse", route=Route.QUANTISE, error=0.04, outputs=ONE
    ),
    "AWQ": Case(quantisation="awq", platform="cuda", route=Route.AWQ, error=0.12),
    "FP8 blocks kept": Case(
        quantisation="block_fp8", platform="cuda, batched FP8", route=Route.KEEP_BLOCKS, error=0.03, outputs=BLOCKS
    ),
    "FP8 blocks": Case(quantisation="block_fp8", platform="cuda", route=Route.BLOCKS, error=0.03),
    "FP8 blocks on xpu": Case(quantisation="block_fp8", platform="xpu", route=Route.BLOCKS, error=0.03),
    "FP8 blocks of another size": Case(
        quantisation="block_fp8", platform="cuda", route=Route.BLOCKS_TO_ONE, error=0.05, outputs=ONE, block=(64, 32)
    ),
    "FP8 blocks on another platform": Case(
        quantisation="block_fp8", platform="rocm", route=Route.BLOCKS_TO_ONE, error=0.05, outputs=ONE
    ),
    "FP8 blocks without negative zero": Case(
        quantisation="block_fp8", platform="rocm, fnuz", route=Route.BLOCKS_TO_ONE, error=0.05, outputs=ONE
    ),
    "FP8 channels": Case(
        quantisation="channel_fp8", platform="cuda", route=Route.CHANNELS_TO_ONE, error=0.04, outputs=ONE
    ),
    "FP8 channels multiplied out": Case(
        quantisation="channel_fp8", platform="musa", route=Route.CHANNELS_TO_ONE, error=0.04
    ),
    "FP8 with one scale": Case(
        quantisation="tensor_fp8", platform="cuda", route=Route.ONE_SCALE, error=0.04, outputs=ONE
    ),
    "FP8 with one scale, no negative zero": Case(
        quantisation="tensor_fp8", platform="rocm, fnuz", route=Route.ONE_SCALE, error=0.04, outputs=ONE
    ),
    "INT8 blocks": Case(quantisation="block_int8", platform="cuda", route=Route.INT8_BLOCKS, error=0.02),
    "INT8 channels": Case(quantisation="channel_int8", platform="npu", route=Route.INT8_CHANNELS, error=0.02),
}


def back(found: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The matrix that a split means, whichever scales it kept."""
    w_kc, w_vc = (found[leaf].float() for leaf in ("w_kc", "w_vc"))
    if "w_scale_k" in found:
        scale_k, scale_v = (torch.stack([of_blocks(s, BLOCK) for s in found[f"w_scale_{leaf}"]]) for leaf in "kv")
        # Stored as kernels multiply them, the other way round.
        return torch.cat([(w_kc * scale_k).transpose(1, 2), w_vc * scale_v], dim=1).flatten(0, 1)
    scale = found.get("w_scale", torch.tensor(1.0))
    return torch.cat([w_kc, w_vc.transpose(1, 2)], dim=1).flatten(0, 1) * scale


# L141, L142, L146, L148, C9
@pytest.mark.parametrize("name", CASES)
def test_matrix_comes_out_right(name: str) -> None:
    case, platform = CASES[name], PLATFORMS[CASES[name].platform]
    source = Source(quantisation=case.quantisation, rows=ROWS, rank=RANK, block=case.block)
    given = parts(case.quantisation, case.block)
    before = {leaf: tensor.clone() for leaf, tensor in given.items()}
    assert choose_route(source, platform) is case.route
    found = split_form(normal_form(given, source, platform), source, platform)
    assert tuple(sorted(found)) == case.outputs
    difference = (back(found) - matrix().float()).norm() / matrix().float().norm()
    assert difference <= case.error
    # What was given is as it was, and nothing that came out lies in it.
    assert all(
        tensor.view(torch.uint8).equal(before[leaf].view(torch.uint8)) for leaf, tensor in given.items() if tensor.dim()
    )
    addresses = {tensor.untyped_storage().data_ptr() for tensor in given.values()}
    assert not addresses & {tensor.untyped_storage().data_ptr() for tensor in found.values()}


# L141
def test_every_format_and_route_has_its_case() -> None:
    assert {case.quantisation for case in CASES.values()} == set(get_args(Quantisation)) == PARTS.keys()
    assert {case.route for case in CASES.values()} == set(Route)


# L142
def test_blocks_across_heads_are_not_kept() -> None:
    source = Source(quantisation="block_fp8", rows=HeadRows(key=192, value=256), rank=512)
    assert choose_route(source, PLATFORMS["cuda, batched FP8"]) is Route.BLOCKS


# L138
def test_platform_may_want_values_in_their_logical_order() -> None:
    source = Source(quantisation="none", rows=ROWS, rank=RANK)
    for name, expected in (("npu", True), ("cuda", False)):
        found = split_form(normal_form(parts("none"), source, PLATFORMS[name]), source, PLATFORMS[name])
        assert found["w_vc"].is_contiguous() is expected


# L141
def test_awq_without_a_de_quantiser_is_refused() -> None:
    source = Source(quantisation="awq", rows=ROWS, rank=RANK)
    with pytest.raises(FinishError, match="AWQ"):
        choose_route(source, Platform(knows_awq=False))


def test_several_scales_of_one_matrix_are_refused() -> None:
    source = Source(quantisation="tensor_fp8", rows=ROWS, rank=RANK)
    with pytest.raises(FinishError, match="has 2 scales"):
        normal_form({**parts("tensor_fp8"), "weight_scale": torch.ones(2)}, source, Platform())
