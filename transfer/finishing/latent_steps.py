"""The steps of a tree with latent attention: one split for each layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weightwire.transfer.finishing.latent_split import HeadRows, split_blocks, split_heads
from weightwire.transfer.finishing.routes import PARTS, NormalForm, Platform, Quantisation, Source, normal_form
from weightwire.transfer.finishing.steps import FinishStep, Tensors
from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.latent_attention import LatentAttention

_SPLIT = "kv_b_proj"
# What a split may leave, whatever the format was.
OUTPUTS = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")


def latent_steps(model: nn.Module, config: ModelConfig, platform: Platform) -> tuple[FinishStep, ...]:
    """The split of each attention layer that lies on this rank: of the stage's layers, or of a draft's decoder (L150).

    Args:
        model: A tree of ours.
        config: Of the model.
        platform: What the results are for.

    Raises:
        FinishError: If a platform has no route for the format.
    """
    return tuple(
        _step(path, module, config, platform)
        for path, module in model.named_modules()
        if isinstance(module, LatentAttention)
    )


def _step(path: str, module: LatentAttention, config: ModelConfig, platform: Platform) -> FinishStep:
    latent = config.latent
    assert latent is not None
    rows = HeadRows(key=latent.qk_nope, value=latent.v)
    leaves = dict(module.kv_b_proj.named_parameters())
    quantisation = _quantisation(leaves)
    block = config.fp8.block if config.fp8 is not None and config.fp8.block is not None else (128, 128)
    source = Source(quantisation=quantisation, rows=rows, rank=latent.kv_rank, block=block)
    names = {leaf: f"{path}.{_SPLIT}.{leaf}" for leaf in PARTS[quantisation]}

    def run(given: Tensors) -> Tensors:
        parts = {leaf: given[name] for leaf, name in names.items()}
        found = split_form(normal_form(parts, source, platform, name=f"{path}.{_SPLIT}"), source, platform)
        return {f"{path}.{leaf}": tensor for leaf, tensor in found.items()}

    return FinishStep(
        name=f"{path}: {_SPLIT} split by heads",
        phase="derive",
        inputs=tuple(names.values()),
        outputs=tuple(f"{path}.{leaf}" for leaf in OUTPUTS),
        run=run,
    )


def _quantisation(leaves: Mapping[str, torch.Tensor]) -> Quantisation:
    """The format of a layer of ours, by its shells."""
    if "weight_scale_inv" in leaves:
        return "block_fp8"
    if "weight_scale" in leaves:
        return "tensor_fp8"
    return "none"


def split_form(form: NormalForm, source: Source, platform: Platform) -> Mapping[str, torch.Tensor]:
    """What attention multiplies with, by the names in `OUTPUTS`, in new memory.

    Raises:
        FinishError: If the rows are not those of whole heads.
    """
    if form.block_scales is not None:
        kept = split_blocks(form.weight, form.block_scales, source.rows, source.block)
        return {leaf: getattr(kept, leaf) for leaf in ("w_kc", "w_vc", "w_scale_k", "w_scale_v")}
    w_kc, w_vc = split_heads(form.weight, source.rows)
    scale = form.scale
    if platform.multiplies_out and scale is not None:
        w_kc, w_vc = (_multiplied_out(part, scale) for part in (w_kc, w_vc))
        scale = None
    if platform.is_row_major:
        w_vc = w_vc.contiguous()
    return {"w_kc": w_kc, "w_vc": w_vc} | ({} if scale is None else {"w_scale": scale})


def _multiplied_out(part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # Strides stay: a product keeps the order of its only argument with axes.
    return part.to(torch.bfloat16) * scale.to(torch.bfloat16)
