"""A load that knows beforehand where every element goes, so that nothing else is read.

The loaders run once on meta tensors (`tracing`). Then names, slots and elements are checked, and only then are the
regions of this rank read, straight into the shells, by several threads and in the files' order. Tensors whose loaders
look at values, or whose way could not be traced, go through the ordinary loaders afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.regions_on_disk import DEFAULT_THREADS, DiskCopy, read_copies
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.control import Control
from weightwire.transfer.errors import SlotsError
from weightwire.transfer.loading.base_loaders import as_bytes_if_packed, loader_of
from weightwire.transfer.loading.halves import check_halves, forget_halves
from weightwire.transfer.loading.landing import Landing, land_all, look_at_optional
from weightwire.transfer.loading.ledger import SlotLedger, required_slots
from weightwire.transfer.loading.loop import Described, UnexpectedPolicy, account, check_report, walk_tree
from weightwire.transfer.loading.module_shells import shell_at, shells_of
from weightwire.transfer.loading.outcomes import LoadReport, NameOutcome, Outcome
from weightwire.transfer.loading.slots import is_traceable
from weightwire.transfer.loading.tied_heads import warn_of_own_head
from weightwire.transfer.loading.ties import Given, check_agreement
from weightwire.transfer.loading.walker import Pair
from weightwire.transfer.tracing import Trace, TracedCopy, TracedFill, trace_placement

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLoad:
    """How the shells of one rank were filled.

    Attributes:
        report: The outcome of every checkpoint name.
        bytes_read: Bytes of checkpoint elements that were read; a cold disk reads whole pages around them.
        num_loaded: Shells that hold checkpoint values.
        num_constant: Shells that hold padding alone.
        seconds: Of the whole.
        seconds_trace: Until the first byte was read.
    """

    report: LoadReport
    bytes_read: int
    num_loaded: int
    num_constant: int
    seconds: float
    seconds_trace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Options that stay the same throughout one load."""

    central: bool
    unexpected: UnexpectedPolicy
    threads: int
    on_bytes: Callable[[int], None]


