from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import PlacementError, TopologyError
from weightwire.transfer.loading.expert_loaders import (
    ExpertLoader,
    ExpertMatrix,
    Partition,
    check_one_rule,
    needs_padded_load,
    padded_width,
    padding_multiple,
)
from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName, SlotId
from weightwire.transfer.ranks import ALONE, ExpertPlacement, GroupRank

NAN = float("nan")
ONE = ExpertPlacement.equal(1, 1)


def loader_of_one(
    matrix: ExpertMatrix, intermediate: int, tensor: GroupRank = ALONE, *, width: int | None = None
) -> ExpertLoader:
    """Of a model with one expert."""
    return ExpertLoader(
        matrix=matrix,
        placement=ONE,
        expert=ALONE,
        tensor=tensor,
        intermediate=intermediate,
        width=intermediate // tensor.size if width is None else width,
    )


def poisoned(loader: ExpertLoader, hidden: int) -> torch.Tensor:
    return torch.full(loader.shell_shape(hidden), NAN, dtype=torch.float64)


def arange(*shape: int, first: int = 1) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@dataclass(frozen=True, slots=True)
class Experts:
    """Whole matrices of all experts, as a checkpoint has them: gate and up `[I, H]`, down `[H, I]`."""

    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor

    @classmethod
    def numbered(cls, experts: int, intermediate: int, hidden: int) -> Experts:
        """Each element its own number, none of them 0."""
        count = experts * intermediate * hidden
        shape = (experts, intermediate, hidden)
        return cls(
            arange(*shape), arange(*shape, first=count + 1), arange(experts, hidden, intermediate, first=2 * count + 1)
        )

    @classmethod
    def random(cls, experts: int, intermediate: int, hidden: int) -> Experts:
        """Small integers: sums and products of them are exact, in any order."""
        make = torch.Generator().manual_seed(7)
        shape = (experts, intermediate, hidden)
        w1, w3, w2 = (torch.randint(-4, 5, shape, generator=make).double() for _ in range(3))
        return cls(w1, w3, w2.transpose(1, 2).contiguous())

    def fill(self, loader: ExpertLoader, shell: torch.Tensor) -> torch.Tensor:
        """Load every expert, one matrix after the other."""
        for part, expert in itertools.product(loader.parts, range(len(self.w1))):
            tensors = {"w1": self.w1, "w2": self.w2, "w3": self.w3}
            loader.load(shell, tensors[part][expert], ExpertPart(expert, part), name="experts")
        return shell


def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU, rounded to 1/64: everything behind it is exact again, so that results compare bit for bit."""
    return torch.round(torch.nn.functional.silu(gate) * 64) / 64 * up


def reference(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Sum over all experts, on whole matrices."""
    return sum(
        (activation(x @ w1.T, x @ w3.T) @ w2.T for w1, w3, w2 in zip(experts.w1, experts.w3, experts.w2, strict=True)),
        start=torch.zeros_like(x),
    )


def grouped_product(w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, *, up_first: bool = False) -> torch.Tensor:
    """What the kernel of one rank makes of its shells."""
    total = torch.zeros_like(x)
    for first, second in zip(w13, w2, strict=True):
        gate, up = (x @ first.T).chunk(2, dim=-1)
        total += activation(up, gate) @ second.T if up_first else activation(gate, up) @ second.T
    return total


# L60
def test_shapes_of_grouped_shells() -> None:
    w13 = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(4, 2),
        expert=GroupRank(0, 2),
        tensor=GroupRank(0, 2),
        intermediate=4,
        width=2,
    )
    w2 = w13.for_matrix("w2")
    assert (w13.shell_shape(2), w2.shell_shape(2)) == ((2, 4, 2), (2, 2, 2))
    assert w13.shell_shape(5) == (2, 4, 5)
    assert w2.shell_shape(5) == (2, 5, 2)
    assert replace(w13, transposed=True).shell_shape(5) == (2, 5, 4)
    assert replace(w2, transposed=True).shell_shape(5) == (2, 2, 5)


