"""Loads that read only what a rank holds: equal to the published formula, and to the loads that read everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.transfer.models.closed_form import expected_shells
from tests.transfer.models.conftest import Saved, poisoned
from weightwire.transfer import admission
from weightwire.transfer.checkpoint import Checkpoint, LoadFormat
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import (
    AdmissionError,
    CheckpointError,
    ConfigError,
    NamesError,
    PlacementError,
    SlotsError,
    TopologyError,
)
from weightwire.transfer.loading.base_loaders import Write, write_all
from weightwire.transfer.loading.casts import SAME_DTYPE
from weightwire.transfer.loading.direct import DirectLoad, load_direct
from weightwire.transfer.loading.landing import Landing, land
from weightwire.transfer.loading.ledger import exempt_slots
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.resolver import NameTables, Resolver
from weightwire.transfer.loading.slots import SlotId, attach_loader
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.local_tree import TreeLoader, TreeRequest
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions, ParameterTree
from weightwire.transfer.tracing import trace_placement

_PACKED = torch.float4_e2m1fn_x2
SavedBy = Callable[[str], Saved]
TOPOLOGIES = [
    ("llama", Topology()),
    ("llama", Topology(tp=4, pp=2)),
    ("llama with biases", Topology(tp=2)),
    ("llama, tied", Topology(tp=2, pp=3)),
    ("qwen2", Topology(tp=4)),
    ("qwen3_moe", Topology(tp=4, pp=3, ep=2)),
    ("qwen3_moe", Topology(tp=4, ep=4)),
    ("qwen2_moe", Topology(tp=2, ep=1)),
    ("qwen2_moe without biases", Topology(tp=2, ep=2)),
    ("deepseek_v2", Topology()),
    ("deepseek_v2", Topology(tp=2, pp=2)),
    ("deepseek_v3", Topology(tp=2)),
    ("deepseek_v3", Topology(tp=4, pp=3, ep=2)),
    ("deepseek_v3", Topology(pp=2)),
    ("deepseek_v32", Topology(tp=4)),
    ("deepseek_v32", Topology(tp=2, ep=2)),
]


def control() -> Control:
    return Control(deadline_s=60)


def direct(tree: torch.nn.Module, folder: Path, *, central: bool = False, warn: bool = False) -> DirectLoad:
    with Checkpoint.open(folder) as checkpoint:
        return load_direct(
            tree, checkpoint, control=control(), central=central, unexpected="warn" if warn else "refuse"
        )


def write(saved: Saved, folder: Path, **changed: torch.Tensor | None) -> Path:
    """The checkpoint again, with some tensors changed, added or left out."""
    tensors = {**saved.tensors, **changed}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, folder / "m.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(saved.members))
    return folder


def bits(tree: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: shell.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, shell in shells_of(tree).items()
    }


# L01, L02, L86, L95, L100, L101, L102, L106, L118, C4, C7
@pytest.mark.parametrize("central", [False, True], ids=["by tables", "by the walker"])
@pytest.mark.parametrize(("family", "topology"), TOPOLOGIES, ids=lambda value: str(value).replace("Topology", ""))
def test_every_rank_equals_the_published_formula(
    saved: SavedBy, family: str, topology: Topology, central: bool
) -> None:
    checkpoint = saved(family)
    for rank in range(topology.world_size):
        tree = poisoned(checkpoint.config, topology, rank, BuildOptions(vocab_multiple=4 * topology.tp))
        direct(tree, checkpoint.folder, central=central)
        expected = expected_shells(checkpoint, topology, rank, vocab_multiple=4 * topology.tp)
        shells = tree.state_dict()
        assert shells.keys() == expected.keys()
        assert [name for name, shell in shells.items() if not shell.equal(expected[name])] == []


# L06, L35, L62, L68
def test_a_rank_reads_its_own_bytes_and_no_others(saved: SavedBy) -> None:
    checkpoint, topology = saved("qwen3_moe"), Topology(tp=4, pp=3, ep=4)
    for rank in range(topology.world_size):
        tree = poisoned(checkpoint.config, topology, rank, BuildOptions(vocab_multiple=1 << 8))
        load = direct(tree, checkpoint.folder)
        own = sum(shell.nbytes for shell in shells_of(tree).values())
        padding = sum(
            shell.nbytes - shell.count_nonzero().item() * shell.itemsize
            for name, shell in shells_of(tree).items()
            if "embed" in name or "lm_head" in name
        )
        assert load.bytes_read == own - padding


# L04
def test_every_name_has_one_outcome_and_the_counts_add_up(saved: SavedBy) -> None:
    checkpoint = saved("qwen3_moe")
    tree = poisoned(checkpoint.config, Topology(tp=2, pp=3, ep=2), 5, BuildOptions(vocab_multiple=32))
    report = direct(tree, checkpoint.folder).report
    assert sorted(outcome.name for outcome in report.outcomes) == sorted(checkpoint.tensors)
    assert sum(report.counts.values()) == len(checkpoint.tensors)
    assert report.counts[Outcome.NOT_LOCAL] == 2 * 3
    assert report.counts[Outcome.DROPPED] > 0


# L05, C2, D03
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_tensor_that_is_missing_is_named_before_a_byte_changes(saved: SavedBy, tmp_path: Path, name: str) -> None:
    checkpoint = saved("llama")
    tree = poisoned(checkpoint.config)
    before = bits(tree)
    with pytest.raises(SlotsError) as caught:
        direct(tree, write(checkpoint, tmp_path, **{name: None}))
    slot = {"v_proj": "qkv_proj.weight[v]", "up_proj": "gate_up_proj.weight[1]"}.get(name.split(".")[-2], name)
    assert slot in str(caught.value)
    assert caught.value.facts["diagnostic"] == "D03"
    assert bits(tree) == before


# L70
def test_an_unknown_name_is_refused_before_a_byte_changes_or_warned_about(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    folder = write(checkpoint, tmp_path, **{"model.layers.0.foo.weight": torch.ones(2)})
    tree = poisoned(checkpoint.config)
    before = bits(tree)
    with pytest.raises(NamesError, match=r"model\.layers\.0\.foo\.weight"):
        direct(tree, folder)
    assert bits(tree) == before
    assert direct(tree, folder, warn=True).report.counts[Outcome.UNEXPECTED] == 1


# L55
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("nan")])
def test_x4_a_bias_without_a_place_is_left_out_only_if_all_zeros(saved: SavedBy, tmp_path: Path, value: float) -> None:
    checkpoint = saved("llama")
    folder = write(checkpoint, tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.full((8,), value)})
    tree = poisoned(checkpoint.config)
    before = bits(tree)
    if value == 0:
        assert direct(tree, folder).report.counts[Outcome.SKIPPED_OPTIONAL] == 1
        return
    with pytest.raises(NamesError, match=r"q_proj\.bias"):
        direct(tree, folder)
    assert bits(tree) == before


# L92, D04
def test_a_shape_that_does_not_fit_is_named_before_a_byte_changes(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    tree = poisoned(checkpoint.config)
    before = bits(tree)
    with pytest.raises(PlacementError, match=r"layers\.1\.input_layernorm\.weight"):
        direct(tree, write(checkpoint, tmp_path, **{"model.layers.1.input_layernorm.weight": torch.ones(4).bfloat16()}))
    assert bits(tree) == before


# L94
def test_float32_files_are_converted_to_the_model_s_dtype(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    wide = {name: tensor.float() + 1e-4 for name, tensor in checkpoint.tensors.items()}
    tree = poisoned(checkpoint.config, Topology(tp=2), 1)
    direct(tree, write(checkpoint, tmp_path, **wide))
    rounded = wide["model.layers.0.self_attn.o_proj.weight"].bfloat16()[:, 4:]
    assert shells_of(tree)["model.layers.0.self_attn.o_proj.weight"].equal(rounded)


# L191
@pytest.mark.parametrize(("family", "topology"), TOPOLOGIES, ids=lambda value: str(value).replace("Topology", ""))
def test_every_shell_region_has_a_known_source(saved: SavedBy, family: str, topology: Topology) -> None:
    checkpoint = saved(family)
    for rank in range(topology.world_size):
        tree = poisoned(checkpoint.config, topology, rank, BuildOptions(device="meta"))
        with Checkpoint.open(checkpoint.folder) as opened:
            trace = trace_placement(tree.load_weights, shells_of(tree), specs_of(opened))
        assert not trace.opaque
        assert all(found.is_exact for found in trace.coverage.values())


# L03
def test_nothing_of_the_checkpoint_is_needed_after_the_load(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    folder = tmp_path / "gone"
    folder.mkdir()
    request = TreeRequest(folder=write(checkpoint, folder), build=BuildOptions(vocab_multiple=3))
    with TreeLoader(request) as loader:
        load = loader.load(0, control())
    shutil.rmtree(folder)
    expected = expected_shells(checkpoint, Topology(), 0, vocab_multiple=3)
    assert all(shell.equal(expected[name]) for name, shell in shells_of(load.tree).items())


# L10, L13, L45
@pytest.mark.parametrize("load_format", [LoadFormat.PT, LoadFormat.AUTO], ids=str)
def test_pickles_go_through_a_reader_and_end_in_the_same_shells(
    saved: SavedBy, tmp_path: Path, load_format: LoadFormat
) -> None:
    checkpoint, topology = saved("qwen3_moe"), Topology(tp=2, ep=2)
    suffix = "pt" if load_format is LoadFormat.PT else "bin"
    names = sorted(checkpoint.tensors)
    for number in range(3):
        torch.save({name: checkpoint.tensors[name] for name in names[number::3]}, tmp_path / f"part{number}.{suffix}")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.members))
    build = BuildOptions(vocab_multiple=32)
    with (
        TreeLoader(TreeRequest(folder=tmp_path, topology=topology, load_format=load_format, build=build)) as by_reader,
        TreeLoader(TreeRequest(folder=checkpoint.folder, topology=topology, build=build)) as by_ranges,
    ):
        for rank in range(2):
            one, other = by_reader.load(rank, control()), by_ranges.load(rank, control())
            assert bits(one.tree) == bits(other.tree)
            assert one.report.counts == other.report.counts


# L11
def test_dummy_reads_no_weights_and_leaves_none_uninitialised(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.members))
    loads = []
    with TreeLoader(TreeRequest(folder=tmp_path, topology=Topology(tp=2), load_format=LoadFormat.DUMMY)) as loader:
        loads = [loader.load(rank, control()) for rank in range(2)]
    assert bits(loads[0].tree) == bits(loads[1].tree)
    assert all(shell.abs().max() <= 1e-3 for shell in shells_of(loads[0].tree).values())


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        pytest.param(
            Topology(tp=3),
            r"LlamaForCausalLM, rank 0.*2 key-value heads.* 3, .*--pad-heads",
            id="heads that do not divide",
        ),
        pytest.param(Topology(pp=3), "pp=3: more stages than the model's 2 layers", id="more stages than layers"),
    ],
)
def test_a_topology_that_the_model_cannot_have_is_refused(saved: SavedBy, topology: Topology, message: str) -> None:
    loader = TreeLoader(TreeRequest(folder=saved("llama").folder, topology=topology))
    with loader, pytest.raises(TopologyError, match=message):
        loader.load(0, control())


def test_a_folder_without_configuration_is_refused(saved: SavedBy, tmp_path: Path) -> None:
    save_file(dict(saved("llama").tensors), tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        TreeLoader(TreeRequest(folder=tmp_path))


def test_files_that_change_during_a_load_are_refused(saved: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved("llama")
    write(checkpoint, tmp_path)
    with TreeLoader(TreeRequest(folder=tmp_path)) as loader:
        file = tmp_path / "m.safetensors"
        file.write_bytes(file.read_bytes())
        with pytest.raises(CheckpointError, match="changed on disk"):
            loader.load(0, control())


class _Plain(torch.nn.Module):
    """A module of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), -1.0), requires_grad=False)
        self.other = torch.nn.Parameter(torch.full((2, 3), -1.0), requires_grad=False)


