"""The local disk pipeline for ranks of a topology: discover, iterate, map names, place, hand over.

Safetensors go the direct way, which reads only what a rank holds (`loading.direct`); pickles have no byte ranges and go
through a reader and the ordinary loaders. Both end in the same shells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightwire.transfer.checkpoint import Checkpoint, CheckpointFiles, DiscoveryOptions, find_checkpoint
from weightwire.transfer.checkpoint.discovery import CONFIG_NAME, MAX_CONFIG_BYTES
from weightwire.transfer.checkpoint.formats import LoadFormat
from weightwire.transfer.checkpoint.iteration import open_reader
from weightwire.transfer.checkpoint.regions_on_disk import DEFAULT_THREADS
from weightwire.transfer.checkpoint.regular_files import read_text
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.loading.dummy import fill_dummy
from weightwire.transfer.loading.loop import UnexpectedPolicy
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import LoadReport, NameOutcome
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.models import BuildOptions, ParameterTree, build_model, parse_config
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells, tensors_of
from weightwire.transfer.tree_shells import lay_out_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRequest:
    """What is to be loaded.

    Attributes:
        folder: The checkpoint, with its `config.json`.
        topology: Of the instance.
        load_format: `dummy` reads no weights.
        allow_pt_fallback: See `DiscoveryOptions`.
        build: How shells are laid out.
        unexpected: What to make of names without a place.
        threads: Reads at the same time.
        exclude: Shell patterns of checkpoint names that are loaded, but not published.
    """

    folder: Path
    topology: Topology = field(default_factory=Topology)
    load_format: LoadFormat = LoadFormat.AUTO
    allow_pt_fallback: bool = False
    build: BuildOptions = field(default_factory=BuildOptions)
    unexpected: UnexpectedPolicy = "refuse"
    threads: int = DEFAULT_THREADS
    exclude: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One rank's shells, filled.

    Attributes:
        rank: Global rank.
        tree: The shells.
        report: What became of each checkpoint name.
        bytes_read: Bytes of checkpoint elements that were read.
        num_loaded: Shells that hold checkpoint values.
        num_constant: Shells that hold constants alone.
        seconds: From the building of the shells to the last byte.
    """

    rank: int
    tree: ParameterTree
    report: LoadReport
    bytes_read: int
    num_loaded: int
    num_constant: int
    seconds: float


