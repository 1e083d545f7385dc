"""The program of docs/adding-a-model.md runs as it is, and prints what the page says."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.conftest import ROOT, blocks, page, table

PAGE = page("adding-a-model.md")
SHOWN, *PROGRAM = blocks(PAGE, "python")


def test_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "\n".join(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(re.findall(r"^prints.*?\n\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def test_file_stands_on_the_page_as_it_is() -> None:
    (path,) = re.findall(r"<!-- file: (\S+) -->\n```python", PAGE)
    assert (ROOT / path).read_text("utf-8") == SHOWN


def test_files_that_are_named_are_there() -> None:
    named = set(re.findall(r"`((?:transfer|tests)/[\w/]+(?:\.py|/))`", PAGE))
    assert len(named) > 4
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_loaders_that_are_named_are_there() -> None:
    modules = [
        importlib.import_module(f"weightwire.transfer.loading.{name}")
        for name in ("base_loaders", "fused_loaders", "vocabulary", "expert_loaders", "scale_loaders", "halves")
    ]
    named = [name for row, _ in table(PAGE, "What is more than a trait") for name in re.findall(r"\w+Loader\b", row)]
    assert len(named) > 7
    for name in named:
        kinds = [getattr(module, name) for module in modules if hasattr(module, name)]
        assert kinds, name
        assert callable(kinds[0].load), name
