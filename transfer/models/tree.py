"""A model's parameters on one rank, and what is known about the names of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from weightwire.transfer.errors import TopologyError
from weightwire.transfer.loading.loop import UnexpectedPolicy, load_weights
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import LoadReport
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.models.building import AliasTable
from weightwire.transfer.models.config import ModelConfig
from weightwire.transfer.models.self_loading import StackedBlock
from weightwire.transfer.ranks import ALONE, ExpertPlacement, RankPlace

THE_ONLY_RANK = RankPlace(rank=0, tensor=ALONE, pipeline=ALONE, expert=ALONE, expert_tensor=ALONE)


class ParameterTree(nn.Module):
    """Shells of one rank, named as engines name them; no forward.

    A subclass makes its modules, then calls `seal`.

    Attributes:
        config: The model; None for a tree that is its checkpoint's names and nothing else.
        place: The rank.
        tables: What the checkpoint's names mean.
        placement: Which expert lies where; None for a dense model.
        aliases: Names that share a tensor, as built.
    """

    config: ModelConfig | None
    place: RankPlace
    tables: NameTables
    placement: ExpertPlacement | None
    aliases: AliasTable
    _resolver: Resolver

    def seal(self, tables: NameTables) -> None:
        """Take down the names of all shells, now that they are there."""
        self.tables = tables
        self.aliases = AliasTable.of(self)
        for module in self.modules():
            if isinstance(module, StackedBlock):
                module.seal(tables, self.placement, self.place.expert.rank)
        self._resolver = Resolver(tables, shells_of(self), self.placement, self.place.expert.rank)
        self.check_assembly()

    def resolver(self) -> Resolver:
        """Decides checkpoint names for this rank."""
        return self._resolver

    def load_weights(
        self, pairs: Iterable[Pair], *, central: bool = False, unexpected: UnexpectedPolicy = "refuse"
    ) -> LoadReport:
        """Fill every shell; see `weightwire.transfer.loading.loop.load_weights`."""
        return load_weights(self, pairs, central=central, unexpected=unexpected)

    def check_assembly(self) -> None:
        """Find errors in the wiring of stages before any file is opened (L87).

        Raises:
            TopologyError: If what this rank has is not what its place in the topology says.
        """
        tables, names = self.tables, self.state_dict(keep_vars=True).keys()
        paths = {name.rpartition(".")[0] for name in names}
        for path, owned in (
            (tables.embedding, tables.owns_embedding),
            (tables.final_norm, tables.owns_final_norm),
            (tables.head, tables.owns_head),
        ):
            if tables.num_layers and (path in paths) != owned:
                raise self._miswired(path, f"is {'absent' if owned else 'there'}")
        layers = {
            int(name.removeprefix(f"{tables.decoder}.").partition(".")[0])
            for name in names
            if name.startswith(f"{tables.decoder}.")
        }
        if tables.num_layers and layers != set(tables.layers):
            raise self._miswired(tables.decoder, f"has layers {sorted(layers)}, expected {list(tables.layers)}")

    def _miswired(self, path: str, what: str) -> TopologyError:
        stage = self.place.pipeline
        return TopologyError(
            f"{type(self).__name__}, rank {self.place.rank}, {path}: {what} on stage {stage.rank} of {stage.size}",
            model=type(self).__name__,
            rank=self.place.rank,
        )
