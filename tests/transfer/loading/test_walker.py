from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn

from weightwire.transfer.errors import NamesError, PlacementError, SlotsError
from weightwire.transfer.loading.fused_loaders import QkvGeometry, QkvLoader
from weightwire.transfer.loading.landing import Landing, land
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.slots import attach_loader
from weightwire.transfer.loading.walker import Absent, Pair, WalkRules, walk
from weightwire.transfer.ranks import ALONE

EMPTY = torch.zeros(0)


class Recording(nn.Module):
    """Takes whatever it is given, and remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[list[str]]()

    def load_weights(self, pairs: Iterable[Pair]) -> Iterator[Landing]:
        self.calls.append(call := list[str]())
        for name, _ in pairs:
            call.append(name)
            yield Landing(outcome=NameOutcome(name=name, outcome=Outcome.PLACED, rule="L54", target=name))


class Projections(nn.Module):
    """Fills `qkv.weight` from q, k and v, and knows nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 4, bias=False)
        geometry = QkvGeometry(num_heads=2, num_kv_heads=1, head_dim=1, v_head_dim=1, group=ALONE)
        attach_loader(self.qkv.weight, QkvLoader(geometry=geometry))
        self.visits = 0

    def load_weights(self, pairs: Iterable[Pair]) -> Iterator[Landing]:
        self.visits += 1
        for name, tensor in pairs:
            if name in ("q", "k", "v"):
                outcome = NameOutcome(name=name, outcome=Outcome.PLACED, rule="L54", target="qkv.weight", slot=name)
                yield land(outcome, self.qkv.weight, tensor)
            else:
                yield Landing(outcome=NameOutcome(name=name, outcome=Outcome.UNEXPECTED, rule="L70"))


def tree(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict(children)


def linear(*, bias: bool = False) -> nn.Module:
    return nn.Linear(2, 3, bias=bias)


def outcomes(model: nn.Module, names: Iterable[str], rules: WalkRules | None = None) -> dict[str, Outcome]:
    landings = walk(model, ((name, torch.zeros(3, 2)) for name in names), rules or WalkRules())
    return {landing.outcome.name: landing.outcome.outcome for landing in landings}


# L74
def test_module_with_a_loader_of_its_own_gets_relative_names() -> None:
    mlp = Recording()
    found = list(walk(tree(mlp=mlp), [("mlp.gate_proj.weight", EMPTY)]))
    assert mlp.calls == [["gate_proj.weight"]]
    assert [landing.outcome.name for landing in found] == ["mlp.gate_proj.weight"]
    assert [landing.outcome.target for landing in found] == ["mlp.gate_proj.weight"]


# L74
def test_name_below_a_parameter_has_no_place() -> None:
    model = tree(norm=linear())
    assert outcomes(model, ["norm.weight.x", "norm.weight.bias"]) == {
        "norm.weight.x": Outcome.UNEXPECTED,
        "norm.weight.bias": Outcome.UNEXPECTED,
    }
    with pytest.raises(NamesError, match=r"norm\.weight\.x"):
        load_weights(model, [("norm.weight.x", EMPTY)], central=True)


# L74
def test_walk_fills_parameters_and_buffers_through_their_loaders() -> None:
    model = tree(deep=tree(inner=Projections().qkv, norm=nn.BatchNorm1d(2)))
    qkv = torch.arange(8.0).view(4, 2)
    mean, variance = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    pairs = [
        ("deep.inner.weight", qkv),
        ("deep.norm.running_mean", mean),
        ("deep.norm.running_var", variance),
        ("deep.norm.weight", mean),
        ("deep.norm.bias", mean),
        ("deep.norm.num_batches_tracked", torch.tensor(7)),
    ]
    report = load_weights(model, pairs, central=True)
    assert report.counts[Outcome.PLACED] == 6
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in pairs)


# L74
def test_placeholder_of_an_absent_stage_accepts_and_discards() -> None:
    model = tree(layers=nn.ModuleList([Absent(), linear()]))
    assert outcomes(model, ["layers.0.attn.q.weight", "layers.1.weight", "layers.0.weight"]) == {
        "layers.0.attn.q.weight": Outcome.DROPPED,
        "layers.1.weight": Outcome.PLACED,
        "layers.0.weight": Outcome.DROPPED,
    }


