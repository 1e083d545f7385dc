"""Where a rank may be saved, told before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightwire.transfer.errors import SettingsError
from weightwire.transfer.saving import check_destination


def test_destination_may_be_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    check_destination(tmp_path / "new" / "deep", checkpoint=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "model.safetensors"], ids=["the folder", "a file in it"])
def test_destination_is_not_the_checkpoint_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingsError, match="is the checkpoint's own"):
        check_destination(tmp_path, checkpoint=tmp_path / name)


def test_destination_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingsError, match="no folder that this process may write to"):
            check_destination(place)


def test_destination_that_the_system_does_not_look_at_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for place in (tmp_path / "circle", tmp_path / "circle" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(SettingsError, match=r"no folder that this|cannot be looked at"):
            check_destination(place, checkpoint=tmp_path / "model")


def test_checkpoint_that_the_system_does_not_look_at_is_left_to_discovery(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for checkpoint in (tmp_path / "circle", tmp_path / ("x" * 300)):
        check_destination(tmp_path / "out", checkpoint=checkpoint)
