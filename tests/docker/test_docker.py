"""The files of docker/, checked without an engine: they parse, fit the tree, and their commands really run."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote, urlsplit

import pytest
import torch
import typer.main
import yaml
from safetensors.torch import save_file

from weightwire.service.cli.main import app

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
ORDER = ("service", "source", "target")
VARIABLES = {
    "WEIGHTWIRE_TOKEN": secrets.token_urlsafe(32),
    "SOURCE_CHECKPOINT": "/models/source",
    "TARGET_CHECKPOINT": "/models/target",
}


class Healthcheck(TypedDict):
    test: list[str]


class Dependency(TypedDict):
    condition: str


class Build(TypedDict):
    context: str
    dockerfile: str
    args: dict[str, str]


class Container(TypedDict, total=False):
    """The members of a compose service that the tests look at."""

    build: Build
    command: list[str]
    environment: dict[str, str]
    volumes: list[str]
    depends_on: dict[str, Dependency]
    healthcheck: Healthcheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    word: str
    rest: str


def read_dockerfile(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines()
    split = [line.strip().partition(" ") for line in joined if line.strip()]
    return [Instruction(word=word.upper(), rest=rest.strip()) for word, _, rest in split]


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Fill in `${NAME}`, `${NAME:-default}` and `${NAME:?message}` as compose does.

    Raises:
        KeyError: For a variable that must be set and is not.
    """

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == ":-":
            return rest
        raise KeyError(f"{name}: {rest}")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


def read_compose(variables: Mapping[str, str]) -> dict[str, Container]:
    # Comments show shell substitutions that compose never sees.
    lines = [line for line in COMPOSE.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
    containers: dict[str, Container] = yaml.safe_load(interpolate("\n".join(lines), variables))["services"]
    return containers


@pytest.fixture(scope="module")
def dockerfile() -> list[Instruction]:
    return read_dockerfile((ROOT / "docker" / "Dockerfile").read_text("utf-8"))


@pytest.fixture(scope="module")
def containers() -> dict[str, Container]:
    return read_compose(VARIABLES)


def rests(dockerfile: list[Instruction], word: str) -> list[str]:
    return [instruction.rest for instruction in dockerfile if instruction.word == word]


def copied_paths(dockerfile: list[Instruction]) -> list[str]:
    return [source for rest in rests(dockerfile, "COPY") for source in rest.split()[:-1]]


def test_read_dockerfile_joins_lines_and_drops_comments() -> None:
    text = "# a\nFROM x\nRUN a \\\n  # b\n  && c\n\nuser 1\n"
    found = [(instruction.word, " ".join(instruction.rest.split())) for instruction in read_dockerfile(text)]
    assert found == [("FROM", "x"), ("RUN", "a && c"), ("USER", "1")]


def test_dockerfile_copies_only_what_is_there(dockerfile: list[Instruction]) -> None:
    assert copied_paths(dockerfile)
    assert [path for path in copied_paths(dockerfile) if not (ROOT / path).exists()] == []


def test_dockerfile_copies_all_that_the_package_is_made_of(dockerfile: list[Instruction]) -> None:
    needed = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "transfer/", "service/", "engine_hooks/"}
    assert set(copied_paths(dockerfile)) == needed


def test_dockerignore_lets_exactly_the_copied_paths_in(dockerfile: list[Instruction]) -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(copied_paths(dockerfile))


def test_dockerfile_ends_as_a_user_without_rights(dockerfile: list[Instruction]) -> None:
    assert rests(dockerfile, "USER")[-1].partition(":")[0] not in ("root", "0")
    assert not [rest for rest in rests(dockerfile, "RUN") if "sudo" in rest]


def test_dockerfile_makes_the_user_that_it_ends_as(dockerfile: list[Instruction]) -> None:
    (user,) = rests(dockerfile, "USER")
    assert [rest for rest in rests(dockerfile, "RUN") if re.search(rf"\buseradd\b.*\b{user}\b", rest)]


def test_dockerfile_health_check_is_a_program_that_compiles(dockerfile: list[Instruction]) -> None:
    (check,) = rests(dockerfile, "HEALTHCHECK")
    program, flag, code = json.loads(check.partition("CMD ")[2])
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert "/healthz" in code


def test_dockerfile_starts_the_command_in_exec_form(dockerfile: list[Instruction]) -> None:
    """A shell in between would swallow SIGTERM."""
    (entrypoint,) = rests(dockerfile, "ENTRYPOINT")
    assert json.loads(entrypoint) == ["weightwire"]


def test_dockerfile_installs_the_pinned_torch(dockerfile: list[Instruction]) -> None:
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (default,) = [rest.partition("=")[2].strip('"') for rest in rests(dockerfile, "ARG") if rest.startswith("TORCH=")]
    assert default in constraints


