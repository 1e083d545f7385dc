"""Regions of checkpoint tensors, read straight into views of shells."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.regions_on_disk import STEP_BYTES, DiskCopy, read_copies
from weightwire.transfer.control import Control
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import CancelledError, CheckpointError, PlacementError
from weightwire.transfer.regions import Region, row_major

Write = Callable[[Path, Mapping[str, tuple[str, list[int], bytes]]], Path]
BIG = (STEP_BYTES // 1024 * 5 // 2, 512)  # elements of two bytes: two and a half steps


def control() -> Control:
    return Control(deadline_s=60)


def region(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of one tensor that takes several steps, at an address that is aligned for int16."""
    tensor = torch.arange(BIG[0] * BIG[1], dtype=torch.int64).to(torch.int16).view(BIG)
    path = tmp_path_factory.mktemp("big") / "model.safetensors"
    header = b'{"w":{"dtype":"I16","shape":[%d,%d],"data_offsets":[0,%d]}}' % (*BIG, tensor.nbytes)
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw(tensor))
    return path.parent, tensor


CUTS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("the whole", lambda w: w),
    ("rows", lambda w: w[100:-100]),
    ("columns", lambda w: w[:, 64:128]),
    ("one column", lambda w: w[:, 7]),
    ("transposed columns", lambda w: w[:, 3:9].t()),
    ("every third row", lambda w: w[::3]),
    ("one row to many", lambda w: w[5].expand(100, -1)),
    ("one element", lambda w: w[17, 3]),
    ("no element", lambda w: w[3:3]),
]


@pytest.mark.parametrize("cut", [pytest.param(cut, id=name) for name, cut in CUTS])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_region_arrives_as_torch_would_cut_it(
    big: tuple[Path, torch.Tensor], cut: Callable[[torch.Tensor], torch.Tensor], threads: int
) -> None:
    folder, tensor = big
    expected = cut(tensor)
    target, seen = torch.full(expected.shape, -1, dtype=torch.int16), list[int]()
    with Checkpoint.open(folder) as checkpoint:
        copy = DiskCopy(name="w", source=region(expected), target=target)
        count = read_copies(checkpoint, [copy], control=control(), threads=threads, on_bytes=seen.append)
    assert target.equal(expected)
    assert count == sum(seen) == expected.numel() * 2


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_into_any_box(tmp_path: Path, write_tensors: Write, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    content = os.urandom(shape[0] * shape[1] * shape[2] * 4)
    write_tensors(tmp_path / "model.safetensors", {"w": ("I32", list(shape), content)})
    whole = torch.frombuffer(bytearray(content), dtype=torch.int32).view(shape)
    slices = []
    for size in shape:
        begin = data.draw(st.integers(0, size))
        slices.append(slice(begin, data.draw(st.integers(begin, size))))
    order = data.draw(st.permutations(range(3)))
    expected = whole[tuple(slices)].permute(order)
    memory = torch.zeros([size + 2 for size in expected.shape], dtype=torch.int32)
    target = memory[tuple(slice(1, size + 1) for size in expected.shape)]
    with Checkpoint.open(tmp_path) as checkpoint:
        read_copies(checkpoint, [DiskCopy(name="w", source=region(expected), target=target)], control=control())
    assert target.equal(expected)
    assert memory.count_nonzero() == expected.count_nonzero()


@pytest.mark.parametrize("pad", range(4))
def test_b11_data_that_is_not_aligned_is_read_and_converted(
    tmp_path: Path, write_raw: Callable[[Path, object, bytes], Path], pad: int
) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8 + pad)
    payload = torch.tensor([1.0, 2.0]).numpy().tobytes()
    write_raw(tmp_path / "model.safetensors", header, payload)
    narrow, one = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    with Checkpoint.open(tmp_path) as checkpoint:
        copies = [DiskCopy(name="w", source=row_major((2,)), target=target) for target in (narrow, one)]
        read_copies(checkpoint, copies, control=control())
    assert narrow.tolist() == one.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_keeps_its_bits(tmp_path: Path, write_tensors: Write, name: str) -> None:
    dtype = BY_NAME[name]
    content = bytes(byte % 2 for byte in os.urandom(32)) if name == "bool" else os.urandom(32)
    elements = 32 // dtype.itemsize
    write_tensors(tmp_path / "model.safetensors", {"w": (dtype.tag, [elements * dtype.packing], content)})
    target = torch.zeros(32, dtype=torch.uint8).view(dtype.torch_dtype)
    with Checkpoint.open(tmp_path) as checkpoint:
        read_copies(checkpoint, [DiskCopy(name="w", source=row_major((elements,)), target=target)], control=control())
    assert raw(target) == content


# L35
def test_nothing_but_the_region_is_read(big: tuple[Path, torch.Tensor]) -> None:
    folder, tensor = big
    target = torch.empty(10, 512, dtype=torch.int16)
    with Checkpoint.open(folder) as checkpoint:
        read_copies(checkpoint, [DiskCopy(name="w", source=region(tensor[20:30]), target=target)], control=control())
        assert checkpoint.bytes_read == target.nbytes


def test_a_region_outside_its_tensor_is_refused_before_a_read(big: tuple[Path, torch.Tensor]) -> None:
    folder, tensor = big
    inside, outside = torch.full((1, 512), -1, dtype=torch.int16), torch.empty(2, 512, dtype=torch.int16)
    copies = [
        DiskCopy(name="w", source=region(tensor[:1]), target=inside),
        DiskCopy(name="w", source=row_major((2, 512), offset=tensor.numel() - 512), target=outside),
    ]
    with Checkpoint.open(folder) as checkpoint, pytest.raises(PlacementError, match=r"tensor 'w': region .* ends at"):
        read_copies(checkpoint, copies, control=control())
    assert inside.eq(-1).all()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"region of shape \[2\] for a target of shape \[3\]"):
        DiskCopy(name="w", source=row_major((2,)), target=torch.empty(3))


@pytest.mark.parametrize("columns", [slice(None), slice(0, 3)], ids=["by reads", "by a mapping"])
def test_a_file_that_changed_is_refused(tmp_path: Path, write_tensors: Write, columns: slice) -> None:
    path = write_tensors(tmp_path / "model.safetensors", {"w": ("U8", [4, 8], bytes(range(32)))})
    whole = torch.arange(32, dtype=torch.uint8).view(4, 8)[:, columns]
    with Checkpoint.open(tmp_path) as checkpoint:
        path.write_bytes(path.read_bytes()[:-8])
        copy = DiskCopy(name="w", source=region(whole), target=torch.empty(whole.shape, dtype=torch.uint8))
        with pytest.raises(CheckpointError, match="changed on disk"):
            read_copies(checkpoint, [copy], control=control())


def test_a_stopped_load_reads_no_further(big: tuple[Path, torch.Tensor]) -> None:
    folder, tensor = big
    stopping = Control(deadline_s=60)
    target, seen = torch.empty_like(tensor), list[int]()

    def stop(count: int) -> None:
        seen.append(count)
        stopping.cancel("enough")

    copy = DiskCopy(name="w", source=region(tensor), target=target)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CancelledError, match="enough"):
        read_copies(checkpoint, [copy], control=stopping, threads=1, on_bytes=stop)
    assert len(seen) == 1
