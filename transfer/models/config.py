"""The facts of a `config.json` that decide which parameters a model has, typed and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from weightwire.transfer.checkpoint.untrusted_json import parse_object
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import CheckpointError, ConfigError
from weightwire.transfer.loading.resolver import is_tied
from weightwire.transfer.models.config_fields import Fields, Members, refusal
from weightwire.transfer.models.latent_config import IndexerConfig, LatentConfig, indexer_of, latent_of

# Source: transformers, `PretrainedConfig`: a model without a dtype in its configuration is float32.
_DEFAULT_DTYPE = "float32"

# What a configuration means that leaves a field out altogether, where it is another thing than `config_of` makes of a
# field that is null.
# Source: transformers 5, the configuration classes of these models; a test compares.
_LEFT_OUT: Mapping[str, Members] = {
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen2MoeForCausalLM": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The mixture-of-experts layers of a model.

    Attributes:
        num_experts: Routed experts of one layer, as the checkpoint numbers them.
        intermediate_size: Of one routed expert.
        shared_intermediate_size: Of the shared expert that stands beside the routed ones; None if there is none.
        num_shared: Shared experts of the size of a routed one that the shared expert is, where the file counts them.
        selection: How the router selects, where the file names it.
        sparse_step: Every so-manieth layer has experts.
        dense_layers: Layers that have none all the same.
    """

    num_experts: int
    intermediate_size: int
    shared_intermediate_size: int | None = None
    num_shared: int = 0
    selection: str | None = None
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Weights stored as float8_e4m3fn, each with scales.

    Attributes:
        block: Rows and columns that share one scale; None if a matrix has a single one.
        activations: `static` if the checkpoint also has a scale of each input.
        unconverted: Modules, by checkpoint name or its first or last parts, that kept their ordinary dtype.
    """

    block: tuple[int, int] | None = None
    activations: Literal["dynamic", "static"] = "dynamic"
    unconverted: tuple[str, ...] = ()

    def converts(self, module: str, parts: Iterable[str]) -> bool:
        """Whether a linear layer is stored as FP8.

        Args:
            module: Name of the module that holds the checkpoint's layers: `model.layers.0.self_attn`.
            parts: Last part of the name of each checkpoint layer that it fuses: `q_proj`, `k_proj`, `v_proj`.

        Raises:
            ConfigError: If only some of what is fused is FP8.
        """
        left_out = {part: self._leaves_out(f"{module}.{part}" if module else part) for part in parts}
        if len(set(left_out.values())) > 1:
            raise ConfigError(
                f"config.json: field 'modules_to_not_convert' names {[p for p, out in left_out.items() if out]} of "
                f"{module!r}, but not {[p for p, out in left_out.items() if not out]}, which lie in the same tensor",
                field="modules_to_not_convert",
            )
        return not any(left_out.values())

    def _leaves_out(self, name: str) -> bool:
        dotted = f".{name}."
        return any(dotted.startswith(f".{entry}.") or dotted.endswith(f".{entry}.") for entry in self.unconverted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model, as its checkpoint describes it; nothing here depends on a rank.

    Attributes:
        architecture: Class name, as in `architectures`.
        hidden_size: Width of the residual stream.
        intermediate_size: Of a dense MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        vocab_size: Rows of the embedding in the checkpoint.
        tie_word_embeddings: Whether the output head is the embedding.
        dtype: Of every parameter that nothing else decides.
        attention_bias: Whether q, k, v and o have biases; None where the file does not say.
        qkv_bias: Whether q, k and v have biases, where o has none anyway; None where the file does not say.
        mlp_bias: Whether the layers of dense MLPs have biases.
        experts: None for a dense model.
        fp8: None for an unquantised one.
        latent: None for a model whose attention projects to queries, keys and values directly.
        indexer: Of sparse attention; None for a model without.
        num_draft_layers: Layers behind the last one that predict further tokens; a role of their own.
        source: The members of the file as they are.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    experts: ExpertConfig | None = None
    fp8: Fp8Config | None = None
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    num_draft_layers: int = 0
    source: Members = field(default_factory=dict, compare=False, repr=False)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(layer)


def read_members(source: str | bytes | Members) -> Members:
    """The members of a `config.json`, from its text or as they are.

    Raises:
        ConfigError: If the text is no JSON object.
    """
    if isinstance(source, Mapping):
        return source
    try:
        raw = source.encode("utf-8") if isinstance(source, str) else source
        return parse_object(raw, subject="config.json")
    except (CheckpointError, UnicodeEncodeError) as error:
        raise ConfigError(str(error), field="") from error


def config_of(source: Members) -> ModelConfig:
    """Take the facts of a decoder-only model out of the members of its `config.json`.

    Settings in `text_config` win over the ones around it. Old and new spellings of a key are both known. What is left
    out has the value that transformers gives it, as far as published configurations leave it out.

    Raises:
        ConfigError: If a field is missing, of the wrong type or out of range: `facts["field"]`.
    """
    architecture = architecture_of(source)
    fields = Fields(source, _LEFT_OUT.get(architecture, {}))
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    latent = latent_of(fields)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        # Every query head has a key and a value of its own, made from what all of them share.
        num_kv_heads=heads if latent else _num_kv_heads(fields, heads),
        head_dim=latent.qk_head_dim if latent else _head_dim(fields, hidden=hidden, heads=heads),
        vocab_size=fields.size("vocab_size"),
        tie_word_embeddings=is_tied(source),
        dtype=_dtype(fields),
        attention_bias=fields.flag("attention_bias"),
        qkv_bias=fields.flag("qkv_bias"),
        mlp_bias=fields.flag("mlp_bias") or False,
        experts=_experts(fields),
        fp8=_fp8(fields),
        latent=latent,
        indexer=indexer_of(fields),
        num_draft_layers=fields.optional_count("num_nextn_predict_layers") or 0,
        source=source,
    )


def architecture_of(outer: Members) -> str:
    """Name of the model's class.

    Raises:
        ConfigError: If the file does not say it.
    """
    named = outer.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise refusal("architectures", named, "a list with the name of a class")
    return named[0]


def _num_kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise refusal("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    return kv_heads


def _head_dim(fields: Fields, *, hidden: int, heads: int) -> int:
    found = fields.optional_size("head_dim")
    if found is None and hidden % heads:
        raise refusal("head_dim", None, f"it, since {heads} heads do not divide the hidden size of {hidden}")
    return found or hidden // heads


def _dtype(fields: Fields) -> torch.dtype:
    name, value = fields.find("dtype", "torch_dtype")
    if value is None:
        value = _DEFAULT_DTYPE
    spelled = value.removeprefix("torch.") if isinstance(value, str) else ""
    # Smaller floats are formats of quantisation, and need scales.
    known = spelled in BY_NAME and BY_NAME[spelled].torch_dtype.is_floating_point and BY_NAME[spelled].itemsize > 1
    if not known:
        raise refusal(name, value, "the name of a floating point dtype")
    return BY_NAME[spelled].torch_dtype


def _experts(fields: Fields) -> ExpertConfig | None:
    count = fields.optional_size("num_experts", "num_local_experts", "n_routed_experts")
    if count is None:
        return None
    size, num_shared = fields.size("moe_intermediate_size"), fields.optional_count("n_shared_experts") or 0
    return ExpertConfig(
        num_experts=count,
        intermediate_size=size,
        shared_intermediate_size=(
            num_shared * size if num_shared else fields.optional_size("shared_expert_intermediate_size")
        ),
        num_shared=num_shared,
        selection=fields.text("topk_method"),
        sparse_step=fields.optional_size("decoder_sparse_step") or 1,
        dense_layers=frozenset(fields.integers("mlp_only_layers")) | _dense_by_position(fields),
    )


def _dense_by_position(fields: Fields) -> frozenset[int]:
    """The first layers, and those between every so-manieth one, draft layers being counted on."""
    first, step = fields.optional_count("first_k_dense_replace") or 0, fields.optional_size("moe_layer_freq") or 1
    layers = fields.size("num_hidden_layers") + (fields.optional_count("num_nextn_predict_layers") or 0)
    return frozenset(layer for layer in range(layers) if layer < first or layer % step)


def _fp8(fields: Fields) -> Fp8Config | None:
    field, found = fields.find("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise refusal(field, found, "an object")
    method = found.get("quant_method")
    if method != "fp8":
        raise refusal("quant_method", method, "'fp8'")
    activations = found.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise refusal("activation_scheme", activations, "'dynamic' or 'static'")
    return Fp8Config(
        block=_block(found.get("weight_block_size")),
        activations="static" if activations == "static" else "dynamic",
        unconverted=_names(found, "modules_to_not_convert", "ignored_layers"),
    )


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = [item for item in value if isinstance(item, int) and item > 0] if isinstance(value, list) else []
    if not isinstance(value, list) or len(sizes) != 2 or len(value) != 2:
        raise refusal("weight_block_size", value, "two positive integers")
    return sizes[0], sizes[1]


def _names(members: Members, *spellings: str) -> tuple[str, ...]:
    for name in spellings:
        value = members.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise refusal(name, value, "a list of names")
        return tuple(value)
    return ()
