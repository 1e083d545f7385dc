"""Readers of checkpoints: the same names and bytes from each of them, in one order, and nothing more is touched."""

from __future__ import annotations

import dataclasses
import gc
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightwire.transfer.checkpoint.discovery import CheckpointFiles, DuplicatePolicy
from weightwire.transfer.checkpoint.formats import LoadFormat, ReaderOptions
from weightwire.transfer.checkpoint.iteration import TensorReader, open_reader, start_prefetch
from weightwire.transfer.checkpoint.ordering import order_files
from weightwire.transfer.checkpoint.prefetch import Prefetch
from weightwire.transfer.checkpoint.read_plan import ReaderKind, ReadOptions, ReadPlan, choose_reader
from weightwire.transfer.checkpoint.shard_files import map_shard, read_headers
from weightwire.transfer.dtypes import BY_TAG, Dtype
from weightwire.transfer.errors import CheckpointError, HeaderError, SettingsError
from weightwire.transfer.ranks import GroupRank

Spec = tuple[str, list[int], bytes]
WriteTensors = Callable[[Path, Mapping[str, Spec]], Path]
WriteRaw = Callable[[Path, object, bytes], Path]

PATIENCE_S = 30.0
MIB = 1 << 20
SINGLE = ReadPlan(kind=ReaderKind.SINGLE, read_ahead=False)
THREADED = ReadPlan(kind=ReaderKind.THREADED, workers=2)
PLANS = {
    "single, mapped": SINGLE,
    "single, read": dataclasses.replace(SINGLE, mmap=False),
    "threaded, mapped": THREADED,
    "threaded, read": dataclasses.replace(THREADED, mmap=False, read_ahead=False),
}
EACH_PLAN = pytest.mark.parametrize("plan", [pytest.param(plan, id=name) for name, plan in PLANS.items()])
EACH_CONTAINER = pytest.mark.parametrize("container", ["safetensors", "pickle"])


def found(*files: Path, container: str = "safetensors", **changes: DuplicatePolicy) -> CheckpointFiles:
    kind = "pickle" if container == "pickle" else "safetensors"
    return CheckpointFiles(folder=files[0].parent, files=files, container=kind, **changes)  # type: ignore[arg-type]


def save(folder: Path, shards: list[dict[str, torch.Tensor]], container: str = "safetensors") -> CheckpointFiles:
    """One file of each dict, in the order of the list."""
    files = list[Path]()
    for number, tensors in enumerate(shards):
        if container == "pickle":
            files.append(folder / f"{number}.bin")
            torch.save(tensors, files[-1])
        else:
            files.append(folder / f"{number}.safetensors")
            save_file(tensors, files[-1])
    return found(*files, container=container)


