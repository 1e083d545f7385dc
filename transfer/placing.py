"""From what a loader did to what lies where: the last write of every element, as placements of shells.

A trace is a history; a plan needs its end. A loader may zero a shell and then copy into a part of it, or take one name
twice: the later write counts, and what is left of an earlier one is cut down to the elements that it still owns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightwire.transfer.boxes import Box, BoxView, views_of
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.regions import Region
from weightwire.transfer.tracing import Trace, TracedCopy, TracedFill

_Event = TracedCopy | TracedFill


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What is known of the shells of one rank.

    Attributes:
        placements: By runtime name, in elements of the storages as torch counts them. Tied names have one each.
        opaque: By runtime name, why there is none.
    """

    placements: Mapping[str, ShellPlacement]
    opaque: Mapping[str, str]


def place_shells(trace: Trace, shells: Mapping[str, torch.Tensor]) -> Placed:
    """Resolve a trace.

    Args:
        trace: Of these shells' loader.
        shells: As they were traced, or others that lie in their storages alike.
    """
    events: defaultdict[str, list[_Event]] = defaultdict(list)
    for event in trace.events:
        events[event.shell].append(event)
    placements: dict[str, ShellPlacement] = {}
    opaque: dict[str, str] = {}
    owners: dict[tuple[int, Region, torch.dtype], str] = {}
    for name, shell in shells.items():
        region = Region(offset=int(shell.storage_offset()), shape=tuple(shell.shape), strides=shell.stride())
        owner = owners.setdefault((shell.untyped_storage()._cdata, region, shell.dtype), name)
        if owner in trace.opaque:
            opaque[name] = trace.opaque[owner]
        elif owner != name:
            # Another name of the same elements; the trace speaks of the first.
            if owner in placements:
                placements[name] = placements[owner]
            else:
                opaque[name] = opaque[owner]
        else:
            is_clean = name in trace.coverage and not (trace.coverage[name].repeated or trace.coverage[name].outside)
            found = _settled(events[name]) if is_clean else _resolved(events[name], region)
            if found is None:
                opaque[name] = _why(events[name])
            else:
                placements[name] = found
    return Placed(placements=placements, opaque=opaque)


def _why(events: Sequence[_Event]) -> str:
    if any(map(_is_nan, events)):
        return "filled with NaN, which is not one value"
    return "overwritten: what is left of an earlier write cannot be told apart"


def _is_nan(event: _Event) -> bool:
    return isinstance(event, TracedFill) and math.isnan(event.value)


def _settled(events: Sequence[_Event]) -> ShellPlacement | None:
    """The placement where no write touches another one's elements."""
    if any(map(_is_nan, events)):
        return None
    return ShellPlacement(
        pieces=tuple(_piece(event) for event in events if isinstance(event, TracedCopy) and event.target.numel),
        constants=tuple(
            PlacedConstant(runtime=event.target.coalesced(), value=event.value)
            for event in events
            if isinstance(event, TracedFill) and event.target.numel
        ),
    )


def _piece(event: TracedCopy) -> PlacedPiece:
    return PlacedPiece.of(event.name, checkpoint=event.source, runtime=event.target)


def _resolved(events: Sequence[_Event], shell: Region) -> ShellPlacement | None:
    """The placement after the last write; None if a write covers no box of the shell."""
    if not shell.is_contiguous:
        return None
    claimed: list[Box] = []
    pieces: list[PlacedPiece] = []
    constants: list[PlacedConstant] = []
    for event in reversed(events):
        if not event.target.numel:
            continue
        views = _in_shell(event, shell)
        if views is None:
            return None
        for view in views:
            for box in _left_of(view.box, claimed):
                target = _region_in(shell, box)
                if _is_nan(event):
                    return None
                if isinstance(event, TracedFill):
                    constants.append(PlacedConstant(runtime=target.coalesced(), value=event.value))
                else:
                    source = view.region(box).shifted(event.source.offset)
                    pieces.append(PlacedPiece.of(event.name, checkpoint=source, runtime=target))
        claimed.extend(view.box for view in views)
    return ShellPlacement(pieces=tuple(reversed(pieces)), constants=tuple(reversed(constants)))


def _in_shell(event: _Event, shell: Region) -> tuple[BoxView, ...] | None:
    """What an event writes, as boxes of the shell; a view's strides and offset are those in the checkpoint tensor."""
    if event.target.overlaps_itself:
        return None
    source = event.source if isinstance(event, TracedCopy) else event.target
    # The shell stands in for the tensor here, and the checkpoint for the storage.
    turned = PlacedPiece.of(
        event.shell,
        checkpoint=event.target.shifted(-shell.offset),
        runtime=Region(offset=0, shape=source.shape, strides=source.strides),
    )
    return views_of(turned, shell.shape)


def _left_of(box: Box, claimed: Sequence[Box]) -> Iterator[Box]:
    """The parts of a box that no later write has claimed."""
    left = [box]
    for other in claimed:
        left = [part for piece in left for part in piece.without(other)]
    return iter(left)


def _region_in(shell: Region, box: Box) -> Region:
    offset = shell.offset + sum(begin * stride for begin, stride in zip(box.begins, shell.strides, strict=True))
    return Region(offset=offset, shape=box.sizes, strides=shell.strides)
