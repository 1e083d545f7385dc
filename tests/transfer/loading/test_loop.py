"""The stages of a load, each alone and all together, on trees that are built and none that is read from a folder."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from weightwire.transfer import checkpoint as reading
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.errors import NamesError, SlotsError
from weightwire.transfer.loading.landing import land
from weightwire.transfer.loading.ledger import SlotLedger
from weightwire.transfer.loading.loop import account, land_by_tables, load_weights, walk_tree
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.slots import SlotId, attach_loader
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, ParameterTree, build_model, parse_config

DENSE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 4,
}
WITH_EXPERTS: dict[str, object] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 2,
    "moe_intermediate_size": 2,
}


def build(config: dict[str, object], topology: Topology | None = None, rank: int = 0) -> ParameterTree:
    return build_model(parse_config(config), topology or Topology(), rank, BuildOptions(vocab_multiple=4))


def dense_tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    """A whole checkpoint for `DENSE`, every value another one."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        names += [f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names += [f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"]
    shapes = ((4,) if "norm" in name else (4, 4) for name in names)
    return {
        name: torch.full(shape, float(number)) + torch.rand(shape)
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


# L01
def test_names_are_mapped_without_any_tensor_or_file() -> None:
    tables = NameTables(layers=range(2), num_layers=2)
    resolver = Resolver(tables, ["model.layers.0.self_attn.qkv_proj.weight", "model.norm.weight"])
    found = [resolver.resolve(f"model.{name}") for name in ("layers.0.self_attn.k_proj.weight", "norm.weight", "x")]
    assert [(outcome.outcome, outcome.target, outcome.slot) for outcome in found] == [
        (Outcome.PLACED, "model.layers.0.self_attn.qkv_proj.weight", "k"),
        (Outcome.PLACED, "model.norm.weight", None),
        (Outcome.UNEXPECTED, "model.x", None),
    ]


# L01
def test_tensor_is_placed_without_any_file_or_table() -> None:
    shell, tensor = nn.Parameter(torch.full((4, 2), torch.nan), requires_grad=False), torch.arange(8.0).view(4, 2)
    outcome = NameOutcome(name="a.weight", outcome=Outcome.PLACED, rule="L91", target="a.weight")
    assert land(outcome, shell, tensor).filled == (None,)
    assert torch.equal(shell, tensor)


# L02
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["model.layers.0.mlp.gate_proj.weight", "model.norm.weight"], id="dense"),
        pytest.param([f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)], id="with experts"),
    ],
)
def test_reader_gives_the_names_of_the_files(tmp_path: Path, names: list[str]) -> None:
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == sorted(names)


