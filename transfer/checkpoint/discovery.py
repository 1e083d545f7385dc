"""Which files of a folder are the checkpoint.

The rules, first match wins:

1. A path to one `.safetensors` file is that file.
2. `model.safetensors.index.json` decides alone: the files it names, all of which must be there. There is no switch
   to guess around a stale index; whoever wants the files that lie there deletes the index.
3. Otherwise every `*.safetensors` file of the folder itself, hidden files aside, except that
   - `consolidated*` files (the mistral format's second copy) are dropped when anything else is there;
   - shards `PREFIX-i-of-n` must be complete (counted from 1, or from 0);
   - of several sets of shards, the one with prefix `model` is taken if it is the only such and complete (the others
     are named in a warning); otherwise the folder is ambiguous and refused.

Only names are looked at here. Headers, and with them names that occur in two files, are the reader's part.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

from weightwire.transfer.checkpoint.regular_files import (
    check_regular,
    printable,
    read_bytes,
    refusal_for,
    subject_of,
)
from weightwire.transfer.checkpoint.untrusted_json import parse_object, quoted
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError, CheckpointPathError

_LOG = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
PATTERN = "*.safetensors"
# An index has some hundred bytes for each tensor; the largest published ones stay under 20 MB.
_MAX_INDEX_BYTES = 100_000_000
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors", re.ASCII)
_CANONICAL_PREFIX = "model"
_MOST_SHOWN = 100
_RECOGNISED = {
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".ckpt": "PyTorch pickle",
    ".gguf": "GGUF",
}
# What a trainer leaves beside its weights, by exact name (L23).
_TRAINING_ARTEFACTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """What discovery decided, once; files that appear later are not part of it.

    Attributes:
        folder: The checkpoint's folder.
        files: The files in reading order.
        container: Their format.
        index: The index that named them, if there is one.
        indexed_names: For each tensor that the index promises, the file that it says holds it.
    """

    folder: Path
    files: tuple[Path, ...]
    container: Literal["safetensors"] = "safetensors"
    index: Path | None = None
    indexed_names: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardSet:
    prefix: str
    total: int
    numbers: frozenset[int]
    names: tuple[str, ...]

    @property
    def expected(self) -> range:
        """Most publishers count from 1, some from 0."""
        first = 0 if 0 in self.numbers else 1
        return range(first, first + self.total)

    @property
    def is_complete(self) -> bool:
        # By length: a file name may claim a billion shards, so nothing of that size is built.
        return len(self.numbers) == self.total and all(number in self.expected for number in self.numbers)

    def __str__(self) -> str:
        return f"{quoted(self.prefix)} in {self.total} shards, {len(self.numbers)} of them here"


def find_checkpoint(path: Path) -> CheckpointFiles:
    """Find the safetensors files of a checkpoint.

    Args:
        path: A folder, or one `.safetensors` file.

    Raises:
        CheckpointNotFoundError: If there is nothing that can be read here, or a file is missing.
        CheckpointPathError: If the index names a file outside the folder.
        CheckpointError: If the folder is ambiguous, or holds something that is not what its name says.
    """
    if "\0" in str(path):
        raise CheckpointPathError(f"checkpoint path {str(path)!r}: has a NUL byte", path=printable(path))
    status = _stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return _single_file(path, status)
    index = path / INDEX_NAME
    # `lexists`: an index that is a dead link is a broken checkpoint, not a checkpoint without index.
    return _indexed(path, index) if os.path.lexists(index) else _listed(path)


def _single_file(path: Path, status: os.stat_result) -> CheckpointFiles:
    check_regular(path, status)
    if path.suffix != ".safetensors":
        known = _RECOGNISED.get(path.suffix)
        what = f"{known} is recognised but not served yet" if known else f"extension {path.suffix!r} is unknown"
        raise CheckpointNotFoundError(f"{subject_of(path)}: {what}, expected {PATTERN}", path=printable(path))
    return CheckpointFiles(folder=path.parent, files=(path,))


def _indexed(folder: Path, index: Path) -> CheckpointFiles:
    subject = f"index {printable(index)!r}"
    members = parse_object(read_bytes(index, max_bytes=_MAX_INDEX_BYTES), subject=subject)
    weight_map = members.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{subject}: weight_map is {quoted(weight_map)}, expected names and their files")
    # All of them are checked before the first is looked for on disk.
    names = {name: folder / _inside(value, subject=subject, tensor=name) for name, value in weight_map.items()}
    files = tuple(sorted(set(names.values())))
    _check_present(folder, files, subject)
    return CheckpointFiles(folder=folder, files=files, index=index, indexed_names=MappingProxyType(names))


def _inside(value: object, *, subject: str, tensor: str) -> PurePosixPath:
    """Relative path that stays in its folder by its text alone: a link inside is its owner's business (L19)."""
    reason = _outside(value)
    if reason is None and isinstance(value, str):
        relative = PurePosixPath(value)
        if relative.suffix == ".safetensors":
            return relative
        raise CheckpointError(f"{subject}: tensor {quoted(tensor)} is in {quoted(value)}, expected {PATTERN}")
    raise CheckpointPathError(
        f"{subject}: tensor {quoted(tensor)} is in {quoted(value)}, which {reason}; expected a file inside the folder",
        tensor=tensor.encode("utf-8", "backslashreplace").decode("utf-8"),
    )


