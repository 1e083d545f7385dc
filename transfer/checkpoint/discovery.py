"""Which files of a folder are the checkpoint.

The rules, first match wins:

1. A path to one file is that file, if the format's patterns match it.
2. The format's patterns are tried in their order. The first that matches wins, and no two are ever mixed: its kind of
   file is the container, whatever the format was called.
3. If the pattern's kind of file has its index there (`model.safetensors.index.json` and its relatives), the index
   decides alone: the files it names, all of which must be there. There is no switch to guess around a stale index;
   whoever wants the files that lie there deletes the index. One packaging error that was published is mended: a GLM
   `mtp.safetensors` that the index forgot.
4. Otherwise every matching file of the folder itself, hidden files and training artefacts aside, except that
   - `consolidated*` files (the mistral format's second copy) are dropped when anything else is there;
   - shards `PREFIX-i-of-n` must be complete (counted from 1, or from 0);
   - of several sets of shards, the one with the publisher's usual prefix is taken if it is the only such and complete
     (the others are named in a warning); otherwise the folder is ambiguous and refused.

Only names are looked at here. Headers, and with them names that occur in two files, are the reader's part.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from weightwire.transfer.checkpoint.formats import (
    FORMATS,
    Container,
    LoadFormat,
    patterns_of,
    served_format,
)
from weightwire.transfer.checkpoint.ordering import SORTED, check_order, order_files
from weightwire.transfer.checkpoint.regular_files import (
    check_regular,
    printable,
    read_bytes,
    refusal_for,
    subject_of,
)
from weightwire.transfer.checkpoint.shard_index import read_index
from weightwire.transfer.checkpoint.shard_sets import choose_set, joined, shard_names
from weightwire.transfer.checkpoint.untrusted_json import parse_object, quoted
from weightwire.transfer.diagnostics import Diagnostic
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError, CheckpointPathError, SettingsError
from weightwire.transfer.ranks import ALONE, GroupRank

_LOG = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 * 1024 * 1024
INDEX_NAME = "model.safetensors.index.json"
_CONSOLIDATED = "consolidated"
_CONSOLIDATED_INDEX_NAME = "consolidated.safetensors.index.json"
# By the kind of file. A `.pt` file has none.
_INDEX_NAMES = {".safetensors": INDEX_NAME, ".bin": "pytorch_model.bin.index.json"}
# How publishers call their shards, by the kind of file.
_USUAL_PREFIXES = {".bin": "pytorch_model"}
_CONTAINERS: Mapping[str, Container] = {
    ".safetensors": "safetensors",
    ".bin": "pickle",
    ".pt": "pickle",
    ".pth": "pickle",
    ".ckpt": "pickle",
}
# What a trainer leaves beside its weights. By exact name: `my_optimizer.bin` may well be a model (L23).
_TRAINING_ARTEFACTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_MTP_NAME = "mtp.safetensors"
_MTP_ARCHITECTURES = frozenset(
    f"{model}ForCausalLM{form}" for model in ("Glm4Moe", "Glm4MoeLite") for form in ("", "NextN")
)
_HOW_TO_READ = {
    ".safetensors": "safetensors, which the formats 'auto' and 'safetensors' read",
    ".bin": "PyTorch pickle, which the formats 'auto' and 'npcache' read",
    ".pt": "PyTorch pickle, which the format 'pt' or the fallback to *.pt reads",
    ".pth": "PyTorch pickle, which an explicit pattern reads",
    ".ckpt": "PyTorch pickle, which an explicit pattern reads",
    ".gguf": "GGUF, which is recognised but not served",
}


class DuplicatePolicy(StrEnum):
    """What happens to a name that is in two files; there is no `last` (L21)."""

    REFUSE = "refuse"
    FIRST = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryOptions:
    """What to look for. Refused here, before any file is touched, if it cannot be right.

    Attributes:
        load_format: Decides the patterns.
        allow_pt_fallback: Try `*.pt` last.
        patterns: Replace all of the format's, the fallback included: plain file name patterns.
        duplicates: Whether a name in two files is an error, or the first file's copy counts.
        sort_files: Order of the files, see the module `ordering`.
        group: The ranks over which `sort_files` staggers.
    """

    load_format: LoadFormat = LoadFormat.AUTO
    allow_pt_fallback: bool = False
    patterns: tuple[str, ...] | None = None
    duplicates: DuplicatePolicy = DuplicatePolicy.REFUSE
    sort_files: int = SORTED
    group: GroupRank = ALONE

    def __post_init__(self) -> None:
        """Raises:
        SettingsError: If format, patterns or order are not served.
        """
        served_format(self.load_format)
        if not self.in_order_tried:
            raise SettingsError(
                f"load format {self.load_format.value!r}: reads no files, and no patterns were given; expected some"
            )
        for pattern in self.patterns or ():
            if "/" in pattern or "\0" in pattern or PurePosixPath(pattern).suffix not in _CONTAINERS:
                raise SettingsError(
                    f"file pattern {pattern!r}: expected a file name of one kind, ending in {', '.join(_CONTAINERS)}"
                )
        check_order(self.sort_files, self.group, unique_names=self.has_unique_names)

    @property
    def in_order_tried(self) -> tuple[str, ...]:
        return patterns_of(self.load_format, allow_pt_fallback=self.allow_pt_fallback, override=self.patterns)

    @property
    def has_unique_names(self) -> bool:
        """Whether the reader refuses a name that is in two files."""
        return self.duplicates is DuplicatePolicy.REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """What discovery decided, once; files that appear later are not part of it.

    Attributes:
        folder: The checkpoint's folder.
        files: The files in reading order.
        source: What was asked for; None for a record that nobody discovered.
        container: Their kind, by the pattern that matched.
        index: The index that named them, if there is one.
        indexed_names: For each tensor that the index promises, the file that it says holds it.
        duplicates: See `DiscoveryOptions`.
        notes: What was left out or added, and might be asked for later.
    """

    folder: Path
    files: tuple[Path, ...]
    source: Path | None = None
    container: Container = "safetensors"
    index: Path | None = None
    indexed_names: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    duplicates: DuplicatePolicy = DuplicatePolicy.REFUSE
    notes: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one pattern found; paths in the order in which the folder or the index lists them."""

    files: list[Path]
    index: Path | None = None
    indexed_names: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[Diagnostic, ...] = ()


