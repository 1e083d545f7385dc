"""docs/loading.md says what the local disk pipeline does: its program runs, and its lists are those of the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate_rules import known_rules, read_families
from tests.docs.conftest import blocks, page, table
from weightwire.transfer.checkpoint.formats import FORMATS, SERVED
from weightwire.transfer.checkpoint.regions_on_disk import DEFAULT_THREADS, STEP_BYTES
from weightwire.transfer.diagnostics import CATALOGUE
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.models import architectures

PAGE = page("loading.md")
(PROGRAM,) = blocks(PAGE, "python")
BUILT_IN = sorted(name for name, tree in architectures().items() if tree.__module__.startswith("weightwire."))


def listed(mark: str) -> list[list[str]]:
    """The rows of the table that follows a comment `<!-- mark -->`."""
    _, found, rest = PAGE.partition(f"<!-- {mark} -->\n")
    assert found, f"no comment {mark!r}"
    return table(f"# here\n\n{rest}", "here")


def test_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"prints\n\n```\n{done.stdout}```\n" in PAGE


def test_architectures_are_those_that_are_registered() -> None:
    assert f"<!-- architectures -->\n```\n{', '.join(BUILT_IN)}\n```\n" in PAGE


def test_formats_are_those_that_are_served() -> None:
    rows = {name: re.findall(r"[\w*]+\.\w+", cell) for name, cell in listed("formats")}
    assert rows == {str(name): list(FORMATS[name].patterns) for name in SERVED}


def test_outcomes_are_the_five() -> None:
    assert [name for name, _ in listed("outcomes")] == [str(outcome) for outcome in Outcome]


def test_diagnostics_are_those_of_the_catalogue() -> None:
    expected = [[code, str(known.stage), known.symptom] for code, known in CATALOGUE.items()]
    assert listed("diagnostics") == expected


def test_bound_of_memory_is_that_of_the_code() -> None:
    assert f"at most {DEFAULT_THREADS} threads x {STEP_BYTES >> 20} MiB" in PAGE


def test_rules_that_are_named_are_there() -> None:
    named = set(re.findall(r"\bL\d{2,3}\b", PAGE))
    assert named
    assert named <= known_rules(read_families())


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"`((?:checkpoint|loading)\.\w+)`", PAGE))), ids=lambda name: name
)
def test_module_that_is_named_is_there(module: str) -> None:
    assert importlib.util.find_spec(f"weightwire.transfer.{module}") is not None
