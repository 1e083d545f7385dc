from __future__ import annotations

import pytest
import torch
from torch import nn

from weightwire.transfer.errors import SlotsError
from weightwire.transfer.loading.fused_loaders import QkvGeometry, QkvLoader
from weightwire.transfer.loading.ledger import SlotLedger, exempt_slots, exemption, slots_of
from weightwire.transfer.loading.slots import ExpertPart, attach_loader
from weightwire.transfer.ranks import ALONE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(2, 8, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)
        geometry = QkvGeometry(num_heads=2, num_kv_heads=1, head_dim=2, v_head_dim=2, group=ALONE)
        attach_loader(self.qkv_proj.weight, QkvLoader(geometry=geometry))
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("scale", torch.zeros(1))


def test_slots_are_those_of_the_loaders_and_whole_shells() -> None:
    assert slots_of(Attention()) == {"qkv_proj.weight": ("q", "k", "v"), "norm.weight": (None,), "scale": (None,)}


# L05
def test_ledger_names_the_part_of_a_fused_shell_that_is_empty() -> None:
    ledger = SlotLedger({"qkv_proj.weight": ("q", "k", "v")})
    ledger.record("qkv_proj.weight", ("q",))
    ledger.record("qkv_proj.weight", ("k",))
    with pytest.raises(SlotsError, match=r"qkv_proj\.weight\[v\]") as caught:
        ledger.check()
    assert caught.value.facts["unfilled"] == ["qkv_proj.weight[v]"]
    assert caught.value.facts["refilled"] == []
    assert caught.value.facts["diagnostic"] == "D03"


# L05
def test_ledger_names_a_slot_that_was_filled_twice() -> None:
    ledger = SlotLedger({"w": (None,), "experts.w2_weight": (ExpertPart(0, "w2"), ExpertPart(1, "w2"))})
    ledger.record("w", (None,))
    ledger.record("experts.w2_weight", (ExpertPart(0, "w2"), ExpertPart(1, "w2")))
    ledger.check()
    ledger.record("experts.w2_weight", (ExpertPart(1, "w2"),))
    with pytest.raises(SlotsError) as caught:
        ledger.check()
    assert caught.value.facts["refilled"] == ["experts.w2_weight[1.w2]"]
    assert caught.value.facts["unfilled"] == []


# L05
def test_ledger_counts_slots_not_names() -> None:
    """Slot 0 and slot "0" are two, and a slot of another shell is another one."""
    ledger = SlotLedger({"a": (0, 1), "b": (0,)})
    ledger.record("a", (0, 1))
    assert ledger.unfilled == ("b[0]",)
    ledger.record("b", ("0",))
    assert ledger.unfilled == ("b[0]",)


# L05
@pytest.mark.parametrize("reason", ["derived", "owned by init"])
def test_exempt_shell_may_stay_empty_but_not_be_filled_twice(reason: str) -> None:
    model = Attention()
    exempt_slots(model.norm.weight, reason)
    assert exemption(model.norm.weight) == reason
    ledger = SlotLedger.of(model)
    ledger.record("qkv_proj.weight", ("q", "k", "v"))
    ledger.record("scale", (None,))
    ledger.check()
    ledger.record("norm.weight", (None,))
    ledger.check()
    ledger.record("norm.weight", (None,))
    with pytest.raises(SlotsError, match=r"norm\.weight"):
        ledger.check()


def test_tied_parameter_counts_once_under_its_first_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert slots_of(model) == {"embedding.weight": (None,)}


def test_ledger_shows_the_first_of_many_slots_and_lists_all() -> None:
    ledger = SlotLedger({f"shell{number}": (None,) for number in range(30)})
    with pytest.raises(SlotsError, match=r"30 slots were filled by nothing: shell0, .*shell19 and 10 more") as caught:
        ledger.check()
    assert len(ledger.unfilled) == 30
    assert caught.value.facts["unfilled"] == list(ledger.unfilled)