def find_checkpoint(path: Path, options: DiscoveryOptions | None = None) -> CheckpointFiles:
    """Find the files of a checkpoint.

    Args:
        path: A folder, or one file.
        options: Everything at its default, if None.

    Raises:
        CheckpointNotFoundError: If there is nothing that can be read here, or a file is missing.
        CheckpointPathError: If the index names a file outside the folder.
        CheckpointError: If the folder is ambiguous, or holds something that is not what its name says.
    """
    asked = options or DiscoveryOptions()
    if "\0" in str(path):
        raise CheckpointPathError(f"checkpoint path {str(path)!r}: has a NUL byte", path=printable(path))
    status = _stat(path)
    if not stat.S_ISDIR(status.st_mode):
        check_regular(path, status)
        return _record(path, _single_file(path, asked), asked)
    for pattern in asked.in_order_tried:
        found = _matching(path, pattern, asked)
        if found is not None:
            return _record(path, found, asked)
    raise _nothing_found(path, asked)


def _record(path: Path, found: _Found, options: DiscoveryOptions) -> CheckpointFiles:
    for file in found.files:
        check_regular(file, _stat(file))
    return CheckpointFiles(
        folder=path.parent if found.files == [path] else path,
        files=order_files(found.files, options.sort_files, options.group, unique_names=options.has_unique_names),
        source=path,
        container=_CONTAINERS[found.files[0].suffix],
        index=found.index,
        indexed_names=found.indexed_names,
        duplicates=options.duplicates,
        notes=found.notes,
    )


