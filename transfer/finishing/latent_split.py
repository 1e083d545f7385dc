"""`kv_b_proj` taken apart into what attention multiplies with in the latent space: `w_kc` and `w_vc`.

Its rows stand head by head: of each head first the rows that make its key, then those that make its value. So a cut by
heads is contiguous, and the split is the same on every rank (L136, L140). Both results are new memory in the order that
kernels want, together as large as the original, which stays for the plain prefill (L151).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightwire.transfer.errors import FinishError
from weightwire.transfer.loading.block_scales import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of one head in `kv_b_proj`.

    Attributes:
        key: Rows of its key, `qk_nope_head_dim`.
        value: Rows of its value, `v_head_dim`.
    """

    key: int
    value: int

    @property
    def total(self) -> int:
        return self.key + self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBlocks:
    """A split that keeps FP8 and its blocks (L142); all four contiguous.

    Attributes:
        w_kc: `[heads, rank, key]`.
        w_vc: `[heads, value, rank]`.
        w_scale_k: `[heads, rank / 128, key / 128]`.
        w_scale_v: `[heads, value / 128, rank / 128]`.
    """

    w_kc: torch.Tensor
    w_vc: torch.Tensor
    w_scale_k: torch.Tensor
    w_scale_v: torch.Tensor


def split_heads(weight: torch.Tensor, rows: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
    """`w_kc [heads, key, rank]` with the key's axis contiguous, and `w_vc [heads, rank, value]` with the rank's (L137,
    L138).

    Args:
        weight: `[heads x (key + value), rank]`, of this rank's heads; any dtype.
        rows: Of one head.

    Raises:
        FinishError: If the rows are not those of whole heads.
    """
    by_head = _by_head(weight, rows)
    w_kc = _own(by_head[:, : rows.key].transpose(1, 2)).transpose(1, 2)
    w_vc = _own(by_head[:, rows.key :]).transpose(1, 2)
    return w_kc, w_vc


def can_keep_blocks(rows: HeadRows, rank: int, block: Block) -> bool:
    """Whether no block lies across a key and a value; the other way is to de-quantise first."""
    return not (rows.key % block[0] or rows.value % block[0] or rank % block[1])


def split_blocks(weight: torch.Tensor, scales: torch.Tensor, rows: HeadRows, block: Block) -> SplitBlocks:
    """Split a matrix and its block scales alike.

    Args:
        weight: `[heads x (key + value), rank]`, float8.
        scales: One for each block of it.
        rows: Of one head.
        block: Rows and columns of a block.

    Raises:
        FinishError: If a block lies across a key and a value, or shapes do not go together.
    """
    rank = weight.shape[1]
    if not can_keep_blocks(rows, rank, block):
        raise FinishError(
            f"kv_b_proj: heads of {rows.key} and {rows.value} rows and {rank} columns, expected multiples of the "
            f"blocks {list(block)} to keep them"
        )
    tiles = HeadRows(key=rows.key // block[0], value=rows.value // block[0])
    if scales.shape[1:] != (rank // block[1],):
        raise FinishError(f"kv_b_proj: scales are {list(scales.shape)}, expected {rank // block[1]} columns")
    by_head, scales_by_head = _by_head(weight, rows), _by_head(scales, tiles)
    if by_head.shape[0] != scales_by_head.shape[0]:
        raise FinishError(
            f"kv_b_proj: {by_head.shape[0]} heads, and scales of {scales_by_head.shape[0]}, expected as many"
        )
    return SplitBlocks(
        w_kc=_own(by_head[:, : rows.key].transpose(1, 2)),
        w_vc=_own(by_head[:, rows.key :]),
        w_scale_k=_own(scales_by_head[:, : tiles.key].transpose(1, 2)),
        w_scale_v=_own(scales_by_head[:, tiles.key :]),
    )


def _own(view: torch.Tensor) -> torch.Tensor:
    """In order, in new memory: of a single head, what is in order already is a piece of the parameter."""
    return view.clone(memory_format=torch.contiguous_format)


def _by_head(matrix: torch.Tensor, rows: HeadRows) -> torch.Tensor:
    if matrix.dim() != 2 or matrix.shape[0] % rows.total:
        raise FinishError(
            f"kv_b_proj: is {list(matrix.shape)}, expected rows of whole heads, {rows.key} of a key and {rows.value} "
            "of a value each"
        )
    return matrix.reshape(-1, rows.total, matrix.shape[1])