# L106
def test_expert_is_chosen_before_its_axis_is_cut() -> None:
    w13 = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(4, 2),
        expert=GroupRank(1, 2),
        tensor=GroupRank(0, 2),
        intermediate=4,
        width=2,
    )
    w2, experts = w13.for_matrix("w2"), Experts.numbered(4, 4, 2)
    shells = experts.fill(w13, poisoned(w13, 2)), experts.fill(w2, poisoned(w2, 2))
    assert torch.equal(shells[0][1, 0:2], experts.w1[3, 0:2])
    assert torch.equal(shells[0][1, 2:4], experts.w3[3, 0:2])
    assert torch.equal(shells[1][1], experts.w2[3][:, 0:2])
    assert w13.slots == tuple(ExpertPart(index, part) for index in range(2) for part in w13.parts)
    assert w2.slots == (ExpertPart(0, "w2"), ExpertPart(1, "w2"))


def test_expert_of_another_rank_leaves_the_shell_alone() -> None:
    loader = ExpertLoader(
        matrix="w2",
        placement=ExpertPlacement.equal(8, 4),
        expert=GroupRank(2, 4),
        tensor=ALONE,
        intermediate=2,
        width=2,
    )
    shell = torch.zeros(2, 1, 2)
    assert loader.load(shell, torch.ones(1, 2), ExpertPart(3, "w2"), name="experts") == ()
    assert not shell.any()
    assert loader.load(shell, torch.ones(1, 2), ExpertPart(5, "w2"), name="experts") == (ExpertPart(1, "w2"),)
    assert shell.flatten().tolist() == [0, 0, 1, 1]


# L64
def test_expert_is_written_to_every_slot_that_holds_it() -> None:
    placement = ExpertPlacement.from_map(4, [[0, 1, 2], [3, 0, 1]])
    experts, shells, filled = Experts.numbered(4, 2, 2), [], []
    for rank in range(2):
        loader = ExpertLoader(
            matrix="w13", placement=placement, expert=GroupRank(rank, 2), tensor=ALONE, intermediate=2, width=2
        )
        shells.append(experts.fill(loader, poisoned(loader, 2)))
        filled.append(loader.load(shells[-1], experts.w1[0], ExpertPart(0, "w1"), name="experts"))
    assert filled == [(ExpertPart(0, "w1"),), (ExpertPart(1, "w1"),)]
    for shell, logical in zip(shells, placement.ranks, strict=True):
        assert torch.equal(shell, torch.cat([experts.w1, experts.w3], dim=1)[list(logical)])


# L64
def test_replicas_on_one_rank_are_both_written() -> None:
    loader = ExpertLoader(
        matrix="w2",
        placement=ExpertPlacement.from_map(2, [[1, 0, 1]]),
        expert=ALONE,
        tensor=ALONE,
        intermediate=1,
        width=1,
    )
    shell = torch.full((3, 1, 1), NAN)
    both = (ExpertPart(0, "w2"), ExpertPart(2, "w2"))
    assert loader.load(shell, torch.ones(1, 1), ExpertPart(1, "w2"), name="experts") == both
    assert shell[[0, 2]].flatten().tolist() == [1, 1]


# L107
def test_up_takes_the_second_half_and_an_ungated_matrix_all() -> None:
    gated = loader_of_one("w13", 2)
    shell = poisoned(gated, 1)
    gated.load(shell, arange(2, 1), ExpertPart(0, "w3"), name="experts")
    assert shell[0, 2:4].flatten().tolist() == [1, 2]
    assert shell[0, :2].isnan().all()
    ungated = replace(gated, gated=False)
    shell = poisoned(ungated, 1)
    assert shell.shape == (1, 2, 1)
    assert ungated.load(shell, arange(2, 1), ExpertPart(0, "w1"), name="experts") == (ExpertPart(0, "w1"),)
    assert shell.flatten().tolist() == [1, 2]
    assert ungated.slots == (ExpertPart(0, "w1"),)
    with pytest.raises(PlacementError, match=r"slot 0\.w3 is not one of its slots \(w1\)"):
        ungated.load(shell, arange(2, 1), ExpertPart(0, "w3"), name="experts")


