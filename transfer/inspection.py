"""What a checkpoint folder holds, without loading it: files, order, tensors, model, and what is odd about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightwire.transfer.admission import available_bytes
from weightwire.transfer.checkpoint import Checkpoint, CheckpointFiles, DiscoveryOptions, find_checkpoint
from weightwire.transfer.checkpoint.discovery import CONFIG_NAME, MAX_CONFIG_BYTES
from weightwire.transfer.checkpoint.ordering import reading_notes
from weightwire.transfer.checkpoint.read_plan import ReaderKind, ReadOptions, choose_reader
from weightwire.transfer.checkpoint.regular_files import printable, read_text
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.checkpoint.untrusted_json import parse_object
from weightwire.transfer.diagnostics import Diagnostic, diagnostic_of
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import LoadError
from weightwire.transfer.loading.base_loaders import loader_of
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.slots import is_traceable
from weightwire.transfer.models import BuildOptions, architectures, build_model, parse_config


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedFile:
    """One file that a load would read.

    Attributes:
        name: Relative to the folder.
        nbytes: Of the whole file.
        num_tensors: None for a pickle, which says nothing before it is loaded.
    """

    name: str
    nbytes: int
    num_tensors: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a load would find.

    Attributes:
        folder: The checkpoint's.
        container: `safetensors` or `pickle`.
        index: Name of the index that decided, if one did.
        files: In reading order.
        dtypes: Tensor bytes by dtype; empty for pickles.
        revision: See `checkpoint_revision`; None for pickles.
        architecture: What `config.json` names, if there is one.
        has_tree: Whether the architecture can be built for a topology.
        refusal: Why a load for a topology would be refused even on one rank; None if nothing is known against it.
        diagnostics: What is odd: about the files, the way of reading them, their size, and their names.
    """

    folder: str
    container: str
    index: str | None
    files: tuple[InspectedFile, ...]
    dtypes: Mapping[str, int] = field(default_factory=dict)
    revision: str | None = None
    architecture: str | None = None
    has_tree: bool = False
    refusal: str | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def num_tensors(self) -> int | None:
        counts = [file.num_tensors for file in self.files if file.num_tensors is not None]
        return sum(counts) if len(counts) == len(self.files) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def inspect_checkpoint(
    path: Path,
    options: DiscoveryOptions | None = None,
    *,
    reading: ReadOptions | None = None,
    shared_storage: bool = False,
) -> Inspection:
    """Look at a checkpoint; safetensors headers and `config.json` are read, and no tensor.

    Args:
        path: A folder, or one file.
        options: As for a load.
        reading: How a reader would be asked to read it; everything at its default, if None.
        shared_storage: Whether ranks on other machines read the same storage.

    Raises:
        CheckpointError: If a load would be refused because of the files.
        DtypeError: If a dtype's tag is unknown.
    """
    asked = options or DiscoveryOptions()
    files = find_checkpoint(path, asked)
    notes = _reading_notes(files, asked, reading, shared_storage=shared_storage)
    if files.container == "safetensors":
        with Checkpoint.open_files(files) as checkpoint:
            return _inspected(checkpoint.files, checkpoint.config, checkpoint, notes)
    config = files.folder / CONFIG_NAME
    return _inspected(files, read_text(config, max_bytes=MAX_CONFIG_BYTES) if config.exists() else None, None, notes)


def _reading_notes(
    files: CheckpointFiles, options: DiscoveryOptions, reading: ReadOptions | None, *, shared_storage: bool
) -> tuple[Diagnostic, ...]:
    plan = choose_reader(reading, load_format=options.load_format)
    return reading_notes(
        f"checkpoint {printable(files.folder)!r}",
        prefetch=plan.prefetch,
        multithreaded=plan.kind is ReaderKind.THREADED,
        mmap=plan.mmap,
        shared_storage=shared_storage,
        sort_files=options.sort_files,
        group=options.group,
    )


def _inspected(
    files: CheckpointFiles, config: str | None, checkpoint: Checkpoint | None, notes: tuple[Diagnostic, ...]
) -> Inspection:
    counts, dtypes = Counter[Path](), Counter[str]()
    for entry in checkpoint.entries.values() if checkpoint else ():
        counts[entry.file] += 1
        dtypes[entry.dtype.name] += entry.nbytes
    architecture, has_tree = _architecture(config)
    refusal = _rehearse(config, checkpoint) if has_tree and config and checkpoint else None
    known = diagnostic_of(refusal) if refusal else None
    odd = (*files.notes, *notes, *_memory_notes(files), *([known] if known else []))
    return Inspection(
        folder=printable(files.folder),
        container=files.container,
        index=printable(files.index.relative_to(files.folder)) if files.index else None,
        files=tuple(
            InspectedFile(
                name=printable(file.relative_to(files.folder)),
                nbytes=file.stat().st_size,
                num_tensors=counts[file] if checkpoint else None,
            )
            for file in files.files
        ),
        dtypes=dict(dtypes),
        revision=checkpoint.revision if checkpoint else None,
        architecture=architecture,
        has_tree=has_tree,
        refusal=str(refusal) if refusal else None,
        diagnostics=odd,
    )


def _memory_notes(files: CheckpointFiles) -> tuple[Diagnostic, ...]:
    needed, available = sum(file.stat().st_size for file in files.files), available_bytes()
    if available is None or needed <= available:
        return ()
    detail = f"the files have {needed} bytes, {available} bytes of memory are available: one rank of several may fit"
    return (Diagnostic(code="D12", subject=f"checkpoint {printable(files.folder)!r}", detail=detail),)


def _rehearse(config: str, checkpoint: Checkpoint) -> LoadError | None:
    """Load into shells on meta, on one rank: names, shapes and slots are checked, and nothing is read or allocated."""
    try:
        tree = build_model(parse_config(config), options=BuildOptions(device="meta"))
        # A loader that compares values has nothing to compare.
        if all(is_traceable(loader_of(shell)) for shell in shells_of(tree).values()):
            tree.load_weights(
                (spec.name, torch.empty(spec.shape, dtype=dtype_named(spec.dtype).torch_dtype, device="meta"))
                for spec in specs_of(checkpoint)
            )
    except LoadError as error:
        return error
    return None


def _architecture(config: str | None) -> tuple[str | None, bool]:
    """The first architecture that the configuration names, and whether there is a tree for it."""
    if config is None:
        return None, False
    listed = parse_object(config.encode(), subject=CONFIG_NAME).get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return (names[0] if names else None), any(name in architectures() for name in names[:1])
