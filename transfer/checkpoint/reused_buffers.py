"""Marks on tensors whose memory their reader will fill again (L47).

Such a tensor is consumed before the next one is pulled, or copied with `own` before it is kept.
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "weightwire_reused"


def mark_reused(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor` and its storage, so that every view of that storage counts as marked too; returns `tensor`."""
    for carrier in (tensor, tensor.untyped_storage()):
        setattr(carrier, _ATTRIBUTE, True)
    return tensor


def is_reused(tensor: torch.Tensor) -> bool:
    """Whether the next pull may overwrite `tensor`."""
    return hasattr(tensor, _ATTRIBUTE) or hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be kept: `tensor` itself, or an unmarked copy if it is marked."""
    return tensor.clone() if is_reused(tensor) else tensor