def save_plain(folder: Path) -> Path:
    tensors = {"weight": torch.arange(4.0).half(), "other": torch.arange(6.0).view(2, 3).half()}
    save_file(tensors, folder / "m.safetensors")
    return folder


def test_a_module_of_others_is_filled_by_the_walker(tmp_path: Path) -> None:
    module = _Plain()
    with pytest.raises(PlacementError, match="dtype"):
        direct(module, save_plain(tmp_path), central=True)
    load = direct(module.half(), tmp_path, central=True)
    assert module.weight.tolist() == [0, 1, 2, 3]
    assert module.other.view(-1).tolist() == [0, 1, 2, 3, 4, 5]
    assert (load.num_loaded, load.num_constant, load.bytes_read) == (2, 0, 20)


class _Described(_Plain):
    """The same with tables, so that its loaders are asked whether they can be traced."""

    tables = NameTables(layers=range(0), num_layers=0)

    def resolver(self) -> Resolver:
        return Resolver(self.tables, shells_of(self))


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Looks at values, as loaders do that compare scales."""

    is_traceable = False

    @property
    def slots(self) -> tuple[SlotId, ...]:
        return (None,)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        if float(tensor.max()) != 3:
            raise PlacementError(f"tensor {name!r}: its largest value is not 3", tensor=name)
        shell.copy_(tensor)
        return (slot,)


@dataclass(frozen=True, slots=True)
class _Twice(_Sorted):
    """Zeroes the whole, then writes: two writes to the same elements, the later of which counts."""

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        shell.fill_(7)
        shell[:1].copy_(tensor[:1])
        return (slot,)


def test_a_loader_that_looks_at_values_gets_them_after_the_checks(tmp_path: Path) -> None:
    module = _Described().half()
    attach_loader(module.weight, _Sorted())
    load = direct(module, save_plain(tmp_path))
    assert module.weight.tolist() == [0, 1, 2, 3]
    assert (load.num_loaded, load.bytes_read) == (2, 20)


def test_of_two_writes_to_an_element_the_later_one_counts(tmp_path: Path) -> None:
    module = _Described().half()
    attach_loader(module.other, _Twice())
    direct(module, save_plain(tmp_path))
    assert module.other.tolist() == [[0, 1, 2], [7, 7, 7]]


@dataclass(frozen=True, slots=True)
class _Doubled(_Sorted):
    """Computes, which no trace can follow."""

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        shell.copy_(tensor * 2)
        return (slot,)


def test_an_opaque_shell_goes_through_its_own_loader(tmp_path: Path) -> None:
    module = _Described().half()
    attach_loader(module.other, _Doubled())
    load = direct(module, save_plain(tmp_path))
    assert module.other.view(-1).tolist() == [0, 2, 4, 6, 8, 10]
    assert (load.num_loaded, load.bytes_read) == (2, 20)


class _Mirror(torch.nn.Module):
    """Loads its own, and keeps a copy of one shell in another: a head that is synchronised with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 3), -1.0).half(), requires_grad=False)
        self.copy = torch.nn.Parameter(torch.full((3, 2), -1.0).half(), requires_grad=False)
        exempt_slots(self.copy, "derived")

    def load_weights(self, pairs: Iterable[Pair]) -> Iterator[Landing]:
        for name, tensor in pairs:
            outcome = NameOutcome(name=name, outcome=Outcome.PLACED, rule="L91", target=name)
            yield land(outcome, self.weight, tensor)
        self.copy.copy_(self.weight.t())


