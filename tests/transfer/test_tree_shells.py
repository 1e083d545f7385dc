"""Ranks of a topology: what their layouts say lies in them is what an ordinary load puts there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.checkpoints import DECODER, EXPERTS, decoder, write_checkpoint
from tests.transfer.conftest import bits
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import ConfigError, LoadError, TopologyError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_disk import identity_of
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.models import BuildOptions
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.tree_shells import build_rank, lay_out_tree

META = BuildOptions(device="meta")
TIED = {**DECODER, "tie_word_embeddings": True}


def saved(folder: Path, members: Mapping[str, object]) -> Path:
    """A checkpoint of random values that fits a config."""
    content = decoder(num_experts=4 if "num_experts" in members else 0)
    if members.get("tie_word_embeddings"):
        del content["lm_head.weight"]
    return write_checkpoint(folder, content, members)


def identity(folder: Path, topology: Topology, rank: int) -> ModelIdentity:
    with Checkpoint.open(folder) as checkpoint:
        known = identity_of(checkpoint, model="m")
    return ModelIdentity(
        model="m", config=known.config, checkpoint=known.checkpoint, topology=topology, rank=rank
    )  # fmt: skip


def view(memory: torch.Tensor, region: Region) -> torch.Tensor:
    return memory.flatten().as_strided(region.shape, region.strides, region.offset)


def composed(manifest: Manifest, checkpoint: Mapping[str, torch.Tensor]) -> Shells:
    """Shells made of what a manifest says lies in them."""
    shells = Shells.allocate(manifest)
    shells.fill(0xAB)
    for tensor in manifest.tensors:
        for piece in tensor.placement:
            storage = shells.tensor(tensor.name)
            whole = torch.empty(0, dtype=storage.dtype).set_(storage.untyped_storage())
            view(whole, piece.runtime).copy_(view(checkpoint[piece.name], piece.checkpoint))
        for constant in tensor.constants:
            shells.fill_constant(tensor.name, constant)
    return shells


@pytest.mark.parametrize(
    ("members", "topology"),
    [
        pytest.param(DECODER, Topology(), id="one rank"),
        pytest.param(DECODER, Topology(tp=4), id="more ranks than heads of keys"),
        pytest.param(DECODER, Topology(tp=2, pp=2), id="stages"),
        pytest.param(TIED, Topology(tp=2, pp=2), id="tied across stages"),
        pytest.param(EXPERTS, Topology(tp=2), id="experts cut"),
        pytest.param(EXPERTS, Topology(tp=4, ep=4), id="experts dealt"),
        pytest.param(EXPERTS, Topology(tp=4, ep=2), id="experts dealt and cut"),
    ],
)
def test_layout_says_of_every_element_what_an_ordinary_load_puts_there(
    tmp_path: Path, members: Mapping[str, object], topology: Topology
) -> None:
    folder = saved(tmp_path, members)
    content = load_file(folder / "model.safetensors")
    with TreeLoader(TreeRequest(folder=folder, topology=topology)) as loader:
        for rank in range(topology.world_size):
            _, found = build_rank(identity(folder, topology, rank), META)
            assert (found.opaque, found.uncovered) == ({}, {})
            loaded = loader.shells(loader.load(rank, Control(deadline_s=60)))
            assert [t.name for t in loaded.manifest.tensors] == [t.name for t in found.manifest.tensors]
            # Laid out on meta or in memory, a rank is the same.
            assert [(t.layout, t.placement, t.constants) for t in loaded.manifest.tensors] == [
                (t.layout, t.placement, t.constants) for t in found.manifest.tensors
            ]
            ours = composed(found.manifest, content)
            assert {name: bits(t) for name, t in ours.tensors()} == {name: bits(t) for name, t in loaded.tensors()}


def test_laying_out_a_tree_keeps_its_bytes(tmp_path: Path) -> None:
    topology = Topology(tp=2)
    folder = saved(tmp_path, DECODER)
    known = identity(folder, topology, 1)
    tree, found = build_rank(known)
    shells = Shells.from_layout(found.layout)
    shells.fill(0x5A)
    again = lay_out_tree(tree, known.checkpoint, known)
    assert again.manifest == found.manifest
    assert set(b"".join(shells.views(0, shells.manifest.total_bytes))) == {0x5A}


def test_shells_that_are_cut_have_fingerprints_of_their_own_and_whole_ones_have_one(tmp_path: Path) -> None:
    folder = saved(tmp_path, DECODER)

    def layouts(topology: Topology, rank: int) -> dict[str, str]:
        _, found = build_rank(identity(folder, topology, rank), META)
        return {tensor.name: tensor.layout for tensor in found.manifest.tensors}

    whole, half, other = layouts(Topology(), 0), layouts(Topology(tp=2), 0), layouts(Topology(tp=2), 1)
    norms = {name for name in whole if "norm" in name}
    assert norms
    assert {name for name in whole if whole[name] == half[name]} == norms
    # Parts of two ranks are two things, although they are cut alike.
    assert {name for name in half if half[name] == other[name]} == norms


def test_tensor_that_a_config_has_and_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {k: v for k, v in decoder().items() if "lm_head" not in k}, DECODER)
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        build_rank(identity(folder, Topology(), 0), META)


def test_model_of_no_config_or_of_no_such_topology_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'm': has no config\.json"):
        build_rank(ModelIdentity(model="m"), META)
    folder = saved(tmp_path, DECODER)
    with pytest.raises(TopologyError):
        build_rank(identity(folder, Topology(tp=3), 0), META)