def load_direct(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    control: Control,
    central: bool = False,
    unexpected: UnexpectedPolicy = "refuse",
    threads: int = DEFAULT_THREADS,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> DirectLoad:
    """Fill every shell of a model from a safetensors checkpoint, reading only what this rank holds.

    Args:
        model: See `load_weights`; its shells have memory (CPU or device).
        checkpoint: Open.
        control: Deadline and stop button.
        central: See `load_weights`.
        unexpected: See `load_weights`.
        threads: Reads at the same time.
        on_bytes: Called with the bytes of each step that is done, one call at a time.

    Raises:
        PlacementError: If a tensor does not fit its shell; nothing was written, except where a loader that looks at
            values says so: it is asked when all other shells are filled.
        NamesError: If names have no place; nothing was written.
        SlotsError: If a slot or an element has no origin, or memory that the module has under two names would be
            given two values; nothing was written.
        AdmissionError: If a tensor that has to be looked at does not fit into memory.
        CheckpointError: If the files do not deliver what their headers say.
    """
    began = time.monotonic()
    load = _Loading(
        model, checkpoint, control, _Way(central=central, unexpected=unexpected, threads=threads, on_bytes=on_bytes)
    )
    load.trace()
    load.check()
    traced = time.monotonic()
    bytes_read = load.read()
    constant = load.constant_shells()
    return DirectLoad(
        report=load.report,
        bytes_read=bytes_read,
        num_loaded=len(load.shells) - len(constant) - load.num_exempt,
        num_constant=len(constant),
        seconds=time.monotonic() - began,
        seconds_trace=traced - began,
    )


class _Loading:
    """One load on its way."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, control: Control, way: _Way) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.control = control
        self.way = way
        self.shells = shells_of(model)
        self.required = required_slots(self.shells)
        self.num_exempt = len(self.shells) - len(self.required)
        self.ledger = SlotLedger(self.required)
        self.report = LoadReport(outcomes=())
        self.found: Trace
        # Checkpoint names that go through the loaders once more, with values, and the shells that wait for that.
        self.by_value = set[str]()
        self.put_off = set[str]()
        # Checkpoint and runtime name of two tensors that may fill the same memory.
        self.shared = list[tuple[tuple[str, str], tuple[str, str]]]()

    def trace(self) -> None:
        self.found = trace_placement(self._run, self.shells, specs_of(self.checkpoint))
        if self.found.opaque:
            self.by_value |= self.found.ordinary
            self.put_off |= self.found.opaque.keys()

    def _run(self, pairs: Iterable[Pair]) -> None:
        self.report = account(self._noting_shared(self._land(pairs, by_value=False)), self.ledger)

    def _noting_shared(self, landings: Iterable[Landing]) -> Iterator[Landing]:
        names = dict[str, str]()
        for landing in landings:
            target = landing.outcome.target
            if target is not None:
                names[target] = landing.outcome.name
                self.shared += [((names[other], other), (names[target], target)) for other in landing.shared_with]
            yield landing

    def _land(self, pairs: Iterable[Pair], *, by_value: bool) -> Iterator[Landing]:
        """The loaders themselves; on the first round, the ones that look at values are put off."""
        if self.way.central or not isinstance(self.model, Described):
            yield from walk_tree(self.model, pairs)
            return
        resolver = self.model.resolver()
        for name, tensor in pairs:
            outcomes = resolver.resolve_all(name)
            targets = tuple(found.target for found in outcomes if found.outcome is Outcome.PLACED and found.target)
            if by_value or all(is_traceable(loader_of(self.shells[target])) for target in targets):
                yield land_all(outcomes, tensor, self.shells.__getitem__)
            else:
                self.by_value.add(name)
                self.put_off.update(targets)
                yield Landing(outcome=outcomes[0])

    def check(self) -> None:
        """Everything that can be known before a byte is read into a shell."""
        outcomes = [self._looked_at(outcome) for outcome in self.report.outcomes]
        self.report = replace(self.report, outcomes=tuple(outcomes))
        check_report(self.report, self.model, unexpected=self.way.unexpected)
        self.ledger.without(self.put_off).check()
        _check_elements(self.found, self.required.keys() - self.put_off)
        for pair in self.shared:
            self._check_agreement(*pair)
        if isinstance(self.model, Described):
            warn_of_own_head(self.checkpoint, self.model.tables)

    def _check_agreement(self, *pair: tuple[str, str]) -> None:
        """What one piece of memory is given under two names has to be the same."""
        needed = 2 * sum(self.checkpoint.entries[name].nbytes for name, _ in pair)
        check_memory(needed, purpose=f"comparing the values of {' and '.join(quoted(name) for name, _ in pair)}")
        one, other = (
            Given(name=name, shell=shell_at(self.model, target), tensor=self.checkpoint.read_tensor(name))
            for name, target in pair
        )
        check_agreement(one, other)

    def _looked_at(self, outcome: NameOutcome) -> NameOutcome:
        """An optional tensor is left out only for what its values are; the trace saw none."""
        if outcome.outcome is not Outcome.SKIPPED_OPTIONAL:
            return outcome
        needed = self.checkpoint.entries[outcome.name].nbytes
        check_memory(needed, purpose=f"looking at the values of {quoted(outcome.name)}")
        return look_at_optional(outcome, self.checkpoint.read_tensor(outcome.name)).outcome

    def read(self) -> int:
        """Write the shells; returns the bytes of elements that were read."""
        again = set(self.found.overwritten)
        for event in self.found.events:
            if isinstance(event, TracedFill) and event.shell not in again:
                as_bytes_if_packed(self._view(event)).fill_(event.value)
        copies = (
            DiskCopy(name=event.name, source=event.source, target=self._view(event))
            for event in self.found.copies
            if event.shell not in again and event.name not in self.by_value
        )
        count = self._read(copies)
        for event in self.found.events:
            # Writes to the same elements: in the loader's own order, one after the other.
            if event.shell in again and isinstance(event, TracedFill):
                as_bytes_if_packed(self._view(event)).fill_(event.value)
            elif event.shell in again and isinstance(event, TracedCopy) and event.name not in self.by_value:
                count += self._read([DiskCopy(name=event.name, source=event.source, target=self._view(event))])
        return count + self._load_by_value()

    def _read(self, copies: Iterable[DiskCopy]) -> int:
        way = self.way
        return read_copies(self.checkpoint, copies, control=self.control, threads=way.threads, on_bytes=way.on_bytes)

    def _load_by_value(self) -> int:
        """The rest by the ordinary loaders, one whole tensor at a time."""
        if not self.put_off:
            return 0
        pairs = self.checkpoint.iterate(self.by_value.__contains__)
        forget_halves(self.shells)
        ledger = SlotLedger({name: slots for name, slots in self.required.items() if name in self.put_off})
        account(self._land(pairs, by_value=True), ledger)
        check_halves(self.shells)
        ledger.check()
        return sum(self.checkpoint.entries[name].nbytes for name in self.by_value)

    def _view(self, event: TracedCopy | TracedFill) -> torch.Tensor:
        region = event.target
        return self.shells[event.shell].detach().as_strided(region.shape, region.strides, region.offset)

    def constant_shells(self) -> frozenset[str]:
        """Shells into which nothing but fills went: the ranks beyond the end of an uneven cut."""
        copied = {event.shell for event in self.found.copies if event.source.numel}
        filled = {event.shell for event in self.found.events if isinstance(event, TracedFill)}
        return frozenset(filled - copied - self.put_off)


def _check_elements(trace: Trace, shells: Iterable[str]) -> None:
    """Raises:
    SlotsError: If an element of a shell is written by nothing.
    """
    partly = [
        f"{name} ({trace.coverage[name].missing} of {trace.coverage[name].elements} elements)"
        for name in sorted(shells)
        if trace.coverage[name].missing
    ]
    if partly:
        more = f" and {len(partly) - _MOST_SHOWN} more" if len(partly) > _MOST_SHOWN else ""
        raise SlotsError(
            f"{len(partly)} shells would be left in part: {', '.join(partly[:_MOST_SHOWN])}{more}",
            unfilled=partly,
            diagnostic="D03",
        )