@dataclass(frozen=True, slots=True)
class _Into(_Sorted):
    """Fills its shell, and then another one from it."""

    other: torch.Tensor

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        shell.copy_(tensor)
        self.other.copy_(shell.t())
        return (slot,)


def _mirrored_by_a_module() -> torch.nn.Module:
    return torch.nn.ModuleDict({"mirror": _Mirror(), "plain": torch.nn.LayerNorm(4, bias=False).half()})


def _mirrored_by_a_loader() -> torch.nn.Module:
    model, mirror = _mirrored_by_a_module(), torch.nn.Module()
    mirror.weight, mirror.copy = _Mirror().weight, _Mirror().copy
    attach_loader(mirror.weight, _Into(mirror.copy))
    model.register_module("mirror", mirror)
    return model


# L79
@pytest.mark.parametrize("build", [_mirrored_by_a_module, _mirrored_by_a_loader], ids=["in a module", "in a loader"])
def test_a_copy_of_a_shell_into_another_is_made_by_every_way(
    build: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    tensors = {"mirror.weight": torch.arange(6.0).view(2, 3).half(), "plain.weight": torch.arange(4.0).half()}
    save_file(tensors, tmp_path / "m.safetensors")
    by_pairs, from_file = build(), build()
    load_weights(by_pairs, tensors.items(), central=True)
    load = direct(from_file, tmp_path, central=True)
    assert torch.equal(by_pairs.get_parameter("mirror.copy"), tensors["mirror.weight"].t())
    for name, shell in by_pairs.named_parameters():
        assert torch.equal(shell, from_file.get_parameter(name))
    assert load.bytes_read == 20


@dataclass(frozen=True, slots=True)
class _InPart(_Sorted):
    """Says that it filled the slot, and filled a part of it."""

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        shell[:1].copy_(tensor[:1])
        return (slot,)


@dataclass(frozen=True, slots=True)
class _Zeroed(_Sorted):
    """Padding alone, in a dtype that torch cannot fill: a rank beyond the end of a tensor."""

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        write_all([Write(shell, None)], name=name, casts=SAME_DTYPE)
        return (slot,)


def test_padding_of_packed_values_is_zero_bytes(tmp_path: Path) -> None:
    module = _Described().half()
    module.other = torch.nn.Parameter(torch.full((2, 3), 7, dtype=torch.uint8).view(_PACKED), requires_grad=False)
    attach_loader(module.other, _Zeroed())
    assert direct(module, save_plain(tmp_path)).num_constant == 1
    assert not module.other.view(torch.uint8).any()


@dataclass(frozen=True, slots=True)
class _Reinterpreted(_Sorted):
    """Takes bits, as loaders do whose kernel wants another dtype; the trace knows values."""

    is_traceable = True

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: SlotId, *, name: str) -> tuple[SlotId, ...]:
        shell.copy_(tensor.view(torch.int16))
        return (slot,)


