"""The layers of a tree: parameters in this rank's shapes, each with the loader that fills it; no forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from weightwire.transfer.loading.base_loaders import CutLoader, WholeLoader
from weightwire.transfer.loading.casts import SAME_DTYPE, CastPolicy, float_casts
from weightwire.transfer.loading.expert_loaders import ExpertLoader
from weightwire.transfer.loading.fused_loaders import MergedLoader, QkvLoader
from weightwire.transfer.loading.ledger import exempt_slots
from weightwire.transfer.loading.scale_loaders import (
    BlockScaleLoader,
    ExpertInputScaleLoader,
    ExpertScaleLoader,
    PartScaleLoader,
    block_scale_shape,
    expert_block_scales,
)
from weightwire.transfer.loading.slots import ShellLoader, attach_loader
from weightwire.transfer.models.blueprint import Blueprint
from weightwire.transfer.models.building import new_parameter
from weightwire.transfer.models.config import Fp8Config

LinearLoader: TypeAlias = WholeLoader | CutLoader | QkvLoader | MergedLoader
FP8 = torch.float8_e4m3fn
_SCALE_CASTS = float_casts("float32")


class Layer(nn.Module):
    """Holds shells."""

    def add(self, name: str, shape: tuple[int, ...], loader: ShellLoader, *, dtype: torch.dtype | None = None) -> None:
        """Allocate a shell on the current default device, of the current default dtype unless another is given."""
        shell = new_parameter(*shape, dtype=dtype)
        attach_loader(shell, loader)
        self.register_parameter(name, shell)


class RMSNorm(Layer):
    """`weight [size]`, the same on every rank."""

    def __init__(self, blueprint: Blueprint, size: int) -> None:
        super().__init__()
        self.add("weight", (size,), WholeLoader(casts=blueprint.casts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """What makes one linear layer different from another.

    Attributes:
        path: Full runtime name of the module.
        parts: Last component of the checkpoint's name of each layer that is fused here.
        rows: Outputs on this rank.
        cols: Inputs on this rank.
        loader: From the casts allowed to the loader of the weight.
        bias: Likewise of the bias; None if there is none.
    """

    path: str
    parts: tuple[str, ...]
    rows: int
    cols: int
    loader: Callable[[CastPolicy], LinearLoader]
    bias: Callable[[CastPolicy], LinearLoader] | None = None

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


class Linear(Layer):
    """`weight [rows, cols]`, `bias [rows]` if there is one, and scales if the weight is FP8 (L88)."""

    def __init__(self, blueprint: Blueprint, shape: LinearShape, *, quantised: bool = True) -> None:
        super().__init__()
        fp8 = blueprint.config.fp8
        if not quantised or fp8 is None or not fp8.converts(shape.parent, shape.parts):
            self.add("weight", (shape.rows, shape.cols), shape.loader(blueprint.casts))
        else:
            weight = shape.loader(SAME_DTYPE)
            self.add("weight", (shape.rows, shape.cols), weight, dtype=FP8)
            self._add_scales(blueprint, shape, weight, fp8)
        if shape.bias is not None:
            self.add("bias", (shape.rows,), shape.bias(blueprint.casts))

    def _add_scales(self, blueprint: Blueprint, shape: LinearShape, weight: LinearLoader, fp8: Fp8Config) -> None:
        per_part = PartScaleLoader(parts=weight.slots, casts=_SCALE_CASTS)
        if fp8.block is None:
            leaf = blueprint.runtime_leaf("weight_scale")
            self.add(leaf, per_part.shell_shape, per_part, dtype=torch.float32)
        else:
            leaf, blocks = (
                blueprint.runtime_leaf("weight_scale_inv"),
                _block_scales(weight, fp8.block, layer=shape.path),
            )
            self.add(leaf, block_scale_shape(shape.rows, shape.cols, fp8.block), blocks, dtype=torch.float32)
        if fp8.activations == "static":
            leaf = blueprint.runtime_leaf("input_scale")
            self.add(leaf, per_part.shell_shape, per_part, dtype=torch.float32)


def _block_scales(weight: LinearLoader, block: tuple[int, int], *, layer: str) -> ShellLoader:
    if isinstance(weight, WholeLoader):
        return WholeLoader(casts=_SCALE_CASTS)
    return BlockScaleLoader(weight=weight, block=block[weight.cuts.axis], layer=layer, casts=_SCALE_CASTS)


def _last(path: str) -> tuple[str, ...]:
    return (path.rpartition(".")[2],)


class ReplicatedLinear(Linear):
    """Whole on every rank; not quantised unless that is said, being small: routers."""

    def __init__(
        self,
        blueprint: Blueprint,
        path: str,
        *,
        inputs: int,
        outputs: int,
        bias: bool = False,
        quantised: bool = False,
    ) -> None:
        shape = LinearShape(
            path=path,
            parts=_last(path),
            rows=outputs,
            cols=inputs,
            loader=WholeLoader,
            bias=WholeLoader if bias else None,
        )
        super().__init__(blueprint, shape, quantised=quantised)


class ColumnParallelLinear(Linear):
    """Outputs split over the tensor-parallel ranks."""

    def __init__(self, blueprint: Blueprint, path: str, *, inputs: int, outputs: int, bias: bool = False) -> None:
        def loader(casts: CastPolicy) -> CutLoader:
            return blueprint.columns(outputs, casts)

        with blueprint.naming(path):
            rows = loader(SAME_DTYPE).width
            shape = LinearShape(
                path=path, parts=_last(path), rows=rows, cols=inputs, loader=loader, bias=loader if bias else None
            )
            super().__init__(blueprint, shape)


class RowParallelLinear(Linear):
    """Inputs split over the tensor-parallel ranks; the bias is whole on every rank."""

    def __init__(self, blueprint: Blueprint, path: str, *, inputs: int, outputs: int, bias: bool = False) -> None:
        self._build(blueprint, path, outputs, loader=lambda casts: blueprint.rows(inputs, casts), bias=bias)

    def _build(
        self,
        blueprint: Blueprint,
        path: str,
        outputs: int,
        *,
        loader: Callable[[CastPolicy], CutLoader],
        bias: bool,
    ) -> None:
        with blueprint.naming(path):
            shape = LinearShape(
                path=path,
                parts=_last(path),
                rows=outputs,
                cols=loader(SAME_DTYPE).width,
                loader=loader,
                bias=WholeLoader if bias else None,
            )
            Linear.__init__(self, blueprint, shape)


class AttentionOutputLinear(RowParallelLinear):
    """Row-parallel by query heads, surplus ones being zero columns."""

    def __init__(self, blueprint: Blueprint, path: str, *, bias: bool = False) -> None:
        hidden = blueprint.config.hidden_size
        with blueprint.naming(path):
            heads = blueprint.heads()
        self._build(blueprint, path, hidden, loader=lambda casts: heads.o_proj_loader(casts=casts), bias=bias)


class QKVParallelLinear(Linear):
    """Rows of q, then k, then v, of this rank's heads."""

    def __init__(self, blueprint: Blueprint, path: str, *, bias: bool = False) -> None:
        with blueprint.naming(path):
            heads = blueprint.heads()

            def loader(casts: CastPolicy) -> QkvLoader:
                return QkvLoader(geometry=heads, casts=casts)

            shape = LinearShape(
                path=path,
                parts=("q_proj", "k_proj", "v_proj"),
                rows=heads.total_rows,
                cols=blueprint.config.hidden_size,
                loader=loader,
                bias=loader if bias else None,
            )
            super().__init__(blueprint, shape)


