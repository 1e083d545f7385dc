"""Copies of checkpoint regions, straight from the files into memory, and nothing else of the files.

A contiguous region goes by positional reads into the shell's own memory. A strided one (a rank's columns of a
row-parallel weight) is copied out of a short mapping of the rows in question, since the bytes between the columns need
not be copied: to read all of them into a buffer first took about twice as long, and so did one read for each row. The
price is in `shard_files`: a file that is cut short in place meanwhile ends the process. Either way the memory in use
beside the shells is bounded by threads x `STEP_BYTES`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice

import torch

from weightwire.transfer.checkpoint.reader import Checkpoint, CheckpointTensor
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.control import Control
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.regions import Region

# One read, and one mapping; short enough that a cancelled load stops at once.
STEP_BYTES = 8 << 20
DEFAULT_THREADS = 8
# A rank of several reads pieces; what the kernel reads ahead of a piece belongs to other ranks.
_SCATTERED_BELOW = 0.9
# Steps that wait for a thread; each is some objects and no memory.
_QUEUED_PER_THREAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopy:
    """`target <- tensor[source]`.

    Attributes:
        name: Checkpoint name.
        source: Elements of the row-major checkpoint tensor; its bytes if `is_raw`.
        target: View of a shell, of the same shape; any device, any dtype that a copy converts to; uint8 if raw.
        is_raw: Whether elements are bytes, whatever the tensor's dtype is.
    """

    name: str
    source: Region
    target: torch.Tensor
    is_raw: bool = False

    def __post_init__(self) -> None:
        if self.source.shape != tuple(self.target.shape):
            raise PlacementError(
                f"tensor {quoted(self.name)}: region of shape {list(self.source.shape)} for a target of shape "
                f"{list(self.target.shape)}",
                tensor=self.name,
            )


def read_copies(
    checkpoint: Checkpoint,
    copies: Iterable[DiskCopy],
    *,
    control: Control,
    threads: int = DEFAULT_THREADS,
    on_bytes: Callable[[int], None] = lambda _: None,
    put: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> int:
    """Make all copies, in the files' order, by several threads.

    Args:
        checkpoint: Open.
        copies: Their targets do not overlap.
        control: Deadline and stop button, looked at before each step.
        threads: Reads at the same time.
        on_bytes: Called with the bytes of each step that is done, one call at a time.
        put: Writes the first tensor, a target, from the second, which is good only until it returns; called by all
            threads. By default torch does, in the stream of the thread.

    Returns:
        Bytes of checkpoint elements that were read.

    Raises:
        PlacementError: If a region lies outside its tensor; nothing was read.
        CheckpointError: If a file changed, or cannot be read.
        CancelledError: If somebody stopped it.
        DeadlineError: If its time is over.
    """
    wanted = [copy for copy in copies if copy.source.numel]
    for copy in wanted:
        _check_inside(copy, checkpoint.entries[copy.name])
    if _share(checkpoint, wanted) < _SCATTERED_BELOW:
        checkpoint.expect_scattered_reads()
    order = {file: number for number, file in enumerate(checkpoint.files.files)}
    wanted.sort(key=lambda copy: (order[checkpoint.entries[copy.name].file], _first_byte(checkpoint, copy)))
    steps = (step for copy in wanted for step in _steps(copy, _itemsize(copy, checkpoint.entries[copy.name])))
    lock, done = threading.Lock(), 0

    def run(step: DiskCopy) -> None:
        nonlocal done
        control.check()
        count = _copy(checkpoint, step, put)
        with lock:
            done += count
            on_bytes(count)

    with ThreadPoolExecutor(threads, thread_name_prefix="weightwire-disk") as pool:
        _run_all(pool, run, steps, limit=threads * _QUEUED_PER_THREAD)
    return done


def _share(checkpoint: Checkpoint, copies: Iterable[DiskCopy]) -> float:
    """How much of the tensors in the files is wanted, repetitions included."""
    wanted = sum(copy.source.numel * _itemsize(copy, checkpoint.entries[copy.name]) for copy in copies)
    return wanted / max(1, sum(entry.nbytes for entry in checkpoint.entries.values()))


def _run_all(
    pool: ThreadPoolExecutor, run: Callable[[DiskCopy], None], steps: Iterator[DiskCopy], *, limit: int
) -> None:
    """Keep `limit` steps in the pool; after an error nothing new begins, and the first error is raised."""
    pending: set[Future[None]] = {pool.submit(run, step) for step in islice(steps, limit)}
    while pending:
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        error = next((future.exception() for future in finished if future.exception()), None)
        if error is not None:
            for future in pending:
                future.cancel()
            wait(pending)
            raise error
        pending |= {pool.submit(run, step) for step in islice(steps, len(finished))}


def _check_inside(copy: DiskCopy, entry: CheckpointTensor) -> None:
    elements = entry.nbytes // _itemsize(copy, entry)
    if copy.source.end > elements:
        raise PlacementError(
            f"tensor {quoted(copy.name)}: region {copy.source.to_json()} ends at element {copy.source.end}, the tensor "
            f"has {elements}",
            tensor=copy.name,
        )


def _itemsize(copy: DiskCopy, entry: CheckpointTensor) -> int:
    return 1 if copy.is_raw else entry.dtype.itemsize


def _first_byte(checkpoint: Checkpoint, copy: DiskCopy) -> int:
    entry = checkpoint.entries[copy.name]
    return entry.begin + copy.source.offset * _itemsize(copy, entry)


def _steps(copy: DiskCopy, itemsize: int) -> Iterator[DiskCopy]:
    """Cut a copy along its outer dimensions until each part spans at most `STEP_BYTES` of the file."""
    source = copy.source
    span = (source.end - source.offset) * itemsize
    outer = next((axis for axis, size in enumerate(source.shape) if size > 1), None)
    if span <= STEP_BYTES or outer is None:
        yield copy
        return
    size, stride = source.shape[outer], source.strides[outer]
    rows = max(1, min(size - 1, STEP_BYTES // max(1, stride * itemsize)))
    for begin in range(0, size, rows):
        count = min(rows, size - begin)
        shape = (*source.shape[:outer], count, *source.shape[outer + 1 :])
        part = Region(offset=source.offset + begin * stride, shape=shape, strides=source.strides)
        yield from _steps(replace(copy, source=part, target=copy.target.narrow(outer, begin, count)), itemsize)


def _copy(checkpoint: Checkpoint, step: DiskCopy, put: Callable[[torch.Tensor, torch.Tensor], None] | None) -> int:
    """One step, by the shortest way; returns the bytes of its elements."""
    entry, source, target = checkpoint.entries[step.name], step.source, step.target
    itemsize = _itemsize(step, entry)
    nbytes = source.numel * itemsize
    begin = source.offset * itemsize
    dtype = torch.uint8 if step.is_raw else entry.dtype.torch_dtype
    is_plain = source.is_contiguous and target.dtype == dtype
    if put is None and is_plain and target.device.type == "cpu" and target.is_contiguous():
        checkpoint.read_into(step.name, begin, begin + nbytes, _memory(target, nbytes))
        return nbytes
    span = (source.end - source.offset) * itemsize
    with checkpoint.mapped(step.name, begin, begin + span) as flat:
        view = flat.view(dtype).as_strided(source.shape, source.strides)
        if put is None:
            target.copy_(view)
        else:
            put(target, view)
    return nbytes


def _memory(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """View, not copy, of a contiguous CPU tensor; `tensor` must outlive it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")
