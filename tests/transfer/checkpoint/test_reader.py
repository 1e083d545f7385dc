"""Reads from checkpoints on disk: exactly the bytes asked for, or a typed error."""

import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weightwire.transfer.checkpoint.discovery import CheckpointFiles
from weightwire.transfer.checkpoint.pinned_files import MOST_OPEN, PinnedFiles
from weightwire.transfer.checkpoint.reader import Checkpoint, CheckpointTensor, read_header
from weightwire.transfer.dtypes import BY_TAG, Dtype
from weightwire.transfer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DtypeError,
    HeaderError,
    NotFoundError,
    TransferError,
)

Spec = tuple[str, list[int], bytes]
WriteTensors = Callable[[Path, Mapping[str, Spec]], Path]
WriteRaw = Callable[[Path, object, bytes], Path]
EIGHT = bytes(range(1, 9))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def read(checkpoint: Checkpoint, name: str, begin: int, end: int) -> bytes:
    buffer = bytearray(end - begin)
    checkpoint.read_into(name, begin, end, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def file(tmp_path: Path, write_tensors: WriteTensors) -> Path:
    return write_tensors(
        tmp_path / "model.safetensors", {"b": ("U8", [3], b"xyz"), "a": ("F32", [2], EIGHT), "none": ("I32", [0], b"")}
    )


# Entries, order, revision


def test_entries_are_sorted_within_a_file_and_files_keep_their_order(
    tmp_path: Path, write_tensors: WriteTensors
) -> None:
    write_tensors(tmp_path / "2.safetensors", {"a": ("U8", [1], b"a")})
    write_tensors(tmp_path / "1.safetensors", {name: ("U8", [1], b"t") for name in ("t1", "t2", "t10", "t3")})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == ["t1", "t10", "t2", "t3", "a"]
        assert [name for name, _ in checkpoint.iterate()] == ["t1", "t10", "t2", "t3", "a"]


def test_entry_says_where_its_bytes_lie_in_the_file(file: Path) -> None:
    with Checkpoint.open(file) as checkpoint:
        entry = checkpoint.entries["a"]
        assert file.read_bytes()[entry.begin : entry.end] == EIGHT
        assert (entry.file, entry.dtype.name, entry.shape, entry.nbytes) == (file, "float32", (2,), 8)
        assert checkpoint.bytes_read == 0


def test_config_is_the_text_as_it_is(file: Path) -> None:
    with Checkpoint.open(file.parent) as checkpoint:
        assert checkpoint.config is None
    (file.parent / "config.json").write_bytes('{"a":\r\n"ü"}'.encode())
    for path in (file, file.parent):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.config == '{"a":\r\n"ü"}'


def make_gigabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda path: path.write_bytes(b"\xff"), "not UTF-8", id="not text"),
        pytest.param(lambda path: path.symlink_to("gone"), "link whose target is absent", id="a dead link"),
        pytest.param(os.mkfifo, "FIFO", id="a FIFO"),
        pytest.param(os.mkdir, "directory", id="a directory"),
        pytest.param(make_gigabyte, "expected at most", id="a gigabyte"),
    ],
)
def test_config_that_is_no_text_is_refused(file: Path, make: Callable[[Path], object], expected: str) -> None:
    make(file.parent / "config.json")
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(file.parent)


def revision(path: Path) -> str:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.revision


def test_revision_does_not_depend_on_how_tensors_are_dealt_to_files(
    tmp_path: Path, write_tensors: WriteTensors
) -> None:
    tensors: dict[str, Spec] = {"a": ("F32", [2], EIGHT), "b": ("U8", [1], b"1"), "c": ("I32", [0], b"")}
    write_tensors(tmp_path / "one" / "model.safetensors", tensors)
    write_tensors(tmp_path / "two" / "1.safetensors", {"c": tensors["c"], "a": tensors["a"]})
    write_tensors(tmp_path / "two" / "2.safetensors", {"b": ("U8", [1], b"2")})
    assert revision(tmp_path / "one") == revision(tmp_path / "two")
    assert len(revision(tmp_path / "one")) == 64


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"b": ("F32", [2], EIGHT)}, id="another name"),
        pytest.param({"a": ("I32", [2], EIGHT)}, id="another dtype"),
        pytest.param({"a": ("F32", [1, 2], EIGHT)}, id="another shape"),
        pytest.param({"a": ("F32", [2], EIGHT), "b": ("U8", [0], b"")}, id="one more"),
    ],
)
def test_revision_changes_with_any_tensors_definition(
    tmp_path: Path, write_tensors: WriteTensors, spec: dict[str, Spec]
) -> None:
    base = write_tensors(tmp_path / "base" / "model.safetensors", {"a": ("F32", [2], EIGHT)})
    assert revision(base) != revision(write_tensors(tmp_path / "other" / "model.safetensors", spec))


