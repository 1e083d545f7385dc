"""Layouts by checkpoint name."""

from __future__ import annotations

import pytest
import torch

from weightwire.transfer.errors import ManifestError, RegionError
from weightwire.transfer.layouts import ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.shells import Shells

SPECS = (
    CheckpointSpec(name="w", dtype="bfloat16", shape=(3, 5)),
    CheckpointSpec(name="scale", dtype="float32", shape=()),
    CheckpointSpec(name="none", dtype="int32", shape=(2, 0)),
    CheckpointSpec(name="packed", dtype="uint8", shape=(4,)),
)
IDENTITY = ModelIdentity(
    model="org/name", revision="r", config="{}", checkpoint=SPECS, topology=Topology(tp=2), rank=1
)  # fmt: skip


def test_plain_layout_gives_each_tensor_a_storage_of_its_own() -> None:
    layout = plain_layout(SPECS, IDENTITY)
    assert layout.storages == (30, 4, 0, 4)
    assert [(t.name, t.dtype, t.shape, t.storage, t.offset) for t in layout.tensors] == [
        ("w", "bfloat16", (3, 5), 0, 0),
        ("scale", "float32", (), 1, 0),
        ("none", "int32", (2, 0), 2, 0),
        ("packed", "uint8", (4,), 3, 0),
    ]
    assert (layout.model, layout.revision, layout.config, layout.rank) == ("org/name", "r", "{}", 1)
    assert layout.checkpoint == SPECS
    assert layout.topology == Topology(tp=2)
    assert [t.placement[0].checkpoint for t in layout.tensors] == [t.region for t in layout.tensors]


def test_plain_layout_is_the_one_of_shells_made_of_the_same_tensors() -> None:
    """Or a target that allocates could not take bytes as they are from a source that loaded."""
    tensors = {
        "w": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scale": torch.zeros(()),
        "none": torch.zeros(2, 0, dtype=torch.int32),
        "packed": torch.zeros(4, dtype=torch.uint8),
    }
    assert Shells.from_tensors(tensors, IDENTITY).manifest == plain_layout(SPECS, IDENTITY)


def test_extended_layout_keeps_the_base_and_puts_what_it_lacks_behind() -> None:
    shells = Shells.from_tensors({"w": torch.zeros(3, 5, dtype=torch.bfloat16)}, IDENTITY)
    base = shells.seal()
    layout = extended_layout(base, SPECS)
    assert layout.storages == (30, 4, 0, 4)
    assert [t.name for t in layout.tensors] == ["w", "scale", "none", "packed"]
    assert [t.layout for t in layout.tensors[:1]] == [base.tensors[0].layout]
    assert layout.chunk_digests == b""
    assert {t.digest for t in layout.tensors} == {""}


def test_extended_layout_of_nothing_more_is_the_base_without_digests() -> None:
    base = plain_layout(SPECS, IDENTITY)
    assert extended_layout(base, SPECS) == base


def test_layout_of_a_name_twice_is_refused() -> None:
    with pytest.raises(ManifestError, match="listed twice"):
        plain_layout([SPECS[0], SPECS[0]], IDENTITY)


def test_layout_past_what_can_be_addressed_is_refused() -> None:
    with pytest.raises(RegionError, match=r"2\^63"):
        plain_layout([CheckpointSpec(name="w", dtype="int8", shape=(2**40, 2**40))], IDENTITY)
