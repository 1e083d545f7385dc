"""Small steps behind a load, each with what it reads and writes: first what is derived from placed parameters, then
what turns parameters into forms of kernels.

A step is a function from tensors to tensors. It never writes: whoever runs it binds the results into the memory that
is there, so running it again gives the same bytes in the same place (L147, L149).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.binding import bind_or_assign
from weightwire.transfer.loading.module_shells import own_shell, owner_of, replace_shell
from weightwire.transfer.loading.slots import attach_loader, attached_loader

Phase: TypeAlias = Literal["derive", "finish"]
Tensors: TypeAlias = Mapping[str, torch.Tensor]
_PHASES: tuple[Phase, ...] = ("derive", "finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """One thing that is done to a module.

    Attributes:
        name: Of the step, for messages: what becomes of what.
        phase: `derive` makes tensors of placed parameters; `finish` gives parameters the form that a kernel wants.
            All of the first come before any of the second, which may leave nothing to derive from (L133).
        inputs: Runtime names that it reads.
        outputs: Runtime names that it writes: parameters, or tensors that are plain attributes of their modules.
        run: From the inputs to the outputs, by those names, in new memory.
        replaces: Whether its results may have other shapes or dtypes than the parameters that they replace.
    """

    name: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Tensors], Tensors]
    replaces: bool = False


def finish_groups(steps: Iterable[FinishStep]) -> tuple[frozenset[str], ...]:
    """Names that belong together because one step reads or writes them together: they come from one source (L181)."""
    groups: list[set[str]] = []
    for step in steps:
        joined, apart = {*step.inputs, *step.outputs}, list[set[str]]()
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return tuple(frozenset(group) for group in groups)


class Finisher:
    """Runs the steps of one tree, and knows which of its parameters are no longer as they were placed."""

    def __init__(
        self, model: nn.Module, steps: Sequence[FinishStep], *, device: torch.device | str | None = None
    ) -> None:
        """
        Args:
            model: Holds all inputs; outputs are written there.
            steps: In the order in which those of one phase run.
            device: Where steps compute; None where each input lies. Parameters that are parked elsewhere stay there,
                and so do the results (L135).
        """
        self._model = model
        self._steps = tuple(sorted(steps, key=lambda step: _PHASES.index(step.phase)))
        self._device = device
        self._final = set[str]()

    @property
    def steps(self) -> tuple[FinishStep, ...]:
        """In the order in which they run."""
        return self._steps

    def run(self, touched: Collection[str] | None = None) -> tuple[str, ...]:
        """Run every step, or those that read what was written.

        Args:
            touched: Runtime names of parameters that were loaded again (L134); None for all.

        Returns:
            Names of the steps that ran.

        Raises:
            FinishError: If an input is not there, has no data, or is in the form of a kernel already, and so nothing
                can be made of it. Steps before have run.
        """
        chosen = [step for step in self._steps if self._is_due(step, touched)]
        for step in chosen:
            self._check_placed(step)
        for step in chosen:
            self._run(step)
        return tuple(step.name for step in chosen)

    def _is_due(self, step: FinishStep, touched: Collection[str] | None) -> bool:
        if touched is not None:
            return not set(touched).isdisjoint(step.inputs)
        # What has its final form is not given it twice (L171).
        return step.phase == "derive" or not self._final.intersection(step.inputs)

    def _check_placed(self, step: FinishStep) -> None:
        final = sorted(self._final.intersection(step.inputs))
        if final:
            raise FinishError(
                f"step {step.name!r}: {final[0]!r} is in its final form, expected it as it was placed", tensor=final[0]
            )

    def _run(self, step: FinishStep) -> None:
        given = {name: self._input(step, name) for name in step.inputs}
        found = step.run(given)
        if found.keys() - set(step.outputs):
            raise FinishError(f"step {step.name!r}: gave {sorted(found)}, expected nothing but {sorted(step.outputs)}")
        home = next((tensor_at(self._model, name) for name in step.inputs), None)
        for name, tensor in found.items():
            self._bind(step, name, tensor if home is None else tensor.to(home.device))
        if step.phase == "finish":
            self._final.update(name for name in found if name in step.inputs)

    def _input(self, step: FinishStep, name: str) -> torch.Tensor:
        tensor = tensor_at(self._model, name)
        if tensor is None or tensor.is_meta:
            is_what = "is not there" if tensor is None else "has no data"
            raise FinishError(f"step {step.name!r}: {name!r} {is_what}, expected it filled", tensor=name)
        return tensor.detach() if self._device is None else tensor.detach().to(self._device)

    def _bind(self, step: FinishStep, name: str, source: torch.Tensor) -> None:
        module, leaf = owner_of(self._model, name)
        shell = own_shell(module, leaf)
        if shell is not None and step.replaces and (shell.shape != source.shape or shell.dtype != source.dtype):
            made = nn.Parameter(source, requires_grad=False) if isinstance(shell, nn.Parameter) else source
            loader = attached_loader(shell)
            if loader is not None:
                attach_loader(made, loader)
            replace_shell(self._model, name, made)
        else:
            bound = bind_or_assign(tensor_at(self._model, name), source, name=name)
            if shell is None:
                object.__setattr__(module, leaf, bound)


def tensor_at(model: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter, a buffer, or a tensor that is a plain attribute; None where there is none."""
    module, leaf = owner_of(model, name)
    found = own_shell(module, leaf)
    if found is not None:
        return found
    plain = vars(module).get(leaf)
    return plain if isinstance(plain, torch.Tensor) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """State that no checkpoint tensor fills.

    Attributes:
        name: Runtime name.
        tensor: As it is.
        step: What makes it; None for one that has to be sent, since nobody can make it again.
    """

    name: str
    tensor: torch.Tensor
    step: str | None


def derived_state(model: nn.Module, steps: Iterable[FinishStep]) -> tuple[Derived, ...]:
    """Every buffer that is not saved, and every tensor that is a plain attribute, by name (L184)."""
    made_by = {name: step.name for step in steps for name in step.outputs}
    return tuple(Derived(name=name, tensor=tensor, step=made_by.get(name)) for name, tensor in _beyond_shells(model))


def _beyond_shells(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for leaf in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[leaf]
            if buffer is not None:
                yield prefix + leaf, buffer
        yield from ((prefix + leaf, value) for leaf, value in vars(module).items() if isinstance(value, torch.Tensor))


def derived_bytes(model: nn.Module, steps: Iterable[FinishStep]) -> int:
    """Memory that derivation takes beside the parameters, told without any: the steps run on meta (L85, L151)."""
    total = 0
    for step in steps:
        inputs = {name: tensor_at(model, name) for name in step.inputs}
        found = step.run({name: tensor.detach().to("meta") for name, tensor in inputs.items() if tensor is not None})
        total += sum(tensor.nbytes for name, tensor in found.items() if name not in step.inputs)
    return total
