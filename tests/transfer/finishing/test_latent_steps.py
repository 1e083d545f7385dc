"""The split of a whole tree, and that what ranks then hold multiplies to what transformers' own layers give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.transfer.models.conftest import same_bytes, stock_model
from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.latent_steps import latent_steps
from weightwire.transfer.finishing.routes import PLATFORMS
from weightwire.transfer.finishing.steps import Finisher, FinishStep, derived_bytes, derived_state, tensor_at
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, MemoryAccount, ParameterTree, build_model, parse_config
from weightwire.transfer.models.decoder import DecoderTree

Tensors = dict[str, torch.Tensor]
ATTENTION = "model.layers.1.self_attn"
MLP = "model.layers.1.mlp"
CUDA = PLATFORMS["cuda"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    stock_model("deepseek_v3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stock() -> nn.Module:
    """The same model in float64, by the plain implementations: others take no doubles."""
    model = stock_model("deepseek_v3")
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    return model.double()


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def tree_of(
    folder: Path, tensors: Tensors, topology: Topology | None = None, rank: int = 0
) -> tuple[DecoderTree, Finisher]:
    """A loaded rank, not finished."""
    tree = build_model(parse_config((folder / "config.json").read_text()), topology or Topology(), rank)
    tree.load_weights(tensors.items())
    return tree, Finisher(tree, latent_steps(tree, tree.config, CUDA))


def split_of(tree: ParameterTree, leaf: str, path: str = ATTENTION) -> torch.Tensor:
    found = tensor_at(tree, f"{path}.{leaf}")
    assert found is not None
    return found


# L139, L140, C5
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2), Topology(tp=4)], ids=str)
def test_attention_in_the_latent_space_is_that_of_transformers(
    stock: nn.Module, folder: Path, tensors: Tensors, topology: Topology
) -> None:
    theirs = stock.get_submodule(ATTENTION)
    hidden = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Positions that turn nothing: what is compared is everything else.
    still = torch.ones(1, 5, 2, dtype=torch.float64), torch.zeros(1, 5, 2, dtype=torch.float64)
    expected = theirs(hidden, still, None)[0][0]
    found = torch.zeros_like(expected)
    for rank in range(topology.tp):
        tree, finisher = tree_of(folder, tensors, topology, rank)
        finisher.run()
        shells = {name: shell.double() for name, shell in tree.get_submodule(ATTENTION).named_parameters()}
        down = hidden[0] @ shells["fused_qkv_a_proj_with_mqa.weight"].T + shells["fused_qkv_a_proj_with_mqa.bias"]
        q_down, latent, k_rot = torch.split(down, [6, 5, 2], dim=1)
        latent = theirs.get_submodule("kv_a_layernorm")(latent)
        queries = (
            (theirs.get_submodule("q_a_layernorm")(q_down) @ shells["q_b_proj.weight"].T)
            .unflatten(1, (-1, 6))
            .transpose(0, 1)
        )
        q_pass, q_rot = torch.split(queries, [4, 2], dim=2)
        w_kc, w_vc = (split_of(tree, leaf).double() for leaf in ("w_kc", "w_vc"))
        scores = (q_pass @ w_kc) @ latent.T + q_rot @ k_rot.T
        # Their softmax is float32's.
        weights = (scores * 6**-0.5).float().softmax(dim=-1).double()
        values = (weights @ latent) @ w_vc
        found += values.transpose(0, 1).flatten(1) @ shells["o_proj.weight"].T
    found += tensors[f"{ATTENTION}.o_proj.bias"].double()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


# L59, L106, L120, C6
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, ep=2), Topology(tp=4, ep=2)], ids=str)
@pytest.mark.parametrize("up_first", [False, True], ids=["gate first", "up first"])
def test_experts_of_all_ranks_are_the_mixture_of_transformers(
    stock: nn.Module, folder: Path, tensors: Tensors, *, topology: Topology, up_first: bool
) -> None:
    theirs = stock.get_submodule(MLP)
    hidden = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = theirs(hidden[None])[0]
    _, weights, chosen = theirs.get_submodule("gate")(hidden)
    found = torch.zeros_like(expected)
    for rank in range(topology.tp):
        options = BuildOptions(w13_up_first=up_first)
        tree = build_model(parse_config((folder / "config.json").read_text()), topology, rank, options)
        tree.load_weights(tensors.items())
        shells = {name: shell.double() for name, shell in tree.get_submodule(MLP).named_parameters()}
        assert tree.placement is not None
        for index, expert in enumerate(tree.placement.ranks[tree.place.expert.rank]):
            halves = (hidden @ shells["experts.w13_weight"][index].T).chunk(2, dim=1)
            gate, up = halves[::-1] if up_first else halves
            share = (weights * (chosen == expert)).sum(dim=1, keepdim=True)
            found += share * ((torch.nn.functional.silu(gate) * up) @ shells["experts.w2_weight"][index].T)
        gate, up = (hidden @ shells["shared_experts.gate_up_proj.weight"].T).chunk(2, dim=1)
        found += (torch.nn.functional.silu(gate) * up) @ shells["shared_experts.down_proj.weight"].T
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


# L140, L150
def test_layers_of_a_stage_are_split_and_no_others(folder: Path, tensors: Tensors) -> None:
    tree, finisher = tree_of(folder, tensors, Topology(pp=2), 1)
    assert finisher.run() == ("model.layers.2.self_attn: kv_b_proj split by heads",)
    tree, finisher = tree_of(folder, tensors)
    # Of what was loaded layer 5 is nowhere, and other tensors change nothing.
    loaded = [f"{ATTENTION}.kv_b_proj.weight", "model.layers.5.self_attn.kv_b_proj.weight", f"{MLP}.gate.weight"]
    assert finisher.run(loaded) == (f"{ATTENTION}: kv_b_proj split by heads",)
    assert tensor_at(tree, "model.layers.0.self_attn.w_kc") is None


# L150
def test_draft_role_splits_its_decoder(folder: Path) -> None:
    members = {**parse_config((folder / "config.json").read_text()).source, "num_nextn_predict_layers": 1}
    tree = build_model(parse_config(members), options=BuildOptions(role="draft", device="meta"))
    assert [step.inputs for step in latent_steps(tree, tree.config, CUDA)] == [
        ("model.decoder.self_attn.kv_b_proj.weight",)
    ]


# L134, L147, L149, C10
def test_b29_new_weights_reach_the_memory_that_graphs_have_captured(folder: Path, tensors: Tensors) -> None:
    tree, finisher = tree_of(folder, tensors)
    finisher.run()
    others = [split_of(tree, leaf, "model.layers.0.self_attn") for leaf in ("w_kc", "w_vc")]
    before = [tensor.clone() for tensor in others]
    w_kc, w_vc = (split_of(tree, leaf) for leaf in ("w_kc", "w_vc"))
    facts = [(tensor.data_ptr(), tensor.stride()) for tensor in (w_kc, w_vc)]
    first = [tensor.clone() for tensor in (w_kc, w_vc)]
    finisher.run()
    assert all(same_bytes(tensor, kept) for tensor, kept in zip((w_kc, w_vc), first, strict=True))
    kv_b = tree.get_parameter(f"{ATTENTION}.kv_b_proj.weight")
    with torch.no_grad():
        kv_b.copy_(torch.arange(float(kv_b.numel())).view(kv_b.shape))
    finisher.run([f"{ATTENTION}.kv_b_proj.weight"])
    assert split_of(tree, "w_kc") is w_kc
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in (w_kc, w_vc)] == facts
    # Heads of 4 rows of a key and 3 of a value, in rows of 5.
    assert w_kc[1].equal(kv_b[7:11])
    assert w_vc[1].T.equal(kv_b[11:14])
    assert all(same_bytes(tensor, kept) for tensor, kept in zip(others, before, strict=True))


# L133
def test_finishing_that_transposes_comes_after_the_split(folder: Path, tensors: Tensors) -> None:
    name = f"{ATTENTION}.kv_b_proj.weight"
    transposing = FinishStep(
        name="transposed for a kernel",
        phase="finish",
        inputs=(name,),
        outputs=(name,),
        run=lambda given: {name: given[name].T.contiguous()},
        replaces=True,
    )
    expected_tree, plain = tree_of(folder, tensors)
    plain.run()
    tree, _ = tree_of(folder, tensors)
    finisher = Finisher(tree, [transposing, *latent_steps(tree, tree.config, CUDA)])
    finisher.run()
    assert same_bytes(split_of(tree, "w_kc"), split_of(expected_tree, "w_kc"))
    assert tree.get_parameter(name).shape == (5, 28)
    # The reverse would split a matrix of another shape, or worse, of the same.
    with pytest.raises(FinishError, match="final form"):
        finisher.run()


# L85, L151, L184
def test_derived_state_is_listed_and_as_large_as_what_it_was_made_of(folder: Path, tensors: Tensors) -> None:
    tree, finisher = tree_of(folder, tensors)
    sources = sum(shell.nbytes for name, shell in tree.named_parameters() if name.endswith("kv_b_proj.weight"))
    assert derived_bytes(tree, finisher.steps) == sources
    account = MemoryAccount.of(tree, post_process_bytes=derived_bytes(tree, finisher.steps))
    assert account.total_bytes == account.shells_bytes + sources
    assert derived_state(tree, finisher.steps) == ()
    finisher.run()
    listed = derived_state(tree, finisher.steps)
    assert sum(state.tensor.nbytes for state in listed) == sources
    assert {re.sub(r"\d", "N", state.name) for state in listed} == {
        f"model.layers.N.self_attn.{leaf}" for leaf in ("w_kc", "w_vc")
    }
    assert all(state.step is not None for state in listed)


# L143, L148, C10
@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_scales_stay_where_they_are_and_the_parameter_s_own_is_left_alone(folder: Path, platform: str) -> None:
    quantised = {"quant_method": "fp8"} | ({"weight_block_size": [2, 2]} if platform == "rocm" else {})
    members = {**parse_config((folder / "config.json").read_text()).source, "quantization_config": quantised}
    tree = build_model(parse_config(members), options=BuildOptions())
    leaf = "weight_scale_inv" if platform == "rocm" else "weight_scale"
    with torch.no_grad():
        for name, shell in tree.named_parameters():
            values = torch.rand(shell.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5
            shell.copy_(values.to(shell.dtype))
    scales = tree.get_parameter(f"{ATTENTION}.kv_b_proj.{leaf}")
    finisher, before = Finisher(tree, latent_steps(tree, tree.config, PLATFORMS[platform])), scales.clone()
    finisher.run()
    w_scale = split_of(tree, "w_scale")
    address, first = w_scale.data_ptr(), w_scale.clone()
    finisher.run()
    assert split_of(tree, "w_scale") is w_scale
    assert w_scale.equal(first)
    assert scales.equal(before)
    with torch.no_grad():
        scales.mul_(3)
    finisher.run([f"{ATTENTION}.kv_b_proj.{leaf}"])
    assert (w_scale.data_ptr(), scales.equal(before * 3)) == (address, True)
    assert torch.allclose(w_scale, first * 3)
