from __future__ import annotations

import contextlib
import importlib
import json
import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.models import BuildOptions, Fp8Config, ModelConfig, build_model, parse_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
EXPERTS: dict[str, object] = {"moe_intermediate_size": 6, "num_experts": 4}


def test_config_fills_in_what_the_file_leaves_out() -> None:
    config = parse_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 2)
    assert config.dtype == torch.float32
    assert not config.tie_word_embeddings
    assert config.attention_bias is None
    assert config.experts is None
    assert config.fp8 is None


SIZES: dict[str, object] = {key: value for key, value in LLAMA.items() if key != "architectures"} | {
    "num_attention_heads": 32,
    "hidden_size": 64,
}
# Of each field: where it stands in our values.
READ: dict[str, Callable[[ModelConfig], object]] = {
    "num_key_value_heads": lambda config: config.num_kv_heads,
    "head_dim": lambda config: config.head_dim,
    "tie_word_embeddings": lambda config: config.tie_word_embeddings,
    "attention_bias": lambda config: bool(config.attention_bias),
    "mlp_bias": lambda config: config.mlp_bias,
    "qkv_bias": lambda config: config.qkv_bias is not False,
    "num_experts": lambda config: config.experts and config.experts.num_experts,
    "moe_intermediate_size": lambda config: config.experts and config.experts.intermediate_size,
    "shared_expert_intermediate_size": lambda config: config.experts and config.experts.shared_intermediate_size,
    "decoder_sparse_step": lambda config: config.experts and config.experts.sparse_step,
    "mlp_only_layers": lambda config: config.experts and sorted(config.experts.dense_layers),
}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3Moe"])
def test_config_takes_what_is_left_out_for_what_transformers_takes_it(family: str) -> None:
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, f"{family}Config")(**SIZES)
    ours = parse_config(SIZES | {"architectures": [f"{family}ForCausalLM"]})
    declared = {name: read(ours) for name, read in READ.items() if hasattr(theirs, name)}
    assert declared == {name: getattr(theirs, name) for name in declared}
    assert {"num_key_value_heads", "tie_word_embeddings"} <= declared.keys()


def test_config_takes_a_null_for_no_number_of_its_own() -> None:
    null = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}
    assert parse_config(null).num_kv_heads == 4
    assert parse_config(null | {"text_config": {"num_key_value_heads": 2}}).num_kv_heads == 2


@pytest.mark.parametrize("told", [True, False, None])
def test_qkv_bias_of_qwen2_moe_is_what_the_file_says(told: bool | None) -> None:
    members = LLAMA | EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 2, "qkv_bias": told}
    tree = build_model(parse_config(members), options=BuildOptions(device="meta"))
    names = shells_of(tree).keys()
    assert ("model.layers.0.self_attn.qkv_proj.bias" in names) == (told is not False)
    assert "model.layers.0.self_attn.o_proj.bias" not in names


def test_config_reads_text_as_it_reads_members() -> None:
    assert parse_config(json.dumps(LLAMA)) == parse_config(LLAMA) == parse_config(json.dumps(LLAMA).encode())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("spelling", ["bfloat16", "torch.bfloat16"])
def test_config_knows_both_spellings_of_the_dtype(key: str, spelling: str) -> None:
    assert parse_config(LLAMA | {key: spelling}).dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_config_knows_every_spelling_of_the_number_of_experts(key: str) -> None:
    experts = parse_config(LLAMA | {key: 4, "moe_intermediate_size": 6}).experts
    assert experts is not None
    assert (experts.num_experts, experts.intermediate_size) == (4, 6)


@pytest.mark.parametrize(
    ("extra", "sparse"),
    [
        pytest.param({}, [0, 1, 2, 3], id="every layer has experts"),
        pytest.param({"decoder_sparse_step": 2}, [1, 3], id="every second layer has experts"),
        pytest.param({"mlp_only_layers": [1, 2]}, [0, 3], id="two layers are dense"),
    ],
)
def test_config_says_which_layers_have_experts(extra: dict[str, object], sparse: list[int]) -> None:
    config = parse_config(LLAMA | EXPERTS | {"num_hidden_layers": 4} | extra)
    assert [layer for layer in range(4) if config.has_experts(layer)] == sparse


def test_config_takes_the_text_model_of_a_larger_one() -> None:
    config = parse_config(LLAMA | {"hidden_size": 99, "text_config": {"hidden_size": 16, "head_dim": None}})
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (16, 4, 32)


