"""Every dtype, shapes without elements or dimensions, strides and ties: the bytes come through as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.faults.checkpoints import BITS, check_saved, content, read_file, total_bytes, write_checkpoint
from tests.faults.processes import Json, Lab
from weightwire.service.client import Pulled, PullRequest, ServiceClient, pull, serving
from weightwire.transfer import ModelIdentity, Shells
from weightwire.transfer.dtypes import BY_TAG
from weightwire.transfer.errors import ManifestError

# F4 counts logical values, two to the byte.
EVERY_DTYPE = {f"of.{tag}": content(tag, 3, 8) for tag in BITS}
SCALARS = {f"scalar.{tag}": content(tag) for tag in BITS if tag != "F4"}
EMPTY = {
    "empty": content("F32", 0),
    "g_idx": content("I32", 0),
    "pad": content("F16", 2, 0),
    "a.empty.first": content("U8", 0, 5),
    "z.empty.last": content("BOOL", 0),
}
PACKED = {"qweight": content("U8", 64, 32), "qzeros": content("U8", 2, 32), "scales": content("F16", 2, 64)}
ALL = EVERY_DTYPE | SCALARS | EMPTY | PACKED

IDENTITY = ModelIdentity(model="org/model", revision="r1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("every"), ALL)


def test_pull_b08_b09_b10_brings_every_dtype_and_shape(served: Lab, folder: Path, tmp_path: Path) -> None:
    served.ready_source(folder)
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (total_bytes(ALL), 0)
    assert cast(Json, answer["tensors"])["identical"] == len(ALL)
    check_saved(tmp_path / "out", ALL)


def test_pull_b08_b09_b10_reads_every_dtype_and_shape_from_disk(served: Lab, folder: Path, tmp_path: Path) -> None:
    answer = served.pull("--checkpoint", folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, total_bytes(ALL))
    check_saved(tmp_path / "out", ALL)


def test_pull_mixes_peer_and_disk_for_every_dtype(served: Lab, folder: Path, tmp_path: Path) -> None:
    served.ready_source(folder, "--exclude", "*.U*", "--exclude", "empty", "--exclude", "*.F8_*")
    answer = served.pull("--checkpoint", folder, "--save", tmp_path / "out").finish().check(0)
    peer, disk = cast(int, answer["bytes_peer"]), cast(int, answer["bytes_disk"])
    assert peer + disk == total_bytes(ALL)
    assert min(peer, disk) > 0
    check_saved(tmp_path / "out", ALL)


def test_load_saves_every_dtype_and_shape(lab: Lab, folder: Path, tmp_path: Path) -> None:
    answer = lab.run("load", folder, "--save", tmp_path / "out", "--json").check(0)
    assert answer["bytes_read"] == total_bytes(ALL)
    check_saved(tmp_path / "out", ALL)


def test_saved_file_is_read_by_safetensors_as_torch_tensors(served: Lab, tmp_path: Path) -> None:
    """What the safetensors library itself can turn into torch tensors, it reads from our file as from the first."""
    known = {name: tensor for name, tensor in ALL.items() if tensor.tag not in ("F4", "F8_E8M0")}
    folder = write_checkpoint(tmp_path / "known", known)
    served.ready_source(folder)
    served.pull("--save", tmp_path / "out").finish().check(0)
    published, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "rank-0.safetensors")
    assert published.keys() == saved.keys()
    for name, tensor in published.items():
        assert (saved[name].dtype, saved[name].shape) == (tensor.dtype, tensor.shape)
        assert same_bits(saved[name], tensor), name


def test_export_holds_every_dtype_and_shape(served: Lab, folder: Path, tmp_path: Path) -> None:
    url = str(served.source(folder).line()["url"])
    exported = tmp_path / "export.safetensors"
    exported.write_bytes(httpx.get(f"{url}/v1/export.safetensors").content)
    assert read_file(exported) == ALL


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return bool(torch.equal(first, second))


def random_bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    words = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (words.numel() * words.itemsize,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def moved(lab: Lab, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> Pulled:
    """Serve `source` in small chunks, and pull it into `target`, in place."""
    held = Shells.from_tensors(source, IDENTITY, chunk_bytes=1 << 14)
    wanted = Shells.from_tensors(target)
    with ServiceClient(lab.service) as client, serving(client, held):
        return pull(client, PullRequest(model=IDENTITY.model, shells=wanted))


Layout: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS = [
    pytest.param(lambda t: t, id="row-major"),
    pytest.param(lambda t: t.t().contiguous().t(), id="transposed"),
    pytest.param(lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]], id="columns of a wider one"),
    pytest.param(lambda t: torch.stack([t, t], dim=2)[:, :, 1], id="every second element"),
    pytest.param(lambda t: torch.cat([t[:7], t])[7:], id="rows of a taller one"),
]


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
def test_pull_fills_strided_tensors_from_strided_ones(served: Lab, theirs: Layout, ours: Layout) -> None:
    values = random_bits(70, 1000, dtype=torch.bfloat16)
    source, target = theirs(values), ours(torch.zeros(70, 1000, dtype=torch.bfloat16))
    around = target.untyped_storage().nbytes()
    pulled = moved(served, {"w": source}, {"w": target})
    assert (pulled.result.bytes_peer, pulled.result.bytes_disk) == (values.nbytes, 0)
    assert same_bits(target, values)
    # What lies between the elements of a strided shell belongs to others.
    everything = torch.empty(0, dtype=torch.bfloat16).set_(target.untyped_storage(), 0, (around // 2,), (1,))
    assert int(everything.view(torch.int16).count_nonzero()) == int(values.view(torch.int16).count_nonzero())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(300, 64)
        self.block = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight


def test_pull_fills_a_module_in_place_and_its_tied_weight_once(served: Lab) -> None:
    torch.manual_seed(1)
    trained, fresh = Tied(), Tied()
    trained.norm(torch.randn(8, 64))
    pointers = {name: parameter.data_ptr() for name, parameter in fresh.state_dict().items()}
    held = Shells.from_module(trained, IDENTITY)
    with ServiceClient(served.service) as client, serving(client, held):
        pulled = pull(client, PullRequest(model=IDENTITY.model, shells=Shells.from_module(fresh)))
    once = {tensor.data_ptr(): tensor.nbytes for tensor in trained.state_dict().values()}
    assert pulled.result.bytes_peer == sum(once.values())
    for name, tensor in trained.state_dict().items():
        assert same_bits(fresh.state_dict()[name], tensor), name
    assert {name: parameter.data_ptr() for name, parameter in fresh.state_dict().items()} == pointers
    assert fresh.head.weight is fresh.embed.weight


def test_pull_b16_ties_what_the_source_holds_twice_and_equal(served: Lab) -> None:
    values = random_bits(50, 20)
    weight = torch.zeros(50, 20)
    pulled = moved(served, {"embed": values, "head": values.clone()}, {"embed": weight, "head": weight})
    assert pulled.result.bytes_peer == values.nbytes
    assert same_bits(weight, values)


def test_pull_b16_fills_both_where_only_the_source_ties(served: Lab) -> None:
    values = random_bits(50, 20)
    target = {"embed": torch.zeros(50, 20), "head": torch.zeros(50, 20)}
    pulled = moved(served, {"embed": values, "head": values}, target)
    assert pulled.result.bytes_peer == 2 * values.nbytes
    assert all(same_bits(tensor, values) for tensor in target.values())


def test_pull_fills_views_that_share_one_allocation(served: Lab) -> None:
    """A fused weight, of which the parts are tensors of their own."""
    values, fused = random_bits(12, 40), torch.zeros(12, 40)
    parts = {"q": slice(0, 8), "k": slice(8, 10), "v": slice(10, 12)}
    pulled = moved(
        served,
        {name: values[rows] for name, rows in parts.items()} | {"qkv": values},
        {name: fused[rows] for name, rows in parts.items()} | {"qkv": fused},
    )
    assert pulled.result.bytes_peer == values.nbytes
    assert same_bits(fused, values)


def test_shells_refuse_elements_that_share_memory() -> None:
    with pytest.raises(ManifestError, match=r"'w'.*elements share memory"):
        Shells.from_tensors({"w": torch.zeros(1, 4).expand(3, 4)})


def test_pull_takes_a_scalar_for_a_scalar_only(served: Lab) -> None:
    target = torch.zeros(2)
    with pytest.raises(ManifestError, match="'scale': shape is \\[\\] on the source, \\[2\\] on the target"):
        moved(served, {"scale": torch.tensor(1.5)}, {"scale": target})
    assert not target.any()


def test_every_dtype_that_may_travel_is_among_these() -> None:
    assert {tensor.tag for tensor in EVERY_DTYPE.values()} == BY_TAG.keys()
