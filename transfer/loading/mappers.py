"""Renames that are no matter of fusing: of an architecture, of a quantisation format, of a file's own habits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

Renames: TypeAlias = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMapper:
    """Three tables, applied in this order. In each the longest key that matches is applied once; None drops the name.

    Attributes:
        substrings: Replaced where found first, if found.
        prefixes: Replaced at the start. The empty key puts something in front of every name.
        suffixes: Replaced at the end.
    """

    substrings: Renames = field(default_factory=dict)
    prefixes: Renames = field(default_factory=dict)
    suffixes: Renames = field(default_factory=dict)

    def apply(self, name: str) -> str | None:
        """The new name, or None if the tensor is to be dropped. Applied to a new name it may rename once more."""
        for table, matches, at in (
            (self.substrings, str.__contains__, str.index),
            (self.prefixes, str.startswith, _at_start),
            (self.suffixes, str.endswith, _at_end),
        ):
            # Of several longest substrings the first one in the name: the order of a table decides nothing.
            keys = [key for key in table if matches(name, key)]
            if not keys:
                continue
            key = min(keys, key=lambda key: (-len(key), at(name, key)))
            value = table[key]
            if value is None:
                return None
            begin = at(name, key)
            name = name[:begin] + value + name[begin + len(key) :]
        return name

    def merged(self, other: WeightsMapper) -> WeightsMapper:
        """Both mappers in one; where they have the same key, `other` wins."""
        return WeightsMapper(
            substrings={**self.substrings, **other.substrings},
            prefixes={**self.prefixes, **other.prefixes},
            suffixes={**self.suffixes, **other.suffixes},
        )


def _at_start(_name: str, _key: str) -> int:
    return 0


def _at_end(name: str, key: str) -> int:
    return len(name) - len(key)


# From the instance of a model to its renames.
Remap: TypeAlias = Callable[[object], WeightsMapper]


class RemapRegistry:
    """Renames of architectures, by the name of the model's class."""

    __slots__ = ("_remaps",)

    def __init__(self) -> None:
        self._remaps: dict[str, Remap] = {}

    def registers(self, class_name: str) -> Callable[[Remap], Remap]:
        """Decorator for a function of the model's instance."""

        def register(remap: Remap) -> Remap:
            if class_name in self._remaps:
                raise ValueError(f"remap of {class_name!r}: is registered already")
            self._remaps[class_name] = remap
            return remap

        return register

    def find(self, model_class: type) -> Remap | None:
        """The remap of the class, or of its nearest ancestor that has one."""
        names = (ancestor.__name__ for ancestor in model_class.__mro__)
        return next((self._remaps[name] for name in names if name in self._remaps), None)


REMAPS = RemapRegistry()
registers_remap = REMAPS.registers
find_remap = REMAPS.find


@registers_remap("LlamaForCausalLM")
def llama_remap(_model: object) -> WeightsMapper:
    """FP8 checkpoints name the scales of Llama in two ways."""
    return WeightsMapper(suffixes={".activation_scale": ".input_scale", ".weight_scale_inv": ".weight_scale"})


@dataclass(frozen=True, slots=True)
class QuantisationNames:
    """Checkpoint names to runtime names, as a quantisation format has it.

    The quantisation's configuration holds one of these. Whoever creates shells for scales and whoever looks up
    checkpoint names ask the same one, so that a slot is never made under one name and sought under another.
    """

    mapper: WeightsMapper

    @classmethod
    def of(cls, model_class: type, config: Mapping[str, object]) -> Self:
        """Take the mapper from a model's class, before its shells are built.

        The class has a function `quantisation_mapper_for(config)`, or a table `quantisation_mapper`, or neither. The
        function wins, since it has seen the configuration.
        """
        from_config: Callable[[Mapping[str, object]], WeightsMapper] | None
        from_config = getattr(model_class, "quantisation_mapper_for", None)
        if from_config is not None:
            return cls(from_config(config))
        static: WeightsMapper | None = getattr(model_class, "quantisation_mapper", None)
        return cls(static or WeightsMapper())

    def runtime_name(self, name: str) -> str | None:
        """What a tensor of the checkpoint is called here; None if the format wants it dropped."""
        return self.mapper.apply(name)
