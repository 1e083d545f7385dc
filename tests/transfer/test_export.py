"""A rank's tensors as a checkpoint file, and that file on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from tests.transfer.conftest import bits, filled, views_of
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import CheckpointError, HeaderError
from weightwire.transfer.export import export_layout, exported_tensors
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Topology
from weightwire.transfer.saving import save_rank
from weightwire.transfer.shells import Shells


def exported(shells: Shells) -> bytes:
    """The file, put together from its layout."""
    layout = export_layout(shells.manifest)
    raw = layout.prefix + b"".join(bits(shells.tensor(tensor.name)) for tensor in layout.tensors)
    assert len(raw) == layout.nbytes
    return raw


def metadata_of(raw: bytes) -> dict[str, str]:
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    found = header["__metadata__"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("dtype", sorted(BY_NAME))
def test_b10_export_is_a_file_that_the_library_reads_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    tensors = views_of(dtype)
    if BY_NAME[dtype].packing > 1:
        del tensors["a scalar"]
    file = tmp_path / "export.safetensors"
    file.write_bytes(exported(Shells.from_tensors(tensors)))
    found = load_file(file)
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors.items()
    }


def test_export_holds_shared_memory_once_and_names_the_other_names() -> None:
    weight, empty = filled("float32", (2, 2)), torch.empty(0)
    tensors = {"embed": weight, "head": weight, "view": weight.view(4), "t": weight.T, "e1": empty, "e2": empty}
    raw = exported(Shells.from_tensors(tensors))
    assert metadata_of(raw) == {"format": "pt", "alias:head": "embed"}
    found = load(raw)
    assert set(found) == {"embed", "view", "t", "e1", "e2"}
    assert torch.equal(found["view"], weight.view(4))
    assert torch.equal(found["t"], weight.T)


def test_alias_of_another_dtype_is_no_alias() -> None:
    weight = filled("int32", (4,))
    tensors, metadata = exported_tensors(Shells.from_tensors({"a": weight, "b": weight.view(torch.float32)}).manifest)
    assert [tensor.name for tensor in tensors] == ["a", "b"]
    assert metadata == {"format": "pt"}


def test_export_of_a_name_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(HeaderError, match="__metadata__"):
        export_layout(Shells.from_tensors({"__metadata__": filled("int8", (1,))}).manifest)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
def test_saved_rank_is_the_exported_file(tmp_path: Path, chunk_bytes: int) -> None:
    identity = ModelIdentity(model="m", topology=Topology(tp=4), rank=2)
    shells = Shells.from_tensors(views_of("bfloat16"), identity, chunk_bytes=chunk_bytes)
    path = save_rank(shells, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "rank-2.safetensors"
    assert path.read_bytes() == exported(shells)
    assert list(path.parent.iterdir()) == [path]
    assert set(load_file(path)) == set(views_of("bfloat16"))


def test_save_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(b"former")
    with pytest.raises(HeaderError):
        save_rank(Shells.from_tensors({"__metadata__": filled("int8", (1,))}), tmp_path)
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_save_into_something_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="file"):
        save_rank(Shells.from_tensors({"a": filled("int8", (1,))}), tmp_path / "file")