# L74
def test_walk_takes_a_pair_only_when_the_one_before_has_landed() -> None:
    model, log = tree(a=linear(), b=linear()), list[str]()

    def pairs() -> Iterator[Pair]:
        for name in ("a.weight", "b.weight"):
            log.append(f"read {name}")
            yield name, torch.zeros(3, 2)

    for landing in walk(model, pairs()):
        log.append(f"landed {landing.outcome.name}")
    assert log == ["read a.weight", "landed a.weight", "read b.weight", "landed b.weight"]


# L75
def test_module_is_visited_again_when_the_stream_comes_back() -> None:
    attention = Projections()
    model = tree(a=attention, b=linear())
    pairs = [
        ("a.q", torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ("b.weight", torch.ones(3, 2)),
        ("a.k", torch.tensor([[5.0, 6.0]])),
        ("a.v", torch.tensor([[7.0, 8.0]])),
    ]
    load_weights(model, pairs, central=True)
    assert attention.visits == 2
    assert attention.qkv.weight.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


# L76
def test_walk_leaves_out_what_it_is_told_to() -> None:
    model = tree(a=linear(), head=linear(), b=linear())
    rules = WalkRules(skip_prefixes=("head.",), skip_substrs=("lora_",))
    names = ["a.weight", "head.weight", "b.lora_a.weight", "headless.weight"]
    names += ["a.rotary_emb.inv_freq", "a.rotary_pos_emb.inv_freq", "a.rotary_emb.cos_cached", "rotary_emb.sin_cached"]
    assert outcomes(model, names, rules) == dict.fromkeys(names, Outcome.DROPPED) | {
        "a.weight": Outcome.PLACED,
        "headless.weight": Outcome.UNEXPECTED,
    }


# L76
def test_walk_tolerates_declared_names_without_a_target() -> None:
    rules = WalkRules(ignore_unexpected_prefixes=("extra.",), ignore_unexpected_suffixes=(".bias", ".kv_scale"))
    names = ["a.bias", "a.kv_scale", "extra.thing.weight", "a.extra.weight", "other.weight"]
    assert outcomes(tree(a=linear()), names, rules) == {
        "a.bias": Outcome.SKIPPED_OPTIONAL,
        "a.kv_scale": Outcome.SKIPPED_OPTIONAL,
        "extra.thing.weight": Outcome.SKIPPED_OPTIONAL,
        "a.extra.weight": Outcome.UNEXPECTED,
        "other.weight": Outcome.UNEXPECTED,
    }


# L76
@pytest.mark.parametrize("bias", [torch.zeros(3), torch.zeros(3).neg(), torch.zeros(3, dtype=torch.float8_e4m3fn)])
def test_bias_without_a_target_is_left_out_only_if_it_is_all_zeros(bias: torch.Tensor) -> None:
    model = tree(a=linear())
    weight = ("a.weight", torch.ones(3, 2))
    report = load_weights(model, [weight, ("a.bias", bias)], central=True)
    assert report.counts[Outcome.SKIPPED_OPTIONAL] == 1
    other = bias.float().index_fill(0, torch.tensor([1]), float("nan"))
    with pytest.raises(NamesError, match=r"a\.bias.*all zeros"):
        load_weights(model, [weight, ("a.bias", other)], central=True)


# L76
def test_typo_inside_a_module_with_a_loader_of_its_own_is_an_error() -> None:
    model = tree(layers=nn.ModuleList([tree(self_attn=Projections())]))
    with pytest.raises(NamesError) as caught:
        load_weights(model, [("layers.0.self_attn.q_porj.weight", EMPTY)], central=True)
    assert caught.value.facts["unexpected"] == ["layers.0.self_attn.q_porj.weight"]


class Swallowing(nn.Module):
    """Reads all, says nothing."""

    def load_weights(self, pairs: Iterable[Pair]) -> list[Landing]:
        list(pairs)
        return []


class Stopping(nn.Module):
    """Reads one, and leaves the rest."""

    def load_weights(self, pairs: Iterable[Pair]) -> list[Landing]:
        name, _ = next(iter(pairs))
        return [Landing(outcome=NameOutcome(name=name, outcome=Outcome.PLACED, rule="L54", target=name))]


# L04, L76
@pytest.mark.parametrize("child", [Swallowing(), Stopping()], ids=["that says nothing", "that stops early"])
def test_module_that_does_not_answer_for_every_tensor_is_refused(child: nn.Module) -> None:
    with pytest.raises(NamesError, match="'a'"):
        list(walk(tree(a=child), [("a.q", EMPTY), ("a.k", EMPTY)]))


# L53, L74
@pytest.mark.parametrize("name", ["a.weight.", "a..weight", ".a.weight", "a.", ".", "..", "b.q.", "b..q"])
def test_name_with_an_empty_part_is_no_other_name(name: str) -> None:
    rules = WalkRules(also={"a.weight": "c.weight"})
    model = tree(a=linear(), b=Recording(), c=linear())
    (landing,) = walk(model, [(name, torch.zeros(2, 2))], rules)
    assert (landing.outcome.name, landing.outcome.outcome) == (name, Outcome.UNEXPECTED)


# L77
def test_tied_head_that_is_the_embedding_needs_nothing() -> None:
    model = tree(embed=nn.Embedding(3, 2), head=nn.Linear(2, 3, bias=False))
    model.get_submodule("head").weight = model.get_parameter("embed.weight")
    values = torch.arange(6.0).view(3, 2)
    stray = ("head.weight", torch.zeros(3, 2))
    landings = list(walk(model, [stray, ("embed.weight", values), stray], WalkRules(skip_prefixes=("head.",))))
    assert [landing.outcome.outcome for landing in landings] == [Outcome.DROPPED, Outcome.PLACED, Outcome.DROPPED]
    assert torch.equal(model.get_parameter("head.weight"), values)


# L77
def test_tied_head_of_its_own_is_filled_from_the_checkpoint() -> None:
    rules = WalkRules(skip_prefixes=("head.",), also={"embed.weight": "head.weight"})
    values = torch.arange(6.0).view(3, 2)
    both = tree(embed=nn.Embedding(3, 2), head=nn.Linear(2, 3, bias=False))
    (landing,) = walk(both, [("embed.weight", values)], rules)
    assert (landing.outcome.target, landing.also) == ("embed.weight", (("head.weight", (None,)),))
    assert torch.equal(both.get_parameter("head.weight"), values)
    alone = tree(head=nn.Linear(2, 3, bias=False))
    (landing,) = walk(alone, [("embed.weight", values)], rules)
    assert (landing.outcome.target, landing.outcome.rule) == ("head.weight", "L77")
    assert torch.equal(alone.get_parameter("head.weight"), values)


class Counted(nn.Module):
    """Says how often all its parameters were listed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tree(a=linear(), b=linear()) for _ in range(layers))
        self.listed = 0

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self.listed += 1
        return super().named_parameters(prefix, recurse, remove_duplicate)


# L81
def test_shells_are_listed_once_in_a_load() -> None:
    model = Counted(100)
    names = [f"layers.{layer}.{part}.weight" for part in "ab" for layer in range(100)]
    load_weights(model, ((name, torch.ones(3, 2)) for name in names), central=True)
    assert model.listed == 1


def test_walk_leaves_a_rotary_table_to_a_model_that_has_a_place_for_it() -> None:
    model = tree(rotary_emb=nn.Module())
    model.get_submodule("rotary_emb").register_buffer("inv_freq", torch.zeros(2))
    load_weights(model, [("rotary_emb.inv_freq", torch.ones(2))], central=True)
    assert model.get_buffer("rotary_emb.inv_freq").tolist() == [1.0, 1.0]


def test_shape_that_does_not_fit_is_an_error_at_once() -> None:
    with pytest.raises(PlacementError, match=r"a\.weight"):
        list(walk(tree(a=linear()), [("a.weight", torch.zeros(2, 3))]))


@pytest.mark.parametrize("name", ["", ".", "a", "a.", ".a.weight", "a..weight", "modules", "training", "a.forward"])
def test_name_that_is_no_name_has_no_place(name: str) -> None:
    assert list(outcomes(tree(a=linear()), [name]).values()) == [Outcome.UNEXPECTED]


def test_walk_fills_slots_that_nothing_else_may_miss() -> None:
    with pytest.raises(SlotsError) as caught:
        load_weights(tree(a=linear(bias=True)), [("a.weight", torch.ones(3, 2))], central=True)
    assert caught.value.facts["unfilled"] == ["a.bias"]
