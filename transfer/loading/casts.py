"""Which dtype changes a shell accepts. A copy casts silently: 70000 becomes inf in fp16, a float an integer (L94)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weightwire.transfer.errors import PlacementError

_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """The casts that the description of a model, or a quantisation method, asked for.

    Attributes:
        allowed: Pairs of torch dtype names, (checkpoint, shell). Equal dtypes need no permission.
    """

    allowed: frozenset[tuple[str, str]] = frozenset()

    def check(self, name: str, source_dtype: torch.dtype, shell_dtype: torch.dtype) -> None:
        """Raise unless values may go from one dtype to the other.

        Raises:
            PlacementError: Naming the tensor and both dtypes.
        """
        if source_dtype == shell_dtype:
            return
        source, shell = dtype_name(source_dtype), dtype_name(shell_dtype)
        if (source, shell) not in self.allowed:
            known = ", ".join(sorted(taken for taken, given in self.allowed if given == shell)) or "none"
            raise PlacementError(
                f"tensor {name!r}: dtype is {source}, expected {shell} (casts declared to it: {known})",
                tensor=name,
                source_dtype=source,
                shell_dtype=shell,
            )

    def extended(self, pairs: Iterable[tuple[str, str]]) -> CastPolicy:
        """This policy and what a quantisation method asks for besides."""
        return CastPolicy(self.allowed | frozenset(pairs))


SAME_DTYPE = CastPolicy()


def float_casts(to: str) -> CastPolicy:
    """What a model description of dtype `to` declares: the casts between bf16, fp16 and fp32 that end there.

    Never from or to fp8 or integers: those mean something only together with their scales.

    Raises:
        ValueError: If `to` is none of the three.
    """
    if to not in _FLOATS:
        raise ValueError(f"dtype {to!r}: casts are declared to one of {_FLOATS}")
    return CastPolicy(frozenset((source, to) for source in _FLOATS if source != to))


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")
