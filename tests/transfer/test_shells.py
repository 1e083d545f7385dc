"""Shells: a manifest tied to memory, bit for bit, whatever the dtype and the strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.conftest import bits, filled, views_of
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import DtypeError, ManifestError, NotFoundError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells

DTYPES = pytest.mark.parametrize("dtype", sorted(BY_NAME))
POISON = 0xAB


def joined(views: list[memoryview]) -> bytes:
    return b"".join(views)


def memory_of(shells: Shells) -> bytes:
    return joined(shells.views(0, shells.manifest.total_bytes))


def digest(raw: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(raw)


# Views, gather, scatter


@DTYPES
def test_b10_tensor_is_a_view_of_the_same_memory_with_the_same_strides(dtype: str) -> None:
    tensors = views_of(dtype)
    shells = Shells.from_tensors(tensors)
    assert [name for name, _ in shells.tensors()] == list(tensors)
    for name, tensor in tensors.items():
        found = shells.tensor(name)
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel():
            assert found.data_ptr() == tensor.data_ptr()


@DTYPES
def test_gather_gives_the_bytes_of_every_view_in_row_major_order(dtype: str) -> None:
    tensors = views_of(dtype)
    shells = Shells.from_tensors(tensors)
    for name, tensor in tensors.items():
        region = shells.manifest.flat_region(shells.manifest.by_name[name])
        assert joined(shells.gather(region)) == bits(tensor), name
        for begin, end in itertools.combinations(range(0, region.numel + 1, 7), 2):
            assert joined(shells.gather(region, begin, end)) == bits(tensor)[begin:end], (name, begin, end)


@DTYPES
def test_gathered_pieces_can_be_hashed_and_sent_as_they_are(dtype: str) -> None:
    shells = Shells.from_tensors(views_of(dtype))
    for tensor in shells.manifest.tensors:
        for view in shells.gather(shells.manifest.flat_region(tensor)):
            assert view.c_contiguous
            assert (view.format, view.ndim) == ("B", 1)


@DTYPES
def test_scatter_writes_every_view_and_nothing_beside_it(dtype: str) -> None:
    tensors = views_of(dtype)
    shells = Shells.allocate(Shells.from_tensors(tensors).manifest)
    for name, tensor in tensors.items():
        shells.fill(POISON)
        region = shells.manifest.flat_region(shells.manifest.by_name[name])
        raw = bytearray(bits(tensor))
        for begin in range(0, len(raw), 7):
            shells.scatter(memoryview(raw)[begin : begin + 7], region, begin)
        assert bits(shells.tensor(name)) == raw, name
        written = {i for start, length in region.runs() for i in range(start, start + length)}
        assert {byte for i, byte in enumerate(memory_of(shells)) if i not in written} <= {POISON}, name


def test_gather_of_a_contiguous_region_is_no_copy() -> None:
    tensor = filled("float32", (4, 4))
    shells = Shells.from_tensors({"t": tensor})
    (view,) = shells.gather(shells.manifest.flat_region(shells.manifest.tensors[0]), 4, 12)
    view[:] = bytes(range(8))
    assert bits(tensor)[4:12] == bytes(range(8))


@pytest.mark.parametrize("name", [name for name, view in views_of("uint8").items() if view.numel()])
def test_box_is_the_region_as_torch_sees_it(name: str) -> None:
    tensor = views_of("uint8")[name]
    shells = Shells.from_tensors({"before": filled("uint8", (3,)), name: tensor})
    region = shells.manifest.by_name[name].region
    box = shells.box(region.shifted(shells.manifest.storage_bases[1]))
    assert bits(box) == bits(tensor)
    assert box.data_ptr() == tensor.data_ptr()


@st.composite
def storages(draw: st.DrawFn) -> Shells:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    numbers = itertools.count()
    return Shells(
        Manifest(model="", revision="", storages=tuple(sizes), tensors=()),
        [torch.tensor([next(numbers) for _ in range(size)], dtype=torch.uint8) for size in sizes],
    )


@given(storages(), st.data())
def test_views_are_the_memory_behind_an_interval(shells: Shells, data: st.DataObject) -> None:
    total = shells.manifest.total_bytes
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    views = shells.views(begin, end)
    assert joined(views) == bytes(range(begin, end))
    assert all(len(view) and not view.readonly for view in views)
    for view in views:
        view[:] = bytes(len(view))
    assert memory_of(shells) == bytes(range(begin)) + bytes(end - begin) + bytes(range(end, total))


@given(storages(), st.data())
def test_gather_and_scatter_of_a_contiguous_region_cross_storages(shells: Shells, data: st.DataObject) -> None:
    total = shells.manifest.total_bytes
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    region = Region(offset=begin, shape=(end - begin,), strides=(1,))
    assert joined(shells.gather(region)) == bytes(range(begin, end))
    shells.scatter(memoryview(bytearray(end - begin)), region, 0)
    assert memory_of(shells) == bytes(range(begin)) + bytes(end - begin) + bytes(range(end, total))


# Digests


@DTYPES
def test_digest_is_that_of_the_elements_bytes(dtype: str) -> None:
    tensors = views_of(dtype)
    sealed = Shells.from_tensors(tensors, chunk_bytes=16).seal()
    assert {tensor.name: tensor.digest for tensor in sealed.tensors} == {
        name: digest(bits(tensor)) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("chunk_bytes", [1, 3, 8, 64, 1 << 20])
def test_seal_hashes_each_chunk_of_the_flat_space(chunk_bytes: int) -> None:
    tensors = {"a": filled("float32", (5,)), "b": filled("uint8", (3,)), "c": filled("int64", (7, 3)).T}
    shells = Shells.from_tensors(tensors, chunk_bytes=chunk_bytes)
    sealed = shells.seal()
    raw = memory_of(shells)
    chunks = [raw[begin:end] for begin, end in itertools.pairwise(sealed.chunk_bounds)]
    assert sealed.chunk_digests.hex() == "".join(map(digest, chunks))
    assert shells.manifest is sealed
    assert shells.seal() == sealed


def test_seal_tells_what_it_has_hashed() -> None:
    told: list[int] = []
    shells = Shells.from_tensors({"a": filled("uint8", (20,)), "b": filled("uint8", (3,))}, chunk_bytes=8)
    shells.seal(told.append)
    assert told == [8, 8, 4, 3]


def test_seal_of_nothing_is_a_manifest_without_digests() -> None:
    sealed = Shells.from_tensors({"none": torch.empty(0, dtype=torch.int32)}).seal()
    assert sealed.chunk_digests == b""
    assert sealed.tensors[0].digest == digest(b"")
    assert Shells.from_tensors({}).seal().total_bytes == 0


def test_digest_follows_the_memory() -> None:
    tensor = filled("float32", (4,))
    shells = Shells.from_tensors({"t": tensor})
    before = shells.digest("t")
    tensor.zero_()
    assert shells.digest("t") == digest(bytes(16)) != before


# Modules


class Tied(torch.nn.Module):
    """Tied weights, a tied module, buffers of both kinds, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.norm
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)


