"""What can be said of a checkpoint before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.checkpoints import DECODER, EXPERTS, Content, content, decoder, write_checkpoint, write_file
from weightwire.transfer import admission
from weightwire.transfer.checkpoint import DiscoveryOptions, DuplicatePolicy, LoadFormat
from weightwire.transfer.checkpoint.formats import ReaderOptions
from weightwire.transfer.checkpoint.read_plan import ReadOptions
from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError, SettingsError
from weightwire.transfer.inspection import InspectedFile, Inspection, inspect_checkpoint
from weightwire.transfer.ranks import GroupRank

V_PROJ = "model.layers.1.self_attn.v_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
W1 = "model.layers.0.mlp.experts.3.gate_proj.weight"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


def codes(found: Inspection) -> list[str]:
    return [odd.code for odd in found.diagnostics]


def changed(tensors: dict[str, Content], name: str, value: Content | None) -> dict[str, Content]:
    return {key: tensor for key, tensor in {**tensors, name: value}.items() if tensor is not None}


def test_inspection_counts_files_tensors_and_dtypes(tmp_path: Path) -> None:
    first = {"b": content("F32", 2, 3), "a": content("BF16", 5)}
    write_file(tmp_path / "model-00001-of-00002.safetensors", first)
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"c": content("BF16", 7)})
    found = inspect_checkpoint(tmp_path)
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    assert found.files == (
        InspectedFile(name="model-00001-of-00002.safetensors", nbytes=sizes[0], num_tensors=2),
        InspectedFile(name="model-00002-of-00002.safetensors", nbytes=sizes[1], num_tensors=1),
    )
    assert (found.num_tensors, found.nbytes) == (3, sum(sizes))
    assert found.dtypes == {"float32": 24, "bfloat16": 24}
    assert (found.folder, found.container, found.index) == (str(tmp_path), "safetensors", None)
    assert found.revision is not None
    assert (found.architecture, found.has_tree, found.refusal, found.diagnostics) == (None, False, None, ())


def test_inspection_of_one_file_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, decoder(), DECODER)
    assert inspect_checkpoint(folder / "model.safetensors") == inspect_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "architecture", "has_tree"),
    [
        pytest.param({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM", True, id="one with a tree"),
        pytest.param({"architectures": ["T5Model", "LlamaForCausalLM"]}, "T5Model", False, id="the first one counts"),
        pytest.param({"architectures": []}, None, False, id="an empty list"),
        pytest.param({"architectures": "LlamaForCausalLM"}, None, False, id="no list"),
        pytest.param({"architectures": [1, None]}, None, False, id="no names"),
        pytest.param({}, None, False, id="nothing"),
    ],
)
def test_inspection_names_the_architecture(
    tmp_path: Path, config: Mapping[str, object], architecture: str | None, has_tree: bool
) -> None:
    found = inspect_checkpoint(write_checkpoint(tmp_path, {"w": content("F32", 4)}, config))
    assert (found.architecture, found.has_tree) == (architecture, has_tree)
    # A tree that is known, of which the file does not say enough.
    assert (found.refusal is None) == (not has_tree)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        pytest.param(DECODER, decoder(), id="dense"),
        pytest.param(EXPERTS, decoder(num_experts=4), id="experts"),
        pytest.param(DECODER, changed(decoder(), ROTARY, content("F32", 2)), id="an old one"),
    ],
)
def test_checkpoint_that_fits_its_tree_has_nothing_against_it(
    tmp_path: Path, config: Mapping[str, object], tensors: dict[str, Content]
) -> None:
    found = inspect_checkpoint(write_checkpoint(tmp_path, tensors, config))
    assert (found.has_tree, found.refusal, found.diagnostics) == (True, None, ())


# D03, D04, L187
@pytest.mark.parametrize(
    ("config", "tensors", "said", "expected"),
    [
        pytest.param(DECODER, changed(decoder(), V_PROJ, None), "qkv_proj.weight[v]", ["D03"], id="a part is missing"),
        pytest.param(
            EXPERTS, changed(decoder(num_experts=4), W1, None), "experts.w13_weight[3.w1]", ["D03"],
            id="a matrix of an expert is missing",
        ),
        pytest.param(
            DECODER, changed(decoder(), GATE, content("BF16", 25, 16)), "[25, 16] into parameter [48, 16]", ["D04"],
            id="a shape differs",
        ),
        pytest.param(
            DECODER, changed(decoder(), "model.more", content("BF16", 1)), "'model.more'", [], id="an unknown name"
        ),
        pytest.param({**DECODER, "vocab_size": 0}, decoder(), "'vocab_size'", [], id="a configuration that cannot be"),
        pytest.param({**DECODER, "num_experts": 4}, decoder(), "'moe_intermediate_size'", [], id="half of it"),
    ],
)  # fmt: skip
def test_checkpoint_that_does_not_fit_its_tree_says_why(
    tmp_path: Path, config: Mapping[str, object], tensors: dict[str, Content], said: str, expected: list[str]
) -> None:
    found = inspect_checkpoint(write_checkpoint(tmp_path, tensors, config))
    assert found.refusal is not None
    assert said in found.refusal
    assert codes(found) == expected


def test_static_scales_that_only_values_can_judge_are_left_to_the_load(tmp_path: Path) -> None:
    """Of experts' input scales gate and up have to agree: nothing is known against a checkpoint that lacks them."""
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    found = inspect_checkpoint(write_checkpoint(tmp_path, decoder(num_experts=4), {**EXPERTS, **fp8}))
    assert (found.has_tree, found.refusal) == (True, None)


