"""Scales under other names than their shells have."""

from __future__ import annotations

import pytest

from weightwire.transfer.loading.scale_names import (
    block_scale_target,
    is_kv_scale,
    kv_scale_targets,
    resolve_scale,
)

LAYER = "layers.0.self_attn"
USUAL = {f"{LAYER}.attn.{letter}_scale" for letter in "qkv"}
LATENT = {f"{LAYER}.attn_mqa.{letter}_scale" for letter in "kv"}


# L82
@pytest.mark.parametrize(
    ("name", "shells", "targets"),
    [
        pytest.param(f"{LAYER}.v_proj.v_scale", USUAL, ["attn.v_scale"], id="v"),
        pytest.param(f"{LAYER}.k_proj.k_scale", USUAL, ["attn.k_scale"], id="k"),
        pytest.param(f"{LAYER}.k_proj.k_scale", LATENT, ["attn_mqa.k_scale"], id="latent attention"),
        pytest.param(f"{LAYER}.v_proj.v_scale", LATENT, ["attn_mqa.v_scale"], id="latent attention, v"),
        pytest.param(f"{LAYER}.k_scale", USUAL, ["attn.k_scale"], id="bare k"),
        pytest.param(f"{LAYER}.v_scale", USUAL, ["attn.v_scale"], id="bare v"),
        pytest.param(f"{LAYER}.attn.k_scale", USUAL, ["attn.k_scale"], id="the shell's name"),
        pytest.param(f"{LAYER}.attn.k_scale", LATENT, ["attn_mqa.k_scale"], id="the other attention layer"),
        pytest.param(f"{LAYER}.kv_scale", USUAL, ["attn.k_scale", "attn.v_scale"], id="old scale, used for both"),
        pytest.param(f"{LAYER}.q_proj.output_scale", USUAL, ["attn.q_scale"], id="quark q"),
        pytest.param(f"{LAYER}.k_proj.output_scale", USUAL, ["attn.k_scale"], id="quark k"),
        pytest.param(f"{LAYER}.v_proj.output_scale", USUAL, ["attn.v_scale"], id="quark v"),
        pytest.param(f"{LAYER}.k_proj.k_scale", set(), [], id="no such shell"),
        pytest.param(f"{LAYER}.k_proj.v_scale", USUAL, [], id="a scale of the wrong projection"),
        pytest.param(f"{LAYER}.o_proj.output_scale", USUAL, [], id="no cache"),
    ],
)
def test_kv_scale_goes_to_the_attention_layer(name: str, shells: set[str], targets: list[str]) -> None:
    full = tuple(f"{LAYER}.{target}" for target in targets)
    assert kv_scale_targets(name, shells) == full
    assert resolve_scale(name, shells) == (full[0] if full else None)


# L82
def test_kv_scale_of_a_relative_name() -> None:
    assert kv_scale_targets("k_scale", {"attn.k_scale"}) == ("attn.k_scale",)


# L82
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{LAYER}.k_proj.k_scale", True),
        (f"{LAYER}.kv_scale", True),
        (f"{LAYER}.k_proj.output_scale", True),
        (f"{LAYER}.o_proj.output_scale", False),
        (f"{LAYER}.k_proj.weight_scale", False),
        (f"{LAYER}.my_k_scale", False),
        ("", False),
    ],
)
def test_kv_scale_is_told_by_whole_components(name: str, expected: bool) -> None:
    assert is_kv_scale(name) is expected


# L83
@pytest.mark.parametrize(
    ("name", "shells", "target"),
    [
        pytest.param("p.weight_scale", {"p.weight_scale_inv"}, "p.weight_scale_inv", id="only the inverse is there"),
        pytest.param("p.weight_scale", {"p.weight_scale", "p.weight_scale_inv"}, None, id="a shell of its own"),
        pytest.param("p.weight_scale", {"q.weight_scale_inv"}, None, id="neither"),
        pytest.param("p.input_scale", {"p.input_scale_inv"}, None, id="another scale"),
        pytest.param(
            "experts.w13_weight_scale",
            {"experts.w13_weight_scale_inv"},
            "experts.w13_weight_scale_inv",
            id="of experts",
        ),
    ],
)
def test_block_scale_fills_the_inverse(name: str, shells: set[str], target: str | None) -> None:
    assert block_scale_target(name, shells) == target
    assert resolve_scale(name, shells) == target
