"""Targets of several ranks as a library: what is built, what is told on the way, what is refused before that."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.checkpoints import DECODER, decoder, write_checkpoint
from weightwire.service.client import PullEvents, PullRequest, ServiceClient, pull, serving
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer import admission
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import AdmissionError, ConfigError, NamesError, NotFoundError
from weightwire.transfer.local_disk import identity_of
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.models import BuildOptions, parse_config
from weightwire.transfer.models.registry import plan_memory
from weightwire.transfer.plan import Plan
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.tree_shells import build_rank

MODEL = "org/model"
TP2, PP2 = Topology(tp=2), Topology(pp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), decoder(), DECODER)


@pytest.fixture(scope="module")
def client() -> Iterator[ServiceClient]:
    with running_service(Settings(port=0)) as url, ServiceClient(url) as client:
        yield client


def load(folder: Path, topology: Topology) -> list[Shells]:
    """The shells of every rank, from disk."""
    with TreeLoader(TreeRequest(folder=folder, topology=topology)) as loader:
        return [
            loader.shells(loader.load(rank, Control(deadline_s=60)), loader.identity(rank, model=MODEL))
            for rank in range(topology.world_size)
        ]


@pytest.fixture(scope="module")
def source(client: ServiceClient, folder: Path) -> Iterator[list[Shells]]:
    """Two ranks of one process, serving."""
    shells = load(folder, TP2)
    with serving(client, shells, instance_id="source"):
        yield shells


def check_equal(filled: Shells, expected: Shells) -> None:
    assert filled.manifest.by_name.keys() == expected.manifest.by_name.keys()
    for name, tensor in expected.tensors():
        assert torch.equal(filled.tensor(name).view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.usefixtures("source")
def test_pull_gives_the_tree_of_each_rank(client: ServiceClient, folder: Path) -> None:
    pulled = pull(client, PullRequest(model=MODEL, topology=PP2))
    assert [rank.rank for rank in pulled.ranks] == [0, 1]
    for rank, expected in zip(pulled.ranks, load(folder, PP2), strict=True):
        check_equal(rank.shells, expected)
        assert rank.tree is not None
        for name, tensor in rank.tree.state_dict().items():
            assert tensor.data_ptr() == rank.shells.tensor(name).data_ptr(), name
    assert (pulled.bytes_disk, pulled.tensors["disk"]) == (0, 0)
    assert sum(given.nbytes for given in pulled.sources) == pulled.bytes_peer


@pytest.mark.usefixtures("source")
def test_pull_fills_the_shells_of_one_rank_that_the_caller_built(client: ServiceClient, folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        identity = replace(identity_of(checkpoint, model=MODEL), topology=PP2, rank=1)
    tree, found = build_rank(identity)
    shells = Shells.from_layout(found.layout)
    pulled = pull(client, PullRequest(model=MODEL, shells=shells), instance_id="mine")
    assert pulled.shells is shells
    check_equal(shells, load(folder, PP2)[1])
    assert tree.state_dict()["model.norm.weight"].data_ptr() == shells.tensor("model.norm.weight").data_ptr()


@pytest.mark.usefixtures("source")
def test_ranks_of_one_instance_pull_in_processes_of_their_own(client: ServiceClient, folder: Path) -> None:
    request = PullRequest(model=MODEL, topology=PP2)
    expected = load(folder, PP2)
    for rank in range(2):
        pulled = pull(client, request, instance_id="pieces", ranks=[rank], epoch=1)
        check_equal(pulled.shells, expected[rank])


class Watching:
    """Events in the order in which they came."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.progress: dict[int, list[RankProgress]] = {}
        self._alone = threading.Lock()

    def planned(self, plan: Plan, layout: Manifest) -> None:
        assert plan.ways
        self.told.append(("plan", layout.rank))

    def moved(self, rank: int, progress: RankProgress) -> None:
        assert self._alone.acquire(blocking=False), "two calls at once"
        self.told.append(("progress", rank))
        self.progress.setdefault(rank, []).append(progress)
        self._alone.release()

    @property
    def events(self) -> PullEvents:
        return PullEvents(on_plan=self.planned, on_progress=self.moved)


