"""Pickle containers: tensors come out, code never runs."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from weightwire.transfer.checkpoint.pickle_format import load_pickle
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError

ZIP_OR_NOT = pytest.mark.parametrize("is_zip", [pytest.param(True, id="zip"), pytest.param(False, id="legacy")])


class Marker:
    """An object whose pickle, if run, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def save(content: object, file: Path, *, is_zip: bool = True) -> Path:
    torch.save(content, file, _use_new_zipfile_serialization=is_zip)
    return file


@ZIP_OR_NOT
@pytest.mark.parametrize("mmap", [pytest.param(True, id="mapped"), pytest.param(False, id="read")])
def test_pickle_gives_its_tensors_sorted(tmp_path: Path, is_zip: bool, mmap: bool) -> None:
    weights = OrderedDict(
        t10=torch.arange(6.0).reshape(2, 3),
        t2=torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        t1=torch.tensor(1.5),
        none=torch.empty(2, 0, dtype=torch.int32),
    )
    shard = load_pickle(save(weights, tmp_path / "m.bin", is_zip=is_zip), mmap=mmap)
    assert shard.names == ("none", "t1", "t10", "t2")
    for name in shard.names:
        tensor = shard.take(name)
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name].detach())


def test_write_to_a_mapped_pickle_never_reaches_the_file(tmp_path: Path) -> None:
    file = save({"a": torch.zeros(1024)}, tmp_path / "m.bin")
    before = file.read_bytes()
    load_pickle(file).take("a").fill_(1.0)
    assert file.read_bytes() == before


# L45
@ZIP_OR_NOT
def test_b58_pickle_that_would_run_a_command_is_refused_and_runs_nothing(tmp_path: Path, is_zip: bool) -> None:
    marker = tmp_path / "marker"
    file = save({"a": torch.zeros(1), "b": Marker(marker)}, tmp_path / "m.bin", is_zip=is_zip)
    with pytest.raises(CheckpointError, match=r"m\.bin.*UnpicklingError") as caught:
        load_pickle(file)
    assert type(caught.value.__cause__).__name__ == "UnpicklingError"
    # Nobody is advised to switch it off.
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()
    assert caught.value.facts["path"] == str(file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param({"a": torch.zeros(1), "epoch": 3}, r"1 members .*'epoch' \(int\)", id="a number"),
        pytest.param({"state_dict": {"a": torch.zeros(1)}}, r"'state_dict' \(dict\)", id="a dict inside"),
        pytest.param({3: torch.zeros(1)}, r"3 \(Tensor|3 \(tensor", id="a name that is no text"),
        pytest.param({"a": torch.eye(2).to_sparse()}, "layout torch.sparse_coo", id="a sparse tensor"),
        pytest.param(
            {"__metadata__": torch.zeros(1)},
            r"'__metadata__' \(tensor under a name that no safetensors",
            id="a reserved name",
        ),
        pytest.param({"a\ud800": torch.zeros(1)}, r"'a\\ud800' \(tensor under", id="a name that is no Unicode text"),
        pytest.param([torch.zeros(1)], "holds a list", id="a list"),
        pytest.param(torch.zeros(1), "holds a Tensor", id="one tensor"),
    ],
)
def test_pickle_of_anything_but_named_tensors_is_refused(tmp_path: Path, content: object, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        load_pickle(save(content, tmp_path / "m.bin"))


@pytest.mark.parametrize("name", ["", "__metadata", "a/b", "\x00", "权重", " "])
def test_pickle_may_have_every_name_that_a_file_can_have(tmp_path: Path, name: str) -> None:
    assert load_pickle(save({name: torch.ones(1)}, tmp_path / "m.bin")).names == (name,)


def test_every_stranger_is_listed(tmp_path: Path) -> None:
    file = save({f"n{number}": number for number in range(30)}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"30 members .* and 10 more") as caught:
        load_pickle(file)
    members = caught.value.facts["members"]
    assert isinstance(members, list)
    assert len(members) == 30


@pytest.mark.parametrize("length", [0, 1, 3, 4, 40, -20, -1])
@ZIP_OR_NOT
def test_pickle_that_was_cut_short_is_refused(tmp_path: Path, length: int, is_zip: bool) -> None:
    file = save({"a": torch.zeros(64)}, tmp_path / "m.bin", is_zip=is_zip)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        load_pickle(file)


def test_text_that_is_no_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        load_pickle(tmp_path / "m.bin")


def test_file_that_cannot_be_a_pickle_is_refused_by_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        load_pickle(tmp_path / "m.bin")
    with pytest.raises(CheckpointNotFoundError):
        load_pickle(tmp_path / "gone.bin")


def test_mapped_pickle_that_was_cut_short_since_is_refused(tmp_path: Path) -> None:
    file = save({"a": torch.zeros(64), "b": torch.zeros(64)}, tmp_path / "m.bin")
    shard = load_pickle(file)
    shard.take("a")
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match="changed on disk"):
        shard.take("b")


@ZIP_OR_NOT
def test_tensor_that_claims_more_than_its_file_is_refused(tmp_path: Path, is_zip: bool) -> None:
    """A stride of 0 makes a terabyte of four bytes."""
    file = save({"a": torch.zeros(1).expand(10**12)}, tmp_path / "m.bin", is_zip=is_zip)
    with pytest.raises(CheckpointError, match="1000000000000 elements"):
        load_pickle(file)


def test_tensor_with_a_stride_of_0_that_fits_is_read(tmp_path: Path) -> None:
    file = save({"a": torch.ones(1).expand(3), "b": torch.zeros(64)}, tmp_path / "m.bin")
    assert torch.equal(load_pickle(file).take("a"), torch.ones(3))


@pytest.mark.parametrize("mmap", [pytest.param(True, id="mapped"), pytest.param(False, id="read")])
def test_archive_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path, mmap: bool) -> None:
    plain, packed = save({"a": torch.zeros(100_000)}, tmp_path / "plain.bin"), tmp_path / "m.bin"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="unpacks to"):
        load_pickle(packed, mmap=mmap)
