"""Readers: a checkpoint's tensors one at a time, files in order, names sorted within a file.

    wanted names -> files that hold one -> [window of workers: open, read ahead] -> shard -> (name, tensor)

A reader knows files and names; what a name means, and what becomes of its tensor, is none of its business.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from weightwire.transfer.checkpoint.discovery import CheckpointFiles, DuplicatePolicy
from weightwire.transfer.checkpoint.page_cache import drop_page_cache
from weightwire.transfer.checkpoint.pickle_format import load_pickle
from weightwire.transfer.checkpoint.prefetch import DEFAULT_THREADS, Prefetch, share_of_rank
from weightwire.transfer.checkpoint.read_plan import ReaderKind, ReadPlan, choose_reader
from weightwire.transfer.checkpoint.regular_files import printable
from weightwire.transfer.checkpoint.shard_files import (
    FileHeader,
    IsStopped,
    Shard,
    map_shard,
    read_headers,
    read_shard,
)
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.checkpoint.window import slide
from weightwire.transfer.errors import CheckpointError, SettingsError

_LOG = logging.getLogger(__name__)

Wanted = Callable[[str], bool]
DropCache = Callable[[Path], None]


class TensorReader(Protocol):
    """A stream of checkpoint tensors that can be started again."""

    def iterate(self, wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read one tensor at a time.

        Args:
            wanted: Which names to read; all, if None. Of the others no payload is touched.

        Yields:
            Checkpoint name and global tensor on the CPU. It may be kept, unless it is marked (`is_reused`). Closing
            the iterator early ends all that runs for it.

        Raises:
            CheckpointError: When the turn of a file comes that cannot be read; nothing of it or after it is yielded.
        """
        ...


def open_reader(
    files: CheckpointFiles,
    plan: ReadPlan | None = None,
    *,
    headers: Sequence[FileHeader] | None = None,
    prefetch: Prefetch | None = None,
    drop_cache: DropCache = drop_page_cache,
) -> ShardReader:
    """A reader for what discovery found.

    Args:
        files: Read in their order.
        plan: What `choose_reader` decided; its answer to no options, if None.
        headers: Of safetensors files, in the same order, if somebody has read them already.
        prefetch: Warms the same files; stopped with the reader when a stream fails or is closed early.
        drop_cache: Takes a file out of the page cache.

    Raises:
        CheckpointError: If a safetensors header is refused, or a name is in two files. Before any payload is touched.
        DtypeError: If a dtype's tag is unknown.
        SettingsError: If the plan is for a reader that is not here.
    """
    chosen = plan or choose_reader()
    if chosen.kind is ReaderKind.OWN:
        raise SettingsError("reader: this load format has a reader of its own, which is not served; expected another")
    if files.container == "pickle":
        jobs = _pickle_jobs(files.files, chosen)
    else:
        known = headers if headers is not None else read_headers(files.files)
        owners = _Owners(files.duplicates)
        jobs = _safetensors_jobs([(source, owners.add(source.file, source.header.by_name)) for source in known], chosen)
    return ShardReader(jobs, chosen, duplicates=files.duplicates, prefetch=prefetch, drop_cache=drop_cache)


