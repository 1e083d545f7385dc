"""One name per step of the resolver, and whole lists of names with their counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import ConfigError, NamesError
from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.outcomes import LoadReport, Outcome, unexpected_names
from weightwire.transfer.loading.resolver import STEPS, NameTables, Resolver, is_tied
from weightwire.transfer.loading.slots import ExpertPart, SlotId
from weightwire.transfer.loading.stacked import StackedRow, StackedTable
from weightwire.transfer.ranks import ExpertPlacement

PLACED, DROPPED, OPTIONAL = Outcome.PLACED, Outcome.DROPPED, Outcome.SKIPPED_OPTIONAL
NOT_LOCAL, UNEXPECTED = Outcome.NOT_LOCAL, Outcome.UNEXPECTED
L2 = "model.layers.2"

# The second of three stages with two layers each, expert rank 2 of 4 with experts 4 and 5.
MIDDLE = NameTables(
    layers=range(2, 4),
    num_layers=6,
    experts=ExpertTable(8),
    owns_embedding=False,
    owns_final_norm=False,
    owns_head=False,
    mapper=WeightsMapper(suffixes={".old_weight": ".weight", ".junk": None}),
    skip_prefixes=("visual.",),
    skip_substrings=("ema_",),
    global_expert_tensors=("w13_input_scale",),
)
MIDDLE_SHELLS = (
    f"{L2}.input_layernorm.weight",
    f"{L2}.self_attn.qkv_proj.weight",
    f"{L2}.self_attn.qkv_proj.weight_scale_inv",
    f"{L2}.self_attn.o_proj.weight",
    f"{L2}.self_attn.o_proj.weight_scale_inv",
    f"{L2}.self_attn.attn.k_scale",
    f"{L2}.self_attn.attn.v_scale",
    f"{L2}.mlp.gate_up_proj.weight",
    f"{L2}.mlp.experts.w13_weight",
    f"{L2}.mlp.experts.w13_weight_scale_inv",
    f"{L2}.mlp.experts.w13_input_scale",
    f"{L2}.mlp.experts.w2_weight",
    "model.layers.3.self_attn.indexer.wk.weight",
    "model.layers.3.linear_attn.norm.weight",
)
FOUR = ExpertPlacement.equal(8, 4)


def middle() -> Resolver:
    return Resolver(MIDDLE, MIDDLE_SHELLS, FOUR, 2)


# One line per way out of a step: step, rule, name, outcome, target, slot.
C1 = [
    (0, "L72", f"{L2}.mlp.junk", DROPPED, None, None),
    (1, "L76", "visual.blocks.0.weight", DROPPED, None, None),
    (1, "L76", f"{L2}.ema_mlp.weight", DROPPED, None, None),
    (3, "L68", "model.layers.1.mlp.up_proj.weight", DROPPED, None, None),
    (3, "L68", "model.layers.4.nobody.knows", DROPPED, None, None),
    (3, "L68", "model.embed_tokens.weight", DROPPED, None, None),
    (3, "L68", "lm_head.weight", DROPPED, None, None),
    (4, "L69", "model.norm.weight", DROPPED, None, None),
    (5, "L91", f"{L2}.input_layernorm.weight", PLACED, f"{L2}.input_layernorm.weight", None),
    (5, "L91", f"{L2}.mlp.gate_up_proj.weight", PLACED, f"{L2}.mlp.gate_up_proj.weight", None),
    (5, "L91", "model.layers.3.linear_attn.norm.weight", PLACED, "model.layers.3.linear_attn.norm.weight", None),
    (
        5,
        "L91",
        "model.layers.3.self_attn.indexer.wk.weight",
        PLACED,
        "model.layers.3.self_attn.indexer.wk.weight",
        None,
    ),
    (5, "L72", f"{L2}.self_attn.o_proj.old_weight", PLACED, f"{L2}.self_attn.o_proj.weight", None),
    (6, "L66", f"{L2}.self_attn.rotary_emb.inv_freq", DROPPED, None, None),
    (7, "L67", f"{L2}.self_attn.indexer.wk.weight", DROPPED, None, None),
    (8, "L82", f"{L2}.self_attn.v_proj.v_scale", PLACED, f"{L2}.self_attn.attn.v_scale", None),
    (8, "L82", f"{L2}.self_attn.k_proj.output_scale", PLACED, f"{L2}.self_attn.attn.k_scale", None),
    (9, "L54", f"{L2}.self_attn.q_proj.weight", PLACED, f"{L2}.self_attn.qkv_proj.weight", "q"),
    (9, "L54", f"{L2}.self_attn.q_proj.old_weight", PLACED, f"{L2}.self_attn.qkv_proj.weight", "q"),
    (9, "L54", f"{L2}.mlp.up_proj.weight", PLACED, f"{L2}.mlp.gate_up_proj.weight", 1),
    (9, "L55", f"{L2}.self_attn.q_proj.bias", OPTIONAL, f"{L2}.self_attn.qkv_proj.bias", "q"),
    (9, "L83", f"{L2}.self_attn.k_proj.weight_scale", PLACED, f"{L2}.self_attn.qkv_proj.weight_scale_inv", "k"),
    (10, "L59", f"{L2}.mlp.experts.5.up_proj.weight", PLACED, f"{L2}.mlp.experts.w13_weight", ExpertPart(5, "w3")),
    (10, "L59", f"{L2}.mlp.experts.4.down_proj.weight", PLACED, f"{L2}.mlp.experts.w2_weight", ExpertPart(4, "w2")),
    (10, "L62", f"{L2}.mlp.experts.3.up_proj.weight", NOT_LOCAL, f"{L2}.mlp.experts.w13_weight", ExpertPart(3, "w3")),
    (10, "L62", f"{L2}.mlp.experts.6.up_proj.bias", NOT_LOCAL, f"{L2}.mlp.experts.w13_bias", ExpertPart(6, "w3")),
    (10, "L55", f"{L2}.mlp.experts.5.up_proj.bias", OPTIONAL, f"{L2}.mlp.experts.w13_bias", ExpertPart(5, "w3")),
    (10, "L63", f"{L2}.mlp.experts.3.w1.input_scale", PLACED, f"{L2}.mlp.experts.w13_input_scale", ExpertPart(3, "w1")),
    (10, "L125", f"{L2}.mlp.experts.gate_up_proj", PLACED, f"{L2}.mlp.experts.w13_weight", None),
    (
        *(10, "L83", f"{L2}.mlp.experts.4.gate_proj.weight_scale", PLACED),
        *(f"{L2}.mlp.experts.w13_weight_scale_inv", ExpertPart(4, "w1")),
    ),
    (11, "L83", f"{L2}.self_attn.o_proj.weight_scale", PLACED, f"{L2}.self_attn.o_proj.weight_scale_inv", None),
    (12, "L82", "model.layers.3.self_attn.k_proj.k_scale", DROPPED, None, None),
    (13, "L55", f"{L2}.self_attn.o_proj.bias", OPTIONAL, f"{L2}.self_attn.o_proj.bias", None),
    (14, "L70", f"{L2}.foo.weight", UNEXPECTED, f"{L2}.foo.weight", None),
    (14, "L70", "model.layers.6.mlp.up_proj.weight", UNEXPECTED, "model.layers.6.mlp.gate_up_proj.weight", 1),
    (14, "L70", f"{L2}.mlp.experts.8.up_proj.weight", UNEXPECTED, f"{L2}.mlp.experts.8.up_proj.weight", None),
    (14, "L70", f"{L2}.mlp.experts.5.up_proj.foo", UNEXPECTED, f"{L2}.mlp.experts.w13_foo", ExpertPart(5, "w3")),
]


# C1, L54, L55, L59, L62, L63, L66, L67, L68, L69, L70, L72, L82, L83
@pytest.mark.parametrize(
    ("step", "rule", "name", "outcome", "target", "slot"),
    [pytest.param(*case, id=f"{case[1]} ends {case[2]}") for case in C1],
)
def test_resolver_step_decides(
    *, step: int, rule: str, name: str, outcome: Outcome, target: str | None, slot: SlotId
) -> None:
    found = middle().resolve(name)
    assert (found.name, found.outcome, found.rule) == (name, outcome, rule)
    assert (found.target, found.slot) == (target, slot)
    assert middle().deciding_step(name) == step


# C1
def test_every_step_and_rule_has_its_case() -> None:
    """The step of tied heads has tests of its own, as this model has none."""
    cases = {(step, rule) for step, rule, *_ in C1} | {(2, "L77"), (2, "L91")}
    assert cases == {(index, rule) for index, step in enumerate(STEPS) for rule in step.rules}


# L06
def test_every_step_says_which_fact_it_needs() -> None:
    assert all(step.needs for step in STEPS)
    needed = {index: step.needs for index, step in enumerate(STEPS)}
    assert "layer number" in needed[3]
    assert "expert number" in needed[10]


@given(
    st.lists(st.sampled_from([*".".join(MIDDLE_SHELLS).split("."), "", "5", "q_proj", "up_proj", "bias"]), max_size=9)
)
def test_every_name_has_an_outcome_that_its_step_may_have(components: list[str]) -> None:
    name, resolver = ".".join(components), middle()
    found = resolver.resolve_all(name)
    rules = STEPS[resolver.deciding_step(name)].rules
    assert {outcome.rule for outcome in found} <= set(rules)
    assert {outcome.name for outcome in found} == {name}
    assert all(outcome.target in MIDDLE_SHELLS for outcome in found if outcome.outcome is PLACED)
    assert resolver.wants(name) is any(outcome.outcome in (PLACED, OPTIONAL) for outcome in found)


# L04
def test_ten_names_have_ten_outcomes() -> None:
    names = [
        f"{L2}.input_layernorm.weight",
        f"{L2}.self_attn.q_proj.weight",
        f"{L2}.self_attn.k_proj.weight",
        f"{L2}.mlp.gate_proj.weight",
        f"{L2}.mlp.experts.4.down_proj.weight",
        f"{L2}.self_attn.rotary_emb.inv_freq",
        "model.layers.5.input_layernorm.weight",
        f"{L2}.self_attn.q_proj.bias",
        f"{L2}.mlp.experts.0.down_proj.weight",
        f"{L2}.foo.weight",
    ]
    report = LoadReport(outcomes=tuple(map(middle().resolve, names)))
    assert report.counts == {PLACED: 5, DROPPED: 2, OPTIONAL: 1, NOT_LOCAL: 1, UNEXPECTED: 1}
    assert sum(report.counts.values()) == len(names)


# L06, L35
def test_reader_fetches_forty_of_a_hundred_names() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in (2, 3) for e in range(8)]
    names += [f"model.layers.{layer}.mlp.part_{i}.weight" for layer in (0, 1, 4) for i in range(16)]
    names += [f"model.layers.3.mlp.part_{i}.weight" for i in range(36)]
    shells = [f"model.layers.{layer}.mlp.experts.w13_weight" for layer in (2, 3)]
    shells += [f"model.layers.3.mlp.part_{i}.weight" for i in range(36)]
    resolver = Resolver(MIDDLE, shells, FOUR, 2)
    assert len(names) == 100
    assert len([name for name in names if resolver.wants(name)]) == 40


# L06, L35
def test_reader_fetches_the_tensors_of_local_experts() -> None:
    names = [f"{L2}.mlp.experts.{e}.{matrix}_proj.weight" for e in range(8) for matrix in ("gate", "up", "down")]
    assert len([name for name in names if middle().wants(name)]) == 6


def test_reader_fetches_what_may_be_skipped_only_if_it_is_zero() -> None:
    assert middle().wants(f"{L2}.self_attn.q_proj.bias")
    assert not middle().wants(f"{L2}.foo.weight")


# L56
@pytest.mark.parametrize(
    ("name", "target", "slot"),
    [
        ("mlp.experts.0.gate_proj.weight", "mlp.experts.w13_weight", ExpertPart(0, "w1")),
        ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight", 0),
    ],
)
def test_stacked_rows_stand_before_experts_and_pass_them_over(name: str, target: str, slot: SlotId) -> None:
    tables = NameTables(layers=range(1), num_layers=1, experts=ExpertTable(2))
    shells = ["mlp.experts.w13_weight", "mlp.gate_up_proj.weight", "mlp.experts.0.gate_up_proj.weight"]
    found = Resolver(tables, shells).resolve(name)
    assert (found.outcome, found.target, found.slot) == (PLACED, target, slot)


# L57
@pytest.mark.parametrize("name", ["m.k_proj.k_scale", "m.k_proj.weight_zero"])
def test_missing_shell_is_not_in_the_loaded_set(name: str) -> None:
    tables = NameTables(layers=range(1), num_layers=1)
    resolver = Resolver(tables, ["m.qkv_proj.weight"])
    report = LoadReport(outcomes=(resolver.resolve(name), resolver.resolve("m.k_proj.weight")))
    assert report.loaded == {"m.qkv_proj.weight"}


# L57, L82
def test_fused_scale_is_taken_where_there_is_a_shell_for_it() -> None:
    tables = NameTables(layers=range(1), num_layers=1)
    found = Resolver(tables, ["m.qkv_proj.k_scale"]).resolve("m.k_proj.k_scale")
    assert (found.target, found.slot, found.rule) == ("m.qkv_proj.k_scale", "k", "L54")


# L62
def test_expert_rank_two_of_four_owns_four_and_five() -> None:
    names = [f"{L2}.mlp.experts.{e}.up_proj.weight" for e in range(8)]
    local = [found.slot for found in map(middle().resolve, names) if found.outcome is PLACED]
    assert local == [ExpertPart(4, "w3"), ExpertPart(5, "w3")]
    assert FOUR.local_slots(5, 2) == (1,)
    assert middle().resolve(names[3]).outcome is NOT_LOCAL


# L63
def test_global_expert_tensor_keeps_the_global_index_on_every_rank() -> None:
    for ep_rank in range(4):
        resolver = Resolver(MIDDLE, MIDDLE_SHELLS, FOUR, ep_rank)
        found = resolver.resolve(f"{L2}.mlp.experts.3.up_proj.input_scale")
        assert (found.outcome, found.rule, found.slot) == (PLACED, "L63", ExpertPart(3, "w3"))


# L64
def test_replicated_expert_is_placed_on_every_rank_that_holds_it() -> None:
    placement = ExpertPlacement.from_map(4, [[0, 1, 2], [3, 0, 1]])
    tables = NameTables(layers=range(1), num_layers=1, experts=ExpertTable(4))
    outcomes = [
        [
            Resolver(tables, ["experts.w2_weight"], placement, ep_rank).resolve(f"experts.{e}.down_proj.weight").outcome
            for e in range(4)
        ]
        for ep_rank in range(2)
    ]
    assert outcomes == [[PLACED, PLACED, PLACED, NOT_LOCAL], [PLACED, PLACED, NOT_LOCAL, PLACED]]
    assert [placement.local_slots(0, ep_rank) for ep_rank in range(2)] == [(0,), (1,)]


# L69
def test_final_norm_is_dropped_by_its_own_rule() -> None:
    tables = NameTables(layers=range(1), num_layers=2, owns_final_norm=False)
    resolver = Resolver(tables, ["model.layers.0.x.norm.weight"])
    assert resolver.resolve("model.norm.weight").rule == "L69"
    assert resolver.resolve("model.layers.0.x.norm.weight").outcome is PLACED


# L70
def test_unknown_name_is_an_error_that_lists_it() -> None:
    report = LoadReport(outcomes=tuple(map(middle().resolve, [f"{L2}.foo.weight", "model.norm.weight"])))
    with pytest.raises(NamesError, match=r"1 checkpoint tensors .*'model\.layers\.2\.foo\.weight'") as caught:
        report.check_names()
    assert caught.value.facts["unexpected"] == [f"{L2}.foo.weight"]


# L80
def test_slots_reach_the_loader_unchanged() -> None:
    rows = (StackedRow("f", "a", "0"), StackedRow("f", "b", 0), StackedRow("f", "c", -17), StackedRow("g", "d", "x.y"))
    tables = NameTables(layers=range(1), num_layers=1, stacked=StackedTable(rows))
    resolver = Resolver(tables, ["f.weight", "g.weight"])
    recorded = [resolver.resolve(f"{row.part}.weight").slot for row in rows]
    assert recorded == [row.slot for row in rows]
    assert [type(slot) for slot in recorded] == [type(row.slot) for row in rows]


# L82
def test_scale_without_shell_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    resolver = middle()
    with caplog.at_level(logging.WARNING):
        found = [resolver.resolve(f"model.layers.3.self_attn.{x}_proj.{x}_scale") for x in "kv"]
    assert [(outcome.outcome, outcome.rule) for outcome in found] == [(DROPPED, "L82")] * 2
    assert len(caplog.records) == 1
    assert "model.layers.3.self_attn.k_proj.k_scale" in caplog.text


# L82
def test_old_scale_fills_keys_and_values() -> None:
    resolver = middle()
    found = resolver.resolve_all(f"{L2}.self_attn.kv_scale")
    assert [outcome.target for outcome in found] == [f"{L2}.self_attn.attn.{x}_scale" for x in "kv"]
    assert resolver.resolve(f"{L2}.self_attn.kv_scale") == found[0]


# L83
def test_block_scale_of_an_expert_of_another_rank_is_not_local() -> None:
    found = middle().resolve(f"{L2}.mlp.experts.1.gate_proj.weight_scale")
    assert (found.outcome, found.rule) == (NOT_LOCAL, "L62")


# L72
def test_mapper_is_applied_once() -> None:
    mapper = WeightsMapper(suffixes={".a": ".b", ".b": ".c"})
    resolver = Resolver(replace(MIDDLE, mapper=mapper), ["m.b", "m.c"])
    assert [resolver.resolve(name).target for name in ("m.a", "m.b")] == ["m.b", "m.c"]


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embedding_model(*, tied: bool, shells: tuple[str, ...]) -> Resolver:
    return Resolver(NameTables(layers=range(1), num_layers=1, tied=tied), shells)


# L77
@pytest.mark.parametrize(
    ("tied", "shells", "name", "expected"),
    [
        pytest.param(True, (EMBED,), EMBED, [(PLACED, "L91", EMBED)], id="one object: the embedding is placed"),
        pytest.param(True, (EMBED,), HEAD, [(DROPPED, "L77", None)], id="one object: the head's name is dropped"),
        pytest.param(
            True,
            (EMBED, HEAD),
            EMBED,
            [(PLACED, "L91", EMBED), (PLACED, "L77", HEAD)],
            id="two shells: the embedding fills both",
        ),
        pytest.param(True, (EMBED, HEAD), HEAD, [(DROPPED, "L77", None)], id="two shells: the head's name is dropped"),
        pytest.param(True, (HEAD,), EMBED, [(PLACED, "L77", HEAD)], id="no embedding here: it fills the head"),
        pytest.param(False, (EMBED, HEAD), HEAD, [(PLACED, "L91", HEAD)], id="not tied: the head has its own values"),
        pytest.param(False, (EMBED, HEAD), EMBED, [(PLACED, "L91", EMBED)], id="not tied: the embedding fills itself"),
    ],
)
def test_tied_head_is_filled_from_the_embedding(
    tied: bool, shells: tuple[str, ...], name: str, expected: list[tuple[Outcome, str, str | None]]
) -> None:
    resolver = embedding_model(tied=tied, shells=shells)
    found = resolver.resolve_all(name)
    assert [(outcome.outcome, outcome.rule, outcome.target) for outcome in found] == expected
    assert resolver.wants(name) is (expected[0][0] is PLACED)


# L77
def test_tied_head_of_the_last_stage_is_in_the_loaded_set() -> None:
    tables = NameTables(layers=range(1, 2), num_layers=2, tied=True, owns_embedding=False)
    found = Resolver(tables, ["model.norm.weight", HEAD]).resolve(EMBED)
    assert LoadReport(outcomes=(found,)).loaded == {HEAD}


TIE = "tie_word_embeddings"


# L77
@pytest.mark.parametrize(
    ("config", "tied", "num_warnings"),
    [
        pytest.param({TIE: True}, True, 0, id="one level"),
        pytest.param({TIE: False}, False, 0, id="one level, false"),
        pytest.param({}, False, 0, id="nothing said"),
        pytest.param({TIE: None, "text_config": None}, False, 0, id="nulls say nothing"),
        pytest.param({TIE: True, "text_config": {TIE: False}}, False, 1, id="the inner level wins"),
        pytest.param({TIE: False, "text_config": {TIE: True}}, True, 1, id="the other way round"),
        pytest.param({TIE: True, "text_config": {TIE: True}}, True, 0, id="both agree"),
        pytest.param({TIE: True, "text_config": {}}, True, 0, id="the inner level says nothing"),
        pytest.param({"thinker_config": {"text_config": {TIE: True}}}, True, 0, id="two levels down"),
        pytest.param({TIE: False, "vision_config": {TIE: True}}, False, 0, id="not the vision tower's"),
    ],
)
def test_b16_flag_nearest_to_the_language_model_wins(
    config: Mapping[str, object], tied: bool, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert is_tied(config) is tied
    assert len(caplog.records) == num_warnings


def test_b16_architecture_may_tie_by_default() -> None:
    assert is_tied({}, default=True)
    assert not is_tied({TIE: False}, default=True)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({TIE: "true"}, TIE),
        ({TIE: 1}, TIE),
        ({"text_config": {TIE: []}}, f"text_config.{TIE}"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_b16_flag_of_another_type_is_refused(config: Mapping[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: is ") as caught:
        is_tied(config)
    assert caught.value.facts["field"] == field


# L77
@pytest.mark.parametrize(
    ("config", "file", "filled", "dropped"),
    [
        pytest.param({TIE: True}, [EMBED], {EMBED}, 0, id="i: no head, tied"),
        pytest.param({TIE: True}, [EMBED, HEAD], {EMBED}, 1, id="ii: head present, tied"),
        pytest.param(
            {TIE: True, "text_config": {TIE: False}}, [EMBED, HEAD], {EMBED, HEAD}, 0, id="iii: levels contradict"
        ),
        pytest.param({TIE: False}, [EMBED], {EMBED}, 0, id="iv: no head, not tied: it stays empty"),
    ],
)
def test_b16_head_is_tied_or_has_its_own_values(
    config: Mapping[str, object], file: list[str], filled: set[str], dropped: int
) -> None:
    tied = is_tied(config)
    resolver = embedding_model(tied=tied, shells=(EMBED,) if tied else (EMBED, HEAD))
    report = LoadReport(outcomes=tuple(map(resolver.resolve, file)))
    assert report.loaded == filled
    assert report.counts[DROPPED] == dropped
    assert report.unexpected == ()


# L68, L77
def test_b17_last_stage_takes_its_layers_and_the_tied_head() -> None:
    tables = NameTables(layers=range(2, 4), num_layers=4, tied=True, owns_embedding=False)
    shells = ["model.layers.2.x.weight", "model.layers.3.x.weight", "model.norm.weight", HEAD]
    resolver = Resolver(tables, shells)
    file = [EMBED, *(f"model.layers.{layer}.x.weight" for layer in range(4)), "model.norm.weight"]
    file += ["model.layers.0.block_sparse_moe.gate.weight", "model.layers.2.unknown.weight"]
    report = LoadReport(outcomes=tuple(map(resolver.resolve, file)))
    assert report.loaded == set(shells)
    assert [found.name for found in report.outcomes if found.rule == "L68"] == [file[1], file[2], file[6]]
    assert report.counts == {PLACED: 4, DROPPED: 3, OPTIONAL: 0, NOT_LOCAL: 0, UNEXPECTED: 1}
    assert report.unexpected == ("model.layers.2.unknown.weight",)


# L55
@pytest.mark.parametrize(
    ("optional_suffixes", "outcome", "fetched"),
    [
        pytest.param((".bias",), OPTIONAL, True, id="declared optional: its values are looked at"),
        pytest.param((), UNEXPECTED, False, id="not declared: an error"),
    ],
)
@pytest.mark.parametrize("name", ["q_proj.bias", "o_proj.bias", "experts.0.up_proj.bias"])
def test_x04_bias_without_shell(name: str, optional_suffixes: tuple[str, ...], outcome: Outcome, fetched: bool) -> None:
    tables = NameTables(layers=range(1), num_layers=1, experts=ExpertTable(1), optional_suffixes=optional_suffixes)
    resolver = Resolver(tables, ["qkv_proj.weight", "o_proj.weight", "experts.w13_weight"])
    assert resolver.resolve(name).outcome is outcome
    assert resolver.wants(name) is fetched


# L70
def test_x11_unknown_expert_name_lists_the_nearest_shells() -> None:
    shells = [
        f"model.layers.{layer}.{rest}"
        for layer in range(40)
        for rest in ("mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight", "norm.weight")
    ]
    tables = NameTables(layers=range(40), num_layers=40, experts=ExpertTable(8))
    resolver = Resolver(tables, shells)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert resolver.resolve(name).outcome is UNEXPECTED
    assert resolver.nearest(name)[:2] == tuple(shells[3:5])
    message = str(unexpected_names([name], hint=resolver.hint([name])))
    assert message.startswith(f"1 checkpoint tensors have no place in this model: '{name}'; nearest to '{name}': ")
    assert "'model.layers.1.mlp.experts.routed_experts.w13_weight'" in message


# L70
def test_x11_prefix_may_be_missing_on_the_other_side() -> None:
    tables = NameTables(layers=range(1), num_layers=1, experts=ExpertTable(8))
    resolver = Resolver(tables, ["mlp.experts.w13_weight", "mlp.gate.weight"])
    name = "mlp.experts.routed_experts.3.up_proj.weight"
    assert resolver.resolve(name).outcome is UNEXPECTED
    assert resolver.nearest(name)[0] == "mlp.experts.w13_weight"


def test_hint_says_nothing_where_there_are_no_shells() -> None:
    assert Resolver(MIDDLE, []).hint(["a.b"]) == ""
