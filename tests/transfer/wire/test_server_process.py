"""A server in a process of its own: the same answers from shared memory, whatever becomes of either process."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.transfer.conftest import GENERATION, KEY, PATIENCE_S, VERSION, bits, endpoint_of, filled
from weightwire.transfer.control import Control
from weightwire.transfer.errors import FencedError, SettingsError, SourceBusyError, SourceError, SourceLeavingError
from weightwire.transfer.filling import Origins, fill
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.limits import SourceLimits
from weightwire.transfer.wire.segments import cut_segments
from weightwire.transfer.wire.server_process import SourceProcess
from weightwire.transfer.wire.source import Access, SourceIdentity
from weightwire.transfer.wire.stream import SourceStream

TENSORS = {
    "a": filled("float32", (300, 100)),
    "b": filled("bfloat16", (3, 5), seed=1),
    "none": torch.empty(0),
    "c": filled("int16", (40, 6), seed=2)[:, 1:4],
}


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def segments_in_shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 2 * PATIENCE_S
    while not true():
        assert time.monotonic() < ends_at
        threading.Event().wait(0.02)


def started(shells: Shells, limits: SourceLimits | None = None) -> SourceProcess:
    """A server process of sealed shells, to be stopped by the caller."""
    process = SourceProcess(SourceIdentity(instance_id="s", generation=GENERATION), limits=limits)
    process.start()
    process.sources[0].grant_access(Access(ticket_key=KEY))
    process.sources[0].publish(shells, weight_version=VERSION)
    return process


def pulled(manifest: Manifest, url: str) -> Shells:
    target = Shells.allocate(manifest)
    origins = Origins(endpoints=[endpoint_of(manifest, url=url)], manifests={manifest.digest: manifest})
    result = fill(target, origins, control=Control(deadline_s=PATIENCE_S))
    assert result.failures == ()
    return target


def check_equal(target: Shells) -> None:
    for name, tensor in TENSORS.items():
        assert bits(target.tensor(name)) == bits(tensor), name


@pytest.fixture
def shells() -> Shells:
    found = Shells.from_tensors({name: tensor.clone() for name, tensor in TENSORS.items()}, chunk_bytes=1 << 12)
    found.seal()
    return found


@pytest.fixture
def process(shells: Shells) -> Iterator[SourceProcess]:
    made = started(shells)
    yield made
    made.stop()
    assert made.pid is not None
    assert not is_alive(made.pid)


def test_process_serves_what_lies_in_the_tensors_of_another_one(process: SourceProcess, shells: Shells) -> None:
    check_equal(pulled(shells.manifest, process.url))
    assert process.pid != os.getpid()
    health = httpx.get(f"{process.url}/readyz", trust_env=False).json()
    assert health == {"status": "ready", "weight_version": VERSION, "ranks": [0]}
    wait_until(lambda: process.stats().bytes_sent > shells.manifest.total_bytes)
    assert process.stats().active_readers == {0: 0}


def test_version_that_takes_the_place_of_another_fences_its_readers(process: SourceProcess, shells: Shells) -> None:
    stream = SourceStream(endpoint_of(shells.manifest, url=process.url), shells.manifest)
    (copies,) = plan_pull(shells.manifest, [shells.manifest]).copies
    segments = list(cut_segments(shells.manifest, copies, num_streams=1))
    assert len(list(stream.fetch(segments, Shells.allocate(shells.manifest)))) > 1
    process.sources[0].withdraw()
    with pytest.raises(SourceLeavingError):
        list(stream.fetch(segments, Shells.allocate(shells.manifest)))
    # In place, as an engine that takes other weights does.
    shells.tensor("a").add_(1)
    manifest = shells.seal()
    process.sources[0].publish(shells, weight_version=VERSION + 1)
    with pytest.raises(FencedError):
        list(stream.fetch(segments, Shells.allocate(shells.manifest)))
    stream.close()
    text = httpx.get(f"{process.url}/readyz", trust_env=False).json()
    assert text["weight_version"] == VERSION + 1
    assert httpx.get(f"{process.url}/v1/tensors/a", trust_env=False).headers["Weightwire-Digest"] == (
        manifest.by_name["a"].digest
    )


def test_limits_change_in_the_other_process(process: SourceProcess, shells: Shells) -> None:
    limits = SourceLimits(max_readers=0, retry_after_s=7)
    process.sources[0].set_limits(limits)
    assert process.sources[0].limits == limits
    answer = httpx.get(f"{process.url}/v1/tensors/a", trust_env=False)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
    process.set_limits(SourceLimits(max_bytes_per_s=50_000_000))
    check_equal(pulled(shells.manifest, process.url))


def test_pull_completes_while_this_interpreter_is_held(process: SourceProcess, shells: Shells, tmp_path: Path) -> None:
    """The GIL is held from before the first request to behind the last byte: no thread of this process can run."""
    (tmp_path / "manifest.json").write_bytes(shells.manifest.text)
    script = """
        import sys
        from pathlib import Path
        from tests.transfer.wire.test_server_process import check_equal, pulled
        from weightwire.transfer.manifest import Manifest
        sys.stdin.buffer.read(1)
        check_equal(pulled(Manifest.from_text(Path(sys.argv[1]).read_bytes()), sys.argv[2]))
        sys.stdout.buffer.write(b"!")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "manifest.json"), process.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        # A PyDLL calls without letting go of the GIL.
        libc = ctypes.PyDLL(None)
        waited_for = (ctypes.c_int * 2)(other.stdout.fileno(), 1)
        libc.write(other.stdin.fileno(), b"!", 1)
        found = libc.poll(waited_for, 1, int(PATIENCE_S * 1000))
        assert found == 1
        assert other.stdout.read() == b"!"
    assert other.returncode == 0


