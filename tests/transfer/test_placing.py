"""The last write of every element, against a loader that is run on numbered elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.placement import PlacedPiece, ShellPlacement
from weightwire.transfer.placing import Placed, place_shells
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.tracing import trace_placement

Slices = tuple[slice, ...]
Pairs = Iterable[tuple[str, torch.Tensor]]
NOTHING = -1.0


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write of a loader: a box of a shell, from a checkpoint tensor or of one value.

    Attributes:
        target: Of the shell.
        name: Checkpoint tensor; None for a fill.
        source: Of the checkpoint tensor, whose axes are then put in this order.
        value: Of a fill.
    """

    target: Slices
    name: str | None = None
    source: Slices = ()
    order: tuple[int, ...] = ()
    value: float = 0.0

    def apply(self, shell: torch.Tensor, checkpoint: dict[str, torch.Tensor]) -> None:
        if self.name is None:
            shell[self.target].fill_(self.value)
        else:
            shell[self.target].copy_(checkpoint[self.name][self.source].permute(self.order))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loader of one shell, and the checkpoint that it reads."""

    shell: torch.Tensor
    shapes: dict[str, tuple[int, ...]]
    writes: list[Write]

    @property
    def specs(self) -> list[CheckpointSpec]:
        return [CheckpointSpec(name=name, dtype="float64", shape=shape) for name, shape in self.shapes.items()]

    def load(self, pairs: Pairs) -> None:
        checkpoint = dict(pairs)
        for write in self.writes:
            write.apply(self.shell, checkpoint)

    def numbered(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1000.0 * (number + 1)
            for number, (name, shape) in enumerate(self.shapes.items())
        }


def cut(draw: st.DrawFn, size: int, length: int, step: int = 1) -> slice:
    begin = draw(st.integers(0, size - ((length - 1) * step + 1)))
    return slice(begin, begin + (length - 1) * step + 1, step)


@st.composite
def cases(draw: st.DrawFn, *, steps: tuple[int, ...] = (1,)) -> Case:
    """Boxes of a shell that overlap as they like."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shapes = {f"w{n}": tuple(draw(st.integers(5, 6)) for _ in shape) for n in range(draw(st.integers(1, 3)))}
    writes = []
    for _ in range(draw(st.integers(0, 6))):
        every = [draw(st.sampled_from(steps)) if size > 2 else 1 for size in shape]
        sizes = [draw(st.integers(1, 1 + (size - 1) // step)) for size, step in zip(shape, every, strict=True)]
        target = tuple(cut(draw, *facts) for facts in zip(shape, sizes, every, strict=True))
        if draw(st.integers(0, 2)):
            name = draw(st.sampled_from(list(shapes)))
            order = tuple(draw(st.permutations(range(len(shape)))))
            source = tuple(cut(draw, shapes[name][axis], sizes[order.index(axis)]) for axis in range(len(shape)))
            writes.append(Write(target=target, name=name, source=source, order=order))
        else:
            writes.append(Write(target=target, value=draw(st.sampled_from([0.0, 1.0, 2.0]))))
    pool = torch.full((math.prod(shape) + 5,), NOTHING, dtype=torch.float64)
    return Case(shell=pool[3:][: math.prod(shape)].view(shape), shapes=shapes, writes=writes)


def place(case: Case) -> Placed:
    return place_shells(trace_placement(case.load, {"s": case.shell}, case.specs), {"s": case.shell})


def laid_out(case: Case, placement: ShellPlacement) -> torch.Tensor:
    """What lies in the shell's storage by its placement; no element is named twice."""
    storage = torch.full((case.shell.untyped_storage().nbytes() // 8,), NOTHING, dtype=torch.float64)
    checkpoint = {name: tensor.flatten() for name, tensor in case.numbered().items()}
    seen: list[int] = []
    for piece in placement.pieces:
        at = indices(piece.runtime)
        storage[at] = checkpoint[piece.name][indices(piece.checkpoint)]
        seen += at
    for constant in placement.constants:
        at = indices(constant.runtime)
        storage[at] = constant.value
        seen += at
    assert len(seen) == len(set(seen))
    return storage


def is_right(case: Case, placement: ShellPlacement) -> bool:
    found = laid_out(case, placement)
    case.load(case.numbered().items())
    return found.equal(torch.empty(0, dtype=torch.float64).set_(case.shell.untyped_storage()))


@settings(max_examples=300)
@given(cases())
def test_last_write_of_every_element_counts(case: Case) -> None:
    placed = place(case)
    assert placed.opaque == {}
    assert is_right(case, placed.placements["s"])


@settings(max_examples=200)
@given(cases(steps=(1, 2)))
def test_writes_of_no_boxes_are_right_or_said_to_be_opaque(case: Case) -> None:
    placed = place(case)
    if not placed.opaque:
        assert is_right(case, placed.placements["s"])
        return
    assert "cannot be told apart" in placed.opaque["s"]
    assert placed.placements == {}


# Cases by hand


def placed(
    load: Callable[[dict[str, torch.Tensor]], object],
    shells: dict[str, torch.Tensor],
    **shapes: tuple[int, ...],
) -> Placed:
    specs = [CheckpointSpec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    trace = trace_placement(lambda pairs: load(dict(pairs)), shells, specs)
    return place_shells(trace, shells)


def test_padding_that_is_zeroed_first_is_what_is_left_of_it() -> None:
    shell = torch.empty(8, 4, device="meta")

    def load(tensors: dict[str, torch.Tensor]) -> None:
        shell.zero_()
        shell[:6].copy_(tensors["embed"])

    found = placed(load, {"embed": shell}, embed=(6, 4)).placements["embed"]
    assert found.pieces == (PlacedPiece.of("embed", checkpoint=row_major((6, 4)), runtime=row_major((6, 4))),)
    assert [(c.runtime, c.value) for c in found.constants] == [(Region(offset=24, shape=(8,), strides=(1,)), 0.0)]


def test_write_that_is_written_over_whole_leaves_nothing() -> None:
    shell = torch.empty(4, device="meta")

    def load(tensors: dict[str, torch.Tensor]) -> None:
        shell.fill_(math.nan)
        shell.copy_(tensors["a"])
        shell.copy_(tensors["b"])

    (piece,) = placed(load, {"s": shell}, a=(4,), b=(4,)).placements["s"].pieces
    assert piece.name == "b"


def test_names_of_the_same_elements_have_one_placement() -> None:
    shell = torch.empty(4, 2, device="meta")
    shells = {"embed": shell, "head": shell}
    found = placed(lambda tensors: shell.copy_(tensors["w"]), shells, w=(4, 2))
    assert found.placements["head"] == found.placements["embed"]
    assert [piece.name for piece in found.placements["head"].pieces] == ["w"]


def test_names_of_the_same_elements_are_opaque_together() -> None:
    shell = torch.empty(4, device="meta")
    found = placed(lambda tensors: shell.copy_(tensors["w"] * 2), {"a": shell, "b": shell}, w=(4,))
    assert found.opaque["a"] == found.opaque["b"]
    assert found.placements == {}


def test_neighbours_in_one_allocation_are_placed_each_in_its_own_elements() -> None:
    pool = torch.empty(10)
    shells = {"a": pool[1:4], "b": pool[4:10].view(2, 3)}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        shells["a"].copy_(tensors["a"])
        shells["b"].copy_(tensors["b"])

    found = placed(load, shells, a=(3,), b=(2, 3)).placements
    assert [(p.runtime_offset, p.numel) for name in shells for p in found[name].pieces] == [(1, 3), (4, 6)]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(lambda s, w: s.fill_(math.nan), "NaN", id="filled with one of many NaNs"),
        pytest.param(lambda s, w: (s.zero_(), s.copy_(w), s.t()[0].copy_(w[0])), "cannot be told apart", id="turned"),
    ],
)
def test_what_cannot_be_said_in_boxes_and_numbers_is_opaque_with_its_reason(
    load: Callable[[torch.Tensor, torch.Tensor], object], expected: str
) -> None:
    shell = torch.empty(3, 3).t()
    found = placed(lambda tensors: load(shell, tensors["w"]), {"s": shell}, w=(3, 3))
    assert expected in found.opaque["s"]


def test_shell_that_nothing_writes_is_known_to_hold_nothing() -> None:
    found = placed(lambda tensors: None, {"s": torch.empty(3)}, w=(3,))
    assert found.placements["s"] == ShellPlacement()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_columns_rows_and_a_fill_count_in_the_order_of_the_loader(order: tuple[int, ...]) -> None:
    whole = slice(None)
    writes = [
        Write(target=(slice(0, 2), whole), name="w0", source=(slice(1, 3), whole), order=(0, 1)),
        Write(target=(whole, slice(1, 3)), name="w1", source=(slice(0, 2), whole), order=(1, 0)),
        Write(target=(slice(1, 4), slice(2, 4)), value=7.0),
    ]
    shapes: dict[str, tuple[int, ...]] = {"w0": (5, 4), "w1": (3, 5)}
    case = Case(
        shell=torch.full((5, 4), NOTHING, dtype=torch.float64), shapes=shapes, writes=[writes[at] for at in order]
    )
    found = place(case)
    assert found.opaque == {}
    assert is_right(case, found.placements["s"])
