"""Files that appear whole or not at all, and that the safetensors library reads."""

import os
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from weightwire.transfer.checkpoint.reader import Checkpoint
from weightwire.transfer.checkpoint.writer import WritableTensor, iter_pieces, plan_file, write_safetensors
from weightwire.transfer.dtypes import BY_TAG, dtype_tagged
from weightwire.transfer.errors import CheckpointError, CheckpointPathError, DtypeError, HeaderError, TransferError


def writable(name: str, tag: str, shape: tuple[int, ...], *pieces: bytes) -> WritableTensor:
    return WritableTensor(
        name=name, dtype=dtype_tagged(tag), shape=shape, pieces=lambda: [memoryview(piece) for piece in pieces]
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


EVERY_DTYPE = [
    writable(tag, tag, (2, 2), bytes(b % 2 for b in range(4)) if tag == "BOOL" else bytes(range(4 * dtype.itemsize)))
    for tag, dtype in BY_TAG.items()
]


def test_every_dtype_is_read_by_the_library_and_by_us_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    scalar, empty = writable("scalar", "F32", (), b"\0\0\xc0?"), writable("empty", "F16", (2, 0))
    tensors = [*EVERY_DTYPE, scalar, empty]
    assert write_safetensors(path, tensors, {"format": "pt"}) == path.stat().st_size
    found = load_file(path)
    with safe_open(path, "pt") as file, Checkpoint.open(path) as checkpoint:
        assert file.metadata() == {"format": "pt"}
        ours = dict(checkpoint.iterate())
    assert set(found) == set(ours) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        for read in (found[tensor.name], ours[tensor.name]):
            assert (read.dtype, tuple(read.shape)) == (tensor.dtype.torch_dtype, tensor.shape)
            assert bytes_of(read) == b"".join(bytes(piece) for piece in tensor.pieces())


def test_file_is_the_planned_prefix_and_the_pieces_in_order(tmp_path: Path) -> None:
    tensors = [writable("z", "U8", (5,), b"ab", b"", b"cde"), writable("a", "F32", (1,), b"1234")]
    prefix, header = plan_file(tensors, {"k": "v"})
    write_safetensors(tmp_path / "m", tensors, {"k": "v"})
    assert (tmp_path / "m").read_bytes() == prefix + b"abcde1234"
    assert [entry.name for entry in header.entries] == ["z", "a"]
    streamed = b"".join(
        bytes(piece)
        for tensor, entry in zip(tensors, header.entries, strict=True)
        for piece in iter_pieces(tensor, entry.nbytes)
    )
    assert prefix + streamed == (tmp_path / "m").read_bytes()


def test_pieces_may_be_of_any_type_and_reuse_one_buffer(tmp_path: Path) -> None:
    buffer = bytearray(4)

    def pieces() -> Iterator[memoryview]:
        for value in (1.0, 2.0, 3.0):
            struct.pack_into("<f", buffer, 0, value)
            yield memoryview(buffer).cast("i")

    path = tmp_path / "m.safetensors"
    write_safetensors(path, [WritableTensor(name="a", dtype=dtype_tagged("F32"), shape=(3,), pieces=pieces)])
    assert load_file(path)["a"].tolist() == [1, 2, 3]


def test_pieces_are_handed_on_without_empty_ones_and_without_any_surplus() -> None:
    tensor = writable("a", "U8", (5,), b"", b"ab", b"", b"cde", b"", b"surplus", b"more")
    handed_on = list[bytes]()
    with pytest.raises(CheckpointError, match="'a': its pieces have at least 12 bytes, expected 5"):
        handed_on.extend(bytes(piece) for piece in iter_pieces(tensor, 5))
    assert handed_on == [b"ab", b"cde"]


def test_later_pieces_are_not_asked_for_before_earlier_tensors_are_written(tmp_path: Path) -> None:
    order = list[str]()

    def lazily(name: str) -> Callable[[], Iterable[memoryview]]:
        def pieces() -> Iterator[memoryview]:
            order.append(f"begin {name}")
            yield memoryview(b"1234")
            order.append(f"end {name}")

        return pieces

    tensors = [WritableTensor(name=n, dtype=dtype_tagged("F32"), shape=(1,), pieces=lazily(n)) for n in ("b", "a")]
    plan_file(tensors)
    assert order == []
    write_safetensors(tmp_path / "m", tensors)
    assert order == ["begin b", "end b", "begin a", "end a"]


def test_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", [])
    assert load_file(tmp_path / "m.safetensors") == {}


def test_ten_thousand_small_tensors_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, [writable(f"t{i}", "I32", (1,), i.to_bytes(4, "little")) for i in range(10_000)])
    with Checkpoint.open(path) as checkpoint:
        assert all(tensor.item() == int(name[1:]) for name, tensor in checkpoint.iterate())


