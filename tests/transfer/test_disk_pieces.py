"""Which pieces of the local checkpoint fill what is missing of a rank's shells, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.conftest import PATIENCE_S, Fake, MakeFake, Serve, bits, filled, read_request
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.regions_on_disk import DiskCopy, read_copies
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.disk_pieces import disk_copies, names_on_disk
from weightwire.transfer.errors import ManifestError
from weightwire.transfer.filling import Origins, fill
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.planning import Supply, plan_pull
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import FRAME_OVERHEAD_BYTES
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.stream import Timeouts

POISON = 0xAB
# A row is one chunk, so that chunks end where rows do.
CHUNK_BYTES = 64
COLUMNS = 16
ROWS = {"q_proj": 4, "k_proj": 2, "v_proj": 10}
PARTS = {name: filled("float32", (rows, COLUMNS), seed=rows) for name, rows in ROWS.items()}
FUSED = torch.cat(list(PARTS.values()))


def fused_placement() -> tuple[PlacedPiece, ...]:
    pieces, row = list[PlacedPiece](), 0
    for name, rows in ROWS.items():
        whole = row_major((rows, COLUMNS))
        pieces.append(PlacedPiece.of(name, checkpoint=whole, runtime=whole.shifted(row * COLUMNS)))
        row += rows
    return tuple(pieces)


def placed(tensors: dict[str, torch.Tensor], **placement: tuple[PlacedPiece, ...]) -> Shells:
    """Shells over these very tensors, some of them composed of other checkpoint tensors."""
    shells = Shells.from_tensors(tensors, chunk_bytes=CHUNK_BYTES)
    entries = (replace(t, placement=placement.get(t.name, t.placement)) for t in shells.manifest.tensors)
    shells.manifest = replace(shells.manifest, tensors=tuple(entries))
    return shells


def poisoned_qkv() -> Shells:
    """A norm in a storage of its own, then the fused shell: flat addresses do not begin with it."""
    shells = placed({"norm": torch.empty(3), "qkv": torch.empty_like(FUSED)}, qkv=fused_placement())
    shells.fill(POISON)
    return shells


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Checkpoint]:
    save_file({**PARTS, "norm": torch.ones(3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        yield checkpoint


def copies_of(shells: Shells, disk: Checkpoint, name: str, covered: IntervalSet) -> list[DiskCopy]:
    """What a plan without sources has read of the disk for one tensor."""
    specs = {spec.name: spec for spec in specs_of(disk)}
    plan = plan_pull(shells.manifest, [], Supply(on_disk=names_on_disk(shells.manifest, specs), covered=covered))
    assert plan.nowhere == ()
    return list(disk_copies(shells, [piece for piece in plan.disk if piece.tensor == name], specs, covered))


def read(checkpoint: Checkpoint, copies: list[DiskCopy]) -> int:
    return read_copies(checkpoint, copies, control=Control(deadline_s=60))


def is_poison(tensor: torch.Tensor) -> bool:
    return set(bits(tensor)) == {POISON}


# L182
def test_disk_reads_exactly_what_is_missing_of_v_and_leaves_q_and_k_alone(disk: Checkpoint) -> None:
    shells = poisoned_qkv()
    base = shells.manifest.storage_bases[1]
    arrived = base + (ROWS["q_proj"] + ROWS["k_proj"] + 6) * CHUNK_BYTES
    covered = IntervalSet([(base, arrived)])
    copies = copies_of(shells, disk, "qkv", covered)
    assert [(copy.name, copy.source) for copy in copies] == [
        ("v_proj", Region(offset=6 * CHUNK_BYTES, shape=(4 * CHUNK_BYTES,), strides=(1,)))
    ]
    assert read(disk, copies) == disk.bytes_read == 4 * CHUNK_BYTES
    qkv = shells.tensor("qkv")
    # What a peer would have written is still the poison: nobody wrote it again.
    assert is_poison(qkv[:12])
    assert bits(qkv[12:]) == bits(FUSED[12:])
    assert is_poison(shells.tensor("norm"))


# L182
@pytest.mark.parametrize("rows_of_v", [pytest.param(6, id="v cut off at 60 %"), pytest.param(0, id="v not begun")])
def test_peer_that_dies_within_v_is_made_up_for_with_the_rest_of_v(
    fake: MakeFake, serve: Serve, disk: Checkpoint, rows_of_v: int
) -> None:
    served = serve(placed({"qkv": FUSED}, qkv=fused_placement()))
    address = served.server.address
    num_chunks = ROWS["q_proj"] + ROWS["k_proj"] + rows_of_v

    def relay(connection: socket.socket) -> None:
        """Hands so many chunks on, and half of the next one, and then dies."""
        head, body = read_request(connection)
        if not body or server.requests:
            return
        server.requests.append(body)
        with socket.create_connection((address.host, address.port), PATIENCE_S) as real:
            real.sendall(head + b"\r\n\r\n" + body)
            found, end = b"", 0
            while piece := real.recv(1 << 16):
                found += piece
                begin = found.find(b"\r\n\r\n") + 4
                end = begin + num_chunks * (CHUNK_BYTES + FRAME_OVERHEAD_BYTES) + CHUNK_BYTES // 2
                if begin > 3 and len(found) >= end:
                    break
        connection.sendall(found[:end])

    server: Fake = fake(relay)
    shells = placed({"qkv": torch.empty_like(FUSED)}, qkv=fused_placement())
    shells.fill(POISON)
    where = Origins(
        endpoints=[served.endpoint(url=server.url)],
        manifests={served.manifest.digest: served.manifest},
        checkpoint=disk,
    )
    options = PullOptions(streams=1, timeouts=Timeouts(connect_s=PATIENCE_S, stall_s=PATIENCE_S))
    result = fill(shells, where, control=Control(deadline_s=PATIENCE_S), options=options)
    assert bits(shells.tensor("qkv")) == bits(FUSED)
    assert (result.bytes_peer, result.bytes_disk) == (num_chunks * CHUNK_BYTES, (10 - rows_of_v) * CHUNK_BYTES)
    # The half chunk that arrived is not trusted, and nothing but the missing rows was read.
    assert disk.bytes_read == result.bytes_disk
    assert result.tensors["disk"] == 1


def test_nothing_is_read_of_a_tensor_that_is_there(disk: Checkpoint) -> None:
    shells = poisoned_qkv()
    covered = IntervalSet([(0, shells.manifest.total_bytes)])
    assert copies_of(shells, disk, "qkv", covered) == []
    assert copies_of(shells, disk, "norm", covered) == []


def test_everything_is_read_of_a_tensor_that_is_not_there(disk: Checkpoint) -> None:
    shells = poisoned_qkv()
    copies = [copy for name in ("norm", "qkv") for copy in copies_of(shells, disk, name, IntervalSet())]
    assert [copy.name for copy in copies] == ["norm", *ROWS]
    assert read(disk, copies) == shells.manifest.total_bytes
    assert bits(shells.tensor("qkv")) == bits(FUSED)
    assert shells.tensor("norm").tolist() == [1, 1, 1]


def test_holes_are_filled_one_by_one(disk: Checkpoint) -> None:
    shells = poisoned_qkv()
    base = shells.manifest.storage_bases[1]
    covered = IntervalSet([(base + 10, base + 70), (base + 300, base + 500)])
    copies = copies_of(shells, disk, "qkv", covered)
    assert [(copy.name, copy.source.offset, copy.source.numel) for copy in copies] == [
        ("q_proj", 0, 10), ("q_proj", 70, 4 * 64 - 70), ("k_proj", 0, 300 - 256), ("v_proj", 500 - 384, 640 - 116),
    ]  # fmt: skip
    assert read(disk, copies) == FUSED.nbytes - covered.total
    found, wanted = bits(shells.tensor("qkv")), bits(FUSED)
    assert found[10:70] == bytes([POISON]) * 60
    assert found[300:500] == bytes([POISON]) * 200
    assert (found[:10], found[70:300], found[500:]) == (wanted[:10], wanted[70:300], wanted[500:])


def test_columns_of_a_row_parallel_weight_are_read_alone(disk: Checkpoint) -> None:
    """Rank 1 of 2 of a weight that is cut by columns: strided in the file, contiguous in the shell."""
    half = COLUMNS // 2
    columns = PlacedPiece.of(
        "v_proj",
        checkpoint=Region(offset=half, shape=(10, half), strides=(COLUMNS, 1)),
        runtime=row_major((10, half)),
    )
    shells = placed({"down": torch.empty(10, half)}, down=(columns,))
    shells.fill(POISON)
    copies = copies_of(shells, disk, "down", IntervalSet([(0, 32)]))
    assert read(disk, copies) == 10 * half * 4
    assert bits(shells.tensor("down")) == bits(PARTS["v_proj"][:, half:])
    assert copies_of(shells, disk, "down", IntervalSet([(0, 10 * half * 4)])) == []


def test_transposed_shell_is_written_in_its_own_strides(disk: Checkpoint) -> None:
    turned = torch.empty(COLUMNS, 2).t()
    piece = PlacedPiece.of(
        "k_proj",
        checkpoint=row_major((2, COLUMNS)),
        runtime=Region(offset=0, shape=(2, COLUMNS), strides=turned.stride()),
    )
    shells = placed({"k": turned}, k=(piece,))
    shells.fill(POISON)
    assert read(disk, copies_of(shells, disk, "k", IntervalSet())) == PARTS["k_proj"].nbytes
    assert bits(shells.tensor("k")) == bits(PARTS["k_proj"])


def test_shell_of_another_dtype_gets_its_elements_converted(disk: Checkpoint) -> None:
    shells = placed({"qkv": torch.empty(FUSED.shape, dtype=torch.bfloat16)}, qkv=fused_placement())
    shells.fill(POISON)
    read(disk, copies_of(shells, disk, "qkv", IntervalSet()))
    assert bits(shells.tensor("qkv")) == bits(FUSED.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        pytest.param({}, set(), id="all of it"),
        pytest.param({"v_proj": None}, {"v_proj"}, id="a part is missing"),
        pytest.param({"norm": None}, {"norm"}, id="a whole tensor is missing"),
        pytest.param({"v_proj": ("float32", (9, COLUMNS))}, {"v_proj"}, id="a part is too small"),
        pytest.param({"v_proj": ("bfloat16", (10, COLUMNS))}, set(), id="a part of another dtype is converted"),
        pytest.param({"norm": ("float32", (4,))}, set(), id="a whole tensor counts by its name"),
    ],
)
def test_name_is_on_disk_if_every_element_that_is_wanted_is(
    disk: Checkpoint, changed: dict[str, tuple[str, tuple[int, ...]] | None], lacking: set[str]
) -> None:
    specs = {spec.name: spec for spec in specs_of(disk)}
    for name, spec in changed.items():
        del specs[name]
        if spec is not None:
            specs[name] = CheckpointSpec(name=name, dtype=spec[0], shape=spec[1])
    manifest = poisoned_qkv().manifest
    found = names_on_disk(manifest, specs)
    assert found == {*ROWS, "norm"} - lacking
    slots = {"norm": "norm", "v_proj": "qkv[v_proj]"}
    assert plan_pull(manifest, [], Supply(on_disk=found)).nowhere == tuple(slots[name] for name in lacking)


@pytest.mark.parametrize(
    "kept", [pytest.param((0, 1), id="v is placed nowhere"), pytest.param((), id="nothing is known about it")]
)
def test_tensor_of_which_a_part_is_placed_nowhere_is_nowhere(disk: Checkpoint, kept: tuple[int, ...]) -> None:
    shells = placed({"qkv": torch.empty_like(FUSED)}, qkv=tuple(fused_placement()[index] for index in kept))
    found = names_on_disk(shells.manifest, {spec.name: spec for spec in specs_of(disk)})
    assert plan_pull(shells.manifest, [], Supply(on_disk=found)).nowhere == ("qkv",)


def test_tensor_of_which_a_part_is_placed_twice_is_refused() -> None:
    shells = placed({"qkv": torch.empty_like(FUSED)}, qkv=(*fused_placement(), fused_placement()[2]))
    with pytest.raises(ManifestError, match=r"tensor 'qkv': 160 elements are placed more than once"):
        plan_pull(shells.manifest, [])
