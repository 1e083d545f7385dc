"""Rules about the code itself: who may import whom, and what a file may contain.

Each rule is a function from a tree of modules to the sentences that say what is wrong. Every rule runs twice: on this
repository, where it must find nothing, and on a small planted tree, where it must find the offence.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("transfer", "service", "engine_hooks")
OURS = ("weightwire",)
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks")

MAY_IMPORT = {
    "weightwire.transfer": ("weightwire.transfer",),
    "weightwire.service": ("weightwire.service", "weightwire.transfer"),
    "weightwire.engine_hooks": ("weightwire.engine_hooks", "weightwire.transfer", "weightwire.service.client"),
}
PURE = tuple(
    f"weightwire.transfer.{name}"
    for name in (
        *("agreement", "boxes", "coverage", "dtypes", "errors", "intervals", "manifest", "placement", "plan"),
        *("planning", "regions", "resharding", "runs", "session", "sharing", "tickets", "units"),
    )
)
# A lock around a switch of the interpreter, and nothing else.
HARMLESS = ("weightwire.transfer.collector",)
IMPURE_PACKAGES = ("weightwire.transfer.wire", "weightwire.transfer.checkpoint")
WORLD = (
    *("asyncio", "concurrent", "http", "httpx", "multiprocessing", "queue", "select", "selectors", "socket"),
    *("socketserver", "ssl", "subprocess", "threading", "urllib.request"),
)
FRAMEWORKS = ("fastapi", "starlette", "uvicorn", "typer", "rich", "httpx", "pydantic", "prometheus_client")
ENGINES = ("vllm", "sglang")
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")
BANNED_STEMS = ("common", "helper", "helpers", "manager", "misc", "util", "utils")
MAX_FUNCTION_LINES = 50
MAX_POSITIONAL = 4

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One parsed file.

    Attributes:
        name: Import name, as `weightwire.transfer.errors`; for files outside the packages a dotted path.
        path: Relative to the root of its tree.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name, with the module it is taken from in front of it."""

    name: str
    line: int


Modules = Mapping[str, Module]
Rule = Callable[[Path, Modules], Iterator[str]]


def read_modules(root: Path) -> dict[str, Module]:
    """Parse every Python file of the folders of a repository, keyed by import name."""
    found: dict[str, Module] = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root)
            parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
            name = ".".join(("weightwire", *parts) if folder in PACKAGES else parts)
            found[name] = Module(name=name, path=path, tree=ast.parse(file.read_text("utf-8"), str(path)))
    return found


@cache
def modules_here() -> Modules:
    """Those of this repository, parsed once."""
    return read_modules(ROOT)


def ours(modules: Modules) -> Iterator[Module]:
    """The modules that are installed."""
    return (module for module in modules.values() if module.name.startswith("weightwire."))


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every absolute import below `tree`, also those inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name=alias.name, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (Import(name=f"{node.module}.{alias.name}", line=node.lineno) for alias in node.names)


def resolve(name: str, modules: Modules) -> str | None:
    """The module of ours that `name` is, or is taken from."""
    while name:
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return None


def edges(modules: Modules) -> dict[str, set[str]]:
    """Which module of ours each module of ours imports, as written (importing `a.b` does not count as `a`)."""
    graph: dict[str, set[str]] = {}
    for module in ours(modules):
        targets = (resolve(imported.name, modules) for imported in imports_of(module.tree))
        graph[module.name] = {target for target in targets if target is not None}
    return graph


def reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """All that `start` imports, directly or not; `start` itself only if it lies on a cycle."""
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph.get(name, ()))
    return seen


