"""What loaders do to tensors, and what a trace makes of each: copy, fill, opaque, an error, or nothing at all.

Every pattern is traced on meta and on CPU shells, in and outside of inference mode, and compared with an ordinary load.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.replay import check_trace
from weightwire.transfer.tracing import LoadWeights, Trace, TracedCopy, TracedFill, trace_placement

Pairs = Iterator[tuple[str, Tensor]]
TENSORS = {"s": torch.tensor(7.0), "w": torch.arange(24.0).view(4, 6) + 1, "v": torch.ones(2)}
SPECS = [CheckpointSpec(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in TENSORS.items()]


class Rank(nn.Module):
    """The shells of the patterns: `p` as large as the checkpoint's `w`, and some of other shapes and kinds."""

    low: Tensor
    cell: Tensor
    count: Tensor

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.p = self._shell(4, 6, device=device)
        self.q = self._shell(6, 4, device=device)
        self.tied = self.p
        self.heads = self._shell(4, 3, 2, device=device)
        self.register_buffer("low", torch.zeros(4, 6, dtype=torch.bfloat16, device=device))
        self.register_buffer("cell", torch.zeros((), device=device))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64, device=device))

    def _shell(self, *shape: int, device: str) -> nn.Parameter:
        return nn.Parameter(torch.full(shape, -1.0, device=device), requires_grad=False)

    def shells(self) -> dict[str, Tensor]:
        return dict(self.named_parameters()) | dict(self.named_buffers())


# What a loader does when it is given `w`; the last argument is `s`, a scalar that came before.
Write = Callable[[Rank, Tensor, Tensor], object]


def loader(rank: Rank, write: Write) -> LoadWeights:
    def load(pairs: Pairs) -> None:
        scalar = torch.empty(())
        for name, tensor in pairs:
            if name == "s":
                scalar = tensor
            if name == "w":
                write(rank, tensor, scalar)

    return load


def traced(write: Write, device: str = "cpu") -> Trace:
    rank = Rank(device)
    return trace_placement(loader(rank, write), rank.shells(), SPECS)


def checked(write: Write) -> None:
    """A replay, with the ordinary loader for what is opaque, does what an ordinary load does."""

    def build() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        rank = Rank()
        return loader(rank, write), rank.shells()

    check_trace(build, TENSORS).check_equal()


def everywhere(write: Write) -> Trace:
    """Trace on both devices and in both modes; all four have to be equal, and no byte of a shell may change."""
    found = traced(write)
    # By their texts, since one NaN is not another.
    assert str(traced(write, "meta")) == str(found)
    rank = Rank()
    before = {name: shell.clone() for name, shell in rank.shells().items()}
    shells = rank.shells()
    with torch.inference_mode():
        assert str(trace_placement(loader(rank, write), shells, SPECS)) == str(found)
    assert all(shell.equal(before[name]) for name, shell in shells.items() if name not in found.opaque)
    return found


def each_half(p: Tensor, w: Tensor) -> None:
    for part, half in zip(p.chunk(2), w.chunk(2), strict=True):
        part.copy_(half)


