"""examples/minimal_client.py takes real weights from a real source, with the standard library alone."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from weightwire.service.client import ServiceClient, serving
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer import ModelIdentity, Shells

CLIENT = Path(__file__).parents[2] / "examples" / "minimal_client.py"
MODEL = "org/tiny model"


def tensors() -> dict[str, torch.Tensor]:
    """One of each kind that a reader can get wrong: strided, tied, empty, without dimensions, larger than a chunk."""
    large = torch.arange(3 << 18, dtype=torch.int32)
    return {
        "large": large,
        "tied": large,
        "transposed": torch.arange(600, dtype=torch.bfloat16).reshape(20, 30).t(),
        "every third": torch.arange(99, dtype=torch.int64)[::3],
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
        "half/of a byte": torch.arange(7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "gewicht-重み": torch.randn(5).to(torch.float8_e4m3fn),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    client: ServiceClient
    held: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    held = tensors()
    shells = Shells.from_tensors(held, ModelIdentity(model=MODEL, revision="1"))
    with (
        running_service(Settings(port=0, token=None, read_token=None)) as url,
        ServiceClient(url) as client,
        serving(client, shells),
    ):
        yield Running(client=client, held=held)


def run(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, str(CLIENT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(("-I", "-S"), "checksums not compared", id="without any package"),
        pytest.param((), "checksums compared", id="with xxhash"),
    ],
)
def test_client_writes_every_tensor_byte_for_byte(
    flags: tuple[str, ...], says: str, running: Running, tmp_path: Path
) -> None:
    done = run(running.client.url, MODEL, str(tmp_path), flags=flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(says)
    for name, tensor in running.held.items():
        written = (tmp_path / quote(name, safe="")).read_bytes()
        assert written == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), name
    assert len(list(tmp_path.iterdir())) == len(running.held)


def test_client_reports_its_end_and_leaves(running: Running, tmp_path: Path) -> None:
    assert run(running.client.url, MODEL, str(tmp_path)).returncode == 0
    newest = running.client.transfers()[0]
    assert newest["state"] == "ready"
    assert newest["bytes_peer"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert newest["target_instance_id"] not in [item["instance_id"] for item in running.client.instances()]


def test_client_says_what_a_source_refuses(running: Running, tmp_path: Path) -> None:
    with pytest.raises(urllib.request.HTTPError, match="404"):
        urllib.request.urlopen(f"{running.client.url}/v1/transfers/unknown", timeout=20)
    refused = run(running.client.url, "org/unknown", str(tmp_path))
    assert refused.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_client_is_short() -> None:
    code = CLIENT.read_text("utf-8").partition("service, model, folder")[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 50
