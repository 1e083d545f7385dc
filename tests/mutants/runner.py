"""Breaks the code in many small ways, one at a time, and demands that the tests notice.

python -m tests.mutants.runner [--only WORD] [--jobs N]      # make mutants

mutations.toml holds the mutations. Each is applied to a copy of the packages in a temporary folder; the working tree
stays as it is. Exit code 1 if a mutant survives, if its tests do not pass without it, or if its text is not found.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import origin

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
PACKAGES = ("transfer", "service", "engine_hooks")
FAMILIES = (
    "files",
    "order",
    "iterators",
    "names",
    "experts",
    "drops",
    "shells",
    "slices",
    "padding",
    "placements",
    "plans",
    "latent",
)
LEAST_PER_FAMILY = 2
LIMIT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One small fault.

    Attributes:
        family: Kind of rules that it breaks.
        name: What the code does wrong with it.
        file: Relative to the root of the repository.
        old: Text that occurs exactly once in the file.
        new: What stands there instead.
        tests: Files or functions (`file::function`) of which at least one has to fail.
    """

    family: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run of tests ended."""

    code: int
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        """Tests failed; a mutant that cannot even be imported, or hangs, proves nothing."""
        return self.code == pytest.ExitCode.TESTS_FAILED

    def __str__(self) -> str:
        words = {
            pytest.ExitCode.OK: "SURVIVED",
            pytest.ExitCode.TESTS_FAILED: "caught",
            origin.NOT_THE_COPY: "NOT IMPORTED FROM THE COPY",
            origin.NEVER_IMPORTED: "MUTATED MODULE NEVER IMPORTED",
        }
        return words.get(self.code, f"NO VERDICT (pytest ended with {self.code})")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="WORD", help="mutations whose family or name contains it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="test processes at once (2)")
    options = parser.parse_args(arguments)
    mutations = [item for item in read_mutations() if options.only in f"{item.family}: {item.name}"]
    wrong = list(faults_of_list(ROOT, mutations))
    if wrong or not mutations:
        _say("\n".join(wrong) or f"no mutation is called {options.only!r}")
        return 1
    with tempfile.TemporaryDirectory(prefix="weightwire-mutants-") as folder:
        return run(ROOT, Path(folder).resolve(), mutations, jobs=options.jobs)


def read_mutations(path: Path = LIST) -> list[Mutation]:
    items = tomllib.loads(path.read_text("utf-8"))["mutation"]
    return [Mutation(**{**item, "tests": tuple(item["tests"])}) for item in items]


def faults_of_list(root: Path, mutations: Sequence[Mutation]) -> Iterator[str]:
    """What is wrong with mutations, by the files alone: texts that are not there, tests that do not exist."""
    for name, count in Counter(mutation.name for mutation in mutations).items():
        if count > 1:
            yield f"{name}: {count} mutations have this name"
    for mutation in mutations:
        found = (root / mutation.file).read_text("utf-8").count(mutation.old)
        if found != 1:
            yield f"{mutation.name}: its text occurs {found} times in {mutation.file}, expected once"
        if mutation.new == mutation.old or mutation.family not in FAMILIES or not mutation.tests:
            yield f"{mutation.name}: changes nothing, is of an unknown family, or names no test"
        for test in mutation.tests:
            file, _, function = test.partition("::")
            if not (root / file).is_file() or (function and function not in _functions_of(root / file)):
                yield f"{mutation.name}: there is no test {test}"


def _functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def run(root: Path, folder: Path, mutations: Sequence[Mutation], *, jobs: int) -> int:
    """Run the tests without a mutation, then with each; print a line for each. Returns the exit code."""
    whole = copy_packages(root, folder / "whole")
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    healthy = run_tests(root, whole, tests)
    if healthy.code != pytest.ExitCode.OK:
        _say(f"{healthy.output}\nwithout any mutation the tests do not pass (pytest ended with {healthy.code})")
        return 1
    _say(f"without any mutation the tests pass ({healthy.seconds:.1f} s)\n")
    began, bad = time.monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda item: run_mutant(root, whole, folder / f"{item[0]}", item[1]), enumerate(mutations))
        for mutation, verdict in zip(mutations, verdicts, strict=True):
            _say(f"{mutation.family:10} {mutation.name:72} {verdict} ({verdict.seconds:.1f} s)")
            bad += not verdict.caught
            if not verdict.caught and verdict.code != pytest.ExitCode.OK:
                _say(verdict.output)
    _say(f"\n{len(mutations) - bad} of {len(mutations)} mutants caught in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def copy_packages(root: Path, folder: Path) -> Path:
    """A folder that can go first on PYTHONPATH, with the packages below `weightwire`, compiled."""
    for package in filter(lambda name: (root / name).is_dir(), PACKAGES):
        shutil.copytree(root / package, folder / "weightwire" / package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=2)
    return folder


def run_mutant(root: Path, whole: Path, folder: Path, mutation: Mutation) -> Verdict:
    """Run the tests of one mutation against a copy of `whole` that has it."""
    shutil.copytree(whole, folder)
    file = folder / "weightwire" / mutation.file
    file.write_text(file.read_text("utf-8").replace(mutation.old, mutation.new), "utf-8")
    # Compiled code is matched by time and size, which a quick mutation can share with the original.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    verdict = run_tests(root, folder, mutation.tests, mutated=file)
    shutil.rmtree(folder)
    return verdict


def run_tests(root: Path, packages: Path, tests: Sequence[str], *, mutated: Path | None = None) -> Verdict:
    """Run some tests of `root`, with weightwire from `packages`, to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", origin.__name__, f"--packages-from={packages}", *([f"--mutated={mutated}"] if mutated else [])]
    path = os.pathsep.join([str(packages), str(ROOT)])
    # One thread each: two processes share the machine, and none has much to compute.
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(code=-1, seconds=time.monotonic() - began, output=f"no end after {LIMIT_S:g} s")
    return Verdict(code=done.returncode, seconds=time.monotonic() - began, output=done.stdout + done.stderr)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