def start_prefetch(
    files: CheckpointFiles,
    plan: ReadPlan,
    *,
    local_rank: int = 0,
    local_size: int = 1,
    threads: int = DEFAULT_THREADS,
) -> Prefetch | None:
    """Begin to warm this rank's share of the very files that a reader reads; None if the plan has no prefetch.

    Raises:
        SettingsError: If `threads` is below 1.
    """
    if not plan.prefetch:
        return None
    share = share_of_rank(files.files, local_rank=local_rank, local_size=local_size)
    return Prefetch(share, threads=threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A file that is to be opened.

    Attributes:
        nbytes: What its shard keeps, mapped or not.
        open: Called once, in any thread, with a function that says whether to give up.
    """

    nbytes: int
    open: Callable[[IsStopped], Shard]


# The files that have something wanted, in order.
_Jobs = Callable[[Wanted], list[_Job]]


class ShardReader:
    """The reader of files on disk, whatever their container and however many threads.

    Attributes:
        tensors_read: Tensors that were fetched so far, over all streams.
        bytes_read: Their bytes.
    """

    def __init__(
        self,
        jobs: _Jobs,
        plan: ReadPlan,
        *,
        duplicates: DuplicatePolicy,
        prefetch: Prefetch | None,
        drop_cache: DropCache,
    ) -> None:
        self._jobs = jobs
        self._plan = plan
        self._duplicates = duplicates
        self._prefetch = prefetch
        self._drop_cache = drop_cache if plan.drop_cache_after_load else None
        self.tensors_read = 0
        self.bytes_read = 0

    def iterate(self, wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorReader`. No reference to a tensor is kept here, nor to its file once its last one is consumed."""
        is_wanted = wanted or (lambda _: True)
        owners = _Owners(self._duplicates)
        complete = False
        try:
            with closing(self._shards(self._jobs(is_wanted))) as shards:
                for shard in shards:
                    for name in owners.add(shard.file, filter(is_wanted, shard.names)):
                        yield name, self._take(shard, name)
                    file, mapping = shard.file, _mapping_of(shard)
                    del shard
                    self._finish(file, mapping)
            complete = True
        finally:
            if not complete:
                self._stop_prefetch()

    def _shards(self, jobs: list[_Job]) -> Generator[Shard, None, None]:
        if self._plan.kind is ReaderKind.SINGLE:
            return (job.open(_never) for job in jobs)
        return slide(
            jobs,
            lambda job, is_stopped: job.open(is_stopped),
            workers=self._plan.workers,
            size_of=lambda job: job.nbytes,
            max_buffered_bytes=self._plan.max_buffered_bytes,
        )

    def _take(self, shard: Shard, name: str) -> torch.Tensor:
        tensor = shard.take(name)
        self.tensors_read += 1
        self.bytes_read += tensor.nbytes
        return tensor

    def _finish(self, file: Path, mapping: weakref.ref[mmap.mmap] | None) -> None:
        if self._drop_cache is None:
            return
        self._drop_cache(file)
        kept = mapping() if mapping is not None else None
        if kept is not None:
            # The consumer still holds a tensor, be it in its loop's variable: mapped pages stay in the cache.
            weakref.finalize(kept, self._drop_cache, file).atexit = False

    def _stop_prefetch(self) -> None:
        if self._prefetch is None:
            return
        try:
            self._prefetch.stop()
        except TimeoutError as error:
            # What ended the stream says more than this.
            _LOG.warning("%s; left to its end", error)


class _Owners:
    """Which file a name comes from, where several may have it (L21)."""

    def __init__(self, policy: DuplicatePolicy) -> None:
        self._policy = policy
        self._files = dict[str, Path]()

    def add(self, file: Path, names: Iterable[str]) -> list[str]:
        """Those of `names` that count: that no file before `file` has.

        Raises:
            CheckpointError: If one does, and that is not allowed: the order of reads would decide its value.
        """
        own = list[str]()
        for name in names:
            other = self._files.setdefault(name, file)
            if other == file:
                own.append(name)
            elif self._policy is DuplicatePolicy.REFUSE:
                raise CheckpointError(
                    f"tensor {quoted(name)}: is in two files, {printable(other)!r} and {printable(file)!r}; "
                    "expected one",
                    tensor=name,
                    files=[printable(other), printable(file)],
                    diagnostic="D02",
                )
        return own


def _safetensors_jobs(sources: Sequence[tuple[FileHeader, list[str]]], plan: ReadPlan) -> _Jobs:
    def job(source: FileHeader, names: Collection[str]) -> _Job:
        nbytes = sum(source.header.by_name[name].nbytes for name in names)
        if plan.mmap:
            warm = plan.read_ahead and plan.kind is ReaderKind.THREADED
            return _Job(nbytes=nbytes, open=lambda stop: map_shard(source, names, warm=warm, is_stopped=stop))
        return _Job(nbytes=nbytes, open=lambda stop: read_shard(source, names, is_stopped=stop))

    def jobs(wanted: Wanted) -> list[_Job]:
        chosen = ((source, list(filter(wanted, own))) for source, own in sources)
        return [job(source, names) for source, names in chosen if names]

    return jobs


def _pickle_jobs(files: Sequence[Path], plan: ReadPlan) -> _Jobs:
    def job(file: Path) -> _Job:
        return _Job(nbytes=_size_of(file), open=lambda _: load_pickle(file, mmap=plan.mmap))

    # Which names a pickle has is known when it is loaded.
    return lambda _: [job(file) for file in files]


def _size_of(file: Path) -> int:
    """Bytes of a file; 0 if it cannot be looked at, which its turn will show."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def _mapping_of(shard: Shard) -> weakref.ref[mmap.mmap] | None:
    mapping = shard.mapping()
    return None if mapping is None else weakref.ref(mapping)


def _never() -> bool:
    return False
