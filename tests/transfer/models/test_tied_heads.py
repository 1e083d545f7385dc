"""Heads that are the embedding, that have its values, or that only seem to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.models.conftest import poisoned
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import NamesError, SlotsError
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, parse_config

TINY: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 2,
}
WAYS = pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])


def checkpoint(*, vocab: int = 2, layers: int = 1, hidden: int = 1) -> dict[str, torch.Tensor]:
    """Without a head; the embedding counts from 1."""
    found = {"model.embed_tokens.weight": torch.arange(1.0, vocab * hidden + 1).view(vocab, hidden)}
    found["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{part}_proj.weight": torch.ones(hidden, hidden) for part in "qkvo"}
        found |= {f"{prefix}mlp.{part}_proj.weight": torch.ones(hidden, hidden) for part in ("gate", "up", "down")}
        found |= {
            f"{prefix}{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "post_attention_layernorm")
        }
    return found


# L77
@WAYS
def test_b16_tied_head_without_a_tensor_is_the_embedding(central: bool) -> None:
    model = poisoned(parse_config(TINY | {"tie_word_embeddings": True}), options=BuildOptions(vocab_multiple=2))
    model.load_weights(checkpoint().items(), central=central)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert model.get_parameter("lm_head.weight").tolist() == [[1.0], [2.0]]


# L77
@WAYS
def test_b16_tied_head_with_an_equal_tensor_loads(central: bool) -> None:
    model = poisoned(parse_config(TINY | {"tie_word_embeddings": True}), options=BuildOptions(vocab_multiple=2))
    tensors = {"lm_head.weight": torch.tensor([[1.0], [2.0]]), **checkpoint()}
    report = model.load_weights(tensors.items(), central=central)
    assert report.counts[Outcome.DROPPED] == 1
    assert model.get_parameter("lm_head.weight").tolist() == [[1.0], [2.0]]


# L77
@pytest.mark.parametrize("hidden", [1, 3000], ids=["small", "larger than what is looked at"])
@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        pytest.param(lambda table: table, False, id="the embedding"),
        pytest.param(lambda table: table * 2, True, id="other values"),
        pytest.param(lambda table: table.bfloat16(), True, id="another dtype"),
        pytest.param(lambda table: table[:1], True, id="another shape"),
        pytest.param(None, False, id="no head at all"),
    ],
)
def test_own_head_of_a_tied_model_is_left_out_and_told_if_it_is_another(
    hidden: int,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = TINY | {"tie_word_embeddings": True, "hidden_size": hidden, "head_dim": 1, "num_attention_heads": 1}
    tensors = {name: tensor for name, tensor in checkpoint(hidden=hidden).items() if "proj" not in name}
    table = tensors["model.embed_tokens.weight"]
    if change is not None:
        tensors["lm_head.weight"] = change(table).contiguous().clone()
    prefix = "model.layers.0."
    tensors |= {f"{prefix}self_attn.{part}_proj.weight": torch.ones(1, hidden) for part in "qkv"}
    tensors |= {f"{prefix}mlp.{part}_proj.weight": torch.ones(1, hidden) for part in ("gate", "up")}
    tensors |= {f"{prefix}{name}_proj.weight": torch.ones(hidden, 1) for name in ("self_attn.o", "mlp.down")}
    save_file(tensors, tmp_path / "m.safetensors")
    model = poisoned(parse_config(members), options=BuildOptions(vocab_multiple=2))
    with Checkpoint.open(tmp_path) as opened, caplog.at_level(logging.WARNING):
        load_direct(model, opened, control=Control(deadline_s=60))
    assert torch.equal(model.get_parameter("lm_head.weight"), table)
    assert ("'lm_head.weight': is not what 'model.embed_tokens.weight' is" in caplog.text) == is_told


@WAYS
def test_b16_flag_of_the_text_model_keeps_a_real_head(central: bool, caplog: pytest.LogCaptureFixture) -> None:
    members = TINY | {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}
    with caplog.at_level(logging.WARNING):
        model = poisoned(parse_config(members), options=BuildOptions(vocab_multiple=2))
    assert "tie_word_embeddings" in caplog.text
    tensors = {"lm_head.weight": torch.tensor([[5.0], [6.0]]), **checkpoint()}
    model.load_weights(tensors.items(), central=central)
    assert model.get_parameter("lm_head.weight").tolist() == [[5.0], [6.0]]
    assert model.get_parameter("model.embed_tokens.weight").tolist() == [[1.0], [2.0]]


# L05
@WAYS
def test_b16_head_that_is_not_tied_and_not_there_is_missing(central: bool) -> None:
    model = poisoned(parse_config(TINY | {"tie_word_embeddings": False}), options=BuildOptions(vocab_multiple=2))
    with pytest.raises(SlotsError) as caught:
        model.load_weights(checkpoint().items(), central=central)
    assert caught.value.facts["unfilled"] == ["lm_head.weight"]


# L68, L70, L77
@WAYS
def test_b17_last_stage_takes_its_head_from_the_embedding(central: bool) -> None:
    config = parse_config(TINY | {"tie_word_embeddings": True, "num_hidden_layers": 4})
    model = poisoned(config, Topology(pp=2), 1, BuildOptions(vocab_multiple=2))
    assert {name.split(".")[2] for name, _ in model.named_parameters() if "layers" in name} == {"2", "3"}
    tensors = checkpoint(layers=4)
    foreign = "model.layers.0.block_sparse_moe.gate.weight"
    report = model.load_weights({**tensors, foreign: torch.ones(1)}.items(), central=central)
    assert model.get_parameter("lm_head.weight").tolist() == [[1.0], [2.0]]
    assert report.counts[Outcome.DROPPED] == 2 * 9 + 1
    assert "lm_head.weight" in report.loaded
    for unknown in ("model.layers.2.block_sparse_moe.gate.weight", "model.layers.4.mlp.up_proj.weight"):
        with pytest.raises(NamesError) as caught:
            load_weights(model, {**tensors, unknown: torch.ones(1, 1)}.items(), central=central)
        assert caught.value.facts["unexpected"] == [unknown]


# L69
@WAYS
def test_b17_first_stage_leaves_the_final_norm_and_the_head_to_the_last(central: bool) -> None:
    config = parse_config(TINY | {"num_hidden_layers": 2})
    model = poisoned(config, Topology(pp=2), 0, BuildOptions(vocab_multiple=2))
    tensors = {"lm_head.weight": torch.ones(2, 1), **checkpoint(layers=2)}
    report = model.load_weights(tensors.items(), central=central)
    assert not {"model.norm.weight", "lm_head.weight"} & set(model.state_dict())
    assert report.counts[Outcome.DROPPED] == 9 + 2


# L77
@WAYS
def test_separate_head_of_a_rank_has_the_rows_of_the_checkpoint(central: bool) -> None:
    """Vocabulary 8 over 2 ranks: rows 4 to 7 on rank 1, whatever the embedding's shell has."""
    options = BuildOptions(vocab_multiple=8, separate_head=True)
    config = parse_config(
        TINY
        | {
            "vocab_size": 8,
            "tie_word_embeddings": True,
            "hidden_size": 2,
            "intermediate_size": 2,
            "num_attention_heads": 2,
        }
    )
    model = poisoned(config, Topology(tp=2), 1, options)
    tensors = checkpoint(vocab=8, hidden=2)
    report = model.load_weights(tensors.items(), central=central)
    rows = tensors["model.embed_tokens.weight"][4:8]
    head, embedding = model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight")
    assert head is not embedding
    assert torch.equal(head, rows)
    assert torch.equal(embedding, rows)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= report.loaded
    assert sum(report.counts.values()) == len(tensors)