def sparse_file(path: Path, *names: str, mib: int) -> Path:
    """Float32 tensors of `mib` MiB each, all zeros, most of which are no blocks on disk."""
    entries, end = list[str](), 0
    for name in names:
        entries.append(
            f'"{name}":{{"dtype":"F32","shape":[{mib * MIB // 4}],"data_offsets":[{end},{end + mib * MIB}]}}'
        )
        end += mib * MIB
    raw = ("{" + ",".join(entries) + "}").encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + end)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def in_kib(field: str) -> int:
    """A figure of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def bytes_by_read_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.fixture
def peak_of() -> Callable[[Callable[[], object]], int]:
    """Measures how far, in bytes, resident memory rises above where it was while a function runs."""

    def measure(work: Callable[[], object]) -> int:
        gc.collect()
        # Source: proc_pid_clear_refs(5): 5 sets the peak back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = in_kib("VmRSS")
        work()
        return (in_kib("VmHWM") - before) * 1024

    return measure


def use_up(reader: TensorReader) -> None:
    for _, tensor in reader.iterate():
        # One element of each page.
        tensor[::1024].sum()
        del tensor


def workers_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire")]


# Order and content


# L34, L46
@EACH_CONTAINER
@EACH_PLAN
def test_names_are_sorted_within_a_file_and_files_keep_their_order(
    tmp_path: Path, container: str, plan: ReadPlan
) -> None:
    first = {name: torch.full((2,), float(number)) for number, name in enumerate(("t1", "t2", "t3", "t10"))}
    files = save(tmp_path, [first, {"a": torch.zeros(1)}], container)
    got = dict(open_reader(files, plan).iterate())
    assert list(got) == ["t1", "t10", "t2", "t3", "a"]
    assert all(torch.equal(got[name], first[name]) for name in first)


# L34
@EACH_PLAN
def test_order_of_names_in_the_header_or_on_disk_does_not_count(
    tmp_path: Path, write_tensors: WriteTensors, plan: ReadPlan
) -> None:
    specs: dict[str, Spec] = {name: ("U8", [1], name[-1:].encode()) for name in ("t3", "t10", "t1", "t2")}
    stream = open_reader(found(write_tensors(tmp_path / "m.safetensors", specs)), plan).iterate()
    assert [(name, bits(tensor)) for name, tensor in stream] == [
        ("t1", b"1"),
        ("t10", b"0"),
        ("t2", b"2"),
        ("t3", b"3"),
    ]


# L34
@EACH_PLAN
def test_names_are_sorted_by_the_reader_and_not_by_whoever_wrote_the_file(tmp_path: Path, plan: ReadPlan) -> None:
    files = found(sparse_file(tmp_path / "0.safetensors", "t1", "t2", "t3", "t10", mib=1))
    assert [name for name, _ in open_reader(files, plan).iterate()] == ["t1", "t10", "t2", "t3"]


# L02
@EACH_PLAN
def test_reader_gives_exactly_the_names_of_the_files_whatever_the_model(tmp_path: Path, plan: ReadPlan) -> None:
    dense = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    moe = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(12)]
    for names in (dense, moe):
        files = save(tmp_path, [{name: torch.zeros(2, 2) for name in names}])
        assert [name for name, _ in open_reader(files, plan).iterate()] == sorted(names)


# C8, L34, L46
@EACH_CONTAINER
@pytest.mark.parametrize("prefetch", [pytest.param(True, id="prefetch"), pytest.param(False, id="no prefetch")])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_content_depends_on_no_order_of_files_threads_stagger_or_prefetch(
    tmp_path: Path, container: str, threads: int, prefetch: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [{f"f{f}.t{t}": torch.randn(5, generator=generator) for t in range(4)} for f in range(3)]
    files = save(tmp_path, shards, container)
    expected = {name: bits(tensor) for shard in shards for name, tensor in shard.items()}
    plan = choose_reader(ReadOptions(threads=ReaderOptions(num_threads=threads), prefetch=prefetch))
    orders = [*permutations(files.files)]
    orders += [order_files(list(files.files), k, GroupRank(rank=1, size=2), unique_names=True) for k in (0, 1)]
    for order in orders:
        permuted = dataclasses.replace(files, files=tuple(order))
        handle = start_prefetch(permuted, plan)
        assert (handle is not None) == prefetch
        stream = open_reader(permuted, plan, prefetch=handle).iterate()
        assert {name: bits(tensor) for name, tensor in stream} == expected
        if handle is not None:
            handle.stop()


# L31
@EACH_PLAN
def test_reader_never_holds_more_tensors_than_one_file_has(tmp_path: Path, plan: ReadPlan) -> None:
    files = found(*(sparse_file(tmp_path / f"{f}.s", f"{f}.a", f"{f}.b", f"{f}.c", f"{f}.d", mib=2) for f in range(4)))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    seen = list[int]()
    for _, tensor in open_reader(files, plan).iterate():
        alive.add(tensor)
        seen.append(len(alive))
        del tensor
    assert len(seen) == 16
    assert max(seen) == 1
    assert len(alive) == 0


def test_streams_of_one_reader_are_independent(tmp_path: Path) -> None:
    reader = open_reader(save(tmp_path, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}]), THREADED)
    one, other = reader.iterate(), reader.iterate()
    assert [next(one)[0], next(other)[0], next(one)[0], next(other)[0]] == ["a", "a", "b", "b"]
    assert [*one, *other] == []


def test_nothing_is_opened_and_no_thread_runs_before_the_first_pull(tmp_path: Path) -> None:
    reader = open_reader(save(tmp_path, [{"a": torch.zeros(1)}]))
    stream = reader.iterate()
    assert workers_left() == []
    assert reader.tensors_read == 0
    assert [name for name, _ in stream] == ["a"]


# Memory


# X8, L31, C12
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLANS["single, mapped"], id="single, mapped"),
        pytest.param(PLANS["single, read"], id="single, read"),
        pytest.param(choose_reader(), id="eight workers, mapped"),
        pytest.param(choose_reader(ReadOptions(mmap=False, max_buffered_bytes=64 * MIB)), id="read, bounded in bytes"),
    ],
)
def test_x8_peak_is_the_largest_of_four_files_of_64_mib(
    tmp_path: Path, plan: ReadPlan, peak_of: Callable[[Callable[[], object]], int]
) -> None:
    files = [sparse_file(tmp_path / f"{f}.s", *(f"{f}.{t}" for t in range(4)), mib=16) for f in range(4)]
    reader = open_reader(found(*files), plan)
    assert peak_of(lambda: use_up(reader)) <= 64 * MIB + 24 * MIB


# L32
def test_mapped_tensors_of_256_mib_take_almost_no_private_memory(tmp_path: Path) -> None:
    file = sparse_file(tmp_path / "m.safetensors", "a", "b", "c", "d", mib=64)
    before = in_kib("RssAnon")
    kept = dict(open_reader(found(file), SINGLE).iterate())
    assert sum(int(tensor[::1024].sum()) for tensor in kept.values()) == 0
    assert (in_kib("RssAnon") - before) * 1024 <= 8 * MIB


# L32
def test_write_to_a_mapped_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    files = save(tmp_path, [{"a": torch.zeros(4096)}])
    before = files.files[0].read_bytes()
    reader = open_reader(files, SINGLE)
    for _, tensor in reader.iterate():
        tensor.fill_(1.0)
        assert tensor.sum() == 4096
    assert files.files[0].read_bytes() == before
    assert [tensor.sum() for _, tensor in reader.iterate()] == [0]


# L33
def test_reading_256_mib_without_mmap_peaks_below_twice_the_file(
    tmp_path: Path, peak_of: Callable[[Callable[[], object]], int]
) -> None:
    file = sparse_file(tmp_path / "m.safetensors", "a", "b", "c", "d", mib=64)
    reader = open_reader(found(file), PLANS["single, read"])
    # 513 MiB is what a reader takes that parses raw bytes; this one has none beside the tensors.
    assert peak_of(lambda: next(reader.iterate())) <= 256 * MIB + 24 * MIB


# L33
def test_without_mmap_the_file_is_read_before_its_first_tensor_and_not_needed_after(tmp_path: Path) -> None:
    files = save(tmp_path, [{"a": torch.arange(4.0), "b": torch.arange(8.0)}])
    stream = open_reader(files, PLANS["single, read"]).iterate()
    assert torch.equal(next(stream)[1], torch.arange(4.0))
    files.files[0].unlink()
    assert torch.equal(next(stream)[1], torch.arange(8.0))
    assert list(stream) == []


# L37
@pytest.mark.parametrize("workers", [1, 2])
def test_reader_without_mmap_holds_at_most_two_files_more_than_workers(
    tmp_path: Path, workers: int, peak_of: Callable[[Callable[[], object]], int]
) -> None:
    files = [sparse_file(tmp_path / f"{f}.s", f"{f}", mib=16) for f in range(12)]
    plan = dataclasses.replace(PLANS["threaded, read"], workers=workers)
    reader = open_reader(found(*files), plan)
    assert peak_of(lambda: use_up(reader)) <= (workers + 2) * 16 * MIB + 24 * MIB


# L46, C12
def test_at_most_four_loaded_dicts_of_ten_pickles_are_alive_with_two_workers(tmp_path: Path) -> None:
    shards = [{f"t{number:02}{part}": torch.zeros(MIB // 4) for part in "ab"} for number in range(10)]
    files = save(tmp_path, shards, "pickle")
    names, seen, pause = list[str](), list[int](), threading.Event()
    for name, tensor in open_reader(files, THREADED).iterate():
        del tensor
        names.append(name)
        for _ in range(int(PATIENCE_S * 1000) if name.endswith("a") else 0):
            if len(mapped_files(files)) >= min(4, 10 - len(seen)):
                break
            pause.wait(0.001)
        if name.endswith("a"):
            seen.append(len(mapped_files(files)))
    assert names == [name for shard in shards for name in shard]
    assert seen == [4] * 7 + [3, 2, 1]


def mapped_files(files: CheckpointFiles) -> set[str]:
    """Those of `files` that are mapped now: each loaded dict of a pickle maps its file for as long as it is alive."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines} & {str(file) for file in files.files}


