"""Which question of the DeepSeek table decides about a name, and where the name goes."""

from __future__ import annotations

import pytest

from weightwire.transfer.loading.deepseek_names import (
    INDEXER_PARTS,
    LATENT_PARTS,
    DeepseekNames,
    deepseek_steps,
)
from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.slots import ExpertPart, SlotId
from weightwire.transfer.ranks import ExpertPlacement

DROPPED, PLACED, OPTIONAL = Outcome.DROPPED, Outcome.PLACED, Outcome.SKIPPED_OPTIONAL
NOT_LOCAL, UNEXPECTED = Outcome.NOT_LOCAL, Outcome.UNEXPECTED
L1 = "model.layers.1"
SHELLS = (
    f"{L1}.self_attn.fused_qkv_a_proj_with_mqa.weight",
    f"{L1}.self_attn.q_b_proj.weight",
    f"{L1}.self_attn.kv_b_proj.weight",
    f"{L1}.self_attn.kv_b_proj.weight_scale_inv",
    f"{L1}.self_attn.indexer.wk_weights_proj.weight",
    f"{L1}.self_attn.indexer.wq_b.weight",
    f"{L1}.self_attn.attn_mqa.k_scale",
    f"{L1}.mlp.gate.weight",
    f"{L1}.mlp.experts.w13_weight",
    f"{L1}.mlp.experts.w13_weight_scale_inv",
    f"{L1}.mlp.experts.w2_weight",
    f"{L1}.mlp.shared_experts.gate_up_proj.weight",
)


def resolver(
    *,
    fuses: bool = False,
    role: str = "main",
    shells: tuple[str, ...] = SHELLS,
    layers: range = range(1, 3),
    num_layers: int = 3,
    tied: bool = False,
) -> Resolver:
    """Stage 1 of 2 of a model with three layers, a draft behind them, and four experts on two ranks; rank 1's."""
    placement = ExpertPlacement.equal(4, 2).with_shared(int(fuses))
    names = DeepseekNames(
        num_layers=num_layers,
        num_draft_layers=1,
        role="draft" if role == "draft" else "main",
        num_routed=4,
        fuses_shared=fuses,
    )
    tables = NameTables(
        layers=layers if role == "main" else range(0),
        num_layers=num_layers if role == "main" else 0,
        experts=ExpertTable(4 + int(fuses), num_shared=int(fuses)),
        owns_embedding=False,
        owns_final_norm=False,
        owns_head=False,
        tied=tied,
        further_parts=(INDEXER_PARTS, LATENT_PARTS),
        steps=deepseek_steps(names),
    )
    return Resolver(tables, shells, placement, ep_rank=1)


