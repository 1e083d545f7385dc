"""New weights in several buckets: finished once, and accounted for when they end half way."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from tests.transfer.models.conftest import same_bytes
from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.latent_steps import latent_steps
from weightwire.transfer.finishing.routes import PLATFORMS
from weightwire.transfer.finishing.steps import Finisher, FinishStep, tensor_at
from weightwire.transfer.finishing.updates import UpdateTransaction
from weightwire.transfer.models import ParameterTree, build_model, parse_config
from weightwire.transfer.models.expected_specs import expected_specs

MEMBERS: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
}
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))


class Counting(Finisher):
    """Remembers what it was asked to run."""

    def __init__(self, tree: ParameterTree, *more: FinishStep) -> None:
        super().__init__(tree, [*latent_steps(tree, tree.config or parse_config(MEMBERS), PLATFORMS["cuda"]), *more])
        self.asked = list[list[str]]()

    def run(self, touched: Collection[str] | None = None) -> tuple[str, ...]:
        self.asked.append(sorted(set(touched or ())))
        return super().run(touched)


def pairs(seed: int, *names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    specs = expected_specs(parse_config(MEMBERS))
    made = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    return {name: made[name] for name in names or made}


def running(*more: FinishStep) -> tuple[ParameterTree, Counting]:
    """A model in use."""
    tree = build_model(parse_config(MEMBERS))
    tree.load_weights(pairs(0).items())
    finisher = Counting(tree, *more)
    finisher.run()
    finisher.asked.clear()
    return tree, finisher


# L134, L185
def test_three_buckets_are_finished_once_and_in_place() -> None:
    tree, finisher = running()
    w_kc = tensor_at(tree, "model.layers.1.self_attn.w_kc")
    assert w_kc is not None
    addresses = {name: shell.data_ptr() for name, shell in tree.named_parameters()} | {"w_kc": w_kc.data_ptr()}
    with UpdateTransaction(tree, finisher) as update:
        for bucket in ([KV_B], [GATE], [UP]):
            update.load(pairs(1, *bucket).items())
            assert finisher.asked == []
    assert finisher.asked == [sorted(["model.layers.1.mlp.gate_up_proj.weight", KV_B])]
    found = {name: shell.data_ptr() for name, shell in tree.named_parameters()} | {"w_kc": w_kc.data_ptr()}
    assert found == addresses
    fresh = build_model(parse_config(MEMBERS))
    fresh.load_weights({**pairs(0), **pairs(1, KV_B, GATE, UP)}.items())
    Counting(fresh).run()
    for name, shell in fresh.named_parameters():
        assert same_bytes(shell, tree.get_parameter(name))
    for layer in range(3):
        for leaf in ("w_kc", "w_vc"):
            one, other = (tensor_at(model, f"model.layers.{layer}.self_attn.{leaf}") for model in (fresh, tree))
            assert one is not None
            assert other is not None
            assert same_bytes(one, other)


# L185
def test_update_that_ends_half_way_says_what_is_new_old_and_torn() -> None:
    tree, finisher = running()

    def broken() -> None:
        with UpdateTransaction(tree, finisher) as update:
            update.load(pairs(1, KV_B, GATE).items())
            raise OSError("the trainer went away")

    with pytest.raises(FinishError, match=r"2 slots new.*2 torn.*the trainer went away") as caught:
        broken()
    facts = caught.value.facts
    assert facts["new"] == [KV_B, "model.layers.1.mlp.gate_up_proj.weight[0]"]
    assert facts["torn"] == [f"model.layers.1.self_attn.{leaf}" for leaf in ("w_kc", "w_vc")]
    old = facts["old"]
    assert isinstance(old, list)
    assert "model.layers.1.mlp.gate_up_proj.weight[1]" in old
    assert not set(map(str, old)) & {KV_B, "model.layers.1.mlp.gate_up_proj.weight[0]"}
    assert finisher.asked == []


# L185
def test_tensor_that_does_not_fit_leaves_its_slot_old() -> None:
    tree, finisher = running()

    def broken() -> None:
        with UpdateTransaction(tree, finisher) as update:
            update.load([(GATE, pairs(1, GATE)[GATE]), (UP, torch.zeros(1))])

    with pytest.raises(FinishError, match="Attempted to load weight") as caught:
        broken()
    assert caught.value.facts["new"] == ["model.layers.1.mlp.gate_up_proj.weight[0]"]
    assert caught.value.facts["torn"] == []


# L185
def test_derivation_that_fails_leaves_what_it_makes_torn() -> None:
    def fail(_: object) -> dict[str, torch.Tensor]:
        if tree_is_in_use:
            raise RuntimeError("no memory")
        return {}

    tree_is_in_use = False
    tree, finisher = running(
        FinishStep(name="broken", phase="derive", inputs=(KV_B,), outputs=(KV_B.replace("weight", "copy"),), run=fail)
    )
    tree_is_in_use = True

    def broken() -> None:
        with UpdateTransaction(tree, finisher) as update:
            update.load(pairs(1, KV_B).items())

    with pytest.raises(FinishError, match="no memory") as caught:
        broken()
    assert caught.value.facts["new"] == [KV_B]
    assert caught.value.facts["torn"] == [f"model.layers.1.self_attn.{leaf}" for leaf in ("w_kc", "w_vc")]


# L70, L185
def test_name_without_a_place_ends_an_update() -> None:
    tree, finisher = running()

    def broken() -> None:
        with UpdateTransaction(tree, finisher) as update:
            update.load([("model.layers.1.mlp.middle_proj.weight", torch.zeros(1))])

    with pytest.raises(FinishError, match="has no place"):
        broken()