# Names that are not wanted

EXPERTS = [f"experts.{e}.{part}.weight" for e in range(8) for part in ("down_proj", "gate_proj", "up_proj")]


def is_local(name: str) -> bool:
    return name.startswith(("experts.2.", "experts.3."))


# L35, L06
@EACH_CONTAINER
@EACH_PLAN
def test_only_wanted_tensors_are_fetched(tmp_path: Path, container: str, plan: ReadPlan) -> None:
    files = save(tmp_path, [{name: torch.ones(8) for name in EXPERTS}], container)
    reader = open_reader(files, plan)
    assert [name for name, _ in reader.iterate(is_local)] == list(filter(is_local, EXPERTS))
    assert (reader.tensors_read, reader.bytes_read) == (6, 6 * 32)


# L06
@EACH_PLAN
def test_sixty_of_a_hundred_names_rejected_leave_forty_reads(tmp_path: Path, plan: ReadPlan) -> None:
    names = [f"t{number:03}" for number in range(100)]
    reader = open_reader(save(tmp_path, [{name: torch.ones(1) for name in names}]), plan)
    assert len(list(reader.iterate(lambda name: name >= "t060"))) == 40
    assert reader.tensors_read == 40


# L35
@pytest.mark.parametrize(
    ("plan", "touched"),
    [
        pytest.param(SINGLE, 0, id="mapped: the consumer alone touches"),
        pytest.param(THREADED, 6, id="read ahead"),
        pytest.param(PLANS["single, read"], 6, id="read"),
        pytest.param(PLANS["threaded, read"], 6, id="read by workers"),
    ],
)
def test_no_payload_byte_of_a_rejected_tensor_is_read(tmp_path: Path, plan: ReadPlan, touched: int) -> None:
    file = sparse_file(tmp_path / "m.safetensors", *EXPERTS, mib=1)
    with open(file, "rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = open_reader(found(file), plan)
    before, resident = bytes_by_read_calls(), in_kib("RssFile")
    kept = list(reader.iterate(is_local))
    read = bytes_by_read_calls() - before
    # What /proc says of this process is read by the same calls. A block that is cached already is not read again.
    assert read <= touched * MIB + 64 * 1024
    if plan.mmap is False:
        assert read >= touched * MIB
    # Mapping is not touching.
    assert (in_kib("RssFile") - resident) * 1024 <= 2 * MIB
    assert len(kept) == 6


# L35
def test_read_ahead_goes_over_the_wanted_tensors_alone(tmp_path: Path) -> None:
    [source] = read_headers([sparse_file(tmp_path / "m.safetensors", *EXPERTS, mib=1)])
    blocks = list[int]()

    def is_stopped() -> bool:
        blocks.append(1)
        return False

    map_shard(source, list(filter(is_local, EXPERTS)), warm=True, is_stopped=is_stopped)
    # Two experts lie side by side: 6 MiB in blocks of 4, of 24 MiB in the file.
    assert len(blocks) == 2
    map_shard(source, EXPERTS, warm=False, is_stopped=is_stopped)
    assert len(blocks) == 2


# L06, L35
@EACH_PLAN
def test_file_without_a_wanted_name_is_not_opened_again(tmp_path: Path, plan: ReadPlan) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}, {"c": torch.zeros(1)}])
    reader = open_reader(files, plan)
    files.files[1].unlink()
    assert [name for name, _ in reader.iterate(lambda name: name != "b")] == ["a", "c"]
    assert list(reader.iterate(lambda _: False)) == []


