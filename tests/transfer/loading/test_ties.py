"""Two checkpoint names for the same memory: equal values pass, others are refused and lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.errors import AdmissionError, SlotsError
from weightwire.transfer.loading import direct
from weightwire.transfer.loading.base_loaders import CutLoader
from weightwire.transfer.loading.casts import float_casts
from weightwire.transfer.loading.direct import load_direct
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.slots import attach_loader
from weightwire.transfer.loading.ties import FilledMemory
from weightwire.transfer.loading.walker import Absent
from weightwire.transfer.ranks import GroupRank

EMBED, HEAD, OTHER = "embed.weight", "head.weight", "other.weight"
Fill = Callable[[nn.Module, dict[str, torch.Tensor], Path], None]


def fill_from_pairs(model: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    load_weights(model, tensors.items(), central=True)


def fill_from_file(model: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "m.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        load_direct(model, checkpoint, control=Control(deadline_s=60), central=True)


BOTH_WAYS = pytest.mark.parametrize("fill", [fill_from_pairs, fill_from_file], ids=["pairs", "file"])


def tied(head: nn.Parameter | None = None) -> nn.Module:
    """A module of somebody else's, with one tensor under two names."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False), "other": Norm()})
    for parameter in model.parameters():
        parameter.requires_grad_(False).fill_(-1)
    model.get_submodule("head").weight = model.get_parameter(EMBED) if head is None else head
    return model


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def values(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    table = torch.arange(8.0).view(4, 2)
    return {EMBED: table, OTHER: torch.ones(2), HEAD: table.clone()} | {
        name.replace("_", "."): tensor for name, tensor in changed.items()
    }


# L04, L77
@BOTH_WAYS
def test_both_names_of_a_tie_may_have_the_same_values(fill: Fill, tmp_path: Path) -> None:
    model, tensors = tied(), values()
    tensors[EMBED][1, 1] = tensors[HEAD][1, 1] = float("nan")
    fill(model, tensors, tmp_path)
    assert torch.equal(model.get_parameter(HEAD).view(torch.int32), tensors[EMBED].view(torch.int32))


# L21, L77
@BOTH_WAYS
@pytest.mark.parametrize("element", [0.5, float("nan"), -0.0], ids=["another number", "NaN", "a zero's sign"])
def test_a_tie_with_two_values_is_refused_and_names_both(fill: Fill, element: float, tmp_path: Path) -> None:
    tensors = values()
    tensors[HEAD][0, 0] = element
    with pytest.raises(SlotsError) as caught:
        fill(tied(), tensors, tmp_path)
    assert f"shell '{EMBED}'" in str(caught.value)
    assert caught.value.facts["tensors"] == [EMBED, HEAD]
    assert caught.value.facts["refilled"] == [EMBED]
    assert caught.value.facts["diagnostic"] == "D02"


# L21, L77
def test_a_tie_with_two_values_keeps_what_came_first() -> None:
    model, tensors = tied(), values(head_weight=torch.zeros(4, 2))
    with pytest.raises(SlotsError, match=HEAD):
        load_weights(model, tensors.items(), central=True)
    assert torch.equal(model.get_parameter(HEAD), tensors[EMBED])


# L21, L77
def test_a_tie_with_two_values_in_a_file_is_refused_before_a_byte_changes(tmp_path: Path) -> None:
    model = tied()
    with pytest.raises(SlotsError, match=HEAD):
        fill_from_file(model, values(head_weight=torch.zeros(4, 2)), tmp_path)
    assert all(parameter.eq(-1).all() for parameter in model.parameters())


@BOTH_WAYS
def test_a_tie_is_known_by_its_memory(fill: Fill, tmp_path: Path) -> None:
    """Two parameters, the second of which sees the first two rows of the first, transposed."""
    table = nn.Parameter(torch.full((4, 2), -1.0), requires_grad=False)
    turned = values(head_weight=values()[EMBED][:2].t().contiguous())

    def model() -> nn.Module:
        head = nn.Parameter(table.detach()[:2].t(), requires_grad=False)
        found = tied(head)
        found.get_submodule("embed").weight = table
        return found

    fill(model(), turned, tmp_path)
    assert torch.equal(table, turned[EMBED])
    with pytest.raises(SlotsError, match=HEAD):
        fill(model(), {**turned, HEAD: turned[HEAD] + 1}, tmp_path)


@BOTH_WAYS
def test_parameters_that_lie_side_by_side_are_no_tie(fill: Fill, tmp_path: Path) -> None:
    """Columns of one storage: their spans cross, and no element is shared."""
    flat = torch.full((4, 4), -1.0)
    model = tied(nn.Parameter(flat[:, 2:], requires_grad=False))
    model.get_submodule("embed").weight = nn.Parameter(flat[:, :2], requires_grad=False)
    tensors = values(head_weight=torch.full((4, 2), 7.0))
    fill(model, tensors, tmp_path)
    assert torch.equal(flat, torch.cat([tensors[EMBED], tensors[HEAD]], dim=1))


@BOTH_WAYS
def test_a_tie_is_compared_as_its_shell_has_it(fill: Fill, tmp_path: Path) -> None:
    """A rank's half, in another dtype: the other half may differ, and so may what the shell cannot hold."""
    half = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16), requires_grad=False)
    attach_loader(half, CutLoader.column(GroupRank(1, 2), 4, casts=float_casts("bfloat16")))
    model = tied(half)
    model.get_submodule("embed").weight = half
    tensors = values()
    tensors[HEAD][0] = 9
    tensors[HEAD][2, 0] += 2**-10
    fill(model, tensors, tmp_path)
    assert torch.equal(half, tensors[EMBED][2:].bfloat16())
    tensors[HEAD][2, 0] += 1
    with pytest.raises(SlotsError, match=HEAD):
        fill(model, tensors, tmp_path)


def test_a_tie_that_does_not_fit_into_memory_twice_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(needed_bytes: int, *, purpose: str) -> None:
        raise AdmissionError(f"{needed_bytes} bytes for {purpose}")

    monkeypatch.setattr(direct, "check_memory", refuse)
    with pytest.raises(AdmissionError, match=f"128 bytes for comparing the values of '{EMBED}' and '{HEAD}'"):
        fill_from_file(tied(), values(), tmp_path)


def test_a_shell_is_asked_about_by_its_own_span_alone() -> None:
    """As many shells as a large model has, in one storage: each is compared with none."""
    flat, filled = torch.zeros(20_000), FilledMemory()
    for number in range(20_000):
        shell = flat[number : number + 1]
        assert filled.others(f"w{number}", shell) == ()
        filled.note(f"w{number}", shell)
    assert filled.others("again", flat[5:7]) == ("w5", "w6")


def test_memory_without_elements_is_shared_with_nobody() -> None:
    filled, empty = FilledMemory(), torch.zeros(0)
    filled.note("a", empty)
    assert filled.others("b", empty) == ()


def test_a_placeholder_shares_nothing() -> None:
    model = nn.ModuleDict({"gone": Absent(), "other": Norm()})
    report = load_weights(model, [("gone.weight", torch.ones(2)), (OTHER, torch.ones(2))], central=True)
    assert [outcome.name for outcome in report.outcomes] == ["gone.weight", OTHER]
