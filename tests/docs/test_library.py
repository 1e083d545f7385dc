"""The programs of docs/library.md run, and print what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT, blocks, page
from weightwire.transfer import errors

PAGE = page("library.md")
PROGRAMS = blocks(PAGE, "python")


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_runs(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[number]], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr
    if done.stdout and number:
        assert f"```\n{done.stdout}```" in PAGE


def test_example_stands_on_the_page_as_it_is() -> None:
    assert PROGRAMS[0] == (ROOT / "examples" / "fill_module.py").read_text("utf-8")


def test_error_tree_is_that_of_the_code() -> None:
    tree = "\n".join(line[4:] for line in (errors.__doc__ or "").split("\n\n")[1].splitlines())
    assert f"```\n{tree}\n```" in PAGE
