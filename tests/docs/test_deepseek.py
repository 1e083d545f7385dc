"""docs/deepseek.md: its tables are those of the code, and its program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from docs.generate_rules import known_rules, read_families
from tests.docs.conftest import blocks, page, table
from weightwire.transfer.finishing.routes import PLATFORMS, Route
from weightwire.transfer.loading.deepseek_names import DeepseekNames, deepseek_steps

PAGE = page("deepseek.md")
(PROGRAM,) = blocks(PAGE, "python")


def listed(mark: str) -> list[list[str]]:
    """The rows of the table that follows a comment `<!-- mark -->`."""
    _, found, rest = PAGE.partition(f"<!-- {mark} -->\n")
    assert found, f"no comment {mark!r}"
    return table(f"# here\n\n{rest}", "here")


# L119
def test_steps_are_those_of_the_table() -> None:
    steps = deepseek_steps(DeepseekNames(num_layers=2, num_draft_layers=1, role="main"))
    assert listed("steps") == [[str(number), step.about, ", ".join(step.rules)] for number, step in enumerate(steps)]


# L141
def test_routes_are_those_of_the_table() -> None:
    rows = listed("routes")
    assert {becomes for _, _, becomes in rows} == {str(route) for route in Route}
    named = {name for _, platforms, _ in rows for name in re.split(r", (?!batched|sparse)", platforms)}
    assert named - {"any", "any that can"} <= PLATFORMS.keys()


def test_rules_that_are_named_are_there() -> None:
    assert set(re.findall(r"\bL\d{2,3}\b", PAGE)) <= known_rules(read_families())


def test_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"prints\n\n```\n{done.stdout}```\n" in PAGE
