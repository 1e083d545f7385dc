"""`weightwire load` for ranks of a topology: what it prints, what it saves, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.faults.checkpoints import DECODER, EXPERTS, Content, content, decoder, read_file, write_checkpoint
from tests.faults.processes import Json, Lab

Array: TypeAlias = npt.NDArray[np.uint16]

TENSORS = ("loaded", "skipped", "constant")
# Of `DECODER`: rows of the vocabulary, padded to 2 x 64, for each of two ranks.
VOCAB_ROWS = 64


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("dense"), decoder(), DECODER)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written."""
    return write_checkpoint(tmp_path_factory.mktemp("experts"), decoder(num_experts=4), EXPERTS)


def arrays(tensors: Mapping[str, Content]) -> dict[str, Array]:
    """The bits of bfloat16 tensors, in their shapes."""
    assert {tensor.tag for tensor in tensors.values()} == {"BF16"}
    return {name: np.frombuffer(t.data, dtype=np.uint16).reshape(t.shape) for name, t in tensors.items()}


def saved(folder: Path, rank: int) -> dict[str, Array]:
    return arrays(read_file(folder / f"rank-{rank}.safetensors"))


def half(array: Array, rank: int, *, axis: int = 0) -> Array:
    """What one of two ranks takes."""
    size = array.shape[axis] // 2
    return array.take(range(rank * size, (rank + 1) * size), axis)


def vocabulary(array: Array, rank: int) -> Array:
    padded = np.zeros((2 * VOCAB_ROWS, array.shape[1]), dtype=np.uint16)
    padded[: len(array)] = array
    return half(padded, rank)


def dense_rank(tensors: Mapping[str, Array], *, tp_rank: int, stage: int) -> dict[str, Array]:
    """The shells of one rank of tp 2, pp 2, by the published formula: layer `stage`, halves of everything but norms."""
    path = f"model.layers.{stage}"
    one = {name.removeprefix(f"{path}."): array for name, array in tensors.items() if name.startswith(f"{path}.")}

    def fused(place: str, *parts: str) -> Array:
        return np.concatenate([half(one[f"{place}.{part}_proj.weight"], tp_rank) for part in parts])

    shells = {
        f"{path}.self_attn.qkv_proj.weight": fused("self_attn", "q", "k", "v"),
        f"{path}.self_attn.o_proj.weight": half(one["self_attn.o_proj.weight"], tp_rank, axis=1),
        f"{path}.mlp.gate_up_proj.weight": fused("mlp", "gate", "up"),
        f"{path}.mlp.down_proj.weight": half(one["mlp.down_proj.weight"], tp_rank, axis=1),
        **{f"{path}.{norm}_layernorm.weight": one[f"{norm}_layernorm.weight"] for norm in ("input", "post_attention")},
    }
    if stage == 0:
        embedding = tensors["model.embed_tokens.weight"]
        return {**shells, "model.embed_tokens.weight": vocabulary(embedding, tp_rank)}
    head = vocabulary(tensors["lm_head.weight"], tp_rank)
    return {**shells, "model.norm.weight": tensors["model.norm.weight"], "lm_head.weight": head}


def check_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not np.array_equal(found[name], expected[name])] == []


