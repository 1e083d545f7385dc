"""Loaders that are run without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.tracing import Trace, TracedCopy, TracedFill, trace_placement

Pairs = Iterable[tuple[str, torch.Tensor]]
Write = Callable[[torch.Tensor, torch.Tensor], object]
SPECS = [CheckpointSpec(name="w", dtype="float32", shape=(4, 6))]


def traced(write: Write, shell: torch.Tensor) -> Trace:
    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            write(shell, tensor)

    return trace_placement(load, {"p": shell}, SPECS)


# L191
@pytest.mark.parametrize(
    ("shape", "write"),
    [
        pytest.param((4, 6), lambda p, w: p.copy_(w), id="the whole"),
        pytest.param((2, 6), lambda p, w: p.copy_(w.narrow(0, 2, 2)), id="rows"),
        pytest.param((4, 3), lambda p, w: p.copy_(w[:, 3:]), id="columns"),
        pytest.param((6, 4), lambda p, w: p.copy_(w.t()), id="transposed"),
        pytest.param((6, 4), lambda p, w: p.data.copy_(w.transpose(0, 1).detach()), id="through .data and detach"),
        pytest.param((2, 12), lambda p, w: p.copy_(w.view(2, 12)), id="viewed"),
        pytest.param((3, 6), lambda p, w: p.copy_(w.chunk(4)[1].expand(3, 6)), id="one row to many"),
        pytest.param((6,), lambda p, w: p.__setitem__(slice(0, 6), w[0]), id="by assignment"),
        pytest.param((4, 6), lambda p, w: p.copy_(w.contiguous().to("cpu")), id="made contiguous, moved"),
        pytest.param((4, 3, 2), lambda p, w: p.permute(2, 0, 1).copy_(w.view(4, 3, 2).permute(2, 0, 1)), id="permuted"),
    ],
)
def test_copies_replayed_by_hand_equal_the_loader_itself(shape: tuple[int, ...], write: Write) -> None:
    untouched = torch.full(shape, -1.0)
    trace = traced(write, untouched)
    assert untouched.eq(-1).all()
    assert not trace.opaque
    assert not trace.uncovered
    source, replayed, loaded = torch.arange(24.0), torch.empty(shape), torch.empty(shape)
    for copy in trace.copies:
        target = replayed.as_strided(copy.target.shape, copy.target.strides, copy.target.offset)
        target.copy_(source.as_strided(copy.source.shape, copy.source.strides, copy.source.offset))
    write(loaded, source.view(4, 6))
    assert replayed.equal(loaded)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fills_and_copies_come_in_order_and_are_counted(device: str) -> None:
    def write(p: torch.Tensor, w: torch.Tensor) -> None:
        p.zero_()
        p[:4].copy_(w)

    trace = traced(write, torch.empty(5, 6, device=device))
    assert trace.events == (
        TracedFill(shell="p", target=row_major((5, 6)), value=0.0),
        TracedCopy(shell="p", target=row_major((4, 6)), name="w", source=row_major((4, 6))),
    )
    assert trace.overwritten == {"p": 24}


def test_a_cast_is_recorded_as_one() -> None:
    (copy,) = traced(lambda p, w: p.copy_(w), torch.empty(4, 6, dtype=torch.bfloat16)).copies
    assert copy.is_cast


def test_what_nothing_wrote_is_uncovered() -> None:
    trace = traced(lambda p, w: p[:1].copy_(w[:1]), torch.empty(4, 6))
    assert trace.uncovered == {"p": 18}


def test_names_that_share_memory_count_once_under_the_first() -> None:
    shell = torch.empty(4, 6)
    trace = trace_placement(lambda pairs: [shell.copy_(w) for _, w in pairs], {"a": shell, "b": shell.view(-1)}, SPECS)
    assert [copy.shell for copy in trace.copies] == ["a"]
    assert set(trace.coverage) == {"a"}


OPAQUE: list[tuple[str, Write]] = [
    ("a conversion before the copy", lambda p, w: p.copy_(w.to(torch.float64))),
    ("a clone", lambda p, w: p.copy_(w.clone())),
    ("a real contiguous", lambda p, w: p.copy_(w.t().contiguous().view(4, 6))),
    ("a concatenation", lambda p, w: p.copy_(torch.cat([w[2:], w[:2]]))),
    ("an index", lambda p, w: p.copy_(w[[1, 0, 2, 3]])),
    ("arithmetic", lambda p, w: p.copy_(w * 2)),
    ("addition into the shell", lambda p, w: p.add_(w)),
    ("an indexed write", lambda p, w: p.index_copy_(0, torch.arange(4), w)),
    ("a shell that is read back", lambda p, w: p.copy_(p + 1)),
    ("a checkpoint tensor that is zeroed first", lambda p, w: p.copy_(w.zero_())),
    ("a copy by way of a scratch tensor", lambda p, w: p.copy_(torch.empty(4, 6).copy_(w))),
    ("a fill with a tensor's value", lambda p, w: p.fill_(w[0, 0])),
    ("a checkpoint tensor seen as integers", lambda p, w: p.copy_(w.view(torch.int32))),
    ("negatives without a computation", lambda p, w: p.copy_(torch._neg_view(w))),
    ("a fill of the shell seen as integers", lambda p, w: p.view(torch.int32).fill_(1)),
    ("a fill with an integer that no float is", lambda p, w: p.fill_((1 << 60) + 1)),
    ("a list of copies", lambda p, w: torch._foreach_copy_([p], [w])),
]


@pytest.mark.parametrize(("write"), [pytest.param(write, id=name) for name, write in OPAQUE])
def test_what_cannot_be_known_is_opaque_and_changes_nothing(write: Write) -> None:
    shell = torch.full((4, 6), -1.0)
    trace = traced(write, shell)
    assert set(trace.opaque) == {"p"}
    assert not trace.events
    assert shell.eq(-1).all()


def test_a_list_of_writes_makes_all_of_its_shells_opaque() -> None:
    shells = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)}

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            torch._foreach_copy_(list(shells.values()), [tensor, tensor])

    trace = trace_placement(load, shells, SPECS)
    assert trace.feeds == {"a": {"w"}, "b": {"w"}}
    assert not any(shell.any() for shell in shells.values())


def test_zero_bytes_are_zeros_in_a_dtype_that_has_no_fill() -> None:
    (fill,) = traced(lambda p, w: p.view(torch.uint8).zero_(), torch.empty(4, 6, dtype=torch.float4_e2m1fn_x2)).events
    assert fill == TracedFill(shell="p", target=row_major((4, 6)), value=0)


def test_what_a_view_operator_copied_after_all_is_computed() -> None:
    def write(p: torch.Tensor, w: torch.Tensor) -> None:
        # Without autograd's keys the operator arrives whole, and says of itself that it gives a view.
        with torch.inference_mode():
            p.copy_(w.t().reshape(4, 6))

    with torch.inference_mode():
        shell = torch.empty(4, 6)
    trace = traced(write, shell)
    assert "computed" in trace.opaque["p"]
    assert trace.feeds == {"p": {"w"}}


def test_an_opaque_shell_names_all_that_feeds_it() -> None:
    shell = torch.empty(2, 6)
    specs = [CheckpointSpec(name=name, dtype="float32", shape=(1, 6)) for name in "ab"]

    def load(pairs: Pairs) -> None:
        for name, tensor in pairs:
            shell[:1].copy_(tensor) if name == "a" else shell[1:].copy_(tensor * 2)

    trace = trace_placement(load, {"p": shell}, specs)
    assert trace.feeds == {"p": {"a", "b"}}


def test_a_rebound_parameter_is_opaque() -> None:
    parameter = torch.nn.Parameter(torch.empty(4, 6))

    def load(pairs: Pairs) -> None:
        for _ in pairs:
            parameter.data = torch.zeros(4, 6)

    assert "rebound" in trace_placement(load, {"p": parameter}, SPECS).opaque["p"]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda p, w: p.fill_(w[0, 0].item()), id="item"),
        pytest.param(lambda p, w: bool(w[0, 0]), id="bool"),
    ],
)
def test_a_loader_that_asks_for_values_is_refused_by_name(write: Write) -> None:
    with pytest.raises(PlacementError, match=r"\['w'\]: the loader asks for a value"):
        traced(write, torch.empty(4, 6))


def test_a_write_to_a_checkpoint_tensor_spoils_later_copies_from_it() -> None:
    def write(p: torch.Tensor, w: torch.Tensor) -> None:
        w[0].zero_()
        p.copy_(w)

    trace = traced(write, torch.empty(4, 6))
    assert "computed" in trace.opaque["p"]


def test_regions_of_a_view_start_where_the_view_starts() -> None:
    (copy,) = traced(lambda p, w: p[1:].copy_(w[3, 4:]), torch.empty(3)).copies
    assert copy.target == Region(offset=1, shape=(2,), strides=(1,))
    assert copy.source == Region(offset=22, shape=(2,), strides=(1,))
