"""The wheel and the editable install, each in an environment of its own, far from the repository."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("transfer", "service", "engine_hooks")
ENGINES = {"vllm", "sglang"}  # imported only where they are
# Imports every module that it is told, and says where each came from.
IMPORT_ALL = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""
# What the console script does, short of running it.
LOAD_COMMAND = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="weightwire")
print(command.load().__module__)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment with weightwire in it, and the folder from which weightwire must come."""

    folder: Path
    origin: Path

    def run(self, code: str, *arguments: str) -> str:
        return run(self.folder / "bin" / "python", "-c", code, *arguments, cwd=self.folder)


def run(program: Path, *arguments: str, cwd: Path) -> str:
    """Run `program` to its end and return what it printed; its own words are the message if it fails."""
    done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def modules_of(root: Path) -> dict[str, str]:
    """Import name -> path within a wheel, of every module of ours."""
    files = sorted(path.relative_to(root) for folder in PACKAGES for path in (root / folder).rglob("*.py"))
    names = {path: path.parent if path.name == "__init__.py" else path.with_suffix("") for path in files}
    return {".".join(("weightwire", *name.parts)): f"weightwire/{path}" for path, name in names.items()}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs: in the repository itself, older builds lie in the way."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from an sdist, so that the sdist is known to be whole too."""
    built = tmp_path_factory.mktemp("dist")
    run(Path(sys.executable), "-m", "build", "--no-isolation", "--outdir", str(built), cwd=source_tree)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read("weightwire-0.1.0.dist-info/METADATA").decode())


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(
    request: pytest.FixtureRequest, source_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("environment")
    run(Path(sys.executable), "-m", "venv", "--without-pip", str(folder), cwd=folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Dependencies come from the environment of the tests. A path in a .pth file brings no .pth files of that folder
    # with it, so the weightwire that is installed there stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    what = ["--editable", str(source_tree), "--config-settings", "editable_mode=strict"]
    if request.param == "wheel":
        what = [str(request.getfixturevalue("wheel"))]
    pip = ("-m", "pip", "--python", str(python), "install", "--quiet", "--ignore-installed", "--no-deps")
    run(Path(sys.executable), *pip, "--no-build-isolation", *what, cwd=folder)
    yield Environment(folder=folder, origin=site if request.param == "wheel" else source_tree)
    shutil.rmtree(folder)


def test_wheel_has_every_module_and_marker_and_nothing_else(wheel: Path) -> None:
    expected = {*modules_of(ROOT).values(), *(f"weightwire/{package}/py.typed" for package in PACKAGES)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(names) == sorted(expected)


def test_wheel_metadata_states_name_license_and_python(metadata: Message) -> None:
    fields = {
        key: metadata[key] for key in ("Name", "Version", "License-Expression", "License-File", "Requires-Python")
    }
    assert fields == {
        "Name": "weightwire",
        "Version": "0.1.0",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.11",
    }


def test_wheel_metadata_states_the_extras(metadata: Message) -> None:
    assert metadata.get_all("Provides-Extra") == ["nccl", "real", "dev"]
    requirements = metadata.get_all("Requires-Dist", [])
    assert [line for line in requirements if "nccl" in line] == ['nvidia-nccl-cu12; extra == "nccl"']
    assert [line for line in requirements if line.startswith("torch")] == ["torch>=2.7"]


def test_wheel_installs_one_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("weightwire-0.1.0.dist-info/entry_points.txt").decode()
    assert text.split("\n") == ["[console_scripts]", "weightwire = weightwire.service.cli.main:main", ""]


def test_environment_imports_every_module_from_its_install(environment: Environment) -> None:
    names = modules_of(ROOT)
    found: dict[str, str] = json.loads(environment.run(IMPORT_ALL, *names))
    assert found.keys() == names.keys()
    assert [path for path in found.values() if environment.origin not in Path(path).parents] == []


def test_environment_has_a_command_that_loads(environment: Environment) -> None:
    assert environment.run(LOAD_COMMAND).strip() == "weightwire.service.cli.main"
    assert (environment.folder / "bin" / "weightwire").is_file()


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    return {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}


def required_names(requirements: list[str], *, extra: str = "") -> set[str]:
    """Names in `requirements` whose marker, if any, is only about `extra`."""
    chosen = [line for line in requirements if ";" not in line or (extra and f'extra == "{extra}"' in line)]
    return {normalised(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in chosen}


def test_constraints_pin_all_that_is_installed_for_the_tests() -> None:
    waiting = required_names(importlib.metadata.requires("weightwire") or [], extra="dev")
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= required_names(importlib.metadata.requires(name) or []) - reached
    # A CUDA build of torch brings its libraries at versions that it pins itself.
    assert {name for name in reached - pinned().keys() if not re.match("nvidia-|cuda-|triton", name)} == set()


def test_constraints_leave_the_build_of_torch_open() -> None:
    assert pinned()["torch"] == "2.13.0"
    assert [version for version in pinned().values() if "+" in version] == []


def test_dependencies_declare_all_that_the_packages_import() -> None:
    """A package that only comes along with another one may go again with its next version."""
    trees = [
        ast.parse((ROOT / path.removeprefix("weightwire/")).read_text("utf-8")) for path in modules_of(ROOT).values()
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module is not None}
    tops = {name.partition(".")[0] for name in names} - {"weightwire", *ENGINES} - sys.stdlib_module_names
    declared = required_names(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])
    assert {normalised(name) for name in tops} - declared == set()


def test_constraints_satisfy_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = [line.partition(">=") for line in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    below = [
        f"{name}: {pinned()[normalised(name)]} < {bound}"
        for name, _, bound in bounds
        if numbers(pinned()[normalised(name)]) < numbers(bound)
    ]
    assert below == []


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