class TreeLoader:
    """Loads ranks, one at a time, from one checkpoint; its files are found once (L25)."""

    def __init__(self, request: TreeRequest) -> None:
        """Raises:
        CheckpointError: If the files cannot be a checkpoint.
        ConfigError: If there is no `config.json`, or none that describes a known model.
        """
        self._request = request
        self._stack = ExitStack()
        self._checkpoint: Checkpoint | None = None
        self._files: CheckpointFiles | None = None
        if request.load_format is not LoadFormat.DUMMY:
            options = DiscoveryOptions(load_format=request.load_format, allow_pt_fallback=request.allow_pt_fallback)
            self._files = find_checkpoint(request.folder, options)
            if self._files.container == "safetensors":
                self._checkpoint = self._stack.enter_context(Checkpoint.open_files(self._files))
        self.config_text = self._read_config()
        self.config = parse_config(self.config_text)

    def _read_config(self) -> str:
        folder = self._request.folder if self._files is None else self._files.folder
        path = folder / CONFIG_NAME
        if not os.path.isfile(path):
            raise ConfigError(f"folder {str(folder)!r}: has no {CONFIG_NAME}, expected one that names the architecture")
        return read_text(path, max_bytes=MAX_CONFIG_BYTES)

    def load(
        self, rank: int, control: Control, on_progress: Callable[[RankProgress], None] = lambda _: None
    ) -> RankLoad:
        """Build and fill one rank.

        Args:
            rank: Global rank.
            control: Deadline and stop button.
            on_progress: Called with growing figures, one call at a time.

        Raises:
            TopologyError: If the model cannot be laid out so.
            AdmissionError: If it does not fit into memory.
            LoadError: If checkpoint and shells do not go together.
            CheckpointError: If the files do not deliver what their headers say.
        """
        began = time.monotonic()
        request = self._request
        tree = build_model(self.config, request.topology, rank, request.build)
        progress = _Progress(sum(shell.nbytes for shell in shells_of(tree).values()), on_progress)
        if self._checkpoint is not None:
            found = load_direct(
                tree,
                self._checkpoint,
                control=control,
                unexpected=request.unexpected,
                threads=request.threads,
                on_bytes=progress.add,
            )
            load = RankLoad(
                rank=rank,
                tree=tree,
                report=found.report,
                bytes_read=found.bytes_read,
                num_loaded=found.num_loaded,
                num_constant=found.num_constant,
                seconds=0.0,
            )
        elif self._files is not None:
            load = self._load_by_reader(tree, self._files, control, progress.add)
        else:
            load = _dummy(rank, tree)
        progress.finish()
        return replace(load, seconds=time.monotonic() - began)

    def _load_by_reader(
        self, tree: ParameterTree, files: CheckpointFiles, control: Control, on_bytes: Callable[[int], None]
    ) -> RankLoad:
        stream = _Stream(tree, control, on_bytes)
        report = tree.load_weights(stream.pairs(files), unexpected=self._request.unexpected)
        return RankLoad(
            rank=tree.place.rank,
            tree=tree,
            report=LoadReport(outcomes=(*stream.rejected.values(), *report.outcomes), also_loaded=report.also_loaded),
            bytes_read=stream.bytes_read,
            num_loaded=len(shells_of(tree)),
            num_constant=0,
            seconds=0.0,
        )

    @property
    def specs(self) -> tuple[CheckpointSpec, ...]:
        """Of the whole checkpoint; none where the files do not tell without being read."""
        return specs_of(self._checkpoint) if self._checkpoint else ()

    def identity(self, rank: int, *, model: str | None = None, revision: str | None = None) -> ModelIdentity:
        """What a rank's shells are a copy of.

        Args:
            rank: Global rank.
            model: Model id; the folder's path unless one is given.
            revision: The checkpoint's own unless one is named.
        """
        return ModelIdentity(
            model=model or str(self._request.folder),
            revision=revision or (self._checkpoint.revision if self._checkpoint else ""),
            config=self.config_text,
            checkpoint=self.specs,
            topology=self._request.topology,
            rank=rank,
        )

    def shells(self, load: RankLoad, identity: ModelIdentity | None = None) -> Shells:
        """The shells of a loaded rank, in place, as what is served and saved.

        Args:
            load: Of this loader.
            identity: See `identity`, which gives one with the folder for a name.
        """
        identity = identity or self.identity(load.rank)
        if not self.specs:
            # Nothing is said about what lies in them: they can be taken as they are, by the same rank.
            layout = Layout.of(tensors_of(load.tree), identity, {})
        else:
            found = lay_out_tree(load.tree, self.specs, identity, unexpected=self._request.unexpected)
            layout = found.layout.without(self._request.exclude)
        return Shells.from_layout(layout)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> TreeLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Progress:
    """Bytes that were read, as a growing figure."""

    def __init__(self, total: int, on_progress: Callable[[RankProgress], None]) -> None:
        self._total = total
        self._done = 0
        self._on_progress = on_progress

    def add(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        self._on_progress(RankProgress(bytes_total=self._total, bytes_disk=self._done))

    def finish(self) -> None:
        """Padding is not read, and shells that share a tensor are: at the end all is done."""
        done = RankProgress(bytes_total=self._total, bytes_disk=self._total, state=TransferState.READY)
        self._on_progress(done)


class _Stream:
    """The tensors of a reader that a tree wants, with what became of the others."""

    def __init__(self, tree: ParameterTree, control: Control, on_bytes: Callable[[int], None]) -> None:
        self._resolver = tree.resolver()
        self._control = control
        self._on_bytes = on_bytes
        self.rejected: dict[str, NameOutcome] = {}
        self.bytes_read = 0

    def pairs(self, files: CheckpointFiles) -> Iterator[Pair]:
        for name, tensor in open_reader(files).iterate(self._wants):
            self._control.check()
            yield name, tensor
            self.bytes_read += tensor.nbytes
            self._on_bytes(tensor.nbytes)

    def _wants(self, name: str) -> bool:
        """Names that nobody knows are wanted, too: the load has to say so."""
        outcome = self._resolver.resolve(name)
        if self._resolver.wants(name) or outcome.rule == "L70":
            return True
        self.rejected[name] = outcome
        return False


def _dummy(rank: int, tree: ParameterTree) -> RankLoad:
    shells = shells_of(tree)
    fill_dummy(shells.values())
    return RankLoad(
        rank=rank,
        tree=tree,
        report=LoadReport(outcomes=()),
        bytes_read=0,
        num_loaded=0,
        num_constant=len(shells),
        seconds=0.0,
    )