# Errors


# L39
@EACH_PLAN
def test_file_that_broke_since_raises_in_its_turn_and_ends_everything(tmp_path: Path, plan: ReadPlan) -> None:
    files = save(tmp_path, [{f"t{number}": torch.zeros(64)} for number in range(5)])
    reader = open_reader(files, plan, prefetch=(prefetch := Prefetch(files.files)))
    os.truncate(files.files[2], 100)
    got = list[str]()
    with pytest.raises(CheckpointError, match=r"2\.safetensors.*changed on disk.*100 bytes"):
        got.extend(name for name, _ in reader.iterate())
    assert got == ["t0", "t1"]
    assert prefetch.done
    assert workers_left() == []


# L39
@EACH_PLAN
def test_corrupt_pickle_raises_in_its_turn(tmp_path: Path, plan: ReadPlan) -> None:
    files = save(tmp_path, [{f"t{number}": torch.zeros(64)} for number in range(5)], "pickle")
    files.files[2].write_bytes(b"no pickle")
    got = list[str]()
    with pytest.raises(CheckpointError, match=r"2\.bin"):
        got.extend(name for name, _ in open_reader(files, plan).iterate())
    assert got == ["t0", "t1"]
    assert workers_left() == []


# L39
@EACH_CONTAINER
@EACH_PLAN
def test_closing_early_stops_workers_and_prefetch(tmp_path: Path, container: str, plan: ReadPlan) -> None:
    files = save(tmp_path, [{f"t{number}": torch.zeros(64)} for number in range(5)], container)
    entered, free = threading.Event(), threading.Event()

    def held(_fd: int, _offset: int, buffer: memoryview) -> int:
        entered.set()
        assert free.wait(PATIENCE_S)
        return len(buffer)

    prefetch = Prefetch(files.files, threads=1, read_block=held)
    assert entered.wait(PATIENCE_S)
    stream = open_reader(files, plan, prefetch=prefetch).iterate()
    assert next(stream)[0] == "t0"
    free.set()
    stream.close()  # type: ignore[attr-defined]
    assert prefetch.done
    assert workers_left() == []


