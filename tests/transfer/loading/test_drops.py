"""What a rank leaves aside: each rule on the names that it is for, and on those that only look like them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightwire.transfer.loading.drops import (
    indexer_owners,
    is_foreign_final_norm,
    is_foreign_indexer,
    is_off_stage,
    is_rotary_cache,
    is_within,
    layer_of,
    on_stage,
    select_layers,
)


# L66
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("transformer.rotary_pos_emb.inv_freq", True),
        ("model.rotary_emb.cos_cached", True),
        ("rotary_emb.sin_cached", True),
        ("model.rotary_emb.weight", False),
        ("model.layers.0.inv_freq", False),
    ],
)
def test_rotary_caches_are_told_by_name(name: str, dropped: bool) -> None:
    assert is_rotary_cache(name) is dropped


# L67
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("layers.0.indexer.wk.weight", True),
        ("layers.1.indexer.wk.weight", False),
        ("layers.10.indexer.wk.weight", True),
        ("layers.0.my_indexer.wk.weight", False),
        ("layers.0.self_attn.q_proj.weight", False),
        ("indexer.wk.weight", True),
    ],
)
def test_indexer_is_foreign_where_no_shell_has_one(name: str, dropped: bool) -> None:
    owners = indexer_owners(["layers.1.indexer.wk.weight", "layers.1.indexer.k_norm.weight", "layers.0.norm.weight"])
    assert owners == {"layers.1"}
    assert is_foreign_indexer(name, owners) is dropped


# L67
def test_indexer_at_the_start_of_relative_names_has_an_owner() -> None:
    assert not is_foreign_indexer("indexer.wk.weight", indexer_owners(["indexer.wk.weight"]))


# L68
@pytest.mark.parametrize(
    ("name", "decoder", "layer"),
    [
        pytest.param("model.layers.3.mlp.up_proj.weight", "model.layers", 3, id="decoder layer"),
        pytest.param("model.layers.30.x", "model.layers", 30, id="two digits"),
        pytest.param("model.layers.3", "model.layers", 3, id="nothing behind"),
        pytest.param("visual.encoder.layers.30.x", "model.layers", None, id="a vision tower's"),
        pytest.param("tower.layers.30.x", "model.layers", None, id="a path of the same length"),
        pytest.param("visual.model.layers.3.x", "model.layers", None, id="a path that ends alike"),
        pytest.param("layers.3.x", "layers", 3, id="relative name"),
        pytest.param("model.layers.norm.weight", "model.layers", None, id="no number"),
        pytest.param("model.layers.03.x", "model.layers", None, id="a leading zero"),
        pytest.param("model.layers.\u0663.x", "model.layers", None, id="another script's digit"),
        pytest.param(f"model.layers.{'9' * 5000}.x", "model.layers", None, id="a number beyond all"),
        pytest.param("model.layers", "model.layers", None, id="the list itself"),
    ],
)
def test_layer_is_the_decoders(name: str, decoder: str, layer: int | None) -> None:
    assert layer_of(name, decoder) == layer


# L68
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("model.layers.1.x", True),
        ("model.layers.4.x", True),
        ("model.layers.2.x", False),
        ("model.layers.3.x", False),
        ("model.layers.20.x", True),
        ("model.embed_tokens.weight", False),
        ("visual.encoder.layers.0.x", False),
        ("tower.layers.0.x", False),
    ],
)
def test_stage_keeps_its_layers_and_what_has_none(name: str, dropped: bool) -> None:
    assert is_off_stage(name, range(2, 4)) is dropped


# L73
def test_stage_filter_passes_layers_and_the_rest() -> None:
    names = [*(f"model.layers.{layer}.{part}" for layer in range(4) for part in "ab"), "model.norm.weight"]
    found = [name for name, _ in on_stage(((name, None) for name in names), range(1, 3))]
    assert found == [
        "model.layers.1.a",
        "model.layers.1.b",
        "model.layers.2.a",
        "model.layers.2.b",
        "model.norm.weight",
    ]


# L73
def test_stage_filter_is_lazy() -> None:
    pulled: list[int] = []

    def pairs() -> Iterator[tuple[str, int]]:
        for layer in range(4):
            pulled.append(layer)
            yield f"model.layers.{layer}.x", layer

    stream = on_stage(pairs(), range(1, 3))
    assert pulled == []
    assert next(stream) == ("model.layers.1.x", 1)
    assert pulled == [0, 1]


# L69
@pytest.mark.parametrize(
    ("name", "owned", "dropped"),
    [
        ("model.norm.weight", False, True),
        ("model.norm.weight", True, False),
        ("model.layers.0.x.norm.weight", False, False),
        ("layers.3.linear_attn.norm.weight", False, False),
        ("model.norms.weight", False, False),
        ("visual.model.norm.weight", False, False),
    ],
)
@pytest.mark.parametrize("final_norm", ["model.norm", "model.norm.weight"], ids=["by module", "by tensor"])
def test_final_norm_is_the_last_stages(name: str, owned: bool, dropped: bool, final_norm: str) -> None:
    assert is_foreign_final_norm(name, final_norm, owned=owned) is dropped


# L68
def test_b15_layer_one_is_not_the_beginning_of_layer_ten() -> None:
    names = [f"model.layers.{layer}.mlp.weight" for layer in (0, 1, 10, 11, 100)]
    only = ["model.layers.1.mlp.weight"]
    assert list(filter(select_layers(["model.layers.1"]), names)) == only
    assert list(filter(select_layers(["model.layers.1."]), names)) == only
    ignored = select_layers(["model.layers.1"])
    assert [name for name in names if not ignored(name)] == [name for name in names if name not in only]
    assert [name for name in names if not is_off_stage(name, range(1, 2))] == only


def test_b15_paths_are_text_and_not_patterns() -> None:
    names = ["model.layers.1.weight", "modelxlayers.1.weight", "model.layers.[0-9]+.weight"]
    assert list(filter(select_layers(["model.layers.[0-9]+"]), names)) == names[2:]
    assert list(filter(select_layers(["model.layers"]), names)) == [names[0], names[2]]
    assert list(filter(select_layers([".*", "model.layers.(1"]), names)) == []


@pytest.mark.parametrize(
    ("name", "path", "within"),
    [
        ("lm_head.weight", "lm_head.", True),
        ("lm_head", "lm_head", True),
        ("lm_head2.weight", "lm_head", False),
        ("model.lm_head.weight", "lm_head", False),
    ],
)
def test_path_ends_at_a_whole_component(name: str, path: str, within: bool) -> None:
    assert is_within(name, path) is within
