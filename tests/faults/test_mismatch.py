"""Both sides speak of one model and mean different tensors: refused before a byte moves."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from tests.faults.checkpoints import Content, check_saved, content, write_checkpoint
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from tests.faults.proxy import Proxy
from weightwire.service.client import PullRequest, ServiceClient, pull
from weightwire.transfer import Shells
from weightwire.transfer.errors import ManifestMismatchError

HELD = {"a": content("F32", 4), "b": content("F32", 2, 3), "c": content("BF16", 2)}
CASES = [
    pytest.param(
        HELD | {"a": content("I32", 4)},
        [{"tensor": "a", "field": "dtype", "source": "float32", "target": "int32"}],
        id="another dtype of the same size",
    ),
    pytest.param(
        HELD | {"b": content("F32", 3, 2)},
        [{"tensor": "b", "field": "shape", "source": "[2, 3]", "target": "[3, 2]"}],
        id="another shape of the same size",
    ),
    pytest.param(
        {"a": HELD["a"], "b": HELD["b"], "renamed": HELD["c"]},
        [
            {"tensor": "renamed", "field": "name", "source": "absent", "target": "present"},
            {"tensor": "c", "field": "name", "source": "present", "target": "absent"},
        ],
        id="another name",
    ),
    pytest.param(
        {"a": content("F16", 8), "b": content("F32", 6), "d": content("U8")},
        [
            {"tensor": "a", "field": "dtype", "source": "float32", "target": "float16"},
            {"tensor": "a", "field": "shape", "source": "[4]", "target": "[8]"},
            {"tensor": "b", "field": "shape", "source": "[2, 3]", "target": "[6]"},
            {"tensor": "c", "field": "name", "source": "present", "target": "absent"},
            {"tensor": "d", "field": "name", "source": "absent", "target": "present"},
        ],
        id="everything at once",
    ),
]


def ordered(conflicts: object) -> list[dict[str, str]]:
    return sorted(cast("list[dict[str, str]]", conflicts), key=lambda c: (c["tensor"], c["field"]))


@pytest.mark.parametrize(("wanted", "conflicts"), CASES)
def test_pull_b38_refuses_a_source_of_other_tensors_before_anything_moves(
    served: Lab, proxy: Proxy, tmp_path: Path, wanted: dict[str, Content], conflicts: list[dict[str, str]]
) -> None:
    held = write_checkpoint(tmp_path / "held", HELD)
    disk = write_checkpoint(tmp_path / "disk", wanted)
    served.ready_source(held, *proxy.flags, "--revision", "r1")
    outcome = served.pull("--checkpoint", disk, "--revision", "r1", "--save", tmp_path / "out").finish()
    answer = outcome.check(1)
    assert (answer["state"], answer["bytes_peer"], answer["bytes_disk"]) == ("failed", 0, 0)
    assert outcome.error["code"] == "manifest_mismatch"
    assert ordered(outcome.error["conflicts"]) == ordered(conflicts)
    for conflict in conflicts:
        assert repr(conflict["tensor"]) in str(outcome.error["detail"])
    assert proxy.reads == []
    assert not (tmp_path / "out").exists()
    recorded = served.status(answer["transfer_id"])
    assert (recorded["state"], cast(Json, recorded["error"])["code"]) == ("failed", "manifest_mismatch")


def test_pull_passes_over_a_source_of_another_revision(served: Lab, proxy: Proxy, small: Model, tmp_path: Path) -> None:
    """Without a revision by hand it is the digest of config and headers, so this source is another model."""
    served.ready_source(write_checkpoint(tmp_path / "held", HELD), *proxy.flags, "--instance-id", "other")
    answer = served.pull("--checkpoint", small.folder, "--save", tmp_path / "out").finish().check(0)
    assert (answer["bytes_peer"], answer["bytes_disk"]) == (0, small.nbytes)
    assert "revision" in cast("dict[str, str]", answer["reasons"])["other"]
    assert proxy.requests == []
    check_saved(tmp_path / "out", small.tensors)


def test_pull_of_a_mismatch_leaves_the_shells_as_they_were(served: Lab, proxy: Proxy, tmp_path: Path) -> None:
    served.ready_source(write_checkpoint(tmp_path / "held", HELD), *proxy.flags)
    live = {"a": torch.full((4,), 7.0), "b": torch.full((2, 3), 7.0), "c": torch.full((2,), 7.0)}
    with ServiceClient(served.service) as client, pytest.raises(ManifestMismatchError) as caught:
        pull(client, PullRequest(model=served.model, shells=Shells.from_tensors(live)))
    assert caught.value.facts["conflicts"] == [
        {"tensor": "c", "field": "dtype", "source": "bfloat16", "target": "float32"}
    ]
    assert all(bool((tensor == 7.0).all()) for tensor in live.values())
    assert proxy.reads == []


def test_pull_refuses_to_tie_what_the_source_keeps_apart(served: Lab, proxy: Proxy, tmp_path: Path) -> None:
    tensors = {"embed": content("F32", 4, 2, seed=1), "head": content("F32", 4, 2, seed=2)}
    served.ready_source(write_checkpoint(tmp_path / "held", tensors), *proxy.flags)
    weight = torch.zeros(4, 2)
    shells = Shells.from_tensors({"embed": weight, "head": weight})
    with ServiceClient(served.service) as client, pytest.raises(ManifestMismatchError, match="tied"):
        pull(client, PullRequest(model=served.model, shells=shells))
    assert not weight.any()
    assert proxy.reads == []
