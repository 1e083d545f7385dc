"""Ten thousand tensors, and names that need care in URLs, JSON and patterns."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import quote, urlsplit

import httpx
import pytest

from tests.faults.checkpoints import check_saved, content, total_bytes, write_checkpoint, write_file
from tests.faults.processes import Json, Lab
from tests.faults.proxy import Proxy
from weightwire.service.client import ServiceClient

NAMES = [
    "model.layers.0.self_attn/q_proj.weight",
    "with space",
    " leading and trailing ",
    "percent%20sign%",
    "plus+and&and=",
    'double"quote',
    "single'quote",
    "back\\slash",
    "question?mark#hash",
    "../../etc/passwd",
    "..",
    ".",
    "/",
    "//absolute/path",
    "ünïcödé",
    "权重.模型",
    "emoji🎯.weight",
    "e\u0301 not composed",
    "é composed",
    "line\nbreak\ttab",
    "star*question?[brackets]",
    "semi;colon,comma:colon",
    "[bold]markup[/]",
    "a" * 500,
    "DATA",
    "__class__",
    "layers.1",
    "layers.10",
]


def test_pull_b46_moves_ten_thousand_small_tensors_in_few_requests(served: Lab, proxy: Proxy, tmp_path: Path) -> None:
    tensors = {f"layers.{number}.norm": content("F32", number % 97, seed=number) for number in range(10_000)}
    served.ready_source(write_checkpoint(tmp_path / "many", tensors), *proxy.flags)
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["state"], answer["bytes_peer"]) == ("ready", total_bytes(tensors))
    assert cast(Json, answer["tensors"])["identical"] == len(tensors)
    assert len(proxy.reads) < 20
    check_saved(tmp_path / "out", tensors)


def test_pull_reads_many_small_tensors_from_disk(served: Lab, tmp_path: Path) -> None:
    tensors = {f"layers.{number}.norm": content("F32", number % 97, seed=number) for number in range(4_000)}
    folder = write_checkpoint(tmp_path / "many", tensors)
    # Every second one is on disk alone, so no two gaps are neighbours.
    served.ready_source(folder, "--exclude", "layers.*[13579].norm")
    answer = served.pull("--checkpoint", folder, "--save", tmp_path / "out").finish().check(0)
    disk = sum(len(tensor.data) for name, tensor in tensors.items() if int(name.split(".")[1]) % 2)
    assert (answer["bytes_disk"], answer["bytes_peer"]) == (disk, total_bytes(tensors) - disk)
    check_saved(tmp_path / "out", tensors)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    tensors = {name: content("F32", 10 + number, seed=number) for number, name in enumerate(NAMES)}
    return write_checkpoint(tmp_path / "odd", tensors)


def test_pull_brings_tensors_of_any_name(served: Lab, odd: Path, tmp_path: Path) -> None:
    served.ready_source(odd)
    tensors = {name: content("F32", 10 + number, seed=number) for number, name in enumerate(NAMES)}
    served.pull("--save", tmp_path / "out").finish().check(0)
    check_saved(tmp_path / "out", tensors)


def get_tensor(url: str, name: str) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body; dots are encoded too, since clients and proxies resolve them in paths."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", f"/v1/tensors/{quote(name, safe='').replace('.', '%2E')}")
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def test_source_gives_tensors_of_any_name_by_url(served: Lab, odd: Path) -> None:
    url = str(served.source(odd).line()["url"])
    for number, name in enumerate(NAMES):
        status, headers, body = get_tensor(url, name)
        assert (status, body) == (200, content("F32", 10 + number, seed=number).data), name
        assert (headers["Weightwire-Dtype"], headers["Weightwire-Shape"]) == ("float32", f"[{10 + number}]")


@pytest.mark.parametrize("name", ["no such", "LAYERS.1", "layers.1 ", "../odd/model.safetensors", "%00"])
def test_source_b57_knows_no_other_name(served: Lab, odd: Path, name: str) -> None:
    url = str(served.source(odd).line()["url"])
    status, _, body = get_tensor(url, name)
    assert (status, json.loads(body)["code"]) == (404, "not_found")


def test_exclude_b15_takes_a_pattern_for_whole_names(served: Lab, odd: Path, tmp_path: Path) -> None:
    served.ready_source(odd, "--exclude", "layers.1")
    outcome = served.pull().finish()
    outcome.check(1)
    assert outcome.error["missing"] == ["layers.1"]


@pytest.mark.parametrize("model", ["org/name", "org/na me", "mödel/ü", "a/b/c", "per%2Fcent", "question?mark"])
def test_pull_takes_models_of_any_name(served: Lab, tmp_path: Path, model: str) -> None:
    tensors = {"w": content("F32", 100)}
    served.model = model
    served.ready_source(write_checkpoint(tmp_path / "model", tensors))
    with ServiceClient(served.service) as client:
        assert len(client.sources(model)) == 1
    served.pull("--save", tmp_path / "out").finish().check(0)
    check_saved(tmp_path / "out", tensors)


@pytest.mark.parametrize("instance_id", ["with/slash", "with space", "ünïcödé", "per%cent?"])
def test_pull_takes_from_instances_of_any_name(served: Lab, tmp_path: Path, instance_id: str) -> None:
    tensors = {"w": content("F32", 100)}
    served.ready_source(write_checkpoint(tmp_path / "model", tensors), "--instance-id", instance_id)
    answer = served.pull("--instance-id", f"{instance_id}-target").finish().check(0)
    assert answer["sources"] == [{"instance_id": instance_id, "rank": 0, "bytes": 400}]


def test_pull_b11_takes_data_that_is_not_aligned(served: Lab, tmp_path: Path) -> None:
    """One byte in front shifts every tensor after it in the file."""
    tensors = {"a": content("U8", 1), "b": content("F32", 1001), "c": content("U8", 2), "d": content("F64", 513)}
    write_file(tmp_path / "odd" / "model.safetensors", tensors)
    served.ready_source(tmp_path / "odd")
    served.pull("--save", tmp_path / "peer").finish().check(0)
    check_saved(tmp_path / "peer", tensors)
    served.run("load", tmp_path / "odd", "--save", tmp_path / "disk", "--json").check(0)
    check_saved(tmp_path / "disk", tensors)


def test_ranged_reads_of_a_tensor_put_together_are_the_tensor(served: Lab, odd: Path) -> None:
    url = str(served.source(odd).line()["url"])
    path = f"{url}/v1/tensors/{quote('a' * 500, safe='')}"
    whole = httpx.get(path)
    pieces = [httpx.get(path, headers={"Range": f"bytes={at}-{at + 6}"}) for at in range(0, len(whole.content), 7)]
    assert {piece.status_code for piece in pieces} == {206}
    assert b"".join(piece.content for piece in pieces) == whole.content
