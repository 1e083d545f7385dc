"""Loaders made of random views, copies and worse, against an oracle that runs them on numbered elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import Region
from weightwire.transfer.replay import check_trace
from weightwire.transfer.tracing import LoadWeights, Trace, TracedFill, trace_placement

SHAPES = {"u": (6,), "v": (4, 6), "w": (2, 3, 4), "x": ()}
# Every checkpoint element has a number of its own.
STARTS = {"u": 100, "v": 200, "w": 300, "x": 400}
TENSORS = {
    name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + STARTS[name]
    for name, shape in SHAPES.items()
}
SPECS = [CheckpointSpec(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()]
Shells = dict[str, Tensor]
Chain = tuple[tuple[int, int, int], ...]


def new_shells() -> Shells:
    """A parameter alone, a tied one, one across strides, and cuts of one buffer, two of which interleave."""
    buffer = torch.full((30,), -1.0)
    rows = buffer[6:].view(4, 6)
    alone = torch.full((4, 6), -1.0)
    return {
        "alone": alone,
        "tied": alone,
        "strided": torch.full((8, 6), -1.0)[::2, 1:].t(),
        "cut": buffer[:6].view(2, 3),
        "left": rows[:, :2],
        "right": rows[:, 2:],
        "half": torch.full((3, 4), -1.0, dtype=torch.bfloat16),
        "scalar": torch.full((), -1.0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a loader does in the turn of one checkpoint tensor."""

    turn: str
    does: str
    shell: str
    source: Chain
    target: Chain


def narrowed(view: Tensor, dim: int, begin: int, size: int) -> Tensor:
    begin %= view.shape[dim] + 1
    return view.narrow(dim, begin, min(size, view.shape[dim] - begin))


def stepped(view: Tensor, dim: int, begin: int, step: int) -> Tensor:
    return view[(slice(None),) * dim + (slice(begin, None, step + 1),)]


def chunked(view: Tensor, dim: int, count: int, index: int) -> Tensor:
    parts = view.chunk(count + 1, dim)
    return parts[index % len(parts)]


def flattened(view: Tensor, _dim: int, _first: int, _second: int) -> Tensor:
    return view.view(-1) if view.is_contiguous() else view


def moved(view: Tensor, dim: int, to: int, _: int) -> Tensor:
    return view.movedim(dim, to % view.dim())


VIEWS: tuple[Callable[[Tensor, int, int, int], Tensor], ...] = (
    lambda view, dim, first, second: view.select(dim, first % view.shape[dim]) if view.shape[dim] else view,
    lambda view, dim, first, second: view.transpose(dim, first % view.dim()),
    lambda view, dim, first, second: view.unsqueeze(dim),
    lambda view, dim, first, second: view.squeeze(),
    lambda view, dim, first, second: view.diagonal() if view.dim() == 2 else view,
    lambda view, dim, first, second: view.detach().view(view.shape),
    narrowed,
    stepped,
    chunked,
    flattened,
    moved,
)