def functions_of(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def length_of(function: FunctionNode, *, with_signature: bool) -> int:
    """Lines of a function without its decorators and its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not statements:
        return 0
    body = (function.end_lineno or function.lineno) - statements[0].lineno + 1
    return body + (function.body[0].lineno - function.lineno if with_signature else 0)


def layers(_root: Path, modules: Modules) -> Iterator[str]:
    for module in ours(modules):
        package = ".".join(module.name.split(".")[:2])
        for imported in imports_of(module.tree):
            if is_within(imported.name, OURS) and not is_within(imported.name, MAY_IMPORT[package]):
                yield f"{module.path}:{imported.line}: {package} may not import {imported.name}"


def transfer_frameworks(_root: Path, modules: Modules) -> Iterator[str]:
    for module in ours(modules):
        for imported in imports_of(module.tree):
            if is_within(module.name, ("weightwire.transfer",)) and is_within(imported.name, FRAMEWORKS):
                yield f"{module.path}:{imported.line}: the data plane may not import {imported.name}"


def pure_modules(_root: Path, modules: Modules) -> Iterator[str]:
    graph = edges(modules)
    for name in PURE:
        for reached in sorted(({name, *reachable(name, graph)} & modules.keys()) - set(HARMLESS)):
            if is_within(reached, IMPURE_PACKAGES):
                yield f"{modules[name].path}: is pure, yet it reaches {reached}"
            for imported in imports_of(modules[reached].tree):
                if is_within(imported.name, WORLD):
                    yield f"{modules[name].path}: is pure, yet {reached} imports {imported.name}"
        if name in modules and name != "weightwire.transfer.dtypes":
            for imported in imports_of(modules[name].tree):
                if is_within(imported.name, ("torch",)):
                    yield f"{modules[name].path}:{imported.line}: only dtypes.py of the pure modules knows torch"


def import_cycles(_root: Path, modules: Modules) -> Iterator[str]:
    graph = edges(modules)
    cyclic = {name: reachable(name, graph) for name in graph}
    for name in sorted(name for name, reached in cyclic.items() if name in reached):
        circle = sorted(other for other in cyclic[name] if name in cyclic.get(other, ()))
        yield f"{modules[name].path}: imports itself by way of {', '.join(circle)}"


def relative_imports(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{module.path}:{node.lineno}: relative import"


def short_names(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for imported in imports_of(module.tree):
            if is_within(imported.name, PACKAGES):
                yield f"{module.path}:{imported.line}: write weightwire.{imported.name}"


def engine_imports(_root: Path, modules: Modules) -> Iterator[str]:
    for module in ours(modules):
        lazy = {id(node) for function in functions_of(module.tree) for node in ast.walk(function)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in lazy:
                for imported in imports_of(node):
                    if is_within(imported.name, ENGINES):
                        yield f"{module.path}:{imported.line}: import {imported.name} inside a function"


def pickles(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for imported in imports_of(module.tree):
            if is_within(imported.name, PICKLES):
                yield f"{module.path}:{imported.line}: imports {imported.name}"
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
                continue
            if "weights_only=True" not in ast.unparse(node):
                yield f"{module.path}:{node.lineno}: torch.load without weights_only=True"


def environment(_root: Path, modules: Modules) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    for module in ours(modules):
        if module.name == "weightwire.service.settings":
            continue
        for imported in imports_of(module.tree):
            if imported.name in names:
                yield f"{module.path}:{imported.line}: only service/settings.py reads the environment"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
                yield f"{module.path}:{node.lineno}: only service/settings.py reads the environment"


def explicit_any(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        if is_within(module.name, ("weightwire.engine_hooks",)):
            continue
        for imported in imports_of(module.tree):
            if imported.name == "typing.Any":
                yield f"{module.path}:{imported.line}: Any belongs to engine_hooks alone"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("typing.Any", "t.Any"):
                yield f"{module.path}:{node.lineno}: Any belongs to engine_hooks alone"


def file_names(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        banned = [part for part in module.path.with_suffix("").parts if part in BANNED_STEMS]
        yield from (f"{module.path}: {name!r} says nothing about what is inside" for name in banned)


def long_functions(_root: Path, modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for function in functions_of(module.tree):
            # The signature of a command is its table of flags, with their help.
            is_command = is_within(module.name, ("weightwire.service.cli",))
            lines = length_of(function, with_signature=not is_command)
            if lines > MAX_FUNCTION_LINES:
                yield f"{module.path}:{function.lineno}: {function.name} has {lines} lines"


def positional_parameters(_root: Path, modules: Modules) -> Iterator[str]:
    for module in ours(modules):
        for function in functions_of(module.tree):
            names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MAX_POSITIONAL:
                yield f"{module.path}:{function.lineno}: {function.name} has {count} positional parameters"


def exported_names(tree: ast.Module) -> list[str] | None:
    """The value of `__all__`, or None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def package_exports(_root: Path, modules: Modules) -> Iterator[str]:
    for module in ours(modules):
        if not module.is_package:
            continue
        exported = exported_names(module.tree)
        public = {item.name.rpartition(".")[2] for item in imports_of(module.tree) if is_within(item.name, OURS)}
        if exported is None:
            if public:
                yield f"{module.path}: imports names but has no __all__"
            continue
        if exported != sorted(set(exported)):
            yield f"{module.path}: __all__ is not sorted, expected {sorted(set(exported))}"
        yield from (f"{module.path}: {name} is imported but not in __all__" for name in sorted(public - set(exported)))


def listed_packages(root: Path, modules: Modules) -> Iterator[str]:
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    listed = set(settings["packages"])
    present = {module.name.rpartition(".")[0] if not module.is_package else module.name for module in ours(modules)}
    yield from (f"pyproject.toml: {name} is in the tree, but not in packages" for name in sorted(present - listed))
    yield from (f"pyproject.toml: {name} is in packages, but not in the tree" for name in sorted(listed - present))
    for name in sorted(present - modules.keys()):
        yield f"{name.removeprefix('weightwire.').replace('.', '/')}: has no __init__.py"
    for folder in PACKAGES:
        if settings["package-dir"].get(f"weightwire.{folder}") != folder:
            yield f"pyproject.toml: package-dir does not map weightwire.{folder} to {folder}"
        if not (root / folder / "py.typed").is_file():
            yield f"{folder}: has no py.typed"


PYPROJECT = """
[tool.setuptools]
packages = ["weightwire.transfer", "weightwire.service", "weightwire.engine_hooks"]
[tool.setuptools.package-dir]
"weightwire.transfer" = "transfer"
"weightwire.service" = "service"
"weightwire.engine_hooks" = "engine_hooks"
"""
LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
WIDE = "def f(\n    *,\n" + "".join(f"    flag_{number}: int,\n" for number in range(60)) + "): ...\n"
DOCUMENTED = 'def f():\n    """Short.\n' + "\n    more\n" * 60 + '    """\n    return 1\n'

# A rule, the files that break it, and the line it must say about them.
OFFENCES = [
    (layers, {"transfer/a.py": "from weightwire.service import settings"}, "transfer may not import"),
    (layers, {"service/a.py": "import weightwire.engine_hooks.base"}, "service may not import"),
    (layers, {"engine_hooks/a.py": "from weightwire.service import registry"}, "engine_hooks may not import"),
    (layers, {"transfer/a.py": "def f():\n    import weightwire.service"}, "transfer/a.py:2: "),
    (transfer_frameworks, {"transfer/wire/a.py": "from fastapi import FastAPI"}, "may not import fastapi.FastAPI"),
    (pure_modules, {"transfer/regions.py": "import socket"}, "imports socket"),
    (pure_modules, {"transfer/session.py": "import urllib.request"}, "imports urllib.request"),
    (pure_modules, {"transfer/planning.py": "import torch"}, "only dtypes.py"),
    (
        pure_modules,
        {
            "transfer/planning.py": "from weightwire.transfer import middle",
            "transfer/middle.py": "from weightwire.transfer.wire import puller",
            "transfer/wire/__init__.py": "",
            "transfer/wire/puller.py": "",
        },
        "reaches weightwire.transfer.wire.puller",
    ),
    (
        import_cycles,
        {"transfer/a.py": "import weightwire.transfer.b", "transfer/b.py": "from weightwire.transfer.a import f"},
        "transfer/a.py: imports itself by way of weightwire.transfer.a, weightwire.transfer.b",
    ),
    (
        import_cycles,
        {
            "transfer/__init__.py": "from weightwire.transfer.a import f",
            "transfer/a.py": "from weightwire.transfer import g",
        },
        "transfer/__init__.py: imports itself",
    ),
    (relative_imports, {"transfer/a.py": "from .errors import TransferError"}, "transfer/a.py:1: relative"),
    (short_names, {"tests/test_a.py": "from transfer.errors import X"}, "write weightwire.transfer.errors.X"),
    (engine_imports, {"engine_hooks/vllm.py": "import vllm.config"}, "import vllm.config inside a function"),
    (pickles, {"tests/test_a.py": "def f():\n    from pickle import loads"}, "tests/test_a.py:2: imports pickle"),
    (pickles, {"transfer/a.py": "import torch\ntorch.load(p, weights_only=False)"}, "torch.load without"),
    (environment, {"transfer/a.py": "import os\nx = os.environ['X']"}, "transfer/a.py:2: only service/settings.py"),
    (environment, {"service/a.py": "from os import getenv"}, "service/a.py:1: only service/settings.py"),
    (explicit_any, {"tests/test_a.py": "from typing import Any"}, "tests/test_a.py:1: Any belongs"),
    (explicit_any, {"service/a.py": "import typing\nx: typing.Any = 1"}, "service/a.py:2: Any belongs"),
    (file_names, {"transfer/wire/utils.py": ""}, "'utils' says nothing"),
    (file_names, {"service/helpers/x.py": ""}, "'helpers' says nothing"),
    (long_functions, {"tests/test_a.py": LONG}, "f has 51 lines"),
    (long_functions, {"service/cli/a.py": LONG + "    y = 2\n"}, "f has 51 lines"),
    (long_functions, {"transfer/a.py": WIDE}, "f has 63 lines"),
    (positional_parameters, {"transfer/a.py": "def f(a, b, c, d, e): ..."}, "f has 5 positional parameters"),
    (package_exports, {"transfer/__init__.py": "from weightwire.transfer.a import f"}, "has no __all__"),
    (package_exports, {"transfer/__init__.py": "__all__ = ['b', 'a']"}, "expected ['a', 'b']"),
    (
        package_exports,
        {"transfer/__init__.py": "from weightwire.transfer.a import f, g\n__all__ = ['f']"},
        "g is imported but not in __all__",
    ),
    (listed_packages, {"transfer/wire/__init__.py": ""}, "weightwire.transfer.wire is in the tree, but not"),
    (
        listed_packages,
        {"pyproject.toml": PYPROJECT.replace("e.service", "e.gone", 1)},
        "weightwire.gone is in packages",
    ),
    (listed_packages, {"service/cli/a.py": ""}, "service/cli: has no __init__.py"),
    (listed_packages, {"pyproject.toml": PYPROJECT.replace('= "transfer"', '= "other"')}, "does not map"),
]
INNOCENT = {
    "transfer/regions.py": "from weightwire.transfer import errors\nimport urllib.parse",
    "transfer/errors.py": DOCUMENTED,
    "transfer/dtypes.py": "import torch",
    "service/settings.py": "import os\nx = os.environ",
    "service/app.py": "import asyncio\nfrom weightwire.transfer.errors import X\ndef f(self, a, b, c, d, *, e): ...",
    "service/cli/__init__.py": "",
    "service/cli/pull.py": WIDE,
    "service/client/__init__.py": "__all__ = ['f']\nfrom weightwire.service.app import f",
    "engine_hooks/vllm.py": "from typing import Any\nimport weightwire.service.client\ndef f():\n    import vllm",
    "tests/test_a.py": "import os, socket, torch\nos.environ\ntorch.load(p, weights_only=True)",
    "pyproject.toml": PYPROJECT.replace(
        '"weightwire.service",', '"weightwire.service", "weightwire.service.cli", "weightwire.service.client",'
    ),
}
RULES: tuple[Rule, ...] = tuple(dict.fromkeys(rule for rule, _, _ in OFFENCES))


def title(rule: Rule) -> str:
    return rule.__name__.replace("_", " ")


def plant(root: Path, files: Mapping[str, str]) -> Modules:
    """Write a repository of empty packages with `files` in it, and parse it."""
    empty = {f"{package}/{name}": "" for package in PACKAGES for name in ("__init__.py", "py.typed")}
    for name, text in ({"pyproject.toml": PYPROJECT} | empty | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return read_modules(root)


@pytest.mark.parametrize("rule", RULES, ids=title)
def test_repository_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(ROOT, modules_here())) == []


@pytest.mark.parametrize(
    ("rule", "files", "expected"), [pytest.param(*case, id=f"{title(case[0])}: {case[2]}") for case in OFFENCES]
)
def test_rule_finds_a_planted_offence(tmp_path: Path, rule: Rule, files: Mapping[str, str], expected: str) -> None:
    found = list(rule(tmp_path, plant(tmp_path, files)))
    assert [sentence for sentence in found if expected in sentence], found


@pytest.mark.parametrize("rule", RULES, ids=title)
def test_rule_lets_good_code_pass(tmp_path: Path, rule: Rule) -> None:
    assert list(rule(tmp_path, plant(tmp_path, INNOCENT))) == []


def test_repository_is_read_whole() -> None:
    """An empty reading would keep every rule."""
    modules = modules_here()
    assert {"weightwire.transfer", "weightwire.transfer.errors", "tests.test_architecture"} <= modules.keys()
    assert edges(modules)["weightwire.transfer.dtypes"] == {"weightwire.transfer.errors"}


def test_pure_modules_are_where_the_rule_looks() -> None:
    assert set(PURE) <= modules_here().keys()


@pytest.mark.parametrize(
    "name", [module.name for module in ours(modules_here()) if module.is_package], ids=lambda name: f"{name}"
)
def test_package_has_every_name_that_it_exports(name: str) -> None:
    package = importlib.import_module(name)
    exported: list[str] = getattr(package, "__all__", [])
    assert [missing for missing in exported if not hasattr(package, missing)] == []


def test_tests_mirror_the_packages() -> None:
    """A folder of tests stands for a package; a name of its own says that it moved."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    names = (
        *("docker", "examples", "benchmarks", "contracts", "docs", "faults", "gpu", "mutants", "real", "soak"),
        *("topologies", "vllm"),
    )
    others = {Path(name) for name in (".", *names)}
    strangers = sorted(str(folder) for folder in folders - others if not (ROOT / folder / "__init__.py").is_file())
    assert strangers == []


def test_code_has_nothing_left_to_do() -> None:
    # Spelled so that this line is no finding of itself.
    marker = re.compile("TO" + "DO|FIX" + "ME|NotImplemented" + "Error")
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if marker.search(path.read_text("utf-8"))] == []
