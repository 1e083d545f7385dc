"""Building shells where they will stay: device and dtype contexts, the memory they take, names that share a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import torch
from torch import nn

from weightwire.transfer.errors import AdmissionError
from weightwire.transfer.loading.ledger import exempt_slots, exemption
from weightwire.transfer.loading.module_shells import replace_shell, shell_at
from weightwire.transfer.loading.slots import attach_loader, attached_loader

_MOST_BYTES = (1 << 63) - 1

Phase: TypeAlias = Literal["shells", "transfer", "post-process"]


@contextmanager
def build_defaults(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside lie on `device` and have `dtype` unless they say otherwise; both defaults come back (L84)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def memory_phase(phase: Phase, *, needed_bytes: int = 0) -> Iterator[None]:
    """Says in which phase the memory ran out (L85).

    Raises:
        AdmissionError: In place of an out-of-memory error of torch or Python, with `facts["phase"]`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise AdmissionError(
            f"phase {phase!r}: out of memory, {needed_bytes} bytes were planned for it: {error}",
            phase=phase,
            needed_bytes=needed_bytes,
            diagnostic="D12",
        ) from error


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    # torch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Bytes that one rank takes, stated before anything is allocated.

    Attributes:
        shells_bytes: Parameters and buffers, each tensor once.
        post_process_bytes: What finishing allocates besides.
        transfer_bytes: Buffers of readers and wires.
    """

    shells_bytes: int
    post_process_bytes: int = 0
    transfer_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module, *, post_process_bytes: int = 0, transfer_bytes: int = 0) -> Self:
        """The account of a model, which may be on meta; storages shared by several tensors count once."""
        sizes = {
            _storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers())
        }
        return cls(
            shells_bytes=sum(sizes.values()), post_process_bytes=post_process_bytes, transfer_bytes=transfer_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.shells_bytes + self.post_process_bytes + self.transfer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name whose tensor lies in the storage of another one.

    Attributes:
        name: The later name.
        of: The first name of that storage.
        view: Shape, strides and offset in elements where it is a view of its own; None where both names have the
            same tensor object.
    """

    name: str
    of: str
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


class AliasTable:
    """Ties and views of a model, recorded when it was built, to be made again after a step that replaces tensors."""

    def __init__(self, aliases: tuple[Alias, ...]) -> None:
        self.aliases = aliases

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Record every name whose storage an earlier name has; parameters come before buffers."""
        firsts, found = dict[int, tuple[str, torch.Tensor]](), list[Alias]()
        for name, tensor in _named_tensors(model):
            first, owner = firsts.setdefault(_storage_id(tensor), (name, tensor))
            if first == name:
                continue
            view = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            found.append(Alias(name=name, of=first, view=None if tensor is owner else view))
        return cls(tuple(found))

    @property
    def names(self) -> Mapping[str, str]:
        """Later name -> first name, of the names that have the very same tensor object."""
        return {alias.name: alias.of for alias in self.aliases if alias.view is None}

    def retie(self, model: nn.Module) -> None:
        """Give every later name the tensor, or a view of the storage, that its first name has now."""
        for alias in self.aliases:
            owner = shell_at(model, alias.of)
            if alias.view is not None:
                shape, strides, offset = alias.view
                owner = _like(shell_at(model, alias.name), owner.detach().as_strided(shape, strides, offset))
            replace_shell(model, alias.name, owner)


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Replace every tensor on meta by uninitialised memory on `device`; ties, views, loaders and marks survive (L89).

    No other tensor moves.
    """
    aliases = AliasTable.of(model)
    later = {alias.name for alias in aliases.aliases}
    for name, tensor in _named_tensors(model):
        if name not in later and tensor.is_meta:
            replace_shell(model, name, _like(tensor, _allocate(tensor, device)))
    aliases.retie(model)


def _allocate(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    # The whole storage, which later names may see more of than this one does.
    flat = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=device)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` as what `old` is in its module: a parameter or a buffer, with the same loader and marks."""
    made = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    loader, reason = attached_loader(old), exemption(old)
    if loader is not None:
        attach_loader(made, loader)
    if reason is not None:
        exempt_slots(made, reason)
    return made


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _storage_id(tensor: torch.Tensor) -> int:
    # On meta no storage has an address.
    address: int = tensor.untyped_storage()._cdata
    return address


def new_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter of the current default device and dtype that takes no gradient.

    Raises:
        AdmissionError: If no memory could ever hold it, and torch could not count its bytes.
    """
    needed = math.prod(shape) * (dtype or torch.get_default_dtype()).itemsize
    if needed > _MOST_BYTES:
        raise AdmissionError(
            f"a shell of shape {list(shape)}: needs {needed} bytes of memory", needed_bytes=needed, diagnostic="D12"
        )
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def planned_bytes(build: Callable[[], nn.Module], *, dtype: torch.dtype) -> MemoryAccount:
    """The account of what `build` makes, without making it: it runs on meta."""
    with build_defaults("meta", dtype):
        return MemoryAccount.of(build())
