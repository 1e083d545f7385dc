"""What the documentation's tests share: its pages cut into blocks, and one real run of every command."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.checkpoints import DECODER, decoder, write_checkpoint
from weightwire.service.cli.main import run

ROOT = Path(__file__).parents[2]
COMMAND = Path(sysconfig.get_path("scripts")) / "weightwire"
MODEL = "org/tiny"
# Members whose own keys are names of instances.
# Members whose keys are names or rank numbers, which differ from run to run.
KEYED_BY_NAME = {"reasons", "bytes_per_target_rank"}
EXAMPLE = re.compile(r"<!-- example: (?P<name>[^>]+?) -->\s*```json\n(?P<text>.*?)```", re.DOTALL)

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed on stdout, and its exit code (None for one that goes on)."""

    value: Json
    code: int | None


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / name).read_text("utf-8")


def examples(text: str) -> Mapping[str, Json]:
    """The JSON blocks that follow a comment `<!-- example: NAME -->`, by name."""
    return {match["name"]: json.loads(match["text"]) for match in EXAMPLE.finditer(text)}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table(text: str, heading: str, head: str = "") -> list[list[str]]:
    """The rows of a table below a heading, without its head; cells without backticks.

    Args:
        head: What the first cell of the table's head says; by default the first table counts.
    """
    _, found, rest = text.partition(f"# {heading}\n")
    assert found, f"no heading {heading!r}"
    lines = rest[rest.index(f"\n| {head}".rstrip()) + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def differences(documented: Json, real: Json, path: str = "") -> list[str]:
    """Where the keys of two JSON values differ, all the way down. Lists are compared by their first items.

    A null, or a list without items, is like anything: a member may be empty in one run and not in another.
    """
    match documented, real:
        case dict(), dict():
            lines = [f"{path}.{key}: only documented" for key in documented if key not in real]
            lines += [f"{path}.{key}: not documented" for key in real if key not in documented]
            for key in sorted((documented.keys() & real.keys()) - KEYED_BY_NAME):
                lines += differences(documented[key], real[key], f"{path}.{key}")
            return lines
        case [first, *_], [real_first, *_]:
            return differences(first, real_first, f"{path}[0]")
        case (None, _) | (_, None) | ([], list()) | (list(), []):
            return []
    containers = isinstance(documented, dict | list) or isinstance(real, dict | list)
    return [f"{path}: documented as {documented!r}, is {real!r}"] if containers else []


@pytest.fixture(scope="session", autouse=True)
def without_variables() -> Iterator[None]:
    """The environment of whoever runs the tests decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("WEIGHTWIRE_"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, without_variables: None) -> Iterator[Mapping[str, Answer]]:
    """Every command of docs/cli.md with --json, run once against one service; the names are those of the examples."""
    folder = tmp_path_factory.mktemp("commands")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save_file({"embed.weight": torch.ones(6, 4), "norm.weight": torch.ones(4)}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text("{}")
    with contextlib.ExitStack() as stack:
        found = {"serve": stack.enter_context(started("serve", "--port", "0"))}
        assert isinstance(found["serve"].value, dict)
        here = ("--service", str(found["serve"].value["url"]), "--model", MODEL)
        source = ("source", str(checkpoint), *here, "--exclude", "norm.*")
        found["source"] = stack.enter_context(started(*source))
        found["plan"] = finished("plan", *here)
        pull = ("pull", *here, "--checkpoint", str(checkpoint))
        found["pull"] = finished(*pull, "--save", str(folder / "saved"))
        found["pull that failed"] = finished("pull", *here)
        found["wrong usage"] = finished(*pull, "--stream", "2")
        found["status"] = finished("status", *here[:2])
        assert isinstance(found["pull"].value, dict)
        transfer = str(found["pull"].value["transfer_id"])
        found["status of a transfer"] = finished("status", transfer, *here[:2])
        assert isinstance(found["source"].value, dict)
        limited = ("limit", str(found["source"].value["instance_id"]), *here[:2])
        found["limit"] = finished(*limited, "--max-rate", "1GB", "--max-readers", "4")
        found["cancel"] = finished("cancel", transfer, *here[:2])
        found["load"] = finished("load", str(checkpoint), "--exclude", "norm.*")
        model = write_checkpoint(folder / "model", decoder(), DECODER)
        two_stages = ("--from", "tp=2", "--to", "tp=1,pp=2")
        found["plan without a service"] = finished("plan", "--config", str(model), *two_stages)
        found["load for a topology"] = finished("load", str(model), "--tp", "2")
        found["load that failed"] = finished("load", str(model), "--tp", "3")
        shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
        found["inspect"] = finished(
            "inspect", str(model), "--explain", "model.layers.0.self_attn.q_proj.weight", "--tp", "2", "--rank", "1"
        )
        found["bench pull"] = finished("bench", "pull", "--mib", "1")
        found["pull --serve"] = stack.enter_context(started(*pull, "--serve"))
        yield found


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Answer]:
    """A long-running command, with its ready line; stopped by its own handle."""
    process = subprocess.Popen([COMMAND, *arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Answer(value=json.loads(process.stdout.readline()), code=None)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log.decode()


def finished(*arguments: str) -> Answer:
    """A command that ends by itself, run in this process: it saves the start of another one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = run([*arguments, "--json"])
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = printed.getvalue().splitlines()
    return Answer(value=json.loads(line), code=code)


def generate(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a generator of docs/ with some arguments."""
    command = [sys.executable, str(ROOT / "docs" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)
