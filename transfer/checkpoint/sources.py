"""Several checkpoints as one stream: the model's own first, then the others that it declares.

Everything here is lazy: a source is opened when its turn comes, names are changed after a pair was read, and no
reference to a tensor is kept while the next one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weightwire.transfer.checkpoint.discovery import DiscoveryOptions
from weightwire.transfer.checkpoint.formats import LoadFormat
from weightwire.transfer.checkpoint.regular_files import printable
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.errors import CheckpointError

Payload = TypeVar("Payload")
_DRAFT_LAYER = re.compile(r"model\.mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """One checkpoint of a model, and how its names are set apart from those of the others.

    Attributes:
        path: Folder or file.
        prefix: Stands before each of its names in the stream.
        revision: Of this checkpoint; None: whatever lies there.
        allow_pt_fallback: As in `DiscoveryOptions`.
        patterns: As in `DiscoveryOptions`.
    """

    path: Path
    prefix: str = ""
    revision: str | None = None
    allow_pt_fallback: bool = False
    patterns: tuple[str, ...] | None = None

    def discovery(self, load_format: LoadFormat = LoadFormat.AUTO) -> DiscoveryOptions:
        """What to look for at `path`.

        Raises:
            SettingsError: If the format is not served, or the patterns cannot be right.
        """
        return DiscoveryOptions(
            load_format=load_format, allow_pt_fallback=self.allow_pt_fallback, patterns=self.patterns
        )


def chain_sources(
    primary: WeightSource,
    secondaries: Iterable[WeightSource],
    *,
    read: Callable[[WeightSource], Iterable[tuple[str, Payload]]],
) -> Iterator[tuple[str, Payload]]:
    """Read the sources one after the other.

    Args:
        primary: Comes first.
        secondaries: In the order in which the model declares them.
        read: Opens one source, when its turn comes. A generator is closed when its source is done, or with this one.

    Yields:
        The source's prefix and the name, with the payload as it was read.

    Raises:
        CheckpointError: If two sources, with their prefixes, have a name in common.
    """
    owners = dict[str, WeightSource]()
    for source in (primary, *secondaries):
        pairs = read(source)
        try:
            for name, payload in pairs:
                full = source.prefix + name
                _check_owner(owners, full, source)
                yield full, payload
                del payload
        finally:
            if isinstance(pairs, Generator):
                pairs.close()


def _check_owner(owners: dict[str, WeightSource], name: str, source: WeightSource) -> None:
    other = owners.setdefault(name, source)
    if other is not source:
        paths = [printable(other.path), printable(source.path)]
        raise CheckpointError(
            f"tensor {quoted(name)}: is in two sources, {paths[0]!r} and {paths[1]!r}; expected prefixes that "
            "keep their names apart",
            tensor=name,
            files=paths,
            diagnostic="D02",
        )


def draft_name(name: str, draft_model_idx: int) -> str | None:
    """The name under which a draft model takes a tensor: of its own layer, as layer 0; None if it is another's.

    Names that are no draft layer's stay as they are. Usable before anything is read, to reject by name.
    """
    match = _DRAFT_LAYER.fullmatch(name)
    if match is None:
        return name
    return f"model.mtp.layers.0.{match['rest']}" if match["layer"] == str(draft_model_idx) else None


def select_draft(pairs: Iterable[tuple[str, Payload]], draft_model_idx: int | None) -> Iterator[tuple[str, Payload]]:
    """Of several draft layers keep one, renamed to layer 0; everything else passes.

    Args:
        pairs: A stream; read one pair at a time.
        draft_model_idx: Which; None: all pass untouched.
    """
    for name, payload in pairs:
        kept = name if draft_model_idx is None else draft_name(name, draft_model_idx)
        if kept is not None:
            yield kept, payload
        del payload
