"""Every element of every shell, against the closed form; and over all ranks, each checkpoint element once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.transfer.models.closed_form import Family, copies_of, expected_shells
from tests.transfer.models.conftest import FAMILIES, VOCAB, Saved, numbered, poisoned, ranks, same_bytes
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions

DENSE = (Topology(), Topology(tp=2), Topology(tp=4), Topology(pp=2), Topology(tp=2, pp=2))
WITH_EXPERTS = (*DENSE, Topology(tp=2, ep=2), Topology(tp=4, ep=2), Topology(tp=4, ep=4, pp=2))
CASES = [
    pytest.param(family, topology, id=f"{family} on tp {topology.tp}, pp {topology.pp}, ep {topology.ep}")
    for family in FAMILIES
    for topology in (WITH_EXPERTS if "moe" in family or "deepseek" in family else DENSE)
]


def load(saved: Saved, topology: Topology, rank: int, *, central: bool = False) -> dict[str, torch.Tensor]:
    model = poisoned(saved.config, topology, rank)
    report = model.load_weights(saved.tensors.items(), central=central)
    assert sum(report.counts.values()) == len(saved.tensors)
    assert report.counts[Outcome.UNEXPECTED] == 0
    return dict(model.state_dict())


# L60, L84, L90
@pytest.mark.parametrize(("family", "topology"), CASES)
def test_every_element_is_the_one_that_the_formula_gives(family: str, topology: Topology, saved: Family) -> None:
    checkpoint = saved(family)
    for rank in ranks(topology):
        shells = load(checkpoint, topology, rank)
        expected = expected_shells(checkpoint, topology, rank, vocab_multiple=64 * topology.tp)
        assert shells.keys() == expected.keys()
        assert [name for name in expected if not same_bytes(shells[name], expected[name])] == []


# L95, L100, L102, L106
@pytest.mark.parametrize(("family", "topology"), CASES)
def test_all_ranks_together_hold_every_checkpoint_element_once(family: str, topology: Topology, saved: Family) -> None:
    checkpoint = saved(family)
    marked = replace(
        checkpoint,
        tensors=numbered(checkpoint.tensors),
        config=replace(checkpoint.config, dtype=torch.float32),
    )
    found = Counter[float]()
    for rank in ranks(topology):
        model = poisoned(marked.config, topology, rank)
        model.load_weights(marked.tensors.items())
        for shell in model.parameters():
            found.update(shell.flatten().tolist())
    # The padding of the vocabulary is the one thing that no checkpoint element fills.
    padding = found.pop(0.0)
    heads = 1 if checkpoint.config.tie_word_embeddings and topology.pp == 1 else 2
    assert padding == heads * 8 * (-VOCAB % (64 * topology.tp))
    expected = Counter[float]()
    for name, tensor in marked.tensors.items():
        expected.update(dict.fromkeys(tensor.flatten().tolist(), copies_of(name, marked, topology)))
    assert found == expected


# L125
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=4, ep=2)], ids=["alone", "on tp 4, ep 2"])
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_experts_that_are_fused_in_the_checkpoint_land_alike(
    family: str, topology: Topology, central: bool, saved: Family
) -> None:
    checkpoint = saved(family)
    for rank in ranks(topology):
        apart = load(checkpoint, topology, rank)
        fused = load(checkpoint.fused(), topology, rank, central=central)
        assert [name for name in apart if not same_bytes(apart[name], fused[name])] == []


# L64
def test_replicas_of_an_expert_are_filled_on_every_rank(saved: Family) -> None:
    checkpoint, topology = saved("qwen3_moe"), Topology(tp=2, ep=2)
    experts = ((0, 1, 2), (3, 0, 1))
    for rank, logical in enumerate(experts):
        model = poisoned(checkpoint.config, topology, rank, BuildOptions(expert_map=experts))
        model.load_weights(checkpoint.tensors.items())
        down = model.get_parameter("model.layers.0.mlp.experts.w2_weight")
        for index, expert in enumerate(logical):
            assert same_bytes(down[index], checkpoint.tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"])


# L118
def test_vocabulary_takes_the_multiple_that_is_asked_for(saved: Callable[[str], Saved]) -> None:
    checkpoint = saved("llama")
    model = poisoned(checkpoint.config, Topology(tp=2), 1, BuildOptions(vocab_multiple=6))
    model.load_weights(checkpoint.tensors.items())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shell = model.get_parameter(name)
        assert shell.shape == (12, 8)
        assert same_bytes(shell[:9], checkpoint.tensors[name][12:])
        assert not shell[9:].any()