def _outside(value: object) -> str | None:
    """Why an index must not name `value`, or None."""
    if not isinstance(value, str):
        return "is not a string"
    if "\0" in value:
        return "has a NUL byte"
    if "\\" in value:
        return "has a backslash"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "has half of a surrogate pair"
    if PurePosixPath(value).is_absolute():
        return "is absolute"
    return "climbs out with '..'" if ".." in PurePosixPath(value).parts else None


def _check_present(folder: Path, files: tuple[Path, ...], subject: str) -> None:
    missing = list[str]()
    for file in files:
        try:
            check_regular(file, _stat(file))
        except CheckpointNotFoundError:
            missing.append(printable(file.relative_to(folder)))
    if missing:
        others = len(set(_safetensors_names(folder)) - {file.name for file in files})
        hint = f"; {others} other files lie there, is the index a stale one?" if others else ""
        raise CheckpointNotFoundError(
            f"{subject}: {len(missing)} of its {len(files)} files are absent: {_join(missing)}{hint}", missing=missing
        )


def _listed(folder: Path) -> CheckpointFiles:
    found = _safetensors_names(folder)
    kept = [name for name in found if not name.startswith("consolidated")]
    if found and not kept:
        raise CheckpointNotFoundError(
            f"Cannot find any model weights with {printable(folder)!r}: {_join(found)} is the mistral format, "
            f"recognised but not served yet; expected {PATTERN} with checkpoint names",
            path=printable(folder),
        )
    if not kept:
        raise _nothing_found(folder)
    _warn_dropped(folder, [name for name in found if name not in kept], "the other files hold the same weights")
    files = tuple(folder / name for name in _choose(folder, kept))
    for file in files:
        check_regular(file, _stat(file))
    return CheckpointFiles(folder=folder, files=files)


def _choose(folder: Path, names: list[str]) -> list[str]:
    """The part of `names`, sorted, that is one checkpoint."""
    sets = _shard_sets(names)
    if len(sets) <= 1:
        for shards in sets:
            _check_complete(folder, shards)
        return names
    candidates = [shards for shards in sets if shards.prefix == _CANONICAL_PREFIX]
    if len(candidates) != 1:
        listed = ", ".join(str(shards) for shards in sets)
        raise CheckpointError(
            f"folder {printable(folder)!r}: holds several sets of shards and no {INDEX_NAME}: {listed}; "
            "expected one set, or an index that names it",
            path=printable(folder),
        )
    _check_complete(folder, candidates[0])
    dropped = {name for shards in sets if shards is not candidates[0] for name in shards.names}
    _warn_dropped(folder, sorted(dropped), f"the set {candidates[0]} is taken")
    return [name for name in names if name not in dropped]


def _shard_sets(names: Iterable[str]) -> list[_ShardSet]:
    grouped = defaultdict[tuple[str, int], list[tuple[int, str]]](list)
    for name in names:
        # Longer numbers are no shard numbers, and int() refuses thousands of digits.
        match = _SHARD.fullmatch(name)
        if match and len(match["number"]) < 10 and len(match["total"]) < 10:
            grouped[match["prefix"], int(match["total"])].append((int(match["number"]), name))
    return [
        _ShardSet(
            prefix=prefix,
            total=total,
            numbers=frozenset(number for number, _ in members),
            names=tuple(name for _, name in members),
        )
        for (prefix, total), members in sorted(grouped.items())
    ]


def _check_complete(folder: Path, shards: _ShardSet) -> None:
    if shards.is_complete:
        return
    expected = shards.expected
    absent = list(islice((number for number in expected if number not in shards.numbers), _MOST_SHOWN))
    stray = sorted(number for number in shards.numbers if number not in expected)
    raise CheckpointNotFoundError(
        f"folder {printable(folder)!r}: {shards}: absent {absent}, unexpected {stray[:_MOST_SHOWN]}; "
        f"expected the numbers {expected.start} to {expected.stop - 1}",
        path=printable(folder),
    )


def _warn_dropped(folder: Path, names: list[str], reason: str) -> None:
    if names:
        _LOG.warning("folder %r: ignoring %s: %s", printable(folder), _join(names), reason)


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(quoted(name) for name in names[:_MOST_SHOWN]) + more


def _safetensors_names(folder: Path) -> list[str]:
    return [name for name in _listing(folder) if name.endswith(".safetensors")]


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise refusal_for(folder, error) from error


def _nothing_found(folder: Path) -> CheckpointNotFoundError:
    names = _listing(folder)
    extensions = sorted({Path(name).suffix for name in names} - {""})
    recognised = [name for name in names if Path(name).suffix in _RECOGNISED and name not in _TRAINING_ARTEFACTS]
    formats = sorted({_RECOGNISED[Path(name).suffix] for name in recognised})
    hint = f"; {_join(recognised)}: {' and '.join(formats)} is recognised but not served yet" if formats else ""
    return CheckpointNotFoundError(
        f"Cannot find any model weights with {printable(folder)!r}: tried {INDEX_NAME} and {PATTERN}, "
        f"found extensions {extensions}{hint}",
        path=printable(folder),
        patterns=[INDEX_NAME, PATTERN],
        extensions=extensions,
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
