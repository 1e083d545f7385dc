from __future__ import annotations

import pytest
import torch
from torch import nn

from weightwire.transfer.errors import AdmissionError
from weightwire.transfer.loading.ledger import exempt_slots, exemption
from weightwire.transfer.loading.slots import attach_loader, attached_loader
from weightwire.transfer.models.building import (
    AliasTable,
    MemoryAccount,
    build_defaults,
    materialise,
    memory_phase,
    new_parameter,
    planned_bytes,
)


class Failing(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))
        raise error


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = new_parameter(4, 2)
        self.scale = new_parameter(3, dtype=torch.float32)


class Tied(nn.Module):
    """Head and embedding are one, and a buffer looks at the second row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("row", self.embedding.weight.detach()[1])


# L84
def test_shells_take_the_device_and_the_dtype_of_the_build() -> None:
    with build_defaults("meta", torch.bfloat16):
        model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2))
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.bfloat16)}
    assert torch.empty(1).dtype == torch.float32
    assert torch.empty(1).device.type == "cpu"


# L84
def test_defaults_come_back_after_an_exception() -> None:
    with pytest.raises(KeyError), build_defaults("meta", torch.bfloat16):
        Failing(KeyError("no"))
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"


# L85
def test_account_states_the_bytes_of_shells_before_anything_is_allocated() -> None:
    account = planned_bytes(Mixed, dtype=torch.bfloat16)
    assert account.shells_bytes == 28
    assert MemoryAccount(shells_bytes=28, post_process_bytes=2, transfer_bytes=3).total_bytes == 33


# L85
def test_account_counts_a_shared_storage_once() -> None:
    assert MemoryAccount.of(Tied()).shells_bytes == 4 * 2 * 4
    assert planned_bytes(Tied, dtype=torch.float32).shells_bytes == 4 * 2 * 4


# L85
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), id="Python has no memory"),
        pytest.param(torch.OutOfMemoryError("out"), id="the device has no memory"),
        pytest.param(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), id="torch has no host memory"),
    ],
)
def test_memory_error_names_the_phase(error: Exception) -> None:
    with pytest.raises(AdmissionError, match="shells") as caught, memory_phase("shells", needed_bytes=28):
        Failing(error)
    assert caught.value.facts["phase"] == "shells"
    assert caught.value.facts["needed_bytes"] == 28
    assert caught.value.facts["diagnostic"] == "D12"


# L85
def test_memory_phase_knows_the_error_of_a_real_allocation() -> None:
    with pytest.raises(AdmissionError), memory_phase("transfer"):
        torch.empty(1 << 60)


def test_memory_phase_leaves_other_errors_alone() -> None:
    with pytest.raises(RuntimeError, match="something else"), memory_phase("transfer"):
        raise RuntimeError("something else")


# L89
def test_ties_survive_materialising() -> None:
    with torch.device("meta"):
        model = Tied()
    materialise(model, "cpu")
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr() != 0


# L89
def test_ties_are_made_again_after_a_step_that_broke_them() -> None:
    with torch.device("meta"):
        model = Tied()
    aliases = AliasTable.of(model)
    assert aliases.names == {"head.weight": "embedding.weight"}
    model.to_empty(device="cpu")
    model.embedding.weight = nn.Parameter(torch.arange(8.0).view(4, 2))
    assert model.head.weight.data_ptr() != model.embedding.weight.data_ptr()
    aliases.retie(model)
    assert model.head.weight is model.embedding.weight
    row = model.get_buffer("row")
    assert row.tolist() == [2.0, 3.0]
    assert row.untyped_storage().data_ptr() == model.embedding.weight.untyped_storage().data_ptr()
    assert not isinstance(row, nn.Parameter)


class Whole:
    """A loader that is only carried around."""

    slots = (None,)

    def load(self, shell: torch.Tensor, tensor: torch.Tensor, slot: object, *, name: str) -> tuple[None]:
        raise AssertionError


def test_materialising_keeps_loaders_and_marks() -> None:
    with torch.device("meta"):
        model = Mixed()
    loader = Whole()
    attach_loader(model.weight, loader)
    exempt_slots(model.scale, "owned by init")
    materialise(model, "cpu")
    assert attached_loader(model.weight) is loader
    assert exemption(model.scale) == "owned by init"
    assert not model.weight.requires_grad
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_materialising_leaves_what_is_there_alone() -> None:
    model = Mixed()
    before = model.weight
    materialise(model, "cpu")
    assert model.weight is before


@pytest.mark.parametrize("shape", [(2**31, 2**31), (2**64, 1)], ids=["by its product", "by a side"])
def test_shell_whose_bytes_torch_cannot_count_is_refused_by_its_shape(shape: tuple[int, int]) -> None:
    with (
        build_defaults("meta", torch.float32),
        pytest.raises(AdmissionError, match=f"shape \\[{shape[0]}, {shape[1]}\\]"),
    ):
        new_parameter(*shape)