def fail_midway() -> Iterator[memoryview]:
    yield memoryview(b"12")
    raise RuntimeError("the storage went away")


def lose_the_connection() -> Iterator[memoryview]:
    yield memoryview(b"12")
    raise BrokenPipeError("the source went away")


def interrupt() -> Iterator[memoryview]:
    yield memoryview(b"12")
    raise KeyboardInterrupt("stop")


@pytest.mark.parametrize(
    ("pieces", "error", "message"),
    [
        pytest.param(lambda: [memoryview(b"123")], CheckpointError, "have 3 bytes, expected 4", id="too few bytes"),
        pytest.param(lambda: [memoryview(b"12345")], CheckpointError, "at least 5 bytes, expected 4", id="too many"),
        pytest.param(list, CheckpointError, "have 0 bytes, expected 4", id="none"),
        pytest.param(fail_midway, RuntimeError, "went away", id="an error in the middle"),
        pytest.param(lose_the_connection, CheckpointError, "the source went away", id="an OSError in the middle"),
        pytest.param(interrupt, KeyboardInterrupt, "stop", id="an interrupt"),
    ],
)
@pytest.mark.parametrize("old", [None, b"the old file"])
def test_failure_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path,
    pieces: Callable[[], Iterable[memoryview]],
    error: type[BaseException],
    message: str,
    old: bytes | None,
) -> None:
    path = tmp_path / "rank-0.safetensors"
    if old is not None:
        path.write_bytes(old)
    bad = WritableTensor(name="bad", dtype=dtype_tagged("F32"), shape=(1,), pieces=pieces)
    with pytest.raises(error, match=message):
        write_safetensors(path, [writable("good", "U8", (3 << 20,), bytes(3 << 20)), bad])
    assert os.listdir(tmp_path) == ([] if old is None else [path.name])
    assert old is None or path.read_bytes() == old


def test_replacing_is_atomic_for_whoever_has_the_old_file_open(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, [writable("a", "U8", (3,), b"old")])
    with Checkpoint.open(path) as checkpoint:
        assert bytes_of(checkpoint.read_tensor("a")) == b"old"
        write_safetensors(path, [writable("a", "U8", (3,), b"new")])
        assert bytes_of(checkpoint.read_tensor("a")) == b"old"
    assert bytes_of(load_file(path)["a"]) == b"new"
    assert os.listdir(tmp_path) == [path.name]


def test_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_safetensors(tmp_path / "m.safetensors", [])
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "m.safetensors")}
    assert len(modes) == 1


def test_name_as_long_as_the_file_system_allows_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 243 + ".safetensors")
    write_safetensors(path, [writable("a", "U8", (1,), b"1")])
    assert bytes_of(load_file(path)["a"]) == b"1"


def onto_a_directory(folder: Path) -> Path:
    (folder / "m").mkdir()
    return folder / "m"


def below_a_file(folder: Path) -> Path:
    (folder / "m").touch()
    return folder / "m" / "n"


@pytest.mark.parametrize(
    ("place", "error"),
    [
        pytest.param(lambda folder: folder / "gone" / "m", CheckpointError, id="in a folder that is not there"),
        pytest.param(onto_a_directory, CheckpointError, id="onto a directory"),
        pytest.param(below_a_file, CheckpointError, id="below a file"),
        pytest.param(lambda folder: folder / ("n" * 300), CheckpointError, id="under too long a name"),
        pytest.param(lambda folder: folder / "a\0b", CheckpointPathError, id="under a name with a NUL byte"),
        pytest.param(lambda _: Path("/dev/full/m"), CheckpointError, id="below a device"),
    ],
)
def test_place_that_cannot_be_written_is_named(
    tmp_path: Path, place: Callable[[Path], Path], error: type[TransferError]
) -> None:
    path = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match="file '"):
        write_safetensors(path, [writable("a", "U8", (1,), b"1")])
    assert sorted(tmp_path.rglob("*")) == before


def test_full_disk_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on file size stands in for a full disk: the write fails with an OSError half way.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            write_safetensors(tmp_path / "m", [writable(n, "U8", (3 << 19,), bytes(3 << 19)) for n in "abc"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        pytest.param([writable("a", "U8", (1,), b"1")] * 2, HeaderError, id="a name twice"),
        pytest.param([writable("__metadata__", "U8", (1,), b"1")], HeaderError, id="the reserved name"),
        pytest.param([writable("q", "F4", (), b"1")], DtypeError, id="a packed scalar"),
    ],
)
def test_b10_what_no_file_can_hold_is_refused_before_a_file_is_made(
    tmp_path: Path, tensors: list[WritableTensor], error: type[TransferError]
) -> None:
    with pytest.raises(error):
        write_safetensors(tmp_path / "m", tensors)
    assert os.listdir(tmp_path) == []
