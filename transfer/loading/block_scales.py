"""Values times the scale of their block: what an FP8 or INT8 matrix in blocks means."""

from __future__ import annotations

import torch

from weightwire.transfer.errors import PlacementError

Block = tuple[int, int]


def num_blocks(rows: int, cols: int, block: Block) -> Block:
    """Blocks on each axis; the last one of an axis may be partial."""
    return -(-rows // block[0]), -(-cols // block[1])


def expanded_scales(scales: torch.Tensor, shape: Block, block: Block) -> torch.Tensor:
    """One scale for each element, float32.

    The block comes from the configuration and is never guessed from shapes: 576 rows with 5 scales are blocks of 128
    and a partial one, not of 116.

    Args:
        scales: `[blocks of rows, blocks of columns]`.
        shape: Of the matrix.
        block: Rows and columns of one block.

    Raises:
        PlacementError: If there is not one scale for each block.
    """
    expected = num_blocks(*shape, block)
    if tuple(scales.shape) != expected:
        raise PlacementError(
            f"block scales: are {list(scales.shape)} for a matrix of {list(shape)}, expected {list(expected)} with "
            f"blocks of {list(block)}"
        )
    rows, cols = shape
    by_row = scales.to(torch.float32).repeat_interleave(block[0], dim=0)[:rows]
    return by_row.repeat_interleave(block[1], dim=1)[:, :cols]


def scale_blocks(matrix: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """`matrix` times its scales, in float32.

    Args:
        matrix: `[rows, cols]`, of any dtype that float32 holds exactly.
        scales: See `expanded_scales`.
        block: Rows and columns of one block.
    """
    return matrix.to(torch.float32) * expanded_scales(scales, (matrix.shape[0], matrix.shape[1]), block)
