"""`weightwire inspect`: what is in a folder, and what is odd about it, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.faults.checkpoints import DECODER, decoder, total_bytes, write_checkpoint, write_file
from tests.faults.processes import Json, Lab

MEMBERS = {"folder", "container", "index", "architecture", "has_tree", "refusal", "revision", "files", "tensors",
           "bytes", "dtypes", "diagnostics", "explained", "error"}  # fmt: skip
V_PROJ = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", decoder(), DECODER)


def diagnostics(answer: Json) -> list[Json]:
    return cast("list[Json]", answer["diagnostics"])


def test_inspect_prints_what_the_folder_holds(lab: Lab, folder: Path) -> None:
    answer = lab.run("inspect", folder, "--json", fresh=True).check(0)
    assert answer.keys() == MEMBERS
    size = (folder / "model.safetensors").stat().st_size
    assert answer["files"] == [{"name": "model.safetensors", "bytes": size, "tensors": 21}]
    assert (answer["tensors"], answer["bytes"]) == (21, size)
    assert answer["dtypes"] == {"bfloat16": total_bytes(decoder())}
    assert (answer["container"], answer["index"]) == ("safetensors", None)
    assert (answer["architecture"], answer["has_tree"]) == ("LlamaForCausalLM", True)
    assert (answer["refusal"], answer["diagnostics"], answer["error"]) == (None, [], None)


# L17, L26
def test_inspect_lists_the_files_of_the_index_in_reading_order(lab: Lab, folder: Path) -> None:
    tensors = list(decoder().items())
    weight_map = dict[str, str]()
    for number, part in ((2, tensors[:10]), (1, tensors[10:])):
        file = f"model-0000{number}-of-00002.safetensors"
        write_file(folder / file, dict(part))
        weight_map |= {name: file for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    answer = lab.run("inspect", folder, "--json").check(0)
    assert [(file["name"], file["tensors"]) for file in cast("list[Json]", answer["files"])] == [
        ("model-00001-of-00002.safetensors", 11), ("model-00002-of-00002.safetensors", 10),
    ]  # fmt: skip
    assert answer["index"] == "model.safetensors.index.json"
    # The merged copy beside the shards.
    assert [(odd["code"], odd["stage"]) for odd in diagnostics(answer)] == [("D02", "discovery")]
    assert "'model.safetensors'" in str(diagnostics(answer)[0]["detail"])


# D02, L187
def test_inspect_explains_to_people_what_is_odd(lab: Lab, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    outcome = lab.run("inspect", folder)
    text = "\n".join(outcome.lines)
    assert outcome.code == 0
    assert "1 safetensors file without an index: 21 tensors" in text
    assert "D02 [discovery]" in text
    assert "found: left out 'consolidated.safetensors'" in text
    assert "likely causes:\n  1. a merged file lies beside the shards" in text
    assert outcome.log == ""


# D10
def test_inspect_says_what_shared_storage_costs(lab: Lab, folder: Path) -> None:
    answer = lab.run("inspect", folder, "--shared-by", 8, "--json").check(0)
    assert [(odd["code"], odd["stage"]) for odd in diagnostics(answer)] == [("D10", "iteration")]
    assert "8 ranks ask shared storage for the same file" in str(diagnostics(answer)[0]["detail"])
    assert diagnostics(lab.run("inspect", folder, "--shared-by", 1, "--json").check(0)) == []


# D03
def test_inspect_foretells_a_load_that_would_be_refused(lab: Lab, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in decoder().items() if name != V_PROJ}
    folder = write_checkpoint(tmp_path / "model", tensors, DECODER)
    answer = lab.run("inspect", folder, "--json").check(0)
    assert "model.layers.1.self_attn.qkv_proj.weight[v]" in str(answer["refusal"])
    assert [odd["code"] for odd in diagnostics(answer)] == ["D03"]
    loaded = lab.run("load", folder, "--tp", 1, "--json")
    loaded.check(1)
    assert answer["refusal"] == loaded.error["detail"]


def test_inspect_opens_no_pickle(lab: Lab, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "it went off",)

    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"w": torch.ones(3), "bomb": Bomb()}, folder / "pytorch_model.bin")
    answer = lab.run("inspect", folder, "--json").check(0)
    assert (answer["container"], answer["tensors"], answer["dtypes"]) == ("pickle", None, {})
    assert cast("list[Json]", answer["files"])[0]["tensors"] is None
    # Nor does a load run it.
    refused = lab.run("load", folder, "--json")
    refused.check(1)
    assert str(refused.error["code"]).startswith("checkpoint_")
    assert not (tmp_path / "it went off").exists()


# L18, L24
@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        pytest.param(
            "model.safetensors.index.json", '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}',
            "checkpoint_not_found", id="a stale index",
        ),
        pytest.param("model-00001-of-00002.safetensors", "", "checkpoint_not_found", id="a shard alone"),
        pytest.param("other.safetensors", "<html>", "checkpoint_header_invalid", id="a page instead of weights"),
    ],
)  # fmt: skip
def test_inspect_refuses_what_a_load_refuses(lab: Lab, folder: Path, file: str, text: str, code: str) -> None:
    (folder / file).write_text(text)
    outcomes = [lab.run(*words, "--json") for words in (("inspect", folder), ("load", folder, "--tp", 2))]
    for outcome in outcomes:
        outcome.check(1)
    assert [outcome.error["code"] for outcome in outcomes] == [code, code]
    assert outcomes[0].error == outcomes[1].error


@pytest.mark.parametrize("load_format", ["gguf", "any"])
def test_inspect_exits_2_for_a_format_that_is_not_served(lab: Lab, folder: Path, load_format: str) -> None:
    outcome = lab.run("inspect", folder, "--load-format", load_format, "--json")
    outcome.check(2)
    assert "safetensors, pt, npcache, mistral, dummy" in str(outcome.error["detail"])