# L108, D07
def test_order_of_gate_and_up_has_to_be_the_kernels() -> None:
    experts, x = Experts.random(1, 4, 3), arange(2, 3)
    expected = reference(experts, x)
    w2 = experts.fill(loader_of_one("w2", 4), poisoned(loader_of_one("w2", 4), 3))
    plain = loader_of_one("w13", 4)
    switched = replace(plain, up_first=True)
    w13 = {loader.up_first: experts.fill(loader, poisoned(loader, 3)) for loader in (plain, switched)}
    assert torch.equal(grouped_product(w13[False], w2, x), expected)
    assert torch.equal(grouped_product(w13[True], w2, x, up_first=True), expected)
    assert not torch.equal(grouped_product(w13[True], w2, x), expected)
    # Once means once: the switched shell is the other one with its halves swapped.
    assert torch.equal(w13[True], w13[False].roll(4, dims=1))


# L108
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda loader: replace(loader, up_first=True), id="order of gate and up"),
        pytest.param(lambda loader: replace(loader, partition="stride"), id="partition rule"),
        pytest.param(lambda loader: replace(loader, transposed=True), id="transposition"),
        pytest.param(lambda loader: replace(loader, width=5), id="padding"),
        pytest.param(lambda loader: replace(loader, tensor=GroupRank(1, 2)), id="tensor rank"),
        pytest.param(
            lambda loader: replace(loader, placement=ExpertPlacement.from_map(2, [[1, 0]])), id="placement map"
        ),
    ],
)
def test_what_decides_the_layout_is_in_the_fingerprint(change: Callable[[ExpertLoader], ExpertLoader]) -> None:
    loader = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(2, 1),
        expert=ALONE,
        tensor=GroupRank(0, 2),
        intermediate=6,
        width=4,
    )
    assert change(loader).fingerprint_facts() != loader.fingerprint_facts()


def test_partition_rules_without_padding_are_one_layout() -> None:
    loader = loader_of_one("w13", 6, GroupRank(1, 2))
    assert replace(loader, partition="stride").fingerprint_facts() == loader.fingerprint_facts()


# L109
@pytest.mark.parametrize(("cpu", "trtllm", "padded"), list(itertools.product([False, True], repeat=3)))
def test_padded_load_is_for_three_cases(cpu: bool, trtllm: bool, padded: bool) -> None:
    expected = (cpu, trtllm, padded) != (False, False, False)
    assert needs_padded_load(is_cpu=cpu, is_trtllm=trtllm, is_aiter_padded=padded) is expected


# L109
def test_padding_multiples_of_trtllm() -> None:
    assert padding_multiple(is_gated_nvfp4=False) == 128
    assert padding_multiple(is_gated_nvfp4=True) == 64
    assert padded_width(192, GroupRank(0, 2), multiple=128) == 128
    assert padded_width(6, GroupRank(0, 4)) == 2


# L110
@pytest.mark.parametrize(
    ("partition", "taken"),
    [
        pytest.param("stride", [(0, 128), (128, 192)], id="stride"),
        pytest.param("even", [(0, 96), (96, 192)], id="even"),
    ],
)
def test_partition_rules_of_padded_shells(partition: Partition, taken: Sequence[tuple[int, int]]) -> None:
    for rank, (begin, end) in enumerate(taken):
        loader = replace(loader_of_one("w2", 192, GroupRank(rank, 2), width=128), partition=partition)
        shell = poisoned(loader, 1)
        loader.load(shell, arange(1, 192, first=0), ExpertPart(0, "w2"), name="experts")
        assert shell.flatten().tolist() == [*range(begin, end), *[0] * (128 - end + begin)]


# L110, D07
@pytest.mark.parametrize("first", ["stride", "even"])
@pytest.mark.parametrize("second", ["stride", "even"])
def test_partition_rule_is_one_for_a_layer(first: Partition, second: Partition) -> None:
    experts, x = Experts.random(1, 6, 3), arange(2, 3)
    total = torch.zeros_like(x)
    w13 = replace(loader_of_one("w13", 6, GroupRank(0, 2), width=4), partition=first)
    w2 = replace(w13.for_matrix("w2"), partition=second)
    for rank in range(2):
        w13, w2 = (replace(loader, tensor=GroupRank(rank, 2)) for loader in (w13, w2))
        total += grouped_product(experts.fill(w13, poisoned(w13, 3)), experts.fill(w2, poisoned(w2, 3)), x)
    assert torch.equal(total, reference(experts, x)) is (first == second)
    if first == second:
        check_one_rule([w13, w2], layer="layers.0")
    else:
        with pytest.raises(TopologyError, match=r"layer 'layers\.0': its expert shells have 2 partition rules"):
            check_one_rule([w13, w2], layer="layers.0")


