"""Filling shells from peers and disk: all of it proven, or an error, and no byte written on a disagreement."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.conftest import PATIENCE_S, Fake, MakeFake, Serve, bits, endpoint_of, filled, read_request, views_of
from tests.transfer.wire.conftest import answer_to
from tests.transfer.wire.pulling import model_of, paced
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import (
    CancelledError,
    CheckpointError,
    CoverageError,
    DeadlineError,
    FencedError,
    IntegrityError,
    ManifestMismatchError,
    TransferError,
)
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.manifest import CheckpointSpec, Manifest, Topology
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.plan import Plan
from weightwire.transfer.planning import PlannedPull, Planner, Supply
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.stream import Endpoint, Timeouts

POISON = 0xAB
OPTIONS = PullOptions(timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S))
Tensors = dict[str, torch.Tensor]


def tensors_of(**shapes: tuple[int, ...]) -> Tensors:
    return {name: filled("float32", shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}


ABC = tensors_of(a=(4, 8), b=(3,), c=(5, 5))


def poisoned(tensors: Tensors, *, chunk_bytes: int = 64) -> Shells:
    """Shells for such tensors, none of whose bytes are right."""
    shells = Shells.from_tensors({name: torch.empty_like(t) for name, t in tensors.items()}, chunk_bytes=chunk_bytes)
    shells.fill(POISON)
    return shells


def memory_of(shells: Shells) -> bytes:
    return b"".join(shells.views(0, shells.manifest.total_bytes))


def contents(shells: Shells) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in shells.tensors()}


def content(tensors: Tensors) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


MakeCheckpoint = Callable[[Tensors], Checkpoint]


@pytest.fixture
def on_disk(tmp_path: Path) -> MakeCheckpoint:
    def make(tensors: Tensors) -> Checkpoint:
        save_file(tensors, tmp_path / "model.safetensors")
        return Checkpoint.open(tmp_path)

    return make


def origins(*held: tuple[Endpoint, Manifest], disk: Checkpoint | None = None) -> Origins:
    return Origins(
        endpoints=[endpoint for endpoint, _ in held],
        manifests={manifest.digest: manifest for _, manifest in held},
        checkpoint=disk,
    )


def run(shells: Shells, where: Origins, on_progress: Callable[[RankProgress], None] = lambda _: None) -> FillResult:
    return fill(shells, where, control=Control(deadline_s=PATIENCE_S), options=OPTIONS, on_progress=on_progress)


def source(serve: Serve, tensors: Tensors, instance_id: str = "s") -> tuple[Endpoint, Manifest]:
    served = serve(tensors, instance_id=instance_id)
    return served.endpoint(), served.manifest


def broken(fake: MakeFake, manifest: Manifest, instance_id: str = "x") -> tuple[Endpoint, Manifest]:
    """A source that closes every connection as soon as something is asked."""
    server = fake(lambda connection: read_request(connection))
    return endpoint_of(manifest, url=server.url, instance_id=instance_id), manifest


# Peers, disk, and both


def test_peers_alone(serve: Serve) -> None:
    shells = poisoned(ABC)
    result = run(shells, origins(source(serve, ABC)))
    assert contents(shells) == content(ABC)
    assert result.tensors == {"identical": 3, "reshard": 0, "disk": 0, "constant": 0}
    assert (result.bytes_peer, result.bytes_disk) == (240, 0)
    assert [(given.instance_id, given.rank, given.nbytes) for given in result.sources] == [("s", 0, 240)]
    assert result.failures == ()


class CountingPlanner(Planner):
    """Counts how often it is asked."""

    count = 0

    def plan(self, target: Manifest, supply: Supply | None = None) -> Plan:
        self.count += 1
        return super().plan(target, supply)


def planned_before(shells: Shells, where: Origins, *, capacity: int) -> tuple[CountingPlanner, Origins]:
    planner = CountingPlanner(list(where.manifests.values()))
    supply = Supply(capacities=[capacity] * len(where.endpoints), on_disk=frozenset())
    first = PlannedPull(
        planner=planner, target=shells.manifest, supply=supply, plan=planner.plan(shells.manifest, supply)
    )
    return planner, replace(where, planned=first)


@pytest.mark.parametrize(
    ("capacity", "count"), [(1, 2), (3, 3)], ids=["as it was planned", "with fewer sources than it was planned for"]
)
def test_plan_that_was_made_before_is_made_again_only_if_something_has_changed(
    serve: Serve, capacity: int, count: int
) -> None:
    """Beside it, what is left at the end is planned."""
    shells = poisoned(ABC)
    planner, where = planned_before(shells, origins(source(serve, ABC)), capacity=capacity)
    result = run(shells, where)
    assert contents(shells) == content(ABC)
    assert result.bytes_peer == shells.manifest.total_bytes
    assert planner.count == count


def test_plan_that_was_made_of_other_sources_is_of_no_use(serve: Serve) -> None:
    shells = poisoned(ABC)
    planner, where = planned_before(shells, origins(source(serve, ABC)), capacity=1)
    other = source(serve, {name: tensor + 1 for name, tensor in ABC.items()}, "other")
    run(shells, replace(origins(other), planned=where.planned))
    assert contents(shells) == content({name: tensor + 1 for name, tensor in ABC.items()})
    assert planner.count == 1


def test_target_that_wants_a_tensor_several_times_asks_no_source_for_more_than_it_holds(serve: Serve) -> None:
    one = filled("float32", (4, 8))
    piece = PlacedPiece.of("w", checkpoint=row_major((4, 8)), runtime=row_major((4, 8)))
    slots = {f"slot{number}": torch.full((4, 8), 7.0) for number in range(5)}
    layout = Layout.of(slots, ModelIdentity(model=""), dict.fromkeys(slots, ShellPlacement(pieces=(piece,))))
    where = origins(source(serve, {"w": one}))
    result = fill(
        Shells.from_layout(layout), where, control=Control(deadline_s=PATIENCE_S), options=replace(OPTIONS, streams=1)
    )
    assert all(slot.equal(one) for slot in slots.values())
    assert (result.bytes_peer, result.failures) == (5 * 128, ())


def test_disk_alone(on_disk: MakeCheckpoint) -> None:
    shells = poisoned(ABC)
    result = run(shells, origins(disk=on_disk(ABC)))
    assert contents(shells) == content(ABC)
    assert result.tensors == {"identical": 0, "reshard": 0, "disk": 3, "constant": 0}
    assert (result.bytes_peer, result.bytes_disk, result.sources) == (0, 240, ())


def test_b60_peers_and_disk_add_up_to_the_whole(serve: Serve, on_disk: MakeCheckpoint) -> None:
    first, second = source(serve, {"a": ABC["a"]}, "x"), source(serve, {"c": ABC["c"].T.contiguous().T}, "y")
    disk = on_disk(ABC)
    shells, seen = poisoned(ABC), list[RankProgress]()
    result = run(shells, origins(first, second, disk=disk), seen.append)
    assert contents(shells) == content(ABC)
    assert result.tensors == {"identical": 1, "reshard": 1, "disk": 1, "constant": 0}
    assert {given.instance_id: given.nbytes for given in result.sources} == {"x": 128, "y": 100}
    assert (result.bytes_peer, result.bytes_disk) == (228, 12)
    # Beside the 12 bytes, what is compared before peers and disk are mixed: here all that both hold.
    assert disk.bytes_read == 12 + 228
    assert seen[-1] == RankProgress(state=TransferState.READY, bytes_total=240, bytes_peer=228, bytes_disk=12)
    assert [state for state, _ in groupby(p.state for p in seen)] == ["receiving", "verifying", "ready"]
    assert (228, 12) in {(p.bytes_peer, p.bytes_disk) for p in seen if p.state == "receiving"}
    for before, after in pairwise(seen):
        assert (before.bytes_peer, before.bytes_disk) <= (after.bytes_peer, after.bytes_disk)
        assert after.bytes_peer + after.bytes_disk <= after.bytes_total == 240


@pytest.mark.parametrize("dtype", sorted(BY_NAME))
def test_b10_every_dtype_and_stride_comes_from_a_peer_and_from_disk_alike(
    serve: Serve, on_disk: MakeCheckpoint, dtype: str
) -> None:
    tensors = views_of(dtype)
    if BY_NAME[dtype].packing > 1:
        del tensors["a scalar"]
    plain = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    for name, tensor in plain.items():
        raw = torch.frombuffer(bytearray(bits(tensors[name])), dtype=torch.uint8) if tensor.numel() else None
        if raw is not None:
            plain[name] = raw.view(tensor.dtype).reshape(tensor.shape)
    half = set(sorted(tensors)[::2])
    peer = source(serve, {name: t for name, t in tensors.items() if name in half})
    disk = on_disk(plain)
    for layout in (plain, tensors):
        shells = Shells.allocate(Shells.from_tensors(layout).manifest)
        shells.fill(POISON)
        result = run(shells, origins(peer, disk=disk))
        assert contents(shells) == content(tensors)
        assert result.bytes_peer + result.bytes_disk == sum(t.nbytes for t in tensors.values())


def test_module_is_filled_where_it_lies(serve: Serve) -> None:
    held = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    before = {name: (t.data_ptr(), id(t)) for name, t in module.state_dict(keep_vars=True).items()}
    shells = Shells.from_module(module)
    run(shells, origins(source(serve, dict(held.state_dict()))))
    assert {name: (t.data_ptr(), id(t)) for name, t in module.state_dict(keep_vars=True).items()} == before
    assert {name: bits(t) for name, t in module.state_dict().items()} == content(dict(held.state_dict()))
    assert torch.equal(module(torch.ones(2, 3)), held.train()(torch.ones(2, 3)))


def test_b08_shells_without_a_byte_are_ready_without_anybody() -> None:
    shells = Shells.from_tensors({"none": torch.empty(0, dtype=torch.int32)})
    result = run(shells, origins())
    assert (result.bytes_peer, result.bytes_disk) == (0, 0)


def test_filled_shells_can_be_served_in_turn(serve: Serve) -> None:
    """B37: a loaded target is a source of the same bytes."""
    endpoint, manifest = source(serve, ABC)
    second = Shells.allocate(manifest)
    run(second, origins((endpoint, manifest)))
    served = serve(second, instance_id="y")
    assert served.manifest == manifest
    third = poisoned(ABC)
    run(third, origins((served.endpoint(), served.manifest)))
    assert contents(third) == content(ABC)


# Sources that fail


def test_dead_source_is_made_up_for_from_disk_with_the_reason(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    _, manifest = source(serve, ABC)
    disk = on_disk(ABC)
    shells = poisoned(ABC)
    result = run(shells, origins(broken(fake, manifest), disk=disk))
    assert contents(shells) == content(ABC)
    assert [(failure.instance_id, failure.code) for failure in result.failures] == [("x", "source_unreachable")]
    assert result.tensors["disk"] == 3
    assert (result.bytes_peer, result.bytes_disk, disk.bytes_read) == (0, 240, 240)


def test_b37_candidates_are_tried_in_turn_and_then_the_disk(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    served = serve({"a": ABC["a"], "b": ABC["b"]})
    restarted = served.endpoint(generation=6, instance_id="s")
    where = origins(
        broken(fake, served.manifest), (restarted, served.manifest), source(serve, {"b": ABC["b"]}, "z"),
        disk=on_disk(ABC),
    )  # fmt: skip
    shells = poisoned(ABC)
    result = run(shells, where)
    assert contents(shells) == content(ABC)
    assert {failure.instance_id: failure.code for failure in result.failures} == {
        "x": "source_unreachable",
        "s": "source_fenced",
    }
    assert (result.bytes_peer, result.bytes_disk) == (12, 228)


def test_source_that_dies_in_the_middle_leaves_what_was_verified_and_the_disk_gives_only_the_rest(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    tensors = {"big": filled("uint8", (1000,)), "small": filled("uint8", (10,), seed=1)}
    served = serve(tensors)
    address = served.server.address

    def relay(connection: socket.socket) -> None:
        """Hands the first bytes of one answer on, and then dies."""
        head, body = read_request(connection)
        if not body or len(server.requests) > 1:
            return
        server.requests.append(body)
        with socket.create_connection((address.host, address.port), PATIENCE_S) as real:
            real.sendall(head + b"\r\n\r\n" + body)
            found = b""
            while len(found) < 800:
                found += real.recv(4096)
        connection.sendall(found[:800])

    server: Fake = fake(relay)
    disk = on_disk(tensors)
    shells = poisoned(tensors)
    result = run(shells, origins((served.endpoint(url=server.url), served.manifest), disk=disk))
    assert contents(shells) == content(tensors)
    assert 0 < result.bytes_peer < 1010
    assert result.bytes_peer % 64 == 0
    assert disk.bytes_read == result.bytes_disk == 1010 - result.bytes_peer


def test_lost_sources_are_told_with_what_is_missing(fake: MakeFake, serve: Serve) -> None:
    _, manifest = source(serve, ABC)
    with pytest.raises(CoverageError, match=r"'a', 'b', 'c'; sources lost: source_unreachable: source 'x'") as caught:
        run(poisoned(ABC), origins(broken(fake, manifest)))
    assert caught.value.facts["missing"] == ["a", "b", "c"]


def test_fast_source_of_another_manifest_takes_over_from_a_slow_one(fake: MakeFake, serve: Serve) -> None:
    """Shared out evenly before anything is known of them, and again by what was seen."""
    tensors = {"a": filled("uint8", (300 * 4096,)), "b": filled("uint8", (9,))}
    held = model_of(tensors, chunk_bytes=4096)
    fast = serve({"a": tensors["a"]}, chunk_bytes=4096, instance_id="fast")
    slow = endpoint_of(held.manifest, url=paced(fake, held, frames_per_s=100).url, instance_id="slow")
    shells = poisoned(tensors, chunk_bytes=4096)
    result = run(shells, origins((slow, held.manifest), (fast.endpoint(), fast.manifest)))
    assert contents(shells) == content(tensors)
    given = {source.instance_id: source.nbytes for source in result.sources}
    assert sum(given.values()) == result.bytes_peer == 300 * 4096 + 9
    assert given["fast"] > 0.7 * result.bytes_peer
    assert result.failures == ()


def test_disk_takes_over_from_the_only_source_as_soon_as_it_hangs(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    """It would be waited for far longer if nothing else had the weights."""
    over = threading.Event()

    def hang(connection: socket.socket) -> None:
        read_request(connection)
        over.wait(PATIENCE_S)

    hanging = endpoint_of(serve(ABC).manifest, url=fake(hang).url)
    shells = poisoned(ABC)
    options = replace(OPTIONS, stall_window_s=0.3)
    where = origins((hanging, serve(ABC).manifest), disk=on_disk(ABC))
    result = fill(shells, where, control=Control(deadline_s=PATIENCE_S), options=options)
    over.set()
    assert contents(shells) == content(ABC)
    assert [failure.code for failure in result.failures] == ["source_stalled"]
    assert (result.bytes_peer, result.bytes_received) == (0, 0)


def test_bytes_received_count_what_was_of_no_use_too(fake: MakeFake) -> None:
    held = model_of({"a": filled("uint8", (64,))}, chunk_bytes=16)
    spoiled = threading.Event()

    def answer(connection: socket.socket) -> None:
        while body := read_request(connection)[1]:
            found = answer_to(body, held.shells)
            raw = bytearray(found.body)
            raw[10] ^= not spoiled.is_set()
            spoiled.set()
            connection.sendall(found.text(bytes(raw)))

    server = fake(answer)
    shells = poisoned({"a": torch.empty(64, dtype=torch.uint8)}, chunk_bytes=16)
    result = run(shells, origins((endpoint_of(held.manifest, url=server.url), held.manifest)))
    assert result.bytes_peer == 64
    # Five frames of 16 bytes, four of which were good at once, with 20 bytes around each.
    assert result.bytes_received == 5 * 36


def test_source_without_digests_is_passed_over(serve: Serve, on_disk: MakeCheckpoint) -> None:
    served = serve(ABC)
    bare = Shells.allocate(served.manifest).manifest
    result = run(poisoned(ABC), origins((endpoint_of(bare, url=served.server.url), bare), disk=on_disk(ABC)))
    assert [failure.code for failure in result.failures] == ["manifest_invalid"]
    assert result.bytes_disk == 240


# What is refused before a byte is written


def refuses(shells: Shells, where: Origins, kind: type[TransferError]) -> TransferError:
    """The error of a fill that must not have changed a byte, nor said that it had begun to receive."""
    before, seen = memory_of(shells), list[RankProgress]()
    with pytest.raises(kind) as caught:
        run(shells, where, seen.append)
    assert memory_of(shells) == before
    assert seen == []
    return caught.value


def test_no_source_and_no_disk_names_each_tensor() -> None:
    error = refuses(poisoned(ABC), origins(), CoverageError)
    assert error.facts["missing"] == ["a", "b", "c"]


def test_tensor_that_is_nowhere_is_named_before_anything_is_written(serve: Serve, on_disk: MakeCheckpoint) -> None:
    where = origins(source(serve, {"a": ABC["a"]}), disk=on_disk({"c": ABC["c"]}))
    error = refuses(poisoned(ABC), where, CoverageError)
    assert error.facts["missing"] == ["b"]
    assert "'b'" in str(error)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        pytest.param({"b": torch.zeros(3, dtype=torch.float16)}, "dtype", id="dtype"),
        pytest.param({"b": torch.zeros(4)}, "shape", id="shape"),
        pytest.param({"b": torch.zeros(3, 1)}, "shape", id="one dimension more"),
        pytest.param({"b": torch.zeros(())}, "shape", id="a scalar"),
    ],
)
def test_b38_disagreement_is_refused_before_anything_is_written(
    serve: Serve, on_disk: MakeCheckpoint, wrong: Tensors, field: str
) -> None:
    for where in (
        origins(source(serve, ABC | wrong), disk=on_disk(ABC)),
        origins(source(serve, ABC), source(serve, wrong, "y"), disk=on_disk(ABC)),
        origins(source(serve, ABC), disk=on_disk(ABC | wrong)),
        origins(disk=on_disk(ABC | wrong)),
    ):
        error = refuses(poisoned(ABC), where, ManifestMismatchError)
        conflicts = error.facts["conflicts"]
        assert isinstance(conflicts, list)
        assert [(c["tensor"], c["field"]) for c in conflicts if isinstance(c, dict)] == [("b", field)]


def test_tensors_of_a_peer_that_nobody_asked_for_do_no_harm(serve: Serve) -> None:
    shells = poisoned(ABC)
    run(shells, origins(source(serve, ABC | {"more": torch.ones(9)})))
    assert contents(shells) == content(ABC)


# Digests


def test_disk_that_differs_from_what_a_source_promised_is_found_out(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    _, manifest = source(serve, ABC)
    other = ABC | {"c": ABC["c"] + 1}
    with pytest.raises(IntegrityError, match=r"tensor 'c': its bytes from disk.* promises") as caught:
        run(poisoned(ABC), origins(broken(fake, manifest), disk=on_disk(other)))
    assert caught.value.facts["tensor"] == "c"


OTHER = {name: tensor + 1 for name, tensor in ABC.items()}


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_two_trainings_of_one_revision_are_not_mixed(serve: Serve) -> None:
    """What the preferred source lacks does not come from one that contradicts it elsewhere."""
    shells = poisoned(ABC)
    held = [source(serve, without(ABC, "c"), "first"), source(serve, without(OTHER, "b"), "second")]
    error = refuses(shells, origins(*held), CoverageError)
    assert error.facts["missing"] == ["c"]


def test_source_of_another_training_is_passed_over_with_the_reason(serve: Serve, on_disk: MakeCheckpoint) -> None:
    shells = poisoned(ABC)
    held = [source(serve, without(ABC, "c"), "first"), source(serve, without(OTHER, "b"), "second")]
    result = run(shells, origins(*held, disk=on_disk(ABC)))
    assert contents(shells) == content(ABC)
    assert [given.instance_id for given in result.sources] == ["first"]
    assert [(lost.instance_id, lost.code) for lost in result.failures] == [("second", "manifest_mismatch")]
    assert "'a'" in result.failures[0].detail


def test_disk_of_another_training_is_found_out_before_it_is_mixed_in(serve: Serve, on_disk: MakeCheckpoint) -> None:
    """The source promises nothing of `c`; that the disk's `c` is another model's shows in what both hold."""
    shells = poisoned(ABC)
    where = origins(source(serve, without(ABC, "c")), disk=on_disk(OTHER))
    error = refuses(shells, where, IntegrityError)
    assert "two trainings of one model" in str(error)


def test_tensors_that_interleave_are_compared_whatever_came_last(serve: Serve) -> None:
    """Two tensors of the target share some bytes, and the source holds them apart, and different."""
    held = {"a": torch.arange(5, dtype=torch.int32), "b": torch.arange(10, 14, dtype=torch.int32)}
    endpoint = source(serve, held)
    for order in (("a", "b"), ("b", "a")):
        pool = torch.zeros(9, dtype=torch.int32)
        views = {"a": pool[:5], "b": pool[2:9:2]}
        with pytest.raises(IntegrityError, match="its bytes from its sources hash to"):
            run(Shells.from_tensors({name: views[name] for name in order}), origins(endpoint))


def test_tensors_that_interleave_are_filled_if_the_source_agrees(serve: Serve) -> None:
    pool = torch.arange(9, dtype=torch.int32)
    endpoint = source(serve, {"a": pool[:5].clone(), "b": pool[2:9:2].clone()})
    target = torch.zeros(9, dtype=torch.int32)
    run(Shells.from_tensors({"a": target[:5], "b": target[2:9:2]}), origins(endpoint))
    assert target.tolist() == [0, 1, 2, 3, 4, 0, 6, 0, 8]


# Ties


class TiedModel(torch.nn.Module):
    def __init__(self, value: float = 0.0, *, head_first: bool = False) -> None:
        super().__init__()
        self.embed: torch.Tensor
        self.head: torch.Tensor
        weight = torch.nn.Parameter(torch.full((2, 1), value))
        for name in ("head", "embed") if head_first else ("embed", "head"):
            self.register_parameter(name, weight)


@pytest.mark.parametrize("head_first", [False, True], ids=["embed first", "head first"])
def test_b16_tied_head_that_the_checkpoint_lacks_is_the_embedding(
    serve: Serve, on_disk: MakeCheckpoint, head_first: bool
) -> None:
    embed = {"embed": torch.tensor([[1.0], [2.0]])}
    for where in (origins(disk=on_disk(embed)), origins(source(serve, embed))):
        module = TiedModel(head_first=head_first)
        result = run(Shells.from_module(module), where)
        assert module.head is module.embed
        assert module.head.tolist() == [[1.0], [2.0]]
        assert result.bytes_peer + result.bytes_disk == 8
        assert sum(result.tensors.values()) == 2
        assert max(result.tensors.values()) == 2


def test_tie_that_only_the_source_has_is_read_once_for_each_name(serve: Serve) -> None:
    weight = torch.tensor([[1.0], [2.0]])
    endpoint = source(serve, {"embed": weight, "head": weight})
    shells = poisoned({"embed": torch.empty(2, 1), "head": torch.empty(2, 1)})
    assert run(shells, origins(endpoint)).bytes_peer == 16
    assert set(contents(shells).values()) == {bits(weight)}


def test_b16_tied_head_that_the_checkpoint_repeats_loads(on_disk: MakeCheckpoint) -> None:
    embed = torch.tensor([[1.0], [2.0]])
    module = TiedModel()
    result = run(Shells.from_module(module), origins(disk=on_disk({"embed": embed, "head": embed.clone()})))
    assert module.head.tolist() == [[1.0], [2.0]]
    assert result.bytes_disk == 8


def test_b16_tied_head_that_contradicts_the_embedding_is_never_thrown_away(
    serve: Serve, on_disk: MakeCheckpoint
) -> None:
    embed, head = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [6.0]])
    module = TiedModel(7.0)
    with pytest.raises(ManifestMismatchError, match="tied to 'embed'"):
        run(Shells.from_module(module), origins(source(serve, {"embed": embed, "head": head})))
    assert module.head.tolist() == [[7.0], [7.0]]
    with pytest.raises(IntegrityError, match=r"'head': tied to 'embed' on the target, but they differ on disk"):
        run(Shells.from_module(module), origins(disk=on_disk({"embed": embed, "head": head})))


# Ranks of two topologies


def region_of(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


CHECKPOINT = {
    "q": filled("float32", (8, 12), seed=1),
    "k": filled("float32", (4, 12), seed=2),
    "o": filled("float32", (12, 8), seed=3),
    "norm": filled("float32", (12,), seed=4),
}


def rank_of(rank: int, tp: int, *, padding: int = 0) -> Shells:
    """One rank, filled: q and k fused and cut by rows, o by columns, the norm whole; zeros behind q and k."""
    parts = [CHECKPOINT[name].chunk(tp)[rank] for name in ("q", "k")]
    shells = {
        "attn.qk": torch.zeros(sum(map(len, parts)) + padding, 12),
        "attn.o": torch.empty(12, 8 // tp),
        "norm": torch.empty(12),
    }
    slots = [
        ("attn.qk", shells["attn.qk"][: len(parts[0])], "q", parts[0]),
        ("attn.qk", shells["attn.qk"][len(parts[0]) :][: len(parts[1])], "k", parts[1]),
        ("attn.o", shells["attn.o"], "o", CHECKPOINT["o"].chunk(tp, dim=1)[rank]),
        ("norm", shells["norm"], "norm", CHECKPOINT["norm"]),
    ]
    pieces: dict[str, list[PlacedPiece]] = {}
    for name, slot, source, part in slots:
        slot.copy_(part)
        piece = PlacedPiece.of(source, checkpoint=region_of(part), runtime=region_of(slot))
        pieces.setdefault(name, []).append(piece)
    zeros = [PlacedConstant(runtime=region_of(shells["attn.qk"][-padding:]), value=0.0)] if padding else []
    placements = {name: ShellPlacement(pieces=tuple(found)) for name, found in pieces.items()}
    placements["attn.qk"] = ShellPlacement(pieces=tuple(pieces["attn.qk"]), constants=tuple(zeros))
    specs = tuple(CheckpointSpec(name=n, dtype="float32", shape=tuple(t.shape)) for n, t in CHECKPOINT.items())
    identity = ModelIdentity(model="m", checkpoint=specs, topology=Topology(tp=tp), rank=rank)
    return Shells.from_layout(Layout.of(shells, identity, placements, chunk_bytes=64))


def ranks(serve: Serve, tp: int) -> list[tuple[Endpoint, Manifest]]:
    """Sources of all ranks, each under a name of its own."""
    found = []
    for rank in range(tp):
        served = serve(rank_of(rank, tp), instance_id=f"rank-{rank}")
        found.append((served.endpoint(), served.manifest))
    return found


@pytest.mark.parametrize("padding", [0, 3], ids=["as wide as it is", "padded"])
@pytest.mark.parametrize(("there", "here"), [(4, 1), (1, 4), (4, 2), (2, 4)])
def test_ranks_of_one_topology_are_filled_from_those_of_another(
    serve: Serve, there: int, here: int, padding: int
) -> None:
    held = ranks(serve, there)
    for rank in range(here):
        expected = rank_of(rank, here, padding=padding)
        shells = Shells.allocate(expected.manifest)
        shells.fill(POISON)
        result = run(shells, origins(*held))
        assert contents(shells) == contents(expected)
        assert result.tensors == {"identical": 1, "reshard": 2, "disk": 0, "constant": 0}
        # The padding was sent by nobody.
        assert result.bytes_peer == expected.manifest.total_bytes - padding * 12 * 4
        assert sum(given.nbytes for given in result.sources) == result.bytes_peer
        assert result.bytes_disk == 0


def test_rank_that_is_lost_is_made_up_for_from_disk_with_its_part_alone(
    fake: MakeFake, serve: Serve, on_disk: MakeCheckpoint
) -> None:
    first, (_, manifest) = ranks(serve, 2)
    expected = rank_of(0, 1, padding=2)
    shells, seen = Shells.allocate(expected.manifest), list[RankProgress]()
    shells.fill(POISON)
    where = origins(first, broken(fake, manifest, "rank-1"), disk=on_disk(CHECKPOINT))
    result = run(shells, where, seen.append)
    assert contents(shells) == contents(expected)
    assert [failure.instance_id for failure in result.failures] == ["rank-1"]
    # Half of q, k and o; the norm is on both.
    half = (96 + 48 + 96) // 2 * 4
    assert (result.bytes_peer, result.bytes_disk) == (half + 48, half)
    assert (result.tensors["disk"], result.tensors["identical"]) == (2, 1)
    assert all(p.bytes_peer + p.bytes_disk <= p.bytes_total == 2 * half + 48 for p in seen)
    assert seen[-1].bytes_peer + seen[-1].bytes_disk == seen[-1].bytes_total


def test_rank_that_is_missing_and_not_on_disk_is_told_slot_by_slot(serve: Serve, on_disk: MakeCheckpoint) -> None:
    shells = Shells.allocate(rank_of(0, 1).manifest)
    held = ranks(serve, 2)[:1]
    error = refuses(shells, origins(*held, disk=on_disk({"o": CHECKPOINT["o"]})), CoverageError)
    assert error.facts["missing"] == ["attn.qk[q]", "attn.qk[k]"]


def test_disk_of_other_shapes_is_refused_before_anything_is_written(serve: Serve, on_disk: MakeCheckpoint) -> None:
    shells = Shells.allocate(rank_of(0, 1).manifest)
    other = CHECKPOINT | {"o": CHECKPOINT["o"].reshape(8, 12)}
    error = refuses(shells, origins(*ranks(serve, 2)[:1], disk=on_disk(other)), ManifestMismatchError)
    assert "tensor 'o': shape is [8, 12] in the checkpoint on disk, [12, 8] on the target" in str(error)


# Ending early


def test_cancelled_fill_says_so(serve: Serve, on_disk: MakeCheckpoint) -> None:
    for where in (origins(source(serve, ABC)), origins(disk=on_disk(ABC))):
        control = Control(deadline_s=PATIENCE_S)
        control.cancel("because")
        with pytest.raises(CancelledError, match="because"):
            fill(poisoned(ABC), where, control=control, options=OPTIONS)


def test_cancel_while_it_receives(serve: Serve, on_disk: MakeCheckpoint) -> None:
    control = Control(deadline_s=PATIENCE_S)
    seen: list[RankProgress] = []

    def report(progress: RankProgress) -> None:
        seen.append(progress)
        if progress.bytes_peer or progress.bytes_disk:
            control.cancel("because")

    with pytest.raises(CancelledError, match="because"):
        fill(
            poisoned(ABC),
            origins(source(serve, {"a": ABC["a"]}), disk=on_disk(ABC)),
            control=control,
            options=OPTIONS,
            on_progress=report,
        )
    assert {p.state for p in seen} == {TransferState.RECEIVING}


def test_deadline_of_a_source_that_says_nothing(fake: MakeFake, serve: Serve) -> None:
    _, manifest = source(serve, ABC)
    server = fake(lambda _: server.over.wait(PATIENCE_S))
    where = origins((endpoint_of(manifest, url=server.url), manifest))
    with pytest.raises(DeadlineError):
        fill(poisoned(ABC), where, control=Control(deadline_s=0.2), options=OPTIONS)


def test_b44_first_real_cause_reaches_the_caller(serve: Serve, on_disk: MakeCheckpoint, tmp_path: Path) -> None:
    disk = on_disk(ABC)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        run(poisoned(ABC), origins(source(serve, {"a": ABC["a"]}), disk=disk))


def test_report_that_raises_ends_the_fill_with_its_error(serve: Serve, on_disk: MakeCheckpoint) -> None:
    def report(progress: RankProgress) -> None:
        if progress.bytes_disk:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(poisoned(ABC), origins(source(serve, {"a": ABC["a"]}), disk=on_disk(ABC)), report)


def test_two_fills_at_once_from_one_source(serve: Serve) -> None:
    where = origins(source(serve, ABC))
    shells = [poisoned(ABC) for _ in range(3)]
    threads = [threading.Thread(target=run, args=(one, where)) for one in shells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [contents(one) for one in shells] == [content(ABC)] * 3


# For those who read while it is filled


def held_of(shells: Shells, manifest: Manifest) -> Held:
    return Held(shells, manifest, patience_s=PATIENCE_S)


def fill_held(shells: Shells, where: Origins, held: Held) -> None:
    fill(shells, where, control=Control(deadline_s=PATIENCE_S), options=OPTIONS, held=held)


def test_what_is_verified_is_told_and_completed_at_the_end(serve: Serve) -> None:
    endpoint, manifest = source(serve, ABC)
    shells = Shells.allocate(manifest)
    held = held_of(shells, manifest)
    there: list[bool] = []

    def verifying(progress: RankProgress) -> None:
        if progress.state is TransferState.VERIFYING:
            there.extend(held.wait_for(begin, end, 0) for begin, end in pairwise(manifest.chunk_bounds))

    fill(
        shells,
        origins((endpoint, manifest)),
        control=Control(deadline_s=PATIENCE_S),
        options=OPTIONS,
        on_progress=verifying,
        held=held,
    )
    assert there == [True] * (len(manifest.chunk_bounds) - 1)
    assert held.is_complete


def test_what_comes_under_another_manifest_is_compared_with_the_digests_of_the_adopted_one(serve: Serve) -> None:
    """The same tensors in another order: what the other source calls a chunk is none here."""
    adopted = Shells.from_tensors(ABC, ModelIdentity(model="m"), chunk_bytes=64).seal()
    turned = source(serve, dict(reversed(ABC.items())), "turned")
    shells = Shells.allocate(adopted)
    held = held_of(shells, adopted)
    dead = endpoint_of(adopted, instance_id="dead"), adopted
    fill_held(shells, origins(dead, turned), held)
    assert held.is_complete
    assert contents(shells) == content(ABC)


def test_nothing_is_handed_on_under_a_manifest_that_is_not_taken_from(serve: Serve) -> None:
    preferred = source(serve, ABC)
    other = source(serve, {**ABC, "b": ABC["b"] + 1}, "other")
    shells = Shells.allocate(preferred[1])
    held = held_of(shells, other[1])
    fill_held(shells, origins(preferred, other), held)
    assert not held.is_complete
    with pytest.raises(FencedError, match="other values"):
        held.wait_for(0, 64, 0)


def test_what_each_source_gave_is_told_on_the_way(serve: Serve) -> None:
    told: list[dict[str, int]] = []
    shells = poisoned(ABC)
    fill(
        shells,
        origins(source(serve, ABC)),
        control=Control(deadline_s=PATIENCE_S),
        options=OPTIONS,
        on_sources=lambda given: told.append({each.instance_id: each.nbytes for each in given}),
    )
    assert told[-1] == {"s": 240}
