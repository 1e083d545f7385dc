"""One layer of experts, built, loaded and multiplied out: right shapes are not enough."""

from __future__ import annotations

import pytest
import torch

from tests.transfer.models.conftest import poisoned
from weightwire.transfer.errors import NamesError
from weightwire.transfer.loading.expert_loaders import Partition
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, ParameterTree, parse_config

HIDDEN, INTERMEDIATE, EXPERTS = 3, 6, 4
LAYER = "model.layers.0.mlp"
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "head_dim": 2,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 2,
    "dtype": "float32",
    "num_experts": EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
}


def dense_part(hidden: int, *, norms: bool) -> dict[str, torch.Tensor]:
    """All tensors of the one layer and its surroundings but those of its MLP."""
    prefix = "model.layers.0."
    found = {"model.embed_tokens.weight": torch.ones(2, hidden), "lm_head.weight": torch.ones(2, hidden)}
    found["model.norm.weight"] = torch.ones(hidden)
    found |= {f"{prefix}{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "post_attention_layernorm")}
    found |= {f"{prefix}self_attn.{part}_proj.weight": torch.ones(4, hidden) for part in "qkv"}
    found[f"{prefix}self_attn.o_proj.weight"] = torch.ones(hidden, 4)
    if norms:
        found |= {f"{prefix}self_attn.{part}_norm.weight": torch.ones(2) for part in "qk"}
    else:
        found |= {f"{prefix}self_attn.{part}_proj.bias": torch.ones(4) for part in "qkv"}
    return found


def expert_part(count: int, intermediate: int, hidden: int) -> dict[str, torch.Tensor]:
    """Router and experts: small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(3)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    found = {f"{LAYER}.gate.weight": integers(count, hidden)}
    for expert in range(count):
        found[f"{LAYER}.experts.{expert}.gate_proj.weight"] = integers(intermediate, hidden)
        found[f"{LAYER}.experts.{expert}.up_proj.weight"] = integers(intermediate, hidden)
        found[f"{LAYER}.experts.{expert}.down_proj.weight"] = integers(hidden, intermediate)
    return found


def reference(tensors: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Each expert's product `[experts, tokens, hidden]`; relu stands for silu, and is exact on integers."""
    products = []
    for expert in range(EXPERTS):
        gate, up, down = (tensors[f"{LAYER}.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        products.append(((inputs @ gate.T).relu() * (inputs @ up.T)) @ down.T)
    return torch.stack(products)


def product(model: ParameterTree, inputs: torch.Tensor, *, up_first: bool) -> torch.Tensor:
    """The same from the shells of one rank: `[local experts, tokens, hidden]`, a part of the sum over ranks."""
    w13 = model.get_parameter(f"{LAYER}.experts.w13_weight")
    w2 = model.get_parameter(f"{LAYER}.experts.w2_weight")
    halves = torch.einsum("th,eih->eti", inputs, w13).chunk(2, dim=-1)
    gate, up = halves[::-1] if up_first else halves
    return torch.einsum("eti,ehi->eth", gate.relu() * up, w2)


# L106, L107, L108, L110, L111, L112, C6
@pytest.mark.parametrize("partition", ["even", "stride"])
@pytest.mark.parametrize("up_first", [False, True], ids=["gate first", "up first"])
def test_layer_of_padded_experts_equals_the_reference(up_first: bool, partition: Partition) -> None:
    """4 experts of 6, padded to 8 over 2 ranks, in memory that held NaN."""
    tensors, inputs = expert_part(EXPERTS, INTERMEDIATE, HIDDEN), torch.tensor([[1.0, -2.0, 3.0], [2.0, 1.0, -1.0]])
    options = BuildOptions(expert_multiple=4, expert_partition=partition, w13_up_first=up_first, vocab_multiple=2)
    total = torch.zeros(EXPERTS, 2, HIDDEN)
    swapped = torch.zeros(EXPERTS, 2, HIDDEN)
    for rank in range(2):
        model = poisoned(parse_config(CONFIG), Topology(tp=2), rank, options)
        model.load_weights({**dense_part(HIDDEN, norms=True), **tensors}.items())
        assert model.get_parameter(f"{LAYER}.experts.w13_weight").shape == (EXPERTS, 2 * 4, HIDDEN)
        assert model.get_parameter(f"{LAYER}.experts.w2_weight").shape == (EXPERTS, HIDDEN, 4)
        # Even: 3 and 3 of 4. Stride: 4 and 2 of 4.
        empty = (model.get_parameter(f"{LAYER}.experts.w2_weight") == 0).all(dim=(0, 1))
        assert int(empty.sum()) == (1 if partition == "even" else 2 * rank)
        total += product(model, inputs, up_first=up_first)
        swapped += product(model, inputs, up_first=not up_first)
    assert torch.equal(total, reference(tensors, inputs))
    assert not torch.equal(swapped, total)


# L106, C6
def test_layer_over_expert_groups_equals_the_reference() -> None:
    tensors, inputs = expert_part(EXPERTS, INTERMEDIATE, HIDDEN), torch.tensor([[1.0, -2.0, 3.0]])
    total = torch.zeros(EXPERTS, 1, HIDDEN)
    for rank in range(4):
        model = poisoned(
            parse_config(CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 1}),
            Topology(tp=4, ep=2),
            rank,
        )
        model.load_weights({**dense_part(HIDDEN, norms=True), **HEAD_NORMS, **tensors}.items())
        experts = range(2 * (rank // 2), 2 * (rank // 2) + 2)
        total[list(experts)] += product(model, inputs, up_first=False)
    assert torch.equal(total, reference(tensors, inputs))


# L62, L125
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_rank_without_experts_takes_none_of_a_fused_tensor(central: bool) -> None:
    config = parse_config(WITH_SHARED)
    options = BuildOptions(vocab_multiple=2, expert_map=[[0, 1], []])
    model = poisoned(config, Topology(tp=2, ep=2), 1, options)
    report = model.load_weights({**FUSED, **dense_part(HIDDEN, norms=False), **SHARED}.items(), central=central)
    assert model.get_parameter(f"{LAYER}.experts.w13_weight").shape == (0, 4, 3)
    not_local = [outcome.name for outcome in report.outcomes if outcome.outcome is Outcome.NOT_LOCAL]
    assert not_local == [f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj"]


HEAD_NORMS = {f"model.layers.0.self_attn.{part}_norm.weight": torch.ones(1) for part in "qk"}
SHARED = {
    f"{LAYER}.shared_expert.gate_proj.weight": torch.full((2, 3), 1.0),
    f"{LAYER}.shared_expert.up_proj.weight": torch.full((2, 3), 2.0),
    f"{LAYER}.shared_expert.down_proj.weight": torch.full((3, 2), 3.0),
    f"{LAYER}.shared_expert_gate.weight": torch.full((1, 3), 4.0),
}
FUSED = {
    f"{LAYER}.gate.weight": torch.ones(2, 3),
    f"{LAYER}.experts.gate_up_proj": torch.arange(24.0).view(2, 4, 3),
    f"{LAYER}.experts.down_proj": torch.arange(12.0).view(2, 3, 2),
}
WITH_SHARED = CONFIG | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 2,
    "moe_intermediate_size": 2,
    "shared_expert_intermediate_size": 2,
}


@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
@pytest.mark.parametrize("shared_first", [True, False], ids=["shared first", "shared last"])
def test_b27_shared_expert_that_is_not_fused_has_shells_of_its_own(shared_first: bool, central: bool) -> None:
    model = poisoned(parse_config(WITH_SHARED), options=BuildOptions(vocab_multiple=2))
    parts = [SHARED, FUSED] if shared_first else [FUSED, SHARED]
    model.load_weights({**parts[0], **dense_part(HIDDEN, norms=False), **parts[1]}.items(), central=central)
    assert (
        model.get_parameter(f"{LAYER}.experts.w13_weight").tolist() == FUSED[f"{LAYER}.experts.gate_up_proj"].tolist()
    )
    assert model.get_parameter(f"{LAYER}.experts.w2_weight").tolist() == FUSED[f"{LAYER}.experts.down_proj"].tolist()
    shared = model.get_submodule(f"{LAYER}.shared_expert")
    assert shared.get_parameter("gate_up_proj.weight").tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert shared.get_parameter("down_proj.weight").tolist() == [[3.0] * 2] * 3


@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_b27_shared_expert_that_the_model_does_not_know_is_an_error(central: bool) -> None:
    members = WITH_SHARED | {"shared_expert_intermediate_size": None}
    model = poisoned(parse_config(members), options=BuildOptions(vocab_multiple=2))
    with pytest.raises(NamesError) as caught:
        model.load_weights({**FUSED, **dense_part(HIDDEN, norms=False), **SHARED}.items(), central=central)
    assert caught.value.facts["unexpected"] == list(SHARED)