# L111, C7
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_padding_of_both_matrices_is_zeroed(transposed: bool) -> None:
    experts, x = Experts.random(1, 3, 2), arange(2, 2)
    w13 = replace(loader_of_one("w13", 3, width=4), transposed=transposed)
    w2 = w13.for_matrix("w2")
    first, second = experts.fill(w13, poisoned(w13, 2)), experts.fill(w2, poisoned(w2, 2))
    assert not first.isnan().any()
    assert not second.isnan().any()
    if transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    assert not first[0, [3, 7]].any()
    assert not second[0, :, 3].any()
    assert torch.equal(grouped_product(first, second, x), reference(experts, x))


# L112
def test_transposed_shell_holds_the_transposed_slice() -> None:
    loader = replace(loader_of_one("w13", 4, GroupRank(1, 2)), transposed=True, gated=False)
    shell, w1 = poisoned(loader, 2), arange(4, 2)
    loader.load(shell, w1, ExpertPart(0, "w1"), name="experts")
    assert torch.equal(shell[0], w1[2:4].T)
    down = loader.for_matrix("w2")
    shell, w2 = poisoned(down, 3), arange(3, 4)
    down.load(shell, w2, ExpertPart(0, "w2"), name="experts")
    assert torch.equal(shell[0], w2[:, 2:4].T)


# L112
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_biases_are_cut_and_never_transposed(transposed: bool) -> None:
    loader = replace(loader_of_one("w13", 4, GroupRank(1, 2), width=3), transposed=transposed)
    shell = torch.full((1, 6), NAN)
    loader.load(shell, torch.arange(1.0, 5.0), ExpertPart(0, "w1"), name="experts")
    loader.load(shell, torch.arange(11.0, 15.0), ExpertPart(0, "w3"), name="experts")
    assert shell.flatten().tolist() == [3, 4, 0, 13, 14, 0]
    shell = torch.full((1, 5), NAN)
    loader.for_matrix("w2").load(shell, torch.arange(5.0), ExpertPart(0, "w2"), name="experts")
    assert shell.flatten().tolist() == [0, 1, 2, 3, 4]


# L113
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_presharded_experts_are_copied_whole(matrix: ExpertMatrix, transposed: bool) -> None:
    loader = replace(loader_of_one(matrix, 4, GroupRank(1, 2)), presharded=True, transposed=transposed, gated=False)
    shell, local = poisoned(loader, 2), arange(2, 2)
    loader.load(shell, local, ExpertPart(0, loader.parts[0]), name="experts")
    assert torch.equal(shell[0], local)
    with pytest.raises(PlacementError, match="is expected to be 2"):
        loader.load(shell, arange(4, 4), ExpertPart(0, loader.parts[0]), name="experts")


# L113
def test_presharded_gate_and_up_go_to_their_halves() -> None:
    loader = replace(loader_of_one("w13", 4, GroupRank(1, 2)), presharded=True, transposed=True, up_first=True)
    shell = poisoned(loader, 3)
    loader.load(shell, arange(3, 2), ExpertPart(0, "w1"), name="experts")
    loader.load(shell, arange(3, 2, first=11), ExpertPart(0, "w3"), name="experts")
    assert torch.equal(shell[0], torch.cat([arange(3, 2, first=11), arange(3, 2)], dim=1))


# L106, L107
def test_fused_tensors_of_all_experts_are_split_expert_by_expert() -> None:
    tensor = arange(2, 4, 3)
    loader = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(2, 2),
        expert=GroupRank(1, 2),
        tensor=ALONE,
        intermediate=2,
        width=2,
    )
    shell = poisoned(loader, 3)
    assert loader.load(shell, tensor, None, name="experts") == loader.slots
    assert torch.equal(shell[0, 0:2], tensor[1, 0:2])
    assert torch.equal(shell[0, 2:4], tensor[1, 2:4])
    cut = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(2, 1),
        expert=ALONE,
        tensor=GroupRank(1, 2),
        intermediate=2,
        width=1,
        up_first=True,
    )
    shell = poisoned(cut, 3)
    cut.load(shell, tensor, None, name="experts")
    assert torch.equal(shell, tensor[:, [3, 1]])