def test_revision_changes_with_the_config(file: Path) -> None:
    without = revision(file)
    (file.parent / "config.json").write_text("")
    empty = revision(file)
    (file.parent / "config.json").write_text("{}")
    assert len({without, empty, revision(file)}) == 3


# Bytes


DATA = bytes(range(256)) * 17


@given(bounds=st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted), lead=st.integers(0, 9))
def test_any_range_of_a_tensor_is_that_slice_of_the_file(
    bounds: list[int], lead: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"slices-{lead}.safetensors"
    if not path.exists():
        names = f'{{"a":{{"dtype":"U8","shape":[{lead}],"data_offsets":[0,{lead}]}},"w":{{"dtype":"U8","shape":'
        raw = f'{names}[2,{len(DATA) // 2}],"data_offsets":[{lead},{lead + len(DATA)}]}}}}'.encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\xee" * lead + DATA)
    begin, end = bounds
    with Checkpoint.open(path) as checkpoint:
        assert read(checkpoint, "w", begin, end) == DATA[begin:end]
        assert checkpoint.bytes_read == end - begin


def test_read_into_writes_into_the_given_memory_and_nothing_beside_it(file: Path) -> None:
    memory = bytearray(b"\xaa" * 12)
    with Checkpoint.open(file) as checkpoint:
        checkpoint.read_into("a", 2, 6, memoryview(memory)[4:8])
    assert memory == b"\xaa" * 4 + EIGHT[2:6] + b"\xaa" * 4


@pytest.mark.parametrize(("begin", "end"), [(-1, 4), (4, 9), (6, 5), (9, 9)])
def test_range_outside_the_tensor_is_the_callers_mistake(file: Path, begin: int, end: int) -> None:
    with Checkpoint.open(file) as checkpoint, pytest.raises(ValueError, match="outside its 8"):
        checkpoint.read_into("a", begin, end, memoryview(bytearray(max(end - begin, 0))))


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(memoryview(bytearray(7)), id="too short"),
        pytest.param(memoryview(bytearray(9)), id="too long"),
        pytest.param(memoryview(bytes(8)), id="read-only"),
        pytest.param(memoryview(bytearray(16))[::2], id="strided"),
    ],
)
def test_buffer_that_does_not_fit_is_the_callers_mistake(file: Path, buffer: memoryview) -> None:
    with Checkpoint.open(file) as checkpoint, pytest.raises(ValueError, match="8 writable, contiguous bytes"):
        checkpoint.read_into("a", 0, 8, buffer)


def test_buffer_of_another_element_type_is_filled_as_bytes(file: Path) -> None:
    buffer = memoryview(bytearray(8)).cast("i")
    with Checkpoint.open(file) as checkpoint:
        checkpoint.read_into("a", 0, 8, buffer)
    assert buffer.tobytes() == EIGHT


def test_unknown_tensor_is_not_found(file: Path) -> None:
    with Checkpoint.open(file) as checkpoint:
        with pytest.raises(NotFoundError, match="'nope'"):
            checkpoint.read_into("nope", 0, 0, memoryview(bytearray()))
        with pytest.raises(NotFoundError, match=r"'\.\./x'"):
            checkpoint.read_tensor("../x")


def test_threads_read_at_the_same_time_and_every_byte_is_counted(tmp_path: Path, write_tensors: WriteTensors) -> None:
    tensors: dict[str, Spec] = {f"t{i}": ("U8", [4096], bytes([i]) * 4096) for i in range(16)}
    for number in range(4):
        part = {name: tensors[name] for name in list(tensors)[number::4]}
        write_tensors(tmp_path / f"{number}.safetensors", part)
    wrong, start = list[str](), threading.Barrier(8)
    with Checkpoint.open(tmp_path) as checkpoint:

        def work() -> None:
            start.wait(timeout=30)
            wrong.extend(name for name in tensors if read(checkpoint, name, 0, 4096) != tensors[name][2])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert checkpoint.bytes_read == 8 * 16 * 4096
    assert wrong == []


# Tensors


def test_b09_scalar_is_read_with_the_empty_shape(tmp_path: Path, write_tensors: WriteTensors) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"k_scale": ("F32", [], struct.pack("<f", 1.5))})
    with Checkpoint.open(path) as checkpoint:
        tensor = checkpoint.read_tensor("k_scale")
    assert (tensor.shape, tensor.item()) == (torch.Size([]), 1.5)


