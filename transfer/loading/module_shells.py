"""The shells of a module by name: all of them once, one of them, or another tensor in the place of one."""

from __future__ import annotations

import torch
from torch import nn


def shells_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers, by name; a tensor with several names once, under its first.

    Non-persistent buffers never come from a checkpoint: torch does not save them either.
    """
    shells: dict[str, torch.Tensor] = dict(model.named_parameters())
    passing = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    shells.update((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
    return shells


def own_shell(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer of the module itself."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def shell_at(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of that name, as the tree has it now.

    Raises:
        AttributeError: If there is none.
    """
    shell = own_shell(*owner_of(model, name))
    if shell is None:
        raise AttributeError(f"{type(model).__name__} has no tensor {name!r}")
    return shell


def has_shell(model: nn.Module, name: str) -> bool:
    """Whether there is a parameter or buffer of that name."""
    try:
        shell_at(model, name)
    except AttributeError:
        return False
    return True


def replace_shell(model: nn.Module, name: str, shell: torch.Tensor) -> None:
    """Put another tensor in the place of a parameter, if it is one, or of a buffer.

    Raises:
        AttributeError: If there is no module to hold it.
    """
    module, attribute = owner_of(model, name)
    if isinstance(shell, nn.Parameter):
        module._parameters[attribute] = shell
    else:
        module._buffers[attribute] = shell


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and its name there.

    Raises:
        AttributeError: If there is no such module.
    """
    # A plain tree is flat: its names have dots and no modules between them.
    if name in model._parameters or name in model._buffers:
        return model, name
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
