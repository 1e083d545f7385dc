"""Checkpoints that lie, or that lead somewhere else: refused by the commands with a stable code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.checkpoints import content, write_checkpoint, write_file
from tests.faults.processes import Lab


def with_index(folder: Path, weight_map: object) -> Path:
    write_file(folder / "sub" / "ok.safetensors", {"w": content("F32", 4)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Weights beside the model's folder, that an index must not reach."""
    write_file(tmp_path / "x.safetensors", {"w": content("F32", 4)})
    write_file(tmp_path / "model-evil" / "x.safetensors", {"w": content("F32", 4)})
    return tmp_path


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param("../x.safetensors", id="the folder above"),
        pytest.param("sub/../../x.safetensors", id="down and twice up"),
        pytest.param("../model-evil/x.safetensors", id="a folder whose name begins alike"),
        pytest.param("ABSOLUTE", id="an absolute path"),
    ],
)
@pytest.mark.parametrize("command", ["source", "load", "pull"])
def test_command_b57_refuses_an_index_that_leaves_its_folder(
    served: Lab, outside: Path, command: str, shard: str
) -> None:
    shard = str(outside / "x.safetensors") if shard == "ABSOLUTE" else shard
    folder = with_index(outside / "model", {"w": shard})
    outcome = {
        "source": lambda: served.source(folder).finish(),
        "load": lambda: served.run("load", folder, "--json"),
        "pull": lambda: served.pull("--checkpoint", folder).finish(),
    }[command]()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_path_outside"


def test_source_b57_follows_an_index_inside_its_folder(served: Lab, outside: Path) -> None:
    served.ready_source(with_index(outside / "model", {"w": "sub/ok.safetensors"}))
    assert served.pull().finish().check(0)["bytes_peer"] == 16


def test_source_follows_the_links_of_a_download_cache(served: Lab, outside: Path) -> None:
    """A cache of a model hub keeps files by digest and links to them; a link is not a name in somebody's index."""
    folder = outside / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(outside / "x.safetensors")
    served.ready_source(folder)
    assert served.pull().finish().check(0)["bytes_peer"] == 16


def test_source_b01_names_the_file_that_the_index_lists_and_nobody_has(served: Lab, tmp_path: Path) -> None:
    folder = with_index(tmp_path / "model", {"w": "sub/ok.safetensors", "v": "model-00002-of-00002.safetensors"})
    outcome = served.source(folder).finish()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_not_found"
    assert "model-00002-of-00002.safetensors" in str(outcome.error["detail"])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param(b"\xff" * 7 + b"\x7f{}", "expected at most", id="a header of 2^63 bytes"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", id="a Git LFS pointer"),
        pytest.param(b"", "empty", id="an empty file"),
        pytest.param((100).to_bytes(8, "little") + b'{"w"', "ends inside its header", id="half a header"),
        pytest.param(b"<html><body>Sign in</body></html>", "HTML", id="a login page"),
    ],
)
def test_source_b05_refuses_what_is_no_safetensors_file(served: Lab, tmp_path: Path, raw: bytes, said: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(raw)
    outcome = served.source(folder).finish()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_header_invalid"
    assert said in str(outcome.error["detail"])


@pytest.mark.parametrize("change", [-4, 4])
def test_source_b06_refuses_a_file_of_another_length(served: Lab, tmp_path: Path, change: int) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": content("F32", 100)})
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:change] if change < 0 else raw + bytes(change))
    outcome = served.source(folder).finish()
    outcome.check(1)
    assert outcome.error["code"] == "checkpoint_header_invalid"


def test_source_of_nothing_is_refused(served: Lab, tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        outcome = served.source(folder).finish()
        outcome.check(1)
        assert outcome.error["code"] == "checkpoint_not_found"
