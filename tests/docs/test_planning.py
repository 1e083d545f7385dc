"""docs/planning.md: its program runs, its plan is what the command prints, and its ways are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from tests.docs.conftest import ROOT, blocks, page, table
from weightwire.service.cli import plan_tables
from weightwire.service.cli.topology_text import parse_topology
from weightwire.transfer.manifest import Topology
from weightwire.transfer.plan import Way
from weightwire.transfer.topology_plan import Side, describe_model, plan_topologies

PAGE = page("planning.md")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "\n".join(blocks(PAGE, "python"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(re.findall(r"^prints.*?\n\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def test_plan_on_the_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    title = re.search(r"^plan for llama-8b, tp=4 to tp=2,pp=2$", PAGE, re.MULTILINE)
    assert title is not None
    source, target = Side(topology=Topology(tp=4)), Side(topology=Topology(tp=2, pp=2))
    found = plan_topologies(describe_model(tmp_path), source, target, range(4))
    monkeypatch.setattr(plan_tables, "stdout", Console(width=80))
    plan_tables.print_plan(plan_tables.view_of_plan(title[0], found))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = PAGE.partition("<!-- printed -->\n```\n")[2].partition("```\n")[0].splitlines()
    # The last line ends in seconds.
    assert printed[:-1] == shown[:-1]
    assert printed[-1].partition("; ")[0] == shown[-1].partition("; ")[0]


def test_ways_are_those_of_the_code() -> None:
    assert [way for way, *_ in table(PAGE, "Ways")] == list(get_args(Way))


@pytest.mark.parametrize("text", sorted(set(re.findall(r"`((?:tp|pp|ep)=[^`]+)`", PAGE))))
def test_topology_that_is_named_is_one(text: str) -> None:
    assert parse_topology("--to", text).world_size > 1


def test_flags_that_are_named_are_there() -> None:
    reference = (
        (ROOT / "docs" / "cli.md").read_text("utf-8").partition("### `weightwire plan`")[2].partition("\n### ")[0]
    )
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert named >= {"--config", "--from", "--to", "--rank"}
    assert {flag for flag in named if f"`{flag}" not in reference} == set()