def test_compose_builds_from_the_dockerfile(containers: dict[str, Container], dockerfile: list[Instruction]) -> None:
    names = {rest.partition("=")[0] for rest in rests(dockerfile, "ARG")}
    for container in containers.values():
        context = (COMPOSE.parent / container["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / container["build"]["dockerfile"]).is_file()
        assert container["build"]["args"].keys() <= names


@pytest.mark.parametrize("name", list(VARIABLES))
def test_compose_refuses_to_start_without(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        read_compose({key: value for key, value in VARIABLES.items() if key != name})


def test_compose_starts_each_container_after_what_it_needs(containers: dict[str, Container]) -> None:
    needs = {name: set(container.get("depends_on", {})) for name, container in containers.items()}
    assert needs == {"service": set(), "source": {"service"}, "target": {"service", "source"}}
    dependencies = [
        dependency for container in containers.values() for dependency in container.get("depends_on", {}).values()
    ]
    assert {dependency["condition"] for dependency in dependencies} == {"service_healthy"}


def test_compose_gives_every_container_the_same_token(containers: dict[str, Container]) -> None:
    tokens = {container["environment"]["WEIGHTWIRE_TOKEN"] for container in containers.values()}
    assert tokens == {VARIABLES["WEIGHTWIRE_TOKEN"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The three containers as processes of this machine: each container's host is a loopback address of its own."""

    containers: Mapping[str, Container]
    addresses: Mapping[str, str]
    folder: Path

    def here(self, name: str, text: str) -> str:
        """`text` of container `name` with its hosts and paths replaced by those of this machine."""
        text = text.replace("0.0.0.0", self.addresses[name]).replace("'127.0.0.1'", repr(self.addresses[name]))
        for other, address in self.addresses.items():
            text = text.replace(f"http://{other}:", f"http://{address}:")
        for volume in self.containers[name].get("volumes", []):
            inside = volume.split(":")[1]
            text = re.sub(rf"(?<![\w/]){inside}\b", str(self.folder / f"{name}{inside}"), text)
        return text

    def arguments(self, name: str) -> list[str]:
        return [self.here(name, argument) for argument in self.containers[name]["command"]]

    def start(self, name: str) -> subprocess.Popen[str]:
        program = Path(sys.executable).parent / "weightwire"
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [program, *self.arguments(name)],
                cwd=self.folder,
                env=self.containers[name]["environment"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def is_healthy(self, name: str) -> bool:
        """Run the container's own health check, once."""
        word, program, *arguments = self.containers[name]["healthcheck"]["test"]
        assert (word, program) == ("CMD", "python")
        command = [sys.executable, *(self.here(name, argument) for argument in arguments)]
        return subprocess.run(command, cwd=self.folder, timeout=30, check=False).returncode == 0


@pytest.fixture
def lab(containers: dict[str, Container], tmp_path: Path) -> Lab:
    # Ports stay those of the file: a loopback network that nobody else has is drawn instead.
    network = f"127.{100 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
    addresses = {name: f"{network}.{number}" for number, name in enumerate(ORDER, start=1)}
    (tmp_path / "service" / "data").mkdir(parents=True)
    for name in ("source", "target"):
        save_checkpoint(tmp_path / name / "checkpoint")
    return Lab(containers=containers, addresses=addresses, folder=tmp_path)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"layers.{number}.weight": torch.randn(64, 33, generator=generator) for number in range(8)}


def save_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "plain"}), "utf-8")


@pytest.fixture
def running(lab: Lab) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Filled by the test; whatever still runs at its end is killed."""
    processes: dict[str, subprocess.Popen[str]] = {}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ready_line(process: subprocess.Popen[str], log: Path) -> dict[str, object]:
    """Wait for the first line of standard output; the test's own timeout is the deadline."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"exit code {process.wait()}: {log.read_text('utf-8')}"
    answer: dict[str, object] = json.loads(line)
    return answer


@pytest.mark.parametrize("name", ORDER)
def test_compose_commands_are_accepted_by_the_command_line(lab: Lab, name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("weightwire", lab.arguments(name))
    found, command, rest = group.resolve_command(context, lab.arguments(name))
    assert found == lab.containers[name]["command"][0]
    assert command is not None
    # Raises a usage error for an option that is unknown or has a value of the wrong kind.
    command.make_context(found, rest, parent=context)


def test_compose_commands_fill_a_target_and_stop_on_sigterm(
    lab: Lab, running: dict[str, subprocess.Popen[str]]
) -> None:
    urls: dict[str, str] = {}
    for name in ORDER:
        running[name] = lab.start(name)
        answer = ready_line(running[name], lab.folder / f"{name}.log")
        assert answer["ready"] is True
        urls[name] = str(answer["url"])
        assert lab.is_healthy(name)
    assert [urlsplit(urls[name]).hostname for name in ORDER] == [lab.addresses[name] for name in ORDER]
    for key, tensor in tensors().items():
        assert read_tensor(urls["target"], key) == tensor.numpy().tobytes()
    for name in reversed(ORDER):
        running[name].send_signal(signal.SIGTERM)
        running[name].communicate()
        assert running[name].returncode == 0, (lab.folder / f"{name}.log").read_text("utf-8")


def read_tensor(url: str, name: str) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    headers = {"Authorization": f"Bearer {VARIABLES['WEIGHTWIRE_TOKEN']}"}
    connection.request("GET", f"/v1/tensors/{quote(name, safe='')}", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status == 200, body
    return body
