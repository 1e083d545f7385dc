"""Results into memory that others already know: captured graphs, views, other processes."""

from __future__ import annotations

import torch

from weightwire.transfer.errors import FinishError


def bind_or_assign(target: torch.Tensor | None, source: torch.Tensor, *, name: str) -> torch.Tensor:
    """Copy `source` into `target`, which keeps address and strides; without a target `source` itself takes its place.

    A plain copy would repeat `[1, 3, 4]` along `[2, 3, 4]`, and cast without a word (L147).

    Args:
        target: Written in place; of any strides.
        source: As computed; shares no memory with a parameter.
        name: Of the target, for messages.

    Raises:
        FinishError: If shape, dtype or device differ; nothing was written.
    """
    if target is None:
        return source
    is_what, expected = (
        (f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")) for tensor in (source, target)
    )
    if is_what != expected:
        raise FinishError(f"tensor {name!r}: its new value is {is_what}, expected {expected}", tensor=name)
    with torch.no_grad():
        target.copy_(source)
    return target