def test_b08_zero_element_tensors_are_read_without_reading(tmp_path: Path, write_tensors: WriteTensors) -> None:
    spec: dict[str, Spec] = {"g_idx": ("I32", [0], b""), "w": ("F32", [2], EIGHT), "pad": ("F16", [2, 0], b"")}
    path = write_tensors(tmp_path / "m.safetensors", spec)
    with Checkpoint.open(path) as checkpoint:
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in checkpoint.iterate()}
        assert checkpoint.bytes_read == 8
        checkpoint.read_into("pad", 0, 0, memoryview(bytearray()))
    assert found == {"g_idx": (torch.int32, (0,)), "pad": (torch.float16, (2, 0)), "w": (torch.float32, (2,))}


def test_b10_every_dtype_comes_back_bit_for_bit_as_the_library_reads_it(
    tmp_path: Path, write_tensors: WriteTensors
) -> None:
    spec: dict[str, Spec] = {
        tag: (tag, list(dtype.logical_shape((2, 2))), bytes(range(1, 1 + 4 * dtype.itemsize)))
        for tag, dtype in BY_TAG.items()
    }
    spec["BOOL"] = ("BOOL", [2, 2], b"\0\1\1\0")
    spec["F8_E8M0"] = ("F8_E8M0", [3], bytes([126, 127, 128]))
    spec["int4"] = ("U8", [2, 2], b"\x10\x32\x54\x76")
    path = write_tensors(tmp_path / "m.safetensors", spec)
    expected = load_file(path)
    with Checkpoint.open(path) as checkpoint:
        found = dict(checkpoint.iterate())
    assert list(found) == sorted(spec)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bytes_of(tensor) == bytes_of(expected[name]) == spec[name][2]
    assert found["F8_E8M0"].float().tolist() == [0.5, 1, 2]
    assert found["F4"].shape == (2, 2)


def test_b10_unknown_tag_in_a_file_names_file_tensor_and_tag(tmp_path: Path, write_tensors: WriteTensors) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("F6_E2M3", [4], b"abc")})
    with pytest.raises(DtypeError, match=r"m\.safetensors.*'w'.*'F6_E2M3'"):
        Checkpoint.open(path)


def test_b11_unaligned_data_is_read_into_aligned_memory(tmp_path: Path, write_raw: WriteRaw) -> None:
    for lead in range(8):
        raw = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        path = write_raw(tmp_path / f"{lead}.safetensors", raw + b" " * lead, struct.pack("<2f", 1, 2))
        with Checkpoint.open(path) as checkpoint:
            tensor = checkpoint.read_tensor("a")
        assert tensor.tolist() == [1, 2]
        assert tensor.data_ptr() % 8 == 0


def test_rejected_names_are_never_read(tmp_path: Path, write_tensors: WriteTensors) -> None:
    names = [f"experts.{expert}.{part}" for expert in range(8) for part in ("w1", "w2", "w3")]
    path = write_tensors(tmp_path / "m.safetensors", {name: ("U8", [100], bytes(100)) for name in names})
    with Checkpoint.open(path) as checkpoint:
        got = [name for name, _ in checkpoint.iterate(lambda name: name.split(".")[1] in ("2", "5"))]
        assert checkpoint.bytes_read == 600
    assert got == [f"experts.{expert}.{part}" for expert in (2, 5) for part in ("w1", "w2", "w3")]


def test_x8_iterator_keeps_no_tensor_that_its_consumer_dropped(tmp_path: Path, write_tensors: WriteTensors) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {f"t{i}": ("U8", [100], bytes(100)) for i in range(5)})
    with Checkpoint.open(path) as checkpoint:
        pairs, earlier = checkpoint.iterate(), list[weakref.ref[torch.Tensor]]()
        for _ in range(5):
            earlier.append(weakref.ref(next(pairs)[1]))
        assert [ref() for ref in earlier] == [None] * 5


def test_x2_metadata_of_any_kind_loads(tmp_path: Path, write_raw: WriteRaw) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    kinds: list[dict[str, object]] = [{"__metadata__": {}}, {"__metadata__": None}, {}]
    for number, metadata in enumerate(kinds):
        path = write_raw(tmp_path / f"{number}.safetensors", {**metadata, "a": entry}, EIGHT)
        with Checkpoint.open(path) as checkpoint:
            assert bytes_of(checkpoint.read_tensor("a")) == EIGHT