def test_bits_stay_the_bits_that_they_are(tmp_path: Path) -> None:
    module = _Described().half()
    module.other = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.int16), requires_grad=False)
    attach_loader(module.other, _Reinterpreted())
    direct(module, save_plain(tmp_path))
    assert module.other.view(torch.half).view(-1).tolist() == [0, 1, 2, 3, 4, 5]


# L05
def test_a_shell_that_would_be_filled_in_part_is_named_before_a_byte_changes(tmp_path: Path) -> None:
    module = _Described().half()
    attach_loader(module.other, _InPart())
    with pytest.raises(SlotsError, match=r"other \(3 of 6 elements\)"):
        direct(module, save_plain(tmp_path))
    assert module.weight.eq(-1).all()


def test_a_tree_is_a_module_with_the_names_of_engines(saved: SavedBy) -> None:
    tree = poisoned(saved("qwen3_moe").config, Topology(tp=2, ep=2))
    assert isinstance(tree, ParameterTree)
    assert "model.layers.0.mlp.experts.w13_weight" in shells_of(tree)


def test_optional_tensor_that_does_not_fit_into_memory_is_not_looked_at(
    saved: SavedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, name = saved("llama"), "model.layers.0.mlp.gate_proj.bias"
    folder = write(llama, tmp_path, **{name: torch.zeros(4096)})
    tree = poisoned(llama.config)
    (tmp_path / "meminfo").write_text("MemAvailable: 15 kB\n")
    monkeypatch.setattr(admission, "_MEMINFO", tmp_path / "meminfo")
    with pytest.raises(AdmissionError, match=f"looking at the values of '{name}'"):
        direct(tree, folder)