def test_b16_flag_of_a_tied_head_is_that_of_the_text_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_config(LLAMA | {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}})
    assert not config.tie_word_embeddings
    assert "tie_word_embeddings" in caplog.text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"hidden_size": None}, "hidden_size", id="a size is missing"),
        pytest.param({"hidden_size": "8"}, "hidden_size", id="a size is text"),
        pytest.param({"vocab_size": True}, "vocab_size", id="a size is a truth"),
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers", id="no layers"),
        pytest.param({"architectures": []}, "architectures", id="no architecture"),
        pytest.param({"architectures": "LlamaForCausalLM"}, "architectures", id="architectures are no list"),
        pytest.param({"num_key_value_heads": 3}, "num_key_value_heads", id="heads that do not group"),
        pytest.param({"hidden_size": 9}, "head_dim", id="heads that do not divide the width"),
        pytest.param({"dtype": "int8"}, "dtype", id="a dtype that is no float"),
        pytest.param({"torch_dtype": "float17"}, "torch_dtype", id="no dtype at all"),
        pytest.param({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype", id="two dtypes"),
        pytest.param({"num_experts": 4, "num_local_experts": 8}, "num_local_experts", id="two numbers of experts"),
        pytest.param({"num_experts": 4}, "moe_intermediate_size", id="experts without a size"),
        pytest.param(EXPERTS | {"mlp_only_layers": [True]}, "mlp_only_layers", id="a layer that is no number"),
        pytest.param({"attention_bias": 1}, "attention_bias", id="a truth that is a number"),
        pytest.param({"qkv_bias": "no"}, "qkv_bias", id="a truth that is text"),
        pytest.param({"tie_word_embeddings": "yes"}, "tie_word_embeddings", id="a tie that is text"),
        pytest.param({"text_config": []}, "text_config", id="a text model that is a list"),
        pytest.param({"quantization_config": {"quant_method": "gptq"}}, "quant_method", id="a foreign quantisation"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size",
            id="a block of one size",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "often"}},
            "activation_scheme",
            id="an unknown scheme",
        ),
    ],
)
def test_config_error_names_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(LLAMA | change)
    assert caught.value.facts["field"] == field
    assert field in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\ud800"])
def test_config_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text.encode("utf-8", "surrogatepass"))


def test_architecture_is_asked_for_before_fields_that_others_do_not_have() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        parse_config({"architectures": ["GPT2LMHeadModel"], "n_embd": 8})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = (*LLAMA, "text_config", "quantization_config", "dtype", "num_experts", "mlp_only_layers", "tie_word_embeddings")


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_config_of_any_json_is_parsed_or_refused(change: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        config = parse_config(json.dumps(LLAMA | change))
        assert config.num_heads % config.num_kv_heads == 0


@pytest.mark.parametrize(
    ("unconverted", "module", "parts", "expected"),
    [
        pytest.param((), "model.layers.0.self_attn", ("q_proj", "k_proj"), True, id="nothing is left out"),
        pytest.param(("lm_head",), "", ("lm_head",), False, id="the head is left out"),
        pytest.param(("model.layers.0",), "model.layers.0.mlp", ("down_proj",), False, id="a layer is left out"),
        pytest.param(("model.layers.1",), "model.layers.10.mlp", ("down_proj",), True, id="layer 1 is not layer 10"),
        pytest.param(("mlp.gate",), "model.layers.3.mlp", ("gate",), False, id="every router is left out"),
        pytest.param(("mlp.gate",), "model.layers.3.mlp", ("gate_proj", "up_proj"), True, id="gate is not gate_proj"),
    ],
)
def test_fp8_leaves_out_whole_modules(
    unconverted: tuple[str, ...], module: str, parts: tuple[str, ...], expected: bool
) -> None:
    assert Fp8Config(unconverted=unconverted).converts(module, parts) is expected


def test_fp8_of_half_a_fused_layer_is_refused() -> None:
    fp8 = Fp8Config(unconverted=("model.layers.0.self_attn.q_proj",))
    with pytest.raises(ConfigError, match="q_proj"):
        fp8.converts("model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj"))


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_experts"])
def test_numbers_that_would_never_come_to_an_end_are_refused(field: str) -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 8,
    }
    members = {"architectures": ["Qwen3MoeForCausalLM"], **sizes, "moe_intermediate_size": 8, field: 10**9}
    with pytest.raises(ConfigError, match=f"'{field}' is 1000000000, expected at most"):
        parse_config(members)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"])
def test_sizes_that_torch_cannot_count_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"'{field}' is 2147483648, expected at most 2147483647"):
        parse_config(LLAMA | {field: 2**31})


def test_architecture_is_quoted_in_short() -> None:
    with pytest.raises(ConfigError, match="'architectures' is 'xxx") as caught:
        parse_config(LLAMA | {"architectures": ["x" * 10**6]})
    assert len(str(caught.value)) < 2000
