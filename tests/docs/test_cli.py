"""docs/cli.md says what the command line does: flags, exit codes and the keys of every JSON object."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.docs.conftest import Answer, differences, examples, generate, page, table
from weightwire.service.cli import exit_codes

EXAMPLES = examples(page("cli.md"))


def test_reference_is_that_of_the_command_line() -> None:
    checked = generate("generate_cli.py", "--check")
    assert checked.returncode == 0, checked.stderr


def test_every_exit_code_is_explained() -> None:
    codes = [int(code) for code, _ in table(page("cli.md"), "What every command keeps to")]
    assert codes == [
        exit_codes.DONE,
        exit_codes.FAILED,
        exit_codes.WRONG_USAGE,
        exit_codes.CANCELLED,
        exit_codes.DEADLINE,
    ]


def test_every_command_has_an_example(answers: Mapping[str, Answer]) -> None:
    assert EXAMPLES.keys() == answers.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_has_the_keys_that_the_command_prints(name: str, answers: Mapping[str, Answer]) -> None:
    assert differences(EXAMPLES[name], answers[name].value) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(("pull", 0), ("plan", 0), ("status", 0), ("load", 0), ("load for a topology", 0), ("inspect", 0)),
        *(("pull that failed", 1), ("load that failed", 1), ("wrong usage", 2)),
    ],
)
def test_command_ends_with_the_documented_exit_code(name: str, code: int, answers: Mapping[str, Answer]) -> None:
    assert answers[name].code == code


def test_failure_names_what_is_missing(answers: Mapping[str, Answer]) -> None:
    assert EXAMPLES["pull that failed"] != answers["pull that failed"].value  # ids and times differ
    for value in (EXAMPLES["pull that failed"], answers["pull that failed"].value):
        assert isinstance(value, dict)
        assert value["error"] == {
            "missing": ["norm.weight"],
            "code": "coverage_incomplete",
            "detail": "1 tensors are held by no source that can be reached and are not on disk: 'norm.weight'",
        }