def test_module_is_described_with_its_ties_and_without_what_no_checkpoint_holds() -> None:
    module = Tied()
    shells = Shells.from_module(module)
    assert {t.name for t in shells.manifest.tensors} == set(module.state_dict())
    entries = shells.manifest.by_name
    assert entries["head.weight"].storage == entries["embed.weight"].storage
    assert entries["again.running_mean"].storage == entries["norm.running_mean"].storage
    assert entries["embed.weight"].layout == entries["head.weight"].layout
    parameters = sum(p.nbytes for p in module.parameters())
    buffers = sum(b.nbytes for name, b in module.named_buffers() if name != "cache")
    assert shells.manifest.total_bytes == parameters + buffers


def test_module_gives_its_other_buffers_too_if_asked() -> None:
    shells = Shells.from_module(Tied(), non_persistent=True)
    assert "cache" in shells.manifest.by_name


def test_module_is_filled_in_place() -> None:
    module = Tied()
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}
    identities = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    shells = Shells.from_module(module)
    shells.fill(0)
    assert {name: t.data_ptr() for name, t in module.state_dict(keep_vars=True).items()} == before
    assert {name: id(t) for name, t in module.state_dict(keep_vars=True).items()} == identities
    assert module.head.weight is module.embed.weight
    assert all(p.requires_grad for p in module.parameters())
    assert all(not tensor.any() for tensor in module.state_dict().values())
    assert bits(module.get_buffer("cache")) != bytes(8)


def test_module_of_one_parameter_has_no_dot_in_its_name() -> None:
    assert [t.name for t in Shells.from_module(torch.nn.Linear(2, 2, bias=False)).manifest.tensors] == ["weight"]


# Cutting storages out of larger allocations


@DTYPES
def test_storage_is_cut_to_what_its_tensors_span(dtype: str) -> None:
    allocation = filled(dtype, (1000,))
    before, after = bits(allocation[:301]), bits(allocation[340:])
    tensors = {"a": allocation[301:310], "b": allocation[320:340:3]}
    shells = Shells.from_tensors(tensors)
    size = allocation.itemsize
    (storage,) = shells.manifest.storages
    assert 37 * size <= storage < 39 * size + 16
    assert {name: bits(t) for name, t in shells.tensors()} == {name: bits(t) for name, t in tensors.items()}
    for name in tensors:
        region = shells.manifest.flat_region(shells.manifest.by_name[name])
        assert joined(shells.gather(region)) == bits(tensors[name])
        shells.scatter(memoryview(bytearray(region.numel)), region, 0)
        assert bits(tensors[name]) == bytes(region.numel)
    assert (bits(allocation[:301]), bits(allocation[340:])) == (before, after)


