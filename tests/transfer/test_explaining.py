"""Which question decided about a tensor's name, and which of its elements lie where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.checkpoints import DECODER, decoder, write_checkpoint
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.explaining import Explanation, explain_names
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
LATENT: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a few tensors: what is explained of one does not need the others."""
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    shapes = {
        "model.layers.1.mlp.shared_experts.up_proj.weight": (4, 8),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": (6, 8),
        "model.layers.1.mlp.experts.gate_up_proj": (4, 8, 8),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def one(folder: Path, name: str, *, rank: int = 0, build: BuildOptions | None = None) -> Explanation:
    (found,) = explain_names(folder, [name], topology=Topology(tp=2, ep=2), rank=rank, build=build)
    return found


# L119, L120
def test_renames_come_before_the_question_that_decides(folder: Path) -> None:
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    found = one(folder, name, rank=1, build=BuildOptions(fuse_shared_expert=True))
    renamed = "model.layers.1.mlp.experts.4.up_proj.weight"
    assert [(question.number, question.renamed) for question in found.renames] == [(4, renamed)]
    assert (found.decided.number, found.outcomes[0].rule, found.rank) == (12, "L59", 1)
    assert found.pieces == ("tensor -> model.layers.1.mlp.experts.w13_weight[2, 4:8, :]",)


# L119, L130
def test_part_lies_behind_the_other_one(folder: Path) -> None:
    found = one(folder, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight")
    assert (found.decided.number, found.outcomes[0].rule, found.renames) == (13, "L130", ())
    assert found.pieces == ("tensor -> model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight[6:12, :]",)


# L119, L125
def test_tensor_of_all_experts_is_taken_apart(folder: Path) -> None:
    found = one(folder, "model.layers.1.mlp.experts.gate_up_proj", rank=1)
    target = "model.layers.1.mlp.experts.w13_weight"
    assert (found.decided.number, found.outcomes[0].target) == (7, target)
    assert sorted(found.pieces) == [
        f"tensor[2, 0:4, :] -> {target}[0, 0:4, :]",
        f"tensor[2, 4:8, :] -> {target}[0, 4:8, :]",
        f"tensor[3, 0:4, :] -> {target}[1, 0:4, :]",
        f"tensor[3, 4:8, :] -> {target}[1, 4:8, :]",
    ]


# L119, L122, L123
@pytest.mark.parametrize(
    ("build", "outcome", "step"),
    [(BuildOptions(), Outcome.DROPPED, 6), (BuildOptions(role="draft"), Outcome.PLACED, 15)],
    ids=["main role", "draft role"],
)
def test_name_that_the_checkpoint_lacks_is_decided_all_the_same(
    folder: Path, build: BuildOptions, outcome: Outcome, step: int
) -> None:
    found = one(folder, "model.layers.2.enorm.weight", build=build)
    assert (found.outcomes[0].outcome, found.decided.number, found.is_there) == (outcome, step, False)
    assert found.pieces == ()


def test_models_with_another_table_are_explained_by_theirs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, decoder(), DECODER)
    (found,) = explain_names(folder, [Q_PROJ], topology=Topology(tp=2), rank=1)
    assert (found.decided.about, found.outcomes[0].slot) == ("part of a fused projection", "q")
    target = "model.layers.0.self_attn.qkv_proj.weight"
    assert found.pieces == (f"tensor[8:16, :] -> {target}[0:8, :]",)
    assert not found.is_computed


def test_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="names the model"):
        one(folder, Q_PROJ)