def into_slots(rank: Rank, w: Tensor) -> None:
    """Two heads in the checkpoint, four in the shell."""
    for head in range(4):
        rank.heads[head].copy_(w[2 * (head // 2)].view(3, 2))


def rebind(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    parameter.data = value
    return parameter


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]  # torch's own


def from_scratch(p: Tensor, w: Tensor) -> None:
    scratch = torch.empty(4, 6)
    scratch[:2].copy_(w[:2])
    scratch[2:] = w[2:]
    p.copy_(scratch)


COPIES: list[tuple[str, Write]] = [
    ("copy_", lambda m, w, s: m.p.copy_(w)),
    ("by assignment", lambda m, w, s: m.p.__setitem__(slice(1, 3), w[1:3])),
    ("one row by assignment", lambda m, w, s: m.p.__setitem__(2, w[0])),
    ("with steps", lambda m, w, s: m.p[::2].copy_(w[1::2])),
    ("narrow", lambda m, w, s: m.p.narrow(1, 0, 3).copy_(w.narrow(1, 3, 3))),
    ("chunk", lambda m, w, s: each_half(m.p, w)),
    ("split", lambda m, w, s: m.p.split_with_sizes([1, 3])[1].copy_(w.tensor_split((3,))[0])),
    ("unbind", lambda m, w, s: m.p.unbind()[3].copy_(w.unbind()[1])),
    ("select", lambda m, w, s: m.p.select(1, 2).copy_(w.select(1, 5))),
    ("t", lambda m, w, s: m.q.copy_(w.t())),
    ("T on both sides", lambda m, w, s: m.q.T.copy_(w)),
    ("transpose", lambda m, w, s: m.q.copy_(w.transpose(0, 1))),
    ("permute", lambda m, w, s: m.heads.permute(2, 0, 1).copy_(w.view(4, 3, 2).permute(2, 0, 1))),
    ("movedim and swapaxes", lambda m, w, s: m.heads.movedim(2, 0).copy_(w.view(3, 2, 4).swapaxes(0, 2).movedim(1, 0))),
    ("unflatten and flatten", lambda m, w, s: m.heads.flatten(1).copy_(torch.unflatten(w, 1, (2, 3)).flatten(1))),
    ("squeeze and unsqueeze", lambda m, w, s: m.p.unsqueeze(0).copy_(w.unsqueeze(0).squeeze(0))),
    ("diagonal", lambda m, w, s: m.p.diagonal().copy_(w.diagonal(1)[:4])),
    ("as_strided", lambda m, w, s: m.p.as_strided((2, 2), (7, 1), 3).copy_(w.as_strided((2, 2), (3, 2), 1))),
    ("unfold", lambda m, w, s: m.heads.view(4, 6).unfold(1, 2, 2).copy_(w.unfold(1, 2, 2))),
    ("expand", lambda m, w, s: m.p.copy_(w[1:2].expand(4, 6))),
    ("broadcast", lambda m, w, s: m.p.copy_(w[:, :1])),
    ("a scalar into a slot", lambda m, w, s: m.p[1].copy_(s)),
    ("a scalar into a scalar", lambda m, w, s: m.cell.copy_(s)),
    ("one element into a scalar", lambda m, w, s: m.cell.copy_(w[0, 3])),
    ("a scalar as one element", lambda m, w, s: m.p[0, :1].copy_(s.view(1))),
    ("view", lambda m, w, s: m.p.view(-1).copy_(w.view(24))),
    ("reshape of contiguous data", lambda m, w, s: m.heads.copy_(w.reshape(4, 3, 2))),
    ("contiguous when already so", lambda m, w, s: m.p.copy_(w.contiguous())),
    ("expand_as and view_as", lambda m, w, s: m.p.copy_(w.view_as(m.p).expand_as(m.p))),
    ("bits of equal size", lambda m, w, s: m.p.view(torch.int32).copy_(w.view(torch.int32))),
    ("bits there and back", lambda m, w, s: m.p.copy_(w.view(torch.int32).view(torch.float32))),
    ("with a cast", lambda m, w, s: m.low.copy_(w)),
    ("with a cast to integers", lambda m, w, s: m.count.copy_(w[0, :3])),
    ("moved to a device", lambda m, w, s: m.p.copy_(w.to("cpu"))),
    ("moved to the shell's device", lambda m, w, s: m.p.copy_(w.to(m.p.device).cpu())),
    ("to the dtype that it has", lambda m, w, s: m.p.copy_(w.to(torch.float32).float())),
    ("to another tensor's dtype and device", lambda m, w, s: m.p.copy_(w.to(m.p))),
    ("type_as and a view of it", lambda m, w, s: m.p[1:].copy_(w.type_as(m.p)[1:])),
    ("through .data and detach", lambda m, w, s: m.p.data.copy_(w.detach().data)),
    ("non-blocking", lambda m, w, s: m.p.copy_(w, non_blocking=True)),
    ("a parameter made of the checkpoint tensor", lambda m, w, s: m.p.copy_(nn.Parameter(w))),
    ("one tensor to many destinations", lambda m, w, s: [m.p.copy_(w), m.q.copy_(w.t()), m.low.copy_(w)]),
    ("with something sparse besides", lambda m, w, s: [torch.eye(3).to_sparse().coalesce(), m.p.copy_(w)]),
    ("replicated heads", lambda m, w, s: into_slots(m, w)),
    ("a tied parameter", lambda m, w, s: m.tied.copy_(w)),
]  # fmt: skip
FILLS: list[tuple[str, Write]] = [
    ("fill_", lambda m, w, s: m.p[3:].fill_(2.5)),
    ("zero_", lambda m, w, s: m.q.zero_()),
    ("by assignment", lambda m, w, s: m.p.__setitem__((slice(None), 5), 3)),
    ("not a number, and infinity", lambda m, w, s: [m.p.fill_(float("nan")), m.p[0].fill_(float("-inf"))]),
    ("a slice by assignment", lambda m, w, s: m.low.__setitem__(slice(2, None), 0.1)),
    ("a scalar of the loader", lambda m, w, s: m.p[1:].copy_(torch.tensor(2.0))),
    ("with a scalar of the loader", lambda m, w, s: m.count.fill_(torch.tensor(2))),
    ("negative zero", lambda m, w, s: m.low.fill_(-0.0)),
    ("an integer", lambda m, w, s: m.count.fill_(-(1 << 40))),
    ("a truth value", lambda m, w, s: m.count[1:].fill_(True)),
    ("a fraction into integers", lambda m, w, s: m.count.fill_(-1.5)),
    ("zero bytes", lambda m, w, s: m.p.view(torch.int32)[:2].zero_()),
    ("nn.init.zeros_", lambda m, w, s: nn.init.zeros_(m.p)),
    ("nn.init.constant_", lambda m, w, s: nn.init.constant_(m.cell, 4.0)),
]
BOTH: list[tuple[str, Write]] = [
    ("padding first", lambda m, w, s: [m.p.zero_(), m.p[:2].copy_(w[:2])]),
    ("padding last", lambda m, w, s: [m.p.copy_(w), m.p[2:].fill_(0)]),
    ("padding, values, padding", lambda m, w, s: [m.p.fill_(1), m.p[1:].copy_(w[1:]), m.p[3].zero_()]),
]
OPAQUE: list[tuple[str, Write]] = [
    ("converted first", lambda m, w, s: m.low.copy_(w.to(torch.bfloat16))),
    ("moved and converted", lambda m, w, s: m.low.copy_(w.to("cpu", torch.bfloat16))),
    ("clone", lambda m, w, s: m.p.copy_(w.clone())),
    ("a real contiguous", lambda m, w, s: m.q.copy_(w.t().contiguous())),
    ("reshape that copies", lambda m, w, s: m.p.copy_(w.t().reshape(4, 6))),
    ("cat", lambda m, w, s: m.p.copy_(torch.cat([w[2:], w[:2]]))),
    ("stack", lambda m, w, s: m.p.copy_(torch.stack([w[3], w[1], w[2], w[0]]))),
    ("index", lambda m, w, s: m.p.copy_(w[[1, 0, 3, 2]])),
    ("index_select", lambda m, w, s: m.p.copy_(w.index_select(0, torch.tensor([1, 0, 3, 2])))),
    ("repeat_interleave", lambda m, w, s: m.p.copy_(w[:2].repeat_interleave(2, dim=0))),
    ("repeat", lambda m, w, s: m.p.copy_(w[:2].repeat(2, 1))),
    ("tile and flip", lambda m, w, s: m.p.copy_(w.flip(0).tile(1, 1))),
    ("roll", lambda m, w, s: m.p.copy_(w.roll(1, 0))),
    ("pad", lambda m, w, s: m.p.copy_(F.pad(w[:3], (0, 0, 0, 1)))),
    ("where", lambda m, w, s: m.p.copy_(torch.where(torch.tensor(True), w, 0.0))),
    ("arithmetic", lambda m, w, s: m.p.copy_(w + 1)),
    ("a function of exp", lambda m, w, s: m.p.copy_(-torch.exp(w.float()))),
    ("einsum", lambda m, w, s: m.p.copy_(torch.einsum("ij->ij", w * 1))),
    ("matmul", lambda m, w, s: m.p.copy_(w @ torch.eye(6))),
    ("rearranged with a reshape", lambda m, w, s: m.p.copy_(w.view(2, 2, 6).transpose(0, 1).reshape(4, 6))),
    ("add_", lambda m, w, s: m.p.add_(w)),
    ("mul_ behind the copy", lambda m, w, s: m.p.copy_(w).mul_(2)),
    ("division by assignment", lambda m, w, s: m.p.copy_(w).__itruediv__(2)),
    ("index_copy_", lambda m, w, s: m.p.index_copy_(0, torch.arange(4), w)),
    ("index by assignment", lambda m, w, s: m.p.__setitem__([0, 1], w[:2])),
    ("a mask by assignment", lambda m, w, s: m.p.__setitem__(torch.tensor([True, False, True, False]), s)),
    ("masked_fill_", lambda m, w, s: m.p.masked_fill_(torch.tensor(True), 1.0)),
    ("scatter_", lambda m, w, s: m.p.scatter_(0, torch.zeros(4, 6, dtype=torch.int64), w)),
    ("an output argument", lambda m, w, s: torch.add(w, 1, out=m.p)),
    ("several output arguments", lambda m, w, s: torch._foreach_copy_([m.p, m.low], [w, w])),
    ("lerp_ of a shell that is part of a copy", lambda m, w, s: m.p[:1].copy_(w[:1]).lerp_(w[1:2], 0.5)),
    ("read back", lambda m, w, s: m.p.copy_(w).copy_(-m.p)),
    ("read back with the checkpoint tensor", lambda m, w, s: m.p.copy_(m.p + w)),
    ("from one shell to another", lambda m, w, s: [m.p.copy_(w), m.q.copy_(m.p.t())]),
    ("from a copy of another shell", lambda m, w, s: [m.p.copy_(w), m.q.copy_(m.p.clone().t())]),
    ("in place on the checkpoint tensor", lambda m, w, s: m.p.copy_(w.zero_())),
    ("in place on a part of it", lambda m, w, s: [w[3].mul_(2), m.p.copy_(w)]),
    ("in place through a view", lambda m, w, s: [w.view(-1)[:3].add_(1), m.p[:1].copy_(w[:1])]),
    ("in place on what was moved", lambda m, w, s: m.p.copy_(w.to("cpu", copy=True).mul_(2))),
    ("in place with another one", lambda m, w, s: [w[0].copy_(s), m.p.copy_(w)]),
    ("transposed in place", lambda m, w, s: m.q.copy_(w.t_())),
    ("resized in place", lambda m, w, s: m.p[:2].copy_(w.resize_(2, 6))),
    ("by way of a scratch tensor", lambda m, w, s: from_scratch(m.p, w)),
    ("by way of an empty_like", lambda m, w, s: m.p.copy_(torch.empty_like(w).copy_(w))),
    ("by way of a new_empty on a device", lambda m, w, s: m.p.copy_(w.new_empty(4, 6, device="cpu").copy_(w))),
    ("a fill with the value of a tensor", lambda m, w, s: m.p.fill_(s)),
    ("bits of another dtype", lambda m, w, s: m.count.view(torch.int32)[:4].copy_(w[0, :4].view(torch.int32))),
    ("values that are bits", lambda m, w, s: m.p.copy_(w.view(torch.int32))),
    ("negatives without a computation", lambda m, w, s: m.p.copy_(torch._neg_view(w))),
    ("a constant of the loader", lambda m, w, s: m.p.copy_(torch.full((4, 6), 5.0))),
    ("something sparse", lambda m, w, s: m.p[:, :4].copy_(torch.eye(4).to_sparse().to_dense())),
    ("a list of numbers", lambda m, w, s: m.count.copy_(torch.tensor([1, 2, 3]))),
    ("set_", lambda m, w, s: m.p.set_(w.untyped_storage(), 0, (4, 6), (6, 1))),
    ("copied, then seen from another side", lambda m, w, s: [m.p.copy_(w), rebind(m.p, m.p.data.t())]),
    ("swapped", lambda m, w, s: swap(m.p, nn.Parameter(w, requires_grad=False))),
    ("the storage's bytes", lambda m, w, s: m.p.untyped_storage().copy_(w.untyped_storage())),
]  # fmt: skip
REBOUND: list[tuple[str, Write]] = [
    ("to the checkpoint tensor", lambda m, w, s: rebind(m.p, w)),
    ("to a view of it", lambda m, w, s: rebind(m.p, w.t())),
    ("to what was computed", lambda m, w, s: rebind(m.p, w * 2)),
    ("and then copied", lambda m, w, s: rebind(m.p, torch.empty_like(w)).copy_(w)),
    ("and then filled", lambda m, w, s: rebind(m.p, torch.empty_like(w)).fill_(3)),
]
ERRORS: list[tuple[str, Write]] = [
    ("item", lambda m, w, s: m.p.fill_(s.item())),
    ("float", lambda m, w, s: m.p.fill_(float(s))),
    ("bool", lambda m, w, s: bool(s > 3)),
    ("bool of a computation", lambda m, w, s: bool((w[0] == w[1]).all())),
    ("equal", lambda m, w, s: torch.equal(w, w)),
    ("allclose", lambda m, w, s: torch.allclose(w, w)),
    ("tolist", lambda m, w, s: w.tolist()),
    ("numpy", lambda m, w, s: w.numpy()),
    ("numpy on the CPU", lambda m, w, s: w.cpu().numpy()),
    ("nonzero", lambda m, w, s: w.nonzero()),
    ("a mask made of values", lambda m, w, s: m.p.copy_(w[w > 3])),
    ("bincount", lambda m, w, s: torch.bincount(w[0].long())),
    ("a value of a shell that was written", lambda m, w, s: [m.cell.copy_(s), m.cell.item()]),
    ("a value of a shell that will be written", lambda m, w, s: [m.count[0].item(), m.count.zero_()]),
    ("a value computed from a shell", lambda m, w, s: (m.count + 1).sum().item()),
]


def cases(table: list[tuple[str, Write]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("write", [pytest.param(write, id=name) for name, write in table])


@cases(COPIES)
def test_views_and_copies_are_recorded(write: Write) -> None:
    trace = everywhere(write)
    assert not trace.opaque
    assert trace.copies == trace.events
    assert trace.copies
    checked(write)


@cases(FILLS)
def test_constants_are_recorded(write: Write) -> None:
    trace = everywhere(write)
    assert not trace.opaque
    assert trace.events
    assert not trace.copies
    checked(write)


@cases(BOTH)
def test_constants_and_copies_are_recorded_in_order_and_the_later_counts(write: Write) -> None:
    trace = everywhere(write)
    assert not trace.opaque
    assert {isinstance(event, TracedCopy) for event in trace.events} == {True, False}
    assert set(trace.overwritten) == {"p"}
    checked(write)


@cases(OPAQUE)
def test_what_cannot_be_known_is_opaque(write: Write) -> None:
    trace = everywhere(write)
    assert trace.opaque
    assert trace.opaque.keys() == trace.feeds.keys()
    checked(write)


@cases(REBOUND)
def test_rebound_parameter_is_opaque_on_meta_and_an_error_elsewhere(write: Write) -> None:
    trace = traced(write, "meta")
    assert "rebound" in trace.opaque["p"]
    assert trace.feeds["p"] >= {"w"}
    with pytest.raises(PlacementError, match="incompatible tensor type"):
        traced(write)


def test_rebound_parameter_has_its_memory_again_after_the_trace() -> None:
    rank = Rank("meta")
    before = rank.p.untyped_storage()._cdata
    trace_placement(loader(rank, lambda m, w, s: rebind(m.p, w.t())), rank.shells(), SPECS)
    assert rank.p.untyped_storage()._cdata == before
    assert rank.p.shape == (4, 6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameter_rebound_to_something_unknown_needs_everything(device: str) -> None:
    def write(rank: Rank, w: Tensor, s: Tensor) -> None:
        rank.p.data = torch.zeros(4, 6, device=device)

    assert traced(write, device).ordinary == {"s", "w", "v"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_number_that_is_changed_is_no_constant_where_it_has_no_value(device: str) -> None:
    def write(rank: Rank, w: Tensor, s: Tensor) -> None:
        rank.p.copy_(torch.scalar_tensor(1.0, device=device).add_(1))

    trace = traced(write, device)
    assert [event.value for event in trace.events if isinstance(event, TracedFill)] == [2.0] * (device == "cpu")
    assert set(trace.opaque) == ({"p"} if device == "meta" else set())


@cases(ERRORS)
def test_loader_that_asks_for_values_is_refused(write: Write) -> None:
    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        with mode, pytest.raises(PlacementError) as refused:
            traced(write)
        assert refused.value.facts["tensor"] is not None or "expected" in str(refused.value)


def test_values_of_a_shell_that_nothing_writes_may_be_read() -> None:
    trace = traced(lambda m, w, s: m.p[int(m.count[1].item())].copy_(w[0]))
    assert [copy.target.offset for copy in trace.copies] == [0]


def test_writes_to_no_elements_are_none() -> None:
    trace = everywhere(lambda m, w, s: [m.p[4:].copy_(w[:0]), m.p[4:].copy_(w[:0] + 1), m.p[:, 6:].zero_()])
    assert (trace.events, trace.opaque) == ((), {})


def test_copy_of_a_shell_is_not_the_shell() -> None:
    def write(rank: Rank, w: Tensor, s: Tensor) -> None:
        rank.p.to("cpu", copy=True).copy_(w)
        rank.p.clone().zero_()

    trace = everywhere(write)
    assert (trace.events, trace.opaque) == ((), {})
    checked(write)


def in_a_thread(write: Callable[[], object]) -> None:
    def run() -> None:
        # On CPU shells torch finds no data to copy; on meta it does not even notice.
        with contextlib.suppress(RuntimeError):
            write()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_copy_in_another_thread_is_seen_by_nobody_and_uncovered() -> None:
    def write(rank: Rank, w: Tensor, s: Tensor) -> None:
        in_a_thread(lambda: rank.p.copy_(w))

    for device in ("cpu", "meta"):
        trace = traced(write, device)
        assert not trace.events
        assert not trace.opaque
        assert trace.uncovered["p"] == 24

    def build() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        rank = Rank()
        return loader(rank, write), rank.shells()

    assert [difference.name for difference in check_trace(build, TENSORS).differences] == ["p"]


class Live(Mapping[str, Tensor]):
    """The parameters that a module has now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getitem__(self, name: str) -> Tensor:
        return self.module.get_parameter(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.module.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def replaced(rank: Rank, w: Tensor, s: Tensor) -> None:
    rank.p = nn.Parameter(w, requires_grad=False)


def test_another_parameter_in_the_same_place_leaves_the_first_one_uncovered() -> None:
    assert traced(replaced).uncovered["p"] == 24


def test_another_parameter_in_the_same_place_is_opaque_to_who_looks_again() -> None:
    def build() -> tuple[LoadWeights, Mapping[str, Tensor]]:
        rank = Rank()
        del rank.tied
        return loader(rank, replaced), Live(rank)

    found = check_trace(build, TENSORS)
    found.check_equal()
    assert set(found.opaque) == {"p"}
    assert found.given == ("w",)
