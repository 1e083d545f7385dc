"""Two sources of one model, as processes, and what becomes of one of them in the middle."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest

from tests.faults.checkpoints import MIB, check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Lab
from tests.faults.proxy import Proxy, flipped

CHUNK_BYTES = MIB
FRAME_BYTES = CHUNK_BYTES + 20


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        pytest.param(signal.SIGSTOP, {"source_stalled"}, id="stopped"),
        pytest.param(signal.SIGKILL, {"source_stalled", "source_unreachable"}, id="killed"),
    ],
)
def test_pull_goes_on_with_the_other_source_and_reads_nothing_twice(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path, number: int, codes: set[str]
) -> None:
    first = served.ready_source(model.folder, *proxy.flags, "--instance-id", "a-first")
    served.ready_source(model.folder, "--instance-id", "b-other")
    proxy.hold_after(CHUNK_BYTES // 2)
    target = served.pull("--save", tmp_path / "out")
    proxy.wait_until_held()
    first.send_signal(number)
    proxy.release()
    answer = target.finish().check(0)
    assert (answer["state"], answer["bytes_peer"], answer["bytes_disk"]) == ("ready", model.nbytes, 0)
    failed = {item["instance_id"]: item["code"] for item in cast("list[dict[str, str]]", answer["failures"])}
    assert failed.keys() <= {"a-first"}
    assert set(failed.values()) <= codes
    # Beside every byte once: the beginning of the frames that were on their way, one for each of its connections.
    received = cast(int, answer["bytes_received"])
    assert model.nbytes < received <= model.nbytes // CHUNK_BYTES * FRAME_BYTES + 3 * FRAME_BYTES
    check_saved(tmp_path / "out", model.tensors)


def test_pull_keeps_a_source_whose_bits_flip_now_and_then(
    served: Lab, proxy: Proxy, model: Model, tmp_path: Path
) -> None:
    """One bit of one chunk costs that chunk, not the answer that it came in."""
    served.ready_source(model.folder, *proxy.flags)
    proxy.faults = [flipped(5 * FRAME_BYTES + 1000), flipped(9 * FRAME_BYTES + 1000)]
    answer = served.pull("--save", tmp_path / "out").finish().check(0)
    assert (answer["state"], answer["bytes_peer"], answer["failures"]) == ("ready", model.nbytes, [])
    frames = -(-model.nbytes // CHUNK_BYTES) + 8
    assert cast(int, answer["bytes_received"]) <= (frames + 2) * FRAME_BYTES
    check_saved(tmp_path / "out", model.tensors)
