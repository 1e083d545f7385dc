"""Tiny checkpoints: saved by transformers, and written out by hand where transformers has no say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, ModelConfig, ParameterTree, build_model, parse_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]
VOCAB = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint folder and what is in it."""

    folder: Path
    config: ModelConfig
    tensors: Tensors

    @property
    def members(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "config.json").read_text())
        return found

    def fused(self) -> Saved:
        """The same with the routed experts of a layer in one tensor, gate before up."""
        tensors, stacks = dict[str, torch.Tensor](), dict[str, dict[tuple[int, str], torch.Tensor]]()
        for name, tensor in self.tensors.items():
            prefix, found, rest = name.partition(".experts.")
            if found:
                expert, part, _ = rest.split(".")
                stacks.setdefault(prefix, {})[int(expert), part] = tensor
            else:
                tensors[name] = tensor
        for prefix, parts in stacks.items():
            experts = sorted({expert for expert, _ in parts})
            pairs = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in experts]
            tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(pairs)
            tensors[f"{prefix}.experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in experts])
        return replace(self, tensors=tensors)


_SIZES: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
_DEEPSEEK: Mapping[str, object] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "q_lora_rank": 6,
}
_INDEXER: Mapping[str, object] = {"index_n_heads": 2, "index_head_dim": 4, "index_topk": 2}
# Each family: the name of its classes in transformers, and its sizes.
_MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("Llama", _SIZES),
    "llama with biases": ("Llama", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {**_SIZES, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, **_EXPERTS, "num_hidden_layers": 3, "head_dim": 4, "mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 8}),
    "qwen2_moe without biases": (
        "Qwen2Moe",
        {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 8, "qkv_bias": False},
    ),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**_DEEPSEEK, "attention_bias": True}),
    "deepseek_v32": ("DeepseekV32", {**_DEEPSEEK, **_INDEXER, "n_shared_experts": 1}),
}
FAMILIES = tuple(_MODELS)


def stock_model(family: str) -> PreTrainedModel:
    """transformers' own model of a family, in bfloat16, every element random."""
    # Seconds; most tests of this folder need none of it.
    import transformers

    stem, sizes = _MODELS[family]
    torch.manual_seed(FAMILIES.index(family))
    config = getattr(transformers, f"{stem}Config")(**sizes)
    model: PreTrainedModel = getattr(transformers, f"{stem}ForCausalLM")(config).to(torch.bfloat16)
    for parameter in model.parameters():
        # Norms and biases begin as ones and zeros, which every mistake leaves as they are.
        torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A checkpoint of each family, as `save_pretrained` writes it, every element random."""
    made = dict[str, Saved]()

    def make(family: str) -> Saved:
        if family not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            stock_model(family).save_pretrained(folder)
            config = parse_config((folder / "config.json").read_text())
            made[family] = Saved(folder=folder, config=config, tensors=load_file(folder / "model.safetensors"))
        return made[family]

    return make


def poison(model: torch.nn.Module) -> None:
    """Fill every shell with bytes that no checkpoint here has: NaN, in the float dtypes."""
    for shell in (*model.parameters(), *model.buffers()):
        shell.detach().view(-1).view(torch.uint8).fill_(0xFF)


def poisoned(
    config: ModelConfig, topology: Topology | None = None, rank: int = 0, options: BuildOptions | None = None
) -> ParameterTree:
    """A tree as `build_model` makes it, whose memory is known to be wrong."""
    model = build_model(config, topology or Topology(), rank, options or BuildOptions())
    kept = {name: shell.clone() for name, shell in model.named_parameters() if name.endswith(("k_scale", "v_scale"))}
    poison(model)
    for name, value in kept.items():
        model.get_parameter(name).copy_(value)
    return model


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are one and the same, NaN and signed zeros included."""
    as_bytes = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def differences(left: torch.nn.Module, right: torch.nn.Module) -> list[str]:
    """Names whose tensors differ in two models, or that only one of them has."""
    ours, theirs = left.state_dict(), right.state_dict()
    odd = set(ours) ^ set(theirs)
    return sorted(odd | {name for name in ours.keys() & theirs.keys() if not same_bytes(ours[name], theirs[name])})


def numbered(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Every element of a checkpoint replaced by a number of its own, from 1, exact in float32."""
    made, begin = dict[str, torch.Tensor](), 1
    for name, tensor in tensors.items():
        made[name] = torch.arange(begin, begin + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        begin += tensor.numel()
    assert begin < 1 << 24
    return made


def write_folder(folder: Path, members: Mapping[str, object], tensors: Tensors) -> Path:
    """A checkpoint of one file."""
    (folder / "config.json").write_text(json.dumps(members))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def ranks(topology: Topology) -> Iterator[int]:
    yield from range(topology.world_size)
