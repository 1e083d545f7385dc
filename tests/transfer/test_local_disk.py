"""Shells for a checkpoint, from disk alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.conftest import bits, filled
from weightwire.transfer import admission
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import AdmissionError, CancelledError, CheckpointNotFoundError
from weightwire.transfer.local_disk import identity_of, load_checkpoint
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
