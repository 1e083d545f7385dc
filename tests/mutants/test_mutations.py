"""The list of mutations fits the code, and the runner tells a mutant that is caught from one that survives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import origin
from tests.mutants.runner import (
    FAMILIES,
    LEAST_PER_FAMILY,
    ROOT,
    Mutation,
    copy_packages,
    faults_of_list,
    read_mutations,
    run,
    run_mutant,
)

CAUGHT = Mutation(
    family="slices",
    name="subtracts",
    file="transfer/sums.py",
    old="a + b",
    new="a - b",
    tests=("tests/test_sums.py::test_one",),
)
SURVIVOR = replace(CAUGHT, name="turns the sum round", new="b + a")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository of one module with one test."""
    root = tmp_path / "repository"
    (root / "transfer").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "transfer" / "__init__.py").touch()
    (root / "transfer" / "other.py").touch()
    (root / "transfer" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    test = "from weightwire.transfer import sums\n\ndef test_one():\n    assert sums.add(3, 1) == 4\n"
    (root / "tests" / "test_sums.py").write_text(test)
    return root


def test_list_fits_the_code() -> None:
    assert list(faults_of_list(ROOT, read_mutations())) == []


def test_every_family_of_rules_has_mutations() -> None:
    count = Counter(mutation.family for mutation in read_mutations())
    assert {family: count[family] for family in FAMILIES if count[family] < LEAST_PER_FAMILY} == {}


@pytest.mark.parametrize(
    ("mutations", "expected"),
    [
        pytest.param([replace(CAUGHT, old="a * b")], "occurs 0 times in transfer/sums.py", id="text is gone"),
        pytest.param([replace(CAUGHT, old="a")], "occurs 3 times in transfer/sums.py", id="text is not unique"),
        pytest.param([replace(CAUGHT, new="a + b")], "changes nothing", id="nothing changes"),
        pytest.param([replace(CAUGHT, family="other")], "unknown family", id="no such family"),
        pytest.param([replace(CAUGHT, tests=())], "names no test", id="no test"),
        pytest.param([replace(CAUGHT, tests=("tests/x.py",))], "there is no test tests/x.py", id="no such file"),
        pytest.param(
            [replace(CAUGHT, tests=("tests/test_sums.py::test_two",))],
            "no test tests/test_sums.py::test_two",
            id="gone",
        ),
        pytest.param([CAUGHT, CAUGHT], "2 mutations have this name", id="twice"),
    ],
)
def test_fault_of_the_list_is_found(small: Path, mutations: Sequence[Mutation], expected: str) -> None:
    assert [fault for fault in faults_of_list(small, mutations) if expected in fault] != []


def test_run_fails_if_one_mutant_survives(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, tmp_path / "first", [CAUGHT], jobs=1) == 0
    assert run(small, tmp_path / "second", [CAUGHT, SURVIVOR], jobs=2) == 1
    said = [" ".join(line.split()[:-2]) for line in capsys.readouterr().out.splitlines() if line.startswith("slices")]
    assert said == ["slices subtracts caught", "slices subtracts caught", "slices turns the sum round SURVIVED"]
    assert "a + b" in (small / "transfer" / "sums.py").read_text()


def test_run_fails_if_the_tests_fail_anyway(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "tests" / "test_sums.py").write_text("def test_one():\n    assert 0\n")
    assert run(small, tmp_path / "first", [CAUGHT], jobs=1) == 1
    assert "without any mutation the tests do not pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutation", "code"),
    [
        pytest.param(replace(CAUGHT, new="a +"), pytest.ExitCode.USAGE_ERROR, id="a mutant that is no Python"),
        pytest.param(replace(CAUGHT, file="transfer/other.py"), origin.NEVER_IMPORTED, id="a module out of sight"),
    ],
)
def test_mutant_that_proves_nothing_is_not_caught(small: Path, tmp_path: Path, mutation: Mutation, code: int) -> None:
    whole = copy_packages(small, tmp_path / "whole")
    verdict = run_mutant(small, whole, tmp_path / "mutant", mutation)
    assert (verdict.code, verdict.caught) == (code, False)


def test_tests_that_import_another_copy_are_found_out(small: Path, tmp_path: Path) -> None:
    whole = copy_packages(small, tmp_path / "whole")
    elsewhere = copy_packages(small, tmp_path / "elsewhere")
    test = f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\nfrom weightwire.transfer import sums\n\n"
    (small / "tests" / "test_sums.py").write_text(f"{test}def test_one():\n    assert sums.add(3, 1) == 4\n")
    verdict = run_mutant(small, whole, tmp_path / "mutant", CAUGHT)
    assert (verdict.code, verdict.caught) == (origin.NOT_THE_COPY, False)
