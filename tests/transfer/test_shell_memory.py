"""Shells that share storages: flat buffers, aliases and overlaps, as a trace sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import Region
from weightwire.transfer.replay import check_trace
from weightwire.transfer.tracing import LoadWeights, Trace, TracedFill, trace_placement

Pairs = Iterator[tuple[str, Tensor]]
Shells = dict[str, Tensor]
Load = Callable[[Shells, Pairs], object]
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0) + 10}
SPECS = [CheckpointSpec(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def flat(with_gap: int = 0) -> Shells:
    """Two parameters in one buffer, as sharded training keeps them."""
    buffer = torch.full((12 + with_gap,), -1.0)
    return {"a": buffer[:6].view(2, 3), "b": buffer[6 + with_gap :]}


def columns() -> Shells:
    """Two parameters side by side in the rows of one buffer."""
    buffer = torch.full((2, 6), -1.0)
    return {"a": buffer[:, :3], "b": buffer[:, 3:].t()}


def buffer_and_cuts() -> Shells:
    buffer = torch.full((12,), -1.0)
    return {"a": buffer[:6].view(2, 3), "b": buffer[6:], "flat": buffer}


def traced(load: Load, shells: Shells) -> Trace:
    return trace_placement(lambda pairs: load(shells, pairs), shells, SPECS)


def checked(load: Load, build: Callable[[], Shells]) -> Trace:
    def instance() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        shells = build()
        return lambda pairs: load(shells, pairs), shells

    found = check_trace(instance, TENSORS)
    found.check_equal()
    return found.trace


def by_name(shells: Shells, pairs: Pairs) -> None:
    for name, tensor in pairs:
        shells[name].copy_(tensor.view(shells[name].shape))


def test_cuts_of_one_buffer_are_shells_of_their_own() -> None:
    trace = checked(by_name, flat)
    assert [copy.shell for copy in trace.copies] == ["a", "b"]
    assert [copy.target.offset for copy in trace.copies] == [0, 6]
    assert all(found.is_exact for found in trace.coverage.values())


def test_opaque_cut_leaves_the_others_known() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            shells[name].copy_(tensor * 2 if name == "a" else tensor)

    trace = checked(load, flat)
    assert set(trace.opaque) == {"a"}
    assert [copy.shell for copy in trace.copies] == ["b"]
    assert trace.ordinary == {"a"}


def test_each_cut_counts_its_own_elements() -> None:
    trace = traced(lambda shells, pairs: shells["b"][:2].copy_(dict(pairs)["b"][:2]), flat())
    assert trace.uncovered == {"a": 6, "b": 4}


def test_interleaved_cuts_count_their_own_elements_and_are_opaque_together() -> None:
    def twice(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            shells[name].zero_()
            shells[name].copy_(tensor.view(shells[name].shape))
            if name == "a":
                shells["a"][1].zero_()

    trace = checked(twice, columns)
    assert trace.overwritten == {"a": 9, "b": 6}
    assert trace.uncovered == {}
    assert [event.shell for event in trace.events] == ["a", "a", "a", "b", "b"]
    assert set(traced(lambda shells, pairs: shells["b"].add_(1), columns()).opaque) == {"a", "b"}


def test_buffer_that_is_a_shell_besides_its_cuts_is_covered_by_them() -> None:
    trace = checked(lambda shells, pairs: by_name({**shells}, pairs), buffer_and_cuts)
    assert [copy.shell for copy in trace.copies] == ["a", "b"]
    assert all(found.is_exact for found in trace.coverage.values())


def test_cuts_are_opaque_with_their_buffer() -> None:
    trace = checked(
        lambda shells, pairs: shells["flat"].copy_(torch.cat([w.view(-1) for _, w in pairs])), buffer_and_cuts
    )
    assert set(trace.opaque) == {"a", "b", "flat"}
    assert trace.ordinary == {"a", "b"}


def test_fill_of_a_whole_buffer_is_cut_to_its_shells() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        buffer = shells["a"].as_strided((14,), (1,), 0)
        buffer.zero_()
        by_name(shells, pairs)

    trace = checked(load, lambda: flat(with_gap=2))
    assert trace.events[:2] == (
        TracedFill(shell="a", target=Region(offset=0, shape=(6,), strides=(1,)), value=0.0),
        TracedFill(shell="b", target=Region(offset=8, shape=(6,), strides=(1,)), value=0.0),
    )
    assert trace.overwritten == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda buffer, w: buffer[3:9].copy_(w), id="a copy"),
        pytest.param(lambda buffer, w: buffer[1::5].fill_(1), id="a fill with steps"),
    ],
)
def test_write_across_two_cuts_makes_both_opaque(write: Callable[[Tensor, Tensor], object]) -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "b":
                write(shells["a"].as_strided((12,), (1,), 0), tensor)

    trace = checked(load, flat)
    assert set(trace.opaque) == {"a", "b"}
    assert trace.ordinary == {"b"}


def test_write_between_the_cuts_is_nobodys() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for _, tensor in pairs:
            shells["a"].as_strided((2,), (1,), 6).copy_(tensor.view(-1)[:2])

    trace = checked(load, lambda: flat(with_gap=2))
    assert (trace.events, trace.opaque) == ((), {})


def test_memory_between_the_cuts_is_not_known_as_a_source() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            between = shells["a"].as_strided((2,), (1,), 6).copy_(tensor.view(-1)[:2])
            shells[name].view(-1)[:2].copy_(between)

    assert set(checked(load, lambda: flat(with_gap=2)).opaque) == {"a", "b"}


def test_names_of_the_same_elements_are_one_shell() -> None:
    shell = torch.zeros(2, 3)
    trace = traced(lambda shells, pairs: shells["b"].copy_(dict(pairs)["b"]), {"a": shell, "b": shell.view(6)})
    assert [copy.shell for copy in trace.copies] == ["a"]
    assert set(trace.coverage) == {"a"}


def test_names_that_see_other_dtypes_in_the_same_bytes_are_opaque() -> None:
    def build() -> Shells:
        shell = torch.zeros(6)
        return {"a": shell.view(2, 3), "b": shell, "bits": shell.view(torch.int32)}

    assert set(checked(by_name, build).opaque) == {"a", "bits"}


def test_shells_without_elements_are_covered_by_nothing() -> None:
    buffer = torch.zeros(12)
    shells = {"a": buffer[:6].view(2, 3), "none": buffer[3:3], "b": buffer[6:], "alone": torch.zeros(0)}

    def load(shells: Shells, pairs: Pairs) -> None:
        by_name(shells, pairs)
        shells["none"].zero_()
        shells["alone"].zero_()

    trace = traced(load, shells)
    assert list(trace.coverage) == ["a", "none", "b", "alone"]
    assert all(found.is_exact for found in trace.coverage.values())


def test_expanded_shell_is_covered_when_each_element_is_written() -> None:
    shells = {"a": torch.zeros(3).expand(2, 3)}
    trace = traced(lambda shells, pairs: shells["a"][1].copy_(dict(pairs)["a"][1]), shells)
    assert (trace.uncovered, trace.opaque) == ({}, {})
    trace = traced(lambda shells, pairs: shells["a"].copy_(dict(pairs)["a"]), shells)
    assert "overlapping" in trace.opaque["a"]


def test_storage_that_a_parameter_let_go_of_is_nobody_elses() -> None:
    """Addresses recur: a scratch tensor that gets the old one must not be taken for the shell."""
    shells: Shells = {"a": nn.Parameter(torch.zeros(2, 3, device="meta"), requires_grad=False)}

    def load(shells: Shells, pairs: Pairs) -> None:
        (_, tensor), *_ = pairs
        shells["a"].data = torch.empty(2, 3, device="meta")
        for _ in range(64):
            torch.empty(2, 3, device="meta").copy_(tensor)

    trace = traced(load, shells)
    assert trace.events == ()
    assert set(trace.opaque) == {"a"}


def test_each_of_a_thousand_cuts_is_named_and_counted() -> None:
    buffer = torch.zeros(1000, device="meta")
    shells = {str(index): buffer[index : index + 1] for index in range(1000)} | {"flat": buffer}

    def load(shells: Shells, pairs: Pairs) -> None:
        (_, tensor), *_ = pairs
        for index in range(1000):
            shells[str(index)].copy_(tensor[0, :1])

    trace = traced(load, shells)
    assert [copy.shell for copy in trace.copies] == [str(index) for index in range(1000)]
    assert all(found.is_exact for found in trace.coverage.values())


def lazy() -> Tensor:
    return nn.LazyLinear(3).weight


def sparse() -> Tensor:
    return torch.zeros(2, 3).to_sparse()


def wrapped() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2, 3)


@pytest.mark.parametrize("make", [lazy, sparse, wrapped])
def test_shells_whose_writes_cannot_be_seen_are_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(PlacementError, match=r"shell 'odd': is a .*, expected a plain dense tensor") as refused:
        traced(by_name, {"odd": make()})
    assert refused.value.facts == {"tensor": "odd"}
