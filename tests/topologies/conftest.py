"""Checkpoints, their ranks, and the instances that serve them; each made once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.topologies.instances import Instance, load_rank, serve_ranks
from tests.topologies.models import MODELS
from weightwire.transfer.manifest import Topology
from weightwire.transfer.shells import Shells


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, by name."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        MODELS[name].save(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[[str, Topology, int], Shells]:
    """A rank as a load from disk makes it."""
    return cache(lambda name, topology, rank: load_rank(checkpoint(name), topology, rank))


# Of the module: their threads must not be there any more when tests of other packages look for some that were left.
@pytest.fixture(scope="module")
def source(loaded: Callable[[str, Topology, int], Shells]) -> Iterator[Callable[[str, Topology], Instance]]:
    """An instance that serves a model in a topology."""
    with contextlib.ExitStack() as stack:
        yield cache(
            lambda name, topology: serve_ranks(
                {rank: loaded(name, topology, rank) for rank in range(topology.world_size)}, stack
            )
        )