@pytest.mark.parametrize(
    ("slot", "shape", "message"),
    [
        pytest.param(ExpertPart(4, "w1"), (4, 2), "expert 4 is none of the model's 4", id="no such expert"),
        pytest.param(ExpertPart(-1, "w1"), (4, 2), "expert -1 is none of the model's 4", id="a negative expert"),
        pytest.param(ExpertPart(3, "w2"), (2, 4), r"slot 3\.w2 is not one of its slots \(w1, w3\)", id="other matrix"),
        pytest.param("q", (4, 2), "slot q is not one of its slots", id="slot of another loader"),
        pytest.param(ExpertPart(3, "w1"), (3, 2), "axis 0 of the weight is expected to be 4", id="other size"),
        pytest.param(ExpertPart(3, "w1"), (4, 3), "axis 1 differs, and only axis 0 is cut", id="other hidden size"),
        pytest.param(None, (3, 8, 2), "axis 0 of the weight is expected to count 4 experts", id="expert missing"),
        pytest.param(None, (4, 7, 2), "axis 0 of the weight is expected to be 8", id="odd middle axis"),
        pytest.param(None, (), "is expected to count 4 experts", id="a scalar"),
    ],
)
def test_expert_loader_refuses_before_it_writes(slot: SlotId, shape: tuple[int, ...], message: str) -> None:
    loader = ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.equal(4, 2),
        expert=GroupRank(1, 2),
        tensor=GroupRank(1, 2),
        intermediate=4,
        width=2,
    )
    shell = torch.zeros(2, 4, 2)
    with pytest.raises(PlacementError, match=message) as caught:
        loader.load(shell, torch.ones(shape), slot, name="experts.w13_weight")
    assert caught.value.facts["tensor"] == "experts.w13_weight"
    assert not shell.any()


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 5, 2)], ids=["number of experts", "width"])
def test_shell_of_another_shape_than_planned_is_refused(shape: tuple[int, ...]) -> None:
    loader = ExpertLoader(
        matrix="w13", placement=ExpertPlacement.equal(2, 1), expert=ALONE, tensor=ALONE, intermediate=2, width=2
    )
    with pytest.raises(PlacementError, match="parameter was planned"):
        loader.load(torch.zeros(shape), torch.ones(2, 2), ExpertPart(0, "w1"), name="experts")