# L39
@EACH_PLAN
def test_mapped_file_that_is_cut_short_between_two_tensors_is_refused(tmp_path: Path, plan: ReadPlan) -> None:
    """Touching it would end the process by a signal."""
    files = save(tmp_path, [{"a": torch.zeros(2048), "b": torch.ones(2048)}])
    stream = open_reader(files, plan).iterate()
    next(stream)
    if not plan.mmap:
        assert torch.equal(next(stream)[1], torch.ones(2048))
        return
    os.truncate(files.files[0], 4096)
    with pytest.raises(CheckpointError, match="changed on disk"):
        next(stream)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda file: file.unlink(), id="removed"),
        pytest.param(lambda file: os.utime(file, ns=(0, 0)), id="written again"),
        pytest.param(lambda file: os.replace(save_other(file), file), id="replaced"),
        pytest.param(lambda file: os.truncate(file, 0), id="emptied"),
    ],
)
@EACH_PLAN
def test_file_that_changed_since_its_header_was_read_is_refused(
    tmp_path: Path, plan: ReadPlan, change: Callable[[Path], object]
) -> None:
    files = save(tmp_path, [{"a": torch.zeros(4)}])
    reader = open_reader(files, plan)
    change(files.files[0])
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        list(reader.iterate())


def save_other(file: Path) -> Path:
    save_file({"a": torch.ones(4)}, file.with_suffix(".new"))
    return file.with_suffix(".new")


@pytest.mark.parametrize(
    ("shape", "offsets", "payload", "missing"),
    [
        pytest.param([2], [0, 8], 4, 4, id="payload too short"),
        pytest.param([2], [0, 8], 12, -4, id="payload too long"),
        pytest.param([16, 32], [0, 512], 512, 1536, id="range too short for the shape"),
    ],
)
def test_b06_file_that_contradicts_its_header_is_refused_before_any_tensor(
    tmp_path: Path, write_raw: WriteRaw, *, shape: list[int], offsets: list[int], payload: int, missing: int
) -> None:
    good = save(tmp_path, [{"good": torch.zeros(1)}]).files[0]
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    bad = write_raw(tmp_path / "bad.safetensors", header, bytes(payload))
    with pytest.raises(HeaderError, match=r"bad\.safetensors.*'a'") as caught:
        # The good file comes first, and not even that is read.
        open_reader(found(good, bad))
    expected, actual = caught.value.facts["expected_bytes"], caught.value.facts["actual_bytes"]
    assert isinstance(expected, int)
    assert isinstance(actual, int)
    assert expected - actual == missing
    assert str(expected) in str(caught.value)
    assert str(actual) in str(caught.value)


