"""Where the values of a loader's tensors come from: checkpoint tensors, shells, Python numbers, or somewhere else.

Tensors are known by their storages, which any chain of views keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightwire.transfer.shell_memory import ShellGroup, ShellMemory, storage_key

Number = bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """What the values of some tensors were made of.

    Attributes:
        names: Checkpoint tensors, by way of shells too.
        shells: Shells whose values were read.
    """

    names: frozenset[str] = frozenset()
    shells: frozenset[ShellGroup] = frozenset()

    def __or__(self, other: Origins) -> Origins:
        return Origins(names=self.names | other.names, shells=self.shells | other.shells)


NOTHING = Origins()


class Provenance:
    """What is known about the tensors of one run; whatever is known of is kept alive, since addresses recur."""

    def __init__(self, memory: ShellMemory, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._memory = memory
        pairs = list(checkpoint)
        # The loader may let go of its tensors, and make them views of others.
        self._alive = [tensor.detach() for _, tensor in pairs]
        self._sources = {storage_key(tensor): (name, tensor.dtype) for name, tensor in pairs}
        self._computed: dict[int, Origins] = {}
        # Scalars without data that Python numbers were made into.
        self._numbers: dict[int, Number] = {}

    def source(self, tensor: torch.Tensor) -> tuple[str, torch.dtype] | None:
        """Name and dtype of the checkpoint tensor that a tensor is a view of; None if it was written to."""
        key = storage_key(tensor)
        return None if key in self._computed else self._sources.get(key)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are, or come from, those of checkpoint tensors and shells."""
        key = storage_key(tensor)
        return key in self._sources or key in self._computed or key in self._memory

    def origins(self, tensors: Iterable[torch.Tensor]) -> Origins:
        """What tensors were made of."""
        found = NOTHING
        for tensor in tensors:
            key = storage_key(tensor)
            found |= self._computed.get(key, NOTHING)
            if key in self._sources:
                found |= Origins(names=frozenset((self._sources[key][0],)))
            if key in self._memory:
                groups = self._memory.touched(tensor)
                found |= Origins(
                    names=frozenset[str]().union(*(group.fed for group in groups)), shells=frozenset(groups)
                )
        return found

    def note_computed(self, tensor: torch.Tensor, origins: Origins) -> None:
        """A tensor was made, or written to, by something else than a copy."""
        key = storage_key(tensor)
        if key not in self._computed:
            self._alive.append(tensor.detach())
        self._computed[key] = self._computed.get(key, NOTHING) | origins
        self._numbers.pop(key, None)

    def note_number(self, tensor: torch.Tensor, value: Number) -> None:
        """A scalar without data has this value, until it is written to."""
        self.note_computed(tensor, NOTHING)
        self._numbers[storage_key(tensor)] = value

    def number(self, tensor: torch.Tensor) -> Number | complex | None:
        """The value of a scalar that has nothing to do with the checkpoint: what `shell[rows] = 0` is made of."""
        key = storage_key(tensor)
        if key in self._numbers:
            return self._numbers[key]
        return tensor.item() if not (tensor.dim() or tensor.is_meta or self.is_known(tensor)) else None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def written_by(func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The arguments that an operator writes to, by its schema."""
    return [
        tensor
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
    ]