@pytest.mark.parametrize(
    ("intermediate", "width", "partition", "message"),
    [
        pytest.param(5, 3, "even", "2 ranks do not divide it, expected the stride partition", id="even cannot"),
        pytest.param(8, 3, "stride", "2 shells of 3 do not hold it", id="too narrow"),
    ],
)
def test_impossible_expert_cuts_are_refused_when_building(
    intermediate: int, width: int, partition: Partition, message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        ExpertLoader(
            matrix="w13",
            placement=ONE,
            expert=ALONE,
            tensor=GroupRank(0, 2),
            intermediate=intermediate,
            width=width,
            partition=partition,
        )


def test_expert_map_of_another_group_is_refused() -> None:
    with pytest.raises(TopologyError, match="made for 2 ranks, the expert group has 4"):
        ExpertLoader(
            matrix="w2",
            placement=ExpertPlacement.equal(4, 2),
            expert=GroupRank(0, 4),
            tensor=ALONE,
            intermediate=2,
            width=2,
        )


# C6, L106, L107, L108, L110, L111, L112
@pytest.mark.parametrize("partition", ["stride", "even"])
@pytest.mark.parametrize("up_first", [False, True], ids=["gate first", "up first"])
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused in the checkpoint"])
@pytest.mark.parametrize("ep", [1, 2], ids=["one block", "two blocks"])
def test_one_moe_layer_equals_torch(partition: Partition, up_first: bool, fused: bool, ep: int) -> None:
    experts, x = Experts.random(4, 6, 5), arange(3, 5, first=-7)
    total = torch.zeros_like(x)
    for expert_rank, tensor_rank in itertools.product(range(ep), range(2)):
        w13 = ExpertLoader(
            matrix="w13",
            placement=ExpertPlacement.equal(4, ep),
            expert=GroupRank(expert_rank, ep),
            tensor=GroupRank(tensor_rank, 2),
            intermediate=6,
            width=4,
            up_first=up_first,
            partition=partition,
        )
        w2 = w13.for_matrix("w2")
        shells = poisoned(w13, 5), poisoned(w2, 5)
        if fused:
            w13.load(shells[0], torch.cat([experts.w1, experts.w3], dim=1), None, name="w13")
            w2.load(shells[1], experts.w2, None, name="w2")
        else:
            experts.fill(w13, shells[0])
            experts.fill(w2, shells[1])
        total += grouped_product(*shells, x, up_first=up_first)
    assert torch.equal(total, reference(experts, x))


@st.composite
def rules(draw: st.DrawFn) -> ExpertLoader:
    """A w13 loader of the first rank, of any model, map and rule."""
    partition: Partition = draw(st.sampled_from(["stride", "even"]))
    ranks, ep, experts = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    intermediate = draw(st.integers(1, 4)) * ranks if partition == "even" else draw(st.integers(1, 9))
    extra = draw(st.lists(st.tuples(st.integers(0, ep - 1), st.integers(0, experts - 1)), max_size=3))
    homes = [(draw(st.integers(0, ep - 1)), expert) for expert in range(experts)] + extra
    return ExpertLoader(
        matrix="w13",
        placement=ExpertPlacement.from_map(experts, [[e for home, e in homes if home == rank] for rank in range(ep)]),
        expert=GroupRank(0, ep),
        tensor=GroupRank(0, ranks),
        intermediate=intermediate,
        width=-(-intermediate // ranks) + draw(st.integers(0, 2)),
        gated=draw(st.booleans()),
        up_first=draw(st.booleans()),
        partition=partition,
        transposed=draw(st.booleans()),
    )


def halves(loader: ExpertLoader, shell: torch.Tensor) -> dict[ExpertPartName, torch.Tensor]:
    """The parts of one expert's shell, `[width, hidden]` each, found without the loader's arithmetic."""
    logical = shell.T if loader.transposed else shell
    if loader.matrix == "w2":
        return {"w2": logical.T}
    if not loader.gated:
        return {"w1": logical}
    first, second = logical.chunk(2)
    return {"w3": first, "w1": second} if loader.up_first else {"w1": first, "w3": second}


# C4, C7, L64, L106, L110, L111
@given(rules())
def test_slices_of_every_expert_are_its_matrices_once_and_match(rule: ExpertLoader) -> None:
    hidden, size = 2, rule.intermediate
    experts = Experts.numbered(rule.placement.num_experts, size, hidden)
    whole: dict[ExpertPartName, torch.Tensor] = {"w1": experts.w1, "w3": experts.w3, "w2": experts.w2.transpose(1, 2)}
    for ep_rank, logical in enumerate(rule.placement.ranks):
        taken: dict[tuple[int, ExpertPartName], list[torch.Tensor]] = {}
        for tensor_rank in range(rule.tensor.size):
            here = replace(
                rule,
                expert=GroupRank(ep_rank, rule.expert.size),
                tensor=GroupRank(tensor_rank, rule.tensor.size),
            )
            for loader in (here, here.for_matrix("w2")):
                shell = experts.fill(loader, poisoned(loader, hidden))
                for index, one in enumerate(shell):
                    for part, rows in halves(loader, one).items():
                        taken.setdefault((index, part), []).append(rows)
        for (index, part), pieces in taken.items():
            joined, expected = torch.cat(pieces), whole[part][logical[index]]
            real = joined.count_nonzero(dim=1) > 0
            assert torch.equal(joined[real], expected)
            # Gate, up and down of one place in the shells belong to one place of the model.
            down = torch.cat(taken[index, "w2"])
            assert torch.equal(real, down.count_nonzero(dim=1) > 0)