# One line per way out of a question: number of the step, rule, name, outcome, target, slot.
C1 = [
    (1, "L119", f"{L1}.mlp.experts.3.up_proj.input_scale", DROPPED, None, None),
    (3, "L68", "model.layers.0.mlp.up_proj.weight", DROPPED, None, None),
    (6, "L122", "model.layers.3.enorm.weight", DROPPED, None, None),
    (6, "L122", "model.mtp.layers.0.self_attn.q_a_proj.weight", DROPPED, None, None),
    (7, "L125", f"{L1}.mlp.experts.gate_up_proj", PLACED, f"{L1}.mlp.experts.w13_weight", None),
    (7, "L125", f"{L1}.mlp.experts.gate_up_proj_scale", PLACED, f"{L1}.mlp.experts.w13_weight_scale_inv", None),
    (7, "L125", f"{L1}.mlp.experts.down_proj", PLACED, f"{L1}.mlp.experts.w2_weight", None),
    (8, "L66", f"{L1}.self_attn.rotary_emb.inv_freq", DROPPED, None, None),
    (9, "L67", "model.layers.2.self_attn.indexer.wk.weight", DROPPED, None, None),
    (10, "L127", f"{L1}.self_attn.indexer.wk.weight", PLACED, SHELLS[4], "wk"),
    (10, "L127", f"{L1}.self_attn.indexer.weights_proj.weight", PLACED, SHELLS[4], "weights_proj"),
    (10, "L127", f"{L1}.self_attn.indexer.wk.weight_scale_inv", PLACED, SHELLS[4], "wk.weight_scale_inv"),
    (10, "L127", f"{L1}.self_attn.indexer.wk.weight_scale", PLACED, SHELLS[4], "wk.weight_scale_inv"),
    (11, "L54", f"{L1}.mlp.shared_experts.up_proj.weight", PLACED, SHELLS[11], 1),
    (11, "L55", f"{L1}.mlp.shared_experts.up_proj.bias", OPTIONAL, f"{L1}.mlp.shared_experts.gate_up_proj.bias", 1),
    (12, "L59", f"{L1}.mlp.experts.2.down_proj.weight", PLACED, f"{L1}.mlp.experts.w2_weight", ExpertPart(2, "w2")),
    (12, "L62", f"{L1}.mlp.experts.1.up_proj.weight", NOT_LOCAL, f"{L1}.mlp.experts.w13_weight", ExpertPart(1, "w3")),
    (
        *(12, "L83", f"{L1}.mlp.experts.3.up_proj.weight_scale", PLACED),
        *(f"{L1}.mlp.experts.w13_weight_scale_inv", ExpertPart(3, "w3")),
    ),
    (13, "L82", f"{L1}.self_attn.k_proj.k_scale", PLACED, f"{L1}.self_attn.attn_mqa.k_scale", None),
    (13, "L83", f"{L1}.self_attn.kv_b_proj.weight_scale", PLACED, SHELLS[3], None),
    (13, "L130", f"{L1}.self_attn.q_a_proj.weight", PLACED, SHELLS[0], 0),
    (13, "L130", f"{L1}.self_attn.kv_a_proj_with_mqa.weight", PLACED, SHELLS[0], 1),
    (14, "L68", "model.embed_tokens.weight", DROPPED, None, None),
    (14, "L68", "lm_head.weight", DROPPED, None, None),
    (14, "L69", "model.norm.weight", DROPPED, None, None),
    (14, "L82", "model.layers.2.self_attn.k_proj.k_scale", DROPPED, None, None),
    (14, "L55", f"{L1}.self_attn.q_b_proj.bias", OPTIONAL, f"{L1}.self_attn.q_b_proj.bias", None),
    (14, "L70", f"{L1}.self_attn.q_c_proj.weight", UNEXPECTED, f"{L1}.self_attn.q_c_proj.weight", None),
    (15, "L91", f"{L1}.self_attn.q_b_proj.weight", PLACED, SHELLS[1], None),
    (15, "L91", f"{L1}.self_attn.fused_qkv_a_proj_with_mqa.weight", PLACED, SHELLS[0], None),
    (15, "L91", f"{L1}.self_attn.indexer.wk_weights_proj.weight", PLACED, SHELLS[4], None),
    (15, "L72", f"language_model.{L1}.mlp.gate.weight", PLACED, f"{L1}.mlp.gate.weight", None),
]


# C1, L119, L122, L125, L127, L130
@pytest.mark.parametrize(
    ("step", "rule", "name", "outcome", "target", "slot"),
    [pytest.param(*case, id=f"step {case[0]} ends {case[2]}") for case in C1],
)
def test_deepseek_step_decides(
    *, step: int, rule: str, name: str, outcome: Outcome, target: str | None, slot: SlotId
) -> None:
    found = resolver().resolve(name)
    assert (found.name, found.outcome, found.rule) == (name, outcome, rule)
    assert (found.target, found.slot) == (target, slot)
    assert resolver().deciding_step(name) == step


# L119
def test_every_rule_of_the_table_belongs_to_the_step_that_decides() -> None:
    found = resolver()
    assert len(found.steps) == 16
    assert {rule for step, rule, *_ in C1 if rule not in found.steps[step].rules} == set()
    assert all(step.needs and step.about for step in found.steps)


