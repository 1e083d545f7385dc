"""How a checkpoint's files are to be read: what was asked for, and what that comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from weightwire.transfer.checkpoint.formats import LoadFormat, ReaderOptions
from weightwire.transfer.errors import SettingsError

DEFAULT_WORKERS = 8
# The same files through another reader, with threads of its own.
_OWN_READERS = (LoadFormat.FASTSAFETENSORS, LoadFormat.INSTANTTENSOR, LoadFormat.RUNAI_STREAMER)


class ReaderKind(StrEnum):
    """Who reads: the caller's thread, worker threads, or the format's own reader."""

    SINGLE = "single"
    THREADED = "threaded"
    OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What somebody asked for.

    Attributes:
        threads: Whether several files are read at once, and how many; what the user did not say is None.
        mmap: Map files; otherwise tensors are read into memory of their own.
        prefetch: Warm the page cache in the background (needs `mmap`).
        max_buffered_bytes: Bound on the wanted bytes of the files that are open or queued, the one that is being handed
            out included; a file that is larger alone is read alone. None: the number of files is the only bound.
        read_ahead: Workers pull what is wanted into the page cache. Off where only parts of tensors are used.
        drop_cache_after_load: Give the page cache back file by file.
    """

    threads: ReaderOptions = field(default_factory=ReaderOptions)
    mmap: bool = True
    prefetch: bool = False
    max_buffered_bytes: int | None = None
    read_ahead: bool = True
    drop_cache_after_load: bool = False

    def __post_init__(self) -> None:
        counts = (("num_threads", self.threads.num_threads), ("max_buffered_bytes", self.max_buffered_bytes))
        for name, value in counts:
            if value is not None and value < 1:
                raise SettingsError(f"reader option {name!r}: is {value}, expected at least 1", option=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What `choose_reader` decided.

    Attributes:
        kind: Who reads.
        workers: Worker threads; 0 unless `kind` is threaded.
        prefetch: Whether a prefetch is to run beside it.
        mmap: As in `ReadOptions`, like the others.
    """

    kind: ReaderKind
    workers: int = 0
    prefetch: bool = False
    mmap: bool = True
    max_buffered_bytes: int | None = None
    read_ahead: bool = True
    drop_cache_after_load: bool = False


def choose_reader(options: ReadOptions | None = None, *, load_format: LoadFormat = LoadFormat.AUTO) -> ReadPlan:
    """Decide who reads (L38, L43, L44).

    Args:
        options: Everything at its default, if None.
        load_format: The format that was asked for.
    """
    asked = options or ReadOptions()
    # Without mmap, warming would read every byte twice.
    prefetch = asked.prefetch and asked.mmap
    kind = _kind(asked, prefetch=prefetch, load_format=load_format)
    return ReadPlan(
        kind=kind,
        workers=(asked.threads.num_threads or DEFAULT_WORKERS) if kind is ReaderKind.THREADED else 0,
        prefetch=prefetch,
        mmap=asked.mmap,
        max_buffered_bytes=asked.max_buffered_bytes,
        read_ahead=asked.read_ahead and asked.mmap,
        drop_cache_after_load=asked.drop_cache_after_load,
    )


def _kind(asked: ReadOptions, *, prefetch: bool, load_format: LoadFormat) -> ReaderKind:
    if load_format in _OWN_READERS:
        return ReaderKind.OWN
    if asked.threads.enable_multithread_load is False:
        return ReaderKind.SINGLE
    # Warming threads and loading threads evict each other's pages, so only whoever asked for both gets both.
    named = asked.threads.enable_multithread_load is not None or asked.threads.num_threads is not None
    return ReaderKind.SINGLE if prefetch and not named else ReaderKind.THREADED