class MergedColumnParallelLinear(Linear):
    """Gate, then up, each split over the tensor-parallel ranks."""

    def __init__(self, blueprint: Blueprint, path: str, *, inputs: int, size: int, bias: bool = False) -> None:
        def loader(casts: CastPolicy) -> MergedLoader:
            return MergedLoader(sizes=(size, size), group=blueprint.place.tensor, casts=casts)

        with blueprint.naming(path):
            rows = sum(cut.width for _, cut in loader(SAME_DTYPE).cuts.parts)
            shape = LinearShape(
                path=path,
                parts=("gate_proj", "up_proj"),
                rows=rows,
                cols=inputs,
                loader=loader,
                bias=loader if bias else None,
            )
            super().__init__(blueprint, shape)


class VocabParallelEmbedding(Layer):
    """`weight [rows, hidden]`: this rank's rows of the padded vocabulary."""

    def __init__(self, blueprint: Blueprint, path: str = "model.embed_tokens") -> None:
        super().__init__()
        with blueprint.naming(path):
            loader = blueprint.vocabulary()
            self.add("weight", (loader.rows, blueprint.config.hidden_size), loader)


class ParallelLMHead(VocabParallelEmbedding):
    """The output head, cut as the embedding is."""

    def __init__(self, blueprint: Blueprint, path: str = "lm_head") -> None:
        super().__init__(blueprint, path)


class FusedMoE(Layer):
    """`w13_weight [experts, 2 x width, hidden]` and `w2_weight [experts, hidden, width]` of this rank's experts."""

    def __init__(self, blueprint: Blueprint, path: str) -> None:
        super().__init__()
        fp8, hidden = blueprint.config.fp8, blueprint.config.hidden_size
        quantised = fp8 is not None and fp8.converts("", (path,))
        with blueprint.naming(path):
            w13 = blueprint.expert_loader(SAME_DTYPE if quantised else blueprint.casts)
            for loader in (w13, w13.for_matrix("w2")):
                dtype = FP8 if quantised else None
                self.add(f"{loader.matrix}_weight", loader.shell_shape(hidden), loader, dtype=dtype)
                if fp8 is not None and quantised:
                    self._add_scales(blueprint, loader, fp8, path=path)

    def _add_scales(self, blueprint: Blueprint, weight: ExpertLoader, fp8: Fp8Config, *, path: str) -> None:
        matrix = weight.matrix
        if fp8.block is None:
            scales = ExpertScaleLoader(
                matrix=matrix, placement=weight.placement, expert=weight.expert, casts=_SCALE_CASTS
            )
            leaf = blueprint.runtime_leaf("weight_scale")
            self.add(f"{matrix}_{leaf}", scales.shell_shape, scales, dtype=torch.float32)
        else:
            cut, whole = fp8.block if matrix == "w13" else fp8.block[::-1]
            blocks = replace(expert_block_scales(weight, cut, layer=path), casts=_SCALE_CASTS)
            shape = blocks.shell_shape(-(-blueprint.config.hidden_size // whole))
            leaf = blueprint.runtime_leaf("weight_scale_inv")
            self.add(f"{matrix}_{leaf}", shape, blocks, dtype=torch.float32)
        if fp8.activations == "static":
            inputs = ExpertInputScaleLoader(
                matrix=matrix, placement=weight.placement, expert=weight.expert, casts=_SCALE_CASTS
            )
            self.add(f"{matrix}_input_scale", inputs.shell_shape, inputs, dtype=torch.float32)


class KvScales(Layer):
    """Scales of keys and values in the cache, 1 unless the checkpoint says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_scale", "v_scale"):
            self.add(name, (), WholeLoader(casts=_SCALE_CASTS), dtype=torch.float32)
            shell = self.get_parameter(name)
            with torch.no_grad():
                shell.fill_(1.0)
            exempt_slots(shell, "owned by init")