# L02
def test_reader_knows_no_model() -> None:
    forbidden = ("weightwire.transfer.models", "weightwire.transfer.loading")
    files = sorted(Path(str(reading.__file__)).parent.glob("*.py"))
    imported = {
        (file.name, node.module)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert len(files) > 3
    assert [(file, module) for file, module in imported if module.startswith(forbidden)] == []


# L03
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_shells_need_the_folder_no_more(tmp_path: Path, central: bool) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(tensors := dense_tensors(), folder / "model.safetensors")
    model = build(DENSE)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        model.load_weights(((name, file.get_tensor(name)) for name in file.keys()), central=central)  # noqa: SIM118
    shutil.rmtree(folder)
    reference = build(DENSE)
    reference.load_weights(tensors.items())
    assert all(torch.equal(model.state_dict()[name], shell) for name, shell in reference.state_dict().items())


# L04
def test_every_pair_ends_in_one_outcome_and_the_counts_add_up() -> None:
    """Layer 1 alone, the second half of the experts: 10 names, each of the five ends."""
    model = build(WITH_EXPERTS, Topology(tp=2, pp=2, ep=2), rank=3)
    layer = "model.layers.1."
    placed = [
        ("model.norm.weight", torch.ones(4)),
        (f"{layer}input_layernorm.weight", torch.ones(4)),
        (f"{layer}self_attn.q_proj.weight", torch.ones(4, 4)),
        (f"{layer}mlp.experts.1.up_proj.weight", torch.ones(2, 4)),
        ("lm_head.weight", torch.ones(4, 4)),
    ]
    others = [
        (f"{layer}self_attn.rotary_emb.inv_freq", torch.ones(1)),
        ("model.layers.0.input_layernorm.weight", torch.ones(4)),
        (f"{layer}self_attn.q_proj.bias", torch.zeros(4)),
        (f"{layer}mlp.experts.0.up_proj.weight", torch.ones(2, 4)),
        (f"{layer}foo.weight", torch.ones(4)),
    ]
    for landings in (
        land_by_tables(model.resolver(), placed + others, shells_of(model)),
        walk_tree(model, placed + others),
    ):
        report = account(landings, SlotLedger.of(model))
        assert report.counts == {
            Outcome.PLACED: 5,
            Outcome.DROPPED: 2,
            Outcome.SKIPPED_OPTIONAL: 1,
            Outcome.NOT_LOCAL: 1,
            Outcome.UNEXPECTED: 1,
        }
        assert sum(report.counts.values()) == 10
        assert [outcome.name for outcome in report.outcomes] == [name for name, _ in placed + others]


# L05, C2
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
@pytest.mark.parametrize("missing", range(14))
def test_load_names_the_slot_of_a_tensor_that_is_missing(missing: int, central: bool) -> None:
    """One dense layer with norms of queries and keys: 14 tensors."""
    config = WITH_EXPERTS | {"num_hidden_layers": 1, "mlp_only_layers": [0]}
    tensors = dense_tensors(1) | {f"model.layers.0.self_attn.{part}_norm.weight": torch.ones(2) for part in "qk"}
    assert len(tensors) == 14
    name = list(tensors)[missing]
    slot = name
    for part, fused in SLOTS.items():
        if part in name:
            slot = f"{name.replace(part, fused.partition('[')[0])}[{fused.partition('[')[2]}"
    del tensors[name]
    with pytest.raises(SlotsError) as caught:
        build(config).load_weights(tensors.items(), central=central)
    assert caught.value.facts["unfilled"] == [slot]
    assert slot in str(caught.value)


SLOTS = {
    "q_proj": "qkv_proj[q]",
    "k_proj": "qkv_proj[k]",
    "v_proj": "qkv_proj[v]",
    "gate_proj": "gate_up_proj[0]",
    "up_proj": "gate_up_proj[1]",
}


# L05
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_load_names_a_slot_that_two_tensors_fill(central: bool) -> None:
    tensors = dense_tensors()
    twice = [*tensors.items(), ("model.layers.1.mlp.up_proj.weight", torch.ones(4, 4))]
    with pytest.raises(SlotsError) as caught:
        build(DENSE).load_weights(twice, central=central)
    assert caught.value.facts["refilled"] == ["model.layers.1.mlp.gate_up_proj.weight[1]"]


# L55
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.bias"])
def test_bias_without_a_shell_is_left_out_only_if_it_is_all_zeros(name: str, central: bool) -> None:
    tensors = dense_tensors()
    report = build(DENSE).load_weights({**tensors, name: torch.zeros(4)}.items(), central=central)
    assert report.counts[Outcome.SKIPPED_OPTIONAL] == 1
    with pytest.raises(NamesError, match="all zeros") as caught:
        build(DENSE).load_weights({**tensors, name: torch.tensor([0.0, 0.0, 1e-30, 0.0])}.items(), central=central)
    assert caught.value.facts["unexpected"] == [name]


def test_bias_without_a_shell_and_without_values_is_left_to_the_caller() -> None:
    model = build_model(parse_config(DENSE), options=BuildOptions(device="meta"))
    pairs = {**dense_tensors(), "model.layers.0.self_attn.q_proj.bias": torch.ones(4)}
    report = model.load_weights((name, tensor.to("meta")) for name, tensor in pairs.items())
    assert report.counts[Outcome.SKIPPED_OPTIONAL] == 1


class Spy:
    """A loader that notes what it is handed."""

    def __init__(self) -> None:
        self.calls = list[tuple[SlotId, torch.Tensor]]()

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return ("q", "k", "v", 0, 1)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        self.calls.append((slot, tensor))
        return (slot,)


# L80, L91
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_loader_is_handed_the_untouched_tensor_and_the_slot_as_it_is(central: bool) -> None:
    model, spy, tensors = build(DENSE), Spy(), dense_tensors()
    attach_loader(model.get_parameter("model.layers.0.self_attn.qkv_proj.weight"), spy)
    attach_loader(model.get_parameter("model.layers.0.mlp.gate_up_proj.weight"), spy)
    with pytest.raises(SlotsError):
        model.load_weights(tensors.items(), central=central)
    assert [slot for slot, _ in spy.calls] == ["q", "k", "v", 0, 1]
    assert [type(slot) for slot, _ in spy.calls] == [str, str, str, int, int]
    assert spy.calls[0][1] is tensors["model.layers.0.self_attn.q_proj.weight"]


# L86, L90
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_payload_goes_into_the_shells_that_were_built(central: bool) -> None:
    model, moves = build(DENSE), list[nn.Module]()

    class Watched(type(model)):  # type: ignore[misc]
        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
            moves.append(self)
            moved: Self = super()._apply(fn, recurse)
            return moved

    model.__class__ = Watched

    def shells() -> dict[str, tuple[int, int, torch.Size, tuple[int, ...]]]:
        found = model.named_parameters()
        return {name: (id(shell), shell.data_ptr(), shell.shape, shell.stride()) for name, shell in found}

    before = shells()
    model.load_weights(dense_tensors().items(), central=central)
    assert shells() == before
    assert moves == []
    model.to("cpu")
    assert moves != []


# L81
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by a walk"])
def test_tree_lists_its_shells_once_in_a_load(central: bool) -> None:
    config = DENSE | {"num_hidden_layers": 100}
    model = build_model(parse_config(config), options=BuildOptions(device="meta"))
    listings = list[nn.Module]()

    class Counting(type(model)):  # type: ignore[misc]
        def named_parameters(
            self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, nn.Parameter]]:
            listings.append(self)
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    model.__class__ = Counting
    model.load_weights(((name, tensor.to("meta")) for name, tensor in dense_tensors(100).items()), central=central)
    assert len(listings) == 1


def test_model_without_tables_is_loaded_by_a_walk_only() -> None:
    with pytest.raises(ValueError, match="central=True"):
        load_weights(nn.Linear(2, 2), [])


def test_unexpected_name_comes_with_the_nearest_shells() -> None:
    pairs = {**dense_tensors(), "model.layers.0.self_attn.o_porj.weight": torch.ones(4, 4)}
    with pytest.raises(NamesError, match=r"nearest.*model\.layers\.0\.self_attn\.o_proj\.weight"):
        build(DENSE).load_weights(pairs.items())