# D02, L21
def test_first_of_two_copies_is_noted_where_it_is_allowed(tmp_path: Path) -> None:
    for number in (1, 2):
        write_file(tmp_path / f"{number}.safetensors", {"w": content("F32", 4, seed=number)})
    with pytest.raises(CheckpointError, match="is in two files"):
        inspect_checkpoint(tmp_path)
    found = inspect_checkpoint(tmp_path, DiscoveryOptions(duplicates=DuplicatePolicy.FIRST))
    assert [file.num_tensors for file in found.files] == [1, 0]
    assert codes(found) == ["D02"]


# D12
def test_files_that_do_not_fit_into_memory_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder(), DECODER)
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
    monkeypatch.setattr(admission, "_MEMINFO", tmp_path / "meminfo")
    found = inspect_checkpoint(folder)
    assert codes(found) == ["D12"]
    assert f"the files have {found.nbytes} bytes, 1024 bytes of memory are available" in found.diagnostics[0].detail


# D10, D11
@pytest.mark.parametrize(
    ("reading", "options", "shared", "expected"),
    [
        pytest.param(None, DiscoveryOptions(), False, [], id="everything at its default"),
        pytest.param(ReadOptions(prefetch=True), DiscoveryOptions(), False, [], id="prefetch, and so one thread"),
        pytest.param(
            ReadOptions(prefetch=True, threads=ReaderOptions(num_threads=4)), DiscoveryOptions(), False, ["D10"],
            id="prefetch and threads that were asked for",
        ),
        pytest.param(ReadOptions(mmap=False), DiscoveryOptions(), False, ["D11"], id="no mapping"),
        pytest.param(
            None, DiscoveryOptions(group=GroupRank(1, 4)), True, ["D10"], id="ranks that share storage in one order"
        ),
        pytest.param(
            None, DiscoveryOptions(sort_files=1, group=GroupRank(1, 4)), True, ["D11"], id="ranks that are staggered"
        ),
    ],
)  # fmt: skip
def test_way_of_reading_that_costs_time_is_noted(
    tmp_path: Path, reading: ReadOptions | None, options: DiscoveryOptions, shared: bool, expected: list[str]
) -> None:
    folder = write_checkpoint(tmp_path, decoder(), DECODER)
    found = inspect_checkpoint(folder, options, reading=reading, shared_storage=shared)
    assert codes(found) == expected
    assert {odd.subject for odd in found.diagnostics} <= {f"checkpoint {str(folder)!r}"}


# L26
def test_files_are_listed_in_the_order_in_which_a_rank_reads_them(tmp_path: Path) -> None:
    for number in range(4):
        write_file(tmp_path / f"{number}.safetensors", {f"w{number}": content("F32", 4)})
    found = inspect_checkpoint(tmp_path, DiscoveryOptions(sort_files=1, group=GroupRank(1, 2)))
    assert [file.name for file in found.files] == [f"{number}.safetensors" for number in (1, 0, 3, 2)]


def test_pickle_is_described_without_being_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    (tmp_path / "config.json").write_text(json.dumps(dict(DECODER)))
    found = inspect_checkpoint(tmp_path)
    assert (found.container, found.num_tensors, found.nbytes) == ("pickle", None, 16)
    assert (found.revision, found.dtypes, found.refusal) == (None, {}, None)
    assert (found.architecture, found.has_tree) == ("LlamaForCausalLM", True)


def test_format_decides_what_is_found(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    found = inspect_checkpoint(tmp_path, DiscoveryOptions(load_format=LoadFormat.MISTRAL))
    assert [file.name for file in found.files] == ["consolidated.safetensors"]
    with pytest.raises(CheckpointNotFoundError, match=r"tried \*\.pt"):
        inspect_checkpoint(tmp_path, DiscoveryOptions(load_format=LoadFormat.PT))
    with pytest.raises(SettingsError, match="reads no files"):
        inspect_checkpoint(tmp_path, DiscoveryOptions(load_format=LoadFormat.DUMMY))


def test_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, decoder(), DECODER)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        inspect_checkpoint(folder)
