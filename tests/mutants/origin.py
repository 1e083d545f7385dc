"""A pytest plugin: the packages under test come from one folder, and the module that was mutated is among them.

Without it a run that imports another copy of the packages would pass, or fail, for the wrong reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NOT_THE_COPY, NEVER_IMPORTED = 90, 91
PASSED_OR_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--packages-from", type=Path, required=True, help="folder that holds weightwire/")
    parser.addoption("--mutated", type=Path, help="file that the tests have to import")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus not in PASSED_OR_FAILED:
        return
    folder: Path = session.config.getoption("--packages-from")
    mutated: Path | None = session.config.getoption("--mutated")
    imported = set(_imported_files())
    if not imported or any(folder not in file.parents for file in imported):
        session.exitstatus = NOT_THE_COPY
    elif mutated is not None and mutated not in imported:
        session.exitstatus = NEVER_IMPORTED


def _imported_files() -> Iterator[Path]:
    for name, module in list(sys.modules.items()):
        if name.startswith("weightwire.") and (file := getattr(module, "__file__", None)) is not None:
            yield Path(file)
