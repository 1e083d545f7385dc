"""Models whose dimensions are as awkward as they may be, and others that go as far as eight ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weightwire.transfer.manifest import Topology

_SMALL: Mapping[str, object] = {
    "num_hidden_layers": 3,
    "hidden_size": 36,
    "intermediate_size": 72,
    "tie_word_embeddings": False,
    # A prime: every topology has to pad it.
    "vocab_size": 509,
}
# Three topologies of tensor parallelism divide these, and none of the usual ones but the first.
_AWKWARD: Mapping[str, object] = {**_SMALL, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
# Two KV heads are replicated on two, and then four, ranks each.
_WIDE: Mapping[str, object] = {
    **_SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
_EXPERTS: Mapping[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
# Nothing of the latent vectors divides by anything else; heads and experts go as far as eight and four ranks.
_LATENT: Mapping[str, object] = {
    **_SMALL,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 40,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One checkpoint and the topologies that it can have.

    Attributes:
        stem: Of the names of its classes in transformers.
        members: Of its config.
        tp: Sizes of tensor parallelism that divide it.
        ep: Sizes of expert parallelism that deal its experts evenly.
    """

    stem: str
    members: Mapping[str, object]
    tp: tuple[int, ...]
    ep: tuple[int, ...] = (1,)

    @property
    def topologies(self) -> list[Topology]:
        return [Topology(tp=tp, pp=pp, ep=ep) for pp in (1, 2) for tp in self.tp for ep in self.ep if tp % ep == 0]

    def save(self, folder: Path) -> None:
        """As `save_pretrained` writes it, in bfloat16, every element random."""
        # Seconds; collecting these tests needs none of it.
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.stem}Config")(**self.members)
        model = getattr(transformers, f"{self.stem}ForCausalLM")(config).to(torch.bfloat16)
        for parameter in model.parameters():
            # Norms and biases begin as ones and zeros, which every mistake leaves as they are.
            torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)


MODELS: Mapping[str, Model] = {
    "llama, awkward": Model(stem="Llama", members=_AWKWARD, tp=(1, 3)),
    "llama, wide": Model(stem="Llama", members={**_WIDE, "attention_bias": True, "mlp_bias": True}, tp=(1, 2, 4, 8)),
    "qwen2, awkward": Model(stem="Qwen2", members={**_AWKWARD, "tie_word_embeddings": True}, tp=(1, 3)),
    "qwen2, wide": Model(stem="Qwen2", members=_WIDE, tp=(1, 2, 4, 8)),
    "qwen3_moe, awkward": Model(
        stem="Qwen3Moe", members={**_AWKWARD, **_EXPERTS, "num_experts": 6}, tp=(1, 3), ep=(1, 3)
    ),
    "qwen3_moe, six experts on two": Model(
        stem="Qwen3Moe", members={**_WIDE, **_EXPERTS, "num_experts": 6}, tp=(1, 2), ep=(1, 2)
    ),
    "deepseek_v2": Model(stem="DeepseekV2", members={**_LATENT, "q_lora_rank": None}, tp=(1, 2, 4), ep=(1, 2)),
    "deepseek_v3": Model(stem="DeepseekV3", members={**_LATENT, "q_lora_rank": 14}, tp=(1, 2, 4, 8), ep=(1, 2, 4)),
    "qwen3_moe, wide": Model(
        stem="Qwen3Moe", members={**_WIDE, **_EXPERTS, "num_experts": 8}, tp=(1, 2, 4, 8), ep=(1, 2, 4)
    ),
}


def pairs_of(name: str) -> list[tuple[Topology, Topology]]:
    """All pairs of a llama; of the others each topology twice as a source and twice as a target, once as both."""
    found = MODELS[name].topologies
    if name.startswith("llama"):
        return [(source, target) for source in found for target in found]
    half = max(1, len(found) // 2)
    steps = dict.fromkeys((0, 1, half, len(found) - 1))
    return [(source, found[(at + step) % len(found)]) for at, source in enumerate(found) for step in steps]


def is_in_sample(name: str, source: Topology, target: Topology) -> bool:
    """Whether a pair is one of the few that every run of the tests looks at: both ways between extremes."""
    found = MODELS[name].topologies
    return (found.index(source), found.index(target)) in ((len(found) - 1, 0), (0, len(found) - 1))
