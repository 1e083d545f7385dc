"""Values without a checkpoint: small, finite and the same wherever a shell has as many elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LIMIT = 1e-3
_SEED = 1234
# Values are drawn in pieces of so many, so that no shell needs a second one beside it.
_PIECE = 1 << 22
# Torch converts no number to these: two values in a byte, and exponents alone.
_NOT_NUMBERS = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)


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
        if not shell.dtype.is_floating_point or shell.dtype in _NOT_NUMBERS:
            (flat.view(torch.uint8) if shell.dtype in _NOT_NUMBERS else flat).zero_()
            continue
        generator = torch.Generator().manual_seed(seed)
        for begin in range(0, flat.numel(), _PIECE):
            piece = flat[begin : begin + _PIECE]
            piece.copy_(_draw(piece.numel(), shell.dtype, generator))


def _draw(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(count).uniform_(-LIMIT, LIMIT, generator=generator).to(dtype)
    return values.where(values.float().abs() <= LIMIT, torch.zeros((), dtype=dtype))
