"""README.md and the links and commands of all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import typer.main
from typer.core import TyperGroup

from tests.docs.conftest import ROOT, blocks
from weightwire.service.cli.main import app
from weightwire.service.client import ServiceClient, serving
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer import ModelIdentity, Shells

README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_python_snippet_fills_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks(README, "python")
    held = torch.nn.Linear(16, 16)
    names: dict[str, torch.nn.Module] = {}
    with (
        running_service(Settings(port=0, token=None, read_token=None)) as url,
        ServiceClient(url) as client,
        serving(client, Shells.from_module(held, ModelIdentity(model="org/linear", revision="1"))),
    ):
        exec(program.replace("http://127.0.0.1:8700", url), names)
    assert torch.equal(names["module"].get_parameter("weight"), held.weight)
    assert capsys.readouterr().out == f"{16 * 16 * 4 + 16 * 4} 0\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    dead = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not _leads_somewhere(path, link)]
    assert dead == []


def _leads_somewhere(page: Path, link: str) -> bool:
    if link.startswith(("http://", "https://")):
        return True
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
    return anchor in {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    """As GitHub makes it: lower case, blanks to hyphens, everything else but letters, digits, - and _ dropped."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_have_the_flags_that_are_shown(path: Path) -> None:
    text = "\n".join(blocks(path.read_text("utf-8"), "console")).replace("\\\n", " ")
    unknown = []
    for line in re.findall(r"^\$ weightwire (.+)$", text, re.MULTILINE):
        command = typer.main.get_command(app)
        words = line.split()
        while isinstance(command, TyperGroup):
            command = command.commands[words.pop(0)]
        known = {flag for parameter in command.params for flag in parameter.opts}
        unknown += [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert unknown == []


def test_picture_is_readable_on_both_backgrounds() -> None:
    picture = (ROOT / "docs" / "picture.svg").read_text("utf-8")
    assert "prefers-color-scheme: dark" in picture
    assert "<title" in picture
    assert "docs/picture.svg" in README


def test_pages_name_no_machine_and_no_workplace() -> None:
    found = {
        path.name: match[0] for path in PAGES if (match := re.search(r"/(?:home/\w+|root|tmp|work)/", path.read_text()))
    }
    assert found == {}
