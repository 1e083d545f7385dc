"""Any topology fills any other over real sockets, as a load from disk would, and without the disk."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.topologies.instances import Instance, differing, pull_rank
from tests.topologies.models import MODELS, is_in_sample, pairs_of
from weightwire.transfer.manifest import Topology
from weightwire.transfer.shells import Shells

PAIRS = [
    pytest.param(
        name,
        source,
        target,
        id=f"{name}: {source} to {target}",
        marks=[] if is_in_sample(name, source, target) else [pytest.mark.every_pair],
    )
    for name in MODELS
    for source, target in pairs_of(name)
]


def test_every_topology_is_a_source_and_a_target_at_least_twice() -> None:
    for name, model in MODELS.items():
        pairs = pairs_of(name)
        assert len(set(pairs)) == len(pairs)
        for topology in model.topologies:
            assert min(2, len(model.topologies)) <= sum(source == topology for source, _ in pairs)
            assert min(2, len(model.topologies)) <= sum(target == topology for _, target in pairs)


@pytest.mark.parametrize(("name", "from_topology", "to_topology"), PAIRS)
def test_pulled_ranks_are_those_that_a_load_from_disk_makes(
    name: str,
    from_topology: Topology,
    to_topology: Topology,
    source: Callable[[str, Topology], Instance],
    loaded: Callable[[str, Topology, int], Shells],
) -> None:
    instance = source(name, from_topology)
    for rank in range(to_topology.world_size):
        shells, result = pull_rank(instance, to_topology, rank)
        assert differing(shells, loaded(name, to_topology, rank)) == []
        assert result.bytes_disk == 0
        assert result.tensors["disk"] == 0
        if from_topology == to_topology:
            assert result.tensors["reshard"] == 0
