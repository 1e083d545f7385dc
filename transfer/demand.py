"""How much of what the sources hold all ranks of a target need together, as one of them sees it.

A rank knows its own layout and none of the others', but all are cut alike: a tensor of which each of four ranks has a
quarter is needed once, and one that each has whole is needed four times. Tensors of one kind, such as those of all
layers or all experts, go by their average, so that the ranks find much the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weightwire.transfer.manifest import Manifest, TensorEntry, Topology
from weightwire.transfer.regions import Region
from weightwire.transfer.sharing import Holders

_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r".*?\.\d+(?=\.)")


class Kind(NamedTuple):
    """Checkpoint tensors that differ in the numbers of their layers and experts alone."""

    name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Kind:
        return cls(_NUMBER.sub("*", name), shape)


# By kind and dtype, for each set of sources the bytes that exactly these hold, each element once.
HeldKinds = Mapping[tuple[Kind, str], Mapping[Holders, int]]
Shapes = Mapping[str, tuple[int, ...]]


class _Use(NamedTuple):
    """What a rank's own tensors tell of a kind.

    Attributes:
        dtype: As which it is needed.
        copies: How many ranks of the target need each element, on the average.
        topologies: Whose ranks alone give it, because they have it in the same layout; empty if every holder may.
    """

    dtype: str
    copies: float
    topologies: frozenset[Topology]


class Demand:
    """What all ranks of a target take of the checkpoint, as far as the tensors of one rank tell."""

    def __init__(self, target: Manifest, shapes: Shapes, same: Callable[[TensorEntry], frozenset[Topology]]) -> None:
        """Args:
        target: The layout of the rank.
        shapes: Of the checkpoint tensors.
        same: Of one of its tensors, the topologies of the sources that have it in the same layout.
        """
        self._tp = target.topology.tp
        self._uses = _uses(target, shapes, same)
        self._by_shape = {kind.shape: use for kind, use in self._uses.items()}
        self._cut_alike = frozenset(
            topology for use in self._uses.values() for topology in use.topologies if topology.tp == target.topology.tp
        )

    def nbytes(self, held: HeldKinds, sources: Sequence[Manifest]) -> dict[Holders, float]:
        """For each set of sources the bytes that any of them may send, all ranks of the target taken together.

        Args:
            held: By the sources, numbered as in `sources`.
            sources: What they hold.
        """
        found: defaultdict[Holders, float] = defaultdict(float)
        for (kind, dtype), parts in held.items():
            use = self._uses.get(kind) or self._guessed(kind, dtype, _is_whole(parts, sources))
            for holders, nbytes in parts.items() if use.dtype == dtype else ():
                able = tuple(number for number in holders if sources[number].topology in use.topologies)
                found[able or holders] += nbytes * use.copies
        return dict(found)

    def _guessed(self, kind: Kind, dtype: str, is_whole: bool | None) -> _Use:
        """Of what only other stages have: whole on each of their ranks, or cut, as on the sources' ranks."""
        if is_whole:
            return _Use(dtype, self._tp, frozenset())
        # Where no source tells, as what looks the same, such as the embedding at the other end.
        like = self._by_shape.get(kind.shape) if is_whole is None else None
        return _Use(dtype, like.copies if like else 1, self._cut_alike)


def _is_whole(parts: Mapping[Holders, int], sources: Sequence[Manifest]) -> bool | None:
    """Whether the ranks of a stage have all elements each; None if no instance has more ranks than one in a stage."""
    found = [
        topology.tp <= min(len({sources[n].rank for n in some if sources[n].topology == topology}) for some in parts)
        for topology in {source.topology for source in sources if source.topology.tp > 1}
    ]
    return any(found) if found else None


def _uses(target: Manifest, shapes: Shapes, same: Callable[[TensorEntry], frozenset[Topology]]) -> dict[Kind, _Use]:
    kinds = {name: Kind.of(name, shape) for name, shape in shapes.items()}
    taken: Counter[Kind] = Counter()
    examples: dict[Kind, TensorEntry] = {}
    layers: set[str] = set()
    for tensor in _once_each(target):
        for piece in tensor.placement:
            if (kind := kinds.get(piece.name)) is not None:
                taken[kind] += piece.numel
                examples.setdefault(kind, tensor)
                layers.add(_layer_of(piece.name))
    # Only of the layers that are this stage's: of the others it is another stage's ranks that have a part.
    there: Counter[Kind] = Counter()
    for name, kind in kinds.items():
        if _layer_of(name) in layers:
            there[kind] += math.prod(kind.shape)
    return {
        kind: _Use(
            dtype=tensor.dtype,
            # Somebody needs it, even if this rank is one of those that got less.
            copies=max(1.0, target.topology.tp * taken[kind] / max(1, there[kind])),
            topologies=same(tensor),
        )
        for kind, tensor in examples.items()
    }


def _once_each(target: Manifest) -> Iterator[TensorEntry]:
    """The tensors, those that share a box of memory once."""
    found: set[Region] = set()
    for tensor in target.tensors:
        region = target.flat_region(tensor)
        if region not in found:
            found.add(region)
            yield tensor


def _layer_of(name: str) -> str:
    """What is on one stage together: a layer, or a tensor that is in none."""
    found = _LAYER.match(name)
    return found[0] if found else name
