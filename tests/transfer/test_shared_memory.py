"""Storages in files without a name: allocated there, moved there in place, and mapped by whoever has the descriptor."""

from __future__ import annotations

import gc
import os
from collections import namedtuple

import pytest
import torch

from tests.transfer.conftest import bits, views_of
from weightwire.transfer.errors import AdmissionError
from weightwire.transfer.shared_memory import SharedFiles, allocate_storages, open_storages
from weightwire.transfer.shells import Shells


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def seen_elsewhere(files: SharedFiles) -> list[bytes]:
    return [storage.numpy().tobytes() for storage in open_storages(files)]


def test_allocated_storages_are_seen_through_their_descriptor() -> None:
    storages, files = allocate_storages((5, 0, 130, 1))
    assert [storage.numel() for storage in storages] == [5, 0, 130, 1]
    assert all(storage.data_ptr() % 64 == 0 for storage in storages)
    assert len(files.descriptors) == 1
    for number, storage in enumerate(storages):
        storage.fill_(number + 1)
    assert seen_elsewhere(files) == [b"\1" * 5, b"", b"\3" * 130, b"\4"]
    storages[0].fill_(9)
    assert seen_elsewhere(files)[0] == b"\t" * 5


def test_storages_of_nothing_can_be_allocated() -> None:
    storages, files = allocate_storages(())
    assert storages == open_storages(files) == []
    assert seen_elsewhere(allocate_storages((0,))[1]) == [b""]


@pytest.mark.parametrize("dtype", ["float32", "bool", "float8_e8m0fnu"])
def test_sharing_moves_every_tensor_along_and_changes_no_byte(dtype: str) -> None:
    tensors = views_of(dtype)
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    shells = Shells.from_tensors(tensors)
    manifest = shells.seal()
    files = shells.share()
    assert shells.share() is files
    assert {name: bits(tensor) for name, tensor in tensors.items()} == before
    other = Shells(manifest, open_storages(files))
    assert other.seal() == manifest
    assert shells.seal() == manifest
    for name, tensor in tensors.items():
        if tensor.numel():
            tensor.view(torch.uint8).fill_(1) if tensor.is_contiguous() and tensor.dim() else None
            assert bits(other.tensor(name)) == bits(tensor), name


def test_tied_tensors_and_cuts_of_one_buffer_share_one_file() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    shells = Shells.from_tensors({"a": buffer[:16], "b": buffer[32:], "tied": buffer[:16]})
    files = shells.share()
    assert len(files.descriptors) == 1
    assert buffer.untyped_storage().is_shared()
    buffer.add_(1)
    assert b"".join(seen_elsewhere(files)) == b"".join(shells.views(0, shells.manifest.total_bytes))
    assert bits(shells.tensor("b")) == bits(buffer[32:])


def test_descriptors_are_closed_with_the_shells() -> None:
    before = open_files()
    shells = Shells.from_tensors({"a": torch.ones(1000), "b": torch.ones(3)})
    shells.share()
    allocated = Shells.allocate(shells.manifest, shared=True)
    assert open_files() > before
    del shells, allocated
    assert open_files() == before


def test_b56_shared_memory_without_room_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    room = namedtuple("room", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: room(1, 4096))
    tensors = {"a": torch.ones(1000), "b": torch.ones(1000)}
    shells = Shells.from_tensors(tensors)
    with pytest.raises(AdmissionError, match="needs 8000 bytes, /dev/shm has 4096") as caught:
        shells.share()
    assert caught.value.facts == {"needed_bytes": 8000, "available_bytes": 4096}
    assert not any(tensor.untyped_storage().is_shared() for tensor in tensors.values())
    Shells.allocate(shells.manifest, shared=True)