# L120, L121
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_shared_expert_follows_the_routed_ones_if_it_poses_as_one(part: str) -> None:
    name = f"{L1}.mlp.shared_experts.{part}.weight"
    slot = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
    target = f"{L1}.mlp.experts.{'w2' if slot == 'w2' else 'w13'}_weight"
    found = resolver(fuses=True).resolve(name)
    assert (found.name, found.rule, found.target, str(found.slot)) == (name, "L59", target, f"4.{slot}")
    assert resolver(fuses=True).deciding_step(name) == 12


# L123, L124
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("model.layers.3.enorm.weight", "model.enorm.weight", id="norm of the embedding"),
        pytest.param("model.layers.3.hnorm.weight", "model.hnorm.weight", id="norm of the hidden state"),
        pytest.param("model.layers.3.eh_proj.weight", "model.eh_proj.weight", id="what joins both"),
        pytest.param("model.layers.3.shared_head.norm.weight", "model.shared_head.norm.weight", id="norm of the head"),
        pytest.param("model.layers.3.mlp.gate.weight", "model.decoder.mlp.gate.weight", id="the decoder layer"),
        pytest.param("model.mtp.layers.0.mlp.gate.weight", "model.decoder.mlp.gate.weight", id="another prefix"),
        pytest.param("mtp.layers.0.eh_proj.weight", "model.eh_proj.weight", id="a prefix without a model"),
        pytest.param("language_model.model.layers.3.enorm.weight", "model.enorm.weight", id="within a larger model"),
        pytest.param("model.layers.3.shared_head.head.weight", "L124", id="the target's head"),
        pytest.param("model.layers.3.embed_tokens.weight", "L124", id="the target's embedding"),
        pytest.param("model.layers.30.enorm.weight", "L123", id="layer 30 is not layer 3"),
        pytest.param("model.layers.2.mlp.gate.weight", "L123", id="a layer of the target"),
        pytest.param("model.embed_tokens.weight", "L123", id="the embedding of the target"),
    ],
)
def test_draft_role_keeps_its_own_layer_under_names_of_its_own(name: str, expected: str) -> None:
    shells = tuple(
        f"model.{path}.weight" for path in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "decoder.mlp.gate")
    )
    found = resolver(role="draft", shells=shells).resolve(name)
    if expected.startswith("L"):
        assert (found.outcome, found.rule) == (DROPPED, expected)
    else:
        assert (found.outcome, found.target) == (PLACED, expected)


# L123
def test_checkpoint_of_one_layer_is_that_of_a_draft() -> None:
    found = resolver(role="draft", num_layers=1, shells=("model.enorm.weight",))
    assert found.resolve("model.layers.0.enorm.weight").target == "model.enorm.weight"
    assert found.resolve("model.layers.1.enorm.weight").rule == "L123"


@pytest.mark.parametrize(
    "spelling", ["", "language_model.", "language.", "model.language_model.-", "-"], ids=lambda text: text or "plain"
)
def test_prefix_is_spelled_in_many_ways(spelling: str) -> None:
    name = f"{L1}.mlp.gate.weight"
    # A dash stands for the missing `model.` of checkpoints that hold the base model.
    written = spelling.rstrip("-") + (name.removeprefix("model.") if spelling.endswith("-") else name)
    found = resolver().resolve(written)
    assert (found.name, found.outcome, found.target) == (written, PLACED, name)


# L77
def test_tied_head_is_filled_from_the_embedding() -> None:
    shells = ("model.embed_tokens.weight", "lm_head.weight")
    found = resolver(tied=True, shells=shells).resolve_all("model.embed_tokens.weight")
    assert [(one.rule, one.target) for one in found] == [("L91", shells[0]), ("L77", shells[1])]
    assert resolver(tied=True).resolve("lm_head.weight").rule == "L77"


# L127
def test_parts_of_an_indexer_without_the_fused_shell_have_shells_of_their_own() -> None:
    shells = tuple(f"{L1}.self_attn.indexer.{part}.weight" for part in ("wk", "weights_proj"))
    for name in shells:
        found = resolver(shells=shells)
        assert (found.resolve(name).target, found.deciding_step(name)) == (name, 15)
