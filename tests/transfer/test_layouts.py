"""Layouts by checkpoint name, and of tensors as they lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.errors import ManifestError
from weightwire.transfer.layouts import Layout, ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement, place_whole
from weightwire.transfer.regions import Region, row_major
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
    assert [t.placement for t in layout.tensors] == [place_whole(t.name, row_major(t.shape)) for t in layout.tensors]


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
    with pytest.raises(ManifestError, match=r"2\^63"):
        plain_layout([CheckpointSpec(name="w", dtype="int8", shape=(2**40, 2**40))], IDENTITY)


# Layouts of tensors as they lie


def rows(name: str, begin: int, shell: torch.Tensor) -> PlacedPiece:
    """Rows of a checkpoint tensor as wide as the shell, from one on."""
    checkpoint = row_major(shell.shape, offset=begin * shell.shape[1])
    runtime = Region(offset=int(shell.storage_offset()), shape=tuple(shell.shape), strides=shell.stride())
    return PlacedPiece.of(name, checkpoint=checkpoint, runtime=runtime)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_layout_of_tensors_needs_no_memory_and_no_placement() -> None:
    weight = meta(4, 6)
    layout = Layout.of({"a": weight, "b": weight, "t": weight.t(), "c": meta(3)}, IDENTITY)
    assert layout.manifest.storages == (96, 12)
    assert [(t.name, t.storage, t.strides) for t in layout.manifest.tensors] == [
        ("a", 0, (6, 1)), ("b", 0, (6, 1)), ("t", 0, (1, 6)), ("c", 1, (1,)),
    ]  # fmt: skip
    # Each is taken for the checkpoint's tensor of its name, whole.
    for tensor in layout.manifest.tensors:
        assert tensor.placement == place_whole(tensor.name, tensor.region)
    with pytest.raises(ManifestError, match="tensor 'a': lies on device meta, expected cpu or cuda"):
        Shells.from_layout(layout)


def test_layout_says_what_lies_in_a_shell_that_begins_within_its_allocation() -> None:
    pool = torch.empty(1000)
    shell = pool[101:125].view(4, 6)
    zeros = PlacedConstant(runtime=Region(offset=119, shape=(6,), strides=(1,)), value=-0.0)
    placement = ShellPlacement(pieces=(rows("x", 2, shell[:3]),), constants=(zeros,))
    layout = Layout.of({"s": shell, "unknown": meta(2)}, IDENTITY, {"s": placement}, chunk_bytes=64)
    entry, unknown = layout.manifest.tensors
    assert layout.manifest.chunk_bytes == 64
    assert (entry.offset, entry.region.end) == (1, 25)
    assert [(p.name, p.checkpoint_offset, p.runtime_offset, p.numel) for p in entry.placement] == [("x", 12, 1, 18)]
    assert [(c.runtime.offset, c.runtime.numel, c.value.hex()) for c in entry.constants] == [(19, 6, "-0x0.0p+0")]
    assert not unknown.is_placed
    ((_, begin, end),) = layout.cuts[:1]
    assert (begin, end) == (400, 500)
    assert begin % 16 == 0


def test_shells_of_a_layout_are_the_tensors_themselves() -> None:
    pool = torch.zeros(100, dtype=torch.bfloat16)
    shells = Shells.from_layout(Layout.of({"a": pool[10:20], "b": pool[50:60:2]}, IDENTITY))
    shells.tensor("a").fill_(1)
    shells.tensor("b").fill_(2)
    assert pool.sum() == 20
    assert [int(at) for at in pool.nonzero()] == [*range(10, 20), *range(50, 60, 2)]


@given(st.floats(width=16, allow_nan=False), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@example(-0.0, torch.float32)
@example(1e-320, torch.float64)
def test_constants_are_filled_as_torch_fills(value: float, dtype: torch.dtype) -> None:
    shell = torch.full((3, 4), 7, dtype=dtype)
    inner = shell[1:, 2:]
    runtime = Region(offset=int(inner.storage_offset()), shape=tuple(inner.shape), strides=inner.stride())
    constant = PlacedConstant(runtime=runtime, value=value)
    shells = Shells.from_layout(Layout.of({"s": shell}, IDENTITY, {"s": ShellPlacement(constants=(constant,))}))
    shells.fill_constant("s", shells.manifest.tensors[0].constants[0])
    expected = torch.full((3, 4), 7, dtype=dtype)
    expected[1:, 2:].fill_(value)
    assert shell.view(torch.uint8).equal(expected.view(torch.uint8))


def test_layout_takes_fingerprints_by_name() -> None:
    layout = Layout.of({"a": meta(2), "b": meta(2)}, IDENTITY)
    described = layout.described({"a": "kernel", "nobody": "x"})
    assert [t.layout for t in described.manifest.tensors] == ["kernel", layout.manifest.tensors[1].layout]
    assert described.cuts is layout.cuts


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        pytest.param([], {"qkv": ["q", "k", "v"], "o": ["o"], "pad": []}, id="nothing"),
        pytest.param(["k"], {"qkv": ["q", "v"], "o": ["o"], "pad": []}, id="a part of a shell"),
        pytest.param(["o"], {"qkv": ["q", "k", "v"], "pad": []}, id="all of a shell"),
        pytest.param(["[qkv]", "x*"], {"o": ["o"], "pad": []}, id="all parts of a shell, by pattern"),
        pytest.param(["qkv", "O"], {"qkv": ["q", "k", "v"], "o": ["o"], "pad": []}, id="names of no checkpoint tensor"),
        pytest.param(["*"], {"pad": []}, id="everything"),
    ],
)
def test_layout_without_some_checkpoint_tensors_keeps_what_is_left(
    exclude: list[str], left: dict[str, list[str]]
) -> None:
    fused, own, padding = meta(6, 2), meta(2, 2), meta(2, 2)
    zeros = PlacedConstant(runtime=row_major((4,)), value=0.0)
    layout = Layout.of(
        {"qkv": fused, "o": own, "pad": padding},
        IDENTITY,
        {
            "qkv": ShellPlacement(
                pieces=tuple(rows(n, 0, fused[at : at + 2]) for n, at in (("q", 0), ("k", 2), ("v", 4)))
            ),
            "o": ShellPlacement(pieces=(rows("o", 0, own),)),
            "pad": ShellPlacement(constants=(zeros,)),
        },
    ).without(exclude)
    found = {tensor.name: [piece.name for piece in tensor.placement] for tensor in layout.manifest.tensors}
    assert found == left
    # Storages stay: what is not published is in nobody's way.
    assert layout.manifest.storages == (48, 16, 16)
