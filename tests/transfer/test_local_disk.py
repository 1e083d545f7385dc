"""Shells for a checkpoint, from disk alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.conftest import bits, filled
from weightwire.transfer import admission
from weightwire.transfer.checkpoint import Checkpoint, find_checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import AdmissionError, CancelledError, CheckpointNotFoundError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.local_disk import identity_of, load_checkpoint, load_streamed
from weightwire.transfer.session import RankProgress, TransferState

TENSORS = {
    "layers.1.w": filled("bfloat16", (3, 5)),
    "layers.10.w": filled("float32", (2,)),
    "layers.1.[x]": filled("uint8", (7,)),
    "scale": filled("float32", ()),
    "none": torch.empty(0, dtype=torch.int32),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"a": 1}')
    return Checkpoint.open(tmp_path)


def test_checkpoint_is_loaded_bit_for_bit_and_described(checkpoint: Checkpoint) -> None:
    seen: list[RankProgress] = []
    identity = identity_of(checkpoint, model="org/name")
    shells, result = load_checkpoint(checkpoint, identity, control=Control(deadline_s=60), on_progress=seen.append)
    assert {name: bits(t) for name, t in shells.tensors()} == {name: bits(t) for name, t in TENSORS.items()}
    nbytes = sum(t.nbytes for t in TENSORS.values())
    assert (result.bytes_disk, result.bytes_peer) == (nbytes, 0)
    assert result.tensors == {"identical": 0, "reshard": 0, "disk": 5, "constant": 0}
    assert checkpoint.bytes_read == nbytes
    assert seen[-1] == RankProgress(state=TransferState.READY, bytes_total=nbytes, bytes_disk=nbytes)
    assert [p.state for p in seen[:1]] == [TransferState.RECEIVING]
    assert sorted(p.bytes_disk for p in seen) == [p.bytes_disk for p in seen]
    manifest = shells.manifest
    assert (manifest.model, manifest.revision, manifest.config) == ("org/name", checkpoint.revision, '{"a": 1}')
    assert manifest.checkpoint == specs_of(checkpoint)


def test_revision_may_be_named(checkpoint: Checkpoint) -> None:
    assert identity_of(checkpoint, model="m", revision="v2").revision == "v2"


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        pytest.param(["layers.1.*"], {"layers.10.w", "scale", "none"}, id="b15: one layer and not its namesakes"),
        pytest.param(["layers.1.[[]x]"], {"layers.1.w", "layers.10.w", "scale", "none"}, id="brackets in a name"),
        pytest.param(["SCALE"], set(TENSORS), id="capitals count"),
        pytest.param(["*.w", "none"], {"layers.1.[x]", "scale"}, id="several patterns"),
    ],
)
def test_excluded_names_are_left_out(checkpoint: Checkpoint, patterns: list[str], left: set[str]) -> None:
    identity = identity_of(checkpoint, model="m")
    shells, _ = load_checkpoint(checkpoint, identity, control=Control(deadline_s=60), exclude=patterns)
    assert set(shells.manifest.by_name) == left
    assert shells.manifest.checkpoint == specs_of(checkpoint)


def test_nothing_left_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"\['\*'\]"):
        load_checkpoint(
            checkpoint, identity_of(checkpoint, model="m"), control=Control(deadline_s=60), exclude=["*"]
        )  # fmt: skip


def test_too_little_memory_is_refused_before_a_byte_is_read(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 0 kB\n")
    monkeypatch.setattr(admission, "_MEMINFO", tmp_path / "meminfo")
    with pytest.raises(AdmissionError, match="'org/name'"):
        load_checkpoint(checkpoint, identity_of(checkpoint, model="org/name"), control=Control(deadline_s=60))
    assert checkpoint.bytes_read == 0


def test_cancelled_load_ends(checkpoint: Checkpoint) -> None:
    control = Control(deadline_s=60)
    control.cancel()
    with pytest.raises(CancelledError):
        load_checkpoint(checkpoint, identity_of(checkpoint, model="m"), control=control)


def test_shells_of_a_pickle_outlive_its_file(tmp_path: Path) -> None:
    """A mapping of a file that is cut short kills whoever reads it."""
    torch.save(TENSORS, tmp_path / "m.bin")
    shells, _, _ = load_streamed(find_checkpoint(tmp_path), ModelIdentity(model="m"), control=Control(deadline_s=60))
    os.truncate(tmp_path / "m.bin", 0)
    assert {name: bits(t) for name, t in shells.tensors()} == {name: bits(t) for name, t in TENSORS.items()}


def test_pickle_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(TENSORS, tmp_path / "m.bin")
    (tmp_path / "meminfo").write_text("MemAvailable: 0 kB\n")
    monkeypatch.setattr(admission, "_MEMINFO", tmp_path / "meminfo")
    with pytest.raises(AdmissionError, match="loading 'org/name'"):
        load_streamed(
            find_checkpoint(tmp_path), ModelIdentity(model="org/name"), control=Control(deadline_s=60)
        )  # fmt: skip


class Draining(Control):
    """Memory that is gone once the first tensor was read."""

    def __init__(self, meminfo: Path) -> None:
        super().__init__(deadline_s=60)
        self._left = [(meminfo, "0 kB"), (meminfo, "1000000 kB")]

    def check(self) -> None:
        super().check()
        path, left = self._left.pop()
        path.write_text(f"MemAvailable: {left}\n")


def test_packing_a_tensor_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.zeros(1).expand(4096), "b": torch.zeros(8192)}, tmp_path / "m.bin")
    monkeypatch.setattr(admission, "_MEMINFO", tmp_path / "meminfo")
    control = Draining(tmp_path / "meminfo")
    with pytest.raises(AdmissionError, match="packing 'a'"):
        load_streamed(find_checkpoint(tmp_path), ModelIdentity(model="m"), control=control)