def test_every_rank_is_saved_as_the_formula_cuts_it(lab: Lab, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = lab.run("load", dense, "--tp", 2, "--pp", 2, "--save", out, "--json", fresh=True).check(0)
    checkpoint = arrays(decoder())
    assert sorted(path.name for path in out.iterdir()) == [f"rank-{rank}.safetensors" for rank in range(4)]
    for rank in range(4):
        check_equal(saved(out, rank), dense_rank(checkpoint, tp_rank=rank % 2, stage=rank // 2))
    ranks = cast("list[Json]", answer["ranks"])
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    # All 21 words lie on the first rank of a stage; the second has nothing but padding there.
    assert [cast(Json, rank["tensors"]) for rank in ranks] == [
        {"loaded": loaded, "skipped": 21 - named, "constant": constant}
        for loaded, named, constant in ((7, 10, 0), (6, 10, 1), (8, 11, 0), (7, 11, 1))
    ]
    whole = cast(Json, answer["tensors"])
    assert whole == {key: sum(cast("dict[str, int]", rank["tensors"])[key] for rank in ranks) for key in TENSORS}
    # Nothing is read twice but the norms, which every tensor-parallel rank holds.
    norms = sum(array.nbytes for name, array in checkpoint.items() if "norm" in name)
    assert answer["bytes_read"] == sum(array.nbytes for array in checkpoint.values()) + norms
    assert answer["bytes_read"] == sum(cast(int, rank["bytes_read"]) for rank in ranks)
    assert answer["error"] is None


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        pytest.param((), [2, 3], id="equal blocks"),
        pytest.param(("--expert-map", "[[0, 1], [3, 2, 3]]"), [3, 2, 3], id="a map with a replica"),
    ],
)
def test_one_rank_reads_the_experts_that_it_holds(
    lab: Lab, experts: Path, tmp_path: Path, flags: tuple[str, ...], slots: list[int]
) -> None:
    if flags:
        (tmp_path / "map.json").write_text(flags[1])
        flags = (flags[0], str(tmp_path / "map.json"))
    where = ("--tp", 2, "--ep", 2, "--rank", 1, *flags)
    answer = lab.run("load", experts, *where, "--save", tmp_path / "out", "--json").check(0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank-1.safetensors"]
    checkpoint, found = arrays(decoder(num_experts=4)), saved(tmp_path / "out", 1)
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [checkpoint[f"{path}.{slot}.{part}_proj.weight"] for slot in slots] for part in ("gate", "up", "down")
        )
        assert np.array_equal(found[f"{path}.w13_weight"], np.concatenate([np.stack(gate), np.stack(up)], axis=1))
        assert np.array_equal(found[f"{path}.w2_weight"], np.stack(down))
    padding = sum(found[name].nbytes for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert answer["bytes_read"] == sum(array.nbytes for array in found.values()) - padding


def test_pickle_fills_the_same_shells(lab: Lab, dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickle"
    folder.mkdir()
    (folder / "config.json").write_bytes((dense / "config.json").read_bytes())
    as_torch = {name: torch.frombuffer(bytearray(array), dtype=torch.bfloat16).view(*array.shape)
                for name, array in arrays(decoder()).items()}  # fmt: skip
    torch.save(as_torch, folder / "pytorch_model.bin")
    flags = ("--tp", 2, "--pp", 2, "--rank", 3, "--save", tmp_path / "out", "--json")
    answer = lab.run("load", folder, *flags).check(0)
    check_equal(saved(tmp_path / "out", 3), dense_rank(arrays(decoder()), tp_rank=1, stage=1))
    assert cast(Json, answer["tensors"])["skipped"] == 10


def test_dummy_values_need_no_weights(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(DECODER)))
    flags = ("--tp", 2, "--load-format", "dummy", "--save", tmp_path / "out", "--json")
    answer = lab.run("load", tmp_path, *flags).check(0)
    assert (answer["bytes_read"], answer["tensors"]) == (0, {"loaded": 0, "skipped": 0, "constant": 30})
    check_equal(saved(tmp_path / "out", 0), saved(tmp_path / "out", 1))


def with_names(folder: Path, changed: Mapping[str, Content | None]) -> Path:
    """The dense checkpoint with some tensors added, changed or left out."""
    tensors = {**decoder(), **changed}
    return write_checkpoint(folder, {name: t for name, t in tensors.items() if t is not None}, DECODER)


V_PROJ = "model.layers.1.self_attn.v_proj.weight"
GATE_BIAS = "model.layers.0.mlp.gate_proj.bias"


# D03
def test_rank_that_cannot_be_filled_is_not_saved(lab: Lab, tmp_path: Path) -> None:
    folder, out = with_names(tmp_path / "model", {V_PROJ: None}), tmp_path / "out"
    outcome = lab.run("load", folder, "--pp", 2, "--save", out, "--json")
    answer = outcome.check(1)
    assert outcome.error["code"] == "slots_unfilled"
    assert outcome.error["diagnostic"] == "D03"
    assert outcome.error["unfilled"] == ["model.layers.1.self_attn.qkv_proj.weight[v]"]
    assert answer.keys() == {"seconds", "bytes_read", "peak_rss_bytes", "tensors", "ranks", "error"}
    # The first stage was complete before the second one was looked at.
    assert [rank["rank"] for rank in cast("list[Json]", answer["ranks"])] == [0]
    assert cast(Json, answer["tensors"])["loaded"] == 7
    assert [path.name for path in out.iterdir()] == ["rank-0.safetensors"]


# L187
def test_failure_is_explained_to_people_on_stderr(lab: Lab, tmp_path: Path) -> None:
    outcome = lab.run("load", with_names(tmp_path / "model", {V_PROJ: None}), "--tp", 1)
    assert (outcome.code, outcome.lines) == (1, [])
    assert "slots_unfilled: 1 slots were filled by nothing: model.layers.1.self_attn.qkv_proj.weight[v]" in outcome.log
    assert "D03 [discovery + names]" in outcome.log
    assert "likely causes:\n  1. " in outcome.log
    assert "in docs/rules.md" in outcome.log
    assert "Traceback" not in outcome.log


@pytest.mark.parametrize(
    ("name", "value", "flags", "code"),
    [
        pytest.param("model.extra", content("BF16", 3), (), "names_unexpected", id="a name without a place"),
        pytest.param("model.extra", content("BF16", 3), ("--unexpected", "warn"), None, id="the same, with a warning"),
        pytest.param(GATE_BIAS, content("BF16", 24), (), "names_unexpected", id="a bias that does something"),
        pytest.param(
            GATE_BIAS, Content(tag="BF16", shape=(24,), data=bytes(48)), (), None, id="a bias that does nothing"
        ),
        pytest.param(V_PROJ, content("BF16", 9, 16), (), "placement_refused", id="another shape"),
        pytest.param(V_PROJ, content("I16", 8, 16), (), "placement_refused", id="another kind of number"),
    ],
)
def test_tensor_is_refused_or_left_out_by_policy(
    lab: Lab, tmp_path: Path, name: str, value: Content, flags: tuple[str, ...], code: str | None
) -> None:
    outcome = lab.run("load", with_names(tmp_path / "model", {name: value}), "--tp", 1, *flags, "--json")
    answer = outcome.check(0 if code is None else 1)
    if code is None:
        assert answer["tensors"] == {"loaded": 15, "skipped": 1, "constant": 0}
    else:
        assert outcome.error["code"] == code
        assert name in str(outcome.error["detail"]) or "qkv_proj" in str(outcome.error["detail"])


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        pytest.param(("--tp", 3), "topology_impossible", id="heads that tp does not divide"),
        pytest.param(("--pp", 3), "topology_impossible", id="more stages than layers"),
        pytest.param(("--tp", 2, "--vocab-multiple", 3), "topology_impossible", id="a vocabulary that tp cannot share"),
    ],
)
def test_topology_that_the_model_cannot_have_is_refused(
    lab: Lab, dense: Path, flags: tuple[object, ...], code: str
) -> None:
    outcome = lab.run("load", dense, *flags, "--json")
    outcome.check(1)
    assert (outcome.error["code"], outcome.error["rank"]) == (code, 0)
    assert "LlamaForCausalLM, rank 0" in str(outcome.error["detail"])


