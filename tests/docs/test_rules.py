"""docs/rules.md lists the tests that hold each rule of loading, and no rule is without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate_rules import MarkError, known_rules, page, read_families, read_marks
from tests.docs.conftest import ROOT, generate, table

MUST_BE_HELD = tuple(f"L{number:02}" for number in range(1, 152))
KNOWN = frozenset({"L17", "L18", "C4", "D01"})


def planted(tmp_path: Path, text: str) -> set[tuple[str, str]]:
    """The (test, rule) pairs that a file with this text holds."""
    (tmp_path / "transfer").mkdir()
    (tmp_path / "transfer" / "test_planted.py").write_text(text, "utf-8")
    marks = read_marks(tmp_path, KNOWN)
    assert {mark.path for mark in marks} <= {"transfer/test_planted.py"}
    return {(mark.test, mark.rule) for mark in marks}


def test_page_is_that_of_the_marks() -> None:
    checked = generate("generate_rules.py", "--check")
    assert checked.returncode == 0, checked.stderr


def test_every_rule_of_the_disk_pipeline_is_held_by_a_test() -> None:
    marks = read_marks(ROOT / "tests", known_rules(read_families()))
    # What needs real models is not run everywhere.
    held = {mark.rule for mark in marks if not mark.path.startswith("real/")}
    assert [rule for rule in MUST_BE_HELD if rule not in held] == []


def test_every_rule_of_the_disk_pipeline_has_a_sentence() -> None:
    families = read_families()
    sentences = [text for rules in families.values() for text in rules.values()]
    assert sum(len(rules) for rules in families.values()) == len(known_rules(families))
    assert set(MUST_BE_HELD) <= known_rules(families)
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("# L17\ndef test_a(): ...\n", {("test_a", "L17")}, id="above a function"),
        pytest.param("# L17, C4\nasync def test_a(): ...\n", {("test_a", "L17"), ("test_a", "C4")}, id="two at once"),
        pytest.param("# L17\n# D01\ndef test_a(): ...\n", {("test_a", "L17"), ("test_a", "D01")}, id="two lines"),
        pytest.param("# L17\n@mark(\n    1,\n)\ndef test_a(): ...\n", {("test_a", "L17")}, id="above decorators"),
        pytest.param("@mark\n# L17\ndef test_a(): ...\n", {("test_a", "L17")}, id="below a decorator"),
        pytest.param("@mark(\n    1,  # L17\n)\ndef test_a(): ...\n", {("test_a", "L17")}, id="beside one case"),
        pytest.param("def test_a():\n    assert True  # L17\n", {("test_a", "L17")}, id="at the end of a line"),
        pytest.param("def test_a():\n    def f(): ...  # L17\n", {("test_a", "L17")}, id="in a function within"),
        pytest.param("class A:\n    # L17\n    def test_a(self): ...\n", {("test_a", "L17")}, id="above a method"),
        pytest.param("def test_a():\n    '''# L17'''\n", set[tuple[str, str]](), id="not in a string"),
        pytest.param("# as L17 says\ndef test_a(): ...\n", set[tuple[str, str]](), id="not in a remark"),
    ],
)
def test_mark_belongs_to(tmp_path: Path, text: str, expected: set[tuple[str, str]]) -> None:
    assert planted(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("# L99\ndef test_a(): ...\n", "test_planted.py:1: there is no rule L99", id="an unknown rule"),
        pytest.param("# L17\n\ndef test_a(): ...\n", "neither directly above a test", id="an empty line between"),
        pytest.param("# L17\ndef other(): ...\n", "neither directly above a test", id="above another function"),
        pytest.param("CASES = [1]  # L17\ndef test_a(): ...\n", "neither directly above a test", id="by a constant"),
        pytest.param("# L17 L18\ndef test_a(): ...\n", "is no mark", id="no comma"),
        pytest.param("# L17 and L18\ndef test_a(): ...\n", "is no mark", id="words between"),
        pytest.param("# L17: the index\ndef test_a(): ...\n", "is no mark", id="words behind a colon"),
        pytest.param("# L17-L18\ndef test_a(): ...\n", "is no mark", id="a range"),
    ],
)
def test_mark_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(MarkError, match=expected):
        planted(tmp_path, text)


def test_page_lists_tests_by_rule(tmp_path: Path) -> None:
    planted(tmp_path, "# L18\ndef test_b(): ...\n# L18, L17\ndef test_a(): ...\n")
    text = page({"Files": {"L17": "One.", "L18": "Two.", "C4": "Three."}}, read_marks(tmp_path, KNOWN))
    both = "`transfer/test_planted.py::test_b`<br>`transfer/test_planted.py::test_a`"
    assert [[cell.replace("`", "") for cell in row] for row in table(text, "Files")] == [
        ["L17", "One.", "transfer/test_planted.py::test_a"],
        ["L18", "Two.", both.replace("`", "")],
    ]
