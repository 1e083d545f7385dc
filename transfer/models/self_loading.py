"""Modules with fused parameters, which find the place of their own tensors when a walk hands these over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from weightwire.transfer.loading.landing import Landing, land_all
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.module_shells import shell_at, shells_of
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.ranks import ExpertPlacement


class StackedBlock(nn.Module):
    """A block whose checkpoint names differ from those of its shells: attention, MLP, experts.

    Holds no state between calls of `load_weights`: a stream may come back to a block.
    """

    _resolver: Resolver

    def seal(self, tables: NameTables, placement: ExpertPlacement | None, ep_rank: int) -> None:
        """Take down the names of the shells, once they are all there; arguments as of the tree's `Resolver`."""
        self._resolver = Resolver(_block_tables(tables), shells_of(self), placement, ep_rank)

    def load_weights(self, pairs: Iterable[Pair]) -> Iterator[Landing]:
        """See `SelfLoading.load_weights`."""
        for name, tensor in pairs:
            yield land_all(self._resolver.resolve_all(name), tensor, lambda target: shell_at(self, target))


def _block_tables(tables: NameTables) -> NameTables:
    """What is left to be decided below the root: renames, stages and ties were decided with the full name."""
    return replace(
        tables,
        layers=range(0),
        num_layers=0,
        owns_embedding=True,
        owns_final_norm=True,
        owns_head=True,
        tied=False,
        mapper=WeightsMapper(),
        skip_prefixes=(),
        skip_substrings=(),
        steps=None if tables.steps is None else tuple(step for step in tables.steps if not step.is_whole),
    )
