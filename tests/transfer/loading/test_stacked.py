"""Parts of fused shells: matched by whole components, whatever the order of the rows."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.slots import SlotId
from weightwire.transfer.loading.stacked import NO_MATCH, STANDARD_ROWS, Dispatch, StackedRow, StackedTable

TABLE = StackedTable(STANDARD_ROWS)
COMPONENTS = st.sampled_from(
    ["model", "layers", "0", "mlp", "qkv_proj", "gate_up_proj", "my_q_proj", "weight", "bias", "q_projx", ""]
)


# L53
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("self_attn.qkv_proj.weight", id="fused already, and v_proj is in its text"),
        pytest.param("mlp.gate_up_proj.weight", id="fused already, and up_proj is in its text"),
        pytest.param("model.layers.0.mlp.gate_up_proj.weight_scale", id="a scale of what is fused already"),
        pytest.param("self_attn.o_proj.weight", id="no part of anything"),
        pytest.param("my_q_proj.weight", id="a part at the end of a component"),
        pytest.param("q_proj_a.weight", id="a part at the start of a component"),
        pytest.param("", id="nothing"),
    ],
)
def test_table_lets_other_names_pass(name: str) -> None:
    assert TABLE.match(name) is None


# L53, L54
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("m.self_attn.q_proj.weight", ("m.self_attn.qkv_proj.weight", "q"), id="q"),
        pytest.param("m.self_attn.k_proj.bias", ("m.self_attn.qkv_proj.bias", "k"), id="k, a bias"),
        pytest.param("m.self_attn.v_proj.v_scale", ("m.self_attn.qkv_proj.v_scale", "v"), id="v, a scale"),
        pytest.param("m.mlp.gate_proj.weight", ("m.mlp.gate_up_proj.weight", 0), id="gate"),
        pytest.param("m.mlp.up_proj.weight", ("m.mlp.gate_up_proj.weight", 1), id="up"),
        pytest.param("q_proj.weight", ("qkv_proj.weight", "q"), id="relative name, part at its start"),
        pytest.param("self_attn.q_proj", ("self_attn.qkv_proj", "q"), id="part at its end"),
        pytest.param("x.gate_proj.bias", ("x.gate_up_proj.bias", 0), id="never renamed twice"),
        pytest.param("mlp.shared_experts.up_proj.weight", ("mlp.shared_experts.gate_up_proj.weight", 1), id="shared"),
        pytest.param(
            "v_proj.layers.0.q_proj.weight", ("v_proj.layers.0.qkv_proj.weight", "q"), id="nearest to the end"
        ),
    ],
)
def test_table_renames_one_component(name: str, expected: tuple[str, SlotId]) -> None:
    assert TABLE.match(name) == expected


# L54
@given(
    st.lists(st.one_of(COMPONENTS, st.sampled_from([row.part for row in STANDARD_ROWS])), max_size=6).map(".".join),
    st.permutations(STANDARD_ROWS),
)
def test_match_depends_on_the_name_and_not_on_the_order_of_rows(name: str, rows: list[StackedRow]) -> None:
    assert StackedTable(tuple(rows)).match(name) == TABLE.match(name)


# L54
@given(st.lists(COMPONENTS, max_size=3), st.sampled_from(STANDARD_ROWS), st.lists(COMPONENTS, max_size=3))
def test_match_changes_only_the_part(before: list[str], row: StackedRow, after: list[str]) -> None:
    found = TABLE.match(".".join((*before, row.part, *after)))
    assert found == (".".join((*before, row.fused, *after)), row.slot)


# L56
@pytest.mark.parametrize(
    "name",
    ["mlp.experts.0.gate_proj.weight", "experts.11.up_proj.weight", "model.layers.1.mlp.experts.gate_proj.weight"],
)
def test_table_leaves_experts_to_their_own_table(name: str) -> None:
    assert TABLE.match(name) is None
    assert TABLE.dispatch(name, {"mlp.experts.0.gate_up_proj.weight"}) == NO_MATCH


# L54, L55, L57
@pytest.mark.parametrize(
    ("name", "shells", "expected"),
    [
        pytest.param(
            "q_proj.weight",
            {"qkv_proj.weight"},
            Dispatch(outcome=Outcome.PLACED, target="qkv_proj.weight", slot="q"),
            id="there is a shell",
        ),
        pytest.param(
            "q_proj.bias",
            {"qkv_proj.weight"},
            Dispatch(outcome=Outcome.SKIPPED_OPTIONAL, target="qkv_proj.bias", slot="q"),
            id="a bias without a shell",
        ),
        pytest.param(
            "k_proj.kv_scale",
            {"qkv_proj.weight"},
            Dispatch(outcome=Outcome.SKIPPED_OPTIONAL, target="qkv_proj.kv_scale", slot="k"),
            id="a declared optional suffix",
        ),
        pytest.param(
            "q_proj.weight",
            {"qkv_proj.bias"},
            Dispatch(outcome=Outcome.UNEXPECTED, target="qkv_proj.weight", slot="q"),
            id="a weight without a shell",
        ),
        pytest.param(
            "k_proj.k_scale",
            {"qkv_proj.weight"},
            Dispatch(outcome=Outcome.UNEXPECTED, target="qkv_proj.k_scale", slot="k"),
            id="a scale without a shell is not loaded",
        ),
        pytest.param(
            "x.gate_proj.bias",
            {"x.gate_up_proj.weight"},
            Dispatch(outcome=Outcome.SKIPPED_OPTIONAL, target="x.gate_up_proj.bias", slot=0),
            id="renamed once, whatever comes of it",
        ),
        pytest.param("norm.weight", {"norm.weight"}, NO_MATCH, id="no row"),
        pytest.param("q_proj.weight", {"q_proj.weight"}, NO_MATCH, id="not fused in this model"),
    ],
)
def test_dispatch_tells_four_results_apart(name: str, shells: set[str], expected: Dispatch) -> None:
    assert TABLE.dispatch(name, shells) == expected


# L55
def test_dispatch_skips_nothing_that_is_not_declared_optional() -> None:
    found = TABLE.dispatch("q_proj.bias", {"qkv_proj.weight"}, optional_suffixes=())
    assert found.outcome is Outcome.UNEXPECTED


# L58
def test_slot_says_which_part_whatever_arrives_first() -> None:
    halves: list[dict[SlotId, str]] = []
    for order in permutations(["gate_proj.weight", "up_proj.weight"]):
        halves.append({})
        for name in order:
            found = TABLE.match(name)
            assert found is not None
            halves[-1][found[1]] = name
    assert halves == [{0: "gate_proj.weight", 1: "up_proj.weight"}] * 2


# L58, L80
def test_slots_keep_their_type_and_value() -> None:
    rows = (StackedRow("f", "a", "a"), StackedRow("f", "b", "0"), StackedRow("f", "c", 0), StackedRow("f", "d", -17))
    found = [StackedTable(rows).match(f"{row.part}.weight") for row in rows]
    assert found == [("f.weight", "a"), ("f.weight", "0"), ("f.weight", 0), ("f.weight", -17)]
    assert [type(match[1]) for match in found if match] == [str, str, int, int]


# L54
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((StackedRow("f", "a", 0), StackedRow("g", "a", 0)), id="one part in two rows"),
        pytest.param((StackedRow("f", "a.b", 0),), id="a part of two components"),
        pytest.param((StackedRow("f", "", 0),), id="an empty part"),
    ],
)
def test_table_refuses_rows_that_have_no_one_meaning(rows: tuple[StackedRow, ...]) -> None:
    with pytest.raises(ValueError, match="stacked rows"):
        StackedTable(rows)


# L53, L54
@pytest.mark.parametrize("rows", [STANDARD_ROWS, STANDARD_ROWS[::-1]], ids=["in order", "reversed"])
def test_b12_fused_names_are_their_own(rows: tuple[StackedRow, ...]) -> None:
    shells = {"mlp.gate_up_proj.weight", "qkv_proj.weight"}
    table = StackedTable(rows)
    assert table.dispatch("mlp.gate_up_proj.weight", shells) == NO_MATCH
    found = [table.dispatch(name, shells) for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "q_proj.weight")]
    assert [(d.outcome, d.target, d.slot) for d in found] == [
        (Outcome.PLACED, "mlp.gate_up_proj.weight", 0),
        (Outcome.PLACED, "mlp.gate_up_proj.weight", 1),
        (Outcome.PLACED, "qkv_proj.weight", "q"),
    ]