def test_names_that_look_like_paths_are_only_names(tmp_path: Path, write_tensors: WriteTensors) -> None:
    names = ["../../x", "/etc/passwd", "a\nb", "", "層 1", "a/b", "nul\0"]
    path = write_tensors(tmp_path / "m.safetensors", {name: ("U8", [1], bytes([i])) for i, name in enumerate(names)})
    with Checkpoint.open(path) as checkpoint:
        assert {name: tensor.tolist() for name, tensor in checkpoint.iterate()} == {
            name: [i] for i, name in enumerate(names)
        }


# Files that lie, change or end


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"\xff" * 7 + b"\x7f{}", "9223372036854775807 bytes in a file of 10 bytes", id="i, absurd length"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS pointer", id="ii, LFS pointer"),
        pytest.param(b"", "is empty", id="iii, no bytes"),
    ],
)
def test_b05_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=expected) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_b05_header_limit_holds_before_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(path, 300_000_000)
    with pytest.raises(HeaderError, match="header of 200000000 bytes in a file of 300000000 bytes"):
        Checkpoint.open(path)
    path.write_bytes((100).to_bytes(8, "little") + b" " * 100)
    with pytest.raises(HeaderError, match="at most 99"):
        Checkpoint.open(path, max_header_bytes=99)


@pytest.mark.parametrize(
    ("shape", "end", "payload", "expected"),
    [
        pytest.param([2], 8, 4, "takes 8 bytes, but only 4", id="truncated"),
        pytest.param([2], 8, 12, "12 bytes are there", id="oversized"),
        pytest.param([16, 32], 512, 512, "span 512 bytes, expected 2048", id="shape and range differ"),
    ],
)
def test_b06_file_whose_payload_does_not_fit_is_refused_at_opening(
    tmp_path: Path, write_raw: WriteRaw, shape: list[int], end: int, payload: int, expected: str
) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}
    path = write_raw(tmp_path / "m.safetensors", header, bytes(payload))
    with pytest.raises(HeaderError, match=expected) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)
    assert "'a'" in str(caught.value)


def test_x12_every_cut_of_a_file_is_refused_with_its_name(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(HeaderError, match="download it again") as caught:
            Checkpoint.open(file)
        assert str(file) in str(caught.value)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    # The clock of a file system ticks every few milliseconds; a test is faster.
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(rewrite, "it was modified at 1 ns", id="rewritten in place"),
        pytest.param(replace, "another file", id="replaced by an equal one"),
        pytest.param(truncate, "bytes, expected", id="truncated"),
    ],
)
def test_file_that_changed_since_opening_is_refused(file: Path, change: Callable[[Path], None], expected: str) -> None:
    with Checkpoint.open(file) as checkpoint:
        change(file)
        with pytest.raises(CheckpointError, match=f"changed on disk.*{expected}"):
            read(checkpoint, "a", 0, 8)
        with pytest.raises(CheckpointError, match="changed on disk"):
            next(checkpoint.iterate())
        assert checkpoint.bytes_read == 0


@pytest.mark.parametrize("change", [rewrite, truncate])
def test_file_that_changes_between_two_reads_is_refused(file: Path, change: Callable[[Path], None]) -> None:
    with Checkpoint.open(file) as checkpoint:
        assert read(checkpoint, "a", 0, 8) == EIGHT
        change(file)
        with pytest.raises(CheckpointError, match="changed on disk"):
            read(checkpoint, "a", 0, 8)


def test_file_that_is_replaced_after_the_first_read_is_read_as_it_was(file: Path) -> None:
    with Checkpoint.open(file) as checkpoint:
        assert read(checkpoint, "b", 0, 3) == b"xyz"
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
        assert read(checkpoint, "a", 0, 8) == EIGHT


def test_file_that_is_gone_after_opening_is_said_to_be_absent(file: Path) -> None:
    with Checkpoint.open(file) as checkpoint:
        file.unlink()
        with pytest.raises(CheckpointNotFoundError, match="is absent"):
            read(checkpoint, "a", 0, 8)


def test_file_that_became_a_fifo_is_refused_without_waiting(file: Path) -> None:
    with Checkpoint.open(file) as checkpoint:
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match="FIFO"):
            read(checkpoint, "a", 0, 8)


def test_read_header_refuses_a_fifo_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    before = open_descriptors()
    with pytest.raises(CheckpointError, match="FIFO"):
        read_header(tmp_path / "m.safetensors")
    assert open_descriptors() == before


