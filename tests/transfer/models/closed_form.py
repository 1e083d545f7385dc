"""What each rank holds, written out from the published rules with `chunk`, `cat` and zeros: no code under test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from tests.transfer.models.conftest import Saved
from weightwire.transfer.manifest import Topology

Shells = dict[str, torch.Tensor]


def expected_shells(saved: Saved, topology: Topology, rank: int, *, vocab_multiple: int) -> Shells:
    """Every shell of one rank by runtime name, from an unfused checkpoint."""
    kind = _DeepseekRank if saved.config.architecture.startswith("Deepseek") else _Rank
    return kind(saved, topology, rank, vocab_multiple).shells()


def copies_of(name: str, saved: Saved, topology: Topology) -> int:
    """How many shell elements, over all ranks, hold each element of a checkpoint tensor."""
    tp, pp = topology.tp, topology.pp
    if name == "model.embed_tokens.weight":
        return 2 if saved.config.tie_word_embeddings and pp > 1 else 1
    if re.search(r"\.[kv]_proj\.", name):
        return max(1, tp // saved.config.num_kv_heads)
    whole = re.search(
        r"norm\.weight$|\.gate\.weight$|shared_expert_gate|(o_proj|down_proj)\.bias$"
        r"|\.(q_a_proj|kv_a_proj_with_mqa)\.|\.indexer\.|e_score_correction_bias$",
        name,
    )
    return tp if whole else 1


class _Rank:
    def __init__(self, saved: Saved, topology: Topology, rank: int, vocab_multiple: int) -> None:
        self.config, self.tensors = saved.config, saved.tensors
        self.tp, self.pp, self.ep = topology.tp, topology.pp, topology.ep
        self.stage, self.tp_rank = divmod(rank, topology.tp)
        self.vocab_multiple = vocab_multiple

    def shells(self) -> Shells:
        first, last = self.stage == 0, self.stage == self.pp - 1
        found: Shells = {}
        embedding = self.tensors["model.embed_tokens.weight"]
        head = embedding if self.config.tie_word_embeddings else self.tensors["lm_head.weight"]
        if first:
            found["model.embed_tokens.weight"] = self._vocab(embedding)
        for layer in torch.tensor_split(torch.arange(self.config.num_layers), self.pp)[self.stage].tolist():
            prefix = f"model.layers.{layer}."
            local = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
            found.update({prefix + name: tensor for name, tensor in self._layer(local).items()})
        if last:
            found["model.norm.weight"] = self.tensors["model.norm.weight"]
            found["lm_head.weight"] = self._vocab(head)
        return found

    def _vocab(self, tensor: torch.Tensor) -> torch.Tensor:
        missing = -tensor.shape[0] % self.vocab_multiple
        padded = torch.cat([tensor, torch.zeros(missing, tensor.shape[1], dtype=tensor.dtype)])
        return padded.chunk(self.tp)[self.tp_rank]

    def _layer(self, local: Mapping[str, torch.Tensor]) -> Shells:
        found: Shells = {}
        for name, tensor in local.items():
            path, _, leaf = name.rpartition(".")
            if ".experts." in name:
                continue
            if path.endswith("q_proj"):
                parts = [self._column(tensor), *(self._kv(local[f"self_attn.{p}_proj.{leaf}"]) for p in "kv")]
                found[f"self_attn.qkv_proj.{leaf}"] = torch.cat(parts)
            elif path.endswith("gate_proj"):
                up = local[name.replace("gate_proj", "up_proj")]
                found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([self._column(tensor), self._column(up)])
            elif path.endswith(("k_proj", "v_proj", "up_proj")):
                continue
            elif path.endswith(("o_proj", "down_proj")) and leaf == "weight":
                found[name] = tensor.chunk(self.tp, dim=1)[self.tp_rank]
            else:
                found[name] = tensor
        return found | self._experts(local)

    def _column(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self.tp)[self.tp_rank]

    def _kv(self, tensor: torch.Tensor) -> torch.Tensor:
        heads = self.config.num_kv_heads
        if self.tp <= heads:
            return self._column(tensor)
        return tensor.chunk(heads)[self.tp_rank * heads // self.tp]

    def _experts(self, local: Mapping[str, torch.Tensor]) -> Shells:
        if not any(".experts." in name for name in local):
            return {}
        assert self.config.experts is not None
        block = self.tp // self.ep
        each = self.config.experts.num_experts // self.ep
        mine = range(self.tp_rank // block * each, (self.tp_rank // block + 1) * each)

        def cut(expert: int, part: str, dim: int) -> torch.Tensor:
            return local[f"mlp.experts.{expert}.{part}.weight"].chunk(block, dim=dim)[self.tp_rank % block]

        gate_up = [torch.cat([cut(expert, "gate_proj", 0), cut(expert, "up_proj", 0)]) for expert in mine]
        return {
            "mlp.experts.w13_weight": torch.stack(gate_up),
            "mlp.experts.w2_weight": torch.stack([cut(expert, "down_proj", 1) for expert in mine]),
        }


class _DeepseekRank(_Rank):
    """Latent attention: what heads share is whole everywhere, and heads are dealt in blocks."""

    def _layer(self, local: Mapping[str, torch.Tensor]) -> Shells:
        found = {name: self._piece(name, tensor) for name, tensor in local.items() if ".experts." not in name}
        for first, second, fused in (
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj_with_mqa"),
            ("self_attn.indexer.wk", "self_attn.indexer.weights_proj", "self_attn.indexer.wk_weights_proj"),
            ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
            ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.gate_up_proj"),
        ):
            for leaf in ("weight", "bias"):
                if f"{first}.{leaf}" in found:
                    parts = [found.pop(f"{part}.{leaf}") for part in (first, second)]
                    found[f"{fused}.{leaf}"] = torch.cat(parts)
        return found | self._experts(local)

    def _piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if re.search(r"\.(q|q_b|kv_b|gate|up)_proj\.weight$", name):
            return self._column(tensor)
        if re.search(r"\.(o|down)_proj\.weight$", name):
            return tensor.chunk(self.tp, dim=1)[self.tp_rank]
        # Both are exact in float32, which the model keeps them in.
        return tensor.float() if re.search(r"indexer\.k_norm|e_score_correction_bias", name) else tensor


Family = Callable[[str], Saved]