@pytest.mark.usefixtures("source")
def test_every_plan_is_told_before_a_byte_moves_and_progress_by_rank(client: ServiceClient) -> None:
    watching = Watching()
    pull(client, PullRequest(model=MODEL, topology=Topology(tp=2, pp=2)), events=watching.events)
    assert watching.told[:4] == [("plan", rank) for rank in range(4)]
    assert {what for what, _ in watching.told[4:]} == {"progress"}
    assert sorted(watching.progress) == list(range(4))
    for seen in watching.progress.values():
        assert seen[-1].state is TransferState.READY
        assert [step.bytes_peer for step in seen] == sorted(step.bytes_peer for step in seen)


# Refused before anything


def shells_bytes(topology: Topology, rank: int) -> int:
    return plan_memory(parse_config(json.dumps(dict(DECODER))), topology, rank).shells_bytes


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("has_disk", [True, False])
def test_memory_of_all_ranks_together_is_checked_before_any_is_allocated(
    client: ServiceClient, folder: Path, monkeypatch: pytest.MonkeyPatch, has_disk: bool
) -> None:
    needed = sum(shells_bytes(TP2, rank) for rank in range(2))
    monkeypatch.setattr(admission, "available_bytes", lambda: needed - 1)
    watching = Watching()
    with Checkpoint.open(folder) as checkpoint, pytest.raises(AdmissionError) as failure:
        pull(
            client,
            PullRequest(model=MODEL, topology=TP2, checkpoint=checkpoint if has_disk else None),
            events=watching.events,
        )
    assert failure.value.facts["needed_bytes"] == needed
    assert watching.told == []


def test_topology_needs_a_config_from_somebody(client: ServiceClient) -> None:
    held = Shells.from_tensors({"w": torch.ones(3)})
    held.manifest = replace(held.manifest, model="bare")
    with serving(client, held), pytest.raises(ConfigError, match=r"model 'bare': neither .* has its config.json"):
        pull(client, PullRequest(model="bare", topology=TP2))


def test_topology_needs_the_names_of_the_checkpoint_from_somebody(client: ServiceClient) -> None:
    held = Shells.from_tensors({"w": torch.ones(3)})
    held.manifest = replace(held.manifest, model="nameless", config=json.dumps(dict(DECODER)))
    with serving(client, held), pytest.raises(NotFoundError, match="which tensors its checkpoint has"):
        pull(client, PullRequest(model="nameless", topology=TP2))


def test_names_without_a_place_are_refused_unless_they_are_to_be_warned_of(
    client: ServiceClient, tmp_path: Path
) -> None:
    tensors = {**decoder(), "visual.weight": decoder()["model.norm.weight"]}
    folder = write_checkpoint(tmp_path / "model", tensors, DECODER)
    with Checkpoint.open(folder) as checkpoint:
        request = PullRequest(model="odd", topology=TP2, checkpoint=checkpoint)
        with pytest.raises(NamesError):
            pull(client, request)
        pulled = pull(client, replace(request, unexpected="warn"))
    assert pulled.bytes_peer == 0


def test_target_builds_shells_as_it_is_told_to(client: ServiceClient, folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        request = PullRequest(model=MODEL, topology=TP2, build=BuildOptions(vocab_multiple=22), checkpoint=checkpoint)
        pulled = pull(client, request)
    assert [rank.shells.tensor("lm_head.weight").shape for rank in pulled.ranks] == [(11, 16), (11, 16)]


@pytest.mark.parametrize("ranks", [[2], [0, 0], [-1]])
def test_ranks_that_the_target_cannot_have_are_our_callers_mistake(client: ServiceClient, ranks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected some of \[0, 1\]"):
        pull(client, PullRequest(model=MODEL, topology=TP2), ranks=ranks)


def test_request_has_shells_or_a_topology() -> None:
    shells = Shells.from_tensors({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="expected one of them"):
        PullRequest(model=MODEL, shells=shells, topology=TP2)


@pytest.mark.usefixtures("source")
def test_several_ranks_have_no_only_shells(client: ServiceClient) -> None:
    pulled = pull(client, PullRequest(model=MODEL, topology=TP2))
    with pytest.raises(ValueError, match="2 ranks, expected one"):
        _ = pulled.shells
    with pytest.raises(ValueError, match="2 ranks, expected one"):
        _ = pulled.result