# L21
@EACH_CONTAINER
def test_name_in_two_files_is_refused_with_both(tmp_path: Path, container: str) -> None:
    files = save(tmp_path, [{"a.weight": torch.zeros(1)}, {"a.weight": torch.ones(1)}], container)
    with pytest.raises(CheckpointError, match=r"'a\.weight'.*two files") as caught:
        list(open_reader(files, THREADED).iterate())
    assert caught.value.facts["files"] == [str(file) for file in files.files]
    assert caught.value.facts["diagnostic"] == "D02"


# L21
@EACH_CONTAINER
@EACH_PLAN
def test_first_copy_of_a_name_counts_if_that_was_asked_for(tmp_path: Path, container: str, plan: ReadPlan) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1)}, {"a": torch.ones(1), "b": torch.ones(1)}], container)
    first = dataclasses.replace(files, duplicates=DuplicatePolicy.FIRST)
    got = [(name, int(tensor)) for name, tensor in open_reader(first, plan).iterate()]
    assert got == [("a", 0), ("b", 1)]


# L44
def test_reader_of_another_kind_is_not_opened_here(tmp_path: Path) -> None:
    plan = choose_reader(load_format=LoadFormat.FASTSAFETENSORS)
    with pytest.raises(SettingsError, match="reader of its own"):
        open_reader(found(tmp_path / "gone.safetensors"), plan)


# L25
@EACH_PLAN
def test_file_that_appears_later_is_not_read(tmp_path: Path, plan: ReadPlan) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1)}])
    reader = open_reader(files, plan)
    save_file({"b": torch.zeros(1)}, tmp_path / "9.safetensors")
    assert [name for name, _ in reader.iterate()] == ["a"]


def test_headers_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1)}])
    headers = read_headers(files.files)
    before = bytes_by_read_calls()
    reader = open_reader(files, SINGLE, headers=headers)
    middle = bytes_by_read_calls()
    assert bytes_by_read_calls() - middle == middle - before
    assert [name for name, _ in reader.iterate()] == ["a"]


# Page cache


class Events(list[str]):
    def drop(self, file: Path) -> None:
        self.append(f"advice {file.stem}")


# L40
@EACH_CONTAINER
@EACH_PLAN
def test_cache_is_dropped_between_two_files(tmp_path: Path, container: str, plan: ReadPlan) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1), "b": torch.zeros(1)}, {"c": torch.zeros(1)}], container)
    events = Events()
    dropping = dataclasses.replace(plan, drop_cache_after_load=True)
    for name, tensor in open_reader(files, dropping, drop_cache=events.drop).iterate():
        events.append(name)
        del tensor
    assert events == ["a", "b", "advice 0", "c", "advice 1"]


# L40
def test_cache_is_dropped_once_more_when_a_tensor_that_was_kept_goes(tmp_path: Path) -> None:
    files = save(tmp_path, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    events = Events()
    stream = open_reader(files, dataclasses.replace(SINGLE, drop_cache_after_load=True), drop_cache=events.drop)
    kept = [tensor for _, tensor in stream.iterate()]
    assert events == ["advice 0", "advice 1"]
    kept.clear()
    assert sorted(events) == ["advice 0", "advice 0", "advice 1", "advice 1"]


# L40
def test_cache_is_left_alone_unless_asked(tmp_path: Path) -> None:
    events = Events()
    list(open_reader(save(tmp_path, [{"a": torch.zeros(1)}]), SINGLE, drop_cache=events.drop).iterate())
    assert events == []


# Content of every kind


@EACH_PLAN
def test_b08_tensors_without_elements_arrive_each_with_its_own_shape(
    tmp_path: Path, write_tensors: WriteTensors, plan: ReadPlan
) -> None:
    specs: dict[str, Spec] = {
        "g_idx": ("I32", [0], b""),
        "w": ("F32", [4], struct.pack("<4f", 1, 2, 3, 4)),
        "zz": ("F16", [2, 0], b""),
    }
    got = dict(open_reader(found(write_tensors(tmp_path / "m.safetensors", specs)), plan).iterate())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in got.items()} == {
        "g_idx": (torch.int32, (0,)),
        "w": (torch.float32, (4,)),
        "zz": (torch.float16, (2, 0)),
    }
    assert got["w"].tolist() == [1, 2, 3, 4]