# L117
def test_heads_are_padded_if_that_is_asked_for(lab: Lab, dense: Path, tmp_path: Path) -> None:
    """Two key-value heads and the four query heads that belong to them, on three ranks: the third has none."""
    flags = ("--tp", 3, "--rank", 2, "--pad-heads", "--vocab-multiple", 3, "--save", tmp_path / "out")
    lab.run("load", dense, *flags, "--json").check(0)
    found = saved(tmp_path / "out", 2)
    assert found["model.layers.0.self_attn.qkv_proj.weight"].shape == ((2 + 1 + 1) * 4, 16)
    assert not found["model.layers.0.self_attn.qkv_proj.weight"].any()
    assert not found["model.layers.0.self_attn.o_proj.weight"].any()
    assert np.array_equal(found["lm_head.weight"], arrays(decoder())["lm_head.weight"][14:])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--tp", 2, "--ep", 3), id="ep that does not divide tp"),
        pytest.param(("--tp", 2, "--rank", 2), id="a rank that is none"),
        pytest.param(("--rank", 1), id="a rank without a topology"),
        pytest.param(("--pad-heads",), id="padding without a topology"),
        pytest.param(("--tp", 2, "--exclude", "*"), id="names left out of a topology"),
        pytest.param(("--tp", 2, "--load-format", "gguf"), id="a format that is not served"),
        pytest.param(("--tp", 2, "--load-format", "any"), id="a format that nobody knows"),
        pytest.param(("--load-format", "dummy"), id="dummy values without a topology"),
        pytest.param(("--tp", 2, "--unexpected", "ignore"), id="an unknown policy"),
        pytest.param(("--tp", 2, "--expert-map", "FOLDER/config.json"), id="an expert map that is none"),
        pytest.param(("--tp", 2, "--save", "FOLDER"), id="saving into the checkpoint"),
        pytest.param(("--tp", 0), id="no ranks"),
    ],
)
def test_load_exits_2_on_wrong_usage(lab: Lab, dense: Path, flags: tuple[object, ...]) -> None:
    words = (str(flag).replace("FOLDER", str(dense)) for flag in flags)
    outcome = lab.run("load", dense, *words, "--json")
    outcome.check(2)
    assert outcome.error["code"] in ("usage", "settings_invalid")
    assert sorted(path.name for path in dense.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel", id="an architecture without a tree"),
        pytest.param({"architectures": None}, "architectures", id="no architecture"),
        pytest.param({"hidden_size": "16"}, "hidden_size", id="a size that is text"),
        pytest.param(None, "config.json", id="no config.json"),
    ],
)
def test_config_that_describes_no_model_is_refused_by_its_field(
    lab: Lab, tmp_path: Path, config: Mapping[str, object] | None, said: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder(), {**DECODER, **(config or {})})
    if config is None:
        (folder / "config.json").unlink()
    outcome = lab.run("load", folder, "--tp", 1, "--json")
    outcome.check(1)
    assert outcome.error["code"] == "config_invalid"
    assert said in str(outcome.error["detail"])


def test_load_whose_time_is_over_exits_4(lab: Lab, dense: Path, tmp_path: Path) -> None:
    flags = ("--tp", 2, "--deadline-s", 0.001, "--save", tmp_path / "out", "--json")
    outcome = lab.run("load", dense, *flags)
    answer = outcome.check(4)
    assert (outcome.error["code"], answer["ranks"]) == ("deadline_exceeded", [])
    assert not list((tmp_path / "out").glob("*.safetensors"))
