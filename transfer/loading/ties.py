"""Memory that a module has under several names: what a checkpoint says of it under each has to be the same.

Otherwise the one that is loaded later would win, and nothing would be said about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightwire.transfer.errors import SlotsError
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.loading.base_loaders import loader_of
from weightwire.transfer.loading.landing import fill_slot
from weightwire.transfer.loading.slots import attach_loader


class FilledMemory:
    """Which memory was filled during one load, and under which names."""

    def __init__(self) -> None:
        # By storage. Shells keep theirs alive, so that its descriptor's address stays its own.
        self._shells: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self._spans: defaultdict[int, IntervalSet] = defaultdict(IntervalSet)

    def others(self, name: str, shell: torch.Tensor) -> tuple[str, ...]:
        """The other names under which memory of this shell may have been filled before."""
        begin, end = _span(shell)
        storage = _storage(shell)
        # Asked of every shell of a model, and thousands of them may lie in one storage.
        if next(self._spans[storage].missing(begin, end), None) == (begin, end):
            return ()
        spans = {other: _span(filled) for other, filled in self._shells[storage].items() if other != name}
        return tuple(other for other, (first, last) in spans.items() if first < end and begin < last)

    @contextmanager
    def filling(self, name: str, shell: torch.Tensor) -> Iterator[None]:
        """Let the body fill a shell, and see to it that this changes nothing of what other names gave.

        Takes the memory of the shells in question once more, while the body runs. On meta nothing is compared.

        Args:
            name: Checkpoint name of what the body loads.
            shell: Where it goes.

        Raises:
            SlotsError: If it does; what the earlier name gave is there again.
        """
        shells = self._shells[_storage(shell)]
        before = {other: shells[other].detach().clone() for other in self.others(name, shell)}
        yield
        for other, given in before.items():
            if not shell.is_meta and not _is_same(shells[other], given):
                with torch.no_grad():
                    shells[other].copy_(given)
                raise _refusal(other, name)
        self.note(name, shell)

    def note(self, name: str, shell: torch.Tensor) -> None:
        """Take down that a shell is filled now."""
        self._shells[_storage(shell)][name] = shell
        self._spans[_storage(shell)].add(*_span(shell))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a checkpoint gives for one shell.

    Attributes:
        name: Checkpoint name.
        shell: The whole of it is filled.
        tensor: The whole checkpoint tensor, on the CPU.
    """

    name: str
    shell: torch.Tensor
    tensor: torch.Tensor


def check_agreement(one: Given, other: Given) -> None:
    """Load two tensors into a copy of the memory that two shells share, to see whether they agree on it.

    Args:
        one: The shell itself is not touched.
        other: Likewise; its shell lies in the same storage.

    Raises:
        SlotsError: If they do not.
        PlacementError: If one of them does not fit its shell.
    """
    scratch = torch.empty(one.shell.untyped_storage().nbytes(), dtype=torch.uint8)
    filled = FilledMemory()
    for given in (one, other):
        shell = given.shell
        whole = scratch[: scratch.numel() // shell.itemsize * shell.itemsize].view(shell.dtype)
        copy = whole.as_strided(shell.shape, shell.stride(), shell.storage_offset())
        attach_loader(copy, loader_of(shell))
        with filled.filling(given.name, copy):
            fill_slot(copy, given.tensor, None, name=given.name)


def _storage(shell: torch.Tensor) -> int:
    return int(shell.untyped_storage()._cdata)


def _span(shell: torch.Tensor) -> tuple[int, int]:
    """First byte in the storage, and one past the last."""
    if not shell.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(shell.shape, shell.stride(), strict=True))
    begin = int(shell.storage_offset()) * shell.itemsize
    return begin, begin + (reach + 1) * shell.itemsize


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal, those of NaN too."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _refusal(first: str, second: str) -> SlotsError:
    return SlotsError(
        f"shell {first!r}: the checkpoint tensors {first!r} and {second!r} have different values for it, expected "
        "equal ones, since the model has the same memory under both names",
        refilled=[first],
        tensors=[first, second],
        diagnostic="D02",
    )
