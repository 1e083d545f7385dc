"""A checkpoint in float32 of a model in bfloat16: converted by whoever loads it, and by nobody on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.topologies.instances import PATIENCE_S, POISON, Instance, differing, load_rank, pull_rank, serve_ranks
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CoverageError
from weightwire.transfer.filling import Origins, fill
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_disk import identity_of, load_checkpoint
from weightwire.transfer.manifest import Topology
from weightwire.transfer.shells import Shells
from weightwire.transfer.tree_shells import build_rank

TWO, FOUR = Topology(tp=2), Topology(tp=4)


@pytest.fixture(scope="module")
def wide(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with values that bfloat16 does not have."""
    folder, model = tmp_path_factory.mktemp("wide"), checkpoint("llama, wide")
    tensors = load_file(model / "model.safetensors")
    save_file({name: torch.randn(tensor.shape) for name, tensor in tensors.items()}, folder / "model.safetensors")
    members = json.loads((model / "config.json").read_text())
    assert "bfloat16" in (members.get("dtype"), members.get("torch_dtype"))
    (folder / "config.json").write_text(json.dumps(members))
    return folder


def pull_with_disk(folder: Path, origins: Origins, rank: int) -> tuple[Shells, int]:
    """One of four ranks, with the checkpoint beside it; and the bytes that came from it."""
    with Checkpoint.open(folder) as disk:
        known = identity_of(disk, model="m")
        identity = ModelIdentity(
            model="m",
            revision=known.revision,
            config=known.config,
            checkpoint=known.checkpoint,
            topology=FOUR,
            rank=rank,
        )
        _, layout = build_rank(identity)
        shells = Shells.from_layout(layout.layout)
        shells.fill(POISON)
        result = fill(shells, replace(origins, checkpoint=disk), control=Control(deadline_s=PATIENCE_S))
    return shells, result.bytes_disk


def test_what_both_sides_have_converted_moves_as_it_is(wide: Path) -> None:
    with contextlib.ExitStack() as stack:
        source = serve_ranks({rank: load_rank(wide, TWO, rank) for rank in range(2)}, stack)
        for rank in range(4):
            expected = load_rank(wide, FOUR, rank)
            assert differing(pull_rank(source, FOUR, rank)[0], expected) == []
            shells, from_disk = pull_with_disk(wide, source.origins(rank), rank)
            assert (differing(shells, expected), from_disk) == ([], 0)


def test_disk_alone_is_converted_like_a_load(wide: Path) -> None:
    for rank in range(4):
        shells, from_disk = pull_with_disk(wide, Origins(), rank)
        assert differing(shells, load_rank(wide, FOUR, rank)) == []
        assert from_disk > 0


def whole_source(wide: Path, stack: contextlib.ExitStack) -> Instance:
    """The checkpoint by its own names, in float32."""
    with Checkpoint.open(wide) as disk:
        held, _ = load_checkpoint(disk, identity_of(disk, model="m"), control=Control(deadline_s=PATIENCE_S))
    return serve_ranks({0: held}, stack)


def test_source_of_another_dtype_is_not_taken_from_and_not_in_the_way(wide: Path) -> None:
    with contextlib.ExitStack() as stack:
        source = whole_source(wide, stack)
        with pytest.raises(CoverageError, match="not on disk"):
            pull_rank(source, FOUR, 1)
        shells, from_disk = pull_with_disk(wide, source.origins(1), 1)
        assert differing(shells, load_rank(wide, FOUR, 1)) == []
        assert from_disk > 0


def test_source_of_another_dtype_is_no_hindrance_to_one_that_fits(wide: Path) -> None:
    with contextlib.ExitStack() as stack:
        plain, fitting = whole_source(wide, stack), serve_ranks({0: load_rank(wide, Topology(), 0)}, stack)
        both = [instance.origins(1) for instance in (plain, fitting)]
        origins = Origins(
            endpoints=[endpoint for one in both for endpoint in one.endpoints],
            manifests={digest: manifest for one in both for digest, manifest in one.manifests.items()},
        )
        shells, from_disk = pull_with_disk(wide, origins, 1)
        assert (differing(shells, load_rank(wide, FOUR, 1)), from_disk) == ([], 0)