@EACH_PLAN
def test_b08_file_of_nothing_but_empty_tensors_is_read(
    tmp_path: Path, write_tensors: WriteTensors, plan: ReadPlan
) -> None:
    file = write_tensors(tmp_path / "m.safetensors", {"a": ("I32", [0], b""), "b": ("F32", [0, 3], b"")})
    assert [tuple(tensor.shape) for _, tensor in open_reader(found(file), plan).iterate()] == [(0,), (0, 3)]


@EACH_PLAN
def test_b09_scalar_has_no_dimension(tmp_path: Path, write_tensors: WriteTensors, plan: ReadPlan) -> None:
    file = write_tensors(tmp_path / "m.safetensors", {"k_scale": ("F32", [], struct.pack("<f", 1.5))})
    [(name, tensor)] = open_reader(found(file), plan).iterate()
    assert (name, tuple(tensor.shape), tensor.item()) == ("k_scale", (), 1.5)


def contents() -> list[tuple[str, Dtype]]:
    return sorted(BY_TAG.items())


@EACH_PLAN
def test_b10_every_dtype_arrives_bit_for_bit(tmp_path: Path, write_tensors: WriteTensors, plan: ReadPlan) -> None:
    specs = dict[str, Spec]()
    for seed, (tag, dtype) in enumerate(contents()):
        data = bytes((seed + 37 * number) % 256 for number in range(6 * dtype.itemsize))
        specs[tag] = (tag, [2, 3 * dtype.packing], bytes(6) if tag == "BOOL" else data)
    got = dict(open_reader(found(write_tensors(tmp_path / "m.safetensors", specs)), plan).iterate())
    assert list(got) == sorted(BY_TAG)
    for tag, dtype in contents():
        assert got[tag].dtype == dtype.torch_dtype
        assert tuple(got[tag].shape) == (2, 3)
        assert bits(got[tag]) == specs[tag][2], tag


@pytest.mark.parametrize("odd", range(1, 8))
@EACH_PLAN
def test_b11_data_that_are_not_aligned_arrive_aligned(
    tmp_path: Path, write_raw: WriteRaw, plan: ReadPlan, odd: int
) -> None:
    raw = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    raw += b" " * ((odd - len(raw)) % 8)
    file = write_raw(tmp_path / "m.safetensors", raw, struct.pack("<2f", 1.0, 2.0))
    [(_, tensor)] = open_reader(found(file), plan).iterate()
    assert tensor.tolist() == [1.0, 2.0]
    assert tensor.data_ptr() % 4 == 0


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(b'"__metadata__":{},', id="empty"),
        pytest.param(b'"__metadata__":null,', id="null"),
        pytest.param(b"", id="absent"),
    ],
)
@EACH_PLAN
def test_x2_metadata_may_be_missing(tmp_path: Path, write_raw: WriteRaw, plan: ReadPlan, metadata: bytes) -> None:
    raw = b"{" + metadata + b'"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    file = write_raw(tmp_path / "m.safetensors", raw, b"xyz")
    [(name, tensor)] = open_reader(found(file), plan).iterate()
    assert (name, bits(tensor)) == ("a", b"xyz")


@EACH_PLAN
def test_reader_agrees_with_the_safetensors_library(tmp_path: Path, plan: ReadPlan) -> None:
    generator = torch.Generator().manual_seed(1)
    shards = [{f"f{f}.t{t}": torch.randn(3, 5 + t, generator=generator) for t in range(7)} for f in range(2)]
    files = save(tmp_path, shards)
    expected = {name: tensor for file in files.files for name, tensor in load_file(file).items()}
    got = dict(open_reader(files, plan).iterate())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) != before:
        # Held by the traceback of an error that was expected.
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