def _single_file(path: Path, options: DiscoveryOptions) -> _Found:
    patterns = options.in_order_tried
    is_artefact = path.name in _TRAINING_ARTEFACTS
    if not is_artefact and any(fnmatchcase(path.name, pattern) for pattern in patterns):
        return _Found(files=[path])
    known = _HOW_TO_READ.get(path.suffix)
    what = f"is {known}" if known else f"extension {path.suffix!r} is unknown"
    raise CheckpointNotFoundError(
        f"{subject_of(path)}: {'is what a trainer leaves, not weights' if is_artefact else what}; "
        f"expected {' or '.join(patterns)}",
        path=printable(path),
        diagnostic="D01",
    )


def _matching(folder: Path, pattern: str, options: DiscoveryOptions) -> _Found | None:
    """What a pattern finds in a folder; None if it does not match, so that the next one is tried."""
    suffix = PurePosixPath(pattern).suffix
    is_mistral = options.load_format is LoadFormat.MISTRAL and suffix == ".safetensors"
    index_name = _CONSOLIDATED_INDEX_NAME if is_mistral else _INDEX_NAMES.get(suffix)
    # `lexists`: an index that is a dead link is a broken checkpoint, not a checkpoint without index.
    if index_name is not None and os.path.lexists(folder / index_name):
        return _indexed(folder / index_name, pattern, options)
    return _listed(folder, pattern, options)


def _indexed(index: Path, pattern: str, options: DiscoveryOptions) -> _Found | None:
    """The files that an index names. One that matches no override names nothing that was asked for."""
    folder, suffix = index.parent, PurePosixPath(pattern).suffix
    promised = read_index(index, suffix=suffix)
    names = {name: folder / relative for name, relative in promised.items() if fnmatchcase(relative.name, pattern)}
    # Only an override may ask for a part; a format's own index speaks of the format's files alone.
    if options.patterns is None and len(names) < len(promised):
        stranger = next(name for name in promised if name not in names)
        raise CheckpointError(
            f"index {printable(index)!r}: tensor {quoted(stranger)} is in {quoted(str(promised[stranger]))}, "
            f"expected {pattern}",
            path=printable(index),
        )
    if not names:
        return None
    files = list(dict.fromkeys(names.values()))
    _check_present(index, files, suffix)
    beside = [
        name for name in _listing(folder) if fnmatchcase(name, pattern) and folder / name not in set(names.values())
    ]
    notes = list[Diagnostic]()
    if _MTP_NAME in beside:
        beside.remove(_MTP_NAME)
        note, is_added = _unlisted_mtp(index)
        notes.append(note)
        files += [folder / _MTP_NAME] if is_added else []
    weights = [name for name in beside if name not in _TRAINING_ARTEFACTS]
    if weights:
        detail = f"left out {joined(sorted(weights))}: {quoted(index.name)} does not name them"
        notes.append(Diagnostic(code="D02", subject=f"folder {printable(folder)!r}", detail=detail))
    return _Found(files=files, index=index, indexed_names=MappingProxyType(names), notes=tuple(notes))


def _unlisted_mtp(index: Path) -> tuple[Diagnostic, bool]:
    """Whether a draft shard that an index omits belongs to the model all the same (L22), and what to say about it."""
    file = index.parent / _MTP_NAME
    subject = subject_of(file)
    if not _has_draft_layers(index.parent / CONFIG_NAME):
        detail = f"left out: {quoted(index.name)} does not name it, and config.json asks for no draft layers of GLM"
        return Diagnostic(code="D03", subject=subject, detail=detail), False
    detail = (
        f"added, though {quoted(index.name)} omits it: config.json asks for draft layers. This is an error in the "
        "packaging of the checkpoint; please report it to its publisher"
    )
    _LOG.warning("%s: %s", subject, detail)
    return Diagnostic(code="D03", subject=subject, detail=detail), True


def _has_draft_layers(config: Path) -> bool:
    if not os.path.lexists(config):
        return False
    members = parse_object(read_bytes(config, max_bytes=MAX_CONFIG_BYTES), subject=subject_of(config))
    architectures, layers = members.get("architectures"), members.get("num_nextn_predict_layers")
    if not isinstance(architectures, list) or not isinstance(layers, int):
        return False
    return layers > 0 and any(name in _MTP_ARCHITECTURES for name in architectures if isinstance(name, str))


