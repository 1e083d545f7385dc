"""Traces that are done again with real bytes, and the comparison of that with an ordinary load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import row_major
from weightwire.transfer.replay import TraceCheck, check_trace, replay
from weightwire.transfer.tracing import LoadWeights, Trace, TracedFill, trace_placement

Pairs = Iterator[tuple[str, Tensor]]
Shells = dict[str, Tensor]
Load = Callable[[Shells, Pairs], object]
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(3, 2) + 10}


def by_name(shells: Shells, pairs: Pairs) -> None:
    for name, tensor in pairs:
        shells[name].copy_(tensor)


def new_shells(value: float = -1.0) -> Shells:
    return {"a": torch.full((2, 3), value), "b": torch.full((3, 2), value)}


def traced(load: Load, shells: Shells, tensors: Mapping[str, Tensor] = TENSORS) -> Trace:
    specs = [
        CheckpointSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    return trace_placement(lambda pairs: load(shells, pairs), shells, specs)


def checked(
    load: Load, build: Callable[[], Shells] = new_shells, tensors: Mapping[str, Tensor] = TENSORS
) -> TraceCheck:
    def instance() -> tuple[LoadWeights, Shells]:
        shells = build()
        return lambda pairs: load(shells, pairs), shells

    return check_trace(instance, tensors)


# -- replay --


def test_replay_fills_other_shells_from_a_mapping() -> None:
    shells = new_shells()
    replay(traced(by_name, new_shells()), shells, TENSORS)
    assert all(shells[name].equal(tensor) for name, tensor in TENSORS.items())


def test_replay_asks_a_function_once_for_each_run_of_copies() -> None:
    def rows(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            for row, of in zip(shells[name], tensor, strict=True):
                row.copy_(of)

    asked: list[str] = []

    def read(name: str) -> Tensor:
        asked.append(name)
        return TENSORS[name]

    replay(traced(rows, new_shells()), new_shells(), read)
    assert asked == ["a", "b"]


def test_replay_takes_checkpoint_tensors_that_are_views() -> None:
    wide = torch.arange(24.0).view(4, 6)
    views = {"a": wide[1:3, 1:4], "b": wide.t()[2:5, 2:]}
    shells = new_shells()
    replay(traced(by_name, new_shells()), shells, views)
    assert all(shells[name].equal(tensor) for name, tensor in views.items())


def test_replay_leaves_opaque_and_uncovered_elements_alone() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        tensors = dict(pairs)
        shells["a"].add_(tensors["a"])
        shells["b"][1:].copy_(tensors["b"][1:])

    shells = new_shells()
    replay(traced(load, new_shells()), shells, TENSORS)
    assert shells["a"].eq(-1).all()
    assert shells["b"].flatten().tolist() == [-1, -1, 12, 13, 14, 15]


def test_replay_writes_parameters_that_want_gradients() -> None:
    parameters = {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in TENSORS.items()}
    replay(traced(by_name, new_shells()), parameters, TENSORS)
    assert parameters["a"].equal(TENSORS["a"])
    assert parameters["a"].grad_fn is None


def test_replay_rounds_as_the_loader_does() -> None:
    exact = {"a": torch.tensor([1.00390625, 3.0, torch.inf, -0.0, torch.nan, 1e-40]).view(2, 3)}
    shells, loaded = ({"a": torch.zeros(2, 3, dtype=torch.bfloat16)} for _ in range(2))
    replay(traced(by_name, {"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, exact), shells, exact)
    by_name(loaded, iter(exact.items()))
    assert shells["a"].view(torch.int16).equal(loaded["a"].view(torch.int16))


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_is_replayed_byte_for_byte(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(64, dtype=torch.uint8).remainder(2 if name == "bool" else 64)
    tensors = {"a": raw.view(dtype)}

    def load(shells: Shells, pairs: Pairs) -> None:
        for _, tensor in pairs:
            shells["a"].zero_()
            shells["a"][1:].copy_(tensor[1:])

    def build() -> Shells:
        return {"a": torch.full((64,), 1, dtype=torch.uint8).view(dtype)}

    trace = traced(load, build(), tensors)
    assert (trace.opaque, trace.uncovered) == ({}, {})
    shells = build()
    replay(trace, shells, tensors)
    expected = raw.clone()
    expected[: raw.view(dtype).itemsize] = 0
    assert shells["a"].view(torch.uint8).equal(expected)


@pytest.mark.parametrize(
    ("shells", "tensors", "message"),
    [
        pytest.param({"a": torch.zeros(2, 3)}, TENSORS, "shell 'b': the trace writes to it", id="a shell is missing"),
        pytest.param(new_shells(), {"a": TENSORS["a"]}, "tensor 'b': the trace reads it", id="a tensor is missing"),
        pytest.param(new_shells(), {**TENSORS, "a": torch.zeros(5)}, "has 5 elements", id="a tensor is too small"),
        pytest.param({**new_shells(), "a": torch.zeros(5)}, TENSORS, "has 5 elements", id="a shell is too small"),
        pytest.param(new_shells(), {**TENSORS, "a": TENSORS["a"].half()}, "expected the same", id="another dtype"),
    ],
)
def test_replay_refuses_what_was_not_traced(shells: Shells, tensors: Mapping[str, Tensor], message: str) -> None:
    with pytest.raises(PlacementError, match=message) as refused:
        replay(traced(by_name, new_shells()), shells, tensors)
    assert refused.value.facts["tensor"] in ("a", "b")


def test_replay_refuses_a_cast_that_is_none() -> None:
    trace = traced(by_name, {"a": torch.zeros(2, 3, dtype=torch.half)}, {"a": TENSORS["a"]})
    with pytest.raises(PlacementError, match="expected another one"):
        replay(trace, {"a": torch.zeros(2, 3, dtype=torch.half)}, {"a": TENSORS["a"].half()})


# -- check_trace --


def test_check_finds_a_plain_loader_equal() -> None:
    found = checked(by_name)
    found.check_equal()
    assert (found.is_equal, found.given, found.num_shells) == (True, (), 2)
    assert (found.opaque, found.uncovered, found.overwritten) == ({}, {}, {})


def test_check_gives_the_opaque_shells_tensors_to_the_loader_in_the_checkpoints_order() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for _, tensor in pairs:
            shells["a"].mul_(2).add_(tensor.view(2, 3))

    found = checked(load)
    found.check_equal()
    assert found.given == ("a", "b")
    assert set(found.opaque) == {"a"}


def test_check_equalises_what_was_never_initialised_and_keeps_defaults() -> None:
    found = checked(
        lambda shells, pairs: shells["a"][0].copy_(dict(pairs)["a"][0]),
        lambda: {"a": torch.rand(2, 3), "b": torch.ones(3, 2)},
    )
    found.check_equal()
    assert found.uncovered == {"a": 3, "b": 6}


def test_check_compares_nan_and_signed_zeros_by_their_bytes() -> None:
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int32).view(torch.float32)
    checked(by_name, lambda: {"a": torch.zeros(3)}, {"a": odd}).check_equal()


def test_check_reports_copies_that_the_trace_could_not_see() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if tensor.is_meta:
                continue
            shells[name][1:].copy_(tensor[1:])

    found = checked(load)
    assert [(item.name, item.elements, item.index) for item in found.differences] == [
        ("a", 3, (1, 0)),
        ("b", 4, (1, 0)),
    ]
    assert (found.differences[0].ordinary, found.differences[0].replayed) == ("00004040", "000080bf")
    with pytest.raises(PlacementError, match=r"2 of 2 shells.*a \(3 elements, first at \[1, 0\]") as refused:
        found.check_equal()
    assert refused.value.facts == {"tensor": "a", "differences": ["a", "b"]}


def test_check_notices_that_the_second_run_spoils_a_shell() -> None:
    """A loader that remembers its runs writes something else in the second one."""

    def build() -> tuple[LoadWeights, Shells]:
        shells, runs = new_shells(), [0]

        def load(pairs: Pairs) -> None:
            runs[0] += 1
            for name, tensor in pairs:
                shells[name].copy_(tensor) if name == "a" else shells[name].copy_(tensor * 1)
                if runs[0] == 2:
                    shells["a"].zero_()

        return load, shells

    found = check_trace(build, TENSORS)
    assert [difference.name for difference in found.differences] == ["a"]


def test_shell_that_the_second_run_would_leave_half_overwritten_is_loaded_again_as_a_whole() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for shell in shells.values():
            shell.zero_()
        for name, tensor in pairs:
            shells[name].copy_(tensor) if name == "a" else shells[name].copy_(tensor * 1)

    found = checked(load)
    found.check_equal()
    assert set(found.opaque) == {"b"}
    assert found.given == ("a", "b")


def test_shell_whose_later_writes_come_from_other_tensors_is_loaded_again_as_a_whole() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            shells["a"].copy_(tensor.view(2, 3))
            if name == "a":
                shells["b"].copy_(tensor.view(3, 2) * 1)

    found = checked(load)
    found.check_equal()
    assert found.trace.feeds == {"b": {"a"}}
    assert found.given == ("a", "b")


def test_tensor_in_whose_turn_another_is_copied_is_needed_too() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        held: list[Tensor] = []
        for name, tensor in pairs:
            if name == "a":
                held.append(tensor)
                shells["a"].add_(tensor)
            else:
                shells["a"][0].copy_(held[0][1])

    found = checked(load)
    found.check_equal()
    assert found.trace.feeds == {"a": {"a", "b"}}


def test_shell_that_is_read_before_it_is_full_is_not_replayed() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "b":
                shells["b"].copy_(shells["a"].t().clone())
            shells["a"].copy_(tensor.view(2, 3))

    found = checked(load)
    found.check_equal()
    assert found.opaque.keys() == {"a", "b"}
    assert "read back" in found.opaque["a"]


def test_loader_is_run_for_opaque_shells_that_no_tensor_feeds() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        shells["b"].copy_(torch.arange(6.0).view(3, 2))
        for name, tensor in pairs:
            if name == "a":
                shells["a"].copy_(tensor)

    found = checked(load)
    found.check_equal()
    assert (found.given, set(found.opaque)) == ((), {"b"})


def test_constant_of_a_loader_that_collects_its_tensors_needs_all_of_them() -> None:
    def load(shells: Shells, pairs: Pairs) -> None:
        tensors = dict(pairs)
        if "b" in tensors:
            shells["b"].copy_(torch.arange(6.0).view(3, 2))

    found = checked(load)
    found.check_equal()
    assert found.given == ("a", "b")


def test_loader_may_write_to_what_it_is_given() -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    checked(lambda shells, pairs: [shells[name].copy_(tensor.zero_()) for name, tensor in pairs], tensors=tensors)
    assert all(tensors[name].equal(tensor) for name, tensor in TENSORS.items())


def test_check_refuses_shells_without_memory() -> None:
    with pytest.raises(PlacementError, match="shell 'a': lies on device meta, expected memory"):
        checked(by_name, lambda: {"a": torch.empty(2, 3, device="meta")})


def test_check_refuses_instances_that_are_not_alike() -> None:
    sizes = iter((2, 3))
    with pytest.raises(PlacementError, match=r"shell 'a': torch.float32 \[2, 3\] in one instance"):
        checked(by_name, lambda: {"a": torch.zeros(next(sizes), 3)})
    names = iter("ab")
    with pytest.raises(PlacementError, match="shells: 1 and 1 of two instances, expected the same names"):
        checked(by_name, lambda: {next(names): torch.zeros(2, 3)})


def test_check_reports_a_shell_of_another_shape_or_dtype() -> None:
    def build() -> tuple[LoadWeights, Shells]:
        shells: Shells = {"a": nn.Parameter(torch.zeros(2, 3), requires_grad=False)}

        def load(pairs: Pairs) -> None:
            for _, tensor in pairs:
                if not tensor.is_meta:
                    shells["a"].data = tensor.half()

        return load, shells

    (difference,) = check_trace(build, {"a": TENSORS["a"]}).differences
    assert str(difference) == "a (6 elements, dtype is torch.float16 loaded, torch.float32 replayed)"


def test_expanded_and_empty_shells_are_compared_too() -> None:
    def build() -> Shells:
        return {"a": torch.zeros(3).expand(2, 3), "b": torch.zeros(0, 2), "c": torch.zeros(())}

    def load(shells: Shells, pairs: Pairs) -> None:
        tensors = dict(pairs)
        shells["a"][0].copy_(tensors["a"][1])
        shells["b"].copy_(tensors["b"][:0])
        shells["c"].copy_(tensors["a"][0, 2])

    found = checked(load, build)
    found.check_equal()
    assert found.uncovered == {}


def test_fill_with_zero_in_a_trace_made_by_hand() -> None:
    shells = {"a": torch.ones(3, dtype=torch.float8_e8m0fnu)}
    fill = TracedFill(shell="a", target=row_major((3,)), value=0.0)
    trace = Trace(
        events=(fill,), opaque={}, feeds={}, ordinary=frozenset(), coverage={}, used=frozenset()
    )  # fmt: skip
    replay(trace, shells, {})
    assert shells["a"].view(torch.uint8).tolist() == [0, 0, 0]
