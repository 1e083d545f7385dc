"""The program of docs/tracing.md runs as it is and prints what the page says; its table is what a trace records."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.docs.conftest import blocks, page, table
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.tracing import TracedCopy, trace_placement

PAGE = page("tracing.md")
SNIPPETS = [
    (snippet, kind)
    for cell, kind in table(PAGE, "Opaque", "a loader does")
    for snippet in cell.replace("`, `", "\0").split("\0")
]


def test_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "\n".join(blocks(PAGE, "python"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(re.findall(r"^prints.*?\n\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def recorded(snippet: str) -> str:
    """The word of the table for what a trace makes of a line."""
    shell = torch.zeros(4, 6)

    def load(pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            exec(snippet, {"p": shell, "w": tensor, "torch": torch})

    spec = CheckpointSpec(name="w", dtype="float32", shape=(4, 6))
    try:
        trace = trace_placement(load, {"p": shell}, [spec])
    except PlacementError:
        return "error"
    if trace.opaque:
        return "opaque"
    assert len(trace.events) == 1
    return "copy" if isinstance(trace.events[0], TracedCopy) else "fill"


@pytest.mark.parametrize(("snippet", "kind"), SNIPPETS, ids=[snippet for snippet, _ in SNIPPETS])
def test_line_of_the_table_is_recorded_as_it_says(snippet: str, kind: str) -> None:
    assert recorded(snippet) == kind


def test_table_has_a_line_of_each_kind() -> None:
    assert {kind for _, kind in SNIPPETS} == {"copy", "fill", "opaque", "error"}
