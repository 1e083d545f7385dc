"""Names of experts: the parser against the table that it replaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.loading.expert_names import ExpertTable, expert_name_filter
from weightwire.transfer.loading.slots import ExpertPart, ExpertPartName

TWELVE = ExpertTable(12)
COLUMNS: tuple[tuple[str, str, ExpertPartName], ...] = (
    ("gate_proj", "w13_", "w1"),
    ("up_proj", "w13_", "w3"),
    ("down_proj", "w2_", "w2"),
    ("w1", "w13_", "w1"),
    ("w3", "w13_", "w3"),
    ("w2", "w2_", "w2"),
)


def rows(num_experts: int) -> Iterator[tuple[str, str, ExpertPart]]:
    """The table with a row for each matrix of each expert."""
    for expert in range(num_experts):
        for column, shell, part in COLUMNS:
            yield f".experts.{expert}.{column}.", f".experts.{shell}", ExpertPart(expert, part)


ROWS = tuple(rows(12))


def scan(name: str) -> tuple[str, ExpertPart] | None:
    """What the table says, row by row; a dot in front stands for the start of a name."""
    for text, shell, slot in ROWS:
        if text in f".{name}":
            renamed = f".{name}".replace(text, shell)
            return renamed[1:], slot
    return None


# L59
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "experts.3.up_proj.weight_scale_inv",
            ("experts.w13_weight_scale_inv", ExpertPart(3, "w3")),
            id="a scale goes the way of its weight",
        ),
        pytest.param(
            "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv",
            ("model.layers.0.mlp.experts.w13_weight_scale_inv", ExpertPart(3, "w3")),
            id="full name",
        ),
        pytest.param("experts.0.gate_proj.weight", ("experts.w13_weight", ExpertPart(0, "w1")), id="gate"),
        pytest.param("experts.11.down_proj.weight", ("experts.w2_weight", ExpertPart(11, "w2")), id="down"),
    ],
)
def test_table_names_shell_expert_and_matrix(name: str, expected: tuple[str, ExpertPart]) -> None:
    assert TWELVE.match(name) == expected


# L61
def test_parser_equals_the_scan_for_every_expert_and_name() -> None:
    names = [f"m.experts.{e}.{column}.weight" for e in range(14) for column in ("gate_proj", "up_proj", "down_proj")]
    found = [TWELVE.match(name) for name in names]
    assert found == [scan(name) for name in names]
    assert len({slot for match in found if match for slot in match[1:]}) == 36
    assert TWELVE.match("experts.11.up_proj.weight") != TWELVE.match("experts.1.up_proj.weight")


# L61
@given(
    st.sampled_from(["", "m.", "model.layers.10.mlp.", "shared_", "m.shared_"]),
    st.sampled_from(["experts.", "experts", "expert.", "experts.experts."]),
    st.one_of(st.integers(0, 130).map(str), st.sampled_from(["", "01", "1_1", "+1", "x", "-1", "1" * 5000, "\u0661"])),
    st.sampled_from([".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3", ".w13", "_up_proj", ".gate"]),
    st.sampled_from([".weight", ".weight_scale_inv", ".lora.weight", "weight", ".input_scale"]),
)
def test_parser_equals_the_scan(prefix: str, container: str, number: str, matrix: str, rest: str) -> None:
    name = prefix + container + number + matrix + rest
    assert TWELVE.match(name) == scan(name)


@given(st.text(alphabet="experts.0123_gateupdownprojw", max_size=60))
def test_parser_takes_any_text(name: str) -> None:
    found = TWELVE.match(name)
    if found is not None and found[1] is not None:
        assert found == scan(name)


# L115
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("experts.2.w3.input_scale", ("experts.w13_input_scale", ExpertPart(2, "w3")), id="up"),
        pytest.param("experts.2.w1.input_scale", ("experts.w13_input_scale", ExpertPart(2, "w1")), id="gate"),
        pytest.param("experts.2.w2.input_scale", ("experts.w2_input_scale", ExpertPart(2, "w2")), id="down"),
        pytest.param("experts.4.w2.input_scale", None, id="not of a shared expert that poses as routed"),
        pytest.param("experts.4.up_proj.weight", ("experts.w13_weight", ExpertPart(4, "w3")), id="but its weights"),
        pytest.param("shared_experts.w2.input_scale", None, id="not of a shared expert"),
    ],
)
def test_table_knows_the_names_of_w4a8_scales(name: str, expected: tuple[str, ExpertPart] | None) -> None:
    assert ExpertTable(5, num_shared=1).match(name) == expected


# L59
def test_table_takes_other_names_for_the_matrices() -> None:
    table = ExpertTable(8, gate="w1", up="w3", down="w2", container="block_sparse_moe.experts")
    assert table.match("layers.0.block_sparse_moe.experts.7.w3.weight") == (
        "layers.0.block_sparse_moe.experts.w13_weight",
        ExpertPart(7, "w3"),
    )
    assert table.match("layers.0.mlp.experts.7.w3.weight") is None


# L54, L59
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("mlp.experts.gate_up_proj", "mlp.experts.w13_weight", id="no suffix"),
        pytest.param("mlp.experts.down_proj", "mlp.experts.w2_weight", id="down"),
        pytest.param("experts.gate_up_proj.weight", "experts.w13_weight", id="the suffix is not doubled"),
        pytest.param("experts.down_proj.weight_scale_inv", "experts.w2_weight_scale_inv", id="a scale"),
        pytest.param("experts.gate_up_proj_scale", "experts.w13_weight_scale_inv", id="a scale without a dot"),
    ],
)
def test_b12_tensor_of_all_experts_has_no_number(name: str, target: str) -> None:
    assert ExpertTable(2).match(name) == (target, None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mlp.gate_up_proj.weight", id="of no experts"),
        pytest.param("mlp.shared_experts.gate_up_proj", id="of shared experts"),
        pytest.param("mlp.experts.gate_up_proj_x", id="another name"),
        pytest.param("mlp.experts.w13_weight", id="runtime name"),
        pytest.param("mlp.experts.12.up_proj.weight", id="one expert too many"),
        pytest.param("mlp.experts.1.up_proj", id="nothing after the matrix"),
    ],
)
def test_table_lets_other_names_pass(name: str) -> None:
    assert TWELVE.match(name) is None


# L65
@pytest.mark.parametrize(
    ("name", "load", "experts_only"),
    [
        ("layers.1.mlp.experts.2.up_proj.weight", True, True),
        ("layers.1.mlp.experts.3.up_proj.weight", False, False),
        ("layers.0.mlp.experts.0.up_proj.weight", False, False),
        ("model.norm.weight", True, False),
        ("model.layers.1.mlp.experts.0.down_proj.weight_scale", True, True),
        ("model.layers.1.mlp.experts.20.up_proj.weight", False, False),
        ("model.layers.11.mlp.experts.2.up_proj.weight", False, False),
        ("model.layers.1.mlp.gate.weight", True, False),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", True, False),
        ("model.layers.1.mlp.experts.gate_up_proj", True, False),
        ("mylayers.0.mlp.experts.0.up_proj.weight", True, False),
    ],
)
def test_name_filter_passes_the_experts_that_are_wanted(name: str, load: bool, experts_only: bool) -> None:
    assert expert_name_filter({1: [0, 2]}, "load")(name) is load
    assert expert_name_filter({1: [0, 2]}, "experts_only")(name) is experts_only


# L35, L65
def test_name_filter_fetches_six_of_twenty_four_experts_tensors() -> None:
    names = [f"layers.0.mlp.experts.{e}.{m}_proj.weight" for e in range(8) for m in ("gate", "up", "down")]
    assert sum(map(expert_name_filter({0: [4, 5]}, "load"), names)) == 6


def test_name_filter_knows_two_modes() -> None:
    with pytest.raises(ValueError, match="no mode 'all'"):
        expert_name_filter({}, "all")  # type: ignore[arg-type]