def test_views_of_one_allocation_share_a_storage_and_move_once() -> None:
    qkv = filled("bfloat16", (6, 4))
    shells = Shells.from_tensors({"qkv": qkv, "q": qkv[:2], "k": qkv[2:4], "v": qkv[4:]})
    assert shells.manifest.storages == (48,)
    assert [shells.manifest.flat_region(t).offset for t in shells.manifest.tensors] == [0, 0, 16, 32]


def test_b08_empty_tensors_are_not_taken_for_one() -> None:
    tensors = {
        "w": filled("float32", (4,)),
        "g_idx": torch.empty(0, dtype=torch.int32),
        "pad": torch.empty(2, 0, dtype=torch.float16),
        "slice": filled("float32", (9,))[5:5],
    }
    manifest = Shells.from_tensors(tensors).manifest
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    assert manifest.total_bytes == 16


# What is refused


def expanded() -> torch.Tensor:
    return torch.zeros(1, 3).expand(4, 3)


def freed() -> torch.Tensor:
    """What a sharded or sleeping engine leaves: a tensor whose memory was given back."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.zeros(2, device="meta"), "device meta"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "lazily conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
    "lazily negated": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "negated"),
    "expanded": (expanded, "share memory"),
    "overlapping": (lambda: torch.zeros(6).as_strided((3, 3), (1, 1)), "share memory"),
    "freed": (freed, "storage of 0 bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensor_that_is_not_plain_memory_is_refused_by_name(kind: str) -> None:
    make, expected = REFUSED[kind]
    with pytest.raises(ManifestError, match=expected) as caught:
        Shells.from_tensors({"fine": torch.zeros(2), "layer.0/x": make()})
    assert "'layer.0/x'" in str(caught.value)
    assert caught.value.facts["tensor"] == "layer.0/x"


def test_freed_memory_is_not_allocated_again_by_looking_at_it() -> None:
    tensor = freed()
    with pytest.raises(ManifestError):
        Shells.from_tensors({"t": tensor})
    assert tensor.untyped_storage().nbytes() == 0


def test_dtype_that_may_not_travel_is_refused() -> None:
    with pytest.raises(DtypeError, match="complex128"):
        Shells.from_tensors({"t": torch.zeros(2, dtype=torch.complex128)})


def test_module_on_meta_is_refused() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ManifestError, match="'weight'"):
        Shells.from_module(module)


def test_storages_that_are_not_the_manifests_are_refused() -> None:
    manifest = Manifest(model="", revision="", storages=(4,), tensors=())
    with pytest.raises(ManifestError, match=r"\(5,\)"):
        Shells(manifest, [torch.zeros(5, dtype=torch.uint8)])
    with pytest.raises(ManifestError):
        Shells(manifest, [])


def test_unknown_tensor_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="'x'"):
        Shells.from_tensors({"t": torch.zeros(2)}).tensor("x")


# Allocating, naming


def test_allocated_shells_have_the_layout_and_the_ties_but_no_digests() -> None:
    weight = filled("float32", (3, 4))
    sealed = Shells.from_tensors({"a": weight, "b": weight, "t": weight.T}).seal()
    shells = Shells.allocate(sealed)
    assert shells.manifest == replace(
        sealed, chunk_digests=b"", tensors=tuple(replace(t, digest="") for t in sealed.tensors)
    )
    shells.tensor("a").copy_(weight)
    assert torch.equal(shells.tensor("b"), weight)
    assert torch.equal(shells.tensor("t"), weight.T)
    assert shells.seal() == sealed


def test_identify_says_whose_copy_it_is_and_keeps_the_rest() -> None:
    shells = Shells.from_tensors({"t": filled("int8", (3,))}, ModelIdentity(model="", topology=Topology(tp=2), rank=1))
    before = shells.seal()
    shells.identify(ModelIdentity(model="org/name", revision="r", config="{}"))
    assert shells.manifest == replace(before, model="org/name", revision="r", config="{}")


def test_allocated_memory_is_not_touched() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * 4096

    before = resident()
    shells = Shells.allocate(Manifest(model="", revision="", storages=(1 << 29,), tensors=()))
    assert resident() - before < 1 << 27
    assert shells.manifest.total_bytes == 1 << 29