def test_file_that_ends_before_an_entry_does_names_file_tensor_and_bytes(file: Path) -> None:
    # Opening would have refused it; a file system that answers short reads inside a file would not be noticed there.
    _, identity = read_header(file)
    size = file.stat().st_size
    entry = CheckpointTensor(name="w", dtype=BY_TAG["U8"], shape=(10,), file=file, begin=size - 4, end=size + 6)
    files = CheckpointFiles(folder=file.parent, files=(file,))
    with (
        Checkpoint(files, {"w": entry}, pinned=PinnedFiles({file: identity}), config=None) as checkpoint,
        pytest.raises(
            CheckpointError, match=r"model\.safetensors': tensor 'w': ends after 4 bytes, expected 10"
        ) as caught,
    ):
        checkpoint.read_tensor("w")
    assert (caught.value.facts["expected_bytes"], caught.value.facts["actual_bytes"]) == (10, 4)


# Descriptors


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_are_opened_at_their_first_read_and_closed_with_the_checkpoint(
    tmp_path: Path, write_tensors: WriteTensors
) -> None:
    for name in "abc":
        write_tensors(tmp_path / f"{name}.safetensors", {name: ("F32", [2], EIGHT)})
    before = open_descriptors()
    checkpoint = Checkpoint.open(tmp_path)
    assert open_descriptors() == before
    for _ in range(3):
        read(checkpoint, "a", 0, 8)
        read(checkpoint, "c", 0, 8)
    assert open_descriptors() == before + 2
    checkpoint.close()
    checkpoint.close()
    assert open_descriptors() == before
    with pytest.raises(ValueError, match="read after close"):
        read(checkpoint, "a", 0, 8)


def test_failed_opening_leaves_no_descriptor(tmp_path: Path, write_tensors: WriteTensors) -> None:
    write_tensors(tmp_path / "a.safetensors", {"a": ("F32", [2], EIGHT)})
    (tmp_path / "b.safetensors").write_bytes(b"version https://git-lfs")
    before = open_descriptors()
    with pytest.raises(TransferError):
        Checkpoint.open(tmp_path)
    assert open_descriptors() == before


def test_closing_under_readers_never_gives_them_another_files_bytes(
    tmp_path: Path, write_tensors: WriteTensors
) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("U8", [1 << 20], b"w" * (1 << 20))})
    decoy = tmp_path / "decoy"
    decoy.write_bytes(b"d" * (2 << 20))
    for _ in range(20):
        checkpoint, seen, started = Checkpoint.open(path), list[bytes](), threading.Event()

        def work(
            checkpoint: Checkpoint = checkpoint, seen: list[bytes] = seen, started: threading.Event = started
        ) -> None:
            while True:
                try:
                    seen.append(read(checkpoint, "w", 0, 1 << 20))
                except ValueError:
                    return
                started.set()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert started.wait(timeout=30)
        checkpoint.close()
        with decoy.open("rb"):
            for thread in threads:
                thread.join()
        assert set(seen) == {b"w" * (1 << 20)}


READ_ALL = """
import resource, sys
from pathlib import Path
from weightwire.transfer.checkpoint import Checkpoint
total = 0
with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    checkpoint.read_tensor("small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _, tensor in checkpoint.iterate():
        total += tensor.nbytes
        del tensor
    print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_x8_reading_four_shards_takes_the_memory_of_one(
    tmp_path: Path, write_raw: WriteRaw, write_tensors: WriteTensors
) -> None:
    mebibyte = 1 << 20
    write_tensors(tmp_path / "0.safetensors", {"small": ("U8", [1], b"1")})
    for number in range(1, 5):
        entry = {"dtype": "U8", "shape": [64, mebibyte], "data_offsets": [0, 64 * mebibyte]}
        path = write_raw(tmp_path / f"{number}.safetensors", {f"t{number}": entry}, b"")
        os.truncate(path, path.stat().st_size + 64 * mebibyte)
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    total, grown_kib = map(int, done.stdout.split())
    assert total == 4 * 64 * mebibyte + 1
    assert grown_kib < (64 + 16) * 1024


def test_tensor_of_a_dtype_that_torch_lacks_is_refused_before_it_is_read(file: Path) -> None:
    future = Dtype(name="float2_e1m0", tag="F2", itemsize=1)
    with pytest.raises(DtypeError, match="float2_e1m0"):
        _ = future.torch_dtype


def test_files_that_were_not_read_for_long_are_closed(tmp_path: Path) -> None:
    for number in range(MOST_OPEN + 9):
        save_file({f"t{number}": torch.full((2,), number)}, tmp_path / f"{number:03}.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint.open(tmp_path) as checkpoint:
        for _ in range(2):
            assert [int(tensor[1]) for _, tensor in checkpoint.iterate()] == list(range(MOST_OPEN + 9))
            assert len(os.listdir("/proc/self/fd")) == before + MOST_OPEN
    assert len(os.listdir("/proc/self/fd")) == before
