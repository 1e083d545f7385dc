"""Sets of shards `PREFIX-i-of-n` among file names: which set is the checkpoint, and is it complete."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError

MOST_SHOWN = 100
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.[a-z]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """Files whose names share a prefix and a total.

    Attributes:
        prefix: What stands before the number.
        total: How many shards the names promise.
        numbers: Those that are here.
        names: File names, in the order of the numbers.
    """

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


def choose_set(names: Iterable[str], *, canonical: str, folder: str, index_name: str) -> ShardSet | None:
    """The one set that is the checkpoint's, complete; None if no name is a shard's.

    Args:
        names: File names of one folder.
        canonical: Prefix that is taken if there are several sets.
        folder: Where they lie, for the message.
        index_name: The index that could have decided, for the message.

    Raises:
        CheckpointNotFoundError: If shards are missing.
        CheckpointError: If there are several sets and not exactly one has the prefix.
    """
    sets = _shard_sets(names)
    if not sets:
        return None
    candidates = sets if len(sets) == 1 else [shards for shards in sets if shards.prefix == canonical]
    if len(candidates) != 1:
        raise CheckpointError(
            f"folder {folder!r}: holds several sets of shards and no {index_name}: "
            f"{', '.join(map(str, sets[:MOST_SHOWN]))}; expected one set, or an index that names it",
            path=folder,
            diagnostic="D02",
        )
    _check_complete(candidates[0], folder)
    return candidates[0]


def shard_names(names: Iterable[str]) -> set[str]:
    """Those of `names` that are a shard's."""
    return {name for shards in _shard_sets(names) for name in shards.names}


def joined(names: Iterable[str]) -> str:
    """Names for a message, cut to a number that fits a line of a log."""
    listed = list(names)
    more = f" and {len(listed) - MOST_SHOWN} more" if len(listed) > MOST_SHOWN else ""
    return ", ".join(quoted(name) for name in listed[:MOST_SHOWN]) + more


def _shard_sets(names: Iterable[str]) -> list[ShardSet]:
    grouped = defaultdict[tuple[str, int], list[tuple[int, str]]](list)
    for name in names:
        # Longer numbers are no shard numbers, and int() refuses thousands of digits.
        match = _SHARD.fullmatch(name)
        if match and len(match["number"]) < 10 and len(match["total"]) < 10:
            grouped[match["prefix"], int(match["total"])].append((int(match["number"]), name))
    return [
        ShardSet(
            prefix=prefix,
            total=total,
            numbers=frozenset(number for number, _ in members),
            names=tuple(name for _, name in sorted(members)),
        )
        for (prefix, total), members in sorted(grouped.items())
    ]


def _check_complete(shards: ShardSet, folder: str) -> None:
    if shards.is_complete:
        return
    expected = shards.expected
    absent = list(islice((number for number in expected if number not in shards.numbers), MOST_SHOWN))
    stray = sorted(number for number in shards.numbers if number not in expected)
    raise CheckpointNotFoundError(
        f"folder {folder!r}: {shards}: absent {absent}, unexpected {stray[:MOST_SHOWN]}; "
        f"expected the numbers {expected.start} to {expected.stop - 1}",
        path=folder,
    )
