"""Learns where a weight loader puts every checkpoint element, by running it once on meta tensors.

The loader is given checkpoint tensors without storage. A dispatch mode sees each operator: a copy from a checkpoint
tensor into a shell is recorded and not executed, a fill likewise; views need no handling, since torch keeps offset,
shape and strides through any chain of them. No shell byte changes.

What cannot be known is *opaque* and never guessed: a source that was computed, a checkpoint tensor that the loader
wrote to, values taken for those of another dtype, a shell that was read back, rebound or written by another operator.
An opaque shell goes through the ordinary loader, with all checkpoint tensors that feed it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.transfer.coverage import Coverage
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.provenance import NOTHING, Number, Origins, Provenance, tensors_in, written_by
from weightwire.transfer.regions import Region
from weightwire.transfer.shell_memory import ShellGroup, ShellMemory, region_of, storage_key
from weightwire.transfer.traces import Trace, TracedCopy, TracedFill

__all__ = ["LoadWeights", "Trace", "TracedCopy", "TracedFill", "trace_placement"]

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_READS_VALUES = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


def trace_placement(
    load_weights: LoadWeights, shells: Mapping[str, torch.Tensor], checkpoint: Iterable[CheckpointSpec]
) -> Trace:
    """Run a loader without data, and record what it does.

    Args:
        load_weights: Takes `(name, tensor)` pairs; must not start threads, whose writes nobody sees.
        shells: Parameters and buffers by runtime name, on any device, meta included. Several may share memory. A
            mapping that looks its tensors up anew shows parameters that the loader replaced by others as opaque; in a
            dict these are uncovered.
        checkpoint: Names, dtypes and shapes; these tensors are handed over on the meta device.

    Raises:
        PlacementError: If the loader asks for a value, which does not exist here, or if a shell is no plain tensor.
        LoadError: What the loader itself raises.
    """
    recorder = _Recorder(shells, checkpoint)
    try:
        with recorder:
            load_weights(recorder.feed())
        return recorder.finish()
    except (RuntimeError, TypeError) as error:
        # Torch's own ways of saying that a meta tensor has no data.
        turn = recorder.turn
        subject = "loader" if turn is None else f"checkpoint tensor {turn!r}: the loader"
        raise PlacementError(
            f"{subject} raised {type(error).__name__}, expected a loader that runs without data: {error}", tensor=turn
        ) from error
    finally:
        recorder.restore()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates no base class hook
    """Sees every operator of the loader.

    Attributes:
        turn: The checkpoint tensor that was handed over last, while there are more to come.
    """

    def __init__(self, shells: Mapping[str, torch.Tensor], checkpoint: Iterable[CheckpointSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.turn: str | None = None
        self._shells = shells
        self._memory = ShellMemory(shells)
        self._checkpoint = [(spec.name, _stand_in(spec)) for spec in checkpoint]
        self._known = Provenance(self._memory, self._checkpoint)
        self._events: list[tuple[ShellGroup, TracedCopy | TracedFill]] = []
        self._used: set[str] = set()
        self._looked_at: set[ShellGroup] = set()
        self._handlers: dict[torch._ops.OpOverload, _Handler] = {
            _aten.copy_.default: self._copy,
            _aten._to_copy.default: self._convert,
            _aten.scalar_tensor.default: self._make_number,
            **dict.fromkeys(_FILLS, self._fill),
            **dict.fromkeys(_READS_VALUES, self._read_value),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and torch would import its compiler, which takes a second, to say so."""
        return False

    def feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checkpoint:
            self.turn = name
            self._used.add(name)
            yield name, tensor
        self.turn = None

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        return handler(func, args, kwargs or {})

    def _handler(self, func: torch._ops.OpOverload) -> _Handler:
        # Without autograd's keys, in inference mode, operators arrive that are otherwise taken apart before.
        if func._can_decompose():
            return self._decompose
        return self._view if func.is_view else self._run

    def _decompose(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        with self:
            return func.decompose(*args, **kwargs)

    # -- Writes that can be recorded --

    def _copy(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        target, source = args[:2]
        assert isinstance(target, torch.Tensor)
        assert isinstance(source, torch.Tensor)
        if not self._memory.has(target):
            return self._run(func, args, kwargs)
        groups = self._memory.touched(target) if target.numel() else ()
        found = self._known.source(source)
        if found is None:
            number = self._known.number(source)
            if number is None:
                origins = self._known.origins((source,))
                self._refuse(groups, "computed: the copied tensor is not a view of a checkpoint tensor", origins)
            else:
                self._record_fill(target, number, groups)
            return target
        name, stored = found
        reason = _why_no_copy(target, source, stored, groups)
        if reason is not None:
            self._refuse(groups, reason, Origins(names=frozenset((name,))))
        for group in groups if reason is None else ():
            event = TracedCopy(
                shell=group.name_at(target),
                target=region_of(target),
                name=name,
                source=region_of(source if source.shape == target.shape else source.expand(target.shape)),
                is_cast=source.dtype != target.dtype,
            )
            group.is_written = True
            group.fed.add(name)
            if self.turn is not None:
                group.fed.add(self.turn)
            self._events.append((group, event))
        return target

    def _fill(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        target, value = args[0], 0 if len(args) == 1 else args[1]
        assert isinstance(target, torch.Tensor)
        if not self._memory.has(target):
            return self._run(func, args, kwargs)
        groups = self._memory.touched(target) if target.numel() else ()
        number = self._known.number(value) if isinstance(value, torch.Tensor) else value
        if number is None:
            self._refuse(groups, "computed: filled with the value of a tensor", self._known.origins(tensors_in(value)))
        else:
            self._record_fill(target, number, groups)
        return target

    def _record_fill(self, target: torch.Tensor, value: object, groups: Sequence[ShellGroup]) -> None:
        reason = _why_no_fill(target, value, groups)
        if reason is not None:
            self._refuse(groups, reason, NOTHING)
            return
        assert isinstance(value, Number)
        for group in groups:
            region = region_of(target) if len(groups) == 1 else group.run_of(target)
            self._in_turn(group, NOTHING)
            self._events.append((group, TracedFill(shell=group.name_at(target), target=region, value=float(value))))

    # -- All other operators --

    def _view(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        """Tensors are known by their storages, so that a view needs nothing; some operators may copy instead."""
        result, of = func(*args, **kwargs), args[0]
        if isinstance(result, torch.Tensor) and isinstance(of, torch.Tensor) and storage_key(result) == storage_key(of):
            return result
        return self._computed(result, (args, kwargs))

    def _convert(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        """A new dtype, device or both. Where only the device changes, elements stay the same."""
        source = args[0]
        assert isinstance(source, torch.Tensor)
        if not self._known.is_known(source):
            return func(*args, **kwargs)
        if kwargs.get("dtype") in (None, source.dtype) and not self._memory.has(source):
            return source
        return self._run(func, args, {**kwargs, "device": torch.device("meta"), "pin_memory": None})

    def _make_number(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        result = func(*args, **kwargs)
        # For some dtypes torch makes no scalars where they have data.
        with contextlib.suppress(RuntimeError):
            if isinstance(result, torch.Tensor) and result.is_meta:
                # Rounded to the dtype, as it is where scalars have data.
                self._known.note_number(result, func(*args, **{**kwargs, "device": torch.device("cpu")}).item())
        return result

    def _read_value(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        inputs = list(tensors_in((args, kwargs)))
        if any(self._known.is_known(tensor) and not self._is_constant(tensor) for tensor in inputs):
            names = sorted(self._known.origins(inputs).names)
            raise PlacementError(
                f"checkpoint tensors {names}: the loader asks for a value ({func}) of them or of a shell, expected "
                "only views and copies; it cannot be traced",
                tensor=next(iter(names), self.turn),
            )
        return func(*args, **kwargs)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a shell that holds what construction gave it, such as a map of experts."""
        if tensor.is_meta or not self._memory.has(tensor):
            return False
        groups = self._memory.touched(tensor)
        self._looked_at.update(groups)
        return not any(group.is_written for group in groups)

    def _run(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        """Any other operator: executed, unless it would write to a shell; what comes out of it is computed."""
        inputs = list(tensors_in((args, kwargs)))
        if not any(self._known.is_known(tensor) for tensor in inputs):
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs) if func._schema.is_mutable else []
        for tensor in written:
            if self._memory.has(tensor):
                others = self._known.origins(other for other in inputs if other is not tensor)
                self._refuse(self._memory.touched(tensor), f"written by {func}", others)
            else:
                self._known.note_computed(tensor, self._known.origins(inputs))
        # Shells stay as they are; into real memory of the loader's own there is nothing real to write.
        if any(self._memory.has(tensor) or not tensor.is_meta for tensor in written):
            return written[0] if func._schema.returns else None
        return self._computed(self._run_without_data(func, args, kwargs), inputs)

    def _run_without_data(self, func: torch._ops.OpOverload, args: _Args, kwargs: _Kwargs) -> object:
        """What comes out has no more data than what went in, so that the shells' own is not even looked at."""

        def called(which: Callable[[torch.Tensor], bool]) -> object:
            given = {name: _on_meta(value, which) for name, value in kwargs.items()}
            return func(*(_on_meta(value, which) for value in args), **given)

        try:
            return called(self._memory.has)
        except (RuntimeError, ValueError):
            # Torch mixes no devices, and the loader's own tensors are real.
            return called(_has_data)

    def _computed(self, result: object, inputs: object) -> object:
        """Note where the results of an operator come from."""
        found = list(tensors_in(inputs))
        if any(self._known.is_known(tensor) for tensor in found):
            origins = self._known.origins(found)
            for tensor in tensors_in(result):
                if not self._known.is_known(tensor):
                    self._known.note_computed(tensor, origins)
        return result

    # -- What follows for the shells --

    def _refuse(self, groups: Sequence[ShellGroup], reason: str, origins: Origins) -> None:
        for group in groups:
            group.opaque = group.opaque or reason
            self._in_turn(group, origins)
        for group in origins.shells if groups else ():
            # What the other shell gets depends on when it is read: a replay would have filled it to the end.
            group.opaque = group.opaque or "read back: a value of it reaches a shell"

    def _in_turn(self, group: ShellGroup, origins: Origins) -> None:
        """Note what has to be given to the loader for it to write here again."""
        group.is_written = True
        group.fed.update(origins.names)
        if self.turn is not None:
            group.fed.add(self.turn)
            return
        group.is_always_written = True
        if origins.shells or not origins.names:
            # A loader that has collected its tensors may do so for the sake of any of them.
            group.fed.update(self._used)

    def restore(self) -> None:
        """Give parameters that were rebound their memory back."""
        self._memory.restore(self._shells)
        # They refer to this object, which would keep every checkpoint tensor until the next collection of garbage.
        self._handlers.clear()

    def finish(self) -> Trace:
        self._find_rebound()
        self._check_looked_at()
        groups, names = list(self._memory.groups()), list(self._memory.names())
        coverage = self._coverage(groups)
        twice = {group for name, group in names if coverage[name].repeated}
        return Trace(
            events=tuple(event for group, event in self._events if group.opaque is None),
            opaque={name: group.opaque for name, group in names if group.opaque is not None},
            feeds={name: frozenset(group.fed) for name, group in names if group.opaque is not None},
            ordinary=_ordinary([group for group in groups if group.opaque is not None], twice),
            coverage={name: coverage[name] for name, _ in names},
            used=frozenset(self._used),
        )

    def _find_rebound(self) -> None:
        for name in self._memory.moved(self._shells):
            group, shell = self._memory.group_of(name), self._shells.get(name)
            group.is_written = True
            group.opaque = group.opaque or "rebound: the parameter has other memory now"
            if shell is not None and self._known.is_known(shell):
                group.fed.update(self._known.origins((shell,)).names)
            else:
                # Nobody knows in whose turn that was.
                group.fed.update(self._used)

    def _check_looked_at(self) -> None:
        for group in self._looked_at:
            if group.is_written:
                name = next(iter(group.shells))
                raise PlacementError(
                    f"shell {name!r}: the loader reads a value of it and writes to it, expected that it does one of "
                    "both; it cannot be traced",
                    tensor=name,
                )

    def _coverage(self, groups: Iterable[ShellGroup]) -> dict[str, Coverage]:
        written: defaultdict[ShellGroup, list[Region]] = defaultdict(list)
        for group, event in self._events:
            written[group].append(event.target)
        return {name: found for group in groups for name, found in group.count(written[group])}


_Args = tuple[object, ...]
_Kwargs = dict[str, object]
_Handler = Callable[[torch._ops.OpOverload, _Args, _Kwargs], object]


def _stand_in(spec: CheckpointSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=dtype_named(spec.dtype).torch_dtype, device="meta")


def _is_mirrored(view: torch.Tensor) -> bool:
    """Whether the elements are the negatives or conjugates of those in the storage."""
    return view.is_neg() or view.is_conj()


def _why_no_copy(
    target: torch.Tensor, source: torch.Tensor, stored: torch.dtype, groups: Sequence[ShellGroup]
) -> str | None:
    """What keeps a copy into shells from being recorded, if anything does."""
    for group in groups:
        # Bits that both sides take for those of another dtype are moved as they are.
        is_moved = source.dtype == target.dtype and stored == group.dtype and source.itemsize == stored.itemsize
        is_as_stored = source.dtype == stored and target.dtype == group.dtype
        if not (is_moved or is_as_stored) or _is_mirrored(source) or _is_mirrored(target):
            return "reinterpreted: the copy sees one side as another dtype"
    return _why_no_write(target, groups)


def _why_no_write(target: torch.Tensor, groups: Sequence[ShellGroup]) -> str | None:
    if torch._debug_has_internal_overlap(target) and region_of(target).overlaps_itself:
        return "overlapping: some element is written more than once at the same time"
    if len(groups) > 1:
        return "several shells: one write reaches into more than one of them"
    return None


def _why_no_fill(target: torch.Tensor, value: object, groups: Sequence[ShellGroup]) -> str | None:
    """What keeps a fill of shells from being recorded, if anything does."""
    if not isinstance(value, Number) or (isinstance(value, int) and int(float(value)) != value):
        return f"filled with {value}, which is no float"
    for group in groups:
        is_as_stored = target.dtype == group.dtype
        # Zeros of all dtypes are zero bytes.
        is_zero = str(value) in ("0", "0.0", "False") and group.dtype and target.itemsize == group.dtype.itemsize
        if not (is_as_stored or is_zero) or _is_mirrored(target):
            return "reinterpreted: the fill sees the shell as another dtype"
    if len(groups) > 1 and region_of(target).is_contiguous:
        return None
    return _why_no_write(target, groups)


def _ordinary(opaque: Sequence[ShellGroup], twice: set[ShellGroup]) -> frozenset[str]:
    """The feeds of opaque shells, and whatever else is needed to leave other shells as they were.

    A shell that is written twice is right only if all its writes are made again, in their order.
    """
    names = frozenset[str]().union(*(group.fed for group in opaque))
    while again := {group for group in twice if opaque and (group.is_always_written or names & group.fed)}:
        names = names.union(*(group.fed for group in again))
        twice = twice - again
    return names


def _has_data(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta


def _on_meta(value: object, which: Callable[[torch.Tensor], bool]) -> object:
    """The same argument, with tensors on the meta device in the place of some."""
    if isinstance(value, torch.Tensor) and which(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(item, which) for item in value)
    return value
