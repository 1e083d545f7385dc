"""Any checkpoint, as it is: one shell for each of its tensors, under its own name, whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.base_loaders import WholeLoader
from weightwire.transfer.loading.resolver import NameTables
from weightwire.transfer.loading.slots import attach_loader
from weightwire.transfer.loading.stacked import StackedTable
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.models.building import memory_phase
from weightwire.transfer.models.tree import THE_ONLY_RANK, ParameterTree

# Every name is a shell's own.
_TABLES = NameTables(layers=range(0), num_layers=0, stacked=StackedTable(()), optional_suffixes=())


class PlainTree(ParameterTree):
    """A flat tree: names have dots, and no modules between them, so that any two names go together."""

    config = None
    placement = None
    place = THE_ONLY_RANK

    def __init__(self, specs: Iterable[CheckpointSpec]) -> None:
        super().__init__()
        for spec in specs:
            shell = torch.empty(spec.shape, dtype=dtype_named(spec.dtype).torch_dtype)
            parameter = nn.Parameter(shell, requires_grad=False)
            attach_loader(parameter, WholeLoader())
            self._parameters[spec.name] = parameter
        self.seal(_TABLES)


def build_plain(specs: Iterable[CheckpointSpec], *, device: torch.device | str = "cpu") -> PlainTree:
    """Allocate shells for a checkpoint.

    Args:
        specs: Of all its tensors.
        device: Where the shells lie.

    Raises:
        ConfigError: If a name occurs twice.
        AdmissionError: If there is not enough memory.
    """
    listed = list(specs)
    if len({spec.name for spec in listed}) != len(listed):
        raise ConfigError(f"checkpoint: {len(listed)} tensors do not have as many names", field="name")
    with memory_phase("shells"), torch.device(device):
        return PlainTree(listed)