def test_server_process_that_is_killed_is_started_again_once(shells: Shells) -> None:
    process = started(shells)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: process.pid != first)
    check_equal(pulled(shells.manifest, process.url))
    process.sources[0].withdraw()
    process.sources[0].publish(shells, weight_version=VERSION)
    assert not process.failed.is_set()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert process.failed.wait(PATIENCE_S)
    with pytest.raises(SourceError, match="ended for good"):
        process.stats()
    # The port is closed: nobody waits there for a process that will not come.
    with pytest.raises(httpx.ConnectError):
        httpx.get(process.url, trust_env=False)
    process.stop()


def test_server_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = """
        import os, signal, torch
        from tests.transfer.wire.test_server_process import started
        from weightwire.transfer.shells import Shells
        shells = Shells.from_tensors({"a": torch.ones(4)})
        shells.seal()
        print(started(shells).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = segments_in_shm()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=Path(__file__).parents[3],
        timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    wait_until(lambda: not is_alive(int(ended.stdout)))
    assert segments_in_shm() <= before


def test_stop_leaves_no_process_no_descriptor_and_no_segment(shells: Shells) -> None:
    before, segments = open_files(), segments_in_shm()
    for shared in (False, True):
        held = Shells.allocate(shells.manifest, shared=True) if shared else Shells.from_tensors({"a": torch.ones(9)})
        held.fill(3)
        held.seal()
        process = started(held)
        pid = process.pid
        process.stop()
        process.stop()
        assert pid is not None
        assert not is_alive(pid)
        del held, process
    assert open_files() == before
    assert segments_in_shm() <= segments


def test_stop_lets_a_reader_finish_and_sends_the_next_one_elsewhere(shells: Shells) -> None:
    # One reader at a time, so that nobody takes its rate while it is not known yet that the process leaves.
    process = started(shells, SourceLimits(max_bytes_per_s=1 << 16, max_readers=1, seat_wait_s=0.0))
    stream = SourceStream(endpoint_of(shells.manifest, url=process.url), shells.manifest)
    other = SourceStream(endpoint_of(shells.manifest, url=process.url), shells.manifest)
    (copies,) = plan_pull(shells.manifest, [shells.manifest]).copies
    segments = list(cut_segments(shells.manifest, copies, num_streams=1))
    target = Shells.allocate(shells.manifest)
    other.connect()
    frames = stream.fetch(segments, target)
    next(frames)
    stopping = threading.Thread(target=process.stop, kwargs={"drain_s": PATIENCE_S})
    stopping.start()

    def is_leaving() -> bool:
        try:
            list(other.fetch(segments, Shells.allocate(shells.manifest)))
        except SourceLeavingError:
            return True
        except SourceBusyError:
            return False
        return False

    wait_until(is_leaving)
    assert len(list(frames)) > 1
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    stream.close()
    other.close()


def test_b33_port_that_is_taken_is_refused_before_a_process_starts(process: SourceProcess) -> None:
    with pytest.raises(SettingsError, match="cannot be bound"):
        SourceProcess(SourceIdentity(instance_id="s"), port=process.address.port)
    SourceProcess(SourceIdentity(instance_id="s")).stop()


def test_port_that_is_bound_to_all_addresses_takes_both_families() -> None:
    try:
        process = SourceProcess(SourceIdentity(instance_id="s"), host="::")
    except SettingsError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        socket.create_connection(("127.0.0.1", process.address.port), timeout=PATIENCE_S).close()
    finally:
        process.stop()


def test_shells_without_digests_are_not_published(process: SourceProcess) -> None:
    with pytest.raises(ValueError, match="seal"):
        process.sources[0].publish(Shells.from_tensors({"a": torch.ones(4)}), weight_version=9)
