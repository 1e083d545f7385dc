"""Weights that wait for their scales in a shell of another dtype, and what is left at the end."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import nn

from weightwire.transfer.checkpoint.reused_buffers import mark_reused
from weightwire.transfer.errors import PlacementError, SlotsError
from weightwire.transfer.loading.halves import FP8, HalvesLoader, check_halves, forget_halves
from weightwire.transfer.loading.slots import attach_loader

NAME = "layers.0.indexer.wk_weights_proj.weight"
SCALE = "wk.weight_scale_inv"
ROWS, HEADS, COLS = 5, 2, 6
BLOCK = (2, 4)


def loader(*quantised: str) -> HalvesLoader:
    return HalvesLoader(
        parts=(("wk", ROWS), ("weights_proj", HEADS)), quantised=quantised or ("wk",), cols=COLS, block=BLOCK
    )


def shell() -> torch.Tensor:
    return torch.full((ROWS + HEADS, COLS), float("nan"), dtype=torch.bfloat16)


def parts(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "wk": torch.randn(ROWS, COLS, generator=generator).to(FP8),
        SCALE: torch.rand(3, 2, generator=generator),
        "weights_proj": torch.randn(HEADS, COLS, generator=generator).bfloat16(),
    }


def expected(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Element by element, by the definition."""
    wide = torch.empty(ROWS, COLS)
    for row in range(ROWS):
        for col in range(COLS):
            wide[row, col] = given["wk"][row, col].float() * given[SCALE][row // BLOCK[0], col // BLOCK[1]]
    return torch.cat([wide.bfloat16(), given["weights_proj"]])


# L127, L128
@pytest.mark.parametrize("order", list(permutations(["wk", SCALE, "weights_proj"])), ids=" then ".join)
def test_halves_meet_in_any_order(order: tuple[str, ...]) -> None:
    found, target, given = loader(), shell(), parts()
    filled = [slot for part in order for slot in found.load(target, given[part], part, name=NAME)]
    assert sorted(map(str, filled)) == sorted(map(str, found.slots))
    assert target.equal(expected(given))
    assert found.missing_halves() == ()


# L128
def test_halves_of_two_layers_do_not_mix() -> None:
    loaders, targets, given = (loader(), loader()), (shell(), shell()), (parts(0), parts(1))
    for layer, part in ((0, "wk"), (1, "wk"), (1, SCALE), (0, SCALE), (0, "weights_proj"), (1, "weights_proj")):
        loaders[layer].load(targets[layer], given[layer][part], part, name=NAME)
    assert targets[0].equal(expected(given[0]))
    assert targets[1].equal(expected(given[1]))


# L47, L128
def test_scale_from_a_buffer_that_is_used_again_is_cloned() -> None:
    found, target, given = loader(), shell(), parts()
    buffer = mark_reused(given[SCALE].clone())
    found.load(target, buffer, SCALE, name=NAME)
    buffer.fill_(7)
    found.load(target, given["wk"], "wk", name=NAME)
    found.load(target, given["weights_proj"], "weights_proj", name=NAME)
    assert target.equal(expected(given))


# L128
def test_part_that_is_not_quantised_after_all_is_placed_at_once() -> None:
    found, target = loader(), shell()
    plain = torch.randn(ROWS, COLS).bfloat16()
    assert found.load(target, plain, "wk", name=NAME) == ("wk", SCALE)
    assert target[:ROWS].equal(plain)
    assert found.missing_halves() == ()


# L127
def test_tensor_of_all_parts_fills_them_all() -> None:
    found, target = loader(), shell()
    fused = torch.randn(ROWS + HEADS, COLS).bfloat16()
    assert found.load(target, fused, None, name=NAME) == found.slots
    assert target.equal(fused)


# L128, C12
def test_what_waits_is_never_more_than_the_scales() -> None:
    given, targets = parts(), [(loader(), shell()) for _ in range(50)]
    for found, target in targets:
        found.load(target, given["wk"], "wk", name=NAME)
    # A weight waits in its own shell.
    assert sum(found.held_bytes for found, _ in targets) == 0
    for found, target in targets:
        found.load(target, given[SCALE], SCALE, name=NAME)
        found.load(target, given[SCALE], SCALE, name=NAME)
    assert sum(found.held_bytes for found, _ in targets) == 50 * given[SCALE].nbytes
    for found, target in targets:
        found.load(target, given["wk"], "wk", name=NAME)
    assert sum(found.held_bytes for found, _ in targets) == 0


# L129, D13
@pytest.mark.parametrize(
    ("came", "missing"),
    [
        pytest.param("wk", f"layers.0.indexer.{SCALE}", id="a weight without its scale"),
        pytest.param(SCALE, "layers.0.indexer.wk.weight", id="a scale without its weight"),
    ],
)
def test_half_that_is_left_names_its_counterpart(came: str, missing: str) -> None:
    found, model = loader(), nn.ParameterDict({"a": nn.Parameter(shell(), requires_grad=False)})
    attach_loader(model["a"], found)
    found.load(model["a"], parts()[came], came, name=NAME)
    with pytest.raises(SlotsError) as caught:
        check_halves({NAME: model["a"]})
    assert caught.value.facts["unfilled"] == [missing]
    assert caught.value.facts["diagnostic"] == "D13"
    forget_halves({NAME: model["a"]})
    check_halves({NAME: model["a"]})


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        pytest.param("wk", torch.zeros(ROWS, COLS + 1).to(FP8), id="a weight of another shape"),
        pytest.param("weights_proj", torch.zeros(HEADS, COLS).to(FP8), id="an FP8 part that has no scale"),
        pytest.param(SCALE, torch.zeros(2, 2), id="scales of another block"),
        pytest.param(SCALE, torch.zeros(3, 2, dtype=torch.uint8), id="exponents that pose as scales"),
        pytest.param("wv", torch.zeros(ROWS, COLS), id="a part that the shell does not have"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(part: str, tensor: torch.Tensor) -> None:
    found, target = loader(), shell()
    with pytest.raises(PlacementError):
        found.load(target, tensor, part, name=NAME)
    assert target.isnan().all()
    assert found.missing_halves() == ()