def _check_present(index: Path, files: list[Path], suffix: str) -> None:
    missing = list[str]()
    for file in files:
        try:
            check_regular(file, _stat(file))
        except CheckpointNotFoundError:
            missing.append(printable(file.relative_to(index.parent)))
    if missing:
        named = {file.name for file in files}
        others = sum(name.endswith(suffix) and name not in named for name in _listing(index.parent))
        hint = f"; {others} other files lie there, is the index a stale one?" if others else ""
        raise CheckpointNotFoundError(
            f"index {printable(index)!r}: {len(missing)} of its {len(files)} files are absent: "
            f"{joined(sorted(missing))}{hint}",
            path=printable(index),
            missing=sorted(missing),
        )


def _listed(folder: Path, pattern: str, options: DiscoveryOptions) -> _Found | None:
    """The matching files of a folder without index, less the copies of what others of them hold."""
    found = [name for name in _listing(folder) if fnmatchcase(name, pattern) and name not in _TRAINING_ARTEFACTS]
    if not found:
        return None
    suffix = PurePosixPath(pattern).suffix
    wants_consolidated = pattern.startswith(_CONSOLIDATED)
    kept = [name for name in found if wants_consolidated or not _is_consolidated(name)]
    if not kept:
        raise CheckpointNotFoundError(
            f"Cannot find any model weights with {printable(folder)!r}: {joined(sorted(found))} is in the format "
            f"'mistral', which must be asked for; expected {pattern} with checkpoint names",
            path=printable(folder),
            patterns=list(options.in_order_tried),
            diagnostic="D01",
        )
    notes = _drop(folder, set(found) - set(kept), "the other files hold the same weights")
    canonical = _USUAL_PREFIXES.get(suffix, FORMATS[options.load_format].canonical)
    index_name = _INDEX_NAMES.get(suffix, "index")
    chosen = choose_set(kept, canonical=canonical, folder=printable(folder), index_name=index_name)
    if chosen is not None:
        others = shard_names(kept) - set(chosen.names)
        notes += _drop(folder, others, f"the set {chosen} is taken")
        kept = [name for name in kept if name not in others]
    return _Found(files=[folder / name for name in kept], notes=notes)


def _is_consolidated(name: str) -> bool:
    return name.startswith(_CONSOLIDATED) and name.endswith(".safetensors")


def _drop(folder: Path, names: Iterable[str], reason: str) -> tuple[Diagnostic, ...]:
    listed = sorted(names)
    if not listed:
        return ()
    _LOG.warning("folder %r: ignoring %s: %s", printable(folder), joined(listed), reason)
    detail = f"left out {joined(listed)}: {reason}"
    return (Diagnostic(code="D02", subject=f"folder {printable(folder)!r}", detail=detail),)


def _listing(folder: Path) -> list[str]:
    """Names of the files that are not hidden, as the file system lists them."""
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:
        raise refusal_for(folder, error) from error


def _nothing_found(folder: Path, options: DiscoveryOptions) -> CheckpointNotFoundError:
    names = sorted(_listing(folder))
    extensions = sorted({Path(name).suffix for name in names} - {""})
    recognised = [name for name in names if Path(name).suffix in _HOW_TO_READ and name not in _TRAINING_ARTEFACTS]
    by_kind = dict[str, list[str]]()
    for name in recognised:
        by_kind.setdefault(_HOW_TO_READ[Path(name).suffix], []).append(name)
    hints = "".join(f"; {joined(same)} is {kind}" for kind, same in by_kind.items())
    patterns = options.in_order_tried
    return CheckpointNotFoundError(
        f"Cannot find any model weights with {printable(folder)!r}: tried {', '.join(patterns)}, "
        f"found extensions {extensions}{hints}",
        path=printable(folder),
        patterns=list(patterns),
        extensions=extensions,
        diagnostic="D01",
    )


def _stat(path: Path) -> os.stat_result:
    """`os.stat`, through links.

    Raises:
        CheckpointNotFoundError: If it is absent, or a link to something absent.
        CheckpointError: If it cannot be looked at.
    """
    try:
        return os.stat(path)
    except OSError as error:
        raise refusal_for(path, error) from error