def viewed(tensor: Tensor, chain: Chain) -> Tensor:
    """A chain of views; each is made of three numbers, whatever they are."""
    view = tensor
    for kind, first, second in chain:
        if view.dim():
            view = VIEWS[kind % len(VIEWS)](view, first % view.dim(), first // 2, second)
    return view


def matching(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of one shape, as little as possible cut off; a scalar goes everywhere."""
    if source.dim() == 0:
        return source, target
    if not source.numel() or not target.numel():
        return source.as_strided((0,), (1,)), target.as_strided((0,), (1,))
    while source.dim() > target.dim():
        source = source[0]
    while target.dim() > source.dim():
        target = target[0]
    for dim, (one, other) in enumerate(zip(source.shape, target.shape, strict=True)):
        if one != 1:
            source, target = source.narrow(dim, 0, min(one, other)), target.narrow(dim, 0, min(one, other))
    return source, target


def run_step(step: Step, tensor: Tensor, shells: Shells) -> None:
    source, target = viewed(tensor, step.source), viewed(shells[step.shell], step.target)
    match step.does:
        case "copy" | "copy again":
            source, target = matching(source, target)
            target.copy_(source)
        case "fill":
            target.fill_(step.source[0][0] if step.source else 0.5)
        case "assign":
            target[...] = 7
        case "move":
            source, target = matching(source.to("cpu"), target)
            target.copy_(source)
        case "compute":
            source, target = matching(source, target)
            target.copy_(source + 1000)
        case "accumulate":
            target.add_(1)
        case "spoil":
            source.mul_(3)
        case "scratch":
            source, target = matching(source, target)
            target.copy_(torch.empty_like(source).copy_(source))
        case "shell to shell":
            source, target = matching(viewed(shells["alone"], step.source), target)
            target.copy_(source.clone())


HONEST = ("copy", "copy again", "fill", "assign", "move")
SLY = ("compute", "accumulate", "spoil", "scratch", "shell to shell")
NUMBERS = st.tuples(st.integers(0, 21), st.integers(0, 7), st.integers(0, 3))
CHAINS = st.lists(NUMBERS, max_size=4).map(tuple)


def steps(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        turn=st.sampled_from(sorted(SHAPES)),
        does=st.sampled_from(kinds),
        shell=st.sampled_from(sorted(new_shells())),
        source=CHAINS,
        target=CHAINS,
    )
    return st.lists(step, min_size=1, max_size=8)


def loader(program: list[Step], shells: Shells, *, collects: bool = False) -> LoadWeights:
    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        given = dict(pairs).items() if collects else pairs
        for name, tensor in given:
            for step in program:
                if step.turn == name:
                    run_step(step, tensor, shells)

    return load


def elements(region: Region) -> list[int]:
    """The indices of a region, one by one."""
    ranges = (range(size) for size in region.shape)
    return [
        region.offset + sum(index * stride for index, stride in zip(indices, region.strides, strict=True))
        for indices in itertools.product(*ranges)
    ]


def told(trace: Trace, shells: Shells) -> None:
    """Do what the trace says, element by element."""
    for item in trace.events:
        shell = shells[item.shell]
        flat = shell.as_strided((shell.untyped_storage().nbytes() // shell.itemsize,), (1,), 0)
        if isinstance(item, TracedFill):
            flat[elements(item.target)] = item.value
            continue
        for target, source in zip(elements(item.target), elements(item.source), strict=True):
            flat[target] = STARTS[item.name] + source


@given(steps(HONEST))
def test_traces_of_honest_loaders_say_where_each_numbered_element_goes(program: list[Step]) -> None:
    shells, expected, replayed = new_shells(), new_shells(), new_shells()
    trace = trace_placement(loader(program, shells), shells, SPECS)
    assert not trace.opaque
    assert all(shell.eq(-1).all() for shell in shells.values())
    loader(program, expected)(iter(TENSORS.items()))
    told(trace, replayed)
    assert all(replayed[name].equal(shell) for name, shell in expected.items())
    # Nothing that is loaded is -1.
    for name, found in trace.coverage.items():
        assert found.missing == int(expected[name].eq(-1).sum())
    event(f"{len(trace.copies)} copies")


@given(steps((*HONEST, *SLY)), st.booleans())
def test_replays_of_any_loader_equal_its_load(program: list[Step], collects: bool) -> None:
    def build() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        shells = new_shells()
        return loader(program, shells, collects=collects), shells

    found = check_trace(build, TENSORS)
    found.check_equal()
    event(f"{len(found.opaque)} opaque, {len(found.trace.events)} events")
    meta = on_meta(new_shells())
    assert trace_placement(loader(program, meta, collects=collects), meta, SPECS) == found.trace


def on_meta(shells: Shells) -> Shells:
    """The same views of storages without memory."""
    storages: dict[int, Tensor] = {}
    for shell in shells.values():
        held = shell.untyped_storage()
        if held.data_ptr() not in storages:
            storages[held.data_ptr()] = torch.empty(held.nbytes() // shell.itemsize, dtype=shell.dtype, device="meta")
    return {
        name: storages[shell.untyped_storage().data_ptr()].as_strided(
            shell.shape, shell.stride(), int(shell.storage_offset())
        )
        for name, shell in shells.items()
    }
