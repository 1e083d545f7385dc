"""Values without a checkpoint: small, finite and the same wherever a shell has as many elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightwire.transfer.dtypes import is_packed

LIMIT = 1e-3
_SEED = 1234
# Values are drawn in pieces of so many, so that no shell needs a second one beside it.
_PIECE = 1 << 22


def fill_dummy(shells: Iterable[torch.Tensor], *, seed: int = _SEED) -> None:
    """Give float shells reproducible values in [-1e-3, 1e-3], and all others zeros.

    The values depend on element count, dtype and seed alone: not on names, ranks or the order of shells. Where rounding
    to a dtype with few values (most float8 kinds) would leave the range, there is a zero.

    Args:
        shells: Contiguous, on any device; written in place.
        seed: Of the generator that is started anew for each shell.
    """
    for shell in shells:
        flat = shell.detach().view(-1)
        if not shell.dtype.is_floating_point or not _holds_numbers(shell.dtype):
            (flat if _holds_numbers(shell.dtype) else flat.view(torch.uint8)).zero_()
            continue
        generator = torch.Generator().manual_seed(seed)
        for begin in range(0, flat.numel(), _PIECE):
            piece = flat[begin : begin + _PIECE]
            piece.copy_(_draw(piece.numel(), shell.dtype, generator))


def _holds_numbers(dtype: torch.dtype) -> bool:
    """Whether torch converts numbers to a dtype: not to several values in a byte, nor to exponents alone."""
    return not is_packed(dtype) and str(dtype) != "torch.float8_e8m0fnu"


def _draw(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(count).uniform_(-LIMIT, LIMIT, generator=generator).to(dtype)
    return values.where(values.float().abs() <= LIMIT, torch.zeros((), dtype=dtype))
