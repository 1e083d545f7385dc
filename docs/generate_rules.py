"""Writes docs/rules.md: what loading has to keep to, and which tests hold it.

python docs/generate_rules.py            # writes
python docs/generate_rules.py --check    # exit code 1 if the file is not current

The sentences come from docs/rules.toml. A test says which rules it holds in a comment that is nothing but their ids,
directly above it (and above its decorators) or anywhere within it: `# L17`, or `# L17, C4`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("rules.md")
SENTENCES = Path(__file__).with_name("rules.toml")
TESTS = Path(__file__).parents[1] / "tests"
HEAD = f"""# The rules of loading

Loading weights goes wrong in ways that raise nothing: a name that matched by accident, a half in the place of the other
half, padding that was never zeroed. Each rule below keeps one of them out, and stands beside the tests that hold it;
`make mutants` breaks the code in many small ways, one at a time, and demands that such tests notice.

Written by docs/{Path(__file__).name} from docs/{SENTENCES.name} and the comments `# L17` in the tests; a test keeps it
current. Paths are below `tests/`. *C* are contract tests, *D* are diagnostics that a failure names; of these, and of
the rules about what comes after loading, only those are listed that something here holds.
"""

_ID = r"(?:L\d{2,3}|C\d{1,2}|D\d{2})"
_MARK = re.compile(rf"#\s*({_ID}(?:\s*,\s*{_ID})*)\s*")
# Looks like a mark, and holds nothing if taken for a remark: no way to tell what was meant.
_NEARLY = re.compile(rf"#\s*{_ID}\b\s*(?:$|[,;/:&+-]|and\b|{_ID})")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Families = Mapping[str, Mapping[str, str]]


class MarkError(Exception):
    """A mark that stands beside no test, is no clean list of ids, or names a rule that nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mark:
    """One rule held by one test.

    Attributes:
        path: Of the test's file, below `tests/`.
        line: Of the test's function.
    """

    path: str
    line: int
    test: str
    rule: str


def main(arguments: list[str]) -> int:
    try:
        families = read_families()
        current = page(families, read_marks(TESTS, known_rules(families)))
    except MarkError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if "--check" not in arguments:
        PAGE.write_text(current, "utf-8")
    elif not PAGE.exists() or current != PAGE.read_text("utf-8"):
        sys.stderr.write(f"{PAGE.name} is not current: run python docs/{Path(__file__).name}\n")
        return 1
    return 0


def read_families(path: Path = SENTENCES) -> Families:
    """Family -> rule -> sentence."""
    families: Families = tomllib.loads(path.read_text("utf-8"))
    return families


def known_rules(families: Families) -> frozenset[str]:
    return frozenset(rule for sentences in families.values() for rule in sentences)


# -- marks --


def read_marks(tests: Path, known: frozenset[str]) -> list[Mark]:
    """All marks below a folder of tests, by file and line.

    Raises:
        MarkError: With every mark that is wrong.
    """
    marks: list[Mark] = []
    wrong: list[str] = []
    for file in sorted(tests.rglob("*.py")):
        marks += _marks_of(file, file.relative_to(tests).as_posix(), known, wrong)
    if wrong:
        raise MarkError("\n".join(wrong))
    return sorted(set(marks))


def _marks_of(file: Path, path: str, known: frozenset[str], wrong: list[str]) -> Iterator[Mark]:
    text = file.read_text("utf-8")
    comments = {line: comment for line, comment in _comments(text) if _MARK.match(comment) or _NEARLY.match(comment)}
    if not comments:
        return
    functions = _tests_of(ast.parse(text, path))
    own_lines = {number for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    for line, comment in comments.items():
        mark = _MARK.fullmatch(comment)
        function = _function_at(line, functions, own_lines)
        if mark is None:
            if _NEARLY.match(comment):
                wrong.append(f"tests/{path}:{line}: {comment!r} is no mark: write nothing but ids, as '# L17, C4'")
            continue
        if function is None:
            wrong.append(f"tests/{path}:{line}: {comment!r} stands neither directly above a test nor within one")
            continue
        rules = [rule.strip() for rule in mark[1].split(",")]
        wrong += [f"tests/{path}:{line}: there is no rule {rule}" for rule in rules if rule not in known]
        yield from (Mark(path=path, line=function.lineno, test=function.name, rule=rule) for rule in rules)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _tests_of(tree: ast.Module) -> list[FunctionNode]:
    """Test functions of a module, and test methods of its classes (hypothesis' machines are such)."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = (node for body in bodies for node in body if isinstance(node, FunctionNode))
    return [function for function in functions if function.name.startswith("test_")]


def _function_at(line: int, functions: Iterable[FunctionNode], own_lines: set[int]) -> FunctionNode | None:
    """The test around a line, or below it with nothing but comments between."""
    while True:
        for function in functions:
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            if first <= line <= (function.end_lineno or line):
                return function
        if line not in own_lines:
            return None
        line += 1


# -- page --


def page(families: Families, marks: Iterable[Mark]) -> str:
    """The whole text of docs/rules.md."""
    tests: dict[str, list[str]] = {}
    for mark in marks:
        tests.setdefault(mark.rule, []).append(f"`{mark.path}::{mark.test}`")
    lines = [HEAD]
    for family, sentences in families.items():
        held = {rule: text for rule, text in sentences.items() if rule in tests}
        if held:
            lines += [f"## {family}", "", "| rule | what holds | tests |", "|---|---|---|"]
            lines += [f"| {rule} | {text} | {'<br>'.join(tests[rule])} |" for rule, text in held.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
